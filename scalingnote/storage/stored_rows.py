"""Rows of a table: one by one as Python values, what a search gives of the documents it finds; or many.

Values are read where Arrow has them. Its own scalars cost a microsecond or two each, and ten documents have
fifty of them: more than it takes to find the ten. And its `take` joins all chunks of a text column before it
takes a row: a copy of the whole column each time, and an error where that has more than 2 GiB.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int
from numpy import ndarray

BATCH_BYTES = 1 << 26  # up to which batches are joined; a text column of one holds no more than 2 GiB

_Reader = Callable[[int], Any]


class StoredRows:
    """A table whose rows are asked for by their numbers. Threads may share one."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._starts = [*accumulate((batch.num_rows for batch in self._batches), initial=0)]
        # Made when they are first needed: a large table has a thousand batches, a few answers touch ten.
        self._readers: list[dict[str, _Reader] | None] = [None] * len(self._batches)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """A row that is there, by the names of its columns; as :meth:`pyarrow.Table.to_pylist` has it."""
        readers, inside = self._place(row)
        return {name: read(inside) for name, read in readers.items()}

    def value(self, row: int, name: str) -> Any:
        """What a row has in one column."""
        readers, inside = self._place(row)
        return readers[name](inside)

    def _place(self, row: int) -> tuple[dict[str, _Reader], int]:
        """The readers of the batch that a row is in, and its number there."""
        number = bisect_right(self._starts, row) - 1
        readers = self._readers[number]
        if readers is None:
            batch = self._batches[number]
            readers = {
                name: _reader(values) for name, values in zip(batch.schema.names, batch.columns, strict=True)
            }
            self._readers[number] = readers
        return readers, row - self._starts[number]


def take(table: pa.Table, rows: Int[ndarray, " rows"]) -> pa.Table:
    """Rows that are there, in order, from the chunks they lie in: made for rows that ascend."""
    batches = table.to_batches()
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    number = np.searchsorted(starts, rows, side="right") - 1
    cuts = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(rows)]
    pieces = (
        batches[number[start]].take(pa.array(rows[start:stop] - starts[number[start]]))
        for start, stop in pairwise(cuts)
        if start < stop
    )
    return pa.Table.from_batches(_joined(pieces), schema=table.schema)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Neighbours as one: a table that is taken from again and again would fall to ever smaller pieces."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if held and size + batch.nbytes > BATCH_BYTES:
            yield pa.concat_batches(held)
            held, size = [], 0
        held.append(batch)
        size += batch.nbytes
    if held:
        yield pa.concat_batches(held)


def _reader(values: pa.Array) -> _Reader:
    if not values.null_count:
        if pa.types.is_string(values.type):
            return _of_strings(values, np.int32)
        if pa.types.is_large_string(values.type):
            return _of_strings(values, np.int64)
        if pa.types.is_integer(values.type) or values.type in (pa.float32(), pa.float64()):
            numbers: _Reader = memoryview(values.to_numpy(zero_copy_only=True)).__getitem__
            return numbers
    return lambda row: values[row].as_py()


def _of_strings(values: pa.Array, offset_type: type[np.integer[Any]]) -> _Reader:
    _, bounds, text = values.buffers()
    if text is None:  # each is empty
        return lambda row: ""
    offsets: Any = memoryview(np.frombuffer(bounds, offset_type)[values.offset :])  # type: ignore[arg-type]
    characters = memoryview(text)
    return lambda row: str(characters[offsets[row] : offsets[row + 1]], "utf-8")
