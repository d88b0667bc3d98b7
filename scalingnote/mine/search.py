"""Search of the documents for the distinct queries of triplets.

    part of triplets ─► pieces: queries, and pairs of a query and its positive ─► embeddings of a piece
    pieces in order ─► batches ─┐
    parts of a shard ───────────┴─► best documents, scores of positives ─► merged over the shards of a batch

A part's distinct queries are numbered by their first rows, so that its pieces and their pairs can be found
again from the part alone. A shard is some parts of the embeddings. A task holds one part, a batch's queries
and their results, and the merge holds two results: memory does not depend on the corpus. Whatever the shards,
exact search gives the same documents.

An inverted index of a shard (:class:`IndexedShard`) is built by the task that needs it and thrown away. It is
faster from about a thousand queries in a batch on. Seconds of one core for the 100 best documents of queries
with 64 dimensions, of which 32 lists of the index found 99.5 %:

    documents     100,000                       1,000,000
    queries       1,000    10,000               1,000    10,000
    exact         0.3      3.1                  2.6      26.0
    index         0.3      1.5                  3.1       7.3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.collect.triplets import hash_fraction
from scalingnote.mine.config import MineConfig
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, read_table, write_table

SEARCHED_VIEW = "summary"
_TRAINED_VECTORS_PER_LIST = 64
_TRAINING_ROUNDS = 10
_PAIRS_PER_BLOCK = 1 << 16
QUERIES_PER_PIECE = 1 << 12
QUERIES_PER_BATCH = 1 << 16
QUERIES, PAIRS, EMBEDDINGS = "queries.parquet", "pairs.parquet", "embeddings.parquet"
RANKING, DOCUMENTS, POSITIVES = "ranking.parquet", "documents.parquet", "positives.parquet"
Piece = dict[str, Any]  # JSON values: its "folder", and numbers of its "queries" and "pairs"


@dataclass(frozen=True)
class Batch:
    """Queries, of length 1, and pairs of a query and a document that answers it."""

    queries: Float[ndarray, "queries dim"]
    asked: Int[ndarray, " pairs"]  # the query of each pair
    positives: pa.ChunkedArray  # doc_id of each pair


# --- queries ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where the results of a piece are: its batch, and its first query and pair there."""

    batch: int
    query: int
    pair: int
    queries: int
    pairs: int


def write_pieces(item: tuple[int, str], *, triplets: Artifact, folder: str) -> list[Piece]:
    """Write the distinct queries of a part of triplets, and their positives."""
    number, name = item
    table = triplets.table(name, columns=["query_id", "query", "positive"])
    numbers, query_ids = number_queries(table)
    first = np.unique(numbers, return_index=True)[1]
    pieces = []
    for start in range(0, len(query_ids), QUERIES_PER_PIECE):
        stop = min(start + QUERIES_PER_PIECE, len(query_ids))
        rows = rows_between(numbers, start, stop)
        target = fs.join(folder, "pieces", f"{number:05d}-{start // QUERIES_PER_PIECE:05d}")
        queries = pa.table({"query": table["query"].take(pa.array(first[start:stop]))})
        pairs = pa.table({"query": numbers[rows] - start, "positive": table["positive"].take(pa.array(rows))})
        write_table(fs.join(target, QUERIES), queries)
        write_table(fs.join(target, PAIRS), pairs)
        pieces.append({"folder": target, "queries": len(queries), "pairs": len(pairs)})
    return pieces


def number_queries(triplets: pa.Table) -> tuple[Int[ndarray, " rows"], pa.Array]:
    """The number of each row's query, and the ids of queries by number."""
    coded = pc.dictionary_encode(triplets["query_id"].combine_chunks())
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary


def rows_between(numbers: Int[ndarray, " rows"], start: int, stop: int) -> Int[ndarray, " chosen"]:
    """Rows of the queries from `start` to before `stop`."""
    return np.flatnonzero((numbers >= start) & (numbers < stop))


def batches_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces, in order, into batches."""
    sizes = [piece["queries"] for piece in pieces]
    return [[pieces[i] for i in group] for group in shuffle.group_by_size(sizes, limit=QUERIES_PER_BATCH)]


def places_of(batches: Sequence[Sequence[Piece]]) -> dict[str, Place]:
    """Folder of each piece -> where its results are."""
    places = {}
    for batch, pieces in enumerate(batches):
        query = pair = 0
        for piece in pieces:
            places[piece["folder"]] = Place(batch, query, pair, piece["queries"], piece["pairs"])
            query, pair = query + piece["queries"], pair + piece["pairs"]
    return places


def write_embeddings(piece: Piece, embeddings: Float[ndarray, "queries dim"]) -> None:
    """Store the embeddings of a piece's queries at length 1."""
    column = arrow.to_arrow(arrow.l2_normalize(embeddings))
    table = pa.table({"embedding": column})
    write_table(fs.join(piece["folder"], EMBEDDINGS), table)


def read_batch(pieces: Sequence[Piece]) -> Batch:
    """A batch whose queries have embeddings."""
    queries, asked, positives, first = [], [], [], 0
    for piece in pieces:
        queries.append(arrow.to_numpy(read_table(fs.join(piece["folder"], EMBEDDINGS))["embedding"]))
        pairs = read_table(fs.join(piece["folder"], PAIRS))
        asked.append(pairs["query"].to_numpy() + first)
        positives += pairs["positive"].chunks
        first += piece["queries"]
    ids = pa.chunked_array(positives, pa.string())
    return Batch(np.concatenate(queries), np.concatenate(asked), ids)


# --- search ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """Training documents to search."""

    embeddings: Artifact
    held_out: pa.Array  # ids of those excluded from training
    share: float  # of the others, by a seeded hash
    seed: int

    def is_searched(self, doc_ids: pa.ChunkedArray) -> Bool[ndarray, " docs"]:
        """Whether each of these training documents is in the share."""
        if self.share >= 1:
            return np.ones(len(doc_ids), bool)
        fractions = [hash_fraction(doc_id, seed=self.seed) for doc_id in doc_ids.to_pylist()]
        return np.array(fractions) < self.share


@dataclass(frozen=True)
class BatchNeighbors:
    """Result of a batch: of each query the best documents, by row over all parts, and scores of the pairs."""

    scores: Float[ndarray, "queries k"]
    rows: Int[ndarray, "queries k"]  # -1 is none
    documents: pa.Table  # row, ascending, and doc_id
    positives: Float[ndarray, " pairs"]  # NaN where the document was not searched

    def write(self, folder: str) -> None:
        """Write three tables."""
        write_table(fs.join(folder, DOCUMENTS), self.documents)
        write_table(fs.join(folder, POSITIVES), pa.table({"score": self.positives}))
        columns = [arrow.to_arrow(self.scores), arrow.to_arrow(self.rows)]
        write_table(fs.join(folder, RANKING), pa.table(columns, names=["scores", "rows"]), use_dictionary=[])

    @classmethod
    def read(cls, folder: str) -> "BatchNeighbors":
        """Read what was written."""
        ranking, documents, positives = (
            read_table(fs.join(folder, name)) for name in (RANKING, DOCUMENTS, POSITIVES)
        )
        scores, rows = (arrow.to_matrix(ranking[name]) for name in ("scores", "rows"))
        return cls(scores, rows, documents, positives["score"].to_numpy())


def search_shard(
    batch: Batch, parts: dict[str, int], documents: Documents, config: MineConfig
) -> BatchNeighbors:
    """Search a batch of queries in a shard.

    Args:
        batch: queries and pairs.
        parts: name of each part of the shard -> the row of its first document.
        documents: which documents are searched.
        config: depth, and kind of search.
    """
    best = topk.Best(len(batch.queries), config.last_rank)
    positives = np.full(len(batch.asked), np.nan, np.float32)
    index = IndexedShard(config) if config.search == "index" else None
    ids: list[pa.ChunkedArray] = []
    rows: list[Int[ndarray, " docs"]] = []
    for name, first in parts.items():
        table = documents.embeddings.table(name, columns=["doc_id", SEARCHED_VIEW])
        allowed = np.asarray(pc.invert(pc.is_in(table["doc_id"], value_set=documents.held_out)))
        _score_positives(batch, table.filter(pa.array(allowed)), positives)
        kept = np.flatnonzero(allowed)
        kept = kept[documents.is_searched(table["doc_id"].take(pa.array(kept)))]
        table = table.take(pa.array(kept))
        ids.append(table["doc_id"])
        rows.append(kept + first)
        vectors = arrow.to_numpy(table[SEARCHED_VIEW])
        if index is not None:
            index.add(vectors)
        else:
            _compare(batch.queries, vectors, rows[-1], best)
    numbers = np.concatenate(rows)
    if index is not None:
        index.search(batch.queries, numbers, best)
    found = np.unique(best.ids[best.ids >= 0])
    doc_ids = pa.chunked_array([chunk for one in ids for chunk in one.chunks], pa.string())
    names = doc_ids.take(pa.array(np.searchsorted(numbers, found)))
    return BatchNeighbors(best.scores, best.ids, pa.table({"row": found, "doc_id": names}), positives)


def _compare(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "docs dim"],
    rows: Int[ndarray, " docs"],
    best: topk.Best,
) -> None:
    """Add all documents to the best."""
    for start in range(0, len(documents), topk.DOCUMENT_BLOCK):
        block = slice(start, start + topk.DOCUMENT_BLOCK)
        for chosen in topk.query_blocks(len(queries)):
            best.add_block(chosen, queries[chosen] @ documents[block].T, rows[block])


def _score_positives(batch: Batch, table: pa.Table, scores: Float[ndarray, " pairs"]) -> None:
    """Set the scores of the pairs whose document is in a table."""
    place = pc.index_in(batch.positives, value_set=table["doc_id"].combine_chunks())
    places = pc.fill_null(place, -1).to_numpy()
    present = np.flatnonzero(places >= 0)
    if not len(present):
        return
    documents = arrow.to_numpy(table[SEARCHED_VIEW])
    for start in range(0, len(present), _PAIRS_PER_BLOCK):
        pairs = present[start : start + _PAIRS_PER_BLOCK]
        scores[pairs] = np.einsum("pd,pd->p", batch.queries[batch.asked[pairs]], documents[places[pairs]])


class IndexedShard:
    """An inverted index (faiss IVF) over a shard, of as many lists as the square root of its documents."""

    def __init__(self, config: MineConfig) -> None:
        self._config, self._vectors = config, list[Float[ndarray, "docs dim"]]()

    def add(self, vectors: Float[ndarray, "docs dim"]) -> None:
        """Add documents; they are indexed by the search."""
        self._vectors.append(vectors)

    def search(
        self, queries: Float[ndarray, "queries dim"], rows: Int[ndarray, " docs"], best: topk.Best
    ) -> None:
        """Add the best documents of the `nprobe` nearest lists; `rows` are those of all documents."""
        import faiss  # late: exact search needs no index

        vectors, lists = np.concatenate(self._vectors), isqrt(len(rows))
        if not lists:
            return
        index = faiss.IndexIVFFlat(
            faiss.IndexFlatIP(vectors.shape[1]), vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT
        )
        index.cp.niter, index.cp.seed = _TRAINING_ROUNDS, self._config.seed
        number = min(len(rows), lists * _TRAINED_VECTORS_PER_LIST)
        sample = np.random.default_rng(self._config.seed).choice(len(rows), number, replace=False)
        index.train(vectors[np.sort(sample)])
        index.add(vectors)
        index.nprobe = self._config.nprobe
        for chosen in topk.query_blocks(len(queries)):
            scores, places = index.search(queries[chosen], min(self._config.last_rank, len(rows)))
            none = places < 0
            best.add(chosen, np.where(none, -np.inf, scores), np.where(none, -1, rows[places]))


def merge_shards(folders: Sequence[str]) -> BatchNeighbors:
    """The result of a batch from those of its shards; any order gives the same."""
    first = BatchNeighbors.read(folders[0])
    best = topk.Best(*first.rows.shape)
    positives = np.full(len(first.positives), np.nan, np.float32)
    for folder in folders:
        found = BatchNeighbors.read(folder)
        for block in topk.query_blocks(len(best.ids)):
            best.add(block, found.scores[block], found.rows[block])
        positives = np.where(np.isnan(found.positives), positives, found.positives)
    rows = pa.array(np.unique(best.ids[best.ids >= 0]))
    kept = []
    for folder in folders:
        documents = read_table(fs.join(folder, DOCUMENTS))
        kept.append(documents.filter(pc.is_in(documents["row"], value_set=rows)))
    return BatchNeighbors(best.scores, best.ids, pa.concat_tables(kept).sort_by("row"), positives)
