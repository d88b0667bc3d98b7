"""Declared features: what is fitted, what is missing, and that slices together tell what the whole would."""

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.errors import ConfigError
from scalingnote.fuse.config import Bucketed, Categorical, Feature, Numeric, Vector
from scalingnote.fuse.feature_encoding import (
    MISSING,
    OTHER,
    encode,
    encode_mappings,
    fit,
    no_values,
    observe,
)

FEATURES = (
    Categorical(column="brand", max_values=2),
    Bucketed(column="price", buckets=4),
    Numeric(column="price"),
    Numeric(column="price", normalise="log"),
    Numeric(column="released", normalise="standard"),
    Vector(column="image", dim=2),
)


def table(rows: int = 1000) -> pa.Table:
    rng = np.random.default_rng(0)
    brands = rng.choice(["a", "b", "c", ""], rows, p=[0.5, 0.3, 0.1, 0.1])
    return pa.table(
        {
            "brand": pa.array(brands.tolist()),
            "price": pa.array(np.exp(rng.standard_normal(rows)).tolist()),
            "released": pa.array([f"2020-01-{1 + i % 28:02d}" for i in range(rows)]),
            "image": pa.array(rng.standard_normal((rows, 2)).tolist(), pa.list_(pa.float64())),
        }
    )


def test_slices_together_fit_what_the_whole_does():
    whole = table()
    one = fit(FEATURES, [observe(FEATURES, whole)])
    several = fit(FEATURES, [observe(FEATURES, whole.slice(start, 250)) for start in (500, 0, 750, 250)])
    assert one[0].facts == several[0].facts == {"values": ["a", "b"]}
    for left, right in zip(one[1:], several[1:], strict=True):
        for name, value in left.facts.items():
            np.testing.assert_allclose(value, right.facts[name], rtol=1e-6)


def test_values_become_what_their_kind_says():
    whole = table()
    found = encode(fit(FEATURES, [observe(FEATURES, whole)]), whole)
    brands = whole["brand"].to_pylist()
    wanted = {"a": 2, "b": 3, "c": OTHER, "": MISSING}
    assert found.indices[:, 0].tolist() == [wanted[brand] for brand in brands]
    prices = whole["price"].to_numpy()
    assert np.bincount(found.indices[:, 1]).tolist() == [0, 0, 250, 250, 250, 250]
    ranks = np.argsort(np.argsort(prices)) / (len(prices) - 1)
    np.testing.assert_allclose(found.numbers[:, 0], 2 * ranks - 1, atol=0.02)
    logs = np.log1p(prices)
    np.testing.assert_allclose(found.numbers[:, 1], (logs - logs.mean()) / logs.std(), atol=1e-5)
    days = np.array([int(text[-2:]) for text in whole["released"].to_pylist()], float)
    np.testing.assert_allclose(found.numbers[:, 2], (days - days.mean()) / days.std(), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found.numbers[:, 3:], axis=1), 1, atol=1e-6)


def test_what_cannot_be_read_is_missing():
    encodings = fit(FEATURES, [observe(FEATURES, table())])
    broken = pa.table(
        {
            "brand": pa.array([None, "", "strange"]),
            "price": pa.array([None, np.nan, np.inf]),
            "released": pa.array([None, "soon", "2020-13-99"]),
            "image": pa.array([None, [1.0], [1.0, np.nan]], pa.list_(pa.float64())),
        }
    )
    found = encode(encodings, broken)
    assert found.indices.tolist() == [[MISSING, MISSING], [MISSING, MISSING], [OTHER, MISSING]]
    assert np.isnan(found.numbers).all()
    nowhere = encode(encodings, pa.table({"x": [1, 2]}))
    nothing = no_values(encodings, 2)
    assert (nowhere.indices == nothing.indices).all()
    assert np.isnan(nowhere.numbers).all()
    assert nowhere.numbers.shape == nothing.numbers.shape == (2, 5)


def test_a_strange_value_of_one_user_leaves_the_others_alone():
    encodings = fit(FEATURES, [observe(FEATURES, table())])
    good = {"brand": "a", "price": 2, "released": dt.date(2020, 1, 3), "image": [3, 4]}
    strange = {"brand": ["a"], "price": "cheap", "released": object(), "image": "no vector"}
    found = encode_mappings(encodings, [good, strange, {}])
    asked = {**good, "released": "2020-01-03"}
    alone = encode(encodings, pa.Table.from_pylist([asked]))
    assert found.indices[0].tolist() == alone.indices[0].tolist()
    np.testing.assert_allclose(found.numbers[0], alone.numbers[0])
    assert not found.indices[1:].any()
    assert np.isnan(found.numbers[1:]).all()


@pytest.mark.parametrize(
    ("feature", "value"),
    [
        (FEATURES[0], 10**30),
        (FEATURES[0], "\ud800"),
        (FEATURES[1], 10**400),
        (FEATURES[2], 10**400),
        (FEATURES[4], "\ud800"),
        (FEATURES[5], [10**400, 1]),
        (FEATURES[5], [None, 1]),
    ],
    ids=lambda given: type(given).__name__,  # 400 digits are no name of a test
)
def test_a_value_that_no_column_could_hold_is_missing(feature: Feature, value: object):
    whole = table()
    encodings = fit((feature,), [observe((feature,), whole)])
    good = whole.select([feature.column]).slice(0, 1)
    found = encode_mappings(encodings, [*good.to_pylist(), {feature.column: value}])
    alone, nothing = encode(encodings, good), no_values(encodings, 1)
    np.testing.assert_array_equal(found.indices, np.concatenate([alone.indices, nothing.indices]))
    np.testing.assert_array_equal(found.numbers, np.concatenate([alone.numbers, nothing.numbers]))


def test_dates_are_read_alike_in_training_and_in_serving():
    feature = (Numeric(column="when", normalise="standard"),)
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(60)]
    encodings = fit(feature, [observe(feature, pa.table({"when": [str(day) for day in days]}))])
    read = ["2024-02-29", "2024-01-05T23:59", "2024-01-05 and more"]
    unread = ["20240105", "2024-02-31", "2023-02-29", "2024-1-5", " 2024-01-05", "2024-W01-1", "12", "", None]
    trained = encode(encodings, pa.table({"when": [*read, *unread]})).numbers
    served = encode_mappings(encodings, [{"when": text} for text in [*read, *unread]]).numbers
    np.testing.assert_array_equal(trained, served)
    large = pa.table({"when": pa.array([*read, *unread], pa.large_string())})
    np.testing.assert_array_equal(trained, encode(encodings, large).numbers)
    assert np.isnan(trained[:, 0]).tolist() == [False] * len(read) + [True] * len(unread)
    noon = dt.datetime(2024, 1, 5, 12, tzinfo=dt.UTC)
    np.testing.assert_array_equal(
        encode(encodings, pa.table({"when": pa.array([noon], pa.timestamp("s", "UTC"))})).numbers,
        encode_mappings(encodings, [{"when": noon}]).numbers,
    )


def test_integers_and_truth_are_categories_too():
    whole = pa.table({"colour": [7, 7, 9, 9, 9], "new": [True, True, False, True, True]})
    features = (Categorical(column="colour"), Categorical(column="new", min_count=1))
    encodings = fit(features, [observe(features, whole)])
    assert [encoding.facts["values"] for encoding in encodings] == [["9", "7"], ["true", "false"]]
    rows = encode_mappings(encodings, [{"colour": 9, "new": True}, {"colour": "7", "new": False}])
    assert rows.indices.tolist() == [[2, 2], [3, 3]]


def test_times_are_days():
    feature = (Numeric(column="when", normalise="standard"),)
    when = pa.array([dt.datetime(2020, 1, day) for day in (1, 2, 3)], pa.timestamp("ms"))
    encodings = fit(feature, [observe(feature, pa.table({"when": when}))])
    assert encodings[0].facts["mean"] == 18263
    np.testing.assert_allclose(
        encode(encodings, pa.table({"when": when})).numbers[:, 0], np.array([-1, 0, 1]) * 1.5**0.5, rtol=1e-6
    )


def test_a_feature_without_column_or_values_is_refused():
    with pytest.raises(ConfigError, match="no column 'brand'"):
        observe(FEATURES, pa.table({"price": [1.0]}))
    empty = pa.table({"price": pa.nulls(3, pa.float64())})
    only = (Numeric(column="price"),)
    with pytest.raises(ConfigError, match="'price' is a number or date in no row"):
        fit(only, [observe(only, empty)])
