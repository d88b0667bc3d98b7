"""Encoding on Ray: with readers or without, brought up to date, and when a part fails for a while."""

import itertools
import logging
import os
import re
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from ray.data.exceptions import ExecutionTimeoutError

import tiny
from in_process import without_ray
from scalingnote import cluster as cluster_of
from scalingnote.encode import documents, parts
from scalingnote.encode.config import EncodeConfig, Fleet
from scalingnote.encode.encoder import Encoder
from scalingnote.encode.engines import load_document_encoder
from scalingnote.errors import ArtifactError, EncodingError
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
