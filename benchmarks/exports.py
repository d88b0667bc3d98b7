"""Exports that are killed midway and run again, to each database: is every vector there, unchanged?

    python -m benchmarks.exports --json docs/results/exports.json [--documents 200000] [--to qdrant milvus]

`scalingnote export vectors` copies passages of real text (benchmarks/passage_artifacts.py: 128 dimensions,
terms, two columns) and is killed by SIGKILL once 40 % are acknowledged; the same command then runs on.
Counted are the rows that the database holds, the documents of a random sample whose vector or terms differ
from what was exported, and the overlap of the ten nearest: those that a search by the database's own client
finds, as exact as it can be, and those of brute force, which are what our index finds at its exact setting.

OpenSearch is a stand-in (opensearch.py): a local server that takes the requests of an export and keeps the
documents. There is no search in it, so overlap is of what it holds. Files of Parquet are searched by brute
force, too.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Float
from numpy import ndarray

from benchmarks import opensearch, passage_artifacts
from benchmarks.passage_artifacts import Inputs
from benchmarks.report import arguments, show, write
from scalingnote import topk
from scalingnote.export import databases
from scalingnote.search import collection as collections
from scalingnote.search.config import SearchConfig
from scalingnote.storage import arrow

KILL_AT, K, COLLECTION = 0.4, 10, "passages"
PLACES = {
    "qdrant": "qdrant",
    "milvus": "milvus.db",
    "lancedb": "lancedb",
    "parquet": "parquet",
    "opensearch": "",
}
TERM_TOLERANCE = 1e-3  # of weights, relative
Row = dict[str, Any]
Stored = tuple[ndarray, dict[int, float]]  # vector and terms of a document


@dataclass(frozen=True)
class Held:
    """What a database holds, through its own client."""

    count: Callable[[], int]
    read: Callable[[Sequence[str]], dict[str, Stored]]
    nearest: Callable[[Float[ndarray, " dim"]], list[str]]  # ids, best first
    close: Callable[[], None] = lambda: None


def main() -> None:
    """Parse arguments, run, print and write."""
    options = parser().parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        inputs = passage_artifacts.build(folder, documents=options.documents, queries=options.queries)
        best = topk.search(inputs.queries, inputs.matrix, k=K)[1]
        for to in options.to:
            with place(to, folder) as (url, server):
                rows.append(exported(to, url, folder, inputs.embeddings.uri, options.documents))
                rows[-1] |= compared(held_by(to, url, server), inputs, best, options)
            show(f"{to}, killed midway and resumed", rows[-1:])
    show(f"{options.documents:,} documents, killed midway and resumed", rows)
    write(options.json, metrics=metrics(rows), table=rows)


def parser() -> ArgumentParser:
    """What this benchmark can be told."""
    found = arguments(__doc__)
    found.add_argument("--documents", type=int, default=200_000, help="default: %(default)s")
    found.add_argument("--queries", type=int, default=100, help="default: %(default)s")
    found.add_argument("--sampled", type=int, default=500, help="documents compared, default: %(default)s")
    found.add_argument("--to", nargs="+", choices=PLACES, default=[*PLACES], help="default: all")
    return found


def exported(to: str, url: str, folder: str, embeddings: str, documents: int) -> Row:
    """Export, kill, export again: rows acknowledged at the kill, and how long it took."""
    checkpoint = Path(folder) / f"{to}.json"
    given = ["export", "vectors", "--to", to, "--url", url, "--collection", COLLECTION]
    given += ["--embeddings", embeddings, "--columns", "title", "topic", "--checkpoint", str(checkpoint)]
    command = [sys.executable, "-m", "scalingnote.cli", *given]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and acknowledged(checkpoint) < KILL_AT * documents:
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    killed, at = time.perf_counter() - start, acknowledged(checkpoint)
    if at >= documents:
        raise SystemExit(f"{to}: the export ended before it was killed: give more --documents")
    start = time.perf_counter()
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (written,) = re.findall(r"([\d,]+) of [\d,]+ rows written", said)
    return {
        "database": to,
        "killed at": at,
        "after s": round(killed, 1),
        "resumed: rows": int(written.replace(",", "")),
        "in s": round(time.perf_counter() - start, 1),
    }


def acknowledged(checkpoint: Path) -> int:
    """Rows that the database has acknowledged so far."""
    return int(json.loads(checkpoint.read_bytes())["rows"]) if checkpoint.exists() else 0


def compared(held: Held, inputs: Inputs, best: ndarray, options: Namespace) -> Row:
    """What the database holds beside what was exported."""
    table = inputs.embeddings.table("embeddings")
    rng = np.random.default_rng(0)
    drawn = np.sort(rng.choice(len(table), min(options.sampled, len(table)), replace=False)).tolist()
    found, nothing = held.read([f"p{row}" for row in drawn]), (np.zeros(0), dict[int, float]())
    wrong = 0
    for row in drawn:
        expected = dict(zip(table["terms"][row].as_py(), table["impacts"][row].as_py(), strict=True))
        wrong += not is_same(found.get(f"p{row}", nothing), (inputs.matrix[row], expected))
    start = time.perf_counter()
    answers = [held.nearest(query) for query in inputs.queries]
    seconds = time.perf_counter() - start
    pairs = zip(best.tolist(), answers, strict=True)
    shared = [len({f"p{row}" for row in nearest} & {*answer}) / K for nearest, answer in pairs]
    count = held.count()
    held.close()
    return {
        "held": count,
        "missing": options.documents - count,
        "sampled": len(drawn),
        "wrong": wrong,
        f"overlap@{K}": round(float(np.mean(shared)), 4),
        "ms a search": round(1000 * seconds / len(answers), 1),
    }


def is_same(found: Stored, expected: Stored) -> bool:
    """Whether the vectors are equal bit for bit, and terms with a weight above 0 are, with their weights."""
    (vector, terms), (own_vector, own_terms) = found, expected
    weights = {term: weight for term, weight in own_terms.items() if weight > 0}
    return (
        np.array_equal(np.asarray(vector, np.float32), own_vector)
        and terms.keys() == weights.keys()
        and all(abs(terms[term] - weight) <= TERM_TOLERANCE * weight for term, weight in weights.items())
    )


# --- databases ------------------------------------------------------------------------------------------


def held_by(to: str, url: str, server: opensearch.Server | None) -> Held:
    """Open what an export filled."""
    if to in ("qdrant", "milvus"):
        return _of_collection(to, url)
    if to == "lancedb":
        made: Any = databases.connect(to, url, COLLECTION)
        table = made._database.open_table(COLLECTION)

        def nearest(query: ndarray) -> list[str]:
            search = table.search(query, vector_column_name="dense").distance_type("dot").limit(K)
            return [row["doc_id"] for row in search.to_list()]

        return replace(_of_arrow(table.to_arrow()), count=table.count_rows, nearest=nearest)
    if to == "opensearch":
        assert server is not None
        documents = server.documents
        matrix = np.stack([vector for vector, _ in documents.values()])
        return _of_rows([*documents], matrix, lambda name: documents[name][1])
    return _of_arrow(pq.read_table(Path(url) / COLLECTION))


def _of_collection(to: str, url: str) -> Held:
    search = SearchConfig.model_validate({"backend": to, "url": url, "collection": COLLECTION})
    opened = collections.connect(search, COLLECTION, timeout_s=600.0)
    opened.described()  # loads a collection of Milvus

    def read(names: Sequence[str]) -> dict[str, Stored]:
        vectors, terms = opened.read(names, "dense"), opened.read(names, "terms")
        return {name: (vectors[name], terms[name]) for name in vectors}

    def nearest(query: ndarray) -> list[str]:
        return opened.dense(query[None], k=K, where={}, thorough=True)[0][0]

    return Held(opened.count, read, nearest, opened.close)


def _of_arrow(table: Any) -> Held:
    names = table["doc_id"].to_pylist()
    rows = {name: row for row, name in enumerate(names)}

    def terms(name: str) -> dict[int, float]:
        row = rows[name]
        return dict(zip(table["terms"][row].as_py(), table["impacts"][row].as_py(), strict=True))

    return _of_rows(names, arrow.to_numpy(table["dense"]), terms)


def _of_rows(names: list[str], matrix: ndarray, terms: Callable[[str], dict[int, float]]) -> Held:
    rows = {name: row for row, name in enumerate(names)}

    def read(asked: Sequence[str]) -> dict[str, Stored]:
        return {name: (matrix[rows[name]], terms(name)) for name in asked if name in rows}

    def nearest(query: ndarray) -> list[str]:
        return [names[row] for row in np.argsort(-(matrix @ query), kind="stable")[:K].tolist()]

    return Held(partial(len, names), read, nearest)


@contextmanager
def place(to: str, folder: str) -> Iterator[tuple[str, opensearch.Server | None]]:
    """Where a database is; of OpenSearch, a server that stands in for it."""
    if to != "opensearch":
        yield os.path.join(folder, PLACES[to]), None
        return
    with opensearch.running(COLLECTION, keep=stored) as server:
        yield server.url, server


def stored(document: dict[str, Any]) -> Stored:
    """Vector and terms of the JSON of a document."""
    terms = {int(term): weight for term, weight in document.get("terms", {}).items()}
    return np.array(document["dense"], np.float32), terms


def metrics(rows: Sequence[Row]) -> dict[str, float]:
    """What is compared between commits."""
    found: dict[str, float] = {}
    for row in rows:
        name = row["database"]
        found[f"lost_rows_{name}"] = row["missing"]
        found[f"wrong_rows_{name}"] = row["wrong"]
        found[f"recall{K}_export_{name}"] = row[f"overlap@{K}"]
    return found


if __name__ == "__main__":
    main()
