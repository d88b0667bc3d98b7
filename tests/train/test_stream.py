"""Rows written in the order of a run: the same batches as from a mapped store, with a share of its bytes."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from stages import mapped_batches

import ranks
import tiny
from in_process import without_ray
from scalingnote.core.errors import TrainingError
from scalingnote.models import dual_encoder
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import open_artifact
from scalingnote.train import job, stream
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import (
    Batching,
    DataAccess,
    Losses,
    Optimizer,
    Ranks,
    Schedule,
    TrainConfig,
    Validation,
)
from scalingnote.train.data import Order, Store, StoredFile
from scalingnote.train.engine import rank, world_size
from scalingnote.train.loop import TrainingLoop
from scalingnote.train.objective import StageOne, TripletBatches, Triplets
from scalingnote.train.prepare import PreparedStore, prepare
from scalingnote.train.strategies import build
from scalingnote.train.stream import ChunkLayout, StreamedShares, read_pool, write_stream
from scalingnote.train.validation import draw_sample, drawn_documents

BATCH, STEPS = 12, 23
CONFIG = TrainConfig(
    query=tiny.query_tower(),
    document=tiny.document_tower(),
    dim=8,
    losses=Losses(matryoshka=(8,)),
    global_batch=BATCH,
    validation=Validation(queries=6, documents=40),
)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("parents")
    dataset = tiny.dataset(str(folder / "dataset"), rows_per_part=9)
    return {"dataset": dataset.uri, "triplets": tiny.triplets(str(folder / "triplets"), dataset).uri}


def order(sizes: dict[str, int], **batching) -> Order:
    schedule = Schedule(global_batch=BATCH, seed=3, epochs=99, max_steps=STEPS)
    return Order(schedule, sizes, Batching(**batching))


@pytest.fixture(params=[{}, {"sources": "homogeneous"}], ids=["mixed", "homogeneous"])
def streamed(
    request, parents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Order, dict]:
    """Write a store with its stream, in chunks of 5 steps and in pieces of a few rows."""
    monkeypatch.setattr(stream, "CHUNK_ROWS", 5 * BATCH)
    monkeypatch.setattr(stream, "_PIECE_ROWS", 50)
    monkeypatch.setattr(shuffle, "ROWS_PER_SLICE", 64)
    opened = {name: open_artifact(uri, kind=name) for name, uri in parents.items()}
    prepared = prepare(CONFIG, **opened, folder=str(tmp_path / "store"))
    run_order = order(prepared.sizes, **request.param)
    assert len(Store.files(prepared.store, "documents")) > 1
    pool = drawn_documents(Store.open(prepared.store, ["validation"]), CONFIG.validation, seed=0)
    totals = write_stream(prepared.store, run_order, batch=BATCH, pool=pool)
    return prepared.store, run_order, totals


def batches(store: str, run_order: Order | None, *, rank: int = 0, world: int = 1) -> TripletBatches:
    if run_order:
        return mapped_batches(store, run_order, rank=rank, world=world, steps=STEPS)
    shares = StreamedShares(store, rank=rank, world=world)
    return TripletBatches(shares, Store.facts_of(store), pads=(0, 0), steps=STEPS)


def contents(batch: Triplets) -> list[str]:
    """Return the content of each row, independent of the order of rows, and without padding."""
    size = len(batch.query_ids)
    token_lists = [
        [part.tolist() for part in ids.split(lengths.tolist())]
        for ids, lengths in (side.flat() for side in (batch.queries, batch.documents))
    ]
    places = batch.documents.positions.tolist()
    columns = (batch.query_ids, batch.queries.positions, batch.known_positives, batch.weights)
    return sorted(
        str([*(column[row].tolist() for column in columns), token_lists[0][row]])
        + str([batch.document_ids[row::size].tolist(), token_lists[1][row::size], places[row::size]])
        for row in range(size)
    )


def test_streamed_steps_have_the_rows_of_mapped_steps(streamed):
    store, run_order, totals = streamed
    mapped = batches(store, run_order)
    # The number of ranks changes during the run, as when nodes leave and join; each group of ranks starts
    # anew.
    for first, world in ((0, 4), (3, 2), (9, 1), (11, 6), (12, 3), (20, 12)):
        ranks = [batches(store, None, rank=rank, world=world) for rank in range(world)]
        for step in range(first, min(first + 4, STEPS)):
            shares = [contents(rank(step)) for rank in ranks]
            assert {len(share) for share in shares} == {BATCH // world}
            assert sorted(chain(*shares)) == contents(mapped(step))
    assert totals["document_tokens"] == sum(mapped(step).documents.ids.numel() for step in range(STEPS))
    assert totals["query_tokens"] == sum(mapped(step).queries.ids.numel() for step in range(STEPS))


@pytest.mark.parametrize("world", [1, 2, 4, 12])
def test_a_rank_reads_its_share_of_bytes_and_holds_two_chunks(streamed, world: int, monkeypatch):
    store, _, totals = streamed
    bytes_read = 0

    def counting(uri: str, start: int, size: int) -> bytes:
        nonlocal bytes_read
        bytes_read += size
        return read_range(uri, start, size)

    read_range = fs.read_range
    monkeypatch.setattr(stream.fs, "read_range", counting)
    monkeypatch.setattr(stream, "read_table", None)  # no file is read completely
    amounts = []
    for number in range(world):
        bytes_read, shares = 0, StreamedShares(store, rank=number, world=world)
        for step in range(STEPS):
            shares(step)
            assert len(shares._held) <= 2
        shares._ahead.shutdown()
        amounts.append(bytes_read)
    # The bounds of neighbouring ranks overlap by one offset in each chunk.
    assert sum(amounts) == totals["bytes"] + 8 * (world - 1) * ChunkLayout(STEPS, BATCH, 5, 12).chunks
    assert max(amounts) < 1.25 * totals["bytes"] / world


def test_ranks_that_share_a_cell_of_several_lanes_both_read_it(streamed, monkeypatch):
    store, run_order, _ = streamed
    fs.delete(fs.join(store, "stream"))
    monkeypatch.setattr(stream, "MAX_CELLS", 4)
    write_stream(store, run_order, batch=BATCH, pool=np.empty(0, np.int64))
    mapped = batches(store, run_order)
    for world in (2, 6):
        ranks = [batches(store, None, rank=rank, world=world) for rank in range(world)]
        for step in (0, 7, STEPS - 1):
            assert sorted(chain(*(contents(rank(step)) for rank in ranks))) == contents(mapped(step))


def test_the_validation_sample_is_the_same_without_the_store(streamed):
    store, *_ = streamed
    mapped_sample = draw_sample(Store.open(store), CONFIG.validation, seed=0)
    pool = read_pool(store)
    streamed_sample = draw_sample(Store.open(store, ["validation"]), CONFIG.validation, seed=0, pool=pool)
    assert mapped_sample is not None
    assert streamed_sample is not None
    assert (streamed_sample.pool, streamed_sample.queries) == (mapped_sample.pool, mapped_sample.queries)
    for name in ("positives", "relevant", "negatives"):
        np.testing.assert_array_equal(getattr(streamed_sample, name), getattr(mapped_sample, name))


def test_a_killed_shuffle_resumes_and_writes_equal_files(streamed, monkeypatch):
    store, run_order, _ = streamed
    folder = fs.join(store, "stream")
    expected = {
        name: fs.read_bytes(fs.join(folder, name)) for name in fs.list_files(folder) if "chunks" in name
    }
    fs.delete(folder)
    tasks = 0

    def killed(work, items):
        nonlocal tasks
        for item in items:
            tasks += 1
            if tasks == 9:
                raise TrainingError("killed")
            yield work(item)

    pool = np.array([3, 1], np.int64)
    with pytest.raises(TrainingError, match="killed"):
        write_stream(store, run_order, batch=BATCH, pool=pool, each=killed)
    write_stream(store, run_order, batch=BATCH, pool=pool)
    assert {name: fs.read_bytes(fs.join(folder, name)) for name in expected} == expected
    assert {name.split("/")[0] for name in fs.list_files(folder)} == {
        "chunks", "done", stream.INDEX_FILE, stream.POOL_FILE,
    }  # fmt: skip


def test_a_streamed_run_has_the_losses_of_a_mapped_one(parents, tmp_path: Path, monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(stream, "CHUNK_ROWS", 3 * BATCH)
    results = {}
    for mode, limit in (("always", 0.0), ("never", 32.0)):
        config = CONFIG.model_copy(
            update={
                "data": DataAccess(copy_limit_gb=limit),
                "epochs": 2.0,
                "optimizer": Optimizer(peak_lr=1e-2),
                "resources": Ranks(workers=0),
            }
        )
        torch.manual_seed(0)
        towers = job.run(config, **parents, output=str(tmp_path / mode))
        results[mode] = towers.counts, towers.read_json("curve.json"), towers.read_json("validation.json")
    (counts, curve, validation), (_, expected, mapped_validation) = results["always"], results["never"]
    assert len(curve) > 2
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(
            [point[name] for point in curve], [point[name] for point in expected], rtol=2e-3, atol=1e-4
        )
    assert validation[-1]["contrastive_entropy"] == pytest.approx(
        mapped_validation[-1]["contrastive_entropy"], rel=1e-2
    )
    assert counts["document_tokens"] == pytest.approx(results["never"][0]["document_tokens"], rel=0.1)


def test_a_streamed_run_needs_no_validation(parents, tmp_path: Path, monkeypatch):
    without_ray(monkeypatch)
    changes = {"data": DataAccess(copy_limit_gb=0), "epochs": 0.2, "validation": None}
    config = CONFIG.model_copy(update=changes | {"resources": Ranks(workers=0)})
    assert job.run(config, **parents, output=str(tmp_path / "run")).counts["steps"] == 1


@pytest.mark.parametrize(
    ("store", "gb", "limit", "streamed"),
    [
        ("s3://bucket/store", 40, 32, True),
        ("s3://bucket/store", 20, 32, False),
        ("/shared/disk/store", 40, 32, False),
        ("/shared/disk/store", 1, 0, True),
    ],
)
def test_a_stream_is_written_for_a_large_remote_store(
    store: str, gb: int, limit: float, streamed: bool, monkeypatch: pytest.MonkeyPatch
):
    totals = {"query_tokens": 100, "document_tokens": 2000, "bytes": 1}
    monkeypatch.setattr(job, "write_stream", lambda *_, **__: totals)
    monkeypatch.setattr(Store, "files", staticmethod(lambda *_: [StoredFile("a", 1, gb * 10**9 // 2)]))
    changes = {"data": DataAccess(copy_limit_gb=limit), "validation": None, "max_steps": 2}
    config = CONFIG.model_copy(update=changes)
    prepared = PreparedStore(store, {}, {"click/one": 5 * BATCH}, 10, 3)
    means = job._stream(config, prepared, Order(config, prepared.sizes))
    assert means == ((100 / 24, 2000 / 24) if streamed else None)


def train_until(store: str, folder: str, until: int) -> list[dict]:
    """Train on the current ranks from the newest checkpoint to step `until`; return the loss curve."""
    towers = dual_encoder.build(
        CONFIG.query, CONFIG.document, dim=8, seed=0,
        tokenizers=json.loads(fs.read_bytes(fs.join(store, "tokenizers.json"))),
    )  # fmt: skip
    schedule = Schedule(
        optimizer=Optimizer(peak_lr=1e-2), precision="float32", checkpoint_every=4, global_batch=BATCH
    )
    source = batches(store, None, rank=rank(), world=world_size())

    def batch_at(step: int) -> Triplets:
        if step >= until:
            raise InterruptedError
        return source(step)

    checkpoints = Checkpoints(folder)
    engine = build(StageOne(towers, CONFIG.losses), schedule=schedule, device=torch.device("cpu"))
    try:
        return TrainingLoop(engine, schedule, checkpoints, section="test", steps=STEPS).fit(batch_at).curve
    except InterruptedError:
        checkpoints.wait()
        return []


@pytest.mark.parametrize("streamed", [{}], indirect=True)
def test_leaving_and_joining_ranks_do_not_change_losses(streamed, tmp_path: Path):
    store, *_ = streamed
    expected = train_until(store, str(tmp_path / "whole"), STEPS)
    interrupted = str(tmp_path / "cut")
    assert ranks.run(train_until, store, interrupted, 9, world=2) == [[], []]
    assert train_until(store, interrupted, 14) == []
    first, *others = ranks.run(train_until, store, interrupted, STEPS, world=3)
    assert others == [first, first]
    assert [point["step"] for point in first] == [point["step"] for point in expected]
    np.testing.assert_allclose(
        [point["loss"] for point in first], [point["loss"] for point in expected], rtol=1e-3
    )


@pytest.mark.parametrize(("batch", "cells"), [(480, 480), (40_000, 1000), (128, 128), (2, 2), (1031, 1)])
def test_chunks_are_bounded_and_cells_divide_the_batch(batch: int, cells: int):
    layout = ChunkLayout.of(10_000_000, batch)
    assert layout.cells == cells
    assert batch % layout.cells == 0
    assert layout.chunks <= stream.MAX_CHUNKS + 1 or layout.chunk_steps == 1
    assert sorted(layout.lanes().tolist()) == list(range(batch))
