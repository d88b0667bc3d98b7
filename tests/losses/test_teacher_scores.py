import numpy as np
import pytest
import torch

from scalingnote import losses


def draw(*, seed: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=(4, 3)))


@pytest.mark.parametrize("loss", [losses.teacher_kl, losses.teacher_margin_mse])
def test_rows_without_scores_add_nothing_and_the_mean_is_over_all_rows(loss):
    student, teacher, weights = (
        draw(seed=0).requires_grad_(),
        draw(seed=1),
        torch.tensor([1.0, 3.0, 2.0, 1.0]),
    )
    teacher[1] = torch.nan
    teacher[3, 2] = torch.nan  # a row scored in part
    found = loss(student, teacher, weights=weights)
    found.backward()
    scored = [0, 2]
    alone = loss(student.detach()[scored], teacher[scored], weights=weights[scored])
    assert found.item() == pytest.approx(alone.item() * 2 / 4)
    assert (student.grad[[1, 3]] == 0).all()
    assert (student.grad[scored] != 0).any(1).all()


@pytest.mark.parametrize("loss", [losses.teacher_kl, losses.teacher_margin_mse])
def test_a_student_that_ranks_as_its_teacher_has_nothing_to_learn(loss):
    teacher = draw(seed=1)
    student = (teacher + 7.0).requires_grad_()  # only differences count
    found = loss(student, teacher)
    found.backward()
    assert found.item() == pytest.approx(0, abs=1e-12)
    assert student.grad.abs().max() < 1e-12
