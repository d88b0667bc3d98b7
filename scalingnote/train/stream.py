"""Training rows written in the order of a run: each rank reads only its share and copies no store.

    places      tasks over chunks of steps       rows that `Order` selects, by file of rows
    rows        tasks over files of rows         rows by chunk; the documents they name, by file of documents
    tokens      tasks over files of documents    tokens by chunk
    stream      tasks over chunks of steps       rows and the tokens of their documents, in lanes

A chunk holds the rows of some steps. Its file holds the batches of these steps as columns, *lanes*: a lane
has one row of each step. A rank reads neighbouring lanes by one ranged read. It reads 1 / world of the bytes,
and holds its lanes of two chunks: the current one, and the next, which a thread reads. A cell is the smallest
readable piece, a few lanes (one, for batches up to MAX_CELLS rows).

Every batch has the rows that :class:`~scalingnote.train.data.Order` selects, the same as with a mapped store:
rows are not shuffled within blocks, and the order depends neither on the number of ranks nor on the step of a
restart. The cost is one shuffle of all rows of the run through files before it starts, and their size on the
store.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from jaxtyping import Int64
from numpy import ndarray

from scalingnote.core.parts import Executor
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.shuffle import JsonRecord, run_slices, scatter, stream
from scalingnote.train.data import (
    Order,
    RankShare,
    RowNumbers,
    RowTable,
    Store,
    StoredFile,
    file_and_row,
    one_chunk,
    stand_ins,
)

INDEX_FILE, POOL_FILE = "stream.json", "pool.arrow"
CHUNK_ROWS = 1 << 16  # about 200 MB of rows with 8 documents of 96 tokens, for all ranks together
MAX_CHUNKS = 1 << 12  # per run; with more rows, chunks are larger
MAX_CELLS = 1 << 10  # per chunk
_PIECE_ROWS = 1 << 17  # rows that a task processes together
_OFFSET_BYTES = 8
_GOLDEN = (5**0.5 - 1) / 2
_INTERMEDIATE = ("places", "rows", "wanted", "tokens")


@dataclass(frozen=True)
class ChunkLayout:
    """Division of the steps of a run into chunks, and of the rows of a step into cells."""

    steps: int
    batch: int  # rows of a step, over all ranks
    chunk_steps: int
    cells: int  # per chunk; divides `batch`

    @classmethod
    def of(cls, steps: int, batch: int) -> "ChunkLayout":
        """Compute the layout of a run: chunks of about CHUNK_ROWS rows, the smallest cells for MAX_CELLS."""
        rows = max(CHUNK_ROWS, steps * batch // MAX_CHUNKS)
        cells = max(n for n in range(1, min(batch, MAX_CELLS) + 1) if batch % n == 0)
        return cls(steps, batch, min(max(rows // batch, 1), max(steps, 1)), cells)

    @property
    def chunks(self) -> int:
        """Number of chunk files."""
        return -(-self.steps // self.chunk_steps)

    @property
    def cell_lanes(self) -> int:
        """Lanes of a cell."""
        return self.batch // self.cells

    def steps_of(self, chunk: int) -> range:
        """Return the steps of a chunk; the last chunk may have fewer than the others."""
        first = chunk * self.chunk_steps
        return range(first, min(first + self.chunk_steps, self.steps))

    def lanes(self) -> Int64[ndarray, " batch"]:
        """Return the row of a batch that each lane holds.

        Any run of lanes takes rows from all over the batch, because a batch may be sorted by length.
        """
        return np.argsort(np.arange(self.batch) * _GOLDEN % 1, kind="stable")


# --- writing -----------------------------------------------------------------------------------------------


def write_stream(
    store: str,
    order: Order,
    *,
    batch: int,
    pool: Int64[ndarray, " documents"],
    each: Executor = map,
) -> dict[str, int]:
    """Write the stream of a run to a subfolder of its finished store, or find it there.

    `batch` is the number of rows of a step, `pool` the documents of the validation sample.

    Returns:
        ``query_tokens`` and ``document_tokens`` of all rows of the run, and the ``bytes`` of the stream.
    """
    folder = fs.join(store, "stream")
    index = fs.join(folder, INDEX_FILE)
    if fs.exists(index):
        return dict(json.loads(fs.read_bytes(index))["totals"])
    layout = ChunkLayout.of(order.steps, batch)
    rows, documents = Store.files(store, "train"), Store.files(store, "documents")
    run = partial(run_slices, folder=folder, each=each, section="train")
    chunks = range(layout.chunks)
    run("places", partial(_scatter_places, order=order, layout=layout, files=rows, folder=folder), chunks)
    # Without a task: the pool is small, and is stored behind the chunks as an additional chunk.
    _scatter_documents(pool, np.full(len(pool), layout.chunks), np.arange(len(pool)), documents, folder, "x")
    run("rows", partial(_scatter_rows, store=store, documents=documents, folder=folder), rows)
    run("tokens", partial(_scatter_tokens, store=store, folder=folder), documents)
    if len(pool):
        write_table(fs.join(folder, POOL_FILE), _in_place(folder, "tokens", layout.chunks).combine_chunks())
    records = run("stream", partial(_write_chunk, layout=layout, folder=folder), chunks)
    totals = {name: sum(record[name] for record in records) for name in records[0] if name != "schema"}
    facts = {"layout": asdict(layout), "schema": records[0]["schema"], "totals": totals}
    fs.write_bytes(index, json.dumps(facts).encode())
    for name in _INTERMEDIATE:
        fs.delete(fs.join(folder, name))
    return totals


def _scatter_places(
    item: tuple[int, int], *, order: Order, layout: ChunkLayout, files: Sequence[StoredFile], folder: str
) -> JsonRecord:
    chunk, _ = item
    batches = np.stack([order.batch(step) for step in layout.steps_of(chunk)])
    row_numbers = batches[:, layout.lanes()].T.reshape(-1)  # lane after lane
    file, row = file_and_row(row_numbers, np.cumsum([file.rows for file in files]))
    table = pa.table(
        {"row": row, "chunk": np.full(len(row_numbers), chunk), "place": np.arange(len(row_numbers))}
    )
    scatter(table, file, target=fs.join(folder, "places"), name=f"{chunk:05d}")
    return {}


def _scatter_rows(
    item: tuple[int, Any], *, store: str, documents: Sequence[StoredFile], folder: str
) -> JsonRecord:
    number, (name, *_) = item
    table = read_table(fs.join(store, name))
    for piece, wanted in enumerate(_pieces(folder, "places", number)):
        piece_name = f"{number:05d}-{piece:05d}"
        selected = table.take(wanted["row"]).append_column("place", wanted["place"])
        chunk, place = wanted["chunk"].to_numpy(), wanted["place"].to_numpy()
        scatter(selected, chunk, target=fs.join(folder, "rows"), name=piece_name)
        group = selected.schema.field("documents").type.list_size
        numbers = selected["documents"].combine_chunks().flatten().to_numpy().reshape(-1, group)
        numbers = stand_ins(numbers).reshape(-1)
        places = (place[:, None] * group + np.arange(group)).reshape(-1)
        _scatter_documents(numbers, np.repeat(chunk, group), places, documents, folder, piece_name)
    return {}


def _scatter_documents(
    numbers: RowNumbers,
    chunks: RowNumbers,
    places: RowNumbers,
    files: Sequence[StoredFile],
    folder: str,
    name: str,
) -> None:
    file, row = file_and_row(numbers, np.cumsum([file.rows for file in files]))
    table = pa.table({"row": row, "chunk": chunks, "place": places})
    scatter(table, file, target=fs.join(folder, "wanted"), name=name)


def _scatter_tokens(item: tuple[int, Any], *, store: str, folder: str) -> JsonRecord:
    number, (name, *_) = item
    table = read_table(fs.join(store, name)).select(["ids", "positions"])
    for piece, wanted in enumerate(_pieces(folder, "wanted", number)):
        selected = table.take(wanted["row"]).append_column("place", wanted["place"])
        scatter(
            selected,
            wanted["chunk"].to_numpy(),
            target=fs.join(folder, "tokens"),
            name=f"{number:05d}-{piece:05d}",
        )
    return {}


def _write_chunk(item: tuple[int, int], *, layout: ChunkLayout, folder: str) -> JsonRecord:
    chunk, _ = item
    rows, tokens = _in_place(folder, "rows", chunk), _in_place(folder, "tokens", chunk)
    group = rows.schema.field("documents").type.list_size
    for name in ("ids", "positions"):
        nested = pa.FixedSizeListArray.from_arrays(tokens[name].combine_chunks(), group)
        rows = rows.append_column(f"document_{name}", nested)
    (batch,) = rows.combine_chunks().to_batches()
    schema = batch.schema.serialize().to_pybytes()
    sink, offsets = pa.BufferOutputStream(), [len(schema)]  # the writer begins with the schema
    cell = layout.cell_lanes * len(layout.steps_of(chunk))
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for number in range(layout.cells):
            writer.write_batch(batch.slice(number * cell, cell))
            offsets.append(sink.tell())
    data = sink.getvalue().to_pybytes()
    bounds = np.array(offsets, dtype="<i8") + _OFFSET_BYTES * len(offsets) - len(schema)
    fs.write_bytes(_chunk_uri(folder, chunk), bounds.tobytes() + data[len(schema) : offsets[-1]])
    return {
        "schema": base64.b64encode(schema).decode(),
        "query_tokens": len(batch["ids"].flatten()),
        "document_tokens": len(tokens["ids"].combine_chunks().flatten()),
        "bytes": int(bounds[-1]),
    }


def _pieces(folder: str, target: str, file: int) -> Iterator[pa.Table]:
    """Yield the rows of a file that chunks need, in tables of at least _PIECE_ROWS rows (the last: fewer)."""
    tables: list[pa.Table] = []
    for table in stream(fs.join(folder, target), file):
        tables.append(table)
        if sum(map(len, tables)) >= _PIECE_ROWS:
            yield pa.concat_tables(tables).combine_chunks()
            tables = []
    if tables:
        yield pa.concat_tables(tables).combine_chunks()


def _in_place(folder: str, target: str, chunk: int) -> pa.Table:
    """Read all rows that were scattered for a chunk, sorted by their place in it."""
    rows = pa.concat_tables(list(stream(fs.join(folder, target), chunk)))
    return rows.take(np.argsort(rows["place"].to_numpy())).drop_columns(["place"])


def _chunk_uri(folder: str, chunk: int) -> str:
    return fs.join(folder, "chunks", f"{chunk:05d}")


# --- reading -----------------------------------------------------------------------------------------------


class StreamedShares:
    """Shares of a rank in the steps, from the stream of a store: its lanes of each step's chunk."""

    def __init__(self, store: str, *, rank: int, world: int) -> None:
        self._folder = fs.join(store, "stream")
        index = json.loads(fs.read_bytes(fs.join(self._folder, INDEX_FILE)))
        self._layout, self._schema = ChunkLayout(**index["layout"]), base64.b64decode(index["schema"])
        lanes = self._layout.batch // world
        self._first, self._stop = rank * lanes, (rank + 1) * lanes
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._held: dict[int, Future[tuple[RowTable, RowTable]]] = {}

    def __call__(self, step: int) -> RankShare:
        """Return this rank's rows of a step. The next chunk is read while this one is used."""
        chunk, within = divmod(step, self._layout.chunk_steps)
        wanted = [number for number in (chunk, chunk + 1) if number < self._layout.chunks]
        self._held = {
            number: self._held.get(number) or self._ahead.submit(self._read, number) for number in wanted
        }
        rows, documents = self._held[chunk].result()
        steps = len(self._layout.steps_of(chunk))
        before = self._first // self._layout.cell_lanes * self._layout.cell_lanes
        chosen = np.arange(self._first - before, self._stop - before) * steps + within
        group = len(documents) // len(rows)
        return RankShare(rows, chosen, documents, chosen[:, None] * group + np.arange(group))

    def _read(self, chunk: int) -> tuple[RowTable, RowTable]:
        """Read the cells of a chunk with this rank's lanes: rows, and tokens of their documents."""
        uri, lanes = _chunk_uri(self._folder, chunk), self._layout.cell_lanes
        first, stop = self._first // lanes, -(-self._stop // lanes)
        bound_bytes = fs.read_range(uri, first * _OFFSET_BYTES, (stop - first + 1) * _OFFSET_BYTES)
        bounds = np.frombuffer(bound_bytes, dtype="<i8")
        data = fs.read_range(uri, int(bounds[0]), int(bounds[-1] - bounds[0]))
        table = pa.ipc.open_stream(self._schema + data).read_all().combine_chunks()
        tokens = {name: table[f"document_{name}"].combine_chunks().flatten() for name in ("ids", "positions")}
        return RowTable([table.drop_columns([f"document_{name}" for name in tokens])]), RowTable(
            [one_chunk(tokens)]
        )


def read_pool(store: str) -> RowTable:
    """Read the documents of the validation sample, in the order of `pool` of :func:`write_stream`."""
    return RowTable([read_table(fs.join(store, "stream", POOL_FILE)).combine_chunks()])
