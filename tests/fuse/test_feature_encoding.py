"""Declared features: fitted facts, missing values, and equal codes of rows in training and in serving."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.core.errors import ConfigError
from scalingnote.fuse.config import Feature
from scalingnote.fuse.feature_encoding import BUCKETS, OTHER_INDEX, encode, encode_mappings, fit

BRAND = Feature(kind="categorical", column="brand")
BUCKETED = Feature(kind="bucketed", column="price")
PRICE = Feature(kind="numeric", column="price")
RELEASED = Feature(kind="numeric", column="released")
IMAGE = Feature(kind="vector", column="image", dim=2)
FEATURES = (BRAND, BUCKETED, PRICE, RELEASED, IMAGE)


def table(rows: int = 1600) -> pa.Table:
    rng = np.random.default_rng(0)
    brands = [["a", "a", "b", ""][i % 4] for i in range(rows - 1)]
    return pa.table(
        {
            "brand": ["rare", *brands],
            "price": pa.array(np.exp(rng.standard_normal(rows)).tolist()),
            "released": pa.array([f"2020-01-{1 + i % 28:02d}" for i in range(rows)]),
            "image": pa.array(rng.standard_normal((rows, 2)).tolist(), pa.list_(pa.float64())),
        }
    )


def test_values_are_encoded_by_the_kind_of_the_feature():
    whole = table()
    encodings = fit(FEATURES, whole)
    assert encodings[0].facts == {"values": ["a", "b"]}
    brand, bucket, price, released, *image = encode(encodings, whole).T
    expected = {"a": OTHER_INDEX + 1, "b": OTHER_INDEX + 2, "rare": OTHER_INDEX, "": np.nan}
    np.testing.assert_array_equal(brand, [expected[name] for name in whole["brand"].to_pylist()])
    values, counts = np.unique(bucket, return_counts=True)
    assert len(values) == values[-1] - OTHER_INDEX == BUCKETS
    assert set(counts) == {len(whole) // BUCKETS}
    prices = whole["price"].to_numpy()
    ranks = np.argsort(np.argsort(prices)) / (len(prices) - 1)
    np.testing.assert_allclose(price, 2 * ranks - 1, atol=0.02)
    days = np.array([int(text[-2:]) for text in whole["released"].to_pylist()], float)
    assert np.corrcoef(released, days)[0, 1] > 0.99
    np.testing.assert_allclose(np.linalg.norm(image, axis=0), 1, atol=1e-6)


def test_unreadable_values_are_missing():
    encodings = fit(FEATURES, table())
    broken = pa.table(
        {
            "brand": pa.array([None, "", "strange"]),
            "price": pa.array([None, np.nan, np.inf]),
            "released": pa.array([None, "soon", "2020-13-99"]),
            "image": pa.array([None, [1.0], [1.0, np.nan]], pa.list_(pa.float64())),
        }
    )
    encoded = encode(encodings, broken)
    assert encoded.shape == (3, 6)
    assert np.argwhere(~np.isnan(encoded)).tolist() == [[2, 0]]
    assert encoded[2, 0] == OTHER_INDEX
    assert np.isnan(encode(encodings, pa.table({"x": [1, 2]}))).all()


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (BRAND, ["a"]),
        (BRAND, 10**30),
        (BRAND, "\ud800"),
        (BUCKETED, 10**400),
        (PRICE, "cheap"),
        (PRICE, 10**400),
        (RELEASED, object()),
        (RELEASED, "\ud800"),
        (IMAGE, "no vector"),
        (IMAGE, [10**400, 1]),
        (IMAGE, [None, 1]),
    ],
    ids=lambda value: type(value).__name__,  # 400 digits are too long for the name of a test
)
def test_a_value_of_a_wrong_type_is_missing_in_its_row_only(feature: Feature, value: object):
    whole = table()
    encodings = fit((feature,), whole)
    good = whole.select([feature.column]).slice(1, 1)
    encoded = encode_mappings(encodings, [*good.to_pylist(), {feature.column: value}, {}])
    np.testing.assert_array_equal(encoded[:1], encode(encodings, good))
    assert np.isnan(encoded[1:]).all()


def test_training_and_serving_read_dates_in_the_same_way():
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(60)]
    encodings = fit((Feature(kind="numeric", column="when"),), pa.table({"when": [str(day) for day in days]}))
    valid = ["2024-02-29", "2024-01-05T23:59", "2024-01-05 and more"]
    invalid = [
        "20240105",
        "2024-02-31",
        "2023-02-29",
        "2024-1-5",
        " 2024-01-05",
        "2024-W01-1",
        "12",
        "",
        None,
    ]
    trained = encode(encodings, pa.table({"when": [*valid, *invalid]}))
    served = encode_mappings(encodings, [{"when": text} for text in [*valid, *invalid]])
    np.testing.assert_array_equal(trained, served)
    large = pa.table({"when": pa.array([*valid, *invalid], pa.large_string())})
    np.testing.assert_array_equal(trained, encode(encodings, large))
    assert np.isnan(trained[:, 0]).tolist() == [False] * len(valid) + [True] * len(invalid)
    noon = dt.datetime(2024, 1, 5, 12, tzinfo=dt.UTC)
    times = encode(encodings, pa.table({"when": pa.array([noon], pa.timestamp("ms", "UTC"))}))
    np.testing.assert_array_equal(times, encode_mappings(encodings, [{"when": noon}]))
    np.testing.assert_array_equal(trained[1], encode_mappings(encodings, [{"when": days[4]}])[0])


def test_integers_and_booleans_may_be_categories():
    whole = pa.table({"colour": [7, 7, 9, 9, 9], "new": [True, True, False, False, True]})
    encodings = fit([Feature(kind="categorical", column=name) for name in whole.column_names], whole)
    assert [encoding.facts["values"] for encoding in encodings] == [["9", "7"], ["true", "false"]]
    rows = encode_mappings(encodings, [{"colour": 9, "new": True}, {"colour": "7", "new": False}])
    assert (rows - OTHER_INDEX).tolist() == [[1, 1], [2, 2]]


@pytest.mark.parametrize(("feature", "kind"), [(PRICE, "number or date"), (BRAND, "text"), (IMAGE, "vector")])
def test_a_feature_without_values_is_refused(feature: Feature, kind: str):
    with pytest.raises(ConfigError, match=f"'{feature.column}' is a {kind}.* in no row"):
        fit((feature,), pa.table({feature.column: pa.nulls(3)}))
