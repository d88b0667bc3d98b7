"""Comparison of two pairs of query tower and index over the same documents, on the queries of users.

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

DEPTH = 10  # number of documents of an answer that are compared
MAX_COMPARED_QUERIES = 1_000  # limit of queries drawn from logs
WARM_UP_QUERIES = 3  # queries before time is measured
MAX_CHANGED = 10  # limit of changed queries in the report
TITLE_CHARACTERS = 60  # limit of a query or title in the report
PAIRS = ("before", "after")
SIZES = ("query tower", "index", "embeddings")  # artifacts whose bytes are reported
PairReport = dict[str, Any]
log = get_logger("compare")


@dataclass(frozen=True)
class SearchedPair:
    """Artifacts of a query tower and of the index that it searches."""

    model: str  # name in the report
    tower: Artifact
    index: Artifact
    embeddings: Artifact
    terms: Artifact | None = None  # has ``sparse_query/``
    mapped: bool = False  # whether vectors are read from the mapped files of the index


class ComparedQueries(Config):
    """Identity of a comparison, in addition to its artifacts."""

    source: str = Field(description="origin of the queries, shown in the report")
    sha256: str = Field(description="checksum of the queries, one per line")


def log_queries(folder: str, *, most: int = MAX_COMPARED_QUERIES) -> list[str]:
    """Draw queries of answered searches evenly from access logs, with repetitions as in the logs.

    Lines that cannot be read are left out.

    Args:
        folder: of the logs.
        most: limit of the queries.

    Raises:
        DataError: there are no logs.
    """
    rng = np.random.default_rng(0)
    sample: list[tuple[float, str]] = []
    for batch in read_requests(find_logs([folder]), Quarantine()):
        rows = batch.select(["path", "status", "query"]).to_pylist()
        answered = [row for row in rows if row["path"] == SEARCH_PATH and row["status"] < 400]
        texts = [row["query"] for row in answered if row["query"]]
        sample = sorted([*sample, *zip(rng.random(len(texts)).tolist(), texts, strict=True)])[:most]
    return [query for _, query in sample]


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
        before: pair that is served.
        after: pair that may replace it.
        queries: texts whose answers are compared.
        source: origin of the queries, for the report.
        dataset: of the documents, with judgements if there are some.
        output: folder of the artifact, which is named by the queries and the compared artifacts.

    Raises:
        DataError: there are no queries.
    """
    sha256 = hashlib.sha256("\n".join(queries).encode()).hexdigest()
    identity = ComparedQueries(source=source, sha256=sha256)
    pairs = dict(zip(PAIRS, (before, after), strict=True))
    parents = {"dataset": dataset} | {f"index_{name}": pair.index for name, pair in pairs.items()}
    parents |= {f"tower_{name}": pair.tower for name, pair in pairs.items()}
    uri = fs.absolute(fs.join(output, fingerprint("comparison", identity, parents)[:12]))
    draft = Draft(uri, kind="comparison", config=identity, parents=parents)
    if draft.finished:
        return draft.existing()
    if not queries:
        raise DataError(f"{source}: no queries to compare the models, use other logs or another data set")
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
    """Build the report of both pairs, and a table of the documents that each found for the queries."""
    try:
        judged: TestSet | None = load_test_set(dataset)
    except DataError:  # a data set without judgements
        judged = None
    results = {name: _measure(pair, queries, judged) for name, pair in pairs.items()}
    answers = {name: hits for name, (_, hits, _) in results.items()}
    ids = {
        name: [[hit.doc_id for hit in hits] for hits in pair_answers]
        for name, pair_answers in answers.items()
    }
    overlaps = [
        ann_recall([new], [old], k=DEPTH) for old, new in zip(ids["before"], ids["after"], strict=True)
    ]
    report: PairReport = {
        "documents": dataset.counts["documents"],
        "queries": {"source": source, "count": len(queries)},
        f"overlap@{DEPTH}": float(np.mean(overlaps)),
        "same_first": float(np.mean([old[:1] == new[:1] for old, new in zip(*ids.values(), strict=True)])),
        "judged": len(judged.query_ids) if judged else 0,
        "pairs": {name: facts for name, (facts, _, _) in results.items()},
        "changed": _least_shared(queries, overlaps, answers),
        "environment": environment(),
    }
    if judged:
        values = {name: of_queries for name, (_, _, of_queries) in results.items()}
        for name, row in means(values).items():
            report["pairs"][name]["measures"] = row
        report["significance"] = significance_section(values, baseline="before")
    return report, pa.table({"query": list(queries), f"overlap@{DEPTH}": overlaps, **ids})


# --- one pair ---------------------------------------------------------------------------------------------


def _measure(
    pair: SearchedPair, queries: Sequence[str], judged: TestSet | None
) -> tuple[dict[str, Any], list[list[SearchHit]], MeasureValues]:
    """Answer queries one after the other, like a service, and measure the time of both steps.

    Returns:
        Facts for the report, the answers to `queries`, and measures of each judged query.
    """
    searcher = Searcher.open(pair.index.uri, mapped=pair.mapped)
    encoder = QueryEncoder(pair.tower.directory("query"))
    # Candidates by terms are scored by kept vectors, which an index with only codes does not have.
    is_hybrid = pair.terms is not None and searcher.layout.sparse and searcher.layout.refine != "none"
    terms = SparseQuery.load(pair.terms.directory("sparse_query")) if pair.terms and is_hybrid else None
    path = QueryPath(encoder, terms)

    def answer(query: str) -> tuple[list[SearchHit], float, float]:
        """Return documents, and the milliseconds of encoding and of the search."""
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
        pairs = zip(judged.query_ids, judged.queries, strict=True)
        rankings = {query_id: [hit.doc_id for hit in answer(text)[0]] for query_id, text in pairs}
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
    """Return the queries whose answers overlap least, each once, with the first document of both answers."""
    rows: dict[str, dict[str, Any]] = {}
    for row in np.argsort(shared, kind="stable").tolist():
        first = {
            name: (hits[row][0].document["title"] or hits[row][0].doc_id) if hits[row] else ""
            for name, hits in answers.items()
        }
        rows.setdefault(queries[row], {"query": queries[row], "overlap": shared[row], **first})
        if len(rows) == MAX_CHANGED:
            break
    return list(rows.values())


# --- tables and text of the report ------------------------------------------------------------------------


def report_page(report: PairReport) -> ReportPage:
    """Build the report of a comparison, for both Markdown and HTML."""
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
    """Describe the comparison and the overlap of the answers in one sentence."""
    queries = report["queries"]
    judged = f"; measures on {report['judged']:,} test queries with judgements" if report["judged"] else ""
    return (
        f"{report['documents']:,} documents, {queries['count']:,} queries of {queries['source']}: "
        f"{report[f'overlap@{DEPTH}']:.0%} of the first {DEPTH} documents are the same, for "
        f"{report['same_first']:.0%} of the queries the first one is the same{judged}."
    )


def comparison_table(report: PairReport) -> ReportTable:
    """Build a table with a column per pair."""
    pairs = [report["pairs"][name] for name in PAIRS]
    rows = [["model", *(pair["model"] for pair in pairs)]]
    rows.append(["query tower", *(f"{pair['form']}, {pair['dim']} dimensions" for pair in pairs)])
    for name in measure_names({pair["model"]: pair.get("measures", {}) for pair in pairs}):
        interval = _interval(report, name) if name == f"nDCG@{NDCG_DEPTH}" else ""
        first, second = (f"{pair['measures'][name]:.4f}" for pair in pairs)
        rows.append([name, first, f"{second}{interval}"])
    for step in ("encode", "search"):
        times = ("{:.2f}, {:.2f}".format(*pair[f"{step}_ms"]) for pair in pairs)
        rows.append([f"{step} a query, ms (p50, p95)", *times])
    for name in SIZES:
        rows.append([f"{name}, MB", *(f"{pair['bytes'][name] / 1e6:,.1f}" for pair in pairs)])
    seconds = [pair["encode"].get("worker_seconds") for pair in pairs]
    rows.append(["encode documents, worker s", *(f"{s:,.1f}" if s else "–" for s in seconds)])
    return ReportTable(["", *PAIRS], rows)


def _interval(report: PairReport, measure: str) -> str:
    values = report["significance"]["differences"]["after"][measure]
    return f" ({values['difference']:+.4f}, 95 %: {values['low']:+.4f} to {values['high']:+.4f})"
