"""Loss and every parameter's gradient on several ranks equal one process that holds the whole batch."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ranks
import tiny
from scalingnote.models import backbone, batch, dual_encoder
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.train.candidates import Triplets
from scalingnote.train.collectives import gather
from scalingnote.train.config import Losses, TeacherScores
from scalingnote.train.objective import StageOne

ROWS = 12
Found = dict[str, Tensor]


def stage() -> StageOne:
    texts = [text for row in tiny.document_rows() for text in (row["title"], row["content"])]
    learnt = backbone.train_tokenizer(texts, vocabulary=400)
    query = dual_encoder.build_tower(tiny.query_tower(), role="query", dim=16, tokenizer_json=learnt, seed=0)
    document = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=16, tokenizer_json=learnt, seed=1
    )
    losses = Losses(matryoshka=(4, 16), learn_temperature=True, teacher=TeacherScores())
    return StageOne(DualEncoder(query, document), losses)


def triplets(made: StageOne, rows: Sequence[int]) -> Triplets:
    """Some rows of a global batch in which ids repeat across ranks, and a third of the rows is unscored."""
    texts = tiny.document_rows(2 * ROWS)
    documents = [texts[i] for i in (*rows, *(row + ROWS for row in rows))]
    columns = ([document[name] for document in documents] for name in ("title", "topic", "content"))
    own = torch.tensor(rows)
    ids = own % (ROWS - 3)
    scores = torch.stack([own * 0.3, 1.0 - own * 0.1], dim=1)
    scores[own % 3 == 1] = torch.nan
    negatives = torch.where(own % 4 == 2, -1, own + 1000)  # a fourth of the rows has none
    scores[own % 4 == 2, 1] = torch.nan
    return Triplets(
        queries=batch.collate(made.towers.query.prompt.rows([texts[i]["content"][:20] for i in rows]), pad=0),
        documents=batch.collate(made.towers.document.prompt.rows(*columns), pad=0),
        query_ids=ids,
        document_ids=torch.cat([ids, negatives]),
        known_positives=torch.stack([ids, (ids + 5) % 17], dim=1),
        weights=(1 + own % 3).float(),
        scores=scores,
    )


def step(rows: Sequence[int]) -> Found:
    """Loss, parts and gradients of this rank's rows, all averaged over ranks."""
    made = stage()
    loss, parts = made(triplets(made, rows))
    loss.backward()
    found = {"loss": loss.detach(), **parts} | {n: p.grad for n, p in made.named_parameters()}
    if dist.is_initialized():
        for value in found.values():
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return found


def steps(folder: str) -> dict[int, Found]:
    """Steps of 2, 3 and 4 ranks in the same 4 processes, which are slow to start."""
    me, found = dist.get_rank(), {}
    for world in (2, 3, 4):
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while others still connect
            dist.destroy_process_group()
        if me >= world:
            continue
        store = f"file://{folder}/{world}"
        dist.init_process_group("gloo", init_method=store, rank=me, world_size=world)
        own = torch.arange(ROWS).split(ROWS // world)[me]
        assert gather(own).tolist() == list(range(ROWS))
        found[world] = step(own.tolist())
    return found


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Found]:
    folder: Path = tmp_path_factory.mktemp("stores")
    return ranks.run(steps, str(folder), world=4)[0]


@pytest.fixture(scope="module")
def alone() -> Found:
    return step(range(ROWS))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_equal_one_process(on_ranks, alone, world: int):
    found = on_ranks[world]
    assert found.keys() == alone.keys()
    assert {"temperature.log", "teacher", "margin"} < found.keys()
    for name, value in alone.items():
        # Gradients of a loss near 40, summed in another order in float32.
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4, msg=name)
