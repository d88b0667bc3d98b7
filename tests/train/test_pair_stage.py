"""Training a cross-encoder: which pairs meet in a step, what they cost, and that ranks agree on it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import stages
import torch
import torch.distributed as dist
from torch import Tensor

import ranks
import tiny
from scalingnote.models import backbone
from scalingnote.models.cross_encoder import CrossEncoder, pair, scores
from scalingnote.storage.artifact import Artifact
from scalingnote.train.config import CrossEncoderLosses, DualPooledConfig, Schedule
from scalingnote.train.cross_encoder import job
from scalingnote.train.cross_encoder.job import as_stage_one
from scalingnote.train.cross_encoder.pairs import PairBatch, PairBatches, PairStage, one_hot
from scalingnote.train.data import Order, Store
from scalingnote.train.prepare import prepare

CONFIG = DualPooledConfig(backbone=tiny.BIDIRECTIONAL, **tiny.CROSS)
Found = dict[str, Tensor]


def made(folder: Path) -> tuple[str, Artifact, Artifact]:
    dataset = tiny.dataset(str(folder / "dataset"), count=24)
    triplets = tiny.triplets(str(folder / "triplets"), dataset)
    prepared = prepare(as_stage_one(CONFIG), dataset=dataset, triplets=triplets, folder=str(folder / "store"))
    return prepared.store, dataset, triplets


def batches(store: str, *, rank: int = 0, world: int = 1, in_batch: int = 3) -> PairBatches:
    found = Store.open(store)
    order = Order(Schedule(global_batch=8), found.facts["sizes"])
    return PairBatches(found, order, pad=0, in_batch=in_batch, rank=rank, world=world)


def stage(store: str, losses: CrossEncoderLosses, temperature: float | None = None) -> PairStage:
    learnt = (Path(store) / "tokenizers.json").read_text()
    base = backbone.build(tiny.BIDIRECTIONAL, tokenizer_json=json.loads(learnt)["query"], seed=0)
    model = CrossEncoder(
        base,
        pooling="segments",
        dim=8,
        reconstruct=losses.reconstruction > 0,
        template=job.TEMPLATE,
        **tiny.CROSS,
    )
    return PairStage(model, losses, temperature=temperature)


def step(store: str, *, rank: int = 0, world: int = 1) -> Found:
    module = stage(store, CrossEncoderLosses(reconstruction=0.5))
    return stages.step(module, batches(store, rank=rank, world=world)(0))


def one_of_two(store: str) -> Found:
    return step(store, rank=dist.get_rank(), world=2)


def test_a_step_pairs_queries_with_own_and_other_documents(tmp_path: Path):
    store, _, triplets = made(tmp_path)
    batch = batches(store)(0)
    module = stage(store, CrossEncoderLosses())
    texts = {row["doc_id"]: row for row in tiny.document_rows(24)}
    prompts = module.model.query_prompt, module.model.document_prompt
    rows = {row["query"]: row for row in triplets.table("triplets").to_pylist()}
    asked = {tuple(prompts[0].rows([query])[0].ids): row for query, row in rows.items()}
    read = {
        doc_id: prompts[1].rows([row["title"]], [row["topic"]], [row["content"]])[0]
        for doc_id, row in texts.items()
    }
    group, size = 2 + 3, len(batch.weights)
    assert len(batch.pairs) == group * size
    ids, lengths = batch.pairs.flat()
    lines = [line.tolist() for line in ids.split(lengths.tolist())]
    cut = batch.pairs.positions[:, 1].tolist()
    found = [asked[tuple(line[: at + 1])] for line, at in zip(lines[:size], cut, strict=False)]
    for i, row in enumerate(found):
        others = [found[(i + shift) % size]["positive"] for shift in (1, 2, 3)]
        expected = [row["positive"], *row["negatives"], *others]
        query = prompts[0].rows([row["query"]])[0]
        for column, doc_id in enumerate(expected):
            assert lines[column * size + i] == pair(query, read[doc_id]).ids
            # A positive of another row is a negative of this one, unless it is this one's.
            assert bool(batch.answers[i, column]) == (column > 0 and doc_id == row["positive"])


def test_the_loss_is_a_softmax_over_candidates_that_do_not_answer():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, generator=generator)
    answers = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()
    weights = torch.tensor([1.0, 2.0, 5.0])
    expected = 0.0
    for row, hidden, weight in zip(logits.tolist(), answers.tolist(), weights.tolist(), strict=True):
        kept = [math.exp(value) for value, out in zip(row, hidden, strict=True) if not out]
        expected -= weight * math.log(kept[0] / sum(kept)) / 3
    assert one_hot(logits, answers, weights=weights).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("temperature", [None, 0.1], ids=["product", "cosine"])
def test_parts_add_up_and_a_teacher_is_heard(tmp_path: Path, temperature: float | None):
    store, *_ = made(tmp_path)
    losses = CrossEncoderLosses(one_hot=0.5, teacher=2.0, reconstruction=0.25)
    module, batch = stage(store, losses, temperature), batches(store)(0)
    given = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    loss, parts = module(PairBatch(batch.pairs, batch.weights, batch.answers, batch.present, given))
    expected = 0.5 * parts["one_hot"] + 2.0 * parts["teacher"] + 0.25 * parts["reconstruction"]
    torch.testing.assert_close(loss.detach(), expected)
    query, document = module.model.proxies(batch.pairs)
    of_pairs = (
        scores(query, document)
        if temperature is None
        else torch.cosine_similarity(query, document) / temperature
    )
    logits = of_pairs.unflatten(0, (-1, 8)).T[:, :2].detach()
    target = given.log_softmax(1)
    divergence = (target.exp() * (target - logits.log_softmax(1))).sum(1).mean()
    torch.testing.assert_close(parts["teacher"], divergence, rtol=1e-4, atol=1e-6)


def test_a_row_without_a_hard_negative_costs_what_its_own_pairs_cost(tmp_path: Path):
    store, *_ = made(tmp_path)
    module, batch = stage(store, CrossEncoderLosses(teacher=2.0, reconstruction=0.25)), batches(store)(0)
    draw = torch.Generator().manual_seed(0)
    pairs, given = torch.randn(40, 1, 17, generator=draw), torch.randn(8, 2, generator=draw)
    present = batch.present.clone()
    assert present.all()
    present[[1, 4], 1] = False
    short = replace(batch, present=present, scores=given.masked_fill(~present[:, :2], torch.nan))
    expected = dict.fromkeys(("one_hot", "teacher", "reconstruction"), 0.0)
    for i in range(8):
        rows = {column: pairs[column * 8 + i, 0].double() for column in range(5) if present[i, column]}
        logits = {c: float(row[:8] @ row[8:16]) / 8**0.5 for c, row in rows.items()}
        allowed = [math.exp(logit) for c, logit in logits.items() if not batch.answers[i, c]]
        weight = batch.weights[i].item()
        expected["one_hot"] -= weight * (logits[0] - math.log(sum(allowed))) / 8
        own = [c for c in (0, 1) if c in rows]
        target, mine = (
            torch.tensor([side[c] for c in own], dtype=torch.float64).log_softmax(0)
            for side in (given[i].tolist(), logits)
        )
        expected["teacher"] += weight * float((target.exp() * (target - mine)).sum()) / 8
        expected["reconstruction"] += sum(float(row[16]) for row in rows.values()) / len(rows) / 8
    for stand_in in (0.0, 50.0):
        pairs[[9, 12]] = stand_in
        _, parts = module.losses(short, lambda name, rows: {name: pairs})
        for name, value in expected.items():
            assert parts[name].item() == pytest.approx(value, rel=1e-4), name


def test_two_ranks_learn_what_one_process_with_all_rows_would(tmp_path: Path):
    store, *_ = made(tmp_path)
    expected = step(store)
    for found in ranks.run(one_of_two, store, world=2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=name)


def test_queries_are_read_beside_their_first_positive():
    triplets = pa.table(
        {
            "query_id": ["b", "a", "b", "v"],
            "query": ["about b", "about a", "about b", "held out"],
            "split": ["train", "train", "train", "validation"],
            "positive": ["d1", "d2", "d3", "d4"],
        }
    )
    generated = pa.table(
        {
            "query_id": ["a~0", "v~0", "x~0"],
            "query": ["near a", "near v", "near x"],
            "source_query_id": ["a", "v", "without triplets"],
        }
    )
    found = job.distinct_queries(triplets, generated).to_pylist()
    assert [(row["query_id"], row["split"], row["positive"]) for row in found] == [
        ("b", "train", "d1"),
        ("a", "train", "d2"),
        ("v", "validation", "d4"),
        ("a~0", "train", "d2"),
        ("x~0", "train", None),
    ]
    assert job.distinct_queries(triplets, None).num_rows == 3
