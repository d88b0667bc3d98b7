"""Rows written in the order of a run: the same batches as from a mapped store, by a share of its bytes."""

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
def made(
    request, parents: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Order, dict]:
    """A store with its stream, in chunks of 5 steps and in pieces of a few rows."""
    monkeypatch.setattr(stream, "CHUNK_ROWS", 5 * BATCH)
    monkeypatch.setattr(stream, "_PIECE_ROWS", 50)
    monkeypatch.setattr(shuffle, "ROWS_PER_SLICE", 64)
    opened = {name: open_artifact(uri, kind=name) for name, uri in parents.items()}
    prepared = prepare(CONFIG, **opened, folder=str(tmp_path / "store"))
    drawn = order(prepared.sizes, **request.param)
    assert len(Store.files(prepared.store, "documents")) > 1
    pool = drawn_documents(Store.open(prepared.store, ["validation"]), CONFIG.validation, seed=0)
    totals = write_stream(prepared.store, drawn, batch=BATCH, pool=pool)
    return prepared.store, drawn, totals


def batches(store: str, drawn: Order | None, *, rank: int = 0, world: int = 1) -> TripletBatches:
    if drawn:
        return mapped_batches(store, drawn, rank=rank, world=world, steps=STEPS)
    shares = StreamedShares(store, rank=rank, world=world)
    return TripletBatches(shares, Store.facts_of(store), pads=(0, 0), steps=STEPS)


def contents(batch: Triplets) -> list[str]:
    """What each row holds, whatever the order of rows, and without padding."""
    size = len(batch.query_ids)
    read = [
        [part.tolist() for part in ids.split(lengths.tolist())]
        for ids, lengths in (side.flat() for side in (batch.queries, batch.documents))
    ]
    places = batch.documents.positions.tolist()
    columns = (batch.query_ids, batch.queries.positions, batch.known_positives, batch.weights)
    return sorted(
        str([*(column[row].tolist() for column in columns), read[0][row]])
        + str([batch.document_ids[row::size].tolist(), read[1][row::size], places[row::size]])
        for row in range(size)
    )


def test_steps_have_the_rows_of_the_mapped_store_for_any_ranks(made):
    store, drawn, totals = made
    mapped = batches(store, drawn)
    # Ranks change while the run goes on, as when nodes leave and join; each group of ranks starts anew.
    for first, world in ((0, 4), (3, 2), (9, 1), (11, 6), (12, 3), (20, 12)):
        ranks = [batches(store, None, rank=rank, world=world) for rank in range(world)]
        for step in range(first, min(first + 4, STEPS)):
            shares = [contents(rank(step)) for rank in ranks]
            assert {len(share) for share in shares} == {BATCH // world}
            assert sorted(chain(*shares)) == contents(mapped(step))
    assert totals["document_tokens"] == sum(mapped(step).documents.ids.numel() for step in range(STEPS))
    assert totals["query_tokens"] == sum(mapped(step).queries.ids.numel() for step in range(STEPS))


@pytest.mark.parametrize("world", [1, 2, 4, 12])
def test_a_rank_reads_its_share_of_the_bytes_and_holds_two_chunks(made, world: int, monkeypatch):
    store, _, totals = made
    read = 0

    def counted(uri: str, start: int, size: int) -> bytes:
        nonlocal read
        read += size
        return plain(uri, start, size)

    plain = fs.read_range
    monkeypatch.setattr(stream.fs, "read_range", counted)
    monkeypatch.setattr(stream, "read_table", None)  # no file is read as a whole
    amounts = []
    for number in range(world):
        read, own = 0, StreamedShares(store, rank=number, world=world)
        for step in range(STEPS):
            own(step)
            assert len(own._held) <= 2
        own._ahead.shutdown()
        amounts.append(read)
    # Bounds of neighbouring ranks overlap by one offset of each chunk.
    assert sum(amounts) == totals["bytes"] + 8 * (world - 1) * ChunkLayout(STEPS, BATCH, 5, 12).chunks
    assert max(amounts) < 1.25 * totals["bytes"] / world


def test_cells_of_several_lanes_are_read_by_the_ranks_that_share_them(made, monkeypatch):
    store, drawn, _ = made
    fs.delete(fs.join(store, "stream"))
    monkeypatch.setattr(stream, "MAX_CELLS", 4)
    write_stream(store, drawn, batch=BATCH, pool=np.empty(0, np.int64))
    mapped = batches(store, drawn)
    for world in (2, 6):
        ranks = [batches(store, None, rank=rank, world=world) for rank in range(world)]
        for step in (0, 7, STEPS - 1):
            assert sorted(chain(*(contents(rank(step)) for rank in ranks))) == contents(mapped(step))


def test_the_sample_of_validation_is_the_same_without_the_store(made):
    store, *_ = made
    mapped = draw_sample(Store.open(store), CONFIG.validation, seed=0)
    pool = read_pool(store)
    found = draw_sample(Store.open(store, ["validation"]), CONFIG.validation, seed=0, pool=pool)
    assert mapped is not None
    assert found is not None
    assert (found.pool, found.queries) == (mapped.pool, mapped.queries)
    for name in ("positives", "relevant", "negatives"):
        np.testing.assert_array_equal(getattr(found, name), getattr(mapped, name))


def test_a_killed_shuffle_goes_on_and_gives_the_same_files(made, monkeypatch):
    store, drawn, _ = made
    folder = fs.join(store, "stream")
    whole = {name: fs.read_bytes(fs.join(folder, name)) for name in fs.list_files(folder) if "chunks" in name}
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
        write_stream(store, drawn, batch=BATCH, pool=pool, each=killed)
    write_stream(store, drawn, batch=BATCH, pool=pool)
    assert {name: fs.read_bytes(fs.join(folder, name)) for name in whole} == whole
    assert {name.split("/")[0] for name in fs.list_files(folder)} == {
        "chunks", "done", stream.INDEX_FILE, stream.POOL_FILE,
    }  # fmt: skip


def test_a_streamed_run_learns_what_a_mapped_one_does(parents, tmp_path: Path, monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(stream, "CHUNK_ROWS", 3 * BATCH)
    found = {}
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
        made = job.run(config, **parents, output=str(tmp_path / mode))
        found[mode] = made.counts, made.read_json("curve.json"), made.read_json("validation.json")
    (counts, curve, validation), (_, expected, measured) = found["always"], found["never"]
    assert len(curve) > 2
    for name in ("loss", "gradient_norm"):
        np.testing.assert_allclose(
            [at[name] for at in curve], [at[name] for at in expected], rtol=2e-3, atol=1e-4
        )
    assert validation[-1]["contrastive_entropy"] == pytest.approx(
        measured[-1]["contrastive_entropy"], rel=1e-2
    )
    assert counts["document_tokens"] == pytest.approx(found["never"][0]["document_tokens"], rel=0.1)


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
def test_a_stream_is_written_where_every_node_would_copy_much(
    store: str, gb: int, limit: float, streamed: bool, monkeypatch: pytest.MonkeyPatch
):
    totals = {"query_tokens": 100, "document_tokens": 2000, "bytes": 1}
    monkeypatch.setattr(job, "write_stream", lambda *_, **__: totals)
    monkeypatch.setattr(Store, "files", staticmethod(lambda *_: [StoredFile("a", 1, gb * 10**9 // 2)]))
    changes = {"data": DataAccess(copy_limit_gb=limit), "validation": None, "max_steps": 2}
    config = CONFIG.model_copy(update=changes)
    prepared = PreparedStore(store, {}, {"click/one": 5 * BATCH}, 10, 3)
    found = job._stream(config, prepared, Order(config, prepared.sizes))
    assert found == ((100 / 24, 2000 / 24) if streamed else None)


def trained(store: str, checkpoints: str, until: int) -> list[dict]:
    """The loss curve of a run on the ranks that there are, from its newest checkpoint to step `until`."""
    towers = dual_encoder.build(
        CONFIG.query, CONFIG.document, dim=8, seed=0, share_base=False,
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

    saved = Checkpoints(checkpoints)
    engine = build(StageOne(towers, CONFIG.losses), schedule=schedule, device=torch.device("cpu"))
    try:
        return TrainingLoop(engine, schedule, saved, section="test", steps=STEPS).fit(batch_at).curve
    except InterruptedError:
        saved.wait()
        return []


@pytest.mark.parametrize("made", [{}], indirect=True)
def test_ranks_that_leave_and_join_change_no_loss(made, tmp_path: Path):
    store, *_ = made
    whole = trained(store, str(tmp_path / "whole"), STEPS)
    cut = str(tmp_path / "cut")
    assert ranks.run(trained, store, cut, 9, world=2) == [[], []]
    assert trained(store, cut, 14) == []
    first, *others = ranks.run(trained, store, cut, STEPS, world=3)
    assert others == [first, first]
    assert [at["step"] for at in first] == [at["step"] for at in whole]
    np.testing.assert_allclose([at["loss"] for at in first], [at["loss"] for at in whole], rtol=1e-3)


@pytest.mark.parametrize(("batch", "cells"), [(480, 480), (40_000, 1000), (128, 128), (2, 2), (1031, 1)])
def test_chunks_are_bounded_and_cells_divide_the_batch(batch: int, cells: int):
    layout = ChunkLayout.of(10_000_000, batch)
    assert layout.cells == cells
    assert batch % layout.cells == 0
    assert layout.chunks <= stream.MAX_CHUNKS + 1 or layout.chunk_steps == 1
    assert sorted(layout.lanes().tolist()) == list(range(batch))
