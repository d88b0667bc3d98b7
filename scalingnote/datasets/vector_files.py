"""Texts with vectors: Parquet, JSON lines, or the rows of .npy beside a file of texts.

Columns of texts are told as those of documents (:mod:`layouts`), a title stands before its text. Rows that
cannot be learnt from are set aside with the reason.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.datasets.input_files import (
    File,
    Quarantine,
    UnreadableRow,
    delimited_lines,
    find_files,
    json_lines,
    plain_column,
    shown_row,
    whole,
)
from scalingnote.datasets.layouts import FileHead, FileLayout, find_layouts, tell
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.shuffle import hash_of

VECTOR_NAMES = ("vector", "embedding")
BLOCK_ROWS = 4096
VECTORS_TABLE = "vectors"  # of rejected rows
_TEXT_SUFFIXES = (".parquet", ".jsonl", ".txt", ".tsv")
VectorRow = tuple[Any, Any]  # a text and a vector, or why the row cannot be read and None


class VectorFiles:
    """The readable rows of files, each text once; all vectors have the length of the first ones."""

    def __init__(self, path: str, *, texts: str | None, columns: Mapping[str, str]) -> None:
        """Look at the files' columns.

        Args:
            path: .parquet, .jsonl, or one .npy file.
            texts: the file of texts of a .npy file.
            columns: our names (title, content, vector) -> those of the files, where they are not known.

        Raises:
            DataError: no file; texts and vectors cannot be told, or not be matched.
        """
        self.path, self.quarantine, self.dim = path, Quarantine(), 0
        self._seen: set[int] = set()
        of_texts = {ours: theirs for ours, theirs in columns.items() if ours != "vector"}
        if path.endswith(".npy"):
            self._rows = _npy_rows(path, texts, of_texts)
            return
        if texts is not None:
            raise DataError(f"{path} has texts of its own: leave --texts {texts} out, or give a .npy file")
        layouts = _layouts(path, (".parquet", ".jsonl"), of_texts)
        chosen = columns.get("vector")
        vectors = {file: _vector_column(layout.head, chosen) for file, layout in layouts.items()}
        self._rows = (row for file in layouts for row in _file_rows(file, layouts[file], vectors[file]))

    def tables(self) -> Iterator[pa.Table]:
        """Rows as ``query_id``, ``query`` and ``embedding``, block by block; DataError if there is none."""
        while block := list(islice(self._rows, BLOCK_ROWS)):
            found = [row for row in block if self._is_good(row)]
            if found:
                ids = hash_of(pa.array([text for text, _ in found], pa.string())).tolist()
                columns = {
                    "query_id": pa.array([f"text {number:016x}" for number in ids]),
                    "query": pa.array([text for text, _ in found], pa.string()),
                    "embedding": arrow.to_arrow(np.stack([vector for _, vector in found])),
                }
                yield pa.table(columns)
        if not self._seen:
            raise DataError(f"{self.path} has no text with a vector{self.quarantine.reasons()}")

    def _is_good(self, row: VectorRow) -> bool:
        text, vector = row
        shown, reason = str(text), ""
        if isinstance(text, UnreadableRow):
            shown, reason = text.row, text.reason
        elif not isinstance(text, str) or not text.strip():
            reason = "no text"
        elif vector is None or not len(vector):
            reason = "no vector"
        elif not np.isfinite(vector).all() or not vector.any():
            reason = "a vector that is 0, or holds what is not a number"
        elif len(vector) != (self.dim or len(vector)):
            reason = f"a vector of another length than {self.dim}, which the first one has"
        elif (key := hash(text)) in self._seen:
            reason = "a text that occurred before"
        else:
            self.dim = len(vector)
            self._seen.add(key)
        if reason:
            self.quarantine.reject(VECTORS_TABLE, shown_row(shown), reason)
        return not reason


def _layouts(path: str, suffixes: tuple[str, ...], columns: dict[str, str]) -> dict[File, FileLayout]:
    files = find_files(path, suffixes)
    if empty := [file.uri for file in files if not file.size]:
        raise DataError(f"{empty[0]} is empty: leave it out, or write it again")
    layouts = find_layouts(files, columns, names=("title", "content"), numbered=True)
    tell(layouts)
    return layouts


def _vector_column(head: FileHead, chosen: str | None) -> str:
    """The column of vectors; DataError if it cannot be told."""
    lists = [name for name in head.kinds if head.kind(name) == "lists"]
    if chosen is not None:
        if chosen not in head.kinds:
            raise DataError(f"{head.uri} has no column {chosen!r}, only {', '.join(head.kinds)}")
        return chosen
    named = [name for name in VECTOR_NAMES if name in lists] or lists
    if len(named) == 1:
        return named[0]
    found = f"several, {', '.join(named)}" if named else f"none in {', '.join(head.kinds) or 'no column'}"
    raise DataError(
        f"{head.uri}: the column of vectors (lists of numbers) cannot be told, there are {found}: choose "
        "one by --set vectors.columns.vector=NAME"
    )


def _file_rows(file: File, layout: FileLayout, vector: str) -> Iterator[VectorRow]:
    columns = layout.columns
    for row in _parquet_rows(file, layout, vector) if file.is_parquet else json_lines(whole(file)):
        if isinstance(row, UnreadableRow):
            yield row, None
        else:
            yield _text(row, columns), _vector(row.get(vector))


def _parquet_rows(file: File, layout: FileLayout, vector: str | None) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file; vectors as arrays, which takes a tenth of the time of lists."""
    texts = [*layout.columns.values()]
    with fs.open_input(file.uri) as source:
        columns = texts if vector is None else [*texts, vector]
        for batch in pq.ParquetFile(source).iter_batches(BLOCK_ROWS, columns=columns):
            table = pa.Table.from_batches([batch])
            found = {name: plain_column(table, name).to_pylist() for name in texts}
            if vector is not None:
                found[vector] = list(table[vector].to_numpy())
            for values in zip(*found.values(), strict=True):
                yield dict(zip(found, values, strict=True))


def _text(row: dict[str, Any], columns: Any) -> Any:
    """Title and text of a row; what is no string is returned as it is."""
    parts = [row.get(columns[name]) for name in ("title", "content") if name in columns]
    if any(part is not None and not isinstance(part, str) for part in parts):
        return parts
    return " ".join(part.strip() for part in parts if part)


def _vector(value: Any) -> ndarray | None:
    try:
        vector = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        return None
    return vector if vector.ndim == 1 else None


def _npy_rows(path: str, texts: str | None, columns: dict[str, str]) -> Iterator[VectorRow]:
    if texts is None:
        raise DataError(f"{path} holds vectors alone: give the file of their texts, row by row, by --texts")
    (file,) = find_files(path, (".npy",))
    try:
        matrix = np.load(file.uri, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is no .npy file of numbers ({error}): write it by numpy.save") from None
    if matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.number):
        shape = " x ".join(map(str, matrix.shape))
        raise DataError(f"{path} holds {shape} of {matrix.dtype}: it is to be a matrix, a row per text")
    layouts = _layouts(texts, _TEXT_SUFFIXES, columns)
    found: list[Any] = [text for file, layout in layouts.items() for text in _texts(file, layout)]
    if len(found) != len(matrix):
        raise DataError(
            f"{path} has {len(matrix):,} rows, {texts} {len(found):,} texts (blank lines are none): they are "
            "to be the same, in one order"
        )
    return ((text, np.asarray(row, np.float32)) for text, row in zip(found, matrix, strict=True))


def _texts(file: File, layout: FileLayout) -> Iterator[Any]:
    rows: Iterable[Any]
    if file.is_parquet:
        rows = _parquet_rows(file, layout, None)
    elif file.uri.endswith(".jsonl"):
        rows = json_lines(whole(file))
    else:
        rows = delimited_lines(whole(file), columns=layout.head.fields, header=layout.head.header)
    return (row if isinstance(row, UnreadableRow) else _text(row, layout.columns) for row in rows)
