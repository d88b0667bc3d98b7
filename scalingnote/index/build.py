"""What one task of the index job does: train a quantizer, fill a shard, measure it, encode queries.

A shard is written file by file and recorded when it is whole, so that a killed run repeats only the shards
that were under way.
"""

import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.hybrid import Both
from scalingnote.index import ivf, postings, postings_file, rescore, shard, tuning
from scalingnote.index.both import candidates
from scalingnote.index.config import IndexConfig
from scalingnote.lexical import weights
from scalingnote.models.sparse_query import SparseRows
from scalingnote.quantize.job import read_vectors, use_threads
from scalingnote.storage import filesystem as fs
from scalingnote.storage import vectors
from scalingnote.storage.artifact import WORK, Artifact, open_artifact, write_file, write_table
from scalingnote.storage.schema import SPARSE

TIMED_QUERIES = 64


@dataclass(frozen=True)
class Shared:
    """What every task of a run is given."""

    config: IndexConfig
    layout: shard.Layout
    parents: dict[str, str]  # kind -> URI
    output: str
    quantizer: ivf.Quantizer
    queries: Float[ndarray, "queries dim"] | None  # to tune with
    terms: SparseRows | None = None  # of the same queries, where documents have terms
    judged: tuple[str, ...] = ()  # doc_ids that are relevant to some of them, or known not to be

    def work(self, name: str) -> str:
        """Where an unfinished run keeps what is no part of the artifact."""
        return fs.join(self.output, WORK, name)


def train(config: IndexConfig, nlist: int, *matrices: Float[ndarray, "_ dim"]) -> ivf.Quantizer:
    """The quantizer of a sample that comes in several matrices."""
    use_threads(config.resources)
    sample = np.concatenate(matrices)
    return ivf.train(sample, config.family, nlist=nlist, iterations=config.iterations, seed=config.seed)


def encode(tower: Artifact, *, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
    """Unit embeddings of queries by the query tower of an artifact."""
    return vectors.unit(QueryEncoder.load(tower.directory("query")).encode_queries(queries))


def fill(item: tuple[int, Sequence[shard.Slice]], *, shared: Shared) -> None:
    """Write a shard, its share in the exact answers of the tuning queries, and last its record."""
    number, slices = item
    config, layout = shared.config, shared.layout
    use_threads(config.resources)
    dataset, embeddings, semantic_ids = (
        open_artifact(shared.parents[kind], kind=kind) for kind in ("dataset", "embeddings", "semantic_ids")
    )
    by_words = shared.parents.get("bm25_terms")
    words = None if by_words is None else open_artifact(by_words, kind="bm25_terms")
    lists = ivf.empty(shared.quantizer)
    stored: list[pa.Table] = []
    found: list[postings.Postings] = []
    best = _Exact(shared.queries, k=config.tuning.k)
    for piece in slices:
        doc_ids, matrix = read_vectors(embeddings, piece.part)
        matrix = matrix[piece.start : piece.stop]
        best.add(matrix)
        ivf.add(lists, matrix)
        base = piece.part.removeprefix("embeddings/")
        doc_ids = doc_ids.slice(piece.start, piece.stop - piece.start)
        if layout.sparse:
            rows = (
                embeddings.table(piece.part, SPARSE.names).slice(piece.start, piece.stop - piece.start)
                if words is None
                else weights.read_columns(words, base, doc_ids)
            )
            found.append(postings.build(rows["terms"], rows["impacts"], strongest=config.terms))
        stored.append(
            shard.document_rows(
                doc_ids,
                documents=dataset.table(f"documents/{base}", shard.document_columns(config.filters)),
                semantic_ids=semantic_ids.table(f"codes/{base}", ["doc_id", "semantic_id"]),
                snippet_chars=config.snippet_chars,
            )
        )
    names = shard.vector_files(number, family=layout.family, refine=layout.refine)
    files = dict(zip(names, ivf.dump_files(lists), strict=True))
    if layout.sparse:
        whole = postings.merged(found or [_no_postings()])
        own = shard.term_files(number)
        files |= {own[name]: data for name, data in postings_file.dump(whole).items()}
    parts = {name: write_file(fs.join(shared.output, name), data) for name, data in files.items()}
    name = shard.documents_file(number)
    table = pa.concat_tables(stored) if stored else _no_documents(dataset, config)
    parts[name] = write_table(fs.join(shared.output, name), table)
    if shared.queries is not None:
        fs.write_bytes(shared.work(f"exact/{number:05d}.npz"), best.dump())
    record = json.dumps({name: vars(part) for name, part in parts.items()})
    fs.write_bytes(shared.work(f"shards/{number:05d}.json"), record.encode())


def measure(item: tuple[int, int, int], *, shared: Shared, deepest: int) -> tuning.Candidates:
    """What a finished shard finds for the tuning queries: (shard, the row it begins at, nprobe)."""
    number, first_row, nprobe = item
    use_threads(shared.config.resources)
    assert shared.queries is not None
    found = tuning.candidates(
        _reopen(number, shared),
        shared.queries,
        nprobe=nprobe,
        k=shared.config.tuning.k * deepest,
    )
    return found._replace(rows=_counted_from(first_row, found.rows))


def measure_both(
    item: tuple[int, int], *, shared: Shared, layout: shard.Layout
) -> tuple[Both, Int[ndarray, " judged"]]:
    """What a finished shard finds by embeddings and by terms, and where it holds the documents judged.

    The item is (shard, the row it begins at); rows count from there, -1 for a document of another shard.
    """
    number, first_row = item
    use_threads(shared.config.resources)
    queries, terms, k = shared.queries, shared.terms, shared.config.tuning.k
    assert queries is not None
    assert terms is not None
    lists = _reopen(number, shared)
    chosen = ivf.choose_lists(queries, lists.coarse, nprobe=layout.nprobe)
    factor = layout.refine_factor
    _, rows = ivf.search(lists, queries, chosen=chosen, k=k, refine_factor=factor)
    files = {
        name: fs.read_bytes(fs.join(shared.output, part)) for name, part in shard.term_files(number).items()
    }
    score = partial(rescore.scores, lists.kept, queries)
    found = candidates(rows, score, [postings_file.load(files)], terms, k=k)
    with fs.open_input(fs.join(shared.output, shard.documents_file(number))) as stream:
        doc_ids = pa.ipc.open_file(stream).read_all()["doc_id"]
        judged = pc.index_in(pa.array(shared.judged, pa.string()), doc_ids).fill_null(-1).to_numpy()
    return replace(found, ids=_counted_from(first_row, found.ids)), _counted_from(first_row, judged)


def time_search(item: tuple[int, int], *, shared: Shared, refine_factor: int) -> float:
    """Microseconds of processor time per query, asked one by one: (shard, nprobe)."""
    number, nprobe = item
    use_threads(shared.config.resources)
    lists = _reopen(number, shared)
    assert shared.queries is not None
    asked, k = shared.queries[:TIMED_QUERIES], shared.config.tuning.k
    start = time.process_time()
    for query in asked:
        chosen = ivf.choose_lists(query[None], lists.coarse, nprobe=nprobe)
        ivf.search(lists, query[None], chosen=chosen, k=k, refine_factor=refine_factor)
    return round((time.process_time() - start) / len(asked) * 1e6, 1)


def exact(number: int, shared: Shared) -> tuple[ndarray, ndarray, ndarray]:
    """A shard's share in the exact answers (scores, rows in the shard), and the sum of its vectors."""
    saved = np.load(io.BytesIO(fs.read_bytes(shared.work(f"exact/{number:05d}.npz"))))
    return saved["scores"], saved["rows"], saved["total"]


class _Exact:
    """The k best of all vectors met so far, for every query; and the vectors' sum."""

    def __init__(self, queries: Float[ndarray, "queries dim"] | None, *, k: int) -> None:
        self._queries, self._k, self._seen = queries, k, 0
        count = 0 if queries is None else len(queries)
        self._total: Any = np.float64(0)
        self._scores, self._rows = np.empty((count, 0), np.float32), np.empty((count, 0), np.int64)

    def add(self, matrix: Float[ndarray, "docs dim"]) -> None:
        if self._queries is not None:
            scores, rows = topk.search(self._queries, matrix, k=self._k)
            scores, rows = np.hstack([self._scores, scores]), np.hstack([self._rows, rows + self._seen])
            self._scores, self._rows = topk.merge(scores, rows, k=self._k)
        self._seen += len(matrix)
        self._total = self._total + matrix.sum(0, dtype=np.float64)

    def dump(self) -> bytes:
        sink = io.BytesIO()
        np.savez(sink, scores=self._scores, rows=self._rows, total=self._total)
        return sink.getvalue()


def _counted_from(first_row: int, rows: Int[ndarray, "*shape"]) -> Int[ndarray, "*shape"]:
    return np.where(rows < 0, -1, rows.astype(np.int64) + first_row)


def _reopen(number: int, shared: Shared) -> ivf.Lists:
    names = shard.vector_files(number, family=shared.layout.family, refine=shared.layout.refine)
    data = [fs.read_bytes(fs.join(shared.output, name)) for name in names]
    return shard.parse(data, layout=shared.layout, coarse=ivf.coarse_of(shared.quantizer.centroids))


def _no_postings() -> postings.Postings:
    none = SPARSE.empty_table()
    return postings.build(none["terms"], none["impacts"])


def _no_documents(dataset: Artifact, config: IndexConfig) -> pa.Table:
    """The documents of a shard that holds none, with the columns of those that hold some."""
    first = dataset.table(dataset.table_parts("documents")[0], shard.document_columns(config.filters))
    none = pa.table({"doc_id": pa.array([], pa.string()), "semantic_id": pa.array([], pa.string())})
    return shard.document_rows(none["doc_id"], documents=first[:0], semantic_ids=none, snippet_chars=0)
