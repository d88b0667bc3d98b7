"""Query association as a job runs it: slices and buckets meet through files, one task at a time or several.

Without Ray, so that what is measured is the join. Every task reads files, calls one pure step, writes files.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.report import peak_memory_mb
from benchmarks.synthetic_queries import TOPIC, term_scores
from scalingnote.collect.association import (
    ASSOCIATIONS,
    CANDIDATES,
    KINDS,
    OWN,
    candidate_keys,
    join,
    key_filter,
    mutual_pairs,
    own_keys,
    pair_keys,
)
from scalingnote.collect.config import AssociationConfig
from scalingnote.planner.planner import TermScores
from scalingnote.storage.artifact import write_table
from scalingnote.storage.shuffle import bucket_of, gather, scatter

SLICE = 250_000  # queries of a slice; there are as many buckets as slices
Counts = dict[str, int]
Task = Callable[[int, Path, int, AssociationConfig], Counts]


def write_log(folder: Path, queries: int, *, hot: float = 0.0) -> int:
    """Term scores of a synthetic log, a file per slice; returns how many."""
    slices = -(-queries // SLICE)
    for number in range(slices):
        scores, ids = term_scores(number * SLICE, min(queries, (number + 1) * SLICE), hot=hot)
        np.savez(folder / f"{number}.npz", ids=ids, **vars(scores))
    return slices


def run(
    folder: Path, slices: int, *, config: AssociationConfig, workers: int = 1, filtered: bool = True
) -> dict[str, float]:
    """All steps over a written log: seconds, peak memory of a process, megabytes moved, counts.

    ``cpu``, in all and per step, is how long processors worked, whoever else wanted the machine.
    """
    counts: Counter[str] = Counter()
    wall, cpu, peak = 0.0, dict.fromkeys(STEPS, 0.0), 0.0
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else None
    each = pool.map if pool else map
    list(each(_warm, range(workers)))  # processes start and import outside the clock
    for name, task in STEPS.items():
        tasks = slices if name != "filter" else int(filtered)
        step = partial(_measured, task, folder, slices, config)
        start = time.perf_counter()
        for counted, spent, memory in each(step, range(tasks)):
            counts.update(counted)
            cpu[name] += spent
            peak = max(peak, memory)
        wall += time.perf_counter() - start
    if pool:
        pool.shutdown()
    moved = sum(file.stat().st_size for file in folder.rglob("*/*.arrow"))
    return {
        **counts,
        **{f"{name} cpu": value for name, value in cpu.items()},
        "cpu": sum(cpu.values()),
        "seconds": wall,
        "peak_mb": peak,
        "moved_mb": moved / 2**20,
    }


def bucket_tables(folder: Path, bucket: int) -> tuple[pa.Table, pa.Table]:
    """What the join of one bucket reads: its OWN and its CANDIDATES rows."""
    own = gather(f"{folder}/own", bucket, schema=OWN)
    return own, gather(f"{folder}/candidates", bucket, schema=CANDIDATES)


def _own(number: int, folder: Path, buckets: int, config: AssociationConfig) -> Counts:
    own, counts = own_keys(*_read(folder, number), config=config)
    scatter(own, bucket_of(own["key"], buckets), target=f"{folder}/own", name=f"{number:05d}")
    return counts | {"own_keys": own.num_rows}


def _filter(_: int, folder: Path, buckets: int, config: AssociationConfig) -> Counts:
    def own() -> Iterator[pa.Table]:
        return (gather(f"{folder}/own", bucket, schema=OWN) for bucket in range(buckets))

    np.save(folder / "filter.npy", key_filter(own(), keys=sum(map(len, own()))))
    return {}


def _candidates(number: int, folder: Path, buckets: int, config: AssociationConfig) -> Counts:
    bits = folder / "filter.npy"
    owned = np.load(bits, mmap_mode="r") if bits.exists() else None
    candidates, counts = candidate_keys(*_read(folder, number), config=config, owned=owned)
    by_key = bucket_of(candidates["key"], buckets)
    scatter(candidates, by_key, target=f"{folder}/candidates", name=f"{number:05d}")
    return counts


def _join(bucket: int, folder: Path, buckets: int, config: AssociationConfig) -> Counts:
    settled, one_way, counts = join(*bucket_tables(folder, bucket), config=config)
    write_table(f"{folder}/settled-{bucket}.parquet", settled)
    by_pair = bucket_of(pa.array(pair_keys(one_way)), buckets)
    scatter(one_way, by_pair, target=f"{folder}/pairs", name=f"{bucket:05d}")
    return counts | _by_kind(settled)


def _mutual(bucket: int, folder: Path, buckets: int, config: AssociationConfig) -> Counts:
    found = mutual_pairs(gather(f"{folder}/pairs", bucket, schema=ASSOCIATIONS))
    write_table(f"{folder}/mutual-{bucket}.parquet", found)
    return _by_kind(found)


def _by_kind(pairs: pa.Table) -> Counts:
    return {name: pc.sum(pc.equal(pairs["kind"], kind)).as_py() or 0 for kind, name in KINDS.items()}


def _read(folder: Path, number: int) -> tuple[TermScores, np.ndarray]:
    with np.load(folder / f"{number}.npz") as file:
        return TermScores(file["offsets"], file["terms"], file["scores"]), file["ids"]


def _measured(
    task: Task, folder: Path, buckets: int, config: AssociationConfig, number: int
) -> tuple[Counts, float, float]:
    start = time.process_time()
    counts = task(number, folder, buckets, config)
    return counts, time.process_time() - start, peak_memory_mb()


STEPS: dict[str, Task] = {
    "own": _own,
    "filter": _filter,
    "candidates": _candidates,
    "join": _join,
    "mutual": _mutual,
}


def _warm(_: int) -> None:
    """What the first call of anything imports and allocates, on a log of one topic."""
    with TemporaryDirectory() as name:
        write_log(Path(name), TOPIC)
        for task in STEPS.values():
            task(0, Path(name), 1, AssociationConfig())
