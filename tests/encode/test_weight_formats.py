"""Weights are read, cast and moved in the precision of the computation; buffers stay float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from transformers import AutoModel, Gemma3TextConfig

import families
import published
import tiny
from scalingnote.encode.encoder import Encoder
from scalingnote.models import backbone, dual_encoder, published_model
from scalingnote.models.config import Lora
from scalingnote.models.published_tower import LibraryTower
from scalingnote.models.weights import cast_parameters
from scalingnote.train.cross_encoder.pairs import PairEncoder

LOW = torch.bfloat16
DOCUMENTS = pa.Table.from_pylist(tiny.document_rows(6))


def check_equal(found: nn.Module, expected: nn.Module) -> None:
    """Check that parameters of `found` are those of `expected` in bfloat16, and buffers equal in float32."""
    cast_parameters(expected, LOW)
    assert {p.dtype for p in found.parameters()} == {LOW}
    for (name, ours), (other, theirs) in zip(
        found.state_dict(keep_vars=True).items(), expected.state_dict(keep_vars=True).items(), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs), name
    buffers = dict(expected.named_buffers())
    for name, ours in found.named_buffers():
        assert ours.dtype == buffers[name].dtype
        assert not ours.is_floating_point() or ours.dtype == torch.float32, name
        assert torch.equal(ours, buffers[name]), name


@pytest.mark.parametrize("family", [*families.FAMILIES, "mpnet"])
def test_a_backbone_read_in_bfloat16_equals_a_cast_one(family: str, tmp_path: Path):
    path = families.folder(tmp_path / family, family)
    check_equal(backbone.load(path, dtype=LOW).model, backbone.load(path).model)


def test_a_buffer_that_bfloat16_would_round_stays_float32(tmp_path: Path):
    config = Gemma3TextConfig(**families._GROUPED, head_dim=8, vocab_size=400, pad_token_id=0)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    model = backbone.load(tmp_path, dtype=LOW).model
    assert "embed_tokens.embed_scale" in dict(model.named_buffers())  # transformers would round it
    check_equal(model, backbone.load(tmp_path).model)


def test_an_adapter_is_merged_before_its_base_is_cast(tmp_path: Path):
    base = families.folder(tmp_path / "base", "qwen2")
    config = families.tower_config(base, role="document", lora=Lora(rank=2))
    tower = dual_encoder.build_tower(config, role="document", dim=16, tokenizer_json=None, seed=0)
    with torch.no_grad():
        for name, weight in tower.backbone.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    tower.save(tmp_path / "saved", merge_adapters=False)
    assert (tmp_path / "saved" / "adapter_config.json").exists()
    check_equal(backbone.load(tmp_path / "saved", dtype=LOW).model, backbone.load(tmp_path / "saved").model)


def make_tower(kind: str, path: Path) -> Path:
    """Save a document tower of a kind; return its folder."""
    if kind == "library":
        source = published.folder(path / "source")
        tower: Any = LibraryTower(published_model.read(source, "document"), role="document", max_length=64)
    else:
        changes = {"pooling": "auto"} if kind == "published" else {}
        changes |= {"reads": "tokens"} if kind == "tokens" else {}
        source = (
            published.folder(path / "source")
            if kind == "published"
            else families.folder(path / "source", "qwen2")
        )
        config = families.tower_config(source, role="document").model_copy(update=changes)
        tower = dual_encoder.build_tower(
            config, role="document", dim=32, tokenizer_json=None, seed=0, sparse=kind == "sparse"
        )
    tower.save(path / "tower")
    return path / "tower"


@pytest.fixture
def moved_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[set[torch.dtype]]:
    """Record the dtypes of a tower's backbone when it is moved to a device."""
    dtypes: list[set[torch.dtype]] = []
    move = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if (inner := getattr(module, "backbone", None)) is not None:
            dtypes.append({p.dtype for p in inner.parameters()})
        return move(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", to)
    return dtypes


@pytest.fixture
def read_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Record the dtypes in which weights are read from files."""
    dtypes: list[torch.dtype] = []
    load = AutoModel.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        dtypes.append(kwargs.get("dtype", torch.float32))
        return load(*args, **kwargs)

    monkeypatch.setattr(AutoModel, "from_pretrained", from_pretrained)
    return dtypes


@pytest.mark.parametrize("kind", ["own", "sparse", "tokens", "published", "library"])
def test_an_encoder_reads_and_moves_no_wider_weights(
    kind: str, tmp_path: Path, moved_dtypes: list[set[torch.dtype]], read_dtypes: list[torch.dtype]
):
    folder = make_tower(kind, tmp_path)
    read_dtypes.clear()
    moved_dtypes.clear()
    encoder = Encoder.load(folder, precision="bfloat16")
    assert set(read_dtypes) == {LOW}
    assert moved_dtypes == [{LOW}]
    expected = Encoder(
        dual_encoder.load_tower(folder), precision="bfloat16"
    )  # read as float32, cast on the host
    assert moved_dtypes == [{LOW}] * 2
    buffers = dict(expected.tower.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in encoder.tower.named_buffers())
    for name, embeddings in expected.encode_documents(DOCUMENTS).items():
        np.testing.assert_array_equal(encoder.encode_documents(DOCUMENTS)[name], embeddings)


def test_a_cross_encoder_reads_and_moves_no_wider_weights(
    tmp_path: Path, moved_dtypes: list[set[torch.dtype]], read_dtypes: list[torch.dtype]
):
    folder = tiny.cross_encoder(str(tmp_path / "made")).directory("model")
    read_dtypes.clear()
    moved_dtypes.clear()
    encoder = PairEncoder.load(folder, precision="bfloat16")
    assert set(read_dtypes) == {LOW}
    assert moved_dtypes == [{LOW}]
    expected = PairEncoder(type(encoder.model).load(folder), precision="bfloat16")
    rows = encoder.model.query_prompt.rows(["ba ko", "li"])
    nothing = [None] * len(rows)
    np.testing.assert_array_equal(encoder.queries(rows, nothing), expected.queries(rows, nothing))
