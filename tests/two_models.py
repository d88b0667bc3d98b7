"""A run of the tiny corpus with one small published model, and another model for the same documents."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from torch import nn

import published
import tiny_run
from in_process import without_ray
from scalingnote.core.config import load
from scalingnote.run import migration, pipeline, stages
from scalingnote.run.config import RunConfig

WIDTH = 24  # of the other model's embeddings; those of the first one have published.HIDDEN


def models(folder: Path) -> tuple[Path, Path]:
    """Write two models of different widths with different results."""
    first = published.folder(folder / "first", "bert", pooling="mean")
    return first, published.folder(folder / "other", "bert", pooling="cls", dense=[(WIDTH, True, nn.Tanh())])


def indexed_run(folder: Path) -> tuple[Path, Path]:
    """Build a run with an index of the first model; return its directory and the other model."""
    first, other = models(folder)
    path = tiny_run.write_config(folder)
    values = yaml.safe_load(path.read_text())
    del values["train"]
    values |= {
        "run_dir": str(folder / "run"),
        "address": "in-process",
        "adopt": {"path": str(first)},
    }
    path.write_text(yaml.safe_dump(json.loads(json.dumps(values))))
    config = load(RunConfig, [path])
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        pipeline.run(config, stages.select(config, until="index"))
    return folder / "run", other


def compare(run_dir: Path, other: Path) -> None:
    """Build the other model's index, and compare both."""
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        state = migration.begin(str(run_dir), str(other))
        migration.build(state)
        migration.compare(state)


@contextmanager
def restored(run_dir: Path, *, without: str) -> Iterator[str]:
    """Yield the run; in the end restore its settings and remove a folder of it."""
    files = {path: path.read_bytes() for path in run_dir.glob("*.yaml")}
    yield str(run_dir)
    for path, content in files.items():
        path.write_bytes(content)
    shutil.rmtree(run_dir / without, ignore_errors=True)
