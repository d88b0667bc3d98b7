from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from scalingnote.core.errors import DataError
from scalingnote.core.reports import markdown_text
from scalingnote.evaluate import measures
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.merge import comparison, merge_artifacts
from scalingnote.storage.artifact import Artifact, Draft

QUERIES = [f"q{number}" for number in range(60)]
INDEX = {"recall@10": 0.9, "recall@100": 0.9, "bytes_per_vector": 20.0}


def values(share: float, *measures: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(int(1000 * share))
    return {name: (random.random(len(QUERIES)) < share).astype(float) for name in measures}


def report(
    uri: str,
    methods: dict[str, dict[str, np.ndarray]],
    *,
    queries: list[str] = QUERIES,
    index: dict[str, float] = INDEX,
) -> Artifact:
    config = EvaluateConfig(recall_at=(10,))
    draft = Draft(uri, kind="report", config=config, parents={})
    entropies = {next(iter(methods)): np.ones(len(queries))}  # of towers alone
    draft.write_table("per_query.parquet", measures.per_query_table(methods, entropies, query_ids=queries))
    section = {"dataset": "shop", "num_documents": 9, "num_queries": len(queries), "simulated_clicks": False}
    section |= {"index": index, "seconds": {"train": 1.0}, "environment": {}}
    section |= {"methods": measures.means(methods)}
    section |= {"significance": measures.significance_section(methods, baseline=next(iter(methods)))}
    draft.write_json("report.json", section)
    return draft.commit(counts={})


def test_merged_methods_are_tested_against_the_first_baseline(tmp_path: Path):
    first = {"dual": values(0.9, "R@10", "nDCG@10"), "bm25": values(0.6, "R@10", "nDCG@10")}
    second = {"small": values(0.2, "R@10"), "dual": values(0.85, "R@10")}
    merged = merge_artifacts([[report(f"{tmp_path}/a", first)], [report(f"{tmp_path}/b", second)]])
    section = merged["significance"]
    assert section["baseline"] == "dual"
    # Holm's correction is over all methods of both reports; what only some have is not compared.
    rows = {"dual": first["dual"], "bm25": first["bm25"], "small": second["small"], "dual #2": second["dual"]}
    common = {name: {"R@10": row["R@10"]} for name, row in rows.items()}
    assert section == measures.significance_section(common, baseline="dual")
    lines = [line for line in markdown_text(comparison(merged)).splitlines() if line.startswith("| R@10")]
    difference = section["differences"]["small"]["R@10"]
    assert difference["p_holm"] < 0.001
    assert f"{difference['difference']:+.3f}, p < 0.001 ▼" in lines[-1]


def test_seeds_of_a_method_are_pooled_query_by_query(tmp_path: Path):
    rng = np.random.default_rng(0)
    seeds = [{"dual": {"R@10": rng.random(60)}, "bm25": {"R@10": np.arange(60) / 60}} for _ in range(3)]
    other = [{"small": {"R@10": rng.random(60) - 0.2}} for _ in range(3)]
    groups = [
        [report(f"{tmp_path}/{name}{n}", methods) for n, methods in enumerate(found)]
        for name, found in (("a", seeds), ("b", other))
    ]
    merged = merge_artifacts(groups)
    pooled = {
        "dual": np.mean([one["dual"]["R@10"] for one in seeds], axis=0),
        "bm25": np.arange(60) / 60,
        "small": np.mean([one["small"]["R@10"] for one in other], axis=0),
    }
    assert merged["seeds"] == 3
    for name, row in pooled.items():
        assert merged["methods"][name]["R@10"] == pytest.approx(row.mean())
    means = [one["dual"]["R@10"].mean() for one in seeds]
    assert merged["spread"]["dual"]["R@10"] == pytest.approx(np.std(means, ddof=1))
    assert merged["spread"]["bm25"]["R@10"] == pytest.approx(0, abs=1e-12)
    for name in ("bm25", "small"):
        found = merged["significance"]["differences"][name]["R@10"]
        assert found["p"] == pytest.approx(stats.ttest_rel(pooled[name], pooled["dual"]).pvalue)
    by_hand = sorted(merged["significance"]["differences"][name]["R@10"]["p"] for name in ("bm25", "small"))
    corrected = sorted(
        merged["significance"]["differences"][name]["R@10"]["p_holm"] for name in ("bm25", "small")
    )
    smallest = min(2 * by_hand[0], 1)
    assert corrected == pytest.approx([smallest, max(smallest, by_hand[1])])
    text = markdown_text(comparison(merged))
    assert f"± {merged['spread']['dual']['R@10']:.3f}" in text
    assert "Means over 3 trainings with different seeds" in text
    assert len(merged["index"]) == 2


def test_seeds_with_other_rows_are_no_seeds(tmp_path: Path):
    one, other = {"dual": values(0.9, "R@10")}, {"small": values(0.2, "R@10")}
    with pytest.raises(DataError, match="differ in rows of 'dual'"):
        merge_artifacts([[report(f"{tmp_path}/a", one), report(f"{tmp_path}/b", other)]])


def test_an_index_that_finds_the_same_keeps_its_row(tmp_path: Path):
    same, smaller = {"dual": values(0.9, "R@10")}, INDEX | {"bytes_per_vector": 10.0}
    merged = merge_artifacts(
        [[report(f"{tmp_path}/a", same)], [report(f"{tmp_path}/b", same, index=smaller)]]
    )
    assert [*merged["methods"]] == ["dual"]
    assert merged["index"] == {"dual": INDEX, "dual #2": smaller}


def test_one_report_keeps_what_it_says(tmp_path: Path):
    one = report(f"{tmp_path}/a", {"dual": values(0.9, "R@10"), "bm25": values(0.6, "R@10")})
    assert merge_artifacts([[one]])["significance"] == one.read_json("report.json")["significance"]


def test_other_queries_are_no_comparison(tmp_path: Path):
    one = {"dual": values(0.9, "R@10")}
    reports = [
        [report(f"{tmp_path}/a", one)],
        [report(f"{tmp_path}/b", one, queries=[f"other{number}" for number in range(60)])],
    ]
    with pytest.raises(DataError, match="different test queries"):
        merge_artifacts(reports)
