"""Distinct queries of triplets: in pieces that are encoded, and in batches of pieces that are searched.

    part of triplets ─► pieces: queries, and pairs of a query and its positive ─► embeddings of a piece
    pieces in order ─► batches

A part's distinct queries are numbered by their first rows, so that its pieces and their pairs can be found
again from the part alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.mine.search import Batch
from scalingnote.storage import arrow, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, read_table, write_table

QUERIES_PER_PIECE = 1 << 12
QUERIES_PER_BATCH = 1 << 16
QUERIES, PAIRS, EMBEDDINGS = "queries.parquet", "pairs.parquet", "embeddings.parquet"
Piece = dict[str, Any]  # JSON values: its "folder", and numbers of its "queries" and "pairs"


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
