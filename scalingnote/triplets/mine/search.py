"""Search of the documents for the distinct queries of triplets, and the rankings that it gives.

    part of triplets ─► pieces: queries, and pairs of a query and its positive ─► embeddings of a piece
    pieces in order ─► batches ─┐
    parts of a shard ───────────┴─► best documents, scores of positives ─► merged over the shards of a batch
    merged results of the part's batches ─► SearchedRankings

A part's distinct queries are numbered by their first rows, so that its pieces and their pairs can be found
again from the part alone. A shard is some parts of the embeddings. A task holds one part, a batch's queries
and their results, and the merge holds two results: memory does not depend on the corpus. Whatever the shards,
exact search gives the same documents.

An inverted index of a shard (`mine.search: index`) is built by the task that needs it and thrown away. It is
faster from about a thousand queries in a batch on. Seconds of one core for the 100 best documents of queries
with 64 dimensions, of which 32 lists of the index found 99.5 %:

    documents     100,000                       1,000,000
    queries       1,000    10,000               1,000    10,000
    exact         0.3      3.1                  2.6      26.0
    index         0.3      1.5                  3.1       7.3
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import isqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core import topk
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, read_table, write_table
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.triplets.collect.triplets import hash_fraction
from scalingnote.triplets.mine.config import MineConfig

_TRAINED_VECTORS_PER_LIST = 64
_TRAINING_ROUNDS = 10
_PAIRS_PER_BLOCK = 1 << 16
QUERIES_PER_PIECE = 1 << 12
QUERIES_PER_BATCH = 1 << 16
PIECE_QUERIES, PIECE_PAIRS, PIECE_EMBEDDINGS = "queries.parquet", "pairs.parquet", "embeddings.parquet"
RESULT_RANKING, RESULT_DOCUMENTS, RESULT_POSITIVES = (
    "ranking.parquet",
    "documents.parquet",
    "positives.parquet",
)
Piece = dict[str, Any]  # JSON values: its "folder", and numbers of its "queries" and "pairs"
RankedDocuments = Sequence[tuple[str, float]]  # doc_id and score, best first


@dataclass(frozen=True)
class QueryBatch:
    """Queries, of length 1, and pairs of a query and a document that answers it."""

    queries: Float[ndarray, "queries dim"]
    query_rows: Int[ndarray, " pairs"]  # the query of each pair
    positives: pa.ChunkedArray  # doc_id of each pair


# --- queries ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PieceOffset:
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
    numbers, query_ids = _number_queries(table)
    first = np.unique(numbers, return_index=True)[1]
    pieces = []
    for start in range(0, len(query_ids), QUERIES_PER_PIECE):
        stop = min(start + QUERIES_PER_PIECE, len(query_ids))
        rows = _rows_between(numbers, start, stop)
        target = fs.join(folder, "pieces", f"{number:05d}-{start // QUERIES_PER_PIECE:05d}")
        queries = pa.table({"query": table["query"].take(pa.array(first[start:stop]))})
        pairs = pa.table({"query": numbers[rows] - start, "positive": table["positive"].take(pa.array(rows))})
        write_table(fs.join(target, PIECE_QUERIES), queries)
        write_table(fs.join(target, PIECE_PAIRS), pairs)
        pieces.append({"folder": target, "queries": len(queries), "pairs": len(pairs)})
    return pieces


def batches_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces, in order, into batches."""
    sizes = [piece["queries"] for piece in pieces]
    return [[pieces[i] for i in group] for group in shuffle.group_by_size(sizes, limit=QUERIES_PER_BATCH)]


def places_of(batches: Sequence[Sequence[Piece]]) -> list[PieceOffset]:
    """Where the results of each piece are."""
    places = []
    for batch, pieces in enumerate(batches):
        query = pair = 0
        for piece in pieces:
            places.append(PieceOffset(batch, query, pair, piece["queries"], piece["pairs"]))
            query, pair = query + piece["queries"], pair + piece["pairs"]
    return places


def write_embeddings(piece: Piece, embeddings: Float[ndarray, "queries dim"]) -> None:
    """Store the embeddings of a piece's queries at length 1."""
    table = pa.table({"embedding": arrow.to_arrow(arrow.l2_normalize(embeddings))})
    write_table(fs.join(piece["folder"], PIECE_EMBEDDINGS), table)


def _number_queries(triplets: pa.Table) -> tuple[Int[ndarray, " rows"], pa.Array]:
    """The number of each row's query, and the ids of queries by number."""
    coded = pc.dictionary_encode(triplets["query_id"].combine_chunks())
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary


def _rows_between(numbers: Int[ndarray, " rows"], start: int, stop: int) -> Int[ndarray, " chosen"]:
    """Rows of the queries from `start` to before `stop`."""
    return np.flatnonzero((numbers >= start) & (numbers < stop))


def _read_batch(pieces: Sequence[Piece]) -> QueryBatch:
    """A batch whose queries have embeddings."""
    queries, query_rows, positives, first = [], [], [], 0
    for piece in pieces:
        queries.append(arrow.to_numpy(read_table(fs.join(piece["folder"], PIECE_EMBEDDINGS))["embedding"]))
        pairs = read_table(fs.join(piece["folder"], PIECE_PAIRS))
        query_rows.append(pairs["query"].to_numpy() + first)
        positives += pairs["positive"].chunks
        first += piece["queries"]
    ids = pa.chunked_array(positives, pa.string())
    return QueryBatch(np.concatenate(queries), np.concatenate(query_rows), ids)


# --- search ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchNeighbors:
    """Result of a batch: of each query the best documents, by row over all parts, and scores of the pairs."""

    scores: Float[ndarray, "queries k"]
    rows: Int[ndarray, "queries k"]  # -1 is none
    documents: pa.Table  # row, ascending, and doc_id
    positives: Float[ndarray, " pairs"]  # NaN where the document was not searched

    def write(self, folder: str) -> None:
        """Write three tables."""
        write_table(fs.join(folder, RESULT_DOCUMENTS), self.documents)
        write_table(fs.join(folder, RESULT_POSITIVES), pa.table({"score": self.positives}))
        columns = [arrow.to_arrow(self.scores), arrow.to_arrow(self.rows)]
        write_table(
            fs.join(folder, RESULT_RANKING), pa.table(columns, names=["scores", "rows"]), use_dictionary=[]
        )

    @classmethod
    def read(cls, folder: str) -> "BatchNeighbors":
        """Read what was written."""
        ranking, documents, positives = (
            read_table(fs.join(folder, name)) for name in (RESULT_RANKING, RESULT_DOCUMENTS, RESULT_POSITIVES)
        )
        scores, rows = (arrow.to_matrix(ranking[name]) for name in ("scores", "rows"))
        return cls(scores, rows, documents, positives["score"].to_numpy())


def search_shard(
    item: tuple[int, tuple[int, int]],
    *,
    config: MineConfig,
    batches: Sequence[Sequence[Piece]],
    shards: Sequence[dict[str, int]],
    embeddings: Artifact,
    held_out: pa.Array,
    share: float,
    folder: str,
) -> None:
    """Task: search a batch of queries in a shard.

    Args:
        item: its number; the numbers of the batch and of the shard.
        config: depth, and kind of search.
        batches: pieces of each batch.
        shards: of each, the names of its parts and the row of a part's first document.
        embeddings: of the documents.
        held_out: ids of documents excluded from training.
        share: of the others that is searched, by a seeded hash.
        folder: work directory.
    """
    batch = _read_batch(batches[item[1][0]])
    best = topk.Best(len(batch.queries), config.last_rank)
    positives = np.full(len(batch.query_rows), np.nan, np.float32)
    indexed: list[Float[ndarray, "docs dim"]] = []
    ids: list[pa.ChunkedArray] = []
    rows: list[Int[ndarray, " docs"]] = []
    for name, first in shards[item[1][1]].items():
        table = embeddings.table(name, columns=["doc_id", INDEXED_VIEW])
        kept = np.flatnonzero(pc.invert(pc.is_in(table["doc_id"], value_set=held_out)))
        table = table.take(pa.array(kept))
        _score_positives(batch, table, positives)
        if share < 1:
            fractions = [hash_fraction(doc_id, seed=config.seed) for doc_id in table["doc_id"].to_pylist()]
            chosen = np.flatnonzero(np.array(fractions) < share)
            kept, table = kept[chosen], table.take(pa.array(chosen))
        ids.append(table["doc_id"])
        rows.append(kept + first)
        vectors = arrow.to_numpy(table[INDEXED_VIEW])
        if config.search == "index":
            indexed.append(vectors)
        else:
            best.add_documents(batch.queries, vectors, rows[-1])
    numbers = np.concatenate(rows)
    if indexed:
        _search_index(batch.queries, np.concatenate(indexed), numbers, best, config)
    found = np.unique(best.ids[best.ids >= 0])
    doc_ids = pa.chunked_array([chunk for one in ids for chunk in one.chunks], pa.string())
    names = doc_ids.take(pa.array(np.searchsorted(numbers, found)))
    documents = pa.table({"row": found, "doc_id": names})
    BatchNeighbors(best.scores, best.ids, documents, positives).write(_found_folder(folder, *item[1]))


def _score_positives(batch: QueryBatch, table: pa.Table, scores: Float[ndarray, " pairs"]) -> None:
    """Set the scores of the pairs whose document is in a table."""
    place = pc.index_in(batch.positives, value_set=table["doc_id"].combine_chunks())
    places = pc.fill_null(place, -1).to_numpy()
    present = np.flatnonzero(places >= 0)
    if not len(present):
        return
    documents = arrow.to_numpy(table[INDEXED_VIEW])
    for start in range(0, len(present), _PAIRS_PER_BLOCK):
        pairs = present[start : start + _PAIRS_PER_BLOCK]
        scores[pairs] = np.einsum(
            "pd,pd->p", batch.queries[batch.query_rows[pairs]], documents[places[pairs]]
        )


def _search_index(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "docs dim"],
    rows: Int[ndarray, " docs"],
    best: topk.Best,
    config: MineConfig,
) -> None:
    """Add the best documents of the `nprobe` nearest lists of an inverted index (faiss IVF) over a shard.

    It has as many lists as the square root of its documents.
    """
    import faiss  # late: exact search needs no index

    dim, lists = documents.shape[1], isqrt(len(rows))
    if not lists:
        return
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.niter, index.cp.seed = _TRAINING_ROUNDS, config.seed
    number = min(len(rows), lists * _TRAINED_VECTORS_PER_LIST)
    sample = np.random.default_rng(config.seed).choice(len(rows), number, replace=False)
    index.train(documents[np.sort(sample)])
    index.add(documents)
    index.nprobe = config.nprobe
    for chosen in topk.query_blocks(len(queries)):
        scores, places = index.search(queries[chosen], min(config.last_rank, len(rows)))
        none = places < 0
        best.add(chosen, np.where(none, -np.inf, scores), np.where(none, -1, rows[places]))


def merge_shards(item: tuple[int, int], *, shards: int, folder: str) -> None:
    """Task: merge the results of a batch over its shards; any order gives the same."""
    folders = [_found_folder(folder, item[1], shard) for shard in range(shards)]
    first = BatchNeighbors.read(folders[0])
    best = topk.Best(*first.rows.shape)
    positives = np.full(len(first.positives), np.nan, np.float32)
    for found in map(BatchNeighbors.read, folders):
        for block in topk.query_blocks(len(best.ids)):
            best.add(block, found.scores[block], found.rows[block])
        positives = np.where(np.isnan(found.positives), positives, found.positives)
    rows = pa.array(np.unique(best.ids[best.ids >= 0]))
    tables = (read_table(fs.join(found, RESULT_DOCUMENTS)) for found in folders)
    documents = pa.concat_tables([table.filter(pc.is_in(table["row"], value_set=rows)) for table in tables])
    merged = BatchNeighbors(best.scores, best.ids, documents.sort_by("row"), positives)
    merged.write(_merged_folder(folder, item[1]))


def _found_folder(folder: str, batch: int, shard: int) -> str:
    return fs.join(folder, "found", f"{batch:05d}", f"{shard:05d}")


def _merged_folder(folder: str, batch: int) -> str:
    return fs.join(folder, "merged", f"{batch:05d}")


# --- rankings --------------------------------------------------------------------------------------------


class SearchedRankings(Mapping[str, RankedDocuments]):
    """Rankings of the queries of a part of triplets, each read when it is asked for.

    The results of one batch are in memory at a time.
    """

    def __init__(self, triplets: pa.Table, places: Sequence[PieceOffset], folder: str) -> None:
        """Rank by the results in `folder`; `places` are those of the part's pieces, in order."""
        self._row_numbers, query_ids = _number_queries(triplets)
        self._number = {query_id: number for number, query_id in enumerate(query_ids.to_pylist())}
        self._places, self._folder = places, folder
        self._starts = [*accumulate((place.queries for place in places), initial=0)]

    def positive_scores(self) -> list[float | None]:
        """The score of each row's positive, if it was searched."""
        scores = np.full(len(self._row_numbers), np.nan)
        for start, place in zip(self._starts, self._places, strict=False):
            rows = _rows_between(self._row_numbers, start, start + place.queries)
            positives = _read_merged(self._folder, place.batch).positives
            scores[rows] = positives[place.pair : place.pair + place.pairs]
        return [None if np.isnan(score) else score for score in scores.tolist()]

    def __getitem__(self, query_id: str) -> RankedDocuments:
        number = self._number[query_id]
        piece = bisect_right(self._starts, number) - 1
        place = self._places[piece]
        found = _read_merged(self._folder, place.batch)
        line = place.query + number - self._starts[piece]
        rows = found.rows[line][found.rows[line] >= 0]
        at = np.searchsorted(found.documents["row"].to_numpy(), rows)
        doc_ids = found.documents["doc_id"].take(pa.array(at)).to_pylist()
        return list(zip(doc_ids, found.scores[line][: len(rows)].tolist(), strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)


@lru_cache(maxsize=1)
def _read_merged(folder: str, batch: int) -> BatchNeighbors:
    """The results of a batch; those of the last one asked for stay in memory."""
    return BatchNeighbors.read(_merged_folder(folder, batch))
