from pathlib import Path

import pyarrow as pa
import pytest

import scalingnote
from scalingnote.cli import main as cli
from scalingnote.core.config import load
from scalingnote.core.errors import ConfigError
from scalingnote.plan.config import Assumptions
from scalingnote.plan.training_cost import Estimate, dry_run_text, estimate
from scalingnote.run.config import RunConfig
from scalingnote.train.config import TrainConfig

CONFIGS = Path(scalingnote.__file__).parents[1] / "configs"
PAPER = CONFIGS / "paper/scalingnote.yaml"


def paper(*overrides: str, **assumed: object) -> Estimate:
    config = load(RunConfig, [PAPER], [f"train.{override}" for override in overrides])
    return estimate(config.train, Assumptions(**assumed))


def test_the_published_run_fits_the_cluster_of_its_config():
    published = paper(rows=106_045_200)
    assert (published.config.ranks, published.assumed.gpu, published.fits) == (32, "H100", True)
    assert published.parameters == 2 * 7_070_619_136 + 2 * 3584 * 128
    assert published.steps == 106_045_200 // 480
    # Six operations per weight and token, and additional ones for attention.
    six = 6 * 6_525_621_760 * published.step_tokens
    assert six < published.work.model < 1.05 * six


@pytest.mark.parametrize("path", sorted(PAPER.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_published_run_is_estimated(path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["run", str(path), "--dry-run", "--rows", "1000000"]) == 0
    assert "nothing is started" in capsys.readouterr().out


def test_grad_cache_makes_activations_independent_of_the_batch():
    cache = "memory.grad_cache={query_rows: 8, document_rows: 4}"
    small, large = (paper(cache, f"global_batch={batch}") for batch in (480, 4800))
    assert small.activations == large.activations
    assert paper("global_batch=4800").activations == pytest.approx(10 * paper().activations)


def test_two_adapters_share_one_frozen_base():
    lora = ("query.lora.rank=16", "document.lora.rank=16")
    shared = paper(*lora)
    assert sum(tower.trained for tower in shared.towers) == shared.parameters - 7_070_619_136


def test_rows_of_unknown_length_cost_as_much_as_the_longest():
    known, unknown = paper(query_tokens=20, document_tokens=300), paper()
    assert known.step_tokens == 480 * 20 + 960 * 300
    assert unknown.step_tokens == 480 * 64 + 960 * 512
    assert known.activations == unknown.activations  # a batch may have only the longest rows
    some = dry_run_text(paper(document_tokens=300))
    assert "at the longest rows where no mean is given (--query-tokens)" in some


def test_a_dry_run_prints_all_assumptions(capsys):
    command = ["run", str(PAPER), "--dry-run", "--rows", "1000000", "--gpu", "A100", "--gpus", "16"]
    assert cli.main([*command, "--document-tokens", "300", "--query-tokens", "20"]) == 0
    text = capsys.readouterr().out
    for word in ("16 x A100", "fsdp2", "gradient checkpointing", "fits", "GPU hours", "MFU", "312 TFLOP/s"):
        assert word in text
    assert "at the mean lengths given" in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_before_rows_are_collected_only_a_step_is_estimated(tmp_path: Path, capsys):
    path = CONFIGS / "quickstart/python_docs.yaml"
    assert cli.main(["run", str(path), "--dry-run", "--set", f"run_dir={tmp_path}"]) == 0
    assert "give --rows N" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("strategy.kind=ddp", "strategy.kind=fsdp2"),
        ("strategy={kind: fsdp2, reshard: false}", "train.strategy.reshard=true"),
        ("memory.gradient_checkpointing=false", "train.memory.gradient_checkpointing=true"),
        ("global_batch=48000", "grad_cache"),
    ],
)
def test_a_run_that_does_not_fit_gets_a_remedy(override: str, remedy: str):
    estimated = paper(override, gpu="L40S")
    assert not estimated.fits
    assert "DOES NOT FIT" in dry_run_text(estimated)
    assert remedy in dry_run_text(estimated)


def test_an_unknown_backbone_is_refused():
    with pytest.raises(ConfigError, match="hf download"):
        paper("query.backbone.path=no/where")


def test_scratch_towers_in_float32_are_estimated():
    estimated = estimate(TrainConfig(precision="float32"), Assumptions())
    assert estimated.fits
    assert estimated.numbers == "float32"


def test_collected_rows_are_counted(monkeypatch, capsys):
    class Triplets:
        def table(self, name: str, columns: list[str]) -> pa.Table:
            assert (name, columns) == ("triplets", ["split"])
            return pa.table({"split": ["train"] * 1280 + ["validation"] * 7})

    monkeypatch.setattr("scalingnote.run.pipeline.locate", lambda config, kind: Triplets())
    path = str(CONFIGS / "quickstart/python_docs.yaml")
    assert cli.main(["run", path, "--dry-run", "--set", "train.epochs=4"]) == 0
    assert "1,280, 4" in capsys.readouterr().out
