from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scalingnote.quantize import semantic_id
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.storage import schema


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_suffixes_equal_a_counting_loop(documents: int, levels: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 3, (documents, levels)).astype(np.uint16)
    seen: Counter[tuple[int, ...]] = Counter()
    expected = []
    for row in map(tuple, codes.tolist()):
        expected.append(seen[row])
        seen[row] += 1
    assert semantic_id.suffixes(codes).tolist() == expected


def test_colliding_documents_get_distinct_ids_that_later_documents_do_not_change() -> None:
    codes = np.array([[3, 1], [2, 255], [3, 1], [3, 1], [3, 2]], np.int32)
    ids = semantic_id.to_strings(codes, semantic_id.suffixes(codes)).to_pylist()
    assert ids == ["3-1-0", "2-255-0", "3-1-1", "3-1-2", "3-2-0"]
    fewer = semantic_id.to_strings(codes[:3], semantic_id.suffixes(codes[:3])).to_pylist()
    assert fewer == ids[:3]


def test_the_table_has_the_columns_of_the_schema() -> None:
    codes = np.array([[3, 1], [2, 5]], np.int32)
    table = semantic_id.to_table(pa.chunked_array([["a", "b"]]), codes, np.array([0, 4], np.int32))
    assert table.schema.equals(schema.semantic_ids(2))
    assert table.to_pylist()[1] == {"doc_id": "b", "codes": [2, 5], "suffix": 4, "semantic_id": "2-5-4"}


def test_ids_that_were_given_stay_and_newcomers_count_on() -> None:
    given = semantic_id.AssignedIds(
        pa.array(["a", "b", "c", "d"]),
        np.array([[1, 1], [1, 1], [2, 0], [1, 1]], np.uint16),
        np.array([0, 1, 0, 2], np.int32),
    )
    # d is gone, c has other codes now, b and a changed places; e, f and g are new.
    doc_ids = pa.array(["e", "b", "f", "c", "a", "g"])
    codes = np.array([[1, 1], [1, 1], [3, 3], [1, 1], [1, 1], [2, 0]], np.uint16)
    suffix, new = semantic_id.suffixes_after(given, doc_ids, codes)
    assert suffix.tolist() == [3, 1, 0, 4, 0, 1]
    assert new.tolist() == [True, False, True, True, False, True]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_appended_documents_count_on_as_if_all_had_come_at_once(before: int, after: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 3, (before + after, 2)).astype(np.uint16)
    names = pa.array([f"d{i}" for i in range(len(codes))], pa.string())
    whole = semantic_id.suffixes(codes)
    given = semantic_id.AssignedIds(names[:before], codes[:before], whole[:before])
    suffix, new = semantic_id.suffixes_after(given, names, codes)
    assert suffix.tolist() == whole.tolist()
    assert new.tolist() == [False] * before + [True] * after


def test_a_config_whose_sample_cannot_fill_a_codebook_is_refused() -> None:
    with pytest.raises(ValidationError, match="cannot fit codes=256"):
        QuantizeConfig(sample_documents=255)
    with pytest.raises(ValidationError, match="documents_per_worker=255 cannot fit codes=256"):
        QuantizeConfig(documents_per_worker=255)
