import inspect
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from scalingnote.core.config import load
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig
from scalingnote.run.stages import CROSS_ENCODE, CROSS_TEACHER, RUN_STAGES, Stage

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = CONFIGS / "quickstart/python_docs.yaml"
METHODS = [
    f"{file.stem}{variant}"
    for file in sorted(CONFIGS.glob("methods/*.yaml"))
    for variant in ("", *(f":{name}" for name in yaml.safe_load(file.read_text()).get("variants", {})))
]


def method(name: str, *overrides: str) -> list[Stage]:
    file, colon, variant = name.partition(":")
    return stages.of(load(RunConfig, [CONFIG, CONFIGS / f"methods/{file}.yaml{colon}{variant}"], overrides))


def parameters(stage: Stage) -> Mapping[str, inspect.Parameter]:
    """The parameters of a stage's job."""
    return inspect.signature(stage.function()).parameters


@pytest.mark.parametrize("stage", [*RUN_STAGES, CROSS_TEACHER, CROSS_ENCODE], ids=lambda stage: stage.job)
def test_a_job_takes_what_its_stage_reads(stage: Stage):
    required = {name for name, found in parameters(stage).items() if found.default is not None}
    assert required == {"config", *stage.reads, "output"}


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_reads_what_it_builds(name: str, rounds: int):
    try:
        wanted = method(name, f"rounds={rounds}")
    except ConfigError:
        assert rounds > 1  # not of what takes stage I's place
        return
    for number, stage in enumerate(wanted):
        before = wanted[:number]
        assert {*stage.reads} <= {found.builds for found in before}
        assert {*stage.reads} <= {*parameters(stage)}
        assert {builder for _, builder in stage.earlier} <= {found.name for found in before}


def test_a_student_reads_documents_only_where_a_loss_does():
    names = [stage.name for stage in method("scalingnote")]
    assert names[3:] == ["train", "teacher", "distill", "encode", "quantize", "index", "evaluate"]
    found = {stage.name: stage for stage in method("embeddistill:matching")}
    assert list(found)[3:] == ["train", "teacher", "encode", "distill", "quantize", "index", "evaluate"]
    assert found["distill"].reads == ("query_embeddings", "triplets", "embeddings")
    assert not found["evaluate"].earlier


def test_a_symmetric_student_embeds_the_documents_again():
    found = {stage.name: stage for stage in method("embeddistill:scores")}
    assert list(found)[5:8] == ["encode", "distill", "encode_student"]
    assert found["distill"].reads == ("query_embeddings", "triplets", "embeddings", "dataset")
    assert found["encode_student"].reads == ("dataset", "student")
    assert found["evaluate"].earlier == (("teacher_embeddings", "encode"),)


def test_a_cross_encoder_takes_stage_ones_place():
    found = {stage.name: stage for stage in method("embeddistill:ce-matching")}
    names = ["cross_encoder", "teacher", "encode", "distill", "quantize", "index", "evaluate"]
    assert list(found)[3:] == names
    assert all(stage.job.startswith("train.cross_encoder.job:") for stage in list(found.values())[3:6])
    assert found["evaluate"].reads == ("dataset", "embeddings", "index", "student")
    with pytest.raises(ConfigError, match="set distill"):
        load(RunConfig, [CONFIG], ["distill=null", "cross_encoder={}"])


def test_a_token_wise_tower_is_no_teacher():
    lightretriever = [CONFIG, CONFIGS / "methods/lightretriever.yaml"]
    assert load(RunConfig, lightretriever).distill is None
    with pytest.raises(ConfigError, match="cannot teach: set distill to null"):
        load(RunConfig, lightretriever, ["distill.epochs=1"])


def test_a_second_round_trains_on_what_the_first_one_mined():
    one, two = (load(RunConfig, [CONFIG], [f"rounds={rounds}"]) for rounds in (1, 2))
    names = [stage.name for stage in stages.of(two)]
    assert names[:7] == ["prepare", "planner", "collect", "train@1", "encode@1", "mine@1", "train"]
    assert names[6:] == [stage.name for stage in stages.of(one)][3:]


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


def test_a_run_that_fails_leaves_what_is_served_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Until everything is there that is served; measuring it may fail."""
    first, second = (load(RunConfig, [CONFIG], [f"run_dir={tmp_path}", f"train.epochs={n}"]) for n in (1, 2))
    pipeline.run(first, [])
    *before, last = stages.of(second)

    def place(_: RunConfig, stage: stages.Stage, __: object) -> None:
        raise DataError(stage.name)

    monkeypatch.setattr(pipeline, "_place", place)
    with pytest.raises(DataError, match=before[0].name):
        pipeline.run(second, before)
    assert pipeline.load_run(str(tmp_path)) == first
    with pytest.raises(DataError, match="evaluate"):
        pipeline.run(second, [last])
    assert pipeline.load_run(str(tmp_path)) == second


def test_fusion_stands_between_quantize_and_index():
    with_student, without = (
        load(RunConfig, [CONFIG], ["fuse={}", more]) for more in ("rounds=1", "distill=null")
    )
    assert "fuse" not in [stage.name for stage in stages.of(load(RunConfig, [CONFIG]))]
    for config, tower in ((with_student, "student"), (without, "dual_encoder")):
        found = {stage.name: stage for stage in stages.of(config)}
        assert list(found)[-4:] == ["quantize", "fuse", "index", "evaluate"]
        assert found["fuse"].reads == ("dataset", "planner", "embeddings", "semantic_ids", tower)
        assert found["fuse"].builds == "embeddings"
    # The dual encoder was trained with the plain embeddings; who is served is measured in the final ones.
    evaluate = [stages.of(config)[-1].earlier for config in (with_student, without)]
    assert evaluate == [(("teacher_embeddings", "encode"),), ()]
