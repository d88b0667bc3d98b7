"""Rows on disk that are read by number: Arrow files laid end to end and memory-mapped, never loaded.

A store is a folder of such files by table, and ``store.json``, written last, that names them in order. Any
row is one read through the page cache, so a random order over a hundred million rows costs no memory, and
all ranks of a machine share what is cached. A remote store is copied to the machine once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from jaxtyping import Int64, Shaped
from numpy import ndarray

from scalingnote.errors import ArtifactError
from scalingnote.models.prompt import Row
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Part
from scalingnote.train.fetch import fetch

STORE = "store.json"


class Rows:
    """Rows of Arrow files, numbered from the first file's first one on."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._tables = [_mapped(path) for path in paths]
        self._ends = np.cumsum([len(table) for table in self._tables], dtype=np.int64)
        self._views: dict[tuple[int, str], tuple[ndarray | None, ndarray]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def values(self, name: str, rows: Int64[ndarray, " rows"]) -> Shaped[ndarray, "rows ..."]:
        """A column of fixed width."""
        file, within = self._locate(rows)
        first = self._view(0, name)[1]
        out = np.empty((len(rows), *first.shape[1:]), first.dtype)
        for number in np.unique(file).tolist():
            chosen = file == number
            out[chosen] = self._view(number, name)[1][within[chosen]]
        return out

    def lists(self, name: str, rows: Int64[ndarray, " rows"]) -> list[ndarray]:
        """A column of lists."""
        out = []
        for number, row in zip(*(part.tolist() for part in self._locate(rows)), strict=True):
            offsets, values = self._view(number, name)
            assert offsets is not None, f"column {name} holds no lists"
            out.append(values[offsets[row] : offsets[row + 1]])
        return out

    def tokens(self, rows: Int64[ndarray, " rows"]) -> list[Row]:
        """Token rows, as a prompt made them."""
        positions = self.values("positions", rows).tolist()
        return [Row(ids.tolist(), at) for ids, at in zip(self.lists("ids", rows), positions, strict=True)]

    def lengths(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
        """How many tokens each row has; the tokens themselves are not read."""
        file, within = self._locate(rows)
        out = np.empty(len(rows), np.int64)
        for number in np.unique(file).tolist():
            offsets, _ = self._view(number, "ids")
            assert offsets is not None
            chosen = file == number
            out[chosen] = offsets[within[chosen] + 1] - offsets[within[chosen]]
        return out

    def _locate(
        self, rows: Int64[ndarray, " rows"]
    ) -> tuple[Int64[ndarray, " rows"], Int64[ndarray, " rows"]]:
        file = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return file, rows - starts[file]

    def _view(self, file: int, name: str) -> tuple[ndarray | None, ndarray]:
        """Offsets (of lists) and values of a file's column, as arrays over the mapped bytes."""
        if (file, name) not in self._views:
            column = self._tables[file][name].chunk(0)
            kind = column.type
            if pa.types.is_large_list(kind):
                self._views[file, name] = column.offsets.to_numpy(), column.values.to_numpy()
            elif pa.types.is_fixed_size_list(kind):
                self._views[file, name] = None, column.flatten().to_numpy().reshape(-1, kind.list_size)
            else:
                self._views[file, name] = None, column.to_numpy()
        return self._views[file, name]


@dataclass(frozen=True)
class Store:
    """A folder of tables open for reading, and what was counted when it was written."""

    tables: Mapping[str, Rows]
    facts: Mapping[str, Any]

    def __getitem__(self, table: str) -> Rows:
        return self.tables[table]

    @classmethod
    def open(cls, uri: str) -> "Store":
        """Map a finished store; of all processes of a machine that open a remote one, the first copies it."""
        index = json.loads(fs.read_bytes(fs.join(uri, STORE)))
        names = [name for table in index["tables"].values() for name, _ in table]
        # The index holds the sums of all files: a store of other contents is another version.
        folder = fetch(uri, names, version=json.dumps(index, sort_keys=True))
        return cls(
            {table: Rows([folder / name for name, _ in files]) for table, files in index["tables"].items()},
            index["facts"],
        )

    @staticmethod
    def finish(uri: str, tables: Mapping[str, Sequence[tuple[str, Part]]], facts: Mapping[str, Any]) -> None:
        """Name the files of each table, in order; from here on the store can be opened."""
        listed = {table: [(name, part.sha256) for name, part in files] for table, files in tables.items()}
        text = json.dumps({"tables": listed, "facts": facts}, indent=1)
        fs.write_bytes(fs.join(uri, STORE), text.encode())

    @staticmethod
    def facts_of(uri: str) -> dict[str, Any]:
        """What was counted, without mapping anything."""
        facts: dict[str, Any] = json.loads(fs.read_bytes(fs.join(uri, STORE)))["facts"]
        return facts

    @staticmethod
    def finished(uri: str) -> bool:
        """Whether there is nothing left to prepare."""
        return fs.exists(fs.join(uri, STORE))


def one_chunk(columns: Mapping[str, pa.Array]) -> pa.Table:
    """A table that goes to disk as one record batch: that is what :class:`Rows` maps."""
    return pa.table(dict(columns)).combine_chunks()


def _mapped(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source:  # closed at once: the mapping stays, the descriptor need not
            table = pa.ipc.open_file(source).read_all()
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise ArtifactError(
            f"{path} is not a readable part of a store: {error}; delete its folder and re-run"
        ) from None
    assert table.column(0).num_chunks == 1, f"{path} is not one record batch"
    return table
