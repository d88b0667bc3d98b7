"""Contents of reports, and reports that are merged into one."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from scalingnote.core.errors import DataError
from scalingnote.core.reports import markdown_text, render
from scalingnote.evaluate import measures, pictures
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.merge import comparison, merge_artifacts, merge_reports
from scalingnote.evaluate.report import measures_of, report_page
from scalingnote.storage.artifact import Artifact, Draft

REPORT = {
    "dataset": "shop",
    "num_documents": 1200,
    "num_queries": 40,
    "simulated_clicks": True,
    "methods": {
        "scalingdual": {"R@1": 0.5, "R@10": 0.9, "MRR@10": 0.6, "nDCG@10": 0.7},
        "scalingdual (index)": {"R@1": 0.45, "R@10": 0.85, "MRR@10": 0.55, "nDCG@10": 0.65},
        "bm25": {"R@1": 0.3, "R@10": 0.95, "MRR@10": 0.4, "nDCG@10": 0.5},
    },
    "index": {"recall@10": 0.93, "recall@100": 0.91, "bytes_per_vector": 20.5},
    "significance": {
        "baseline": "scalingdual",
        "alpha": 0.05,
        "resamples": 1000,
        "differences": {
            "bm25": {
                "R@1": {"difference": -0.2, "low": -0.3, "high": -0.1, "p": 0.0001, "p_holm": 0.0002},
                "R@10": {"difference": 0.05, "low": 0.01, "high": 0.09, "p": 0.02, "p_holm": 0.04},
                "MRR@10": {"difference": 0.0, "low": 0.0, "high": 0.0, "p": None, "p_holm": None},
                "nDCG@10": {"difference": -0.2, "low": -0.4, "high": 0.1, "p": 0.05, "p_holm": 0.1},
            }
        },
    },
    "seconds": {"prepare": 1.5, "train": 62.25},
    "usage": {
        "train": {
            "requests": 1200,
            "bytes_read": 6_225_000_000,
            "bytes_written": 0,
            "driver_peak_bytes": 500_000_000,
            "worker_peak_bytes": 2_000_000_000,
        }
    },
    "environment": {"cpus": 2, "torch": "2.13.0"},
}


def render_report(template, report):
    return render(template, page=report_page(report, []))


def comparison_text(report):
    return markdown_text(comparison(merge_reports([report])))


def test_the_table_is_aligned_and_marks_best_and_significant():
    lines = comparison_text(REPORT).splitlines()
    assert lines[0] == "shop: 1,200 documents, 40 queries"
    table = [line for line in lines if line.startswith("|")]
    assert len({len(line) for line in table[:5]}) == 1
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert [row[0] for row in cells[2:5]] == ["scalingdual", "scalingdual (index)", "bm25"]
    assert cells[2][1] == "**0.500**"
    assert cells[4][1:] == ["0.300▼", "**0.950▲**", "0.400", "0.500"]
    assert "0.930" in table[7]
    assert "simulated" in lines[-1]


def test_measures_are_in_the_order_of_their_depth():
    row = dict.fromkeys(["MRR@10", "R@1", "R@10", "R@100", "R@50", "nDCG@10"], 0.5)
    assert measures_of({"a": row}) == ["R@1", "R@10", "R@50", "R@100", "MRR@10", "nDCG@10"]


def test_the_page_escapes_data_and_needs_no_other_file():
    report = {**REPORT, "dataset": "<script>alert(1)</script>"}
    report["queries_per_core_second"] = {"scalingdual": 250.0}
    report["methods"] = report["methods"] | {"a < b": REPORT["methods"]["bm25"]}
    html = render_report("report.html", report)
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "a < b" not in html
    assert html.count(">a &lt; b<") == 3  # in both tables and next to the bars
    assert html.count("<svg") == 2
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', html)) <= set(ids)
    assert "currentColor" in html
    assert "http" not in html
    assert html == render_report("report.html", report)


def test_sections_are_in_markdown_and_on_the_page():
    rows = {name: {**row, "Recall@10": 0.25} for name, row in REPORT["methods"].items()}
    part = [
        {"label": "as written", "queries": 40, "methods": rows},
        {"label": "with <typos>", "queries": 40, "methods": rows},
    ]
    splits = {"train": {"queries": 9, "mean": 0.25, "bound": 0.5, "cosine": 0.9, "mean_as_given": 3.0}}
    report = {**REPORT, "methods": rows, "slices": {"typos": part}, "distance": {"splits": splits}}
    text, html = render_report("report.md", report), render_report("report.html", report)
    assert "Recall@10" not in comparison_text(report)
    for title in ("Recall", "Against scalingdual", "With typos", "Distance from the teacher"):
        assert f"## {title}\n" in text
        assert f"<h2>{title}</h2>" in html
    for line in (
        "| with <typos> |      40 |       0.700 |",
        "-0.200 [-0.300, -0.100], p < 0.001 ▼",
        "| train   |    62.2 |    1,200 |     100.0 |          0.0 |         0.50 |           2.00 |",
        "torch 2.13.0",
        "Success@K",
    ):
        assert line in text
    assert "with &lt;typos&gt;" in html
    assert "0.300▼</td>" in html


def test_a_method_may_have_any_name():
    names = ["cost $x_{$", "_mine", "$a$ or $b$", r"back\$lash"]
    html = render_report(
        "report.html", {**REPORT, "methods": dict.fromkeys(names, REPORT["methods"]["bm25"])}
    )
    picture = html.split("<svg")[1].split("</svg>")[0]
    for name in names:
        assert picture.count(f">{name}</text>") == 1
        assert f">{name}</th>" in html


def test_the_page_begins_with_quality_and_cost():
    names = [f"scalingdual{suffix}" for suffix in (" (sparse)", " (hybrid)", " (raw hybrid)", " + bm25")]
    methods = REPORT["methods"] | dict.fromkeys(names, REPORT["methods"]["scalingdual"])
    report = {**REPORT, "methods": methods, "queries_per_core_second": {"scalingdual": 250.0}}
    (table,) = report_page(report, []).sections[0].tables
    # Every method of a tower has the cost of its encoder.
    assert {row[0]: row[1] for row in table.rows} == dict.fromkeys(methods, "250") | {"bm25": "–"}
    first = render_report("report.html", report).split("<section>")[1]
    assert "<h2>Quality and cost</h2>" in first
    assert 'aria-label="quality and cost of the methods"' in first
    for label in ("scalingdual: 0.700", "scalingdual (index): 0.650", "bm25: 0.500", "100", "1,000"):
        assert f">{label}</text>" in first
    assert "Quality and cost" not in render_report("report.html", REPORT)


def test_pictures_draw_the_values():
    axes = Figure().subplots()
    points = {"dual": (250.0, 0.7), "small": (9000.0, 0.6), "bm25": (None, 0.5)}
    pictures.draw_quality_and_cost(axes, points, measure="nDCG@10")
    assert [tuple(dots.get_offsets()[0]) for dots in axes.collections] == [(250, 0.7), (9000, 0.6)]
    (line,) = axes.lines  # BM25 has no encoder
    assert ({*line.get_ydata()}, line.get_linestyle()) == ({0.5}, "--")
    assert axes.get_xscale() == "log"
    axes = Figure().subplots()
    pictures.draw_groups(axes, {"R@1": [0.5, 0.3], "R@10": [0.9, 0.8]}, ["dual", "bm25"])
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.9, 0.3, 0.8]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["R@1", "R@10"]


# --- several reports --------------------------------------------------------------------------------------


def other(name, r1):
    report = copy.deepcopy(REPORT)
    rows = report["methods"]
    rows[name] = {**rows.pop("scalingdual"), "R@1": r1}
    rows[f"{name} (index)"] = rows.pop("scalingdual (index)")
    return report


def test_a_merge_is_a_union_with_names_of_served_towers():
    merged = merge_reports([REPORT, other("scalingnote", 0.4)])
    assert [*merged["methods"]] == [*REPORT["methods"], "scalingnote", "scalingnote (index)"]
    assert set(merged["index"]) == set(merged["seconds"]) == {"scalingdual", "scalingnote"}
    twice = merge_reports([REPORT, other("scalingdual", 0.4)])["methods"]  # one name, two results
    assert (twice["scalingdual"]["R@1"], twice["scalingdual #2"]["R@1"]) == (0.5, 0.4)
    with pytest.raises(DataError, match="num_documents: 1200 and 7"):
        merge_reports([REPORT, {**REPORT, "num_documents": 7}])


QUERIES = [f"q{number}" for number in range(60)]
INDEX = {"recall@10": 0.9, "recall@100": 0.9, "bytes_per_vector": 20.0}


def values(share: float, *names: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(int(1000 * share))
    return {name: (random.random(len(QUERIES)) < share).astype(float) for name in names}


def write_report(
    uri: str,
    methods: dict[str, dict[str, np.ndarray]],
    *,
    queries: list[str] = QUERIES,
    index: dict[str, float] = INDEX,
) -> Artifact:
    """Write a `report` artifact."""
    draft = Draft(uri, kind="report", config=EvaluateConfig(recall_at=(10,)), parents={})
    entropies = {next(iter(methods)): np.ones(len(queries))}  # only of towers
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
    one, two = write_report(f"{tmp_path}/a", first), write_report(f"{tmp_path}/b", second)
    assert merge_artifacts([[one]])["significance"] == one.read_json("report.json")["significance"]
    merged = merge_artifacts([[one], [two]])
    section = merged["significance"]
    assert section["baseline"] == "dual"
    # Holm's correction is over all methods of both reports; only common measures are compared.
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
    others = [{"small": {"R@10": rng.random(60) - 0.2}} for _ in range(3)]
    groups = [
        [write_report(f"{tmp_path}/{name}{n}", methods) for n, methods in enumerate(of_method)]
        for name, of_method in (("a", seeds), ("b", others))
    ]
    merged = merge_artifacts(groups)
    seed_means = {
        "dual": np.mean([one["dual"]["R@10"] for one in seeds], axis=0),
        "bm25": np.arange(60) / 60,
        "small": np.mean([one["small"]["R@10"] for one in others], axis=0),
    }
    assert (merged["seeds"], len(merged["index"])) == (3, 2)
    for name, row in seed_means.items():
        assert merged["methods"][name]["R@10"] == pytest.approx(row.mean())
    means = [one["dual"]["R@10"].mean() for one in seeds]
    assert merged["spread"]["dual"]["R@10"] == pytest.approx(np.std(means, ddof=1))
    assert merged["spread"]["bm25"]["R@10"] == pytest.approx(0, abs=1e-12)
    for name in ("bm25", "small"):
        difference = merged["significance"]["differences"][name]["R@10"]
        assert difference["p"] == pytest.approx(stats.ttest_rel(seed_means[name], seed_means["dual"]).pvalue)
    text = markdown_text(comparison(merged))
    assert f"± {merged['spread']['dual']['R@10']:.3f}" in text
    assert "Means over 3 trainings with different seeds" in text


def test_an_index_with_equal_results_keeps_its_row(tmp_path: Path):
    methods, smaller = {"dual": values(0.9, "R@10")}, INDEX | {"bytes_per_vector": 10.0}
    reports = [
        [write_report(f"{tmp_path}/a", methods)],
        [write_report(f"{tmp_path}/b", methods, index=smaller)],
    ]
    merged = merge_artifacts(reports)
    assert [*merged["methods"]] == ["dual"]
    assert merged["index"] == {"dual": INDEX, "dual #2": smaller}


def test_different_rows_or_queries_are_refused(tmp_path: Path):
    one = write_report(f"{tmp_path}/a", {"dual": values(0.9, "R@10")})
    with pytest.raises(DataError, match="have different rows of 'dual'"):
        merge_artifacts([[one, write_report(f"{tmp_path}/b", {"small": values(0.2, "R@10")})]])
    others = [f"other{number}" for number in range(60)]
    with pytest.raises(DataError, match="different test queries"):
        merge_artifacts(
            [[one], [write_report(f"{tmp_path}/c", {"dual": values(0.9, "R@10")}, queries=others)]]
        )
