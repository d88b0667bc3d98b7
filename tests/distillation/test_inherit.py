import numpy as np
import pytest
import torch
from torch import nn

import tiny
from scalingnote.distillation.initial_weights import fit_width, inherit_token_embeddings
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.prompt import PLACEHOLDERS


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)


@pytest.mark.parametrize("width", [12, 20])
def test_a_table_as_wide_or_wider_keeps_every_inner_product(tokens: torch.Tensor, width: int):
    torch.testing.assert_close((found := fit_width(tokens, width=width)) @ found.T, tokens @ tokens.T)


def test_a_narrower_table_keeps_inner_products_as_well_as_any_matrix_of_its_rank(tokens: torch.Tensor):
    found = fit_width(tokens, width=5)
    left, values, right = np.linalg.svd(tokens.double().numpy())
    best = left[:, :5] * values[:5] @ right[:5]
    np.testing.assert_allclose((found @ found.T).double(), best @ best.T, rtol=1e-4, atol=1e-3)


def test_only_rows_the_teacher_has_are_filled(tokens: torch.Tensor):
    table = nn.Embedding(60, 12)
    before = table.weight.detach().clone()
    inherit_token_embeddings(table, tokens)
    torch.testing.assert_close(table.weight[:50], tokens)
    torch.testing.assert_close(table.weight[50:], before[50:])


def test_a_student_on_its_teachers_tokenizer_reads_the_same_tokens():
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    teacher = dual_encoder.build_tower(tiny.query_tower(), role="query", dim=8, tokenizer_json=learnt, seed=0)
    inherited = teacher.tokenizer.backend_tokenizer.to_str()
    student = dual_encoder.build_tower(
        tiny.query_tower(tiny.BIDIRECTIONAL), role="query", dim=8, tokenizer_json=inherited, seed=1
    )
    assert student.tokenizer.get_vocab() == teacher.tokenizer.get_vocab()
    assert student.token_embeddings.weight.shape == teacher.token_embeddings.weight.shape
    assert PLACEHOLDERS.keys() <= student.tokenizer.get_vocab().keys()
