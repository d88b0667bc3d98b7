"""Reports: the shape of report.json, what report.md and report.html show of it, and the lineage of artifacts.

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

An undefined number is null. Only dataset, methods, index, seconds and environment are always present;
`sample` and no recall of the index where exact search covered some of the documents; `seeds` and `spread`
where several trainings were pooled.
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
THROUGH_INDEX = " (index)"  # behind the name of the served query tower
SIMULATED = "Training clicks were simulated from judged data (dataset.click_model)."
METHODS_NOTE = (
    "R@K is the share of queries with a relevant document among their first K of the whole pool "
    "(Success@K where a query has several). Methods are searched exactly; “(index)” is the same query "
    "tower searched through the compressed index."
)

_ENTROPY = (
    "Mean of -log softmax of a query's best document against others drawn from the pool, the same for all "
    "methods: {negatives:,} of them, cosines over a temperature of {temperature:g}, {queries:,} queries. "
    "Smaller is better; guessing gives {guess:.3f}."
)
_BY_METHOD = {
    "auc": (
        "Judged pairs",
        "Over {pairs:,} judged pairs of a query and a document, ranked together: how often the better of two "
        "has the higher score. Not in the pool: {not_in_pool:,}; unusable rows: {unusable:,}.",
    ),
    "relaxed": (
        "Answers found",
        "Relaxed R@K: the share of {queries:,} queries with one of their answers, word by word, in one of "
        "the first K documents.",
    ),
    "reranking": (
        "Re-ranking",
        "{candidates:,} given candidates of {queries:,} queries in the order of each method's scores; "
        "{not_in_pool:,} are not in the pool and come last.",
    ),
}


def report_page(report: Report, ancestors: Iterable["Ancestor"]) -> ReportPage:
    """All sections of a report in reading order, for Markdown and HTML alike."""
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
    """A picture: a measure of each method against the queries that a core encodes."""
    rates: Mapping[str, float] = report.get("queries_per_core_second", {})
    if not rates:  # of an earlier release, or not measured
        return
    measure = measures_of(report["methods"])[-1]
    rows = [
        (method, rates.get(METHOD_SUFFIX.sub("", method)), report["methods"][method][measure])
        for method in best_first(report)
    ]
    text = (
        f"{measure} against the queries that one core encodes per second, in blocks. Methods of one query "
        "tower encode alike; their search is not counted. Dashed: a method without an encoder."
    )
    table = ReportTable(
        ["method", "queries/s and core", measure],
        [[method, f"{rate:,.0f}" if rate else "–", f"{value:.3f}"] for method, rate, value in rows],
    )
    from scalingnote.evaluate import pictures  # late: matplotlib takes seconds

    points = {method: (rate, value) for method, rate, value in rows}
    draw = partial(pictures.draw_quality_and_cost, points=points, measure=measure)
    picture = pictures.svg("quality and cost of the methods", draw)
    yield ReportSection("Quality and cost", text, [table], [picture])


def _methods(report: Report) -> Iterator[ReportSection]:
    order = best_first(report)
    from scalingnote.evaluate import pictures  # late, as above

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
        "the queries; those of a row hold all at once) and p (paired two-sided t-test, Holm's correction "
        f"over the methods). {BETTER} and {WORSE}: better and worse than {baseline}, p < {part['alpha']:g}."
    )
    yield ReportSection(f"Against {baseline}", text, [differences_table(report)])


def _by_method(report: Report) -> Iterator[ReportSection]:
    """Sections that are a table of methods and measures."""
    recalls = [name for name in measure_names(report["methods"]) if is_recall(name)]
    if recalls:
        text = "The share of a query's relevant documents among its first K: here some queries have several."
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
        f"{measure}. The same queries, asked again with a letter swapped, dropped or doubled in a share of "
        "their words (evaluate.typos)."
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
        "Of the student's query embeddings from the teacher's, both of length 1; 2K/n Σ is what the papers' "
        "bound on the student's loss grows by, K being 1. As given: of what the towers put out."
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
    """A section with a row per method and a column per measure."""
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
        known = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())
        known = known if ancestor.artifact else "no longer there"
        digest, uri = CodeCell(ancestor.digest[:12]), CodeCell(ancestor.uri)
        rows.append([ancestor.stage, ancestor.kind, digest, known, uri])
    head = ["stage", "artifact", "digest", "counts", "where"]
    text = "Every artifact these numbers rest on. A digest covers settings, inputs and bytes."
    return ReportSection("Lineage", text, [ReportTable(head, rows, text=5)])


# --- tables and lines, also of several reports --------------------------------------------------------------


def stage_table(report: Report) -> ReportTable:
    """Time, storage and memory of each stage."""
    head = ["stage", "seconds", "requests", "MB/s read", "MB/s written", "GB of driver", "GB of a worker"]
    rows = []
    for stage, seconds in report["seconds"].items():
        row = [stage, f"{seconds:,.1f}"]
        if used := report.get("usage", {}).get(stage):  # artifacts of earlier releases have none
            speeds = [used[name] / 1e6 / max(seconds, 1e-3) for name in ("bytes_read", "bytes_written")]
            peaks = [used[name] / 1e9 for name in ("driver_peak_bytes", "worker_peak_bytes")]
            row += [f"{used['requests']:,}", *(f"{v:,.1f}" for v in speeds), *(f"{v:.2f}" for v in peaks)]
        rows.append(row + ["–"] * (len(head) - len(row)))
    return ReportTable(head, rows)


def main_table(report: Report) -> ReportTable:
    """Measures of each method, best first by the last one: nDCG, which considers both grades and ranks."""
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
        """The number that a method searched, where not all methods searched all."""
        if not sample:
            return []
        return [f"{report['num_documents'] if '(index)' in method else sample['documents']:,}"]

    head = ["method", *(["documents"] if sample else []), *names]
    cells = [[m, *documents(m), *(cell(m, name) for name in names)] for m in best_first(report)]
    return ReportTable(head, cells)


def best_first(report: Report) -> list[str]:
    """Methods in the order of the main table."""
    methods: dict[str, dict[str, float]] = report["methods"]
    last = measures_of(methods)[-1]
    return sorted(methods, key=lambda method: (-methods[method].get(last, 0.0), method))


def index_table(
    indexes: Mapping[str, Mapping[str, int | float]], seconds: Mapping[str, Mapping[str, float]]
) -> ReportTable:
    """Recall, size and time of each index, by the tower behind it."""
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
    """The query tower behind the index; without such a row the first method."""
    names = list(report["methods"])
    through = [name for name in names if name.endswith(THROUGH_INDEX)]
    return str((through or names)[0]).removesuffix(THROUGH_INDEX)


def differences_table(report: Report, *, intervals: bool = True) -> ReportTable:
    """Differences of the methods from the baseline with corrected p-values: a row for each measure."""
    differences = report.get("significance", {}).get("differences", {})

    def cell(method: str, measure: str) -> str:
        found = differences[method][measure]
        p, text = found["p_holm"], f"{found['difference']:+.3f}"
        if intervals:
            text += f" [{found['low']:+.3f}, {found['high']:+.3f}]"
        text += "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.3f}"
        return f"{text} {significance_mark(report, method, measure)}".rstrip()

    order = [method for method in best_first(report) if method in differences]
    rows = [[name, *(cell(method, name) for method in order)] for name in measure_names(differences)]
    return ReportTable(["measure", *order], rows)


def size_line(report: Report) -> str:
    """One line: the data set, and the numbers of documents and queries."""
    return f"{report['dataset']}: {report['num_documents']:,} documents, {report['num_queries']:,} queries"


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


# --- lineage: all artifacts behind an artifact, by the parents in manifests --------------------------------


@dataclass(frozen=True)
class Ancestor:
    """One artifact of a lineage; `artifact` is None if it was deleted or replaced since."""

    kind: str  # as its child calls it where it is gone
    uri: str
    digest: str
    artifact: Artifact | None

    @property
    def stage(self) -> str:
        """The stage that built the artifact, over all of its rounds: the folder in the run's directory."""
        return self.uri.rstrip("/").split("/")[-2].partition("@")[0]


def lineage(artifacts: Iterable[Artifact]) -> list[Ancestor]:
    """The artifacts and all their ancestors in topological order: parents come first."""
    ancestors: dict[str, Ancestor] = {}
    for artifact in artifacts:
        _add(Ancestor(artifact.manifest.kind, artifact.uri, artifact.digest, artifact), ancestors)
    return list(ancestors.values())


def _add(ancestor: Ancestor, known: dict[str, Ancestor]) -> None:
    if ancestor.digest in known:
        return
    recorded = ancestor.artifact.manifest.parents if ancestor.artifact else {}
    for name, parent in sorted(recorded.items()):
        if not name.startswith(MIXED):
            _add(_open(name, parent["uri"], parent["digest"]), known)
    known[ancestor.digest] = ancestor


def _open(name: str, uri: str, digest: str) -> Ancestor:
    try:
        manifest = read_manifest(uri)
    except ArtifactError:  # of another release
        manifest = None
    if manifest is None or manifest.digest != digest:
        return Ancestor(name, uri, digest, None)
    return Ancestor(manifest.kind, uri, digest, Artifact(uri, manifest))


def latest(ancestors: Iterable[Ancestor], kind: str) -> Artifact | None:
    """The last artifact of a kind in a lineage; None if there is none any more."""
    found = [ancestor.artifact for ancestor in ancestors if ancestor.kind == kind and ancestor.artifact]
    return found[-1] if found else None


def seconds(ancestors: Iterable[Ancestor]) -> dict[str, float]:
    """Stage -> seconds of the last attempts of all its rounds, of the artifacts that still exist."""
    by_stage: dict[str, float] = {}
    for one in ancestors:
        taken = one.artifact.manifest.info.get("seconds") if one.artifact else None
        if taken is not None:
            by_stage[one.stage] = round(by_stage.get(one.stage, 0.0) + taken, 3)
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
