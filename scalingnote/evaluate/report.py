"""Reports: the contents of report.json, report.md and report.html, and the lineage of artifacts.

{"dataset", "num_documents", "num_queries", "simulated_clicks", "sample": {"documents"},
 "methods": {NAME: {"R@1": ..., "MRR@10": ..., "nDCG@10": ...}},
 "queries_per_core_second": {QUERY TOWER: ...},
 "index": {"recall@10", "recall@100", "bytes_per_vector"},
 "significance": {"baseline", "alpha", "resamples",
                  "differences": {METHOD: {MEASURE: {"difference", "low", "high", "p", "p_holm"}}}},
 "slices": {"typos": [{"label", "queries", "methods": as above}]},
 "contrastive_entropy": {"queries", "negatives", "temperature", "methods": {NAME: ...}},
 "auc": {"pairs", "not_in_pool", "unusable", "methods": {NAME: {"AUC-LABEL": ...}}},
 "reranking": {"queries", "candidates", "not_in_pool", "methods": as above},
 "relaxed": {"queries", "methods": {NAME: {"R@1": ...}}},
 "distance": {"splits": {SPLIT: {"queries", "mean", "bound", "cosine", "mean_as_given"}}},
 "seeds": N, "spread": {NAME: {"R@1": standard deviation over seeds}},
 "seconds": {STAGE: s}, "environment": {...},
 "usage": {STAGE: {"requests", "bytes_read", "bytes_written", "driver_peak_bytes", "worker_peak_bytes"}}}

An undefined number is null. Only dataset, methods, index, seconds and environment are always present. If
exact search covered only some of the documents, `sample` is present and the recall of the index is not. If
several trainings were pooled, `seeds` and `spread` are present.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from scalingnote.core.errors import ArtifactError
from scalingnote.core.reports import (
    CodeCell,
    ReportPage,
    ReportSection,
    ReportTable,
    StrongCell,
    environment_line,
)
from scalingnote.evaluate.config import METHOD_SUFFIX
from scalingnote.evaluate.measures import FAMILIES, is_recall, measure_names
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.manifest import read_manifest
from scalingnote.train.config import MIXED

Report = dict[str, Any]
BETTER, WORSE = "▲", "▼"
THROUGH_INDEX = " (index)"  # suffix of the name of the served query tower
SIMULATED = "Training clicks were simulated from judged data (dataset.click_model)."
METHODS_NOTE = (
    "R@K is the share of queries with a relevant document among their first K of the entire pool "
    "(Success@K if a query has several). Methods search exactly; “(index)” is the same query tower, which "
    "searches the compressed index."
)

_ENTROPY = (
    "Mean of -log softmax of a query's best document against {negatives:,} others drawn from the pool, which "
    "are the same for all methods. Cosines are divided by a temperature of {temperature:g}; {queries:,} "
    "queries. Smaller is better; equal scores of all documents give {guess:.3f}."
)
_BY_METHOD = {
    "auc": (
        "Judged pairs",
        "Over {pairs:,} judged pairs of a query and a document, ranked together: how often the better of two "
        "pairs has the higher score. Not in the pool: {not_in_pool:,}; unusable rows: {unusable:,}.",
    ),
    "relaxed": (
        "Answers found",
        "Relaxed R@K: the share of {queries:,} queries with the words of one of their answers, in sequence, "
        "in one of the first K documents.",
    ),
    "reranking": (
        "Re-ranking",
        "{candidates:,} candidates of {queries:,} queries from evaluate.candidates, sorted by the scores of "
        "each method; {not_in_pool:,} are not in the pool and come last.",
    ),
}


def report_page(report: Report, ancestors: Iterable["Ancestor"]) -> ReportPage:
    """Build all sections of a report in reading order, for both Markdown and HTML."""
    parts = (_quality_and_cost, _methods, _significance, _by_method, _typos, _distance)
    index = index_table({served_tower(report): report["index"]}, {served_tower(report): report["seconds"]})
    sections = [
        *(section for part in parts for section in part(report)),
        ReportSection("Index", "Recall against exact search with the same query embeddings.", [index]),
        ReportSection("Stages", tables=[stage_table(report)]),
        _lineage_section(ancestors),
        ReportSection("Environment", environment_line(report["environment"])),
    ]
    title = f"Retrieval report: {report['dataset']}"
    return ReportPage(title, sections, summary=size_line(report), notes=notes(report))


def _quality_and_cost(report: Report) -> Iterator[ReportSection]:
    rates: Mapping[str, float] = report.get("queries_per_core_second", {})
    if not rates:  # a report of an earlier release, or not measured
        return
    measure = measures_of(report["methods"])[-1]
    rows = [
        (method, rates.get(METHOD_SUFFIX.sub("", method)), report["methods"][method][measure])
        for method in best_first(report)
    ]
    text = (
        f"{measure} against the queries that one core encodes per second, in blocks. Methods with the same "
        "query tower have the same rate, because search is not counted. Dashed: a method without an encoder."
    )
    table = ReportTable(
        ["method", "queries/s and core", measure],
        [[method, f"{rate:,.0f}" if rate else "–", f"{value:.3f}"] for method, rate, value in rows],
    )
    from scalingnote.evaluate import pictures  # imported late, because matplotlib takes seconds

    points = {method: (rate, value) for method, rate, value in rows}
    draw = partial(pictures.draw_quality_and_cost, points=points, measure=measure)
    picture = pictures.svg("quality and cost of the methods", draw)
    yield ReportSection("Quality and cost", text, [table], [picture])


def _methods(report: Report) -> Iterator[ReportSection]:
    order = best_first(report)
    from scalingnote.evaluate import pictures  # imported late, see above

    cutoffs = [name for name in measures_of(report["methods"]) if name.startswith("R@")]
    groups = {name: [report["methods"][method][name] for method in order] for name in cutoffs}
    picture = pictures.svg("recall of the methods", partial(pictures.draw_groups, groups=groups, names=order))
    yield ReportSection("Methods", METHODS_NOTE, [main_table(report)], [picture])


def _significance(report: Report) -> Iterator[ReportSection]:
    part = report.get("significance")
    if not part or not part["differences"]:
        return
    baseline = part["baseline"]
    text = (
        f"Mean difference over queries, its {100 * (1 - part['alpha']):g} % interval "
        f"({part['resamples']:,} bootstrap resamples of "
        "the queries; the intervals of a row hold jointly) and p (paired two-sided t-test, Holm's correction "
        f"over the methods). {BETTER} and {WORSE}: better and worse than {baseline}, p < {part['alpha']:g}."
    )
    yield ReportSection(f"Against {baseline}", text, [differences_table(report)])


def _by_method(report: Report) -> Iterator[ReportSection]:
    """Yield the sections that are a table of methods and measures."""
    recalls = [name for name in measure_names(report["methods"]) if is_recall(name)]
    if recalls:
        text = "The share of a query's relevant documents among its first K; some queries have several here."
        rows = {method: {name: row[name] for name in recalls} for method, row in report["methods"].items()}
        yield _method_section("Recall", text, rows)
    if part := report.get("contrastive_entropy"):
        guess = math.log(part["negatives"] + 1)
        rows = {method: {"contrastive entropy": value} for method, value in part["methods"].items()}
        yield _method_section("Contrastive entropy", _ENTROPY.format(guess=guess, **part), rows)
    for name, (title, text) in _BY_METHOD.items():
        if part := report.get(name):
            yield _method_section(title, text.format(**part), part["methods"])


def _typos(report: Report) -> Iterator[ReportSection]:
    slices = report.get("slices", {}).get("typos")
    if not slices:
        return
    methods = slices[0]["methods"]
    measure = measure_names(methods)[-1]
    text = (
        f"{measure} of the same queries with a letter swapped, dropped or doubled in a share of their words "
        "(evaluate.typos)."
    )
    rows = [
        [one["label"], f"{one['queries']:,}", *(f"{row[measure]:.3f}" for row in one["methods"].values())]
        for one in slices
    ]
    yield ReportSection("With typos", text, [ReportTable(["slice", "queries", *methods], rows)])


def _distance(report: Report) -> Iterator[ReportSection]:
    part = report.get("distance")
    if not part:
        return
    text = (
        "Distance of the student's query embeddings from the teacher's, both scaled to length 1. 2K/n Σ is "
        "the increase of the papers' bound on the student's loss, with K = 1. As given: distance of the "
        "outputs of the towers, without scaling."
    )
    columns = {"mean": "mean distance", "bound": "2K/n Σ", "cosine": "cosine", "mean_as_given": "as given"}
    rows = [
        [split, f"{row['queries']:,}", *(f"{row[name]:.3f}" for name in columns)]
        for split, row in part["splits"].items()
    ]
    table = ReportTable(["queries of", "number", *columns.values()], rows)
    yield ReportSection("Distance from the teacher", text, [table])


def _method_section(
    title: str, text: str, methods: Mapping[str, Mapping[str, float | None]]
) -> ReportSection:
    """Build a section with a row per method and a column per measure."""
    names = list(dict.fromkeys(name for row in methods.values() for name in row))
    if all(name.split("@")[0] in FAMILIES for name in names):
        names = measure_names(methods)
    rows = [
        [method, *("–" if row[name] is None else f"{row[name]:.3f}" for name in names)]
        for method, row in methods.items()
    ]
    return ReportSection(title, text, [ReportTable(["method", *names], rows)])


def _lineage_section(ancestors: Iterable["Ancestor"]) -> ReportSection:
    rows: list[Sequence[str]] = []
    for ancestor in ancestors:
        counts = ancestor.artifact.counts if ancestor.artifact else {}
        description = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())
        description = description if ancestor.artifact else "deleted or replaced"
        digest, uri = CodeCell(ancestor.digest[:12]), CodeCell(ancestor.uri)
        rows.append([ancestor.stage, ancestor.kind, digest, description, uri])
    head = ["stage", "artifact", "digest", "counts", "URI"]
    text = "All artifacts from which these numbers were computed. A digest covers settings, inputs and bytes."
    return ReportSection("Lineage", text, [ReportTable(head, rows, text=5)])


# --- tables and lines, also of several reports --------------------------------------------------------------


def stage_table(report: Report) -> ReportTable:
    """Build a table of time, storage and memory of each stage."""
    head = ["stage", "seconds", "requests", "MB/s read", "MB/s written", "GB of driver", "GB of a worker"]
    rows = []
    for stage, seconds in report["seconds"].items():
        row = [stage, f"{seconds:,.1f}"]
        if stats := report.get("usage", {}).get(stage):  # artifacts of earlier releases have none
            speeds = [stats[name] / 1e6 / max(seconds, 1e-3) for name in ("bytes_read", "bytes_written")]
            peaks = [stats[name] / 1e9 for name in ("driver_peak_bytes", "worker_peak_bytes")]
            row += [f"{stats['requests']:,}", *(f"{v:,.1f}" for v in speeds), *(f"{v:.2f}" for v in peaks)]
        rows.append(row + ["–"] * (len(head) - len(row)))
    return ReportTable(head, rows)


def main_table(report: Report) -> ReportTable:
    """Build a table of the measures of each method, best first by nDCG, which depends on grades and ranks."""
    rows: dict[str, dict[str, float]] = report["methods"]
    names, sample = measures_of(rows), report.get("sample")
    highest = {name: max(row[name] for row in rows.values() if name in row) for name in names}

    def cell(method: str, name: str) -> str:
        if (value := rows[method].get(name)) is None:
            return "–"
        spread = report.get("spread", {}).get(method, {}).get(name)
        text = f"{value:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
        text += significance_mark(report, method, name)
        return StrongCell(text) if value == highest[name] else text

    def documents(method: str) -> list[str]:
        """Return the number of documents that a method searched, if methods searched different numbers."""
        if not sample:
            return []
        return [f"{report['num_documents'] if '(index)' in method else sample['documents']:,}"]

    head = ["method", *(["documents"] if sample else []), *names]
    cells = [[m, *documents(m), *(cell(m, name) for name in names)] for m in best_first(report)]
    return ReportTable(head, cells)


def best_first(report: Report) -> list[str]:
    """Return the methods in the order of the main table."""
    methods: dict[str, dict[str, float]] = report["methods"]
    last = measures_of(methods)[-1]
    return sorted(methods, key=lambda method: (-methods[method].get(last, 0.0), method))


def index_table(
    indexes: Mapping[str, Mapping[str, int | float]], seconds: Mapping[str, Mapping[str, float]]
) -> ReportTable:
    """Build a table of recall, size and time of each index, by its query tower."""
    rows = [
        [
            method,
            *(f"{index[name]:.3f}" if name in index else "–" for name in ("recall@10", "recall@100")),
            f"{index['bytes_per_vector']:g}",
            f"{sum(seconds[method].values()):,.0f}s",
        ]
        for method, index in indexes.items()
    ]
    return ReportTable(["index of", "recall@10", "recall@100", "bytes per vector", "pipeline"], rows)


def served_tower(report: Report) -> str:
    """Return the query tower that searches the index; the first method if there is no such row."""
    names = list(report["methods"])
    through_index = [name for name in names if name.endswith(THROUGH_INDEX)]
    return str((through_index or names)[0]).removesuffix(THROUGH_INDEX)


def differences_table(report: Report, *, intervals: bool = True) -> ReportTable:
    """Build a table of differences from the baseline with corrected p-values: a row for each measure."""
    differences = report.get("significance", {}).get("differences", {})

    def cell(method: str, measure: str) -> str:
        values = differences[method][measure]
        p, text = values["p_holm"], f"{values['difference']:+.3f}"
        if intervals:
            text += f" [{values['low']:+.3f}, {values['high']:+.3f}]"
        text += "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.3f}"
        return f"{text} {significance_mark(report, method, measure)}".rstrip()

    order = [method for method in best_first(report) if method in differences]
    rows = [[name, *(cell(method, name) for method in order)] for name in measure_names(differences)]
    return ReportTable(["measure", *order], rows)


def size_line(report: Report) -> str:
    """Return a line with the data set and the numbers of documents and queries."""
    return f"{report['dataset']}: {report['num_documents']:,} documents, {report['num_queries']:,} queries"


def notes(report: Report) -> list[str]:
    """Return notes on the data for readers of the main table."""
    lines = [SIMULATED] if report["simulated_clicks"] else []
    if (seeds := report.get("seeds", 1)) > 1:
        lines.append(
            f"Means over {seeds} trainings with different seeds, ± the standard deviation between them. The "
            "tests compare means over seeds query by query: they hold for other queries, but only for these "
            "seeds."
        )
    if sample := report.get("sample"):
        lines.append(
            f"Exact search and BM25 cover a seeded sample of {sample['documents']:,} of "
            f"{report['num_documents']:,} documents, with all judged ones; the index covers all. Among fewer "
            "documents a query finds its relevant ones more easily: rows of the index are not comparable "
            "with other rows, and its recall against exact search was not measured."
        )
    return lines


def measures_of(methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the measures of the main table in order: all except Recall@K."""
    return [name for name in measure_names(methods) if not is_recall(name)]


def significance_mark(report: Report, method: str, measure: str) -> str:
    """Return a mark if a method is significantly better or worse than the baseline, else empty text."""
    significance = report.get("significance", {})
    difference = significance.get("differences", {}).get(method, {}).get(measure)
    if difference is None or difference["p_holm"] is None or difference["p_holm"] >= significance["alpha"]:
        return ""
    return BETTER if difference["difference"] > 0 else WORSE


# --- lineage: all ancestors of an artifact, by the parents in manifests ------------------------------------


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage; `artifact` is None if it was deleted or replaced since."""

    kind: str  # if it was deleted, the name of the parent in the manifest of its child
    uri: str
    digest: str
    artifact: Artifact | None

    @property
    def stage(self) -> str:
        """Stage that built the artifact, without the round: the folder in the directory of the run."""
        return self.uri.rstrip("/").split("/")[-2].partition("@")[0]


def lineage(artifacts: Iterable[Artifact]) -> list[Ancestor]:
    """Return the artifacts and all their ancestors in topological order: parents come first."""
    ancestors: dict[str, Ancestor] = {}
    for artifact in artifacts:
        _add(Ancestor(artifact.manifest.kind, artifact.uri, artifact.digest, artifact), ancestors)
    return list(ancestors.values())


def _add(ancestor: Ancestor, known: dict[str, Ancestor]) -> None:
    if ancestor.digest in known:
        return
    parents = ancestor.artifact.manifest.parents if ancestor.artifact else {}
    for name, parent in sorted(parents.items()):
        if not name.startswith(MIXED):
            _add(_open(name, parent["uri"], parent["digest"]), known)
    known[ancestor.digest] = ancestor


def _open(name: str, uri: str, digest: str) -> Ancestor:
    try:
        manifest = read_manifest(uri)
    except ArtifactError:  # the manifest is of another release
        manifest = None
    if manifest is None or manifest.digest != digest:
        return Ancestor(name, uri, digest, None)
    return Ancestor(manifest.kind, uri, digest, Artifact(uri, manifest))


def latest(ancestors: Iterable[Ancestor], kind: str) -> Artifact | None:
    """Return the last existing artifact of a kind in a lineage; None if there is none."""
    artifacts = [ancestor.artifact for ancestor in ancestors if ancestor.kind == kind and ancestor.artifact]
    return artifacts[-1] if artifacts else None


def seconds(ancestors: Iterable[Ancestor]) -> dict[str, float]:
    """Return stage -> seconds of the last attempts of all its rounds, for artifacts that still exist."""
    by_stage: dict[str, float] = {}
    for one in ancestors:
        duration = one.artifact.manifest.info.get("seconds") if one.artifact else None
        if duration is not None:
            by_stage[one.stage] = round(by_stage.get(one.stage, 0.0) + duration, 3)
    return by_stage


def usage(ancestors: Iterable[Ancestor]) -> dict[str, dict[str, int]]:
    """Return stage -> use of storage and memory: sums over its rounds, and the largest peaks."""
    by_stage: dict[str, dict[str, int]] = {}
    for ancestor in ancestors:
        stats = ancestor.artifact.manifest.info.get("usage", {}) if ancestor.artifact else {}
        total = by_stage.setdefault(ancestor.stage, {}) if stats else {}
        for name, value in stats.items():
            before = total.get(name, 0)
            total[name] = max(before, value) if name.endswith("peak_bytes") else before + value
    return by_stage
