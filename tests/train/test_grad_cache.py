"""GradCache equals one backward pass over the same chunks, for every parameter, with dropout on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
import tiny
from scalingnote.distillation.config import DistillLosses
from scalingnote.distillation.objective import Lesson, StageTwo
from scalingnote.models import backbone, batch, dual_encoder
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.train.candidates import Triplets
from scalingnote.train.config import GradCache, Losses
from scalingnote.train.engine import Cacheable, Engine, cached_backward, surrogate
from scalingnote.train.objective import StageOne

CONFIG = GradCache(query_rows=3, document_rows=4)
Found = dict[str, Tensor]


class PlainEngine(Engine):
    """All that cached_backward needs of an engine, in plain PyTorch."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.module, self._dtype = module, dtype
        self.lasts: list[bool] = []

    def precision(self) -> AbstractContextManager[None]:
        return torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32)

    def backward_from(self, embeddings: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        surrogate(embeddings, gradients).backward()
        self.lasts.append(last)


def stage() -> StageOne:
    """Encoders with dropout, and a temperature that learns."""
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    query = dual_encoder.build_tower(
        tiny.query_tower(tiny.BIDIRECTIONAL), role="query", dim=8, tokenizer_json=learnt, seed=0
    )
    document = dual_encoder.build_tower(
        tiny.document_tower(tiny.BIDIRECTIONAL), role="document", dim=8, tokenizer_json=learnt, seed=1
    )
    losses = Losses(matryoshka=(4, 8), learn_temperature=True)
    return StageOne(DualEncoder(query, document), losses).train()


def triplets(made: StageOne, rows: int, *, packed: bool = False) -> Triplets:
    texts = tiny.document_rows(2 * rows)
    columns = ([row[name] for row in texts] for name in ("title", "topic", "content"))
    queries = made.towers.query.prompt.rows([row["content"][:20] for row in texts[:rows]])
    return Triplets(
        queries=batch.collate(queries, pad=0, packed=packed),
        documents=batch.collate(made.towers.document.prompt.rows(*columns), pad=0, packed=packed),
        query_ids=torch.arange(rows),
        document_ids=torch.arange(2 * rows),
        known_positives=torch.arange(rows)[:, None],
        weights=torch.ones(rows),
    )


def gradients(module: nn.Module) -> Found:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def plain_backward(engine: PlainEngine, batch, *, config: GradCache) -> Tensor:
    """The slow twin: chunks drawn in the same order, but all graphs kept until one backward pass."""
    module: Cacheable = engine.module
    embeddings = {}
    for name, rows in module.inputs(batch).items():
        if rows is None:
            embeddings |= module.encode(name, None)
            continue
        size = config.query_rows if name == "query" else config.document_rows
        chunks = []
        for start in range(0, len(rows), size):
            with engine.precision():
                chunks.append(module.encode(name, rows.rows(start, min(start + size, len(rows))))[name])
        embeddings[name] = torch.cat(chunks)
    loss, _ = module.loss(embeddings, batch)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_every_gradient_equals_a_plain_backward_pass(dtype: torch.dtype, packed: bool):
    results = []
    for backward in (lambda *a, **k: cached_backward(*a, **k)[0], plain_backward):
        made = stage()
        engine = PlainEngine(made, dtype)
        torch.manual_seed(5)
        loss = backward(engine, triplets(made, 7, packed=packed), config=CONFIG)
        results.append((loss, gradients(made), torch.rand(3)))
    (cached, found, after), (loss, expected, after_plain) = results
    torch.testing.assert_close(cached, loss)
    torch.testing.assert_close(after, after_plain)  # the second pass left no trace
    assert found.keys() == expected.keys()
    assert "temperature.log" in found
    tolerance = {"atol": 1e-6, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-2}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name, **tolerance)


def test_without_dropout_chunks_do_not_matter():
    results = []
    for config in (CONFIG, GradCache(query_rows=1000, document_rows=1000), None):
        made = stage().eval()
        batch = triplets(made, 7)
        if config:
            engine = PlainEngine(made)
            _, parts = cached_backward(engine, batch, config=config)
            assert engine.lasts == [False] * (len(engine.lasts) - 1) + [True]
        else:
            loss, parts = made(batch)
            loss.backward()
        results.append({**parts, **gradients(made)})
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-5, rtol=1e-4)


def test_a_student_is_cached_too():
    made = stage()
    batch = triplets(made, 7)
    teacher = torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for backward in (lambda *a, **k: cached_backward(*a, **k)[0], plain_backward):
        student = StageTwo(made.towers.query, DistillLosses())
        student.zero_grad()
        torch.manual_seed(5)
        loss = backward(PlainEngine(student), Lesson(batch.queries, teacher), config=CONFIG)
        results.append({"loss": loss, **gradients(student)})
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-4)


class OwnDocuments(Cacheable):
    """A loss of a rank's own rows: ranks may bring different numbers of documents."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = stage().eval().towers

    def inputs(self, batch: Triplets) -> dict[str, batch.Batch | None]:
        return {"query": batch.queries, "document": batch.documents}

    def encode(self, name: str, rows: batch.Batch | None) -> Found:
        return {name: self.towers.encode(name, rows).float()}

    def weighted_losses(self, embeddings: Found, batch: Triplets) -> tuple[Found, Found]:
        documents = embeddings["document"][:, -1].unflatten(0, (2, -1))
        loss = torch.einsum("qd,gqd->q", embeddings["query"][:, 0], documents).square().sum()
        return {"products": loss}, {}


def on_a_rank(counts: tuple[int, ...]) -> tuple[Found, Found, int]:
    """Averaged gradients of a cached step, of a plain one without dropout, and how many chunks were run."""
    rows, found = counts[dist.get_rank()], []
    for cached in (True, False):
        made = OwnDocuments()
        engine, batch = PlainEngine(made), triplets(made, rows)
        if cached:
            cached_backward(engine, batch, config=CONFIG)
            chunks = len(engine.lasts)
        else:
            made(batch)[0].backward()
        found.append(gradients(made))
        for value in found[-1].values():
            dist.all_reduce(value)
    return found[0], found[1], chunks


def test_ranks_with_unequal_rows_run_equally_many_chunks():
    (cached, plain, chunks), (_, _, others) = ranks.run(on_a_rank, (7, 2), world=2)
    assert chunks == others == 3 + 4  # queries and documents, as the larger rank needs
    torch.testing.assert_close(cached, plain, atol=1e-4, rtol=1e-4)  # sums in another order
