"""RowAdam equals Adam if every row has a gradient in every step; a row without a gradient does not move."""

import torch

from scalingnote.train.engine import RowAdam


def run(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, gradients: list[torch.Tensor]
) -> None:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


def test_it_equals_adam_if_all_rows_have_gradients():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, 3, generator=generator) for _ in range(7)]
    ours, theirs = (torch.nn.Parameter(torch.ones(5, 3)) for _ in range(2))
    run(RowAdam([{"params": [ours]}], lr=0.1), ours, gradients)
    run(torch.optim.Adam([theirs], lr=0.1), theirs, gradients)
    torch.testing.assert_close(ours, theirs)


def test_a_row_without_a_gradient_stays_and_its_moments_decay():
    gradients = [torch.zeros(3, 2) for _ in range(4)]
    gradients[0][0] = gradients[3][0] = torch.tensor([1.0, -2.0])
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = RowAdam([{"params": [parameter]}], lr=0.1)
    run(optimizer, parameter, gradients[:1])
    after_one = parameter.detach().clone()
    run(optimizer, parameter, gradients[1:3])
    torch.testing.assert_close(parameter.detach(), after_one)
    run(optimizer, parameter, gradients[3:])
    assert not parameter[1:].any()
    mean = optimizer.state[parameter]["exp_avg"][0]
    torch.testing.assert_close(mean, (0.1 * 0.9**3 + 0.1) * gradients[0][0])


def test_row_rates_scale_the_movement_of_rows_and_of_values():
    slow, fast = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    slow.row_rates = torch.tensor([0.25, 1.0])  # type: ignore[attr-defined]
    gradients = [torch.tensor([1.0, 1.0])] * 3
    run(RowAdam([{"params": [slow]}], lr=0.1), slow, gradients)
    run(RowAdam([{"params": [fast]}], lr=0.1), fast, gradients)
    torch.testing.assert_close(slow.detach(), fast.detach() * torch.tensor([0.25, 1.0]))
