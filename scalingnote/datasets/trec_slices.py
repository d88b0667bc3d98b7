"""Slices of TREC files, read in tasks: only rows of the queries that are asked for leave a task."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.raw_rows import FileSlice, cut, find_files, lines
from scalingnote.storage import trec
from scalingnote.storage.schema import QRELS

RUN_ROWS = pa.schema(
    {"query_id": pa.string(), "doc_id": pa.string(), "score": pa.float64(), "rank": pa.float64()}
)


def find_trec_slices(uri: str) -> list[FileSlice]:
    """Slices of a TREC file, whatever its name; DataError if there is none."""
    return cut(find_files(uri, ("",)))


def read_qrels_slice(piece: FileSlice, *, query_ids: pa.Array) -> pa.Table:
    """The judgements (QRELS) of some queries in a slice of a TREC file."""
    return _of_queries(QRELS, trec.qrels_rows(*_named_lines(piece)), query_ids)


def read_run_slice(piece: FileSlice, *, query_ids: pa.Array | None = None) -> pa.Table:
    """The results (RUN_ROWS) of some queries, or of all, in a slice of a TREC file."""
    return _of_queries(RUN_ROWS, (row for _, *row in trec.run_rows(*_named_lines(piece))), query_ids)


def _named_lines(piece: FileSlice) -> tuple[Iterator[bytes], str]:
    name = f"{piece.file.uri}, from byte {piece.start:,}" if piece.start else piece.file.uri
    return lines(piece.file.uri, piece.start, piece.stop), name


def _of_queries(schema: pa.Schema, rows: Iterable[Sequence[Any]], query_ids: pa.Array | None) -> pa.Table:
    columns = [*zip(*rows, strict=True)] or [()] * len(schema)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    return table if query_ids is None else table.filter(pc.is_in(table["query_id"], value_set=query_ids))
