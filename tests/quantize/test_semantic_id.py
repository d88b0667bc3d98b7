import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scalingnote.quantize import semantic_id
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.storage import schema


@given(st.lists(st.text(max_size=5), unique=True, max_size=60), st.integers(0, 60))
def test_a_suffix_depends_on_the_document_alone(doc_ids: list[str], cut: int) -> None:
    whole = semantic_id.suffixes(pa.array(doc_ids, pa.string()))
    assert (whole >= 0).all()
    assert len(set(whole.tolist())) == len(doc_ids)
    parts = pa.chunked_array([doc_ids[cut:], doc_ids[:cut]], pa.string())
    assert semantic_id.suffixes(parts).tolist() == [*whole[cut:].tolist(), *whole[:cut].tolist()]


def test_suffixes_are_the_same_on_every_machine() -> None:
    assert semantic_id.suffixes(pa.array(["d17"])).tolist() == [4527695071737464907]


def test_the_table_has_the_columns_of_the_schema() -> None:
    codes = np.array([[3, 1], [2, 5]], np.int32)
    table = semantic_id.to_table(pa.chunked_array([["a", "b"]]), codes, np.array([0, 4]))
    assert table.schema.equals(schema.semantic_ids(2))
    assert table.to_pylist()[1] == {"doc_id": "b", "codes": [2, 5], "suffix": 4, "semantic_id": "2-5-4"}


def test_a_config_whose_sample_cannot_fill_a_codebook_is_refused() -> None:
    with pytest.raises(ValidationError, match="cannot fit codes=256"):
        QuantizeConfig(sample_documents=255)
