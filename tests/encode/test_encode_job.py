"""Encoding on Ray: with readers or without, brought up to date, and when a part fails for a while."""

import itertools
import logging
import os
import re
import signal
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import encode_inputs
import numpy as np
import pyarrow as pa
import pytest
import ray
from encode_inputs import TOO_LONG, dataset

import tiny
from in_process import without_ray
from scalingnote.core.errors import ArtifactError, PartsFailedError
from scalingnote.core.parts import WorkerLostError
from scalingnote.encode import documents, parts
from scalingnote.encode.config import EncodeConfig, Fleet
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.engines import load_document_encoder
from scalingnote.storage import arrow, usage
from scalingnote.storage.artifact import Artifact

CONFIG = EncodeConfig(dtype="float32", resources=Fleet(workers=1))


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return encode_inputs.towers(tmp_path_factory.mktemp("towers") / "towers", encode_inputs.tower())


def read(embeddings: Artifact) -> tuple[list[str], np.ndarray]:
    table = embeddings.table("embeddings")
    return table["doc_id"].to_pylist(), arrow.to_numpy(table["summary"])


def directly(towers: Artifact, rows: list[dict[str, str]]) -> np.ndarray:
    encoder = Encoder.load(towers.directory("document"))
    return arrow.l2_normalize(encoder.encode_documents(pa.Table.from_pylist(rows))["summary"])


def flaky_tower(towers: Artifact, token_budget: int) -> Encoder:
    """Breaks down once, as a node does: with an error that is none of ours."""
    encoder, mark = load_document_encoder(towers, token_budget), Path(towers.uri + "-broke")
    encode, calls = encoder.encode_with_cost, itertools.count()

    def breaks(rows, **options):
        if next(calls) == 1 and not mark.exists():
            mark.touch()
            raise OSError("the network is gone")
        return encode(rows, **options)

    encoder.encode_with_cost = breaks
    return encoder


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    rows = tiny.document_rows(48)
    rows[20]["title"] = TOO_LONG
    return rows


def encodable(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if row["title"] != TOO_LONG]


def test_what_fails_is_tried_again_and_a_base_spares_what_is_the_same(
    towers, rows, tmp_path, monkeypatch, caplog
):
    without_ray(monkeypatch)
    caplog.set_level("INFO", logger="scalingnote")
    source = dataset(tmp_path / "before", rows)
    first = documents.encode_documents(
        CONFIG, source.uri, towers, str(tmp_path / "first"), load_encoder=flaky_tower
    )
    assert Path(towers.uri + "-broke").exists()
    doc_ids, found = read(first)
    assert doc_ids == [row["doc_id"] for row in encodable(rows)]
    np.testing.assert_allclose(found, directly(towers, encodable(rows)), atol=1e-6)
    assert first.table("rejected")["row"].to_pylist() == [rows[20]["doc_id"]]
    made = first.manifest.info["encoding"]
    assert made["tokens"] == first.counts["tokens"]
    assert 0 <= made["padding"] < 1
    assert 0 < made["of_peak"] < 1
    assert made["worker_seconds"] > 0
    assert made["worker_cpu_seconds"] > 0
    told = [record.getMessage() for record in caplog.records]
    (failed,) = [number for number, line in enumerate(told) if "OSError: the network is gone" in line]
    assert "a part failed and is tried again after the others: embeddings/part-" in told[failed]
    (workers,) = [line for line in told if line.startswith("workers: ")]
    assert workers.startswith("workers: 1 encoded 3 parts, loaded in ")
    assert "were busy " in workers

    changed = [{**row, "content": row["content"][:9]} if row["doc_id"] == "d030" else row for row in rows[3:]]
    changed.insert(5, {**rows[0], "doc_id": "new"})
    newer = dataset(tmp_path / "now", changed)
    update = CONFIG.model_copy(update={"base": first.uri})
    brought = documents.encode_documents(update, newer.uri, towers, str(tmp_path / "brought"))
    counts = {name: brought.counts[name] for name in ("added", "changed", "deleted", "copied", "rejected")}
    # The document that could not be read was never encoded: it is new, and set aside again.
    assert counts == {"added": 2, "changed": 1, "deleted": 3, "copied": 43, "rejected": 1}
    doc_ids, found = read(brought)
    assert doc_ids == [row["doc_id"] for row in encodable(changed)]
    np.testing.assert_allclose(found, directly(towers, encodable(changed)), atol=1e-6)
    told = brought.table("changes")["doc_id"].to_pylist()
    assert told == ["d000", "d001", "d002", "d020", "d030", "new"]

    other = CONFIG.model_copy(update={"base": first.uri, "dtype": "float16"})
    with pytest.raises(ArtifactError, match="'dtype': 'float32'"):
        documents.encode_documents(other, newer.uri, towers, str(tmp_path / "refused"))


def test_what_fails_again_and_again_ends_the_run(towers, rows, tmp_path, monkeypatch):
    without_ray(monkeypatch)

    def broken(towers: Artifact, token_budget: int) -> Encoder:
        encoder = load_document_encoder(towers, token_budget)
        encoder.encode_with_cost = lambda rows, top_k: 1 // 0
        return encoder

    source, output = dataset(tmp_path / "source", rows), str(tmp_path / "output")
    with pytest.raises(PartsFailedError, match=r"none of 3 parts .*: (?s:.*)ZeroDivisionError"):
        documents.encode_documents(CONFIG, source.uri, towers, output, load_encoder=broken)


class Numbered:
    """A part of one row, its number; some of them end their process."""

    peak = 0.0

    def __init__(self, folder: str, ends: tuple[int, ...] = ()) -> None:
        self._folder, self._ends = Path(folder), ends

    def __call__(self, name: str, _: None) -> parts.EncodedPart:
        number = int(name)
        with (self._folder / "tried").open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
        if number in self._ends:
            raise WorkerLostError("a crash")
        return parts.EncodedPart(pa.table({"row": [number]}))


def encode_numbers(folder: Path, count: int = 6, *, most: int = 0, **wrong: Any) -> list:
    encoder = partial(Numbered, folder=str(folder), **wrong)
    where = {"output": str(folder / "out"), "work": str(folder / "work")}
    resources = Fleet(workers=1, max_failed_parts=most)
    return parts.encode_parts(
        encoder, rows={str(n): 1 for n in range(count)}, resources=resources, unit="rows", **where
    )


def test_a_part_left_out_is_an_empty_file_with_its_reason(tmp_path, monkeypatch, caplog):
    without_ray(monkeypatch)
    with pytest.raises(PartsFailedError, match=r"1 of 6 parts failed .*: 2: its process was lost \(2 of 2\)"):
        encode_numbers(tmp_path, ends=(2,))
    # What is done stays; and where it may, the run ends well.
    records = encode_numbers(tmp_path, ends=(2,), most=1)
    tried = [int(line) for line in (tmp_path / "tried").read_text().split()]
    assert tried == [0, 1, 2, 3, 4, 5, 2, 2, 2]
    assert [record["part"]["rows"] for record in records] == [1, 1, 0, 1, 1, 1]
    assert "out of memory, or a crash of native code" in records[2]["set_aside"]
    assert "2 is left out: its process was lost (2 of 2)" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_broken_slot_and_a_part_that_kills_hold_up_no_other_part(tmp_path):
    class Faulty:
        """The first process cannot load, nor those that are started in its place; part 3 kills any other."""

        peak = 0.0

        def __init__(self) -> None:
            slot = ray.get_runtime_context().get_actor_id()
            try:
                with (tmp_path / "broken").open("x") as file:
                    file.write(slot)
            except FileExistsError:
                if (tmp_path / "broken").read_text() != slot:
                    return
            with (tmp_path / "loads").open("a") as file:
                file.write("x")
            raise RuntimeError("CUDA error: uncorrectable ECC error")

        def __call__(self, name: str, _: None) -> parts.EncodedPart:
            if name == "3":
                os.kill(os.getpid(), signal.SIGKILL)
            return parts.EncodedPart(pa.table({"row": [int(name)]}))

    where = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    rows, resources = {str(number): 1 for number in range(12)}, Fleet(workers=2, max_failed_parts=1)
    records = parts.encode_parts(Faulty, rows=rows, resources=resources, unit="rows", **where)
    assert [record["part"]["rows"] for record in records] == [1, 1, 1, 0, *[1] * 8]
    assert "its process was lost (2 of 2)" in records[3]["set_aside"]
    assert 1 <= len((tmp_path / "loads").read_text()) <= 6  # and not once for each part


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_part_that_takes_long_is_not_silent(tmp_path, caplog, monkeypatch):
    slow_rows = 25

    class SlowPart:
        """Encodes a part in as many seconds as it has rows, without a word."""

        def __call__(self, _: str, part: None) -> parts.EncodedPart:
            for _ in range(slow_rows):
                time.sleep(1)
                usage.count_rows(1)
            return parts.EncodedPart(pa.table({"row": range(slow_rows)}))

    monkeypatch.setattr(logging.getLogger("scalingnote"), "propagate", True)
    caplog.set_level("INFO", logger="scalingnote")
    where = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    rows, resources = {"part.parquet": slow_rows}, Fleet(workers=1)
    start = time.time()
    parts.encode_parts(SlowPart, rows=rows, resources=resources, unit="rows", **where)
    times = [start, *(record.created for record in caplog.records), time.time()]
    assert max(after - before for before, after in pairwise(times)) <= 10
    shown = [
        int(found[1]) for line in caplog.messages if (found := re.match(rf"(\d+)/{slow_rows} rows", line))
    ]
    assert sorted(shown) == shown
    assert len({rows for rows in shown if 0 < rows < slow_rows}) > 1


@pytest.mark.usefixtures("cluster")
def test_tasks_that_read_ahead_and_write_behind_leave_the_same_artifact(
    towers, rows, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    source = dataset(tmp_path / "source", rows)
    ahead = CONFIG.model_copy(update={"resources": Fleet(workers=1, readers=1)})
    found = documents.encode_documents(ahead, source.uri, towers, str(tmp_path / "ahead"))
    without_ray(monkeypatch)
    alone = documents.encode_documents(CONFIG, source.uri, towers, str(tmp_path / "alone"))
    assert found.digest == alone.digest
