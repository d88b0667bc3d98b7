"""Encoding on Ray: with and without readers, with a base, and if a part fails."""

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
    """Load an encoder that fails once like a node, with an error from outside the package."""
    encoder, mark = load_document_encoder(towers, token_budget), Path(towers.uri + "-broke")
    encode, calls = encoder.encode_with_cost, itertools.count()

    def fail_once(rows, **options):
        if next(calls) == 1 and not mark.exists():
            mark.touch()
            raise OSError("the network is down")
        return encode(rows, **options)

    encoder.encode_with_cost = fail_once
    return encoder


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    rows = tiny.document_rows(48)
    rows[20]["title"] = TOO_LONG
    return rows


def encodable(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if row["title"] != TOO_LONG]


def test_a_failed_part_is_retried_and_a_base_saves_encoding(towers, rows, tmp_path, monkeypatch, caplog):
    without_ray(monkeypatch)
    caplog.set_level("INFO", logger="scalingnote")
    source = dataset(tmp_path / "before", rows)
    first = documents.encode_documents(
        CONFIG, source.uri, towers, str(tmp_path / "first"), load_encoder=flaky_tower
    )
    assert Path(towers.uri + "-broke").exists()
    doc_ids, vectors = read(first)
    assert doc_ids == [row["doc_id"] for row in encodable(rows)]
    np.testing.assert_allclose(vectors, directly(towers, encodable(rows)), atol=1e-6)
    assert first.table("rejected")["row"].to_pylist() == [rows[20]["doc_id"]]
    cost = first.manifest.info["encoding"]
    assert cost["tokens"] == first.counts["tokens"]
    assert 0 <= cost["padding"] < 1
    assert 0 < cost["of_peak"] < 1
    assert cost["worker_seconds"] > 0
    assert cost["worker_cpu_seconds"] > 0
    lines = [record.getMessage() for record in caplog.records]
    (failed,) = [number for number, line in enumerate(lines) if "OSError: the network is down" in line]
    assert "a part failed and is tried again after the others: embeddings/part-" in lines[failed]
    (workers,) = [line for line in lines if line.startswith("workers: ")]
    assert workers.startswith("workers: 1 encoded 3 parts, loaded in ")
    assert "were busy " in workers

    new_rows = [
        {**row, "content": row["content"][:9]} if row["doc_id"] == "d030" else row for row in rows[3:]
    ]
    new_rows.insert(5, {**rows[0], "doc_id": "new"})
    newer = dataset(tmp_path / "now", new_rows)
    update = CONFIG.model_copy(update={"base": first.uri})
    updated = documents.encode_documents(update, newer.uri, towers, str(tmp_path / "brought"))
    counts = {name: updated.counts[name] for name in ("added", "changed", "deleted", "copied", "rejected")}
    # The document that is too long was never encoded: it counts as added, and is rejected again.
    assert counts == {"added": 2, "changed": 1, "deleted": 3, "copied": 43, "rejected": 1}
    doc_ids, vectors = read(updated)
    assert doc_ids == [row["doc_id"] for row in encodable(new_rows)]
    np.testing.assert_allclose(vectors, directly(towers, encodable(new_rows)), atol=1e-6)
    changed_ids = updated.table("changes")["doc_id"].to_pylist()
    assert changed_ids == ["d000", "d001", "d002", "d020", "d030", "new"]

    other = CONFIG.model_copy(update={"base": first.uri, "dtype": "float16"})
    with pytest.raises(ArtifactError, match="'dtype': 'float32'"):
        documents.encode_documents(other, newer.uri, towers, str(tmp_path / "refused"))


def test_parts_that_always_fail_end_the_run(towers, rows, tmp_path, monkeypatch):
    without_ray(monkeypatch)

    def load_broken(towers: Artifact, token_budget: int) -> Encoder:
        encoder = load_document_encoder(towers, token_budget)
        encoder.encode_with_cost = lambda rows, top_k: 1 // 0
        return encoder

    source, output = dataset(tmp_path / "source", rows), str(tmp_path / "output")
    with pytest.raises(PartsFailedError, match=r"none of 3 parts .*: (?s:.*)ZeroDivisionError"):
        documents.encode_documents(CONFIG, source.uri, towers, output, load_encoder=load_broken)


class Numbered:
    """Encoder of parts of one row, their number; some parts fail."""

    peak = 0.0

    def __init__(self, folder: str, ends: tuple[int, ...] = ()) -> None:
        self._folder, self._ends = Path(folder), ends

    def __call__(self, name: str, _: None) -> parts.EncodedPart:
        number = int(name)
        with (self._folder / "tried").open("a", encoding="utf-8") as file:
            file.write(f"{number}\n")
        if number in self._ends:
            raise ValueError("a crash")
        return parts.EncodedPart(pa.table({"row": [number]}))


def encode_numbers(folder: Path, count: int = 6, *, most: int = 0, **wrong: Any) -> list:
    encoder = partial(Numbered, folder=str(folder), **wrong)
    uris = {"output": str(folder / "out"), "work": str(folder / "work")}
    resources = Fleet(workers=1, max_failed_parts=most)
    return parts.encode_parts(
        encoder, rows={str(n): 1 for n in range(count)}, resources=resources, unit="rows", **uris
    )


def test_a_part_left_out_is_an_empty_file_with_its_reason(tmp_path, monkeypatch, caplog):
    without_ray(monkeypatch)
    with pytest.raises(PartsFailedError, match=r"1 of 6 parts failed .*: 2: (?s:.*)ValueError: a crash"):
        encode_numbers(tmp_path, ends=(2,))
    # Finished parts are kept, and the run succeeds if a part may be left out.
    records = encode_numbers(tmp_path, ends=(2,), most=1)
    attempts = [int(line) for line in (tmp_path / "tried").read_text().split()]
    assert attempts == [0, 1, 2, 3, 4, 5, 2, 2, 2]
    assert [record["part"]["rows"] for record in records] == [1, 1, 0, 1, 1, 1]
    assert "ValueError: a crash" in records[2]["set_aside"]
    assert "2 is left out: " in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_broken_slot_and_a_killing_part_delay_no_other_part(tmp_path):
    class Faulty:
        """Encoder that fails to load in the first process and its replacements; part 3 kills others."""

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

    uris = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    rows, resources = {str(number): 1 for number in range(12)}, Fleet(workers=2, max_failed_parts=1)
    records = parts.encode_parts(Faulty, rows=rows, resources=resources, unit="rows", **uris)
    assert [record["part"]["rows"] for record in records] == [1, 1, 1, 0, *[1] * 8]
    assert "its process was lost (2 of 2)" in records[3]["set_aside"]
    assert 1 <= len((tmp_path / "loads").read_text()) <= 6  # not once for each part


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_long_part_logs_its_progress(tmp_path, caplog, monkeypatch):
    slow_rows = 25

    class SlowPart:
        """Encoder that takes a second for each row and logs nothing."""

        def __call__(self, _: str, part: None) -> parts.EncodedPart:
            for _ in range(slow_rows):
                time.sleep(1)
                usage.count_rows(1)
            return parts.EncodedPart(pa.table({"row": range(slow_rows)}))

    monkeypatch.setattr(logging.getLogger("scalingnote"), "propagate", True)
    caplog.set_level("INFO", logger="scalingnote")
    uris = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work")}
    rows, resources = {"part.parquet": slow_rows}, Fleet(workers=1)
    start = time.time()
    parts.encode_parts(SlowPart, rows=rows, resources=resources, unit="rows", **uris)
    times = [start, *(record.created for record in caplog.records), time.time()]
    assert max(after - before for before, after in pairwise(times)) <= 10
    progress = [
        int(match[1]) for line in caplog.messages if (match := re.match(rf"(\d+)/{slow_rows} rows", line))
    ]
    assert sorted(progress) == progress
    assert len({rows for rows in progress if 0 < rows < slow_rows}) > 1


@pytest.mark.usefixtures("cluster")
def test_readers_and_writers_build_the_same_artifact(towers, rows, tmp_path, monkeypatch: pytest.MonkeyPatch):
    source = dataset(tmp_path / "source", rows)
    ahead = CONFIG.model_copy(update={"resources": Fleet(workers=1, readers=1)})
    artifact = documents.encode_documents(ahead, source.uri, towers, str(tmp_path / "ahead"))
    without_ray(monkeypatch)
    expected = documents.encode_documents(CONFIG, source.uri, towers, str(tmp_path / "alone"))
    assert artifact.digest == expected.digest
