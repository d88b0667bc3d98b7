import numpy as np
import pyarrow as pa
import pytest

from scalingnote.storage import arrow
from scalingnote.storage.arrow import StoredRows, take_rows

COLUMNS = {
    "text": pa.array(["a", "", "Füße", "文字", "e"]),
    "large": pa.array(["a", "", "Füße", "文字", "e"], pa.large_string()),
    "empty": pa.array([""] * 5),
    "count": pa.array([1, -2, 3, 2**40, 5]),
    "small": pa.array([1, 2, 3, 4, 255], pa.uint8()),
    "price": pa.array([0.5, 1e300, -0.0, 3.25, 1.0]),
    "single": pa.array([0.1, 0.2, 0.3, 0.4, 0.5], pa.float32()),
    "in_stock": pa.array([True, False, True, True, False]),
    "sometimes": pa.array(["a", None, "c", None, "e"]),
    "number": pa.array([1, None, 3, 4, None]),
    "tags": pa.array([["x"], [], None, ["y", "z"], []]),
    "choice": pa.array(["a", "b", "a", "b", "a"]).dictionary_encode(),
}
TABLE = pa.table(COLUMNS)


@pytest.mark.parametrize(
    "table",
    [
        *(TABLE, TABLE.slice(1, 3), pa.concat_tables([TABLE, TABLE.slice(2)]), TABLE.slice(0, 0)),
        pa.concat_tables([TABLE.slice(0, 0), TABLE, TABLE.slice(5), TABLE.slice(4), TABLE.slice(1, 2)]),
    ],
    ids=["whole", "slice", "two chunks", "none", "empty chunks"],
)
def test_stored_rows_equal_those_of_arrow(table: pa.Table) -> None:
    rows = StoredRows(table)
    assert [rows[number] for number in range(len(table))] == table.to_pylist()


@pytest.mark.parametrize("rows", [[], [3], [0, 1, 4, 5, 9], [9, 0, 0, 7, 4, 5]], ids=len)
def test_take_rows_equals_take_of_arrow(rows: list[int]) -> None:
    table = pa.concat_tables([TABLE, TABLE.slice(0, 0), TABLE])
    assert take_rows(table, np.array(rows, np.int64)).equals(table.take(pa.array(rows, pa.int64())))


def test_taken_rows_are_in_few_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.concat_tables([pa.table({"text": [f"{number:05d}"]}) for number in range(100)])
    monkeypatch.setattr(arrow, "BATCH_BYTES", 100)
    rows = take_rows(table, np.arange(0, 100, 2))
    sizes = [batch.nbytes for batch in rows.to_batches()]
    assert max(sizes) <= 100
    assert len(sizes) < 10
    assert rows.equals(table.take(pa.array(range(0, 100, 2))))


def test_a_column_may_have_more_text_than_a_chunk() -> None:
    chunk = pa.array(["short", "x" * 2**26])
    table = pa.table({"text": pa.chunked_array([chunk] * 40)})  # 2.5 GiB of the same chunk
    with pytest.raises(pa.ArrowInvalid, match="offset overflow"):
        table.take(pa.array([0, 78]))
    assert take_rows(table, np.array([0, 4, 78]))["text"].to_pylist() == ["short"] * 3
    assert StoredRows(table)[78] == {"text": "short"}
