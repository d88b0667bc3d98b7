"""Rows go to the bucket of their key; a killed stage resumes with the parts that have no record."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.core.config import Config
from scalingnote.core.errors import DataError, PartsFailedError
from scalingnote.core.parts import PartStage, map_here
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Draft
from scalingnote.storage.shuffle import run_parts

SCHEMA = pa.schema({"key": pa.string(), "value": pa.int64()})


@pytest.mark.parametrize(
    "keys", [[f"k{i % 50}" for i in range(400)], list(range(400))], ids=["text", "numbers"]
)
def test_each_row_is_once_in_the_bucket_of_its_key(tmp_path, keys):
    table_of_rows = pa.table({"key": keys, "value": range(400)})
    for number in range(4):
        piece = table_of_rows.slice(number * 100, 100)
        shuffle.scatter(
            piece, shuffle.bucket_of(piece["key"], 7), target=str(tmp_path), name=f"slice-{number}"
        )
    gathered = [shuffle.gather(str(tmp_path), bucket, schema=table_of_rows.schema) for bucket in range(7)]
    assert sorted(v for table in gathered for v in table["value"].to_pylist()) == list(range(400))
    for bucket, table in enumerate(gathered):
        assert set(shuffle.bucket_of(table["key"], 7).tolist()) <= {bucket}
        assert table["value"].to_pylist() == sorted(table["value"].to_pylist())  # slice after slice


def test_a_slice_written_twice_replaces_its_file(tmp_path):
    table = pa.table({"key": ["a", "b"], "value": [1, 2]}, schema=SCHEMA)
    for _ in range(2):
        shuffle.scatter(table, np.array([0, 0]), target=str(tmp_path), name="one")
    assert shuffle.gather(str(tmp_path), 0, schema=SCHEMA).equals(table)
    shuffle.scatter(SCHEMA.empty_table(), np.array([], np.int64), target=str(tmp_path), name="two")
    assert len(shuffle.gather(str(tmp_path), 1, schema=SCHEMA)) == 0


def test_a_bucket_reads_only_its_batches_of_a_file(tmp_path, monkeypatch):
    rows = pa.table({"key": [f"k{i}" for i in range(1000)], "value": range(1000)}, schema=SCHEMA)
    bucket = shuffle.bucket_of(rows["key"], 50)
    shuffle.scatter(rows, bucket, target=str(tmp_path), name="one")
    (tmp_path / "two.arrow.pending").write_bytes(b"of a killed writer")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.arrow", "two.arrow.pending"]
    opened = []
    open_input = shuffle.fs.open_input
    monkeypatch.setattr(shuffle.fs, "open_input", lambda uri: opened.append(uri) or open_input(uri))
    for number in range(50):
        values = shuffle.gather(str(tmp_path), number, schema=SCHEMA)["value"].to_pylist()
        assert values == np.flatnonzero(bucket == number).tolist()
    assert len(opened) == 1  # the footer is read once
    only = pa.concat_tables(shuffle.stream(str(tmp_path), 3, ["value"]))
    assert only.column_names == ["value"]
    assert only["value"].to_pylist() == np.flatnonzero(bucket == 3).tolist()


def test_a_frequent_key_is_read_in_bounded_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "ROWS_PER_BATCH", 100)
    for number in range(4):
        keys = ["head" if i % 10 == 0 else f"k{number}-{i}" for i in range(5000)]
        rows = pa.table({"key": keys, "value": range(5000)}, schema=SCHEMA)
        name = f"{number}"
        shuffle.scatter(rows, shuffle.bucket_of(rows["key"], 50), target=str(tmp_path), name=name)
    (heavy,) = shuffle.bucket_of(pa.array(["head"]), 50).tolist()
    tables = list(shuffle.named_stream(str(tmp_path), heavy))
    assert max(len(rows) for _, rows in tables) == 100
    assert [name for name, _ in tables] == sorted(name for name, _ in tables)
    bucket_rows = pa.concat_tables(rows for _, rows in tables)
    assert bucket_rows["key"].to_pylist().count("head") == 2000 == 4 * 5000 // 10
    assert bucket_rows.equals(shuffle.gather(str(tmp_path), heavy, schema=SCHEMA))


def test_more_rows_make_larger_slices(tmp_path, monkeypatch):
    draft = Draft(str(tmp_path / "a"), kind="dataset", config=Config(), parents={})
    for number in range(20):
        table = pa.table({"key": ["k"] * 10, "value": range(10)}, schema=SCHEMA)
        draft.write_table(f"rows/part-{number:05d}.parquet", table)
    artifact = draft.commit(counts={})
    assert len(shuffle.slices(artifact, "rows", rows=10)) == 20
    monkeypatch.setattr(shuffle, "MAX_SLICES", 4)
    slices = shuffle.slices(artifact, "rows", rows=10)
    assert [len(parts) for parts in slices] == [5, 5, 5, 5]


def test_hashes_do_not_depend_on_chunks():
    keys = pa.array([f"k{i % 7}" for i in range(20)])
    expected = shuffle.hash_of(keys)
    np.testing.assert_array_equal(shuffle.hash_of(pa.chunked_array([keys[:3], keys[:0], keys[3:]])), expected)
    assert shuffle.hash_of(pa.chunked_array([], pa.string())).shape == (0,)


@pytest.mark.parametrize("keys", [["a", None, None], [1, None, None]], ids=["text", "numbers"])
def test_a_null_key_is_an_error(keys):
    with pytest.raises(DataError, match="2 of 3 keys are null: leave out rows"):
        shuffle.bucket_of(pa.array(keys), 7)


# --- records of parts ---------------------------------------------------------------------------------------


PARTS = {f"rows/part-{number}": number for number in range(5)}


def run(folder: Path, stage: object, **options: object) -> tuple[dict[str, object], dict[str, str]]:
    return run_parts(
        stage, PARTS, folder=str(folder), executor=map_here, section="test", unit="parts", **options
    )


@pytest.mark.parametrize("loads", [True, False])
def test_a_killed_run_is_resumed(tmp_path: Path, loads: bool) -> None:
    notes = tmp_path / "tried"

    def work(number: int) -> dict[str, int]:
        notes.write_text(notes.read_text() + f"{number} " if notes.exists() else f"{number} ")
        if number == 3 and notes.read_text().count("3") == 1:
            raise KeyboardInterrupt
        return {"square": number * number}

    stage = PartStage(lambda: work) if loads else work
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "done", stage)
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == [
        f"rows-part-{number}.json" for number in range(3)
    ]
    reported: list[object] = []
    records, failed = run(tmp_path / "done", stage, report=reported.append)
    assert records == {name: {"square": number**2} for name, number in PARTS.items()}
    assert failed == {}
    assert notes.read_text().split() == ["0", "1", "2", "3", "3", "4"]
    assert reported == [{"square": 9}, {"square": 16}]
    assert json.loads((tmp_path / "done" / "rows-part-4.json").read_text()) == {"square": 16}
    assert run(tmp_path / "done", pytest.fail) == (records, {})  # no part is left for the stage


def test_some_parts_may_be_set_aside(tmp_path: Path) -> None:
    def work(number: int) -> int:
        return 10 // (number - 2)

    with pytest.raises(PartsFailedError, match=r"1 of 5 parts failed .*: rows/part-2: .*"):
        run(tmp_path, work)
    records, failed = run(tmp_path, work, max_failed=1)
    assert [*records] == [name for name in PARTS if name != "rows/part-2"]
    assert [*failed] == ["rows/part-2"]
    assert "ZeroDivisionError" in failed["rows/part-2"]
