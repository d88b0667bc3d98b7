"""The time of a shuffle per row: ours through files, and Ray Data's hash shuffle.

    python -m benchmarks.shuffle --json docs/results/shuffle.json

Both read the same 16 Parquet files, bring rows of one key together and write a Parquet file for each of 16
buckets, on a cluster of this machine with workers that run already. A shuffle has a fixed cost, so that the
ratio at one size says little: what one more row costs is the slope of the straight line through the medians
of all sizes. Memory is the largest sum over workers of what they do not share, which excludes object stores.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from benchmarks.report import arguments, show, write
from scalingnote import cluster
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import write_table

FILES = BUCKETS = 16
WORDS = 12  # of a row's text, about 90 bytes
ROWS_PER_KEY = 4
SAMPLE_S = 0.05  # between two looks at the memory


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3, help="of each size; default: %(default)s")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shuffle-"))
    ways: dict[str, Callable[[Path, Path], None]] = {"ours": ours, "Ray Data": ray_datas}
    cluster.connect()
    rows: list[dict[str, Any]] = []
    try:
        for count in options.rows:
            make(folder / str(count), count)
        for way in ways.values():  # what starts workers is not measured
            measured(way, folder / str(options.rows[0]), folder / "out")
        for count in options.rows:
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for _, (name, way) in product(range(options.rounds), ways.items()):
                found[name].append(measured(way, folder / str(count), folder / "out"))
                checked(folder / "out", count)
            for name, figures in found.items():
                seconds, memory = (median(column) for column in zip(*figures, strict=True))
                rows.append({"shuffle": name, "rows": count, "seconds": seconds, "workers GB": memory})
    finally:
        ray.shutdown()
        shutil.rmtree(folder)
    show("Shuffles into 16 buckets", rows)
    slopes = {name: slope([row for row in rows if row["shuffle"] == name]) for name in ways}
    largest = {row["shuffle"]: row["workers GB"] for row in rows[-len(ways) :]}
    metrics = {
        "shuffle_us_per_row": round(slopes["ours"], 3),
        "ray_data_us_per_row": round(slopes["Ray Data"], 3),
        "shuffle_over_ray_data": round(slopes["ours"] / slopes["Ray Data"], 3),
        "shuffle_memory_over_ray_data": round(largest["ours"] / largest["Ray Data"], 3),
    }
    show("Metrics", [metrics])
    write(options.json, metrics=metrics, table=rows)


def make(folder: Path, rows: int) -> None:
    """Write the input: keys of about ROWS_PER_KEY rows, in random order."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = np.array([f"word{i:03d}" for i in range(512)], dtype=object)
    for number, own in enumerate(np.array_split(np.arange(rows), FILES)):
        drawn = words[rng.integers(len(words), size=(len(own), WORDS))]
        texts = pa.array([" ".join(row) for row in drawn.tolist()])
        keys = pa.array([f"k{i:08d}" for i in rng.integers(rows // ROWS_PER_KEY, size=len(own))])
        pq.write_table(pa.table({"key": keys, "text": texts}), folder / f"{number:03d}.parquet")


def ours(source: Path, target: Path) -> None:
    """Tasks scatter the files, then tasks gather the buckets, as every stage with a shuffle does."""
    files = sorted(str(path) for path in source.iterdir())
    scattered = str(target / "scattered")
    run = partial(shuffle.run_slices, folder=str(target), each=cluster.map_tasks, section="shuffle")
    run("scatter", partial(_scatter, target=scattered), files)
    run("gather", partial(_gather, scattered=scattered, target=str(target)), range(BUCKETS))
    shutil.rmtree(scattered)
    shutil.rmtree(target / "done")


def _scatter(item: tuple[int, str], *, target: str) -> int:
    number, file = item
    table = pq.read_table(file)
    shuffle.scatter(table, shuffle.bucket_of(table["key"], BUCKETS), target=target, name=f"{number:05d}")
    return len(table)


def _gather(item: tuple[int, int], *, scattered: str, target: str) -> int:
    _, bucket = item
    table = pa.concat_tables(shuffle.stream(scattered, bucket))
    write_table(f"{target}/{bucket:03d}.parquet", table)
    return len(table)


def ray_datas(source: Path, target: Path) -> None:
    """The same as three calls."""
    dataset: Any = ray.data.read_parquet(str(source), override_num_blocks=FILES)
    dataset.repartition(BUCKETS, keys=["key"]).write_parquet(str(target))


def measured(way: Callable[[Path, Path], None], source: Path, target: Path) -> tuple[float, float]:
    """Seconds, and GB of workers."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    peak, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(SAMPLE_S):
            used = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.name().startswith("ray::"):
                        memory = process.memory_info()
                        used += memory.rss - memory.shared
                except psutil.NoSuchProcess:
                    continue
            peak[0] = max(peak[0], used)

    sampler = threading.Thread(target=look, daemon=True)
    sampler.start()
    start = time.perf_counter()
    way(source, target)
    seconds = time.perf_counter() - start
    ended.set()
    sampler.join()
    return round(seconds, 3), round(peak[0] / 2**30, 3)


def checked(target: Path, rows: int) -> None:
    """AssertionError unless every row is there and no key is in two files."""
    files = [pq.read_table(path, columns=["key"])["key"] for path in target.glob("*.parquet")]
    assert sum(map(len, files)) == rows, f"{sum(map(len, files))} of {rows} rows"
    assert sum(len(keys.unique()) for keys in files) == len(pa.chunked_array(files).unique())


def slope(rows: list[dict[str, Any]]) -> float:
    """Microseconds that one more row takes."""
    counts, seconds = [row["rows"] for row in rows], [row["seconds"] for row in rows]
    return float(np.polyfit(counts, seconds, 1)[0]) * 1e6


if __name__ == "__main__":
    main()
