"""The FLOPs regulariser and its ramp, and the alignment of scores, against plain transcriptions."""

import pytest
import torch

from scalingnote.losses import align, align_scores, cross_entropy, flops, info_nce, ramp


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_flops_is_the_sum_of_squared_means():
    weights = drawn(5, 9).relu()
    expected = sum((sum(row[v] for row in weights.tolist()) / 5) ** 2 for v in range(9))
    assert flops(weights.mean(0)).item() == pytest.approx(expected)


def test_flops_prefers_terms_that_few_documents_have():
    everywhere, spread = torch.zeros(4, 4), torch.eye(4)
    everywhere[:, 0] = 1
    assert flops(everywhere.mean(0)) == 4 * flops(spread.mean(0))


@pytest.mark.parametrize("over", [0.5, 20.0], ids=["share", "steps"])
def test_a_weight_grows_over_a_share_of_the_run_or_a_number_of_steps(over: float):
    steps = torch.tensor(40.0)
    found = [ramp(torch.tensor(step), steps, over=over) for step in (0.0, 5.0, 20.0, 36.0)]
    assert found == [0, 0.25, 1, 1]
    assert ramp(torch.tensor(4.0), steps, over=0.0) == 1.0


def test_alignment_is_the_mean_divergence_from_the_teacher():
    queries, documents, teacher = drawn(4, 3), drawn(6, 3, seed=1), drawn(4, 6, seed=2).log_softmax(1)
    weights = torch.tensor([1.0, 2, 0.5, 1], dtype=torch.float64)
    student = (queries / 0.1 @ documents.T).log_softmax(1)
    expected = ((teacher.exp() * (teacher - student)).sum(1) * weights).mean()
    found = align(queries, documents, teacher=teacher, temperature=0.1, weights=weights)
    torch.testing.assert_close(found, expected)
    scores = queries / 0.1 @ documents.T
    torch.testing.assert_close(align_scores(scores, teacher=teacher, weights=weights), expected)
    assert align_scores(teacher, teacher=teacher, weights=weights).abs() < 1e-12


def test_the_gradient_of_alignment_is_that_of_finite_differences():
    leaves = [drawn(4, 3).requires_grad_(), drawn(6, 3, seed=1).requires_grad_()]
    teacher, weights = drawn(4, 6, seed=2).log_softmax(1), torch.ones(4, dtype=torch.float64)
    knobs = {"teacher": teacher, "temperature": 0.5, "weights": weights}
    assert torch.autograd.gradcheck(lambda q, d: align(q, d, **knobs), leaves)


def test_cross_entropy_of_scores_is_that_of_embeddings():
    queries, documents = drawn(4, 3), drawn(6, 3, seed=1)
    ignore = torch.zeros(4, 6, dtype=torch.bool)
    ignore[0, 3] = ignore[1, 1] = True  # the second is a positive, which is never ignored
    knobs = {"positives": torch.arange(4), "ignore": ignore, "weights": torch.arange(4) + 1.0}
    expected = info_nce(queries, documents, temperature=0.1, **knobs)
    torch.testing.assert_close(cross_entropy(queries @ documents.T / 0.1, **knobs), expected)
