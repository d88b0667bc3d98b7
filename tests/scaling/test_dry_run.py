import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import scalingnote
from scalingnote import cli
from scalingnote.config import load
from scalingnote.errors import ConfigError
from scalingnote.run_config import RunConfig
from scalingnote.scaling.config import Assumptions
from scalingnote.scaling.output import dry_run_text
from scalingnote.scaling.training_cost import Estimate, estimate
from scalingnote.train.config import TrainConfig

CONFIGS = Path(scalingnote.__file__).parents[1] / "configs"
PAPER = CONFIGS / "paper/scalingnote.yaml"


def paper(*overrides: str, **assumed: object) -> Estimate:
    config = load(RunConfig, [PAPER], [f"train.{override}" for override in overrides])
    return estimate(config.train, Assumptions(**assumed))


def test_the_published_run_fits_the_cluster_its_config_names():
    found = paper(rows=106_045_200)
    assert (found.config.ranks, found.gpu.memory // 2**30, found.fits) == (32, 79, True)
    assert found.parameters == 2 * 7_070_619_136 + 2 * 3584 * 128
    assert found.steps == 106_045_200 // 480
    # Six operations per weight and token, and some for attention.
    six = 6 * 6_525_621_760 * found.step_tokens
    assert six < found.work.model < 1.05 * six


@pytest.mark.parametrize("path", sorted(PAPER.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_published_run_is_estimated(path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["train", str(path), "--dry-run", "--rows", "1000000"]) == 0
    assert "nothing is started" in capsys.readouterr().out


def test_less_is_kept_and_more_is_sharded_in_the_order_of_the_strategies():
    kinds = ["kind: ddp", *(f"kind: deepspeed, stage: {stage}" for stage in (1, 2, 3))]
    kept = [paper(f"strategy={{{kind}}}").state for kind in kinds]
    sizes = [state.total - state.gathered for state in kept]
    assert sizes == sorted(sizes, reverse=True)


def test_grad_cache_makes_activations_independent_of_the_batch():
    cache = "memory.grad_cache={query_rows: 8, document_rows: 4}"
    small, large = (paper(cache, f"global_batch={batch}") for batch in (480, 4800))
    assert small.activations == large.activations
    assert paper("global_batch=4800").activations == pytest.approx(10 * paper().activations)
    assert large.exchanged == pytest.approx(10 * small.exchanged, rel=0.2)  # every chunk gathers the weights


def test_two_adapters_share_one_frozen_base():
    lora = ("query.lora.rank=16", "document.lora.rank=16")
    shared, apart = paper(*lora), paper(*lora, "share_base=false")
    base = 7_070_619_136
    assert apart.parameters - shared.parameters == base
    assert shared.trained == apart.trained == shared.parameters - base


def test_padded_rows_cost_what_the_longest_do():
    packed = paper(query_tokens=20, document_tokens=300)
    padded = paper("memory.packing=false", query_tokens=20, document_tokens=300)
    assert packed.step_tokens == 480 * 20 + 960 * 300
    assert padded.step_tokens == 480 * 64 + 960 * 512
    assert packed.activations == padded.activations  # a batch of the longest rows may come


def test_lengths_are_told_as_they_were_counted():
    some = dry_run_text(paper(document_tokens=300))
    assert "as if all queries were as long as the longest (--query-tokens)" in some
    padded = dry_run_text(paper("memory.packing=false", document_tokens=300))
    assert "without packing all are padded to them" in padded
    assert "--query-tokens" not in padded


def test_everything_is_named(capsys):
    command = ["train", str(PAPER), "--dry-run", "--rows", "1000000", "--gpu", "A100", "--gpus", "16"]
    assert cli.main([*command, "--document-tokens", "300", "--query-tokens", "20"]) == 0
    told = capsys.readouterr().out
    for word in ("16 x A100", "fsdp2", "gradient checkpointing", "fits", "GPU hours", "MFU", "312 TFLOP/s"):
        assert word in told
    assert "at the mean lengths given" in told
    assert not any(line.endswith(" ") for line in told.splitlines())


def test_before_rows_are_collected_a_step_is_all_that_is_told(tmp_path: Path, capsys):
    path = CONFIGS / "quickstart/python_docs.yaml"
    assert cli.main(["train", str(path), "--dry-run", "--set", f"run_dir={tmp_path}"]) == 0
    assert "give --rows N" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "knob"),
    [
        ("strategy.kind=ddp", "strategy.kind=fsdp2"),
        ("memory.gradient_checkpointing=false", "train.memory.gradient_checkpointing=true"),
        ("global_batch=48000", "grad_cache"),
    ],
)
def test_what_does_not_fit_comes_with_a_remedy(override: str, knob: str):
    found = paper(override)
    assert not found.fits
    assert "DOES NOT FIT" in dry_run_text(found)
    assert knob in dry_run_text(found)
    whole = paper("strategy={kind: fsdp2, reshard: false}", gpu="L40S")
    assert "train.strategy.reshard=true" in dry_run_text(whole)


def test_knobs_of_the_dry_run_mean_nothing_without_it(capsys):
    assert cli.main(["train", str(PAPER), "--gpus", "16"]) == 2
    assert "add --dry-run" in capsys.readouterr().err
    assert cli.main(["train", str(PAPER), "--dry-run", "--gpu", "B1"]) == 2
    assert "'A100'" in capsys.readouterr().err


def test_a_backbone_nobody_knows_offline_is_refused():
    with pytest.raises(ConfigError, match="hf download"):
        paper("query.backbone.path=no/where")


def test_scratch_towers_in_float32_are_sized_too():
    found = estimate(TrainConfig(precision="float32"), Assumptions())
    assert found.fits
    assert found.numbers == "float32"


def test_a_dry_run_loads_neither_torch_nor_ray():
    program = (
        "import sys, scalingnote.scaling.capacity\nprint({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_rows_that_were_collected_are_counted(monkeypatch, capsys):
    class Triplets:
        def table(self, name: str, columns: list[str]) -> pa.Table:
            assert (name, columns) == ("triplets", ["split"])
            return pa.table({"split": ["train"] * 1280 + ["validation"] * 7})

    monkeypatch.setattr("scalingnote.pipeline.locate", lambda config, kind: Triplets())
    assert (
        cli.main(
            ["train", str(CONFIGS / "quickstart/python_docs.yaml"), "--dry-run", "--set", "train.epochs=4"]
        )
        == 0
    )
    assert "1,280, 4" in capsys.readouterr().out
