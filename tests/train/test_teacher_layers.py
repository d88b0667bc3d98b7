"""Parts that students copy from their teacher: layers (all of them give an equal model), token embeddings."""

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


def save_teacher(folder: Path, scratch: Scratch, *, deep: int = 4) -> Tower:
    config = tiny.query_tower(scratch.model_copy(update={"layers": deep}))
    tower = dual_encoder.build_tower(config, role="query", dim=8, tokenizer_json=LEARNT, seed=3).eval()
    tower.save(folder)
    return tower


def student(folder: Path) -> Tower:
    config = tiny.query_tower().model_copy(update={"backbone": Pretrained(path=str(folder))})
    return dual_encoder.build_tower(config, role="query", dim=8, tokenizer_json=None, seed=0).eval()


def hidden(tower: Tower) -> torch.Tensor:
    batch = collate(tower.prompt.rows(TEXTS), pad=tower.pad)
    with torch.no_grad():
        options = {"use_cache": False} if tower.causal else {}
        return tower.backbone(input_ids=batch.ids, attention_mask=batch.mask, **options).last_hidden_state


@pytest.mark.parametrize("scratch", [tiny.CAUSAL, tiny.BIDIRECTIONAL])
def test_a_student_with_all_layers_has_equal_hidden_states(tmp_path: Path, scratch: Scratch):
    teacher = save_teacher(tmp_path / "teacher", scratch)
    assert students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=4) == (0, 1, 2, 3)
    copy = student(tmp_path / "student")
    assert copy.prompt.rows(TEXTS) == teacher.prompt.rows(TEXTS)
    torch.testing.assert_close(hidden(copy), hidden(teacher))


@pytest.mark.parametrize(("scratch", "layers"), [(tiny.CAUSAL, (1, 3)), (tiny.BIDIRECTIONAL, (1, -1))])
def test_selected_layers_equal_those_of_the_teacher(
    tmp_path: Path, scratch: Scratch, layers: tuple[int, ...]
):
    teacher = save_teacher(tmp_path / "teacher", scratch)
    copied = students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=layers)
    assert copied == (1, 3)
    copy = student(tmp_path / "student")
    stack = (
        teacher.backbone.encoder.layer if hasattr(teacher.backbone, "encoder") else teacher.backbone.layers
    )
    del stack[2], stack[0]
    teacher.backbone.config.num_hidden_layers = 2
    torch.testing.assert_close(hidden(copy), hidden(teacher))
    # It can be saved and loaded, and its config has the new number of layers.
    copy.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["num_hidden_layers"] == 2
    torch.testing.assert_close(hidden(load_tower(tmp_path / "again")), hidden(teacher))


def test_layers_are_evenly_spaced_and_include_the_last_one():
    assert students.evenly_spaced_layers(4, of=28) == (6, 13, 20, 27)
    assert students.evenly_spaced_layers(1, of=28) == (27,)
    assert students.evenly_spaced_layers(3, of=4) == (0, 2, 3)
    with pytest.raises(ConfigError, match="has 2"):
        students.evenly_spaced_layers(3, of=2)


def test_missing_layers_are_refused(tmp_path: Path):
    save_teacher(tmp_path / "teacher", tiny.CAUSAL)
    for wrong in ((0, 4), (1, 1), (3, -1), (0, -5), ()):
        with pytest.raises(ConfigError, match="layers 0 to 3"):
            students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=wrong)
    (tmp_path / "teacher/model.safetensors").unlink()
    with pytest.raises(ConfigError, match="merge_adapters"):
        students.copy_layers(tmp_path / "teacher", tmp_path / "student", layers=2)


def test_a_published_teacher_passes_on_its_pooling_and_prompt(tmp_path: Path):
    path = published.folder(tmp_path, prompts=published.PROMPTS, dense=[(16, True, torch.nn.Tanh())])
    adopted = adopt.open_tower(AdoptConfig(path=str(path)), "query")
    adopted.save(tmp_path / "teacher")
    deep = len(adopted.backbone.encoder.layer)
    numbers = students.copy_layers(tmp_path / "teacher", tmp_path / "whole", layers=deep)
    assert numbers == tuple(range(deep))
    config = TowerConfig(backbone=Pretrained(path=str(tmp_path / "whole")), pooling="auto", max_length=24)
    copy = build_tower(config, role="query", dim=16, tokenizer_json=None, seed=0).eval()
    assert copy.native.prefix == published.PROMPTS["query"]
    batch = collate(copy.prompt.rows(TEXTS), pad=copy.pad)
    with torch.no_grad():
        torch.testing.assert_close(copy(batch), adopted(batch))
    students.copy_layers(tmp_path / "teacher", tmp_path / "half", layers=1)
    config = config.model_copy(update={"backbone": Pretrained(path=str(tmp_path / "half"))})
    copy = build_tower(config, role="query", dim=16, tokenizer_json=None, seed=0)
    assert len(copy.backbone.encoder.layer) == 1


# --- token embeddings ---------------------------------------------------------------------------------------


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)


@pytest.mark.parametrize("width", [12, 20])
def test_a_table_of_at_least_equal_width_keeps_inner_products(tokens: torch.Tensor, width: int):
    torch.testing.assert_close(
        (fitted := students.fit_width(tokens, width=width)) @ fitted.T, tokens @ tokens.T
    )


def test_a_narrower_table_is_the_best_approximation_of_its_rank(tokens: torch.Tensor):
    fitted = students.fit_width(tokens, width=5)
    left, values, right = np.linalg.svd(tokens.double().numpy())
    best = left[:, :5] * values[:5] @ right[:5]
    np.testing.assert_allclose((fitted @ fitted.T).double(), best @ best.T, rtol=1e-4, atol=1e-3)


def test_only_the_rows_of_the_teacher_are_filled(tokens: torch.Tensor):
    table = nn.Embedding(60, 12)
    before = table.weight.detach().clone()
    students.inherit_token_embeddings(table, tokens)
    torch.testing.assert_close(table.weight[:50], tokens)
    torch.testing.assert_close(table.weight[50:], before[50:])
