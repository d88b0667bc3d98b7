"""Arrow columns as numpy matrices, without copies if the layout allows, and rows of tables by their numbers.

pyarrow's own access to rows is too slow for search results: a scalar costs one or two microseconds, and ten
documents have fifty of them, which takes longer than the search. `Table.take` first joins all chunks of a
text column: it copies the whole column each time, and fails above 2 GiB.
"""

import io
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from scalingnote.core.errors import ArtifactError

BATCH_BYTES = 1 << 26  # maximal size of joined batches; a text column of a batch holds at most 2 GiB


class _Column(NamedTuple):
    """Access to a column of a batch: strings are `text` between `offsets`; `read` returns other values."""

    name: str
    offsets: Any
    text: Any
    read: Callable[[int], Any] | None


def to_numpy(column: pa.ChunkedArray | pa.Array) -> Float[ndarray, "rows dim"]:
    """Convert a FixedSizeList column to a float32 matrix."""
    return np.ascontiguousarray(to_matrix(column), dtype=np.float32)


def to_matrix(column: pa.ChunkedArray | pa.Array) -> Shaped[ndarray, "rows dim"]:
    """Convert a FixedSizeList column to a matrix of the same dtype."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    values: ndarray = column.flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), column.type.list_size)


def dtype_of(field: pa.Field) -> str:
    """Return the numpy name of a FixedSizeList column's value type."""
    return str(np.dtype(field.type.value_type.to_pandas_dtype()))


def to_arrow(matrix: Shaped[ndarray, "rows dim"], *, dtype: str = "float32") -> pa.Array:
    """Convert a matrix to a FixedSizeList column of `dtype` (float16, float32; integers keep their dtype)."""
    if np.issubdtype(matrix.dtype, np.floating):
        matrix = matrix.astype(dtype)
    values = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    # FixedSizeListArray.from_arrays refuses lists of length 0.
    return pa.Array.from_buffers(
        pa.list_(values.type, matrix.shape[1]), len(matrix), [None], children=[values]
    )


def l2_normalize(matrix: Float[ndarray, "rows dim"]) -> Float[ndarray, "rows dim"]:
    """Scale rows to L2 norm 1, as float32; a row of zeros stays zero."""
    # Faster than np.linalg.norm, whose overhead exceeds the scaling of a single query's vector.
    norms = np.sqrt(np.add.reduce(matrix * matrix, axis=1, keepdims=True))
    scaled: ndarray = (matrix / np.maximum(norms, 1e-12)).astype(np.float32, copy=False)
    return scaled


def as_searched(matrix: Float[ndarray, "rows dim"], similarity: str) -> Float[ndarray, "rows dim"]:
    """Return document embeddings as search compares them (float32): normalized for cosine, as is for dot."""
    return l2_normalize(matrix) if similarity == "cosine" else matrix.astype(np.float32, copy=False)


def npy_bytes(array: Shaped[ndarray, "..."]) -> bytes:
    """Serialize an array to the bytes of a .npy file."""
    sink = io.BytesIO()
    np.save(sink, array, allow_pickle=False)
    return sink.getvalue()


# --- rows --------------------------------------------------------------------------------------------------


class StoredRows:
    """Random access to the rows of a table as Python values. Thread-safe."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._starts = [*accumulate((batch.num_rows for batch in self._batches), initial=0)]
        # Created at first use: a large table has a thousand batches, and a few results use ten of them.
        self._columns: list[list[_Column] | None] = [None] * len(self._batches)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return row `row` as a dict, with the values of :meth:`pyarrow.Table.to_pylist`."""
        number = bisect_right(self._starts, row) - 1
        columns = self._columns[number]
        if columns is None:
            batch = self._batches[number]
            columns = [_column(name, batch[name]) for name in batch.schema.names]
            self._columns[number] = columns
        inside = row - self._starts[number]
        after = inside + 1
        # A function call for each value would take 50 % more time: an answer has fifty strings.
        return {
            name: text[offsets[inside] : offsets[after]].tobytes().decode() if read is None else read(inside)
            for name, offsets, text, read in columns
        }


def map_rows(path: Path) -> pa.Table:
    """Open an Arrow file, memory-mapped for reads of single rows.

    With MADV_RANDOM the kernel reads only the missing page. Otherwise it reads 32 pages around it, which
    takes ten times as long from a busy disk and fills the page cache with rows that no request needs.
    """
    with path.open("rb") as stream:
        pages = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    pages.madvise(mmap.MADV_RANDOM)
    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(pages))).read_all()


def take_rows(table: pa.Table, rows: Int[ndarray, " rows"]) -> pa.Table:
    """Take rows by their numbers, in this order; fastest for ascending numbers."""
    batches = table.to_batches()
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    batch_numbers = np.searchsorted(starts, rows, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(batch_numbers)) + 1).tolist(), len(rows)]
    pieces = (
        batches[batch_numbers[start]].take(pa.array(rows[start:stop] - starts[batch_numbers[start]]))
        for start, stop in pairwise(cuts)
        if start < stop
    )
    return pa.Table.from_batches(_join_small(pieces), schema=table.schema)


def take_documents(table: pa.Table, doc_ids: pa.ChunkedArray, *, missing: str) -> pa.Table:
    """Take rows of a table by their `doc_id`, in the order of `doc_ids`.

    ArtifactError if a document is not in the table; `missing` is the end of its message: what such documents
    lack, and what to do.
    """
    table_ids = table["doc_id"].combine_chunks()
    rows = pc.index_in(doc_ids, table_ids)
    if rows.null_count:
        first = doc_ids.filter(rows.is_null())[0].as_py()
        raise ArtifactError(f"{rows.null_count} documents, first {first!r}, have no {missing}")
    same_order = len(table_ids) == len(doc_ids) and pc.all(pc.equal(doc_ids, table_ids)).as_py()
    return table if same_order else table.take(rows)


def _join_small(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small adjacent batches: repeated calls of `take_rows` would otherwise shrink them each time."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if pending and size + batch.nbytes > BATCH_BYTES:
            yield pa.concat_batches(pending)
            pending, size = [], 0
        pending.append(batch)
        size += batch.nbytes
    if pending:
        yield pa.concat_batches(pending)


def _column(name: str, values: pa.Array) -> _Column:
    if not values.null_count:
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            _, bounds, text = values.buffers()
            offset_type = np.int32 if pa.types.is_string(values.type) else np.int64
            offsets: Any = np.frombuffer(bounds, offset_type)[values.offset :]
            return _Column(name, memoryview(offsets), memoryview(b"" if text is None else text), None)
        if pa.types.is_integer(values.type) or values.type in (pa.float32(), pa.float64()):
            numbers = memoryview(values.to_numpy(zero_copy_only=True))
            return _Column(name, None, None, numbers.__getitem__)
    return _Column(name, None, None, lambda row: values[row].as_py())
