"""Point reads of documents by row number: Arrow files mapped into memory, Parquet, LMDB, Lance.

    python -m benchmarks.document_store --json docs/results/document_store.json

The texts that an index shows (title, topic, snippet, semantic ID) in each format; bytes per document, and the
time of reading the documents of one answer, warm and cold. Cold: the store is opened anew and its files are
dropped from the page cache before the answer is read. *ours* is what an index has: columns, mapped for random
reads; *read_ahead* the same file mapped as usual, *packed* a file of whole rows. LMDB and Lance are no
dependencies: what is not installed (pip install lmdb pylance) is left out.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import arguments, show, write
from scalingnote.storage.arrow import StoredRows, map_rows
from scalingnote.storage.artifact import write_table

Read = Callable[[int], dict[str, Any]]
WORDS = 4000  # of which texts are drawn
ROWS_PER_GROUP = 1024  # of Parquet: a point read decompresses a row group


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000, help="default: %(default)s")
    parser.add_argument("--answers", type=int, default=200, help="read warm, and cold; default: %(default)s")
    parser.add_argument("--k", type=int, default=10, help="documents of an answer, default: %(default)s")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    table = documents(options.documents, rng)
    asked = rng.integers(0, len(table), (options.answers, options.k)).tolist()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (save, load) in formats().items():
            path = Path(folder) / name
            start = time.process_time()
            save(path, table)
            written = time.process_time() - start
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            for file in files:
                flush(file)
            check(load(path), table, asked[0])
            warm, cold = read_warm(load, path, asked), read_cold(load, path, asked, files)
            rows.append(
                {
                    "format": name,
                    "bytes per document": sum(file.stat().st_size for file in files) / len(table),
                    "write documents/s": len(table) / written,
                    "warm p50 us": np.percentile(warm, 50),
                    "warm p99 us": np.percentile(warm, 99),
                    "cold p50 us": np.percentile(cold, 50),
                    "cold p99 us": np.percentile(cold, 99),
                }
            )
    show(f"answers of {options.k} of {len(table):,} documents", rows)
    ours = rows[0]
    metrics = {"document_bytes_per_document": round(ours["bytes per document"], 1)}
    for row in rows[1:]:
        for when in ("warm", "cold"):
            ratio = row[f"{when} p50 us"] / ours[f"{when} p50 us"]
            metrics[f"document_{when}_{row['format']}_over_ours"] = round(ratio, 2)
    write(options.json, metrics=metrics, table=rows)


def documents(count: int, rng: np.random.Generator) -> pa.Table:
    """Synthetic documents as a shard stores them."""
    words = np.array(["".join(letters) for letters in rng.choice([*"aeioulnrst"], (WORDS, 6))])
    drawn = words[(WORDS * rng.random((count, 40)) ** 2).astype(int)]
    return pa.table(
        {
            "doc_id": [f"document-{number:09d}" for number in range(count)],
            "title": [" ".join(row[:6]) for row in drawn],
            "topic": drawn[:, 0].tolist(),
            "snippet": [" ".join(row[6:]) for row in drawn],
            "semantic_id": [f"{a}-{b}-{c}" for a, b, c in rng.integers(0, 256, (count, 3)).tolist()],
        }
    )


def formats() -> dict[str, tuple[Callable[[Path, pa.Table], None], Callable[[Path], Read]]]:
    """Name -> how it is written, and how it is opened for reads by row number."""
    found: dict[str, tuple[Callable[[Path, pa.Table], None], Callable[[Path], Read]]] = {
        "ours": (save_arrow, lambda path: StoredRows(map_rows(path)).__getitem__),
        "read_ahead": (save_arrow, lambda path: StoredRows(mapped(path)).__getitem__),
        "packed": (save_packed, load_packed),
        "parquet": (save_parquet, load_parquet),
    }
    if find_spec("lmdb"):
        found["lmdb"] = save_lmdb, load_lmdb
    if find_spec("lance"):
        found["lance"] = save_lance, load_lance
    return found


def save_arrow(path: Path, table: pa.Table) -> None:
    """As an index has them: columns, not compressed."""
    write_table(f"{path}.arrow", table)
    Path(f"{path}.arrow").rename(path)


def mapped(path: Path) -> pa.Table:
    """An Arrow file, of which the kernel reads 32 pages for each that is missing."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def save_packed(path: Path, table: pa.Table) -> None:
    """Rows one after the other, so that a cold read touches one or two pages instead of one per column."""
    lines = [json.dumps(row).encode() for row in table.to_pylist()]
    save_arrow(path, pa.table({"row": pa.array(lines, pa.large_binary())}))


def load_packed(path: Path) -> Read:
    rows = mapped(path)["row"].chunk(0)
    return lambda row: json.loads(rows[row].as_py())


def save_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, compression="zstd", row_group_size=ROWS_PER_GROUP)


def load_parquet(path: Path) -> Read:
    file = pq.ParquetFile(path)

    def read(row: int) -> dict[str, Any]:
        group, inside = divmod(row, ROWS_PER_GROUP)
        found: dict[str, Any] = file.read_row_group(group).slice(inside, 1).to_pylist()[0]
        return found

    return read


def save_lmdb(path: Path, table: pa.Table) -> None:
    import lmdb

    environment = lmdb.open(str(path), map_size=1 << 40)
    with environment.begin(write=True) as transaction:
        for number, row in enumerate(table.to_pylist()):
            transaction.put(number.to_bytes(8, "big"), json.dumps(row).encode(), append=True)
    environment.close()


def load_lmdb(path: Path) -> Read:
    import lmdb

    environment = lmdb.open(str(path), readonly=True, lock=False)

    def read(row: int) -> dict[str, Any]:
        with environment.begin(buffers=True) as transaction:
            found: dict[str, Any] = json.loads(bytes(transaction.get(row.to_bytes(8, "big"))))
        return found

    read.close = environment.close  # type: ignore[attr-defined]
    return read


def save_lance(path: Path, table: pa.Table) -> None:
    import lance

    lance.write_dataset(table, str(path))


def load_lance(path: Path) -> Read:
    import lance

    dataset = lance.dataset(str(path))
    return lambda row: dataset.take([row]).to_pylist()[0]


def read_warm(load: Callable[[Path], Read], path: Path, asked: Sequence[Sequence[int]]) -> list[float]:
    """Microseconds per answer, the second time that it is read."""
    read = load(path)
    for rows in asked:
        timed(read, rows)
    found = [timed(read, rows) for rows in asked]
    close(read)
    return found


def read_cold(
    load: Callable[[Path], Read], path: Path, asked: Sequence[Sequence[int]], files: Sequence[Path]
) -> list[float]:
    """Microseconds per answer by an open store whose pages are not in memory."""
    found = []
    for rows in asked:
        read = load(path)
        for file in files:
            drop(file)
        found.append(timed(read, rows))
        close(read)
    return found


def timed(read: Read, rows: Sequence[int]) -> float:
    """Microseconds by the clock: a cold read waits for the disk."""
    start = time.perf_counter()
    for row in rows:
        read(row)
    return (time.perf_counter() - start) * 1e6


def close(read: Read) -> None:
    """LMDB refuses to open what this process has open."""
    getattr(read, "close", lambda: None)()


def check(read: Read, table: pa.Table, rows: Sequence[int]) -> None:
    """Every format gives the same documents."""
    assert [read(row) for row in rows] == table.take(rows).to_pylist()
    close(read)


def flush(file: Path) -> None:
    """Write a file's pages to the disk: only clean pages can be dropped."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def drop(file: Path) -> None:
    """Drop a file from the page cache."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
