import importlib
import inspect
from pathlib import Path

import pytest

from scalingnote import pipeline
from scalingnote.config import load
from scalingnote.errors import ArtifactError
from scalingnote.pipeline import STAGES, RunConfig, Stage

CONFIG = Path(__file__).parents[1] / "configs/quickstart/python_docs.yaml"


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_job_takes_what_its_stage_reads(stage: Stage):
    module, function = stage.job.split(":")
    parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    assert set(parameters) == {"config", *stage.reads, *stage.may_read, "output"}
    optional = {name for name, found in parameters.items() if found.default is None}
    assert optional == set(stage.may_read)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_stages_only_read_what_earlier_ones_build(rounds: int):
    built: set[str] = set()
    for stage in pipeline.stages(load(RunConfig, [CONFIG], [f"rounds={rounds}"])):
        assert {*stage.reads, *stage.may_read} <= built
        built.add(stage.builds)


def test_a_second_round_trains_on_what_the_first_one_mined():
    one, two = (load(RunConfig, [CONFIG], [f"rounds={rounds}"]) for rounds in (1, 2))
    names = [stage.name for stage in pipeline.stages(two)]
    assert names[:7] == ["prepare", "planner", "collect", "train@1", "encode@1", "mine@1", "train"]
    assert names[6:] == [stage.name for stage in pipeline.stages(one)][3:]


def test_a_missing_input_names_the_stage_that_builds_it(tmp_path: Path):
    config = load(RunConfig, [CONFIG], [f"run_dir={tmp_path}"])
    with pytest.raises(ArtifactError, match="run stage 'prepare' first"):
        pipeline.locate(config, "index")


def test_a_run_directory_can_be_moved(tmp_path: Path):
    config = load(RunConfig, [CONFIG], [f"run_dir={tmp_path / 'here'}"])
    pipeline.run(config, [])
    (tmp_path / "here").rename(tmp_path / "there")
    moved = pipeline.load_run(str(tmp_path / "there"))
    assert moved == config.model_copy(update={"run_dir": str(tmp_path / "there")})
