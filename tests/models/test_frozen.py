"""Formats of weights: of products, and of frozen ones in 8 and 4 bits: packed, trained on and merged."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import families
from scalingnote.core.errors import ConfigError
from scalingnote.models import dual_encoder, weights
from scalingnote.models.batch import Batch, collate
from scalingnote.models.config import Lora, TowerConfig
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.weights import FrozenLinear, compute_dtype
from scalingnote.train.config import Optimizer, Ranks, Schedule, TrainConfig
from scalingnote.train.engine import Engine
from scalingnote.train.strategies import build

CPU = torch.device("cpu")
BYTES = {"int8": 1.0, "nf4": 0.5}  # of a weight
ERROR = {"int8": 0.01, "nf4": 0.12}  # of a normal matrix, relative to its norm


def layer(base: str, *, wide: int = 128, out: int = 48) -> tuple[nn.Linear, FrozenLinear]:
    torch.manual_seed(0)
    whole = nn.Linear(wide, out).requires_grad_(False)
    whole.weight.data = torch.randn(out, wide)
    return whole, FrozenLinear(whole, base)


@pytest.mark.parametrize("base", BYTES)
def test_a_packed_weight_is_close_and_small(base: str):
    whole, packed = layer(base)
    found = packed.unpack()
    assert (found.weight - whole.weight).norm() < ERROR[base] * whole.weight.norm()
    assert torch.equal(found.bias, whole.bias)
    assert packed.weight.nbytes == BYTES[base] * whole.weight.numel()
    assert packed.scales.nbytes == 2 * whole.weight.numel() / (128 if base == "int8" else weights.NF4_BLOCK)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BYTES)
def test_products_and_gradients_are_those_of_the_unpacked_weight(base: str, precision: torch.dtype):
    _, packed = layer(base)
    inputs = torch.randn(2, 5, 128, requires_grad=True)
    found = {}
    for name, module in (("packed", packed), ("unpacked", packed.unpack().requires_grad_(False))):
        inputs.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != torch.float32):
            product = module(inputs)
        assert product.dtype == precision
        product.float().square().sum().backward()
        found[name] = product, inputs.grad
    for one, other in zip(found["packed"], found["unpacked"], strict=True):
        assert (one - other).norm() <= (1e-5 if precision == torch.float32 else 0.02) * other.norm()


def test_a_saved_graph_holds_no_unpacked_weight():
    _, packed = layer("int8")
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        packed(torch.randn(3, 128, requires_grad=True))
    assert {tensor.dtype for tensor in kept} == {torch.int8, torch.bfloat16}


def test_a_width_that_has_no_blocks_and_a_missing_package_are_said(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="multiples of 64, found 96: choose int8"):
        layer("nf4", wide=96)
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs bitsandbytes"):
        layer("nf4")
    with pytest.raises(ValidationError, match="choose base=full"):
        Lora(dora=True, base="int8")
    tower = TowerConfig(lora=Lora(base="nf4"))
    with pytest.raises(ValidationError, match="leave it true"):
        TrainConfig(query=tower, document=tower, merge_adapters=False)


# --- towers ----------------------------------------------------------------------------------------------


def folder(tmp_path: Path) -> Path:
    """A Qwen2 whose widths have blocks."""
    return families.folder(tmp_path / "base", "qwen2", sizes={"hidden_size": 64, "intermediate_size": 128})


def towers(path: Path, base: str) -> DualEncoder:
    lora = Lora(rank=4, base=base)
    configs = {role: families.tower_config(path, role=role, lora=lora) for role in ("query", "document")}
    return dual_encoder.build(**configs, dim=16, tokenizers={}, seed=0, share_base=True)


class Match(nn.Module):
    """In-batch softmax of a few queries and documents."""

    def __init__(self, made: DualEncoder) -> None:
        super().__init__()
        self.towers = made

    def forward(self, rows: dict[str, Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        queries, documents = self.towers(rows["query"], rows["document"])
        scores = queries @ documents.mean(1).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores))), {}


def rows(made: DualEncoder) -> dict[str, Batch]:
    titles = list(families.DOCUMENTS[0])
    pad = made.query.pad
    return {
        "query": collate(made.query.prompt.rows(titles), pad=pad),
        "document": collate(made.document.prompt.rows(*families.DOCUMENTS), pad=pad),
    }


def engine(made: DualEncoder) -> Engine:
    schedule = Schedule(
        optimizer=Optimizer(peak_lr=1e-2), global_batch=4, precision="float32", resources=Ranks(workers=0)
    )
    return build(Match(made), schedule=schedule, device=torch.device("cpu"))


@pytest.mark.parametrize("base", BYTES)
def test_adapters_learn_on_packed_weights_and_are_merged_into_them(base: str, tmp_path: Path):
    made = towers(folder(tmp_path), base)
    layers = [
        [module for module in tower.backbone.modules() if isinstance(module, FrozenLinear)]
        for tower in (made.query, made.document)
    ]
    assert len(layers[0]) == 14
    assert [id(layer.weight) for layer in layers[0]] == [id(layer.weight) for layer in layers[1]]
    before = [(layer.weight.clone(), layer.scales.clone()) for layer in layers[0]]
    training, batch = engine(made), rows(made)
    losses = []
    for _ in range(30):
        loss, _ = training(batch)
        training.backward(loss)
        training.step(1e-2)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    for layer, (weight, scales) in zip(layers[0], before, strict=True):
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.scales, scales)
    assert all("lora_" in name or "rows" in name or "projection" in name for name in training.weights())
    assert not any("base_layer" in name for name in training.state())
    made.eval().save(tmp_path / "saved")
    again = DualEncoder.load(tmp_path / "saved")
    for name, part in batch.items():
        torch.testing.assert_close(again.encode(name, part), made.encode(name, part), atol=1e-4, rtol=1e-4)


# --- precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tiles", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_what_the_hardware_is_made_for(monkeypatch, tiles: bool, expected: torch.dtype):
    monkeypatch.setattr(weights, "_is_cpu_faster_in_bfloat16", lambda: tiles)
    monkeypatch.delenv("SCALINGNOTE_PRECISION")
    assert compute_dtype("auto", CPU) == expected
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "auto")
    assert compute_dtype("auto", CPU) == expected


def test_the_environment_decides_for_auto_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr(weights, "_is_cpu_faster_in_bfloat16", lambda: True)
    assert compute_dtype("auto", CPU) == torch.float32  # as all tests want it
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "bfloat16")
    assert (compute_dtype("auto", CPU), compute_dtype("float32", CPU)) == (torch.bfloat16, torch.float32)
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "half")
    with pytest.raises(ConfigError, match="SCALINGNOTE_PRECISION is 'half'"):
        compute_dtype("auto", CPU)
