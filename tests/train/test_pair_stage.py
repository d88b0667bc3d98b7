"""Training a cross-encoder: the pairs of a step, their losses, and equal results on several ranks."""

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
from scalingnote.models.cross_encoder import CrossEncoder, pair
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.train.config import CrossEncoderLosses, DualPooledConfig, Schedule
from scalingnote.train.cross_encoder import job
from scalingnote.train.cross_encoder.job import as_stage_one
from scalingnote.train.cross_encoder.pairs import PairBatches, PairStage
from scalingnote.train.data import Order, Store
from scalingnote.train.prepare import prepare

CONFIG = DualPooledConfig(backbone=tiny.BIDIRECTIONAL, **tiny.CROSS)
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def triplets(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("parents")
    return tiny.triplets(str(folder / "triplets"), tiny.dataset(str(folder / "dataset"), count=24))


@pytest.fixture(scope="module")
def store_folder(triplets: Artifact, tmp_path_factory: pytest.TempPathFactory) -> str:
    dataset = open_artifact(triplets.manifest.parents["dataset"]["uri"], kind="dataset")
    folder = str(tmp_path_factory.mktemp("store"))
    return prepare(as_stage_one(CONFIG), dataset=dataset, triplets=triplets, folder=folder).store


def batches(store: str, *, rank: int = 0, world: int = 1, in_batch: int = 3) -> PairBatches:
    opened = Store.open(store)
    order = Order(Schedule(global_batch=8), opened.facts["sizes"])
    return PairBatches(opened, order, pad=0, in_batch=in_batch, rank=rank, world=world)


def stage(store: str, losses: CrossEncoderLosses, temperature: float | None = None) -> PairStage:
    tokenizers = (Path(store) / "tokenizers.json").read_text()
    base = backbone.build(tiny.BIDIRECTIONAL, tokenizer_json=json.loads(tokenizers)["query"], seed=0)
    model = CrossEncoder(
        base,
        pooling="segments",
        dim=8,
        reconstruct=losses.reconstruction > 0,
        template=job.TEMPLATE,
        **tiny.CROSS,
    )
    return PairStage(model, losses, temperature=temperature)


def step(store: str, *, rank: int = 0, world: int = 1) -> Tensors:
    module = stage(store, CrossEncoderLosses(reconstruction=0.5))
    return stages.step(module, batches(store, rank=rank, world=world)(0))


def one_of_two(store: str) -> Tensors:
    return step(store, rank=dist.get_rank(), world=2)


def test_a_step_pairs_queries_with_their_and_other_documents(store_folder: str, triplets: Artifact):
    batch = batches(store_folder)(0)
    module = stage(store_folder, CrossEncoderLosses())
    texts = {row["doc_id"]: row for row in tiny.document_rows(24)}
    prompts = module.model.query_prompt, module.model.document_prompt
    rows = {row["query"]: row for row in triplets.table("triplets").to_pylist()}
    row_of_query = {tuple(prompts[0].rows([query])[0].ids): row for query, row in rows.items()}
    document_rows = {
        doc_id: prompts[1].rows([row["title"]], [row["topic"]], [row["content"]])[0]
        for doc_id, row in texts.items()
    }
    group, size = 2 + 3, len(batch.weights)
    assert len(batch.pairs) == group * size
    ids, lengths = batch.pairs.flat()
    lines = [line.tolist() for line in ids.split(lengths.tolist())]
    query_ends = batch.pairs.positions[:, 1].tolist()
    batch_rows = [
        row_of_query[tuple(line[: end + 1])] for line, end in zip(lines[:size], query_ends, strict=False)
    ]
    for i, row in enumerate(batch_rows):
        others = [batch_rows[(i + shift) % size]["positive"] for shift in (1, 2, 3)]
        expected = [row["positive"], *row["negatives"], *others]
        query = prompts[0].rows([row["query"]])[0]
        for column, doc_id in enumerate(expected):
            assert lines[column * size + i] == pair(query, document_rows[doc_id]).ids
            # The positive of another row is a negative of this row, unless it is also this row's positive.
            assert bool(batch.answers[i, column]) == (column > 0 and doc_id == row["positive"])


@pytest.mark.parametrize("temperature", [None, 0.1], ids=["product", "cosine"])
@pytest.mark.parametrize("absent", [[], [1, 4]], ids=["whole", "short"])
def test_the_loss_of_a_row_comes_only_from_its_own_pairs(
    store_folder: str, temperature: float | None, absent: list[int]
):
    losses = CrossEncoderLosses(one_hot=0.5, teacher=2.0, reconstruction=0.25)
    module, batch = stage(store_folder, losses, temperature), batches(store_folder)(0)
    draw = torch.Generator().manual_seed(0)
    pairs, teacher_scores = torch.randn(40, 1, 17, generator=draw), torch.randn(8, 2, generator=draw)
    present = batch.present.clone()
    assert present.all()
    present[absent, 1] = False  # rows without a hard negative
    short = replace(batch, present=present, scores=teacher_scores.masked_fill(~present[:, :2], torch.nan))
    expected = dict.fromkeys(("one_hot", "teacher", "reconstruction"), 0.0)
    for i in range(8):
        rows = {column: pairs[column * 8 + i, 0].double() for column in range(5) if present[i, column]}
        logits = {column: logit(row[:8], row[8:16], temperature) for column, row in rows.items()}
        candidates = [math.exp(value) for c, value in logits.items() if not batch.answers[i, c]]
        weight = batch.weights[i].item()
        expected["one_hot"] -= weight * (logits[0] - math.log(sum(candidates))) / 8
        scored_columns = [c for c in (0, 1) if c in rows]
        target, student = (
            torch.tensor([side[c] for c in scored_columns], dtype=torch.float64).log_softmax(0)
            for side in (teacher_scores[i].tolist(), logits)
        )
        expected["teacher"] += weight * float((target.exp() * (target - student)).sum()) / 8
        expected["reconstruction"] += sum(float(row[16]) for row in rows.values()) / len(rows) / 8
    for content in (0.0, 50.0):
        pairs[[8 + row for row in absent]] = content
        weighted, parts = module.losses(short, lambda name, rows: {name: pairs})
        for name, value in expected.items():
            assert parts[name].item() == pytest.approx(value, rel=1e-4), name
            assert weighted[name].item() == pytest.approx(getattr(losses, name) * value, rel=1e-4), name


def logit(query: Tensor, document: Tensor, temperature: float | None) -> float:
    if temperature is None:
        return float(query @ document) / 8**0.5
    return float(torch.cosine_similarity(query, document, dim=0)) / temperature


def test_two_ranks_have_the_gradients_of_one_process(store_folder: str):
    expected = step(store_folder)
    for results in ranks.run(one_of_two, store_folder, world=2):
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=2e-4, atol=2e-5, msg=name)


def test_queries_are_read_with_their_first_positive():
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
    rows = job.distinct_queries(triplets, generated).to_pylist()
    assert [(row["query_id"], row["split"], row["positive"]) for row in rows] == [
        ("b", "train", "d1"),
        ("a", "train", "d2"),
        ("v", "validation", "d4"),
        ("a~0", "train", "d2"),
        ("x~0", "train", None),
    ]
    assert job.distinct_queries(triplets, None).num_rows == 3
