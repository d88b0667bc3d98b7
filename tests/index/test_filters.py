from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.errors import ConfigError, SearchError
from scalingnote.index import filters

ROWS = [
    {"topic": "a", "price": 1.5, "stock": 3, "new": True},
    {"topic": "b", "price": None, "stock": 0, "new": False},
    {"topic": None, "price": 20.0, "stock": None, "new": None},
    {"topic": "a", "price": 20.0, "stock": 7, "new": False},
]
SCHEMA = pa.schema({"topic": pa.string(), "price": pa.float32(), "stock": pa.int64(), "new": pa.bool_()})
DOCUMENTS = pa.Table.from_pylist(ROWS, schema=SCHEMA)


def _fulfils(row: dict[str, Any], where: dict[str, Any]) -> bool:
    """The same in plain Python."""
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
def test_a_mask_equals_row_by_row(where: dict[str, Any]) -> None:
    filters.check(where, SCHEMA)
    expected = [_fulfils(row, where) for row in ROWS]
    np.testing.assert_array_equal(filters.mask(DOCUMENTS, where), expected)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"colour": "red"}, "no filter by 'colour': this index has topic, price, stock, new"),
        ({"topic": {"min": 1}}, "filter topic: only numbers have ranges"),
        ({"price": {"low": 1}}, "is no range, it has min, max or both"),
        ({"price": {}}, "is no range"),
        ({"price": {"min": "1"}}, "filter price: '1' is no value of a field of type float"),
        ({"stock": True}, "filter stock: True is no value"),
        ({"new": 1}, "filter new: 1 is no value of a field of type bool"),
        ({"topic": ["a", 3]}, "filter topic: 3 is no value of a field of type string"),
    ],
)
def test_a_filter_that_cannot_be_asked_is_refused(where: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        filters.check(where, SCHEMA)


def test_fields_must_be_there_and_of_a_kind_that_can_be_filtered() -> None:
    documents = SCHEMA.append(pa.field("tags", pa.list_(pa.string())))
    filters.require_fields(documents, ["topic", "price", "new"])
    with pytest.raises(ConfigError, match=r"index.filters names 'brand', documents have topic, price"):
        filters.require_fields(documents, ["brand"])
    with pytest.raises(ConfigError, match=r"'tags', which is of type list<.*>: text, numbers"):
        filters.require_fields(documents, ["tags"])
