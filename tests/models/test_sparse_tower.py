"""A document tower with a sparse head: which states it reads, which head it has, and what it saves."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, DistilBertConfig, LlamaForCausalLM

import families
import tiny
from scalingnote.encode.encoder import Encoder
from scalingnote.models import dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import Lora, Pretrained, TowerConfig
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.prompt import TokenRow
from scalingnote.models.tower import Tower

PROMPT = "Title: {title} [TITLE_QUERY] of {topic}: {content} end [EMB]"


@pytest.fixture(scope="module", params=["llama", "bert"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.folder(tmp_path_factory.mktemp(request.param), request.param)


def build(path: Path, **more) -> Tower:
    config = TowerConfig(backbone=Pretrained(path=str(path)), max_length=40, prompt=PROMPT, **more)
    return dual_encoder.build_tower(
        config, role="document", dim=16, tokenizer_json=None, seed=0, sparse=True
    ).eval()


def expected(tower: Tower, row: TokenRow, logits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Compute the terms of one row; `logits` maps the states of title, topic and content."""
    ids = torch.tensor([row.ids])
    hidden = tower.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    spans = row.positions[len(tower.views) :]
    inside = [at for start, stop in zip(spans[::2], spans[1::2], strict=True) for at in range(start, stop)]
    return torch.log1p(torch.relu(logits(hidden[inside]))).amax(0)


@pytest.mark.parametrize("packed", [False, True])
def test_terms_come_only_from_title_topic_and_content(checkpoint: Path, packed: bool):
    tower = build(checkpoint)
    rows = tower.prompt.rows(*families.DOCUMENTS)
    embeddings, terms = tower.read(collate(rows, pad=tower.pad, packed=packed))
    torch.testing.assert_close(embeddings, tower(collate(rows, pad=tower.pad)), atol=1e-5, rtol=1e-5)
    for row, actual in zip(rows, terms, strict=True):
        of_one_row = expected(tower, row, lambda states: states @ tower.input_table.T)
        torch.testing.assert_close(actual, of_one_row, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_keeps_its_head(tmp_path: Path):
    folder = families.folder(tmp_path / "base", "llama")
    settings = families.FAMILIES["llama"](vocab_size=403, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = LlamaForCausalLM(settings)
    model.save_pretrained(folder)
    tower = build(folder)
    torch.testing.assert_close(tower.sparse.own.weight.detach(), model.lm_head.weight.detach())
    rows = tower.prompt.rows(*families.DOCUMENTS)
    batch = collate(rows, pad=tower.pad, packed=True)
    _, terms = tower.read(batch)
    torch.testing.assert_close(terms[0], expected(tower, rows[0], model.lm_head), atol=1e-5, rtol=1e-5)
    tower.save(tmp_path / "saved")
    torch.testing.assert_close(load_tower(tmp_path / "saved").read(batch)[1], terms)
    assert not build(folder, lora=Lora(rank=2)).sparse.own.weight.requires_grad


MASKED = ["bert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert", "distilbert"]


def masked_model(folder: Path, family: str, **more) -> Any:
    """Save a masked language model with random weights and its tokenizer, and return the model."""
    tokenizer = families.tokenizer()
    size = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family == "distilbert":
        settings = DistilBertConfig(dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, **size, **more)
    else:
        settings = families.FAMILIES[family](**size, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForMaskedLM.from_config(settings).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms start as 0 and 1, which would hide missing ones
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def own_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Compute the logits of states by the model's own head."""
    for name in ("cls", "lm_head"):
        if hasattr(model, name):
            return getattr(model, name)(hidden)
    if hasattr(model, "vocab_transform"):
        inner = model.vocab_layer_norm(model.activation(model.vocab_transform(hidden)))
        return model.vocab_projector(inner)
    if hasattr(model, "generator_predictions"):
        return model.generator_lm_head(model.generator_predictions(hidden))
    return model.decoder(model.head(hidden))


@pytest.mark.parametrize("family", MASKED)
def test_a_masked_language_model_uses_its_complete_head(tmp_path: Path, family: str):
    model = masked_model(tmp_path / "base", family)
    tower = build(tmp_path / "base")
    rows = tower.prompt.rows(*families.DOCUMENTS)
    batch = collate(rows, pad=tower.pad, packed=True)
    with torch.inference_mode():
        _, terms = tower.read(batch)
        for row, actual in zip(rows, terms, strict=True):
            of_one_row = expected(tower, row, functools.partial(own_logits, model))
            torch.testing.assert_close(actual[: len(of_one_row)], of_one_row, atol=1e-4, rtol=1e-4)
    tower.save(tmp_path / "saved")
    torch.testing.assert_close(load_tower(tmp_path / "saved").read(batch)[1], terms)


def test_a_masked_head_is_trained_unless_there_is_an_adapter(tmp_path: Path):
    masked_model(tmp_path / "base", "bert", hidden_act="relu")
    tower = build(tmp_path / "base").train()
    assert tower.sparse.facts == {"activation": "relu", "eps": 1e-12}
    batch = collate(tower.prompt.rows(*families.DOCUMENTS), pad=tower.pad)
    tower.read(batch)[1].sum().backward()
    head = dict(tower.sparse.named_parameters())
    assert set(head) == {
        "bias",
        *(f"transform.{m}.{p}" for m in ("dense", "norm") for p in ("weight", "bias")),
    }
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.values())
    adapted = build(tmp_path / "base", lora=Lora(rank=2))
    assert not any(parameter.requires_grad for parameter in adapted.sparse.parameters())


def test_gamma_and_beta_are_names_of_a_norms_parameters(tmp_path: Path):
    masked_model(tmp_path / "base", "bert")
    path, norm = tmp_path / "base/model.safetensors", "cls.predictions.transform.LayerNorm"
    weights = load_file(path)
    original = build(tmp_path / "base").sparse.state_dict()
    weights[f"{norm}.gamma"], weights[f"{norm}.beta"] = (
        weights.pop(f"{norm}.{p}") for p in ("weight", "bias")
    )
    save_file(weights, path, metadata={"format": "pt"})
    renamed = build(tmp_path / "base").sparse.state_dict()
    assert original.keys() == renamed.keys()
    assert all(original[name].equal(renamed[name]) for name in original)


def test_a_saved_tower_encodes_its_strongest_terms(tmp_path: Path):
    tower = families.scratch_tower(tiny.CAUSAL, "document", sparse=True)
    tower.save(tmp_path)
    encoder = Encoder.load(tmp_path, token_budget=100, precision="float32")
    documents = tiny.document_rows(7)
    encoding = encoder.encode_with_cost(encoder.document_rows(pa.Table.from_pylist(documents)), top_k=5)
    assert len(encoding.embeddings) == 7
    terms, impacts = (column.to_pylist() for column in encoding.terms.columns())
    columns = ([row[name] for row in documents] for name in ("title", "topic", "content"))
    with torch.inference_mode():
        _, weights = tower.eval().read(collate(tower.prompt.rows(*columns), pad=tower.pad))
    for row, indices, values in zip(weights, terms, impacts, strict=True):
        best = row.topk(5)
        assert indices == sorted(best.indices.tolist())
        torch.testing.assert_close(torch.tensor(values), row[indices], atol=1e-3, rtol=1e-3)
