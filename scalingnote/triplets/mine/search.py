"""Search of the documents for the distinct queries of triplets, and the resulting rankings.

    part of triplets ─► pieces: queries, and pairs of a query and its positive ─► embeddings of a piece
    pieces in order ─► batches ─┐
    parts of a shard ───────────┴─► best documents, scores of positives ─► merged over the shards of a batch
    merged results of a batch ─► rankings of each of its pieces

The distinct queries of a part are numbered by their first rows, so that its pieces and their pairs can be
found again only from the part. A shard is some parts of the embeddings. A task holds one part, a batch's
queries and their results, and the merge holds two results: memory does not depend on the corpus. Exact search
finds the same documents for any shards.

The task that needs an inverted index of a shard (`mine.search: index`) builds and discards it. It is faster
for batches of about a thousand queries or more. Seconds of one core for the 100 best documents of queries
with 64 dimensions; 32 lists of the index found 99.5 % of them:

    documents     100,000                       1,000,000
    queries       1,000    10,000               1,000    10,000
    exact         0.3      3.1                  2.6      26.0
    index         0.3      1.5                  3.1       7.3
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core import topk
from scalingnote.storage import arrow, shuffle
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.triplets.collect.triplets import hash_fraction
from scalingnote.triplets.config import MineConfig
from scalingnote.triplets.work_folder import WorkFolder

_TRAINED_VECTORS_PER_LIST = 64
_TRAINING_ROUNDS = 10
_PAIRS_PER_BLOCK = 1 << 16
QUERIES_PER_PIECE = 1 << 12
QUERIES_PER_BATCH = 1 << 16
Piece = dict[str, Any]  # JSON values: its "name", and numbers of its "queries" and "pairs"
RankedDocuments = Sequence[tuple[str, float]]  # doc_id and score, best first
# Rows of triplets, the rankings of their queries by query_id, and the score of each row's positive or None.
RankedRows = tuple[Int[ndarray, " rows"], Mapping[str, RankedDocuments], list[float | None]]


@dataclass(frozen=True)
class MineContext(WorkFolder):
    """Input that all tasks of the stage share."""

    config: MineConfig
    triplets: Artifact
    embeddings: Artifact  # of documents
    held_out: pa.Array  # ids of documents that are excluded from training
    output: str


@dataclass(frozen=True)
class QueryBatch:
    """Embeddings of queries, of length 1, and pairs of a query and a document that answers it."""

    queries: Float[ndarray, "queries dim"]
    query_rows: Int[ndarray, " pairs"]  # the query of each pair
    positives: pa.ChunkedArray  # doc_id of each pair


# --- queries ---------------------------------------------------------------------------------------------


def write_pieces(item: tuple[int, str], *, context: MineContext) -> list[Piece]:
    """Write the distinct queries of a part of triplets and their positives; return the pieces."""
    number, name = item
    table = context.triplets.table(name, columns=["query_id", "query", "positive"])
    numbers, query_ids = _number_queries(table)
    first = np.unique(numbers, return_index=True)[1]
    pieces = []
    for start in range(0, len(query_ids), QUERIES_PER_PIECE):
        stop = min(start + QUERIES_PER_PIECE, len(query_ids))
        rows = _rows_between(numbers, start, stop)
        piece = f"pieces/{number:05d}-{start // QUERIES_PER_PIECE:05d}"
        queries = pa.table({"query": table["query"].take(pa.array(first[start:stop]))})
        pairs = pa.table({"query": numbers[rows] - start, "positive": table["positive"].take(pa.array(rows))})
        context.write(f"{piece}/queries", queries)
        context.write(f"{piece}/pairs", pairs)
        pieces.append({"name": piece, "queries": len(queries), "pairs": len(pairs)})
    return pieces


def batches_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces, in order, into batches."""
    sizes = [piece["queries"] for piece in pieces]
    return [[pieces[i] for i in group] for group in shuffle.group_by_size(sizes, limit=QUERIES_PER_BATCH)]


def _number_queries(triplets: pa.Table) -> tuple[Int[ndarray, " rows"], pa.Array]:
    """Number the queries of rows; return the number of each row's query, and the ids by number."""
    coded = pc.dictionary_encode(triplets["query_id"].combine_chunks())
    return coded.indices.to_numpy(zero_copy_only=False).astype(np.int64), coded.dictionary


def _rows_between(numbers: Int[ndarray, " rows"], start: int, stop: int) -> Int[ndarray, " chosen"]:
    """Find the rows of the queries from `start` to before `stop`."""
    return np.flatnonzero((numbers >= start) & (numbers < stop))


def _read_batch(pieces: Sequence[Piece], context: MineContext) -> QueryBatch:
    """Read a batch of queries that were encoded."""
    queries, query_rows, positives, first = [], [], [], 0
    for piece in pieces:
        embeddings = arrow.to_numpy(context.read(f"{piece['name']}/embeddings")["embedding"])
        queries.append(arrow.l2_normalize(embeddings))
        pairs = context.read(f"{piece['name']}/pairs")
        query_rows.append(pairs["query"].to_numpy() + first)
        positives += pairs["positive"].chunks
        first += piece["queries"]
    ids = pa.chunked_array(positives, pa.string())
    return QueryBatch(np.concatenate(queries), np.concatenate(query_rows), ids)


# --- search ----------------------------------------------------------------------------------------------


def search_shard(
    item: tuple[int, tuple[int, int]],
    *,
    context: MineContext,
    batches: Sequence[Sequence[Piece]],
    shards: Sequence[Mapping[str, int]],
    share: float,
) -> None:
    """Search a batch of queries in a shard.

    Args:
        item: its number; the numbers of the batch and of the shard.
        context: of the stage.
        batches: pieces of each batch.
        shards: for each, the names of its parts -> the row of a part's first document.
        share: share of the training documents that is searched, by a seeded hash.
    """
    config = context.config
    batch = _read_batch(batches[item[1][0]], context)
    best = topk.Best(len(batch.queries), config.last_rank)
    positives = np.full(len(batch.query_rows), np.nan, np.float32)
    index_vectors: list[Float[ndarray, "docs dim"]] = []
    ids: list[pa.ChunkedArray] = []
    rows: list[Int[ndarray, " docs"]] = []
    for name, first in shards[item[1][1]].items():
        table = context.embeddings.table(name, columns=["doc_id", INDEXED_VIEW])
        kept_rows = np.flatnonzero(pc.invert(pc.is_in(table["doc_id"], value_set=context.held_out)))
        table = table.take(pa.array(kept_rows))
        _score_positives(batch, table, positives)
        if share < 1:
            fractions = [hash_fraction(doc_id, seed=config.seed) for doc_id in table["doc_id"].to_pylist()]
            sampled = np.flatnonzero(np.array(fractions) < share)
            kept_rows, table = kept_rows[sampled], table.take(pa.array(sampled))
        ids.append(table["doc_id"])
        rows.append(kept_rows + first)
        vectors = arrow.to_numpy(table[INDEXED_VIEW])
        if config.search == "index":
            index_vectors.append(vectors)
        else:
            best.add_documents(batch.queries, vectors, rows[-1])
    numbers = np.concatenate(rows)
    if index_vectors:
        _search_index(batch.queries, np.concatenate(index_vectors), numbers, best, config)
    best_rows = np.unique(best.ids[best.ids >= 0])
    doc_ids = pa.chunked_array([chunk for one in ids for chunk in one.chunks], pa.string())
    names = doc_ids.take(pa.array(np.searchsorted(numbers, best_rows)))
    folder = _found_folder(*item[1])
    context.write(f"{folder}/documents", pa.table({"row": best_rows, "doc_id": names}))
    context.write(f"{folder}/positives", pa.table({"score": positives}))
    ranking = {"score": arrow.to_arrow(best.scores), "row": arrow.to_arrow(best.ids)}
    context.write(f"{folder}/ranking", pa.table(ranking))


def _score_positives(batch: QueryBatch, table: pa.Table, scores: Float[ndarray, " pairs"]) -> None:
    """Set the scores of the pairs with a document that is in a table."""
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

    The number of lists is the square root of the number of documents.
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


def _found_folder(batch: int, shard: int) -> str:
    return f"found/{batch:05d}/{shard:05d}"


# --- rankings --------------------------------------------------------------------------------------------


def merge_shards(item: tuple[int, Sequence[Piece]], *, context: MineContext, shards: int) -> None:
    """Merge the results of a batch over its shards, in any order, and write those of each piece."""
    number, pieces = item
    queries, pairs = (sum(piece[name] for piece in pieces) for name in ("queries", "pairs"))
    best, positives = topk.Best(queries, context.config.last_rank), np.full(pairs, np.nan, np.float32)
    folders = [_found_folder(number, shard) for shard in range(shards)]
    for folder in folders:
        ranking = context.read(f"{folder}/ranking")
        scores, rows = (arrow.to_matrix(ranking[name]) for name in ("score", "row"))
        for block in topk.query_blocks(queries):
            best.add(block, scores[block], rows[block])
        shard_scores = context.read(f"{folder}/positives")["score"].to_numpy()
        positives = np.where(np.isnan(shard_scores), positives, shard_scores)
    best_rows = pa.array(np.unique(best.ids[best.ids >= 0]))
    tables = (context.read(f"{folder}/documents") for folder in folders)
    documents = pa.concat_tables(
        [table.filter(pc.is_in(table["row"], value_set=best_rows)) for table in tables]
    )
    documents = documents.sort_by("row").combine_chunks()
    query = pair = 0
    for piece in pieces:
        lines = slice(query, query := query + piece["queries"])
        _write_rankings(f"{piece['name']}/rankings", best, lines, documents, context)
        scores = positives[pair : (pair := pair + piece["pairs"])]
        context.write(f"{piece['name']}/positives", pa.table({"score": pa.array(scores, from_pandas=True)}))


def _write_rankings(
    name: str, best: topk.Best, lines: slice, documents: pa.Table, context: MineContext
) -> None:
    """Write the doc_ids and scores of some queries' documents, a row for each query."""
    ids = best.ids[lines]
    present = ids >= 0
    offsets = pa.array(np.append(0, present.sum(axis=1).cumsum()).astype(np.int32))
    places = np.searchsorted(documents["row"].to_numpy(), ids[present])
    values = {
        "doc_id": documents["doc_id"].take(pa.array(places)).combine_chunks(),
        "score": pa.array(best.scores[lines][present]),
    }
    lists = {column: pa.ListArray.from_arrays(offsets, value) for column, value in values.items()}
    context.write(name, pa.table(lists))


def read_rankings(triplets: pa.Table, pieces: Sequence[Piece], context: MineContext) -> Iterator[RankedRows]:
    """Yield the rows of a part of triplets, piece by piece, with the rankings of their queries."""
    numbers, query_ids = _number_queries(triplets)
    start = 0
    for piece in pieces:
        stop = start + piece["queries"]
        table = context.read(f"{piece['name']}/rankings")
        columns = (
            query_ids[start:stop].to_pylist(),
            table["doc_id"].to_pylist(),
            table["score"].to_pylist(),
        )
        rankings = {
            query_id: list(zip(doc_ids, scores, strict=True))
            for query_id, doc_ids, scores in zip(*columns, strict=True)
        }
        positives = context.read(f"{piece['name']}/positives")["score"].to_pylist()
        yield _rows_between(numbers, start, stop), rankings, positives
        start = stop
