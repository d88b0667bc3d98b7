"""Reading embeddings by row number: Parquet, Arrow mapped into memory, and Lance (pip install pylance).

    python -m benchmarks.random_access --json docs/results/random_access.json

The same embeddings in each format; processor time of writing all, of reading all, and of taking rows drawn at
random. Lance is no dependency: without it the other two are measured.
"""

import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import arguments, show, write
from scalingnote.storage import arrow
from scalingnote.storage.artifact import write_table

DIM = 128


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--take", type=int, default=1000, help="rows at once, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of taking; default: %(default)s")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    matrix = arrow.l2_normalize(rng.standard_normal((options.documents, DIM), dtype=np.float32))
    ids = pa.array([f"d{i:09d}" for i in range(options.documents)])
    table = pa.table({"doc_id": ids, "summary": arrow.to_arrow(matrix, dtype="float16")})
    drawn = [np.sort(rng.choice(len(table), options.take, replace=False)) for _ in range(options.rounds)]
    expected = [table["summary"].take(pa.array(rows)) for rows in drawn]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (save, load, take) in formats().items():
            path = f"{folder}/part{name}"
            written = timed(save, path, table)
            scanned = timed(load, path)
            taken = sum(timed(take, path, chosen) for chosen in drawn) / len(drawn)
            for chosen, right in zip(drawn, expected, strict=True):
                assert pa.chunked_array(take(path, chosen)).equals(right), f"{name} takes other rows"
            files = [f for f in [Path(path), *Path(path).rglob("*")] if f.is_file()]
            rows.append(
                {
                    "format": name.lstrip("."),
                    "write rows/s": len(table) / written,
                    "read rows/s": len(table) / scanned,
                    f"take {options.take} ms": taken * 1000,
                    "MB": sum(f.stat().st_size for f in files) / 1e6,
                }
            )
    show(f"{len(table):,} embeddings of {DIM} x float16", rows)
    taking = {row["format"]: row[f"take {options.take} ms"] for row in rows}
    metrics = {f"take_{name}_over_arrow": round(ms / taking["arrow"], 2) for name, ms in taking.items()}
    write(options.json, metrics=metrics, table=rows)


def formats() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]]:
    """Suffix -> how it is written, read whole, and read by row numbers (ascending)."""
    found: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
        ".parquet": (write_table, pq.read_table, take_parquet),
        ".arrow": (write_table, lambda path: mapped(path)["summary"].to_numpy(), take_arrow),
    }
    if find_spec("lance"):
        import lance

        found[".lance"] = (
            lambda path, table: lance.write_dataset(table, path),
            lambda path: lance.dataset(path).to_table(),
            lambda path, rows: lance.dataset(path).take(rows.tolist(), columns=["summary"])["summary"].chunks,
        )
    return found


def take_parquet(path: str, rows: Any) -> list[pa.Array]:
    """The row groups that hold them are read whole."""
    file = pq.ParquetFile(path)
    group = rows // file.metadata.row_group(0).num_rows
    chunks = []
    for number in np.unique(group).tolist():
        within = rows[group == number] - number * file.metadata.row_group(0).num_rows
        found = file.read_row_group(number, columns=["summary"])["summary"]
        chunks += found.take(pa.array(within)).chunks
    return chunks


def take_arrow(path: str, rows: Any) -> list[pa.Array]:
    """Only the pages that hold them are touched."""
    values = mapped(path)["summary"].chunk(0).flatten().to_numpy().reshape(-1, DIM)
    return [arrow.to_arrow(values[rows], dtype="float16")]


def mapped(path: str) -> pa.Table:
    """An Arrow file, read by no one yet."""
    return pa.ipc.open_file(pa.memory_map(path)).read_all()


def timed(work: Callable[..., Any], *args: Any) -> float:
    """Processor seconds."""
    start = time.process_time()
    work(*args)
    return time.process_time() - start


if __name__ == "__main__":
    main()
