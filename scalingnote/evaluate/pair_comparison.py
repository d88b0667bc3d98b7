"""Two pairs of query tower and index over the same documents, compared on the queries that people send.

    queries of access logs, or of the data set ─► both pairs ─► overlap of their answers, times of both
    test queries with judgements ──────────────► both pairs ─► nDCG@10, and the interval of its difference

report.json: {"documents", "queries": {"source", "count"}, "overlap@10", "same_first", "judged",
 "pairs": {"before" | "after": {"model", "dim", "form", "encode_ms", "search_ms": [p50, p95], "bytes": {...},
 "encode": {"worker_seconds", "tokens"}, "measures"}}, "significance", "changed": [...], "environment"}
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from scalingnote.core.config import Config
from scalingnote.core.errors import DataError
from scalingnote.core.log import environment, get_logger
from scalingnote.core.reports import ReportPage, ReportSection, ReportTable, environment_line, render
from scalingnote.datasets.input_files import Quarantine
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate.experiment.access_log import SEARCH_PATH, find_logs, read_requests
from scalingnote.evaluate.measures import (
    NDCG_DEPTH,
    MeasureValues,
    ann_recall,
    means,
    measure_names,
    per_query,
    significance_section,
)
from scalingnote.evaluate.test_set import TestSet, load_test_set
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.search.query_path import QueryPath
from scalingnote.search.searcher import Searcher, SearchHit
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, fingerprint

DEPTH = 10  # documents of an answer that are compared
MAX_COMPARED_QUERIES = 1_000  # drawn from a log
WARM_UP_QUERIES = 3  # before the times that count
MAX_CHANGED = 10  # queries that the report shows
TITLE_CHARACTERS = 60  # of a document that the report shows
PAIRS = ("before", "after")
SIZES = ("query tower", "index", "embeddings")  # in bytes
PairReport = dict[str, Any]
log = get_logger("compare")


@dataclass(frozen=True)
class SearchedPair:
    """The artifacts of a query tower and of the index that it searches."""

    model: str  # for people
    tower: Artifact
    index: Artifact
    embeddings: Artifact
    terms: Artifact | None = None  # with ``sparse_query/``
    mapped: bool = False  # whether the vectors stay in the files of the index


class ComparedQueries(Config):
    """Identity of a comparison beside its artifacts."""

    source: str = Field(description="where the queries are from, for people")
    sha256: str = Field(description="of the queries, a line each")


def log_queries(folder: str, *, most: int = MAX_COMPARED_QUERIES) -> list[str]:
    """Queries of the searches in access logs that were answered, drawn evenly, each as often as it was sent.

    DataError where there is no log. Lines that cannot be read are left out.
    """
    rng = np.random.default_rng(0)
    kept: list[tuple[float, str]] = []
    for batch in read_requests(find_logs([folder]), Quarantine()):
        rows = batch.select(["path", "status", "query"]).to_pylist()
        answered = [row for row in rows if row["path"] == SEARCH_PATH and row["status"] < 400]
        sent = [row["query"] for row in answered if row["query"]]
        kept = sorted([*kept, *zip(rng.random(len(sent)).tolist(), sent, strict=True)])[:most]
    return [query for _, query in kept]


def compare(
    before: SearchedPair,
    after: SearchedPair,
    queries: Sequence[str],
    *,
    source: str,
    dataset: Artifact,
    output: str,
) -> Artifact:
    """Build a `comparison`: answers, times and sizes of two pairs.

    Args:
        before: that is served.
        after: that may take its place.
        queries: texts to compare the answers to.
        source: of the queries, for people.
        dataset: of the documents, and of the judgements if there are some.
        output: folder, below which the artifact is named by its queries and the artifacts compared.

    Raises:
        DataError: there is no query.
    """
    sha256 = hashlib.sha256("\n".join(queries).encode()).hexdigest()
    identity = ComparedQueries(source=source, sha256=sha256)
    pairs = dict(zip(PAIRS, (before, after), strict=True))
    parents = {"dataset": dataset} | {f"index_{name}": pair.index for name, pair in pairs.items()}
    parents |= {f"tower_{name}": pair.tower for name, pair in pairs.items()}
    place = fs.absolute(fs.join(output, fingerprint("comparison", identity, parents)[:12]))
    draft = Draft(place, kind="comparison", config=identity, parents=parents)
    if draft.finished:
        return draft.existing()
    if not queries:
        raise DataError(f"no queries to compare the models on in {source}")
    report, table = _report(pairs, queries, source=source, dataset=dataset)
    page = report_page(report)
    for name in ("report.html", "report.md"):
        draft.write_bytes(name, render(name, page=page).encode())
    draft.write_json("report.json", report)
    draft.write_table("queries.parquet", table)
    return draft.commit(counts={"queries": len(queries), "judged": report["judged"]})


def _report(
    pairs: Mapping[str, SearchedPair], queries: Sequence[str], *, source: str, dataset: Artifact
) -> tuple[PairReport, pa.Table]:
    """The report of both pairs, and a table of the documents that each found for the queries."""
    try:
        judged: TestSet | None = load_test_set(dataset)
    except DataError:  # a data set without judgements
        judged = None
    measured = {name: _measure(pair, queries, judged) for name, pair in pairs.items()}
    answers = {name: hits for name, (_, hits, _) in measured.items()}
    ids = {name: [[hit.doc_id for hit in hits] for hits in found] for name, found in answers.items()}
    shared = [ann_recall([new], [old], k=DEPTH) for old, new in zip(ids["before"], ids["after"], strict=True)]
    report: PairReport = {
        "documents": dataset.counts["documents"],
        "queries": {"source": source, "count": len(queries)},
        f"overlap@{DEPTH}": float(np.mean(shared)),
        "same_first": float(np.mean([old[:1] == new[:1] for old, new in zip(*ids.values(), strict=True)])),
        "judged": len(judged.query_ids) if judged else 0,
        "pairs": {name: facts for name, (facts, _, _) in measured.items()},
        "changed": _least_shared(queries, shared, answers),
        "environment": environment(),
    }
    if judged:
        values = {name: of_queries for name, (_, _, of_queries) in measured.items()}
        for name, row in means(values).items():
            report["pairs"][name]["measures"] = row
        report["significance"] = significance_section(values, baseline="before")
    return report, pa.table({"query": list(queries), f"overlap@{DEPTH}": shared, **ids})


# --- one pair ---------------------------------------------------------------------------------------------


def _measure(
    pair: SearchedPair, queries: Sequence[str], judged: TestSet | None
) -> tuple[dict[str, Any], list[list[SearchHit]], MeasureValues]:
    """Answer queries one after the other, as a service gets them, and time both steps.

    Returns:
        Facts of the report, the answers to `queries`, and measures of each judged query.
    """
    searcher = Searcher.open(pair.index.uri, mapped=pair.mapped)
    encoder = QueryEncoder(pair.tower.directory("query"))
    # Candidates by terms are scored by kept vectors, which an index of codes alone does not have.
    hybrid = pair.terms is not None and searcher.layout.sparse and searcher.layout.refine != "none"
    terms = SparseQuery.load(pair.terms.directory("sparse_query")) if pair.terms and hybrid else None
    path = QueryPath(encoder, terms)

    def answer(query: str) -> tuple[list[SearchHit], float, float]:
        """Documents, and the milliseconds of encoding and of searching."""
        start = time.perf_counter()
        (encoded,) = path([query])
        middle = time.perf_counter()
        (hits,) = searcher.search(encoded.embedding, encoded.terms, k=DEPTH)
        return hits, 1000 * (middle - start), 1000 * (time.perf_counter() - middle)

    for query in queries[:WARM_UP_QUERIES]:
        answer(query)
    answers, encode_ms, search_ms = map(list, zip(*map(answer, queries), strict=True))
    sizes = (_bytes(pair.tower, "query/"), _bytes(pair.index), _bytes(pair.embeddings))
    facts = {
        "model": pair.model,
        "dim": encoder.dim,
        "form": encoder.form,
        "encode_ms": np.percentile(encode_ms, [50, 95]).tolist(),
        "search_ms": np.percentile(search_ms, [50, 95]).tolist(),
        "bytes": dict(zip(SIZES, sizes, strict=True)),
        "encode": pair.embeddings.manifest.info.get("encoding", {}),
    }
    values: MeasureValues = {}
    if judged:
        asked = zip(judged.query_ids, judged.queries, strict=True)
        rankings = {query_id: [hit.doc_id for hit in answer(text)[0]] for query_id, text in asked}
        measures = per_query(rankings, judged.qrels, recall_at=(DEPTH,))
        values = {name: value for name, value in measures.items() if name.endswith(f"@{DEPTH}")}
    log.info("%s: %d queries answered", pair.model, len(queries))
    return facts, answers, values


def _bytes(artifact: Artifact, prefix: str = "") -> int:
    parts = artifact.manifest.parts
    return sum(parts[name].bytes for name in artifact.names(prefix))


def _least_shared(
    queries: Sequence[str], shared: Sequence[float], answers: dict[str, list[list[SearchHit]]]
) -> list[dict[str, Any]]:
    """The queries whose answers share least, each once, and the first document of either answer."""
    found: dict[str, dict[str, Any]] = {}
    for row in np.argsort(shared, kind="stable").tolist():
        first = {
            name: (hits[row][0].document["title"] or hits[row][0].doc_id) if hits[row] else ""
            for name, hits in answers.items()
        }
        found.setdefault(queries[row], {"query": queries[row], "overlap": shared[row], **first})
        if len(found) == MAX_CHANGED:
            break
    return list(found.values())


# --- what people read -------------------------------------------------------------------------------------


def report_page(report: PairReport) -> ReportPage:
    """The report of a comparison, for Markdown and HTML alike."""
    changed = ReportTable(
        ["query", "first before", "first after", f"overlap@{DEPTH}"],
        [
            [*(_short(row[name]) for name in ("query", *PAIRS)), f"{row['overlap']:.1f}"]
            for row in report["changed"]
        ],
        text=3,
    )
    sections = [
        ReportSection("Both models", tables=[comparison_table(report)]),
        ReportSection("Queries that change most", tables=[changed]),
        ReportSection("Environment", environment_line(report["environment"])),
    ]
    return ReportPage("Two models over the same documents", sections, summary=summary(report))


def _short(text: str) -> str:
    return text if len(text) <= TITLE_CHARACTERS else f"{text[: TITLE_CHARACTERS - 1]}…"


def summary(report: PairReport) -> str:
    """What was compared, and how far the answers agree."""
    queries = report["queries"]
    judged = f"; measures on {report['judged']:,} test queries with judgements" if report["judged"] else ""
    return (
        f"{report['documents']:,} documents, {queries['count']:,} queries of {queries['source']}: "
        f"{report[f'overlap@{DEPTH}']:.0%} of the first {DEPTH} documents are the same, for "
        f"{report['same_first']:.0%} of the queries the very first one is{judged}."
    )


def comparison_table(report: PairReport) -> ReportTable:
    """Both pairs side by side."""
    pairs = [report["pairs"][name] for name in PAIRS]
    rows = [["model", *(pair["model"] for pair in pairs)]]
    rows.append(["query tower", *(f"{pair['form']}, {pair['dim']} dimensions" for pair in pairs)])
    for name in measure_names({pair["model"]: pair.get("measures", {}) for pair in pairs}):
        low_to_high = _interval(report, name) if name == f"nDCG@{NDCG_DEPTH}" else ""
        first, second = (f"{pair['measures'][name]:.4f}" for pair in pairs)
        rows.append([name, first, f"{second}{low_to_high}"])
    for step in ("encode", "search"):
        times = ("{:.2f}, {:.2f}".format(*pair[f"{step}_ms"]) for pair in pairs)
        rows.append([f"{step} a query, ms (p50, p95)", *times])
    for name in SIZES:
        rows.append([f"{name}, MB", *(f"{pair['bytes'][name] / 1e6:,.1f}" for pair in pairs)])
    seconds = [pair["encode"].get("worker_seconds") for pair in pairs]
    rows.append(["documents encoded in, worker s", *(f"{s:,.1f}" if s else "–" for s in seconds)])
    return ReportTable(["", *PAIRS], rows)


def _interval(report: PairReport, measure: str) -> str:
    """The difference of a measure, with its interval."""
    found = report["significance"]["differences"]["after"][measure]
    return f" ({found['difference']:+.4f}, 95 %: {found['low']:+.4f} to {found['high']:+.4f})"
