"""A run of the tiny corpus with one small published model, and another model for the same documents."""

import json
from pathlib import Path

import pytest
import yaml
from torch import nn

import published
import tiny_run
from in_process import without_ray
from scalingnote.core.config import load
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig

WIDTH = 24  # of the other model's embeddings; the first one's have published.HIDDEN


def models(folder: Path) -> tuple[Path, Path]:
    """Two models of different widths that answer differently."""
    first = published.folder(folder / "first", "bert", pooling="mean")
    return first, published.folder(folder / "other", "bert", pooling="cls", dense=[(WIDTH, True, nn.Tanh())])


def indexed_run(folder: Path) -> tuple[Path, Path]:
    """The directory of a run with an index of the first model, and the other model."""
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
