from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scalingnote.quantize import semantic_id
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.storage import schema
from synthetic_corpus import suffixes


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_suffixes_equal_a_counting_loop(documents: int, levels: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 3, (documents, levels)).astype(np.uint16)
    found, new = assign(codes)
    assert found.tolist() == suffixes(codes).tolist()
    assert new.all()


def assign(codes: np.ndarray, given: Iterable[semantic_id.CodeRange] = ()) -> tuple[np.ndarray, np.ndarray]:
    names = pa.array([f"d{i}" for i in range(len(codes))], pa.string())
    return semantic_id.assign_suffixes(given, names, codes)


def test_colliding_documents_get_distinct_ids_that_later_documents_do_not_change() -> None:
    codes = np.array([[3, 1], [2, 255], [3, 1], [3, 1], [3, 2]], np.int32)
    ids = semantic_id.to_strings(codes, assign(codes)[0]).to_pylist()
    assert ids == ["3-1-0", "2-255-0", "3-1-1", "3-1-2", "3-2-0"]
    fewer = semantic_id.to_strings(codes[:3], assign(codes[:3])[0]).to_pylist()
    assert fewer == ids[:3]


def test_the_table_has_the_columns_of_the_schema() -> None:
    codes = np.array([[3, 1], [2, 5]], np.int32)
    table = semantic_id.to_table(pa.chunked_array([["a", "b"]]), codes, np.array([0, 4], np.int32))
    assert table.schema.equals(schema.semantic_ids(2))
    assert table.to_pylist()[1] == {"doc_id": "b", "codes": [2, 5], "suffix": 4, "semantic_id": "2-5-4"}


def piece(doc_ids: list[str], codes: list[list[int]], suffix: list[int]) -> semantic_id.CodeRange:
    columns = tuple(np.array(codes, np.uint16).T)
    return semantic_id.CodeRange(pa.array(doc_ids, pa.string()), np.array(suffix, np.int32), columns)


def test_ids_that_were_given_stay_and_newcomers_count_on() -> None:
    given = [
        piece(["a", "b", "d"], [[1, 1], [1, 1], [1, 1]], [0, 1, 2]),
        piece(["c", "h"], [[2, 0], [9, 9]], [0, 7]),
    ]
    # d is gone, c has other codes now, b and a changed places; e, f and g are new.
    doc_ids = pa.array(["e", "b", "f", "c", "a", "g"])
    codes = np.array([[1, 1], [1, 1], [3, 3], [1, 1], [1, 1], [2, 0]], np.uint16)
    suffix, new = semantic_id.assign_suffixes(given, doc_ids, codes)
    assert suffix.tolist() == [3, 1, 0, 4, 0, 1]
    assert new.tolist() == [True, False, True, True, False, True]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_appended_documents_count_on_as_if_all_had_come_at_once(before: int, after: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 3, (before + after, 2)).astype(np.uint16)
    whole = suffixes(codes)
    names = pa.array([f"d{i}" for i in range(before)], pa.string())
    ordered = semantic_id.sorted_table(names, codes[:before], whole[:before])
    doc_ids, suffix, *columns = (column.combine_chunks() for column in ordered.columns)
    given = semantic_id.CodeRange(doc_ids, np.asarray(suffix), tuple(map(np.asarray, columns)))
    cut = before // 2  # within equal codes, as where very many documents share them
    pieces = (given.cut(0, cut), given.cut(cut, before))
    suffix, new = assign(codes, [each for each in pieces if len(each.suffix)])
    assert suffix.tolist() == whole.tolist()
    assert new.tolist() == [False] * before + [True] * after


def test_a_config_whose_sample_cannot_fill_a_codebook_is_refused() -> None:
    with pytest.raises(ValidationError, match="cannot fit codes=256"):
        QuantizeConfig(sample_documents=255)
    with pytest.raises(ValidationError, match="documents_per_worker=255 cannot fit codes=256"):
        QuantizeConfig(documents_per_worker=255)
