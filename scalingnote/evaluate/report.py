"""Reports: the shape of report.json, its main table, several reports merged into one, and the lineage of one.

{"dataset", "num_documents", "num_queries", "simulated_clicks", "sample": {"documents"},
 "methods": {NAME: {"R@1": ..., "MRR@10": ..., "nDCG@10": ...}},
 "queries_per_core_second": {QUERY TOWER: ...},
 "index": {"recall@10", "recall@100", "bytes_per_vector"},
 "significance": {"baseline", "alpha", "resamples",
                  "differences": {METHOD: {MEASURE: {"difference", "low", "high", "p", "p_holm"}}}},
 "slices": {SLICING: [{"label", "queries", "methods": as above}]},
 "contrastive_entropy": {"queries", "negatives", "temperature", "methods": {NAME: ...}},
 "auc": {"pairs", "not_in_pool", "unusable", "methods": {NAME: {"AUC-LABEL": ...}}},
 "reranking": {"queries", "candidates", "not_in_pool", "methods": as above},
 "relaxed": {"queries", "methods": {NAME: {"R@1": ...}}},
 "distance": {"splits": {SPLIT: {"queries", "mean", "bound", "cosine", "mean_as_given"}},
              "discrepancy": {"split", "pairs", "mean", "deviation", "counts", "edges"}},
 "seeds": N, "spread": {NAME: {"R@1": standard deviation over seeds}},
 "seconds": {STAGE: s}, "environment": {...},
 "usage": {STAGE: {"requests", "bytes_read", "bytes_written", "driver_peak_bytes", "worker_peak_bytes"}}}

An undefined number is null. Only dataset, methods, index, seconds and environment are always present;
`sample` and no recall of the index where exact search covered some of the documents; `seeds` and `spread`
where several trainings were pooled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote import reports
from scalingnote.config import validate
from scalingnote.errors import ArtifactError, DataError
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.measures import (
    MeasureValues,
    is_recall,
    means,
    measure_names,
    significance_section,
)
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.train.config import MIXED

Report = dict[str, Any]
BETTER, WORSE = "▲", "▼"
PER_INDEX = ("index", "seconds")  # parts of a report that belong to the tower behind its index
# Equal in reports that are merged.
SHARED = ("dataset", "num_documents", "num_queries", "simulated_clicks", "sample")
SIMULATED = "Training clicks were simulated from judged data (dataset.click_model)."


def stage_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: time, storage and memory of each stage."""
    head = ["stage", "seconds", "requests", "MB/s read", "MB/s written", "GB of driver", "GB of a worker"]
    rows = []
    for stage, seconds in report["seconds"].items():
        row = [stage, f"{seconds:,.1f}"]
        if used := report.get("usage", {}).get(stage):  # artifacts of earlier releases have none
            speeds = [used[name] / 1e6 / max(seconds, 1e-3) for name in ("bytes_read", "bytes_written")]
            peaks = [used[name] / 1e9 for name in ("driver_peak_bytes", "worker_peak_bytes")]
            row += [f"{used['requests']:,}", *(f"{v:,.1f}" for v in speeds), *(f"{v:.2f}" for v in peaks)]
        rows.append(row + ["–"] * (len(head) - len(row)))
    return head, rows


def main_table(
    report: Report, methods: Sequence[str], *, best: Callable[[str], str]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the main table; `best` marks the best value of a column, as text with its mark."""
    rows: dict[str, dict[str, float]] = report["methods"]
    names, sample = measures_of(rows), report.get("sample")
    highest = {name: max(row[name] for row in rows.values() if name in row) for name in names}

    def cell(method: str, name: str) -> str:
        if (value := rows[method].get(name)) is None:
            return "–"
        spread = report.get("spread", {}).get(method, {}).get(name)
        mark = ("" if spread is None else f" ± {spread:.3f}") + significance_mark(report, method, name)
        return best(f"{value:.3f}") + mark if value == highest[name] else f"{value:.3f}{mark}"

    def documents(method: str) -> list[str]:
        """The number that a method searched, where not all methods searched all."""
        if not sample:
            return []
        return [f"{report['num_documents'] if '(index)' in method else sample['documents']:,}"]

    head = ["method", *(["documents"] if sample else []), *names]
    return head, [[m, *documents(m), *(cell(m, name) for name in names)] for m in methods]


def differences_table(report: Report, methods: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of differences from the baseline, with corrected p-values."""
    differences = report.get("significance", {}).get("differences", {})
    names = measures_of(differences)

    def cell(difference: Mapping[str, float | None]) -> str:
        p = difference["p_holm"]
        shown = "" if p is None else " (p < 0.001)" if p < 0.001 else f" (p {p:.3f})"
        return f"{difference['difference']:+.3f}{shown}"

    rows = [[m, *(cell(differences[m][name]) for name in names)] for m in methods if m in differences]
    return ["method", *names], rows


def comparison_table(merged: Report, *, differences: bool = True) -> str:
    """Markdown tables: a line per method, a line per index, and the methods' differences from the baseline.

    Args:
        merged: one report or several, as :func:`merge_reports` returns them.
        differences: whether to add the last table.
    """
    methods: dict[str, dict[str, float]] = merged["methods"]
    # Best first by the last measure, nDCG, which considers both grades and ranks.
    last = measures_of(methods)[-1]
    order = sorted(methods, key=lambda method: (-methods[method].get(last, 0.0), method))
    indexes = [
        [
            method,
            *(f"{index[name]:.3f}" if name in index else "–" for name in ("recall@10", "recall@100")),
            f"{index['bytes_per_vector']:g}",
            f"{sum(merged['seconds'][method].values()):,.0f}s",
        ]
        for method, index in merged["index"].items()
    ]
    lines = [
        f"{merged['dataset']}: {merged['num_documents']:,} documents, {merged['num_queries']:,} queries",
        "",
        reports.markdown(*main_table(merged, order, best="**{}**".format)),
        "",
        reports.markdown(["index of", "recall@10", "recall@100", "bytes per vector", "pipeline"], indexes),
    ]
    head, rows = differences_table(merged, order)
    if rows and differences:
        baseline = merged["significance"]["baseline"]
        about = f"Less {baseline}; p of a paired t-test over queries, by Holm's correction over the methods:"
        lines += ["", about, "", reports.markdown(head, rows)]
    return "\n".join([*lines, *(line for note in notes(merged) for line in ("", note))])


def notes(report: Report) -> list[str]:
    """Notes on the data for readers of the main table."""
    found = [SIMULATED] if report["simulated_clicks"] else []
    if (seeds := report.get("seeds", 1)) > 1:
        found.append(
            f"Means over {seeds} trainings with different seeds, ± the standard deviation between them. The "
            "tests compare means over seeds query by query: they hold for other queries, and for these seeds."
        )
    if sample := report.get("sample"):
        found.append(
            f"Exact search and BM25 cover a seeded sample of {sample['documents']:,} of "
            f"{report['num_documents']:,} documents, with all judged ones; the index covers all. Among fewer "
            "documents a query finds its own more easily: the index's rows compare with no others, and its "
            "recall against exact search was not measured."
        )
    return found


def measures_of(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the measures of the main table in order: all except Recall@K."""
    return [name for name in measure_names(methods) if not is_recall(name)]


def significance_mark(report: Report, method: str, measure: str) -> str:
    """A mark for a method that is significantly better or worse than the baseline; else nothing."""
    significance = report.get("significance", {})
    difference = significance.get("differences", {}).get(method, {}).get(measure)
    if difference is None or difference["p_holm"] is None or difference["p_holm"] >= significance["alpha"]:
        return ""
    return BETTER if difference["difference"] > 0 else WORSE


def merge_artifacts(methods: Sequence[Sequence[Artifact]]) -> Report:
    """:func:`merge_reports` of report artifacts, with the significance of differences from one baseline.

    Baseline, level and resamples are those of the first report. The measures that all reports have are
    tested.

    Args:
        methods: the reports of each method, one for each seed that it was trained with.

    Raises:
        DataError: the reports have different documents or queries, or those of a method different rows.
    """
    pooled = [pool_seeds(reports) for reports in methods]
    single = [one.report for one in pooled]
    merged = merge_reports(single)
    if len(methods) == len(methods[0]) == 1:
        return merged
    first = methods[0][0]
    values: dict[str, MeasureValues] = {}
    for one, names, (artifact, *_) in zip(pooled, _merged_names(single), methods, strict=True):
        if not one.query_ids.equals(pooled[0].query_ids):
            raise DataError(f"{first.uri} and {artifact.uri} are of different test queries")
        values |= {new_name: one.values[name] for name, new_name in names.items()}
    common = set.intersection(*(set(row) for row in values.values()))
    values = {name: {m: row[m] for m in row if m in common} for name, row in values.items()}
    stored = first.manifest.config  # of this release or an earlier one
    known = {name: value for name, value in stored.items() if name in EvaluateConfig.model_fields}
    config = validate(EvaluateConfig, known, source=first.uri)
    baseline = single[0]["significance"]["baseline"]
    merged["significance"] = significance_section(config, values, baseline=baseline)
    return merged


@dataclass(frozen=True)
class PooledReport:
    """A report of a method over its seeds, and the values behind its means."""

    report: Report
    query_ids: pa.Array
    values: dict[str, MeasureValues]  # of each query, the mean over seeds


def pool_seeds(artifacts: Sequence[Artifact]) -> PooledReport:
    """Pool reports of one method that was trained with several seeds.

    The value of a query is its mean over the seeds, so that a paired test over queries (Smucker et al., CIKM
    2007; the t-test as Urbano et al., SIGIR 2019, recommend) has one value of each query and method: seeds of
    one query are no independent observations. Between seeds, `spread` is the standard deviation of a mean.

    Raises:
        DataError: the reports have different rows, documents or queries.
    """
    single = [artifact.read_json("report.json") for artifact in artifacts]
    tables = [artifact.table("per_query.parquet") for artifact in artifacts]
    first, query_ids = single[0], tables[0]["query_id"].unique()
    stacked: dict[str, dict[str, np.ndarray]] = {}
    for name, row in first["methods"].items():
        of_seeds = [table.filter(pc.equal(table["method"], name)) for table in tables]
        if any(not rows["query_id"].equals(of_seeds[0]["query_id"]) for rows in of_seeds):
            raise DataError(
                f"the reports of {artifacts[0].uri} and its other seeds differ in rows of {name!r}"
            )
        stacked[name] = {m: np.stack([rows[m].to_numpy() for rows in of_seeds]) for m in row}
    for report in single[1:]:
        _require_same_data(first, report)
    values: dict[str, MeasureValues] = {
        name: {m: v.mean(0) for m, v in row.items()} for name, row in stacked.items()
    }
    if len(single) == 1:
        return PooledReport(first, query_ids, values)
    spread = {
        name: {m: float(v.mean(1).std(ddof=1)) for m, v in row.items()} for name, row in stacked.items()
    }
    pooled = first | {"methods": means(values), "spread": spread, "seeds": len(single)}
    for part in PER_INDEX:
        pooled[part] = {name: float(np.mean([one[part][name] for one in single])) for name in first[part]}
    return PooledReport(pooled, query_ids, values)


def _require_same_data(first: Report, other: Report) -> None:
    for name in SHARED:
        if other.get(name) != first.get(name):
            raise DataError(
                f"reports differ in {name}: {first.get(name)!r} and {other.get(name)!r}; "
                "compare methods that were run on one dataset"
            )


def merge_reports(single: Sequence[Report]) -> Report:
    """One report of several methods over one dataset; without significance, unless it is of one report.

    `methods` is the union; `index` and `seconds` become {METHOD: ...}, under the name of the tower behind the
    index. A name with different numbers in two reports gets the suffix `` #2``, `` #3``...

    Raises:
        DataError: there are no reports, or they have different documents or queries.
    """
    if not single:
        raise DataError("no reports to compare: run at least one method")
    first = single[0]
    for report in single[1:]:
        _require_same_data(first, report)
    merged: Report = {name: first[name] for name in SHARED if name in first}
    merged |= {"methods": {}, "environment": first["environment"]}
    if len(single) == 1:
        merged["significance"] = first.get("significance", {})
    per_index: dict[str, Any] = {}
    for report, names in zip(single, _merged_names(single), strict=True):
        merged["methods"] |= {names[name]: row for name, row in report["methods"].items()}
        if "spread" in report:
            merged["seeds"] = max(merged.get("seeds", 1), report["seeds"])
            spread = {names[name]: row for name, row in report["spread"].items()}
            merged["spread"] = merged.get("spread", {}) | spread
        through_index = [name for name in report["methods"] if name.endswith(" (index)")]
        served = names[(through_index or list(report["methods"]))[0]].removesuffix(" (index)")
        row = {name: report[name] for name in PER_INDEX}
        # Two indexes may have equal results and differ in size.
        per_index[_free_name(per_index, served, row)] = row
    return merged | {name: {served: row[name] for served, row in per_index.items()} for name in PER_INDEX}


def _merged_names(single: Sequence[Report]) -> list[dict[str, str]]:
    """For each report, the names of its methods in the merged one."""
    taken: dict[str, Mapping[str, float]] = {}
    merged = []
    for report in single:
        names = {name: _free_name(taken, name, row) for name, row in report["methods"].items()}
        taken |= {names[name]: row for name, row in report["methods"].items()}
        merged.append(names)
    return merged


def _free_name(taken: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> str:
    """The first name that is free, or that has the same numbers already."""
    base, index, free, number = name.removesuffix(" (index)"), name.endswith(" (index)"), name, 1
    while free in taken and taken[free] != row:
        number += 1
        free = f"{base} #{number}{' (index)' if index else ''}"
    return free


# --- lineage: all artifacts behind an artifact, by the parents in manifests --------------------------------

STAGE_OF = {
    "dataset": "prepare",
    "planner": "planner",
    "triplets": "collect",
    "dual_encoder": "train",
    "cross_encoder": "cross_encoder",
    "query_embeddings": "teacher",
    "student": "distill",
    "embeddings": "encode",
    "semantic_ids": "quantize",
    "index": "index",
    "report": "evaluate",
}
# Names of parents that differ from their kind, because a stage reads two artifacts of that kind.
KIND_OF = {"teacher_embeddings": "embeddings", "codebooks": "semantic_ids"}


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage; `artifact` is None if it was deleted or replaced since."""

    kind: str
    uri: str
    digest: str
    artifact: Artifact | None

    @property
    def stage(self) -> str:
        """The stage that built the artifact, by its kind and its parents."""
        parents = self.artifact.manifest.parents if self.artifact else {}
        # Adopted dual encoders record the checksum of the published weights.
        if self.kind == "dual_encoder" and self.artifact and "weights_sha256" in self.artifact.manifest.info:
            return "adopt"
        if self.kind == "triplets" and "dual_encoder" in parents:
            return "mine"
        if self.kind == "embeddings" and "semantic_ids" in parents:
            return "fuse"
        if self.kind == "embeddings" and "student" in parents:
            return "encode_student"
        return STAGE_OF.get(self.kind, self.kind)

    @property
    def seconds(self) -> float | None:
        """Time of the last attempt of its stage."""
        return self.artifact.manifest.info.get("seconds") if self.artifact else None


def lineage(artifacts: Iterable[Artifact]) -> list[Ancestor]:
    """The artifacts and all their ancestors in topological order: parents come first."""
    ancestors: dict[str, Ancestor] = {}
    for ancestor in _in_order(Ancestor(a.manifest.kind, a.uri, a.digest, a) for a in artifacts):
        _add(ancestor, ancestors)
    return list(ancestors.values())


def _add(ancestor: Ancestor, known: dict[str, Ancestor]) -> None:
    if ancestor.digest in known:
        return
    recorded = ancestor.artifact.manifest.parents if ancestor.artifact else {}
    parents = [
        _open(KIND_OF.get(name, name), parent["uri"], parent["digest"])
        for name, parent in recorded.items()
        if parent["digest"] not in known and not name.startswith(MIXED)
    ]
    for parent in _in_order(parents):
        _add(parent, known)
    known[ancestor.digest] = ancestor


def _in_order(ancestors: Iterable[Ancestor]) -> list[Ancestor]:
    """Sorted by the order of the stages."""
    order = {kind: i for i, kind in enumerate(STAGE_OF)}
    return sorted(ancestors, key=lambda a: (order.get(a.kind, len(order)), a.kind, a.digest))


def latest(ancestors: Iterable[Ancestor], kind: str) -> Artifact | None:
    """The last artifact of a kind in a lineage; None if there is none any more."""
    found = [ancestor.artifact for ancestor in ancestors if ancestor.kind == kind and ancestor.artifact]
    return found[-1] if found else None


def seconds(ancestors: Iterable[Ancestor]) -> dict[str, float]:
    """Stage -> seconds over all its rounds, of the artifacts that still exist."""
    by_stage: dict[str, float] = {}
    for ancestor in ancestors:
        if ancestor.seconds is not None:
            by_stage[ancestor.stage] = round(by_stage.get(ancestor.stage, 0.0) + ancestor.seconds, 3)
    return by_stage


def usage(ancestors: Iterable[Ancestor]) -> dict[str, dict[str, int]]:
    """Stage -> storage and memory that it used: sums over its rounds, and the largest of their peaks."""
    by_stage: dict[str, dict[str, int]] = {}
    for ancestor in ancestors:
        used = ancestor.artifact.manifest.info.get("usage", {}) if ancestor.artifact else {}
        total = by_stage.setdefault(ancestor.stage, {}) if used else {}
        for name, value in used.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name.endswith("peak_bytes") else before + value
    return by_stage


def _open(kind: str, uri: str, digest: str) -> Ancestor:
    try:
        artifact = open_artifact(uri, kind=kind)
    except ArtifactError:
        return Ancestor(kind, uri, digest, None)
    return Ancestor(kind, uri, digest, artifact if artifact.digest == digest else None)
