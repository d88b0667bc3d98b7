"""Loss and every parameter's gradient on several ranks equal one process that holds the whole batch."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import tiny
from scalingnote.models import backbone, tower
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.tower import Batch
from scalingnote.train.config import Losses
from scalingnote.train.objective import StageOne, Triplets

PER_RANK = 4


def stage() -> StageOne:
    texts = [text for row in tiny.document_rows() for text in (row["title"], row["content"])]
    learnt = backbone.train_tokenizer(texts, vocabulary=400)
    query = tower.build(tiny.query_tower(), role="query", dim=16, tokenizer_json=learnt, seed=0)
    document = tower.build(tiny.document_tower(), role="document", dim=16, tokenizer_json=learnt, seed=1)
    return StageOne(DualEncoder(query, document), Losses(matryoshka=(4, 16)))


def take(batch: Batch, rows: torch.Tensor) -> Batch:
    return Batch(batch.ids[rows], batch.mask[rows], batch.positions[rows])


def batch_of(made: StageOne, rank: int, world: int) -> Triplets:
    """Rank's share of a global batch; rank 0 of 1 gets all of it. Some ids repeat across ranks."""
    size = PER_RANK * 6 // world
    everything = 6 * PER_RANK
    documents = tiny.document_rows(2 * everything)
    columns = [[row[name] for row in documents] for name in ("title", "topic", "content")]
    queries = tower.collate(made.towers.query.prompt.rows([r["content"][:20] for r in documents]), pad=0)
    encoded = tower.collate(made.towers.document.prompt.rows(*columns), pad=0)
    own = torch.arange(rank * size, (rank + 1) * size)
    ids = torch.arange(everything) % (everything - 3)  # three documents and queries appear twice
    rows = torch.cat([own, own + everything])
    return Triplets(
        queries=take(queries, own),
        documents=take(encoded, rows),
        query_ids=ids[own],
        document_ids=torch.cat([ids, ids + 1000])[rows],
        known_positives=torch.stack([ids, (ids + 5) % 17], dim=1)[own],
        weights=(1 + ids % 3).float()[own],
    )


def work(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    made = stage()
    wrapped = DistributedDataParallel(made)
    loss, _ = wrapped(batch_of(made, rank, world))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        gradients = {name: p.grad for name, p in made.named_parameters()}
        torch.save({"loss": total / world, "gradients": gradients}, f"{folder}/found.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(tmp_path: Path, world: int):
    mp.spawn(work, args=(world, str(tmp_path)), nprocs=world)
    found = torch.load(tmp_path / "found.pt")
    made = stage()
    loss, _ = made(batch_of(made, 0, 1))
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach(), atol=1e-5, rtol=1e-5)
    for name, parameter in made.named_parameters():
        torch.testing.assert_close(found["gradients"][name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
