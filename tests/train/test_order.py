import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.errors import ConfigError, DataError
from scalingnote.train.config import Batching, Schedule
from scalingnote.train.data import Order, apportion, part_shares, permuted

SIZES = {"click/multi": 37, "click/one": 61, "relevance/one": 22}
STARTS = dict(zip(SIZES, np.cumsum([0, *SIZES.values()])[:-1].tolist(), strict=True))


def epoch(order: Order, number: int = 0, **kwargs) -> np.ndarray:
    first = number * order.steps_per_epoch
    return np.stack([order.batch(first + step, **kwargs) for step in range(order.steps_per_epoch)])


def parts(rows: np.ndarray) -> np.ndarray:
    return np.array(list(SIZES))[np.searchsorted(np.cumsum(list(SIZES.values())), rows, side="right")]


# --- the permutation -------------------------------------------------------------------------------------


@given(size=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9)))
def test_a_permutation_is_a_bijection(size: int, key: tuple[int, int]):
    found = permuted(np.arange(size), size=size, key=key)
    assert sorted(found.tolist()) == list(range(size))


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=50), st.integers(0, 99))
def test_a_number_goes_where_it_goes_whatever_is_asked_with_it(numbers: list[int], key: int):
    together = permuted(np.array(numbers), size=10**9, key=(key,))
    alone = [permuted(np.array([number]), size=10**9, key=(key,))[0] for number in numbers]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 10**9)).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_a_few_rows_comes_equally_often(size: int):
    keys = 300
    seen = Counter(tuple(permuted(np.arange(size), size=size, key=(key,)).tolist()) for key in range(keys))
    orders = list(itertools.permutations(range(size)))
    expected = keys / len(orders)
    chi_squared = sum((seen[order] - expected) ** 2 / expected for order in orders)
    # Mean and deviation of chi squared: five deviations are one in a million.
    free = len(orders) - 1
    assert chi_squared < free + 5 * (2 * free) ** 0.5


def test_neighbours_are_torn_apart():
    size = 10_007
    found = permuted(np.arange(size), size=size, key=(0,))
    correlation = np.corrcoef(found[:-1], found[1:])[0, 1]
    assert abs(correlation) < 5 / size**0.5
    assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 5 / size**0.5


# --- shares ----------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_apportioning_leaves_nothing_over_and_is_off_by_less_than_one(total: int, weights: list[int]):
    exact = np.array(weights) / sum(weights)
    found = apportion(total, exact)
    assert found.sum() == total
    assert (np.abs(found - total * exact) < 1 + 1e-6).all()


def test_a_sources_ratio_is_dealt_out_by_size_to_parts_without_their_own():
    found = part_shares({"click": 3.0, "relevance": 1.0}, SIZES)
    np.testing.assert_allclose(found, [0.75 * 37 / 98, 0.75 * 61 / 98, 0.25])
    found = part_shares({"click": 1.0, "click/multi": 2.0, "relevance/one": 1.0}, SIZES)
    np.testing.assert_allclose(found, [0.5, 0.25, 0.25])


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({"click": 1.0}, r"no entry for relevance/one \(22 rows\): 0 leaves it out"),
        ({"click": 1.0, "relevance": 1.0, "clicks": 1.0}, "no rows of 'clicks', only of click/multi"),
        ({"click": -1.0, "relevance": 1.0}, "must be 0 or more"),
        ({"click": 0.0, "relevance": 0.0}, "not all 0"),
    ],
)
def test_ratios_that_mean_nothing_are_refused(ratios: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        part_shares(ratios, SIZES)


# --- batches ---------------------------------------------------------------------------------------------


def test_an_epoch_visits_every_row_once_and_its_uneven_tail_is_left_out():
    order = Order(SIZES, global_batch=16, seed=5)
    assert order.steps_per_epoch == 7
    rows = epoch(order)
    assert rows.shape == (7, 16)
    assert len(set(rows.ravel().tolist())) == 112
    assert set(rows.ravel().tolist()) <= set(range(120))


def test_epochs_and_seeds_differ_and_a_step_is_the_same_whenever_it_is_asked():
    order = Order(SIZES, global_batch=16, seed=5)
    first, second = epoch(order), epoch(order, 1)
    assert first.tolist() != second.tolist()
    assert Order(SIZES, global_batch=16, seed=6).batch(0).tolist() != first[0].tolist()
    resumed = Order(SIZES, global_batch=16, seed=5)  # nothing remembered but the step
    assert resumed.batch(9).tolist() == second[2].tolist()
    assert resumed.batch(0).tolist() == first[0].tolist()


def test_a_part_of_an_epoch_is_rounded_and_too_few_rows_are_said():
    order = Order({"click/one": 100}, global_batch=10, seed=0)
    assert order.steps(Schedule(epochs=2.5)) == 25
    assert order.steps(Schedule(epochs=2.5, max_steps=7)) == 7
    with pytest.raises(DataError, match="9 training rows do not fill one global batch of 10"):
        Order({"click/one": 9}, global_batch=10, seed=0)


def test_ratios_hold_over_an_epoch_and_repeat_what_is_too_small():
    ratios = Batching(ratios={"click": 1, "relevance": 3})
    order = Order(SIZES, global_batch=12, seed=1, batching=ratios)
    found = Counter(parts(epoch(order)).ravel().tolist())
    assert found["relevance/one"] == 90  # of 120 rows; it has 22
    assert found["click/multi"] + found["click/one"] == 30
    repeats = Counter(epoch(order)[parts(epoch(order)) == "relevance/one"].tolist())
    assert set(repeats.values()) == {4, 5}  # 90 draws of 22 rows: none comes again before all have come


def test_a_large_part_with_a_small_ratio_is_seen_whole_before_anything_comes_back():
    ratios = Batching(ratios={"click/multi": 1, "click/one": 1, "relevance": 10})
    order = Order(SIZES, global_batch=12, seed=1, batching=ratios)
    drawn = np.concatenate([epoch(order, number).ravel() for number in range(6)])
    click = drawn[parts(drawn) == "click/one"]
    assert len(click) == 60  # ten an epoch
    assert len(set(click.tolist())) == 60


def test_a_part_of_ratio_zero_is_left_out():
    order = Order(SIZES, global_batch=12, seed=1, batching=Batching(ratios={"click": 1, "relevance": 0}))
    assert "relevance/one" not in parts(epoch(order))


@pytest.mark.parametrize("ratios", [{}, {"click": 1, "relevance": 3}])
def test_a_homogeneous_batch_is_of_one_part_and_meets_no_row_twice(ratios: dict[str, float]):
    batching = Batching(sources="homogeneous", ratios=ratios)
    order = Order(SIZES, global_batch=10, seed=3, batching=batching)
    for number in range(3):
        rows = epoch(order, number)
        of = parts(rows)
        assert (of == of[:, :1]).all()
        assert all(len(set(batch.tolist())) == 10 for batch in rows)
        assert {"click/one", "relevance/one"} <= set(of[:, 0])
        if not ratios:
            assert Counter(of[:, 0].tolist()) == {"click/multi": 3, "click/one": 6, "relevance/one": 2}
            assert len(set(rows.ravel().tolist())) == rows.size
    order_of_parts = [parts(epoch(order, number))[:, 0].tolist() for number in range(2)]
    assert order_of_parts[0] != order_of_parts[1]


def test_a_part_that_fills_no_homogeneous_batch_needs_a_ratio():
    with pytest.raises(ConfigError, match=r"relevance/one \(22 rows\) would not fill one batch of 30"):
        Order(SIZES, global_batch=30, seed=0, batching=Batching(sources="homogeneous"))
    ratios = {"click": 1.0, "relevance": 1.0}
    order = Order(SIZES, global_batch=30, seed=0, batching=Batching(sources="homogeneous", ratios=ratios))
    assert "relevance/one" in parts(epoch(order))


@pytest.mark.parametrize("sources", ["mixed", "homogeneous"])
@pytest.mark.parametrize("window", [3, 4, 100])
def test_a_window_of_lengths_moves_rows_between_its_batches_and_no_further(sources, window: int):
    length = np.random.default_rng(0).integers(1, 50, 120)
    plain = Order(SIZES, global_batch=10, seed=3, batching=Batching(sources=sources))
    sorted_ = Order(SIZES, global_batch=10, seed=3, batching=Batching(sources=sources, length_window=window))
    before, after = epoch(plain), epoch(sorted_, length_of=lambda rows: length[rows])
    for start in range(0, len(before), window):
        cut = slice(start, start + window)
        assert sorted(before[cut].ravel().tolist()) == sorted(after[cut].ravel().tolist())
    assert (parts(before)[:, 0] == parts(after)[:, 0]).all() or sources == "mixed"
    padding = [(length[rows].max(axis=1, keepdims=True) - length[rows]).sum() for rows in (before, after)]
    assert padding[1] < (0.7 if sources == "mixed" else 0.95) * padding[0]
    widths = length[after].max(axis=1)
    assert widths.tolist() != sorted(widths.tolist())


def test_windows_are_the_same_whichever_step_comes_first():
    length = np.random.default_rng(0).integers(1, 50, 120)
    batching = Batching(length_window=4)
    forward = epoch(Order(SIZES, global_batch=10, seed=3, batching=batching), length_of=length.__getitem__)
    order = Order(SIZES, global_batch=10, seed=3, batching=batching)
    for step in reversed(range(len(forward))):
        assert order.batch(step, length_of=length.__getitem__).tolist() == forward[step].tolist()


def test_a_hundred_million_rows_cost_a_batch():
    sizes = {"click/multi": 60_000_000, "click/one": 39_999_999, "relevance/one": 7}
    batching = Batching(ratios={"click": 0.9, "relevance": 0.1})
    order = Order(sizes, global_batch=512, seed=0, batching=batching)
    rows = order.batch(195_000)
    assert rows.max() < sum(sizes.values())
    assert 20 < (rows >= 99_999_999).sum() < 90
