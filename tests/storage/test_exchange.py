import numpy as np
import pyarrow as pa
import pytest

from scalingnote.errors import DataError
from scalingnote.storage import shuffle

SCHEMA = pa.schema({"key": pa.string(), "value": pa.int64()})


@pytest.mark.parametrize(
    "keys", [[f"k{i % 50}" for i in range(400)], list(range(400))], ids=["text", "numbers"]
)
def test_every_row_arrives_once_in_the_bucket_of_its_key(tmp_path, keys):
    whole = pa.table({"key": keys, "value": range(400)})
    for number in range(4):
        piece = whole.slice(number * 100, 100)
        shuffle.scatter(
            piece, shuffle.bucket_of(piece["key"], 7), target=str(tmp_path), name=f"slice-{number}"
        )
    gathered = [shuffle.gather(str(tmp_path), bucket, schema=whole.schema) for bucket in range(7)]
    assert sorted(v for table in gathered for v in table["value"].to_pylist()) == list(range(400))
    assert [shuffle.count_rows(str(tmp_path), bucket) for bucket in range(7)] == [len(t) for t in gathered]
    for bucket, table in enumerate(gathered):
        assert set(shuffle.bucket_of(table["key"], 7).tolist()) <= {bucket}
        assert table["value"].to_pylist() == sorted(table["value"].to_pylist())  # slice after slice


def test_a_slice_that_is_written_again_replaces_itself(tmp_path):
    table = pa.table({"key": ["a", "b"], "value": [1, 2]}, schema=SCHEMA)
    for _ in range(2):
        shuffle.scatter(table, np.array([0, 0]), target=str(tmp_path), name="one")
    assert shuffle.gather(str(tmp_path), 0, schema=SCHEMA).equals(table)
    shuffle.scatter(SCHEMA.empty_table(), np.array([], np.int64), target=str(tmp_path), name="two")
    assert len(shuffle.gather(str(tmp_path), 1, schema=SCHEMA)) == 0


def test_a_hash_is_that_of_the_key_however_the_column_is_cut():
    keys = pa.array([f"k{i % 7}" for i in range(20)])
    whole = shuffle.hash_of(keys)
    np.testing.assert_array_equal(shuffle.hash_of(pa.chunked_array([keys[:3], keys[:0], keys[3:]])), whole)
    assert shuffle.hash_of(pa.chunked_array([], pa.string())).shape == (0,)


@pytest.mark.parametrize("keys", [["a", None, None], [1, None, None]], ids=["text", "numbers"])
def test_a_row_without_a_key_has_no_bucket(keys):
    with pytest.raises(DataError, match="2 of 3 keys are null: leave out rows"):
        shuffle.bucket_of(pa.array(keys), 7)
