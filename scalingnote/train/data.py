"""Training rows: stored on disk and read by number, in an order that is a function of step and seed.

    Store   folder of Arrow files by table, memory-mapped; a row is one read through the page cache
    Order   step ─► places in the epoch ─permuted─► slots ─► part and draw ─permuted─► rows

A random order over a hundred million rows needs no memory, and all ranks of a machine share the page cache.
The order has no state: a resumed run, a restarted worker or a different number of ranks reads the same
batches.

Rows are numbered part after part; a part is one source and hop. In an epoch, a part has as many slots as
rows; in a mixture, this number is multiplied by the epochs of the set. The draws from a part follow one
permutation of it after the other, across epochs, so all rows of a large part with few epochs are read before
a row repeats.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from jaxtyping import Int64, Shaped, UInt64
from numpy import ndarray

from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.models.prompt import TokenRow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Part
from scalingnote.train.config import Batching, Schedule
from scalingnote.triplets.collect.association import mix_bits

STORE = "store.json"
ABSENT = -1  # in place of a document's row number, if a row has fewer negatives than others
_FEISTEL_ROUNDS = 12
_SLOTS, _PART = range(2)  # purpose of a permutation, part of its key: equal keys would correlate them
RowNumbers = Int64[ndarray, " rows"]
BatchRows = Int64[ndarray, " batch"]


class RowTable:
    """Rows of several Arrow files, numbered from the first row of the first file."""

    def __init__(self, files: Sequence[Path | pa.Table]) -> None:
        """Open files, which are mapped, or tables of one chunk."""
        self._tables = [_map(file) if isinstance(file, Path) else file for file in files]
        self._ends = np.cumsum([len(table) for table in self._tables], dtype=np.int64)
        self._views: dict[tuple[int, str], tuple[ndarray | None, ndarray]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def values(self, name: str, rows: RowNumbers) -> Shaped[ndarray, "rows ..."]:
        """Read a column of fixed width."""
        file, within = file_and_row(rows, self._ends)
        first = self._view(0, name)[1]
        out = np.empty((len(rows), *first.shape[1:]), first.dtype)
        # File by file: one index operation on a mapped array takes many rows.
        for number in np.unique(file).tolist():
            chosen = file == number
            out[chosen] = self._view(number, name)[1][within[chosen]]
        return out

    def lists(self, name: str, rows: RowNumbers) -> list[ndarray]:
        """Read a column of lists."""
        out = []
        for number, row in zip(*(part.tolist() for part in file_and_row(rows, self._ends)), strict=True):
            offsets, values = self._view(number, name)
            assert offsets is not None, f"column {name} holds no lists"
            out.append(values[offsets[row] : offsets[row + 1]])
        return out

    def tokens(self, rows: RowNumbers) -> list[TokenRow]:
        """Read token rows as a prompt made them."""
        positions = self.values("positions", rows).tolist()
        return [
            TokenRow(ids.tolist(), at) for ids, at in zip(self.lists("ids", rows), positions, strict=True)
        ]

    def _view(self, file: int, name: str) -> tuple[ndarray | None, ndarray]:
        """Return the offsets (of lists) and values of a file's column, as arrays over the mapped bytes."""
        if (file, name) not in self._views:
            column = self._tables[file][name].chunk(0)
            kind = column.type
            if pa.types.is_large_list(kind):
                self._views[file, name] = column.offsets.to_numpy(), column.values.to_numpy()
            elif pa.types.is_fixed_size_list(kind):
                values = column.flatten().to_numpy().reshape(len(column), kind.list_size)
                self._views[file, name] = None, values
            else:
                self._views[file, name] = None, column.to_numpy()
        return self._views[file, name]


def file_and_row(rows: RowNumbers, ends: Int64[ndarray, " files"]) -> tuple[RowNumbers, RowNumbers]:
    """Return the file of each row of a table, and its number there; files end before the rows `ends`."""
    file = np.searchsorted(ends, rows, side="right")
    starts = np.concatenate([[0], ends[:-1]])
    return file, rows - starts[file]


class StoredFile(NamedTuple):
    """A file of a table."""

    name: str
    rows: int
    bytes: int


@dataclass(frozen=True)
class Store:
    """A folder of tables open for reading, and the counts (`facts`) from when it was written.

    ``store.json`` is written last and names the files of each table in order.
    """

    tables: Mapping[str, RowTable]
    facts: Mapping[str, Any]

    def __getitem__(self, table: str) -> RowTable:
        return self.tables[table]

    @classmethod
    def open(cls, uri: str, tables: Sequence[str] | None = None) -> "Store":
        """Map the `tables` (default: all) of a finished store; a remote store is copied to this machine."""
        index = json.loads(fs.read_bytes(fs.join(uri, STORE)))
        selected = {table: index["tables"][table] for table in tables or index["tables"]}
        names = [name for files in selected.values() for name, *_ in files]
        # The index holds the checksums of all files, so a store with other contents has another version.
        folder = fs.download(uri, names, version=json.dumps(index, sort_keys=True))
        return cls(
            {table: RowTable([folder / name for name, *_ in files]) for table, files in selected.items()},
            index["facts"],
        )

    @staticmethod
    def files(uri: str, table: str) -> list[StoredFile]:
        """List the files of a table of a finished store, in order."""
        index = json.loads(fs.read_bytes(fs.join(uri, STORE)))
        return [StoredFile(name, rows, size) for name, _, rows, size in index["tables"][table]]

    @staticmethod
    def finish(uri: str, tables: Mapping[str, Sequence[tuple[str, Part]]], facts: Mapping[str, Any]) -> None:
        """Write the index of the files of each table, in order; after this the store can be opened."""
        entries = {
            table: [(name, part.sha256, part.rows, part.bytes) for name, part in files]
            for table, files in tables.items()
        }
        text = json.dumps({"tables": entries, "facts": facts}, indent=1)
        fs.write_bytes(fs.join(uri, STORE), text.encode())

    @staticmethod
    def facts_of(uri: str) -> dict[str, Any]:
        """Read the counts of a finished store, without mapping its files."""
        facts: dict[str, Any] = json.loads(fs.read_bytes(fs.join(uri, STORE)))["facts"]
        return facts

    @staticmethod
    def is_complete(uri: str) -> bool:
        """Return whether the store at `uri` is complete."""
        return fs.exists(fs.join(uri, STORE))


def one_chunk(columns: Mapping[str, pa.Array]) -> pa.Table:
    """Build a table of one record batch, the form that :class:`RowTable` can map."""
    return pa.table(dict(columns)).combine_chunks()


def _map(path: Path) -> pa.Table:
    try:
        with pa.memory_map(str(path)) as source:  # closed at once: only the mapping stays
            table = pa.ipc.open_file(source).read_all()
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise ArtifactError(
            f"{path} is not a readable part of a store: {error}; delete its folder and re-run"
        ) from None
    assert table.column(0).num_chunks == 1, f"{path} is not one record batch"
    return table


class Order:
    """The rows of every step's global batch."""

    def __init__(
        self,
        schedule: Schedule,
        sizes: Mapping[str, int],
        batching: Batching | None = None,
        epochs: Mapping[str, float] | None = None,
    ) -> None:
        """Divide the rows of a run into batches.

        Args:
            schedule: batch size, seed and length of the run.
            sizes: rows of each part (``click/one``; in a mixture, of each set), in the order in which rows
                are numbered.
            batching: which rows form a batch; mixed by default.
            epochs: passes over each set of a mixture.

        Raises:
            DataError: there are fewer rows than one global batch.
            ConfigError: a part is too small for one batch in an epoch.
        """
        self._batch, self._seed = schedule.global_batch, schedule.seed % 2**64
        self._sizes = np.array(list(sizes.values()), dtype=np.int64)
        self._homogeneous = batching is not None and batching.sources == "homogeneous"
        passes = [epochs[part] for part in sizes] if epochs else 1
        epoch_rows = np.rint(self._sizes * passes).astype(np.int64)  # rows of each part per epoch
        rows = int(epoch_rows.sum())
        if rows < self._batch:
            raise DataError(
                f"{rows} training rows do not fill one global batch of {self._batch}: "
                "lower global_batch or collect more"
            )
        # Slots of each part per epoch: rows, or complete batches if they are homogeneous.
        self._quota = epoch_rows // self._batch if self._homogeneous else epoch_rows
        for part, size, slots in zip(sizes, self._sizes, self._quota, strict=True):
            if not slots:
                raise ConfigError(
                    f"{part} ({size:,} rows) would not fill one batch of {self._batch} in an epoch: set "
                    "batching.sources=mixed, or raise its epochs"
                )
        self.steps_per_epoch = int(self._quota.sum()) if self._homogeneous else rows // self._batch
        steps = round(self.steps_per_epoch * schedule.epochs)
        self.steps = steps if schedule.max_steps is None else min(steps, schedule.max_steps)
        # A homogeneous batch never spans two passes over its part, or a row could occur in it twice.
        tail = self._sizes % self._batch if self._homogeneous else 0
        self._pass = np.where(self._sizes < self._batch, self._sizes, self._sizes - tail)

    def batch(self, step: int) -> BatchRows:
        """Compute the row numbers of the global batch of a step."""
        return self._rows(*self._draws(*divmod(step, self.steps_per_epoch)))

    def _draws(self, epoch: int, step: int) -> tuple[BatchRows, BatchRows]:
        """Compute the part of every row of a batch, and the number of its draw from it over all epochs.

        `step` is counted within the epoch.
        """
        row = np.arange(self._batch)
        places = np.array([step]) if self._homogeneous else step * self._batch + row
        ends = np.cumsum(self._quota)
        slots = permute(places, size=int(ends[-1]), key=(self._seed, _SLOTS, epoch))
        parts = np.searchsorted(ends, slots, side="right")
        draws = epoch * self._quota[parts] + slots - (ends - self._quota)[parts]
        if self._homogeneous:
            return np.repeat(parts, self._batch), draws * self._batch + row
        return parts, draws

    def _rows(self, parts: BatchRows, draws: BatchRows) -> BatchRows:
        starts = np.cumsum(self._sizes) - self._sizes
        passes, within = np.divmod(draws, self._pass[parts])
        rows = np.empty_like(draws)
        for part, number in np.unique(np.stack([parts, passes]), axis=1).T.tolist():
            chosen = (parts == part) & (passes == number)
            key = (self._seed, _PART, part, number)
            rows[chosen] = starts[part] + permute(within[chosen], size=int(self._sizes[part]), key=key)
        return rows


def permute(
    numbers: Int64[ndarray, " numbers"], *, size: int, key: Sequence[int]
) -> Int64[ndarray, " numbers"]:
    """Map `numbers` by the permutation of ``range(size)`` that `key` selects, without a table.

    A Feistel network permutes the next power of two; a number that falls outside the range is permuted again
    until it falls inside (Black and Rogaway, 2002), at most twice on average.
    """
    keys = np.random.SeedSequence(list(key)).generate_state(_FEISTEL_ROUNDS, np.uint64)
    bits = max((size - 1).bit_length(), 2)
    out = numbers.astype(np.uint64)
    outside = np.arange(len(out))
    while len(outside):
        out[outside] = _feistel(out[outside], bits=bits, keys=keys)
        outside = outside[out[outside] >= size]
    return np.asarray(out, dtype=np.int64)


class RankShare(NamedTuple):
    """Rows of one rank in a step, and the places of the tokens of their documents."""

    rows: RowTable
    chosen: Int64[ndarray, " queries"]  # row numbers in `rows`
    documents: RowTable
    places: Int64[ndarray, "queries group"]  # row numbers in `documents`, the positive first; see `stand_ins`


def stand_ins(documents: Int64[ndarray, "rows group"]) -> Int64[ndarray, "rows group"]:
    """Return the documents that a batch reads for these rows: the positive, column 0, if one is ABSENT."""
    return np.where(documents == ABSENT, documents[:, :1], documents)


@dataclass(frozen=True)
class MappedShares:
    """Shares of one rank in the steps, by random reads of a mapped store."""

    store: Store
    order: Order
    rank: int
    world: int

    def __call__(self, step: int) -> RankShare:
        """Select every `world`-th row of the batch of a step."""
        rows = self.store["train"]
        chosen = self.order.batch(step)[self.rank :: self.world]
        return RankShare(rows, chosen, self.store["documents"], stand_ins(rows.values("documents", chosen)))


def _feistel(
    numbers: UInt64[ndarray, " numbers"], *, bits: int, keys: UInt64[ndarray, " rounds"]
) -> UInt64[ndarray, " numbers"]:
    """Permute ``range(2**bits)``: each half in turn is combined with a hash of the other by XOR."""
    width = np.uint64(bits // 2)
    low, high = numbers & _ones(bits // 2), numbers >> width
    for number, key in enumerate(keys):
        if number % 2:
            high ^= mix_bits(low ^ key) & _ones(bits - bits // 2)
        else:
            low ^= mix_bits(high ^ key) & _ones(bits // 2)
    return (high << width) | low


def _ones(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
