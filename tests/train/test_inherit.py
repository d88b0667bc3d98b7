import numpy as np
import pytest
import torch
from torch import nn

from scalingnote.train.distillation.student import fit_width, inherit_token_embeddings


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn(50, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 13)


@pytest.mark.parametrize("width", [12, 20])
def test_a_table_as_wide_or_wider_keeps_every_inner_product(tokens: torch.Tensor, width: int):
    torch.testing.assert_close((found := fit_width(tokens, width=width)) @ found.T, tokens @ tokens.T)


def test_a_narrower_table_is_the_best_of_its_rank(tokens: torch.Tensor):
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
