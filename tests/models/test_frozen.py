"""Formats of weights: precision of products, and frozen weights in 8 and 4 bits in training and merging."""

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
    linear = nn.Linear(wide, out).requires_grad_(False)
    linear.weight.data = torch.randn(out, wide)
    return linear, FrozenLinear(linear, base)


@pytest.mark.parametrize("base", BYTES)
def test_a_packed_weight_is_close_and_small(base: str):
    linear, packed = layer(base)
    unpacked = packed.unpack()
    assert (unpacked.weight - linear.weight).norm() < ERROR[base] * linear.weight.norm()
    assert torch.equal(unpacked.bias, linear.bias)
    assert packed.weight.nbytes == BYTES[base] * linear.weight.numel()
    assert packed.scales.nbytes == 2 * linear.weight.numel() / (128 if base == "int8" else weights.NF4_BLOCK)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", BYTES)
def test_products_and_gradients_equal_the_unpacked_weights(base: str, precision: torch.dtype):
    _, packed = layer(base)
    inputs = torch.randn(2, 5, 128, requires_grad=True)
    results = {}
    for name, module in (("packed", packed), ("unpacked", packed.unpack().requires_grad_(False))):
        inputs.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != torch.float32):
            product = module(inputs)
        assert product.dtype == precision
        product.float().square().sum().backward()
        results[name] = product, inputs.grad
    for actual, expected in zip(results["packed"], results["unpacked"], strict=True):
        assert (actual - expected).norm() <= (1e-5 if precision == torch.float32 else 0.02) * expected.norm()


def test_a_saved_graph_holds_no_unpacked_weight():
    _, packed = layer("int8")
    tensors: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        packed(torch.randn(3, 128, requires_grad=True))
    assert {tensor.dtype for tensor in tensors} == {torch.int8, torch.bfloat16}


def test_unsupported_storage_settings_are_refused(monkeypatch: pytest.MonkeyPatch):
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
    """Save a Qwen2 whose widths are multiples of the block size."""
    return families.folder(tmp_path / "base", "qwen2", sizes={"hidden_size": 64, "intermediate_size": 128})


def towers(path: Path, base: str) -> DualEncoder:
    lora = Lora(rank=4, base=base)
    configs = {role: families.tower_config(path, role=role, lora=lora) for role in ("query", "document")}
    return dual_encoder.build(**configs, dim=16, tokenizers={}, seed=0)


class Match(nn.Module):
    """In-batch softmax of a few queries and documents."""

    def __init__(self, encoder: DualEncoder) -> None:
        super().__init__()
        self.towers = encoder

    def forward(self, rows: dict[str, Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        queries, documents = self.towers(rows["query"], rows["document"])
        scores = queries @ documents.mean(1).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores))), {}


def rows(encoder: DualEncoder) -> dict[str, Batch]:
    titles = list(families.DOCUMENTS[0])
    pad = encoder.query.pad
    return {
        "query": collate(encoder.query.prompt.rows(titles), pad=pad),
        "document": collate(encoder.document.prompt.rows(*families.DOCUMENTS), pad=pad),
    }


def engine(encoder: DualEncoder) -> Engine:
    schedule = Schedule(
        optimizer=Optimizer(peak_lr=1e-2), global_batch=4, precision="float32", resources=Ranks(workers=0)
    )
    return build(Match(encoder), schedule=schedule, device=torch.device("cpu"))


@pytest.mark.parametrize("base", BYTES)
def test_adapters_on_packed_weights_train_and_merge(base: str, tmp_path: Path):
    encoder = towers(folder(tmp_path), base)
    layers = [
        [module for module in tower.backbone.modules() if isinstance(module, FrozenLinear)]
        for tower in (encoder.query, encoder.document)
    ]
    assert len(layers[0]) == 14
    assert [id(layer.weight) for layer in layers[0]] == [id(layer.weight) for layer in layers[1]]
    before = [(layer.weight.clone(), layer.scales.clone()) for layer in layers[0]]
    training, batch = engine(encoder), rows(encoder)
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
    encoder.eval().save(tmp_path / "saved")
    loaded_encoder = DualEncoder.load(tmp_path / "saved")
    for name, part in batch.items():
        torch.testing.assert_close(
            loaded_encoder.encode(name, part), encoder.encode(name, part), atol=1e-4, rtol=1e-4
        )


# --- precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tiles", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_chooses_the_faster_precision(monkeypatch, tiles: bool, expected: torch.dtype):
    monkeypatch.setattr(weights, "_is_cpu_faster_in_bfloat16", lambda: tiles)
    monkeypatch.delenv("SCALINGNOTE_PRECISION")
    assert compute_dtype("auto", CPU) == expected
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "auto")
    assert compute_dtype("auto", CPU) == expected


def test_the_environment_variable_replaces_only_auto(monkeypatch):
    monkeypatch.setattr(weights, "_is_cpu_faster_in_bfloat16", lambda: True)
    assert compute_dtype("auto", CPU) == torch.float32  # the setting of all tests
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "bfloat16")
    assert (compute_dtype("auto", CPU), compute_dtype("float32", CPU)) == (torch.bfloat16, torch.float32)
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "half")
    with pytest.raises(ConfigError, match="SCALINGNOTE_PRECISION is 'half'"):
        compute_dtype("auto", CPU)
