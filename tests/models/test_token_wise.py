"""Tokens read in blocks give what each gives alone; the table gives what the whole model gives."""

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
INSTRUCTION = "go: "  # with two more tokens it fits the windows of the families that have one
TIGHT = {"atol": 2e-6, "rtol": 1e-5}


@pytest.fixture(scope="module", params=families.CAUSAL)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.folder(tmp_path_factory.mktemp(request.param), request.param)


def build(path: Path, **knobs) -> TokenWise:
    config = TokenWiseConfig(backbone=Pretrained(path=str(path)), max_length=16, **knobs)
    return dual_encoder.build_query_tower(config, dim=16, tokenizer_json=None, seed=0).eval()


def from_scratch(backbone: Any = tiny.CAUSAL, **knobs: Any) -> TokenWise:
    config = TokenWiseConfig(backbone=backbone, **knobs)
    return dual_encoder.build_query_tower(config, dim=8, tokenizer_json=families.LEARNT, seed=0).eval()


@pytest.fixture(scope="module")
def scratch() -> TokenWise:
    return from_scratch(max_length=16, storage="float32")


def alone(made: TokenWise, token: int) -> torch.Tensor:
    """One token behind the instruction, through the plain model: no mask, no positions of ours."""
    ids = torch.tensor([[*made.instruction().tolist(), token, made.end]])
    return made.projection(made.backbone(input_ids=ids).last_hidden_state[0, -1])


def batch_of(made: TokenWise, queries: list[str], *, packed: bool) -> Batch:
    return collate(made.prompt.rows(queries), pad=made.pad, packed=packed)


def test_a_token_in_a_block_gives_what_it_gives_alone(checkpoint: Path):
    made = build(checkpoint, instruction=INSTRUCTION)
    ids = torch.arange(60, 60 + BLOCKS + 5)  # more than a line
    found = made.token_vectors(ids, made.instruction())
    for token, vector in zip(ids.tolist(), found, strict=True):
        torch.testing.assert_close(vector, alone(made, token), **TIGHT)


@pytest.mark.parametrize("packed", [False, True])
def test_a_query_is_the_mean_of_its_tokens_each_as_often_as_it_occurs(checkpoint: Path, packed: bool):
    made = build(checkpoint, instruction=INSTRUCTION)
    found = made(batch_of(made, QUERIES, packed=packed))
    assert found.shape == (len(QUERIES), 1, 16)
    for row, embedding in zip(made.prompt.rows(QUERIES), found[:, 0], strict=True):
        expected = torch.stack([alone(made, token) for token in row.ids]).mean(0)
        torch.testing.assert_close(embedding, expected, **TIGHT)


def test_a_token_may_be_its_row_of_the_input_table(checkpoint: Path):
    made = build(checkpoint, instruction=INSTRUCTION, reads="embeddings")
    found = made(batch_of(made, QUERIES, packed=True))
    table = made.backbone.get_input_embeddings()  # of gemma, with the factor of its states
    for row, embedding in zip(made.prompt.rows(QUERIES), found[:, 0], strict=True):
        expected = made.projection(table(torch.tensor(row.ids)).mean(0))
        torch.testing.assert_close(embedding, expected, **TIGHT)


def test_gradients_are_those_of_tokens_read_alone(checkpoint: Path):
    made = build(checkpoint, instruction=INSTRUCTION)
    results = []
    for work in (
        lambda: made(batch_of(made, QUERIES, packed=True))[:, 0],
        lambda: torch.stack(
            [torch.stack([alone(made, t) for t in row.ids]).mean(0) for row in made.prompt.rows(QUERIES)]
        ),
    ):
        made.zero_grad()
        (work() * torch.linspace(-1, 1, 64).view(4, 16)).sum().backward()
        results.append({name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_the_whole_query_is_read_as_one_text(checkpoint: Path, packed: bool):
    made = build(checkpoint, instruction=INSTRUCTION)
    found = made.contextual(batch_of(made, QUERIES, packed=packed))
    for row, embedding in zip(made.prompt.rows(QUERIES), found[:, 0], strict=True):
        ids = torch.tensor([[*made.instruction().tolist(), *row.ids, made.end]])
        expected = made.projection(made.backbone(input_ids=ids).last_hidden_state[0, -1])
        torch.testing.assert_close(embedding, expected, **TIGHT)


def test_a_weight_in_half_precision_rounds_no_embedding(scratch: TokenWise):
    made = copy.deepcopy(scratch)
    made.projection.bfloat16()
    ids = torch.tensor([[*made.instruction().tolist(), 70, made.end]])
    state = made.backbone(input_ids=ids).last_hidden_state[0, -1]
    expected = made.projection.weight.double() @ state.double()
    (found,) = made.token_vectors(torch.tensor([70]), made.instruction())
    torch.testing.assert_close(found, expected.float(), **TIGHT)


@given(st.integers(0, 5), st.integers(1, 6))
def test_the_mask_is_that_of_the_paper(instruction: int, blocks: int):
    mask = block_mask(instruction, blocks)
    assert mask.shape == (instruction + 2 * blocks,) * 2
    for q in range(len(mask)):
        for k in range(len(mask)):
            in_prompt = q < instruction and k <= q
            to_prompt = q >= instruction and k < instruction
            within = q >= instruction and (q - instruction) // 2 == (k - instruction) // 2 and k <= q
            assert mask[q, k] == (in_prompt or to_prompt or within)
    assert mask.any(1).all()  # no row sees nothing: no NaN


def test_the_saved_table_gives_what_the_whole_model_gives(scratch: TokenWise, tmp_path: Path):
    scratch.save(tmp_path)
    table = dual_encoder.load_query_tower(tmp_path)
    whole = scratch(batch_of(scratch, QUERIES, packed=True))
    assert table.prompt.rows(QUERIES) == scratch.prompt.rows(QUERIES)
    torch.testing.assert_close(table(batch_of(table, QUERIES, packed=True)), whole, **TIGHT)


def test_a_table_that_is_computed_shows_progress(scratch: TokenWise, monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    monkeypatch.setattr(get_logger("train"), "info", lambda text, *values: lines.append(text % values))
    rows = scratch.table(scratch.config.instruction)
    assert lines[-1].startswith(f"{len(rows):,} tokens of the table in")


def test_every_further_task_has_a_table_behind_its_own_instruction(tmp_path: Path):
    tasks = {"SciFact": "Given a claim: ", "NFCorpus": "of medicine "}
    made = from_scratch(max_length=16, storage="float32", tasks=tasks)
    made.save(tmp_path)
    assert sorted(path.name for path in (tmp_path / "tasks").iterdir()) == ["NFCorpus", "SciFact"]
    found = {"own": Table.read(tmp_path)} | {name: Table.read(tmp_path / "tasks" / name) for name in tasks}
    for name, text in {"own": made.config.instruction, **tasks}.items():
        other = from_scratch(max_length=16, storage="float32", instruction=text)
        np.testing.assert_allclose(found[name].rows(), other.table(text), atol=1e-6)
        assert found[name].made_from == other._digests(text)
    assert np.abs(found["SciFact"].rows() - found["NFCorpus"].rows()).max() > 1e-3


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_documents_may_be_the_mean_of_their_tokens_too(checkpoint: Path, tmp_path: Path, lora: Lora | None):
    made = families.tower(checkpoint, "document", reads="tokens", lora=lora).eval()
    config = made.config
    rows = made.prompt.rows(*families.DOCUMENTS)
    (title,) = made.prompt.rows(["torch stack"], [""], ["joins"])
    assert title.ids == made.prompt.tokenizer.encode("torch stack joins", add_special_tokens=False).ids
    assert max(len(row.ids) for row in rows) <= config.max_length
    with torch.inference_mode():
        found = made(collate(rows, pad=made.pad, packed=True))
        torch.testing.assert_close(made(collate(rows, pad=made.pad)), found, **TIGHT)
        for row, embedding in zip(rows, found[:, 0], strict=True):
            if row.ids:
                whole = torch.stack([alone(made, token) for token in row.ids]).mean(0)
                torch.testing.assert_close(embedding, whole, atol=1e-5, rtol=1e-4)
            else:
                assert (embedding == 0).all()
    for merge in (True, False):
        made.save(tmp_path / str(merge), merge_adapters=merge)
        again = load_tower(tmp_path / str(merge))
        facts = json.loads((tmp_path / str(merge) / "tower.json").read_text())
        tokens_json = (tmp_path / str(merge) / "tokenizer.json").read_text()
        assert DocumentPrompt.restore(facts, tokens_json).rows(*families.DOCUMENTS) == rows
        with torch.inference_mode():
            torch.testing.assert_close(again(collate(rows, pad=again.pad)), found, atol=1e-5, rtol=1e-4)
    prompt = tokens.build_prompt(config, role="document", tokenizer_json=None)
    assert prompt.rows(*families.DOCUMENTS) == rows


def test_a_light_document_tower_learns_beside_a_light_query_tower():
    made = dual_encoder.build(
        TokenWiseConfig(backbone=tiny.CAUSAL, max_length=16),
        TowerConfig(backbone=tiny.CAUSAL, max_length=24, reads="tokens"),
        dim=8,
        tokenizers={"query": families.LEARNT, "document": families.LEARNT},
        seed=0,
        share_base=True,
        share_backbone=True,
    )
    documents = made.document.prompt.rows(*families.DOCUMENTS)
    query, document = made(
        batch_of(made.query, QUERIES, packed=True), collate(documents, pad=made.document.pad, packed=True)
    )
    (query @ document[:, 0].T).logsumexp(1).sum().backward()
    assert made.query.backbone is made.document.backbone
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_a_table_names_what_it_was_made_from():
    learnt = backbone.train_tokenizer(["a few words"], vocabulary=400)

    def digests(seed: int = 0, **knobs) -> dict[str, str]:
        config = TokenWiseConfig(backbone=tiny.CAUSAL, **knobs)
        made = dual_encoder.build_query_tower(config, dim=8, tokenizer_json=learnt, seed=seed)
        return made._digests(made.config.instruction)

    first = digests()
    assert digests() == first
    assert first["adapter"] == "none"
    differs = {name for name in first if digests(seed=1)[name] != first[name]}
    assert differs == {"weights"}
    differs = {name for name in first if digests(instruction="Find: ")[name] != first[name]}
    assert differs == {"instruction"}
    differs = {name for name in first if digests(lora=Lora(rank=2))[name] != first[name]}
    assert "adapter" in differs


def test_an_empty_query_is_zero_while_it_learns(scratch: TokenWise):
    found = scratch(batch_of(scratch, ["", "torch"], packed=True))
    assert found[0].eq(0).all()
    assert found[1].ne(0).any()
    assert scratch(batch_of(scratch, [""], packed=True)).eq(0).all()
    assert scratch.contextual(batch_of(scratch, ["", "torch"], packed=True)).ne(0).any(-1).all()


def test_what_cannot_read_blocks_is_refused(tmp_path: Path):
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
