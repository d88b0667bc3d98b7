import math

import pytest
import torch
import torch.nn.functional as F

from scalingnote.losses import MAX_TEMPERATURE, MIN_TEMPERATURE, Temperature, info_nce


def unit(rows: int, *, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(drawn, dim=-1)


def some_ignored() -> torch.Tensor:
    ignore = torch.zeros(3, 5, dtype=torch.bool)
    ignore[0, [0, 2]] = ignore[2, [1, 3, 4]] = True  # the first is row 0's own positive
    return ignore


def plain(queries, candidates, *, positives, temperature, ignore, weights):
    """The same by PyTorch's own operations, which keep every score."""
    scores = queries @ candidates.T / temperature
    ignore = ignore & ~F.one_hot(positives, len(candidates)).bool()
    losses = F.cross_entropy(scores.masked_fill(ignore, -torch.inf), positives, reduction="none")
    return (losses * weights).mean()


def test_value_and_gradients_equal_plain_cross_entropy():
    found = []
    for loss in (info_nce, plain):
        leaves = [unit(3), unit(5, seed=1), torch.tensor(0.05, dtype=torch.float64)]
        queries, candidates, temperature = (leaf.requires_grad_() for leaf in leaves)
        value = loss(
            queries,
            candidates,
            positives=torch.tensor([0, 3, 0]),
            temperature=temperature,
            ignore=some_ignored(),
            weights=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64),
        )
        (3.0 * value).backward()
        found.append([value, queries.grad, candidates.grad, temperature.grad])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_no_scores_are_kept_for_the_backward_pass():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        info_nce(unit(30).requires_grad_(), unit(50, seed=1), positives=torch.arange(30), temperature=0.05)
    assert kept
    assert all(math.prod(shape) < 30 * 50 for shape in kept)


def test_rows_with_nothing_but_their_positive_have_no_loss_and_no_gradient():
    queries = unit(2).requires_grad_()
    ignore = torch.ones(2, 4, dtype=torch.bool)
    temperature = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    loss = info_nce(
        queries, unit(4, seed=1), positives=torch.tensor([1, 2]), temperature=temperature, ignore=ignore
    )
    loss.backward()
    assert loss.item() == 0
    assert queries.grad.abs().max() == 0
    assert temperature.grad == 0


@pytest.mark.parametrize(("start", "expected"), [(0.05, 0.05), (0.001, MIN_TEMPERATURE), (0.999, 0.999)])
def test_a_temperature_stays_within_bounds_and_can_come_back(start: float, expected: float):
    temperature = Temperature(start)
    assert list(temperature.state_dict()) == ["log"]
    value = temperature()
    assert value.item() == pytest.approx(expected)
    value.backward()
    assert temperature.log.grad.item() == pytest.approx(expected)
    assert expected < MAX_TEMPERATURE


def test_a_temperature_held_in_half_precision_is_not_rounded_again():
    temperature = Temperature(0.05).bfloat16()
    value = temperature()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(math.exp(temperature.log.item()), rel=1e-6)
