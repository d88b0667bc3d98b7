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
    """Return the parameters of the job of a stage."""
    return inspect.signature(stage.function()).parameters


@pytest.mark.parametrize("stage", [*RUN_STAGES, CROSS_TEACHER, CROSS_ENCODE], ids=lambda stage: stage.job)
def test_a_job_takes_the_inputs_of_its_stage(stage: Stage):
    required = {name for name, parameter in parameters(stage).items() if parameter.default is not None}
    assert required == {"config", *stage.reads, "output"}


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_every_stage_of_a_method_reads_built_artifacts(name: str, rounds: int):
    try:
        order = method(name, f"rounds={rounds}")
    except ConfigError:
        assert rounds > 1  # methods that replace stage I have one round
        return
    for number, stage in enumerate(order):
        before = order[:number]
        assert {*stage.reads} <= {earlier.builds for earlier in before}
        assert {*stage.reads} <= {*parameters(stage)}
        assert {builder for _, builder in stage.earlier} <= {earlier.name for earlier in before}


def test_a_student_reads_documents_only_if_a_loss_does():
    names = [stage.name for stage in method("scalingnote")]
    assert names[3:] == ["train", "teacher", "distill", "encode", "quantize", "index", "evaluate"]
    by_name = {stage.name: stage for stage in method("embeddistill:matching")}
    assert list(by_name)[3:] == ["train", "teacher", "encode", "distill", "quantize", "index", "evaluate"]
    assert by_name["distill"].reads == ("query_embeddings", "triplets", "embeddings")
    assert not by_name["evaluate"].earlier


def test_a_symmetric_student_embeds_the_documents_again():
    by_name = {stage.name: stage for stage in method("embeddistill:scores")}
    assert list(by_name)[5:8] == ["encode", "distill", "encode_student"]
    assert by_name["distill"].reads == ("query_embeddings", "triplets", "embeddings", "dataset")
    assert by_name["encode_student"].reads == ("dataset", "student")
    assert by_name["evaluate"].earlier == (("teacher_embeddings", "encode"),)


def test_a_cross_encoder_replaces_stage_one():
    by_name = {stage.name: stage for stage in method("embeddistill:ce-matching")}
    names = ["cross_encoder", "teacher", "encode", "distill", "quantize", "index", "evaluate"]
    assert list(by_name)[3:] == names
    assert all(stage.job.startswith("train.cross_encoder.job:") for stage in list(by_name.values())[3:6])
    assert by_name["evaluate"].reads == ("dataset", "embeddings", "index", "student")
    with pytest.raises(ConfigError, match="set distill"):
        load(RunConfig, [CONFIG], ["distill=null", "cross_encoder={}"])


def test_a_token_wise_tower_cannot_teach():
    lightretriever = [CONFIG, CONFIGS / "methods/lightretriever.yaml"]
    assert load(RunConfig, lightretriever).distill is None
    with pytest.raises(ConfigError, match="cannot teach: set distill to null"):
        load(RunConfig, lightretriever, ["distill.epochs=1"])


def test_a_second_round_trains_on_mined_negatives():
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


def test_a_failed_run_does_not_change_the_served_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The served run changes when its index is built, even if evaluation fails."""
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


def test_fusion_runs_between_quantize_and_index():
    with_student, without = (
        load(RunConfig, [CONFIG], ["fuse={}", more]) for more in ("rounds=1", "distill=null")
    )
    assert "fuse" not in [stage.name for stage in stages.of(load(RunConfig, [CONFIG]))]
    for config, tower in ((with_student, "student"), (without, "dual_encoder")):
        by_name = {stage.name: stage for stage in stages.of(config)}
        assert list(by_name)[-4:] == ["quantize", "fuse", "index", "evaluate"]
        assert by_name["fuse"].reads == ("dataset", "planner", "embeddings", "semantic_ids", tower)
        assert by_name["fuse"].builds == "embeddings"
    # The dual encoder was trained with plain embeddings, but the served tower is measured with final ones.
    evaluate = [stages.of(config)[-1].earlier for config in (with_student, without)]
    assert evaluate == [(("teacher_embeddings", "encode"),), ()]
