"""The fused projection and maximum equals the naive one; its memory does not depend on the length."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalingnote.models.sparse_head import SparseHead, project_then_max, strongest


def naive(hidden: Tensor, places: Tensor, weight: Tensor) -> Tensor:
    """Compute all logits of all tokens, then the maximum over each row."""
    logits = hidden @ weight.T
    rows = [logits[row[row >= 0]] for row in places]
    return torch.stack([r.amax(0) if len(r) else r.new_full((len(weight),), -torch.inf) for r in rows])


def draw(lengths: list[int], *, vocabulary: int = 23, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    total, longest = sum(lengths), max(lengths)
    hidden = torch.randn(total, 5, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, 5, generator=generator, dtype=dtype)
    places, start = torch.full((len(lengths), longest), -1), 0
    for row, length in enumerate(lengths):
        places[row, :length] = torch.arange(start, start + length)
        start += length
    places[0, 1] = -1  # a gap
    return [hidden, places, weight]


@pytest.mark.parametrize("lengths", [[4, 2, 3], [9], [700, 3], [2] * 30])
@pytest.mark.parametrize("max_logits", [1, 300, 1 << 23])
def test_fused_equals_naive_in_value_and_gradient(lengths: list[int], max_logits: int):
    if max_logits == 1 and max(lengths) > 9:
        pytest.skip("one column at a time is slow")
    results = []
    for work in (lambda *a: project_then_max(*a, max_logits=max_logits), naive):
        hidden, places, weight = draw(lengths)
        leaves = [hidden, weight]
        for leaf in leaves:
            leaf.requires_grad_()
        out = work(hidden, places, weight)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, atol=1e-12, rtol=1e-12)


def test_term_weights_are_log_saturated_maxima():
    hidden, places, weight = draw([4, 2, 3])
    places[1] = -1
    hidden.requires_grad_()
    terms = SparseHead(None)(hidden, places, torch.nn.Parameter(weight))
    assert terms[1].eq(0).all()
    expected = torch.log1p(torch.relu(hidden @ weight.T))[places[2][places[2] >= 0]].amax(0)
    torch.testing.assert_close(terms[2], expected)
    terms.sum().backward()
    assert hidden.grad.isfinite().all()
    assert hidden.grad[4:6].eq(0).all()


def test_of_equal_logits_the_first_place_gets_the_gradient():
    hidden = torch.ones(3, 2, requires_grad=True)
    project_then_max(hidden, torch.tensor([[0, 1, 2]]), torch.ones(4, 2)).sum().backward()
    assert hidden.grad.tolist() == [[4, 4], [0, 0], [0, 0]]


def test_half_precision_rounds_only_the_products():
    hidden, places, weight = draw([4, 2, 3], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = project_then_max(hidden, places, weight.requires_grad_())
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, naive(hidden, places, weight), atol=0.05, rtol=0.05)
    actual[actual > -torch.inf].sum().backward()
    assert weight.grad.dtype == torch.float32


class _Largest(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and not t.is_sparse]
        self.numel = max([self.numel, *sizes])
        return result


def largest(work: Callable[..., Tensor], length: int) -> int:
    hidden, places, weight = draw([length, length // 2], vocabulary=1000, dtype=torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    with _Largest() as mode:
        work(hidden, places, weight).square().sum().backward()
    return mode.numel


def test_memory_is_flat_in_the_length_of_rows():
    short, long = (largest(lambda *a: project_then_max(*a, max_logits=16_000), n) for n in (8, 256))
    assert short == long == 5 * 1000  # the head itself
    assert largest(naive, 256) == 384 * 1000


def test_the_strongest_terms():
    terms, impacts = strongest(torch.tensor([[0.0, 3, 1, 2], [0, 0, 5, 0]]), 2)
    assert terms[0].tolist() == [1, 3]
    assert impacts.tolist() == [[3, 2], [5, 0]]
    assert strongest(torch.ones(1, 3), 9)[0].shape == (1, 3)
