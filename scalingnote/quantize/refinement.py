"""Codebooks of a sample that exceeds one worker: K-means on a part of it, then Lloyd passes over all.

The sample lies in files. Level by level, one task places the first centroids by faiss on as much as a worker
holds; in every pass each file is a task that returns sums of its vectors, and the driver adds them up in the
order of the files; after the last pass each file is replaced by its residuals. Every finished pass is
recorded: after a kill, the next run continues with the next pass.

The sample is drawn systematically: the rows of all parts form one line, with marks at equal distances from a
random start. The marks determine how many rows a part gives, a draw within the part determines which. Every
row is equally likely, and the driver keeps one number per part.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.log import get_logger
from scalingnote.quantize import kmeans
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.storage import filesystem as fs
from scalingnote.storage.arrow import to_arrow, to_numpy
from scalingnote.storage.artifact import write_table
from scalingnote.storage.shuffle import TaskRunner, run_slices

log = get_logger("quantize")


def shares(rows: Sequence[int], *, size: int, seed: int) -> list[int]:
    """Number of rows that each part contributes to a sample.

    Args:
        rows: number of rows of every part.
        size: of the sample; all rows where there are fewer.
        seed: of the marks; the same arguments give the same shares.
    """
    total = sum(rows)
    if size >= total:
        return list(rows)
    # Integers, because floats cannot tell apart the rows of a corpus of billions.
    start = int(np.random.default_rng(seed).integers(total))
    marks = [(size * end + start) // total for end in accumulate(rows, initial=0)]
    return [after - before for before, after in pairwise(marks)]


def draw(rows: int, *, take: int, seed: int, part: int) -> Int[ndarray, " chosen"]:
    """Draw `take` of the `rows` rows of a part without replacement; ascending row numbers."""
    if take >= rows:
        return np.arange(rows)
    # Part + 1, because numpy treats (seed, 0) like seed, whose numbers place the marks.
    return np.sort(np.random.default_rng((seed, part + 1)).choice(rows, take, replace=False))


def fit(
    config: QuantizeConfig, rows: Sequence[int], *, folder: str, each: TaskRunner
) -> Float[ndarray, "levels codes dim"]:
    """Fit codebooks to the vectors that :func:`store` wrote.

    Args:
        config: of the stage.
        rows: number of vectors in each file.
        folder: of the files, and of the records of finished passes.
        each: maps a function over items, in order; a call holds one file, or `config.documents_per_worker`
            vectors.
    """
    codebooks = []
    for level in range(config.levels):
        centroids = _level(config, level, rows, folder=folder, each=each)
        codebooks.append(centroids)
        if level + 1 < config.levels:
            subtract = partial(_store_residuals, folder=folder, level=level, centroids=centroids)
            run_slices(f"level-{level + 1}", subtract, rows, folder=folder, each=each, room="quantize")
        fs.delete(_vectors(folder, level))
    return np.stack(codebooks)


def store(vectors: Float[ndarray, "docs dim"], *, folder: str, file: int, level: int = 0) -> int:
    """Write a file of the sample, or of its residuals before `level`; returns its rows."""
    write_table(_vectors(folder, level, file), pa.table({"vector": to_arrow(vectors)}))
    return len(vectors)


def _level(
    config: QuantizeConfig, level: int, rows: Sequence[int], *, folder: str, each: TaskRunner
) -> Float[ndarray, "codes dim"]:
    """Centroids of a level, continued from the last recorded pass."""
    passes = fs.join(folder, "passes", f"{level:02d}")
    names = [name for name in fs.list_files(passes) if name.endswith(".safetensors")]  # not unfinished files
    done = [safetensors.load(fs.read_bytes(fs.join(passes, name))) for name in names]
    if not done:
        first = partial(_initial_centroids, config=config, folder=folder, rows=list(rows))
        done = [{"centroids": next(iter(each(first, [level]))), "energy": np.array([np.inf])}]
        _record(done, passes)
    while len(done) <= config.refinements and not _converged(done, config.tolerance):
        before = done[-1]["centroids"]
        assign = partial(_assign, folder=folder, level=level, centroids=before)
        moments = sum(each(assign, range(len(rows))), start=kmeans.zero_moments(before))
        done.append(
            {"centroids": kmeans.move_centroids(moments, before), "energy": np.array([moments.energy])}
        )
        _record(done, passes)
        log.info(
            "level %d, pass %d: residual energy %.5f, %d codes without a document",
            level,
            len(done) - 1,
            moments.energy / sum(rows),
            (moments.counts == 0).sum(),
        )
    centroids: ndarray = done[-1]["centroids"]
    return centroids


def _converged(done: Sequence[dict[str, ndarray]], tolerance: float) -> bool:
    """Whether the last pass lowered the energy by no more than the tolerance."""
    if len(done) < 3:
        return False
    before, after = (float(found["energy"][0]) for found in done[-2:])
    return before - after <= tolerance * before


def _record(done: Sequence[dict[str, ndarray]], passes: str) -> None:
    fs.write_bytes(fs.join(passes, f"{len(done) - 1:05d}.safetensors"), safetensors.save(done[-1]))


def _initial_centroids(
    level: int, *, config: QuantizeConfig, folder: str, rows: list[int]
) -> Float[ndarray, "codes dim"]:
    """K-means on as many vectors as a worker holds, drawn evenly from all files."""
    take = shares(rows, size=config.documents_per_worker, seed=config.seed)
    pieces = [
        _read(folder, level, file)[draw(count, take=taken, seed=config.seed, part=file)]
        for file, (count, taken) in enumerate(zip(rows, take, strict=True))
        if taken
    ]
    return kmeans.cluster(
        np.concatenate(pieces), codes=config.codes, iterations=config.iterations, seed=config.seed + level
    )


def _assign(
    file: int, *, folder: str, level: int, centroids: Float[ndarray, "codes dim"]
) -> kmeans.ClusterMoments:
    return kmeans.cluster_moments(_read(folder, level, file), centroids)


def _store_residuals(
    item: tuple[int, int], *, folder: str, level: int, centroids: Float[ndarray, "codes dim"]
) -> int:
    residuals = kmeans.subtract(_read(folder, level, item[0]), centroids[None])
    return store(residuals, folder=folder, file=item[0], level=level + 1)


def _read(folder: str, level: int, file: int) -> Float[ndarray, "docs dim"]:
    """Vectors of a file, mapped into memory where it is local."""
    with pa.ipc.open_file(fs.open_input(_vectors(folder, level, file))) as reader:
        return to_numpy(reader.read_all()["vector"])


def _vectors(folder: str, level: int, file: int | None = None) -> str:
    place = fs.join(folder, "vectors", f"{level:02d}")
    return place if file is None else fs.join(place, f"{file:05d}.arrow")
