import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.train.config import Batching, Schedule
from scalingnote.train.data import Order, permute

SIZES = {"click/multi": 37, "click/one": 61, "relevance/one": 22}
HOMOGENEOUS = Batching(sources="homogeneous")


def order(batch: int = 16, sizes: dict[str, int] = SIZES, *args, seed: int = 5, **length) -> Order:
    return Order(Schedule(global_batch=batch, seed=seed, **length), sizes, *args)


def epoch(run_order: Order, number: int = 0) -> np.ndarray:
    first = number * run_order.steps_per_epoch
    return np.stack([run_order.batch(first + step) for step in range(run_order.steps_per_epoch)])


def parts(rows: np.ndarray) -> np.ndarray:
    return np.array(list(SIZES))[np.searchsorted(np.cumsum(list(SIZES.values())), rows, side="right")]


# --- the permutation -------------------------------------------------------------------------------------


@given(size=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 9)))
def test_a_permutation_is_a_bijection(size: int, key: tuple[int, int]):
    images = permute(np.arange(size), size=size, key=key)
    assert sorted(images.tolist()) == list(range(size))


@given(st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=50), st.integers(0, 99))
def test_the_image_of_a_number_does_not_depend_on_other_numbers(numbers: list[int], key: int):
    together = permute(np.array(numbers), size=10**9, key=(key,))
    separately = [permute(np.array([number]), size=10**9, key=(key,))[0] for number in numbers]
    assert together.tolist() == separately
    assert ((together >= 0) & (together < 10**9)).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_of_a_few_rows_are_equally_frequent(size: int):
    keys = 300
    counts = Counter(tuple(permute(np.arange(size), size=size, key=(key,)).tolist()) for key in range(keys))
    orders = list(itertools.permutations(range(size)))
    expected = keys / len(orders)
    chi_squared = sum((counts[row_order] - expected) ** 2 / expected for row_order in orders)
    # Mean and deviation of chi squared: a distance of five deviations has a probability of one in a million.
    degrees = len(orders) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5


def test_neighbours_are_not_correlated():
    size = 10_007
    images = permute(np.arange(size), size=size, key=(0,))
    for left, right in ((images[:-1], images[1:]), (np.arange(size), images)):
        assert abs(np.corrcoef(left, right)[0, 1]) < 5 / size**0.5


# --- batches ---------------------------------------------------------------------------------------------


def test_an_epoch_reads_rows_once_and_leaves_out_its_tail():
    rows = epoch(order())
    assert rows.shape == (7, 16)
    assert len(set(rows.ravel().tolist())) == 112
    assert set(rows.ravel().tolist()) <= set(range(120))


def test_epochs_and_seeds_differ_and_steps_have_no_state():
    first, second = epoch(order()), epoch(order(), 1)
    assert first.tolist() != second.tolist()
    assert order(seed=6).batch(0).tolist() != first[0].tolist()
    resumed = order()  # the step is the only state
    assert resumed.batch(9).tolist() == second[2].tolist()
    assert resumed.batch(0).tolist() == first[0].tolist()


def test_partial_epochs_are_rounded_and_too_few_rows_are_refused():
    assert order(10, {"click/one": 100}, epochs=2.5).steps == 25
    assert order(10, {"click/one": 100}, epochs=2.5, max_steps=7).steps == 7
    with pytest.raises(DataError, match="9 training rows do not fill one global batch of 10"):
        order(10, {"click/one": 9})


def test_all_rows_of_a_part_are_read_before_one_repeats():
    epochs = {"click/multi": 1.0, "click/one": 0.25, "relevance/one": 2.0}
    run_order = order(12, SIZES, None, epochs)
    rows = np.concatenate([epoch(run_order, number).ravel() for number in range(4)])
    click = rows[parts(rows) == "click/one"]
    assert 50 < len(set(click.tolist())) == len(click) <= 61
    repeats = Counter(epoch(run_order)[parts(epoch(run_order)) == "relevance/one"].tolist())
    assert set(repeats.values()) <= {1, 2}


def test_a_homogeneous_batch_has_one_part_and_no_repeated_row():
    run_order = order(10, SIZES, HOMOGENEOUS)
    for number in range(3):
        rows = epoch(run_order, number)
        row_parts = parts(rows)
        assert (row_parts == row_parts[:, :1]).all()
        assert Counter(row_parts[:, 0].tolist()) == {"click/multi": 3, "click/one": 6, "relevance/one": 2}
        assert len(set(rows.ravel().tolist())) == rows.size
    order_of_parts = [parts(epoch(run_order, number))[:, 0].tolist() for number in range(2)]
    assert order_of_parts[0] != order_of_parts[1]
    with pytest.raises(ConfigError, match=r"relevance/one \(22 rows\) would not fill one batch of 30"):
        order(30, SIZES, HOMOGENEOUS)


def test_a_batch_of_a_hundred_million_rows_needs_no_table():
    sizes = {"click/multi": 60_000_000, "click/one": 39_999_999, "relevance/one": 7}
    rows = order(512, sizes).batch(195_000)
    assert rows.max() < sum(sizes.values())
    assert len(set(rows.tolist())) == 512
