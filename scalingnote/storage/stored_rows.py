"""Rows of a table as Python values, one at a time: what a search gives of the documents that it finds.

Values are read where Arrow has them. Its own scalars cost a microsecond or two each, and ten documents have
fifty of them: more than it takes to find the ten.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

_Reader = Callable[[int], Any]


class StoredRows:
    """A table whose rows are asked for by their numbers. Threads may share one."""

    def __init__(self, table: pa.Table) -> None:
        self._readers = [(name, _reader(table[name])) for name in table.column_names]

    def __getitem__(self, row: int) -> dict[str, Any]:
        """A row that is there, by the names of its columns; as :meth:`pyarrow.Table.to_pylist` has it."""
        return {name: read(row) for name, read in self._readers}


def _reader(column: pa.ChunkedArray) -> _Reader:
    if column.num_chunks == 1 and not column.null_count:
        (values,) = column.chunks
        if pa.types.is_string(values.type):
            return _of_strings(values, np.int32)
        if pa.types.is_large_string(values.type):
            return _of_strings(values, np.int64)
        if pa.types.is_integer(values.type) or values.type in (pa.float32(), pa.float64()):
            numbers: _Reader = memoryview(values.to_numpy(zero_copy_only=True)).__getitem__
            return numbers
    return lambda row: column[row].as_py()


def _of_strings(values: pa.Array, offset_type: type[np.integer[Any]]) -> _Reader:
    _, bounds, text = values.buffers()
    if text is None:  # each is empty
        return lambda row: ""
    offsets: Any = memoryview(np.frombuffer(bounds, offset_type)[values.offset :])  # type: ignore[arg-type]
    characters = memoryview(text)
    return lambda row: str(characters[offsets[row] : offsets[row + 1]], "utf-8")
