import pyarrow as pa
import pytest

from scalingnote.storage.stored_rows import StoredRows

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
    [TABLE, TABLE.slice(1, 3), pa.concat_tables([TABLE, TABLE.slice(2)]), TABLE.slice(0, 0)],
    ids=["whole", "slice", "two chunks", "none"],
)
def test_rows_are_what_arrow_makes_of_them(table: pa.Table) -> None:
    rows = StoredRows(table)
    assert [rows[number] for number in range(len(table))] == table.to_pylist()
