"""The engines behind `/search` over the same vectors: our index, Qdrant's local mode, Milvus Lite.

    python -m benchmarks.backends --json docs/results/backends.json

Passages of real text (benchmarks/passage_artifacts.py: 128 dimensions, their tokens as terms) are exported to
each database by the code of `scalingnote export vectors`, and every engine is searched through the interface
that a service uses (scalingnote/search/backend.py), one query at a time, k = 100, in one process. Recall is
the share of the best by brute force over the floats.

    exact      every engine as exact as it can be: ours compares all kept vectors, Qdrant's local mode always
               does, Milvus walks its graph with ef = 32,768
    default    ours with 16 lists, the databases as they come
    hybrid     embeddings and terms at the exact setting, joined by the same code: the share of the best that
               ours finds, too
    filter     one topic of twenty, at the default setting

Both databases run inside the client's process: Qdrant's local mode is numpy over all vectors, Milvus Lite
Python around HNSW of faiss. A server of either is another program: these are figures of what tests run on.
"""

import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray

from benchmarks import passage_artifacts
from benchmarks.passage_artifacts import Inputs
from benchmarks.report import arguments, show, write
from scalingnote import topk
from scalingnote.export import databases, vectors
from scalingnote.hybrid import Joining
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.backend import DatabaseSearcher, SearchBackend
from scalingnote.search.config import SearchConfig
from scalingnote.search.searcher import Candidates, Searcher, rank

PLACES = {"qdrant": "qdrant", "milvus": "milvus.db"}
COLLECTION, K = "passages", 100
JOINED = Joining(candidates=K)
WHERE = {"topic": "topic 7"}
Row = dict[str, Any]
Find = Callable[[int], Candidates]


def main() -> None:
    """Parse arguments, run, print and write."""
    options = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loads, searches, joined = run(options, Path(folder))
    show("Loading", loads)
    show(f"{options.documents:,} documents, {options.queries} queries, one at a time, k = {K}", searches)
    show("Embeddings and terms", joined)
    write(options.json, metrics=metrics(searches, joined), loads=loads, searches=searches, joined=joined)


def parser() -> ArgumentParser:
    """What this benchmark can be told."""
    found = arguments(__doc__)
    found.add_argument("--documents", type=int, default=50_000, help="default: %(default)s")
    found.add_argument("--queries", type=int, default=100, help="default: %(default)s")
    found.add_argument("--joined", type=int, default=20, help="of them by terms, too, default: %(default)s")
    return found


def run(options: Namespace, folder: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """The tables of loading, of searches and of hybrid searches."""
    inputs = passage_artifacts.build(str(folder), documents=options.documents, queries=options.queries)
    index = passage_artifacts.index(str(folder), inputs)
    best = topk.search(inputs.queries, inputs.matrix, k=K)[1]
    chosen = np.arange(7, len(inputs.matrix), passage_artifacts.TOPICS)
    filtered = chosen[topk.search(inputs.queries, inputs.matrix[chosen], k=K)[1]]
    own = Searcher.open(index.uri)
    hybrid_best: list[list[int]] = []
    loads: list[Row] = []
    searches: list[Row] = []
    joined: list[Row] = []
    for name in ("own", *PLACES):
        engine: SearchBackend = own
        if name != "own":
            row, engine = loaded(name, inputs, index.uri, folder)
            loads.append(row)
        settings: list[tuple[str, dict[str, Any], ndarray]] = [
            ("exact", {"exact": True}, best),
            ("default", {}, best),
            ("filter", {"where": WHERE}, filtered),
        ]
        for setting, given, expected in settings:
            found, milliseconds = timed(finder(engine, inputs, **given), options.queries)
            ranked = [row_numbers(each, engine) for each in found]
            recalls = {f"R@{k}": overlap(ranked, expected, k) for k in (10, K)}
            searches.append({"engine": name, "setting": setting, **recalls, **spread(milliseconds)})
        asked = finder(engine, inputs, joined=True, exact=True)
        found, milliseconds = timed(asked, min(options.joined, options.queries))
        ranked = [row_numbers(each, engine) for each in found]
        hybrid_best = hybrid_best or ranked
        shared = {f"shared with ours @{k}": overlap(ranked, hybrid_best, k) for k in (10, K)}
        joined.append({"engine": name, **shared, **spread(milliseconds)})
    return loads, searches, joined


def loaded(name: str, inputs: Inputs, index: str, folder: Path) -> tuple[Row, DatabaseSearcher]:
    """How long the export took and how long opening, and the database open for searches."""
    url, start = str(folder / PLACES[name]), time.perf_counter()
    source = vectors.Source(inputs.embeddings, inputs.dataset, None, ("topic",))
    made: Any = databases.connect(name, url, COLLECTION)
    vectors.export(source, made, checkpoint=str(folder / f"{name}.json"))
    exported = time.perf_counter()
    made._client.close()
    search = SearchConfig.model_validate({"backend": name, "url": url, "collection": COLLECTION})
    opened = time.perf_counter()
    searcher = DatabaseSearcher.open(index, search, collection=COLLECTION, timeout_s=300.0)
    row = {
        "engine": name,
        "documents/s": len(inputs.matrix) / (exported - start),
        "export s": exported - start,
        "open s": time.perf_counter() - opened,
    }
    return row, searcher


def finder(engine: SearchBackend, inputs: Inputs, *, joined: bool = False, **given: Any) -> Find:
    """The candidates of a query by its number; `joined`: by embeddings and terms."""

    def find(query: int) -> Candidates:
        terms = one(inputs.terms, query) if joined else None
        return engine.find(inputs.queries[query : query + 1], terms, k=K, joining=JOINED, **given)[0]

    return find


def timed(find: Find, queries: int) -> tuple[list[Candidates], ndarray]:
    """Answers, and the milliseconds of each; the first one, asked before, is not counted."""
    find(0)
    found, milliseconds = [], []
    for query in range(queries):
        start = time.perf_counter()
        found.append(find(query))
        milliseconds.append(1000 * (time.perf_counter() - start))
    return found, np.array(milliseconds)


def one(terms: SparseRows, query: int) -> SparseRows:
    """The terms of one query."""
    first, last = terms.offsets[query : query + 2].tolist()
    return SparseRows(np.array([0, last - first]), terms.terms[first:last], terms.values[first:last])


def row_numbers(found: Candidates, engine: SearchBackend) -> list[int]:
    """Numbers of the documents, best first: there is one shard, whose rows are in their order."""
    rows: list[int] = rank([found], k=K, joining=JOINED, layout=engine.layout).ids.tolist()
    return rows


def overlap(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]] | ndarray, k: int) -> float:
    """Mean share of the k best that are among the k found."""
    pairs = zip(found, expected, strict=True)
    return round(
        float(np.mean([len({*own[:k]} & {*map(int, best[:k])}) / len(best[:k]) for own, best in pairs])), 4
    )


def spread(milliseconds: ndarray) -> dict[str, float]:
    """Median and 99th percentile."""
    return {f"p{share} ms": round(float(np.percentile(milliseconds, share)), 3) for share in (50, 99)}


def metrics(searches: Sequence[Row], joined: Sequence[Row]) -> dict[str, float]:
    """What is compared between commits."""
    at = {(row["engine"], row["setting"]): row for row in searches}
    found: dict[str, float] = {}
    for name in ("own", *PLACES):
        for k in (10, K):
            found[f"recall{k}_exact_{name}"] = at[name, "exact"][f"R@{k}"]
            found[f"recall{k}_default_{name}"] = at[name, "default"][f"R@{k}"]
        found[f"p50_ms_{name}"] = at[name, "default"]["p50 ms"]
        found[f"p99_ms_{name}"] = at[name, "default"]["p99 ms"]
    for row in joined[1:]:
        name = row["engine"]
        found[f"recall10_hybrid_{name}"] = row["shared with ours @10"]
        found[f"{name}_over_own_latency"] = round(
            at[name, "default"]["p50 ms"] / at["own", "default"]["p50 ms"], 1
        )
    return found


if __name__ == "__main__":
    main()
