from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core.config import validate
from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.index import filters
from scalingnote.index.config import IndexConfig

ROWS = [
    {"topic": "a", "price": 1.5, "stock": 3, "new": True},
    {"topic": "b", "price": None, "stock": 0, "new": False},
    {"topic": None, "price": 20.0, "stock": None, "new": None},
    {"topic": "a", "price": 20.0, "stock": 7, "new": False},
]
SCHEMA = pa.schema({"topic": pa.string(), "price": pa.float32(), "stock": pa.int64(), "new": pa.bool_()})
DOCUMENTS = pa.Table.from_pylist(ROWS, schema=SCHEMA)


def _fulfils(row: dict[str, Any], where: dict[str, Any]) -> bool:
    """Apply a filter in plain Python."""
    for name, condition in where.items():
        value = row[name]
        if value is None:
            return False
        if isinstance(condition, dict):
            if not condition.get("min", value) <= value <= condition.get("max", value):
                return False
        elif value not in (condition if isinstance(condition, list) else [condition]):
            return False
    return True


NUMBER = st.sampled_from([0, 1.5, 3, 7, 20, 21])
CONDITIONS = {
    "topic": st.one_of(st.sampled_from("abc"), st.lists(st.sampled_from("abc"), max_size=3)),
    "price": st.one_of(NUMBER, st.lists(NUMBER, max_size=3)),
    "stock": st.one_of(NUMBER, st.lists(NUMBER, max_size=3)),
    "new": st.booleans(),
}
RANGE = st.dictionaries(st.sampled_from(["min", "max"]), NUMBER, min_size=1)
WHERE = st.fixed_dictionaries(
    {}, optional=CONDITIONS | {name: st.one_of(CONDITIONS[name], RANGE) for name in ("price", "stock")}
)


@given(WHERE)
def test_a_mask_equals_a_check_of_each_row(where: dict[str, Any]) -> None:
    filters.check(where, SCHEMA)
    expected = [_fulfils(row, where) for row in ROWS]
    np.testing.assert_array_equal(filters.mask(DOCUMENTS, where), expected)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"colour": "red"}, "no filter by 'colour': this index has topic, price, stock, new"),
        ({"topic": {"min": 1}}, "filter topic: only numbers have ranges"),
        ({"price": {"low": 1}}, "is not a range: pass min, max or both"),
        ({"price": {}}, "is not a range"),
        ({"price": {"min": "1"}}, "filter price: '1' is not a value of a field of type float"),
        ({"stock": True}, "filter stock: True is not a value"),
        ({"new": 1}, "filter new: 1 is not a value of a field of type bool"),
        (
            {"topic": "half \ud800 pair"},
            r"filter topic: 'half \\ud800 pair' is not a value of a field of type string",
        ),
        ({"topic": ["a", 3]}, "filter topic: 3 is not a value of a field of type string"),
    ],
)
def test_an_invalid_filter_is_refused(where: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        filters.check(where, SCHEMA)


def test_missing_fields_and_fields_of_wrong_types_are_refused() -> None:
    documents = SCHEMA.append(pa.field("tags", pa.list_(pa.string())))
    filters.require_fields(documents, ["topic", "price", "new"])
    with pytest.raises(ConfigError, match=r"index.filters names 'brand', documents have topic, price"):
        filters.require_fields(documents, ["brand"])
    with pytest.raises(
        ConfigError, match=r"'tags', which is of type list<.*>: name columns of text, numbers"
    ):
        filters.require_fields(documents, ["tags"])


WIDE = (
    st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([2**53 + 1, 2**63, 10**400, -(10**400), 1.5, 2.0**63, -(2.0**63), 1e300])
)
RANGES = st.fixed_dictionaries({"min": WIDE}, optional={"max": WIDE}) | st.fixed_dictionaries({"max": WIDE})
COLUMNS = {
    "long": pa.array([0, 2, 2**53 + 1, 2**63 - 1, -(2**63), None], pa.int64()),
    "byte": pa.array([0, 2, 255, 1, 3, None], pa.uint8()),
    "double": pa.array([0.0, 1.5, 2.0**53, 1e300, -1e300, None], pa.float64()),
}


@settings(derandomize=True, max_examples=100, database=None)
@given(condition=WIDE | st.lists(WIDE, min_size=1, max_size=3) | RANGES)
def test_numbers_of_any_size_are_compared(condition: Any) -> None:
    table = pa.table(COLUMNS)
    for name, column in COLUMNS.items():
        rows = [{name: value} for value in column.to_pylist()]
        filters.check({name: condition}, table.schema)
        mask = filters.mask(table, {name: condition}).tolist()
        assert mask == [
            _fulfils(row, {name: _as_double(condition) if name == "double" else condition}) for row in rows
        ]


def _as_double(condition: Any) -> Any:
    """Convert numbers to doubles, which are not exact from 2^53 on."""
    if isinstance(condition, dict):
        return {end: _as_double(value) for end, value in condition.items()}
    if isinstance(condition, list):
        return [_as_double(value) for value in condition]
    try:
        return float(condition)
    except OverflowError:
        return np.inf if condition > 0 else -np.inf


@pytest.mark.parametrize("name", ["content", "snippet", "semantic_id", "vector", "terms", "impacts"])
def test_a_reserved_column_is_refused_as_a_filter(name: str) -> None:
    with pytest.raises(ConfigError, match=f"filters name '{name}'; .*: rename this column of the documents"):
        validate(IndexConfig, {"filters": ["topic", name]}, source="run.yaml")
