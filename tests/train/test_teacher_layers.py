"""What students take from their teacher: layers, with which they are the teacher, and token embeddings."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import published
import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.models import adopt, backbone, dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import AdoptConfig, Pretrained, Scratch, TowerConfig
from scalingnote.models.dual_encoder import build_tower, load_tower
from scalingnote.models.tower import Tower
from scalingnote.train.distillation import student as students

TEXTS = [row["content"] for row in tiny.document_rows(12)]
LEARNT = backbone.train_tokenizer(TEXTS, vocabulary=400)


def saved(folder: Path, scratch: Scratch, *, deep: int = 4) -> Tower:
    config = tiny.query_tower(scratch.model_copy(update={"layers": deep}))
    made = dual_encoder.build_tower(config, role="query", dim=8, tokenizer_json=LEARNT, seed=3).eval()
    made.save(folder)
    return made


def student(folder: Path) -> Tower:
    config = tiny.query_tower().model_copy(update={"backbone": Pretrained(path=str(folder))})
    return dual_encoder.build_tower(config, role="query", dim=8, tokenizer_json=None, seed=0).eval()


def hidden(made: Tower) -> torch.Tensor:
    batch = collate(made.prompt.rows(TEXTS), pad=made.pad)
    with torch.no_grad():
        given = {"use_cache": False} if made.causal else {}
        return made.backbone(input_ids=batch.ids, attention_mask=batch.mask, **given).last_hidden_state


@pytest.mark.parametrize("scratch", [tiny.CAUSAL, tiny.BIDIRECTIONAL])
def test_a_student_of_all_layers_has_the_teachers_hidden_states(tmp_path: Path, scratch: Scratch):
    teacher = saved(tmp_path / "teacher", scratch)
    assert students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=4) == (0, 1, 2, 3)
    made = student(tmp_path / "student")
    assert made.prompt.rows(TEXTS) == teacher.prompt.rows(TEXTS)
    torch.testing.assert_close(hidden(made), hidden(teacher))


@pytest.mark.parametrize(("scratch", "layers"), [(tiny.CAUSAL, (1, 3)), (tiny.BIDIRECTIONAL, (1, -1))])
def test_chosen_layers_are_those_of_the_teacher(tmp_path: Path, scratch: Scratch, layers: tuple[int, ...]):
    teacher = saved(tmp_path / "teacher", scratch)
    copied = students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=layers)
    assert copied == (1, 3)
    made = student(tmp_path / "student")
    stack = (
        teacher.backbone.encoder.layer if hasattr(teacher.backbone, "encoder") else teacher.backbone.layers
    )
    del stack[2], stack[0]
    teacher.backbone.config.num_hidden_layers = 2
    torch.testing.assert_close(hidden(made), hidden(teacher))
    # It can be saved and read again, and its config says no more layers than it has.
    made.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["num_hidden_layers"] == 2
    torch.testing.assert_close(hidden(load_tower(tmp_path / "again")), hidden(teacher))


def test_layers_are_spread_evenly_with_the_last_one():
    assert students.evenly_spaced_layers(4, of=28) == (6, 13, 20, 27)
    assert students.evenly_spaced_layers(1, of=28) == (27,)
    assert students.evenly_spaced_layers(3, of=4) == (0, 2, 3)
    with pytest.raises(ConfigError, match="has 2"):
        students.evenly_spaced_layers(3, of=2)


def test_layers_that_are_not_there_are_refused(tmp_path: Path):
    saved(tmp_path / "teacher", tiny.CAUSAL)
    for wrong in ((0, 4), (1, 1), (3, -1), (0, -5), ()):
        with pytest.raises(ConfigError, match="layers 0 to 3"):
            students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=wrong)
    (tmp_path / "teacher/model.safetensors").unlink()
    with pytest.raises(ConfigError, match="merge_adapters"):
        students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=2)


def test_layers_of_a_published_teacher_keep_its_pooling_and_prompt(tmp_path: Path):
    path = published.folder(tmp_path, prompts=published.PROMPTS, dense=[(16, True, torch.nn.Tanh())])
    adopted = adopt.open_tower(AdoptConfig(path=str(path)), "query")
    adopted.save(tmp_path / "teacher")
    deep = len(adopted.backbone.encoder.layer)
    whole = students.copy_layers(tmp_path / "teacher", tmp_path / "whole", layers=deep)
    assert whole == tuple(range(deep))
    config = TowerConfig(backbone=Pretrained(path=str(tmp_path / "whole")), pooling="auto", max_length=24)
    made = build_tower(config, role="query", dim=16, tokenizer_json=None, seed=0).eval()
    assert made.native.prefix == published.PROMPTS["query"]
    batch = collate(made.prompt.rows(TEXTS), pad=made.pad)
    with torch.no_grad():
        torch.testing.assert_close(made(batch), adopted(batch))
    students.copy_layers(tmp_path / "teacher", tmp_path / "half", layers=1)
    config = config.model_copy(update={"backbone": Pretrained(path=str(tmp_path / "half"))})
    made = build_tower(config, role="query", dim=16, tokenizer_json=None, seed=0)
    assert len(made.backbone.encoder.layer) == 1


# --- token embeddings ---------------------------------------------------------------------------------------


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)


@pytest.mark.parametrize("width", [12, 20])
def test_a_table_as_wide_or_wider_keeps_every_inner_product(tokens: torch.Tensor, width: int):
    torch.testing.assert_close(
        (found := students.fit_width(tokens, width=width)) @ found.T, tokens @ tokens.T
    )


def test_a_narrower_table_is_the_best_of_its_rank(tokens: torch.Tensor):
    found = students.fit_width(tokens, width=5)
    left, values, right = np.linalg.svd(tokens.double().numpy())
    best = left[:, :5] * values[:5] @ right[:5]
    np.testing.assert_allclose((found @ found.T).double(), best @ best.T, rtol=1e-4, atol=1e-3)


def test_only_rows_the_teacher_has_are_filled(tokens: torch.Tensor):
    table = nn.Embedding(60, 12)
    before = table.weight.detach().clone()
    students.inherit_token_embeddings(table, tokens)
    torch.testing.assert_close(table.weight[:50], tokens)
    torch.testing.assert_close(table.weight[50:], before[50:])
