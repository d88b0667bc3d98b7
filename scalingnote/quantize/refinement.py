"""Codebooks of a sample that no single worker holds: K-means on a part of it, then Lloyd passes over all.

The sample lies in files. Level by level, one task places the first centroids by faiss on as much as a worker
holds; in every pass each file is a task that returns sums of its vectors, and the driver adds them up in the
files' order; after the last pass each file is replaced by what the level left over. A pass is written down
when it is done: a killed run goes on with the next one.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.log import get_logger
from scalingnote.quantize import lloyd, residual_kmeans
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.quantize.sample import draw, shares
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table
from scalingnote.storage.slices import Each, run_slices
from scalingnote.storage.vectors import to_arrow, to_numpy

log = get_logger("quantize")


def fit(
    config: QuantizeConfig, rows: Sequence[int], *, folder: str, each: Each
) -> Float[ndarray, "levels codes dim"]:
    """Codebooks of the vectors that :func:`store` left in `folder`, `rows` in each of its files.

    `each` maps in order; what it calls holds one file, or `config.documents_per_worker` vectors.
    """
    codebooks = []
    for level in range(config.levels):
        centroids = _level(config, level, rows, folder=folder, each=each)
        codebooks.append(centroids)
        if level + 1 < config.levels:
            leave = partial(_leave, folder=folder, level=level, centroids=centroids)
            run_slices(f"level-{level + 1}", leave, rows, folder=folder, each=each, room="quantize")
        fs.delete(_vectors(folder, level))
    return np.stack(codebooks)


def store(vectors: Float[ndarray, "docs dim"], *, folder: str, file: int, level: int = 0) -> int:
    """Write a file of the sample, as a level finds it; returns its rows."""
    write_table(_vectors(folder, level, file), pa.table({"vector": to_arrow(vectors)}))
    return len(vectors)


def _level(
    config: QuantizeConfig, level: int, rows: Sequence[int], *, folder: str, each: Each
) -> Float[ndarray, "codes dim"]:
    """Centroids of a level, from the last pass that was written down on."""
    passes = fs.join(folder, "passes", f"{level:02d}")
    names = [name for name in fs.list_files(passes) if name.endswith(".safetensors")]  # no pending ones
    done = [safetensors.load(fs.read_bytes(fs.join(passes, name))) for name in names]
    if not done:
        first = partial(_first, config=config, folder=folder, rows=list(rows))
        done = [{"centroids": next(iter(each(first, [level]))), "energy": np.array([np.inf])}]
        _write_down(done, passes)
    while len(done) <= config.refinements and not _settled(done, config.tolerance):
        before = done[-1]["centroids"]
        assign = partial(_assign, folder=folder, level=level, centroids=before)
        moments = sum(each(assign, range(len(rows))), start=lloyd.nothing(before))
        done.append({"centroids": lloyd.move(moments, before), "energy": np.array([moments.energy])})
        _write_down(done, passes)
        log.info(
            "level %d, pass %d: residual energy %.5f, %d codes without a document",
            level,
            len(done) - 1,
            moments.energy / sum(rows),
            (moments.counts == 0).sum(),
        )
    centroids: ndarray = done[-1]["centroids"]
    return centroids


def _settled(done: Sequence[dict[str, ndarray]], tolerance: float) -> bool:
    """Whether the last pass found little less energy than the one before it."""
    if len(done) < 3:
        return False
    before, after = (float(found["energy"][0]) for found in done[-2:])
    return before - after <= tolerance * before


def _write_down(done: Sequence[dict[str, ndarray]], passes: str) -> None:
    fs.write_bytes(fs.join(passes, f"{len(done) - 1:05d}.safetensors"), safetensors.save(done[-1]))


def _first(
    level: int, *, config: QuantizeConfig, folder: str, rows: list[int]
) -> Float[ndarray, "codes dim"]:
    """K-means on as many vectors as a worker holds, drawn evenly from all files."""
    take = shares(rows, size=config.documents_per_worker, seed=config.seed)
    pieces = [
        _read(folder, level, file)[draw(count, take=taken, seed=config.seed, part=file)]
        for file, (count, taken) in enumerate(zip(rows, take, strict=True))
        if taken
    ]
    return residual_kmeans.cluster(
        np.concatenate(pieces), codes=config.codes, iterations=config.iterations, seed=config.seed + level
    )


def _assign(file: int, *, folder: str, level: int, centroids: Float[ndarray, "codes dim"]) -> lloyd.Moments:
    return lloyd.assign(_read(folder, level, file), centroids)


def _leave(item: tuple[int, int], *, folder: str, level: int, centroids: Float[ndarray, "codes dim"]) -> int:
    left = residual_kmeans.subtract(_read(folder, level, item[0]), centroids[None])
    return store(left, folder=folder, file=item[0], level=level + 1)


def _read(folder: str, level: int, file: int) -> Float[ndarray, "docs dim"]:
    """Mapped into memory where the file is local."""
    with pa.ipc.open_file(fs.open_input(_vectors(folder, level, file))) as reader:
        return to_numpy(reader.read_all()["vector"])


def _vectors(folder: str, level: int, file: int | None = None) -> str:
    place = fs.join(folder, "vectors", f"{level:02d}")
    return place if file is None else fs.join(place, f"{file:05d}.arrow")
