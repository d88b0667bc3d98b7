"""Tokens in blocks have the vectors of single tokens; the table has the embeddings of the model."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import families
import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import Batch, collate
from scalingnote.models.config import Lora, Pretrained, TokenWiseConfig, TowerConfig
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.lookup_table import Table
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.token_wise import BLOCKS, TokenWise, block_mask
from scalingnote.train import tokens

QUERIES = ["torch stack", "a", "arrays along a new axis, arrays", "words of a title " * 3]
INSTRUCTION = "go: "  # short, so that it fits the windows of some families together with two more tokens
TIGHT = {"atol": 2e-6, "rtol": 1e-5}


@pytest.fixture(scope="module", params=families.CAUSAL)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.folder(tmp_path_factory.mktemp(request.param), request.param)


def build(path: Path, **settings) -> TokenWise:
    config = TokenWiseConfig(backbone=Pretrained(path=str(path)), max_length=16, **settings)
    return dual_encoder.build_query_tower(config, dim=16, tokenizer_json=None, seed=0).eval()


def from_scratch(backbone: Any = tiny.CAUSAL, **knobs: Any) -> TokenWise:
    config = TokenWiseConfig(backbone=backbone, **knobs)
    return dual_encoder.build_query_tower(config, dim=8, tokenizer_json=families.LEARNT, seed=0).eval()


@pytest.fixture(scope="module")
def scratch() -> TokenWise:
    return from_scratch(max_length=16, storage="float32")


def single_token(tower: TokenWise, token: int) -> torch.Tensor:
    """Read one token after the instruction by the plain model, without our mask and positions."""
    ids = torch.tensor([[*tower.instruction().tolist(), token, tower.end]])
    return tower.projection(tower.backbone(input_ids=ids).last_hidden_state[0, -1])


def batch_of(tower: TokenWise, queries: list[str], *, packed: bool) -> Batch:
    return collate(tower.prompt.rows(queries), pad=tower.pad, packed=packed)


def test_a_token_in_a_block_equals_a_single_token(checkpoint: Path):
    tower = build(checkpoint, instruction=INSTRUCTION)
    ids = torch.arange(60, 60 + BLOCKS + 5)  # more than one line
    vectors = tower.token_vectors(ids, tower.instruction())
    for token, vector in zip(ids.tolist(), vectors, strict=True):
        torch.testing.assert_close(vector, single_token(tower, token), **TIGHT)


@pytest.mark.parametrize("packed", [False, True])
def test_a_query_is_the_mean_of_all_its_tokens(checkpoint: Path, packed: bool):
    tower = build(checkpoint, instruction=INSTRUCTION)
    actual = tower(batch_of(tower, QUERIES, packed=packed))
    assert actual.shape == (len(QUERIES), 1, 16)
    for row, embedding in zip(tower.prompt.rows(QUERIES), actual[:, 0], strict=True):
        expected = torch.stack([single_token(tower, token) for token in row.ids]).mean(0)
        torch.testing.assert_close(embedding, expected, **TIGHT)


def test_a_token_can_be_its_row_of_the_input_table(checkpoint: Path):
    tower = build(checkpoint, instruction=INSTRUCTION, reads="embeddings")
    actual = tower(batch_of(tower, QUERIES, packed=True))
    table = tower.backbone.get_input_embeddings()  # in gemma, it scales its output
    for row, embedding in zip(tower.prompt.rows(QUERIES), actual[:, 0], strict=True):
        expected = tower.projection(table(torch.tensor(row.ids)).mean(0))
        torch.testing.assert_close(embedding, expected, **TIGHT)


def test_gradients_equal_those_of_single_tokens(checkpoint: Path):
    tower = build(checkpoint, instruction=INSTRUCTION)
    results = []
    for work in (
        lambda: tower(batch_of(tower, QUERIES, packed=True))[:, 0],
        lambda: torch.stack(
            [
                torch.stack([single_token(tower, t) for t in row.ids]).mean(0)
                for row in tower.prompt.rows(QUERIES)
            ]
        ),
    ):
        tower.zero_grad()
        (work() * torch.linspace(-1, 1, 64).view(4, 16)).sum().backward()
        results.append({name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_the_contextual_query_is_one_text(checkpoint: Path, packed: bool):
    tower = build(checkpoint, instruction=INSTRUCTION)
    actual = tower.contextual(batch_of(tower, QUERIES, packed=packed))
    for row, embedding in zip(tower.prompt.rows(QUERIES), actual[:, 0], strict=True):
        ids = torch.tensor([[*tower.instruction().tolist(), *row.ids, tower.end]])
        expected = tower.projection(tower.backbone(input_ids=ids).last_hidden_state[0, -1])
        torch.testing.assert_close(embedding, expected, **TIGHT)


def test_a_half_precision_weight_does_not_round_embeddings(scratch: TokenWise):
    tower = copy.deepcopy(scratch)
    tower.projection.bfloat16()
    ids = torch.tensor([[*tower.instruction().tolist(), 70, tower.end]])
    state = tower.backbone(input_ids=ids).last_hidden_state[0, -1]
    expected = tower.projection.weight.double() @ state.double()
    (actual,) = tower.token_vectors(torch.tensor([70]), tower.instruction())
    torch.testing.assert_close(actual, expected.float(), **TIGHT)


@given(st.integers(0, 5), st.integers(1, 6))
def test_the_block_mask_is_that_of_the_paper(instruction: int, blocks: int):
    mask = block_mask(instruction, blocks)
    assert mask.shape == (instruction + 2 * blocks,) * 2
    for q in range(len(mask)):
        for k in range(len(mask)):
            in_prompt = q < instruction and k <= q
            to_prompt = q >= instruction and k < instruction
            within = q >= instruction and (q - instruction) // 2 == (k - instruction) // 2 and k <= q
            assert mask[q, k] == (in_prompt or to_prompt or within)
    assert mask.any(1).all()  # every row attends to a token, so there are no NaNs


def test_the_saved_table_equals_the_model(scratch: TokenWise, tmp_path: Path):
    scratch.save(tmp_path)
    table = dual_encoder.load_query_tower(tmp_path)
    expected = scratch(batch_of(scratch, QUERIES, packed=True))
    assert table.prompt.rows(QUERIES) == scratch.prompt.rows(QUERIES)
    torch.testing.assert_close(table(batch_of(table, QUERIES, packed=True)), expected, **TIGHT)


def test_computing_a_table_logs_progress(scratch: TokenWise, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(get_logger("train"), "info", lambda text, *values: lines.append(text % values))
    rows = scratch.table(scratch.config.instruction)
    assert lines[-1].startswith(f"{len(rows):,} tokens of the table in")


def test_each_further_task_has_a_table_of_its_instruction(tmp_path: Path):
    tasks = {"SciFact": "Given a claim: ", "NFCorpus": "of medicine "}
    tower = from_scratch(max_length=16, storage="float32", tasks=tasks)
    tower.save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "tasks").iterdir()) == ["NFCorpus", "SciFact"]
    tables = {"own": Table.read(tmp_path)} | {name: Table.read(tmp_path / "tasks" / name) for name in tasks}
    for name, text in {"own": tower.config.instruction, **tasks}.items():
        task_tower = from_scratch(max_length=16, storage="float32", instruction=text)
        np.testing.assert_allclose(tables[name].rows(), task_tower.table(text), atol=1e-6)
        assert tables[name].made_from == task_tower._digests(text)
    assert np.abs(tables["SciFact"].rows() - tables["NFCorpus"].rows()).max() > 1e-3


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_document_can_be_the_mean_of_its_tokens(checkpoint: Path, tmp_path: Path, lora: Lora | None):
    tower = families.tower(checkpoint, "document", reads="tokens", lora=lora).eval()
    config = tower.config
    rows = tower.prompt.rows(*families.DOCUMENTS)
    (title,) = tower.prompt.rows(["torch stack"], [""], ["joins"])
    assert title.ids == tower.prompt.tokenizer.encode("torch stack joins", add_special_tokens=False).ids
    assert max(len(row.ids) for row in rows) <= config.max_length
    with torch.inference_mode():
        actual = tower(collate(rows, pad=tower.pad, packed=True))
        torch.testing.assert_close(tower(collate(rows, pad=tower.pad)), actual, **TIGHT)
        for row, embedding in zip(rows, actual[:, 0], strict=True):
            if row.ids:
                expected = torch.stack([single_token(tower, token) for token in row.ids]).mean(0)
                torch.testing.assert_close(embedding, expected, atol=1e-5, rtol=1e-4)
            else:
                assert (embedding == 0).all()
    for merge in (True, False):
        tower.save(tmp_path / str(merge), merge_adapters=merge)
        again = load_tower(tmp_path / str(merge))
        facts = json.loads((tmp_path / str(merge) / "tower.json").read_text())
        tokens_json = (tmp_path / str(merge) / "tokenizer.json").read_text()
        assert DocumentPrompt.restore(facts, tokens_json).rows(*families.DOCUMENTS) == rows
        with torch.inference_mode():
            torch.testing.assert_close(again(collate(rows, pad=again.pad)), actual, atol=1e-5, rtol=1e-4)
    prompt = tokens.build_prompt(config, role="document", tokenizer_json=None)
    assert prompt.rows(*families.DOCUMENTS) == rows


def test_token_wise_query_and_document_towers_train_together():
    encoder = dual_encoder.build(
        TokenWiseConfig(backbone=tiny.CAUSAL, max_length=16),
        TowerConfig(backbone=tiny.CAUSAL, max_length=24, reads="tokens"),
        dim=8,
        tokenizers={"query": families.LEARNT, "document": families.LEARNT},
        seed=0,
        share_backbone=True,
    )
    documents = encoder.document.prompt.rows(*families.DOCUMENTS)
    query, document = encoder(
        batch_of(encoder.query, QUERIES, packed=True),
        collate(documents, pad=encoder.document.pad, packed=True),
    )
    (query @ document[:, 0].T).logsumexp(1).sum().backward()
    assert encoder.query.backbone is encoder.document.backbone
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_a_table_has_digests_of_its_inputs():
    tokenizer_json = backbone.train_tokenizer(["a few words"], vocabulary=400)

    def digests(seed: int = 0, **knobs) -> dict[str, str]:
        config = TokenWiseConfig(backbone=tiny.CAUSAL, **knobs)
        tower = dual_encoder.build_query_tower(config, dim=8, tokenizer_json=tokenizer_json, seed=seed)
        return tower._digests(tower.config.instruction)

    first = digests()
    assert digests() == first
    assert first["adapter"] == "none"
    differs = {name for name in first if digests(seed=1)[name] != first[name]}
    assert differs == {"weights"}
    differs = {name for name in first if digests(instruction="Find: ")[name] != first[name]}
    assert differs == {"instruction"}
    differs = {name for name in first if digests(lora=Lora(rank=2))[name] != first[name]}
    assert "adapter" in differs


def test_an_empty_query_is_zero_in_training(scratch: TokenWise):
    embeddings = scratch(batch_of(scratch, ["", "torch"], packed=True))
    assert embeddings[0].eq(0).all()
    assert embeddings[1].ne(0).any()
    assert scratch(batch_of(scratch, [""], packed=True)).eq(0).all()
    assert scratch.contextual(batch_of(scratch, ["", "torch"], packed=True)).ne(0).any(-1).all()


def test_towers_that_cannot_read_blocks_are_refused(tmp_path: Path):
    long = "long " * 40
    for knobs in ({"instruction": long}, {"tasks": {"x": long}}):
        with pytest.raises(ConfigError, match="the backbone reads 64: shorten it"):
            from_scratch(**knobs)
    with pytest.raises(ConfigError, match="the backbone attends to 8: shorten it"):
        build(families.folder(tmp_path, "mistral"), instruction="longer than a window")
    with pytest.raises(ConfigError, match="needs a causal backbone"):
        from_scratch(tiny.BIDIRECTIONAL)
    with pytest.raises(ConfigError, match="needs a causal backbone"):
        families.scratch_tower(tiny.BIDIRECTIONAL, "document", reads="tokens")
    for role, sparse in (("query", False), ("document", True)):
        with pytest.raises(ConfigError, match="is for documents without term weights"):
            families.scratch_tower(tiny.CAUSAL, role, sparse=sparse, reads="tokens")
    with pytest.raises(ValidationError, match="leave pooling at placeholders"):
        TowerConfig(backbone=Pretrained(path="x"), reads="tokens", pooling="mean")
    with pytest.raises(ValidationError, match="should match pattern"):
        TokenWiseConfig(tasks={"../up": "x"})
