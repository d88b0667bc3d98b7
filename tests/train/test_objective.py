"""The module of stage I: the sum of its losses, and equal results on several ranks and in one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stages import DIM, Tensors, step, towers, triplets

import ranks
from scalingnote.core.errors import TrainingError
from scalingnote.train.config import Losses
from scalingnote.train.engine import gather
from scalingnote.train.objective import StageOne

ROWS = 12
LOSSES = Losses(matryoshka=(4, DIM), alpha=0.25, teacher=2.0)


def test_equation_12_adds_the_parts():
    both = towers()
    batch = triplets(both, range(4), of=4)
    loss, parts = StageOne(both, LOSSES)(batch)
    assert set(parts) == {"contrastive", "margin", "teacher"}
    expected = parts["contrastive"] + 0.25 * parts["margin"] + 2.0 * parts["teacher"]
    torch.testing.assert_close(loss.detach(), expected)


def test_losses_are_float32_for_any_precision_of_the_towers():
    both, draw = towers(), torch.Generator().manual_seed(0)
    batch, stage = triplets(both, range(4), of=4), StageOne(both, LOSSES)
    embeddings = {
        "query": torch.randn(4, 1, DIM, generator=draw),
        "document": torch.randn(8, 3, DIM, generator=draw),
    }

    def losses() -> Tensors:
        return stage.losses(batch, lambda name, rows: {name: embeddings[name]})[1]

    expected = losses()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(losses(), expected, atol=0, rtol=0)


def test_a_teacher_loss_without_scores_is_refused():
    both = towers()
    batch = triplets(both, range(4), of=4)
    object.__setattr__(batch, "scores", None)
    with pytest.raises(TrainingError, match="have no scores"):
        StageOne(both, LOSSES)(batch)


def steps(folder: str) -> dict[int, Tensors]:
    """Run steps of 2, 3 and 4 ranks in the same 4 processes, which are slow to start."""
    number, results = dist.get_rank(), {}
    for world in (2, 3, 4):
        if dist.is_initialized():
            dist.barrier()  # no rank leaves while others still connect
            dist.destroy_process_group()
        if number >= world:
            continue
        store = f"file://{folder}/{world}"
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=world)
        row_numbers = torch.arange(ROWS).split(ROWS // world)[number]
        assert gather(row_numbers).tolist() == list(range(ROWS))
        results[world] = step_of(row_numbers.tolist())
    return results


def step_of(rows: list[int]) -> Tensors:
    both = towers()
    return step(StageOne(both, LOSSES), triplets(both, rows, of=ROWS))


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Tensors]:
    folder: Path = tmp_path_factory.mktemp("stores")
    return ranks.run(steps, str(folder), world=4)[0]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_compute_the_same_as_one_process(on_ranks: dict[int, Tensors], world: int):
    results, expected = on_ranks[world], step_of(list(range(ROWS)))
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        # Gradients of a loss near 40, summed in another order in float32.
        torch.testing.assert_close(results[name], value, atol=2e-5, rtol=1e-4, msg=name)
