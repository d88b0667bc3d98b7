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

import numpy as np
import pyarrow as pa
import pytest
from ray.data.exceptions import ExecutionTimeoutError

import tiny
from in_process import without_ray
from scalingnote import cluster as cluster_of
from scalingnote.encode import documents, failures, parts
from scalingnote.encode.config import EncodeConfig, Fleet
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.engines import load_document_encoder
from scalingnote.errors import ArtifactError, ConfigError, EncodingError
from scalingnote.models import backbone, dual_encoder
from scalingnote.storage import arrow, schema, usage
from scalingnote.storage.artifact import Artifact, Draft

CONFIG = EncodeConfig(dtype="float32", resources=Fleet(workers=1))
TOO_LONG = "word " * 200


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    draft = Draft(
        str(tmp_path_factory.mktemp("towers") / "towers"),
        kind="dual_encoder",
        config=tiny.Nothing(),
        parents={},
    )
    made = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=16, tokenizer_json=learnt, seed=0
    )
    made.save(Path(draft.path("document")))
    return draft.commit(counts={})


def corpus(uri: Path, rows: list[dict[str, str]]) -> Artifact:
    draft = Draft(str(uri), kind="dataset", config=tiny.Nothing(), parents={})
    for number, start in enumerate(range(0, len(rows), 16)):
        part = pa.Table.from_pylist(rows[start : start + 16], schema=schema.DOCUMENTS)
        draft.write_table(f"documents/part-{number:05d}.parquet", part)
    return draft.commit(counts={"documents": len(rows)})


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
    source = corpus(tmp_path / "before", rows)
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
    (again,) = [number for number, line in enumerate(told) if "1 parts of 3 are left" in line]
    assert "a part failed and is tried again after the others: embeddings/part-" in told[failed]
    assert failed < again  # at once, not when the others are done
    (workers,) = [line for line in told if line.startswith("workers: ")]
    assert workers.startswith("workers: 2 encoded 2 and 1 parts, loaded in ")
    assert "were busy " in workers

    changed = [{**row, "content": row["content"][:9]} if row["doc_id"] == "d030" else row for row in rows[3:]]
    changed.insert(5, {**rows[0], "doc_id": "new"})
    newer = corpus(tmp_path / "now", changed)
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


def test_an_execution_that_stands_still_is_followed_by_another(towers, rows, tmp_path, monkeypatch, caplog):
    without_ray(monkeypatch)
    executions = []

    def execute(*given, run=parts._execute, **where):
        executions.append(given[1])
        found = run(*given, **where)
        yield next(found)
        if len(executions) == 1:
            next(found)  # done, but not told
            raise ExecutionTimeoutError("no progress for 1800 s")
        yield from found

    monkeypatch.setattr(parts, "_execute", execute)
    source = corpus(tmp_path / "source", rows)
    made = documents.encode_documents(CONFIG, source.uri, towers, str(tmp_path / "made"))
    assert [len(parts) for parts in executions] == [3, 1]
    assert read(made)[0] == [row["doc_id"] for row in encodable(rows)]


def test_what_fails_again_and_again_ends_the_run(towers, rows, tmp_path, monkeypatch):
    without_ray(monkeypatch)

    def broken(towers: Artifact, token_budget: int) -> Encoder:
        encoder = load_document_encoder(towers, token_budget)
        encoder.encode_with_cost = lambda rows, top_k: 1 // 0
        return encoder

    source, output = corpus(tmp_path / "source", rows), str(tmp_path / "output")
    with pytest.raises(EncodingError, match=r"none of 3 parts could be encoded: (?s:.*)ZeroDivisionError"):
        documents.encode_documents(CONFIG, source.uri, towers, output, load_encoder=broken)


class Numbered:
    """A part of one row, its number; some of them, or all of one worker, go wrong."""

    peak = 0.0

    def __init__(self, folder: str, ends: tuple[int, ...] = (), raises: tuple[int, ...] = ()) -> None:
        self._folder, self._ends, self._raises = Path(folder), ends, raises

    def __call__(self, name: str, _: None) -> parts.EncodedPart:
        number = int(name)
        with (self._folder / "tried").open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
        if number in self._ends:
            cluster_of.start_again()  # in these tests it stands for a crash
        if number in self._raises:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return parts.EncodedPart(pa.table({"row": [number]}))


def encode_numbers(
    folder: Path, count: int = 6, *, made: Any = Numbered, most: int = 0, **wrong: Any
) -> list:
    steps = parts.Steps(parts.read_nothing, partial(made, folder=str(folder), **wrong))
    where = {"output": str(folder / "out"), "work": str(folder / "work")}
    resources = Fleet(workers=1, max_failed_parts=most)
    return parts.encode_parts(
        steps, rows={str(n): 1 for n in range(count)}, resources=resources, unit="rows", **where
    )


def tried(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "tried").read_text().split()]


def test_a_part_that_ends_its_process_twice_is_left_out_and_the_others_are_done(
    tmp_path, monkeypatch, caplog
):
    without_ray(monkeypatch)
    with pytest.raises(
        EncodingError,
        match=r"1 of 6 parts could not be encoded, all others are done: 2: its process was lost while",
    ):
        encode_numbers(tmp_path, ends=(2,))
    assert tried(tmp_path) == [0, 1, 2, 3, 4, 5, 2]
    # What is done stays; and with leave to do so, the run ends well.
    records = encode_numbers(tmp_path, ends=(2,), most=1)
    assert tried(tmp_path)[7:] == [2, 2]
    assert [record["part"]["rows"] for record in records] == [1, 1, 0, 1, 1, 1]
    assert "out of memory, or a crash of native code" in records[2]["set_aside"]
    assert "2 is left out: its process was lost while it was encoded (2 of 2)" in caplog.text


def test_a_part_whose_node_is_lost_has_more_chances(tmp_path, monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(cluster_of, "alive_nodes", set)
    monkeypatch.setattr(failures, "MAX_LOSSES", {"process": 1, "node": 2})
    with pytest.raises(EncodingError, match=r"its node was lost while it was encoded \(2 of 2\)"):
        encode_numbers(tmp_path, ends=(2,))
    assert tried(tmp_path).count(2) == 2


def test_a_worker_whose_parts_fail_starts_anew(tmp_path, monkeypatch, caplog):
    """An error of a GPU stays in its process: the third part is not tried there."""
    without_ray(monkeypatch)
    started = []

    class Noted(Numbered):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            started.append(len(tried(tmp_path)) if (tmp_path / "tried").exists() else 0)

    # By value, as to another process; here it must stay the same class.
    steps = parts.Steps(parts.read_nothing, partial(Noted, folder=str(tmp_path), raises=(1, 2)))
    monkeypatch.setattr("in_process._copy", lambda value: value)
    where = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    resources = Fleet(workers=1, max_failed_parts=2)
    rows = {str(number): 1 for number in range(6)}
    records = parts.encode_parts(steps, rows=rows, resources=resources, unit="rows", **where)
    assert [record["part"]["rows"] for record in records] == [1, 0, 0, 1, 1, 1]
    assert started[:2] == [0, 3]
    assert "CUDA error: an illegal memory access" in records[1]["set_aside"]


def test_a_worker_that_cannot_load_ends_the_run_with_its_reason(tmp_path, monkeypatch):
    without_ray(monkeypatch)

    def broken(**_: Any) -> None:
        raise RuntimeError("CUDA driver initialization failed")

    with pytest.raises(EncodingError, match=r"no worker could load: (?s:.*)CUDA driver initialization"):
        encode_numbers(tmp_path, made=broken)


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_broken_slot_and_a_part_that_kills_hold_up_no_other_part(tmp_path):
    class Faulty:
        """The first process cannot load, nor those that are started in its place; part 3 kills any other."""

        peak = 0.0

        def __init__(self) -> None:
            slot, _ = cluster_of.this_slot()
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

    steps = parts.Steps(parts.read_nothing, Faulty)
    where = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    rows, resources = {str(number): 1 for number in range(12)}, Fleet(workers=2, max_failed_parts=1)
    records = parts.encode_parts(steps, rows=rows, resources=resources, unit="rows", **where)
    assert [record["part"]["rows"] for record in records] == [1, 1, 1, 0, *[1] * 8]
    assert "its process was lost while it was encoded (2 of 2)" in records[3]["set_aside"]
    assert 1 <= len((tmp_path / "loads").read_text()) <= 6  # and not once for each part


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_starts_late_finds_work(tmp_path):
    class SlowSecond:
        """Work of two actors: the one that starts second stands only when the first has begun an item.

        An item ends when both have begun one, so nothing ends if the first has taken all.
        """

        def __init__(self, folder: str) -> None:
            self._folder = Path(folder)
            try:
                (self._folder / "first").mkdir()
            except FileExistsError:
                self._wait(1)

        def __call__(self, batch):
            (self._folder / f"begun-{os.getpid()}").touch()
            self._wait(2)
            return {"item": batch["item"], "error": [""]}

        def _wait(self, actors: int) -> None:
            deadline = time.monotonic() + 60
            while len(list(self._folder.glob("begun-*"))) < actors:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"less than {actors} actors have begun an item")
                time.sleep(0.05)

    items = [{"item": number} for number in range(2)]
    resources = Fleet(workers=2)
    found = cluster_of.dataset_rows(
        cluster_of.map_with_actors(items, SlowSecond, {"folder": str(tmp_path)}, resources)
    )
    assert sorted(row["item"] for row in found) == [0, 1]


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
    steps = parts.Steps(parts.read_nothing, SlowPart)
    where = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    rows, resources = {"part.parquet": slow_rows}, Fleet(workers=1)
    start = time.time()
    parts.encode_parts(steps, rows=rows, resources=resources, unit="rows", **where)
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
    source = corpus(tmp_path / "source", rows)
    ahead = CONFIG.model_copy(update={"resources": Fleet(workers=1, readers=1, price_per_hour=2.0)})
    found = documents.encode_documents(ahead, source.uri, towers, str(tmp_path / "ahead"))
    without_ray(monkeypatch)
    alone = documents.encode_documents(CONFIG, source.uri, towers, str(tmp_path / "alone"))
    assert found.digest == alone.digest


def test_a_part_that_is_too_large_to_travel_is_refused(towers, rows, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    monkeypatch.setattr(documents, "MAX_PAYLOAD_BYTES", 16 * 16 * 4 - 1)  # rows, dimensions, bytes
    source = corpus(tmp_path / "dataset", encodable(rows))
    config = CONFIG.model_copy(update={"resources": Fleet(workers=1, readers=1)})
    with pytest.raises(
        ConfigError, match=r"part of 16 documents .*readers=0, or .*documents_per_part to 15 or"
    ):
        documents.encode_documents(config, source.uri, towers, str(tmp_path / "refused"))
    found = documents.encode_documents(CONFIG, source.uri, towers, str(tmp_path / "whole"))
    assert found.counts["documents"] == len(encodable(rows))
