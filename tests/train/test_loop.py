from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scalingnote.errors import TrainingError
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Optimizer
from scalingnote.train.loop import fit


class Regression(nn.Module):
    """A layer with dropout, to see that a resumed run draws the same masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (self.layer(batch).squeeze(-1) - batch.sum(-1)).pow(2).mean()
        return loss, {"squared": loss.detach()}


def batch_at(step: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def train(module: nn.Module, folder: Path, *, until: int = 12, source=batch_at, every: int = 4) -> list:
    def stop_at(step: int) -> Tensor:
        if step >= until:
            raise InterruptedError
        return source(step)

    return fit(
        module,
        stop_at,
        steps=12,
        rows_per_step=16,
        settings=Optimizer(peak_lr=1e-2),
        checkpoints=Checkpoints(str(folder), keep=2),
        checkpoint_every=every,
        dtype=torch.float32,
        seed=3,
        room="test",
    )


def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(tmp_path: Path):
    whole = Regression()
    curve = train(whole, tmp_path / "whole")
    with pytest.raises(InterruptedError):
        train(Regression(), tmp_path / "cut", until=10)
    resumed = Regression()
    assert train(resumed, tmp_path / "cut") == curve
    for left, right in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(left, right, atol=0, rtol=0)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path):
    train(Regression(), tmp_path, every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000008.safetensors",
        "step-000000010.safetensors",
    ]


def test_a_loss_that_is_not_finite_stops_with_the_step_and_a_remedy(tmp_path: Path):
    def poisoned(step: int) -> Tensor:
        return batch_at(step) * (torch.nan if step == 5 else 1.0)

    with pytest.raises(TrainingError, match=r"step 5 is not finite .*lower optimizer.peak_lr"):
        train(Regression(), tmp_path, source=poisoned)
