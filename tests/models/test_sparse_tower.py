"""A document tower with a sparse head: which states it hears, whose head it has, and what is kept on disk."""

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


def expected(made: Tower, row: TokenRow, logits: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Terms of one row alone: `logits` are of the states of title, topic and content."""
    ids = torch.tensor([row.ids])
    hidden = made.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    spans = row.positions[len(made.views) :]
    inside = [at for start, stop in zip(spans[::2], spans[1::2], strict=True) for at in range(start, stop)]
    return torch.log1p(torch.relu(logits(hidden[inside]))).amax(0)


@pytest.mark.parametrize("packed", [False, True])
def test_terms_are_those_of_title_topic_and_content_alone(checkpoint: Path, packed: bool):
    made = build(checkpoint)
    rows = made.prompt.rows(*families.DOCUMENTS)
    embeddings, terms = made.read(collate(rows, pad=made.pad, packed=packed))
    torch.testing.assert_close(embeddings, made(collate(rows, pad=made.pad)), atol=1e-5, rtol=1e-5)
    for row, found in zip(rows, terms, strict=True):
        alone = expected(made, row, lambda states: states @ made.input_table.T)
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_keeps_the_head_it_comes_with(tmp_path: Path):
    folder = families.folder(tmp_path / "base", "llama")
    settings = families.FAMILIES["llama"](vocab_size=403, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        whole = LlamaForCausalLM(settings)
    whole.save_pretrained(folder)
    made = build(folder)
    torch.testing.assert_close(made.sparse.own.weight.detach(), whole.lm_head.weight.detach())
    rows = made.prompt.rows(*families.DOCUMENTS)
    batch = collate(rows, pad=made.pad, packed=True)
    _, terms = made.read(batch)
    torch.testing.assert_close(terms[0], expected(made, rows[0], whole.lm_head), atol=1e-5, rtol=1e-5)
    made.save(tmp_path / "saved")
    torch.testing.assert_close(load_tower(tmp_path / "saved").read(batch)[1], terms)
    assert not build(folder, lora=Lora(rank=2)).sparse.own.weight.requires_grad


MASKED = ["bert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert", "distilbert"]


def masked_model(folder: Path, family: str, **more) -> Any:
    """A masked language model of random weights, saved as one downloads it."""
    made = families.tokenizer()
    size = {"vocab_size": len(made), "pad_token_id": made.pad_token_id}
    if family == "distilbert":
        settings = DistilBertConfig(dim=32, hidden_dim=48, n_layers=2, n_heads=4, dropout=0.0, **size, **more)
    else:
        settings = families.FAMILIES[family](**size, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = AutoModelForMaskedLM.from_config(settings).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms start as 0 and 1, and would hide what is left out
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return model


def own_logits(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits of states by the head that transformers gives the model."""
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
def test_a_masked_language_model_weighs_terms_by_its_whole_head(tmp_path: Path, family: str):
    model = masked_model(tmp_path / "base", family)
    made = build(tmp_path / "base")
    rows = made.prompt.rows(*families.DOCUMENTS)
    batch = collate(rows, pad=made.pad, packed=True)
    with torch.inference_mode():
        _, terms = made.read(batch)
        for row, found in zip(rows, terms, strict=True):
            alone = expected(made, row, functools.partial(own_logits, model))
            torch.testing.assert_close(found[: len(alone)], alone, atol=1e-4, rtol=1e-4)
    made.save(tmp_path / "saved")
    torch.testing.assert_close(load_tower(tmp_path / "saved").read(batch)[1], terms)


def test_the_head_of_a_masked_language_model_learns_unless_an_adapter_does(tmp_path: Path):
    masked_model(tmp_path / "base", "bert", hidden_act="relu")
    made = build(tmp_path / "base").train()
    assert made.sparse.facts == {"activation": "relu", "eps": 1e-12}
    batch = collate(made.prompt.rows(*families.DOCUMENTS), pad=made.pad)
    made.read(batch)[1].sum().backward()
    head = dict(made.sparse.named_parameters())
    assert set(head) == {
        "bias",
        *(f"transform.{m}.{p}" for m in ("dense", "norm") for p in ("weight", "bias")),
    }
    assert all(parameter.grad.abs().sum() > 0 for parameter in head.values())
    adapted = build(tmp_path / "base", lora=Lora(rank=2))
    assert not any(parameter.requires_grad for parameter in adapted.sparse.parameters())


def test_an_old_checkpoint_calls_its_norm_gamma_and_beta(tmp_path: Path):
    masked_model(tmp_path / "base", "bert")
    path, norm = tmp_path / "base/model.safetensors", "cls.predictions.transform.LayerNorm"
    weights = load_file(path)
    named = build(tmp_path / "base").sparse.state_dict()
    weights[f"{norm}.gamma"], weights[f"{norm}.beta"] = (
        weights.pop(f"{norm}.{p}") for p in ("weight", "bias")
    )
    save_file(weights, path, metadata={"format": "pt"})
    renamed = build(tmp_path / "base").sparse.state_dict()
    assert named.keys() == renamed.keys()
    assert all(named[name].equal(renamed[name]) for name in named)


def test_a_saved_tower_encodes_its_strongest_terms(tmp_path: Path):
    made = families.scratch_tower(tiny.CAUSAL, "document", sparse=True)
    made.save(tmp_path)
    encoder = Encoder.load(tmp_path, token_budget=100, precision="float32")
    documents = tiny.document_rows(7)
    encoding = encoder.encode_with_cost(encoder.document_rows(pa.Table.from_pylist(documents)), top_k=5)
    assert len(encoding.embeddings) == 7
    terms, impacts = (column.to_pylist() for column in encoding.terms.columns())
    columns = ([row[name] for row in documents] for name in ("title", "topic", "content"))
    with torch.inference_mode():
        _, weights = made.eval().read(collate(made.prompt.rows(*columns), pad=made.pad))
    for row, found, values in zip(weights, terms, impacts, strict=True):
        best = row.topk(5)
        assert found == sorted(best.indices.tolist())
        torch.testing.assert_close(torch.tensor(values), row[found], atol=1e-3, rtol=1e-3)
