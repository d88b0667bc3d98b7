"""Train and test share no group; the windows of a log.

test_logs_job.py tests the split of a log's queries.
"""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scalingnote.core.errors import DataError
from scalingnote.datasets import splits
from scalingnote.datasets.config import Logs
from scalingnote.datasets.splits import uniform

FILES = {"documents": {"path": "d"}, "impressions": {"path": "i"}}
HOUR = 3_600_000


def test_windows_are_half_open_and_may_be_adjacent():
    config = Logs(
        **FILES, train=("1970-01-01", "1970-01-02"), test=("1970-01-02", "1970-01-03T00:00:00+01:00")
    )
    windows = splits.choose_windows(config, first=0, last=72 * HOUR)
    assert windows == splits.SplitWindows((0, 24 * HOUR), (24 * HOUR, 47 * HOUR))
    times = pa.chunked_array([pa.array([-1, 0, 24 * HOUR - 1, 24 * HOUR, 47 * HOUR - 1, 47 * HOUR])])
    stamps = times.cast(pa.timestamp("ms"))
    assert splits.in_window(stamps, windows.train).to_pylist() == [False, True, True, False, False, False]
    assert splits.in_window(stamps, windows.test).to_pylist() == [False, False, False, True, True, False]
    assert windows.as_iso()["train"] == ["1970-01-01T00:00:00.000+00:00", "1970-01-02T00:00:00.000+00:00"]


def test_without_windows_the_end_of_the_span_is_for_test():
    windows = splits.choose_windows(Logs(**FILES, test_fraction=0.25), first=1000, last=1999)
    assert windows == splits.SplitWindows((1000, 1750), (1750, 2000))


def test_a_log_outside_its_windows_is_an_error():
    config = Logs(**FILES, train=("2024-01-01", "2024-02-01"), test=("2024-02-01", "2024-03-01"))
    # Milliseconds read as seconds: the year 55,000.
    with pytest.raises(DataError, match=r"spans 1700000000000 s after 1970 .*dataset\.timestamp_unit"):
        splits.choose_windows(config, first=1_700_000_000_000_000, last=1_700_000_000_000_001)
    with pytest.raises(DataError, match="no impression is in the train window"):
        splits.choose_windows(config, first=0, last=HOUR)


@pytest.mark.parametrize(
    ("windows", "error"),
    [
        ({"train": ("2024-01-01", "2024-02-01")}, "come together"),
        ({"train": ("2024-02-01", "2024-01-01"), "test": ("2024-03-01", "2024-04-01")}, "before it starts"),
        ({"train": ("2024-01-01", "2024-02-02"), "test": ("2024-02-01", "2024-04-01")}, "before train ends"),
        ({"max_documents": 10}, "max_documents"),
    ],
)
def test_inconsistent_windows_are_errors(windows, error):
    with pytest.raises(ValidationError, match=error):
        Logs(**FILES, **windows)


# --- by groups

PAIRS = pa.schema({"query_id": pa.string(), "group": pa.string()})


def test_uniform_depends_on_key_and_seed_only():
    assert uniform("a", seed=0) == uniform("a", seed=0)
    assert uniform("a", seed=0) != uniform("a", seed=1)
    values = [uniform(str(n), seed=0) for n in range(5000)]
    assert 0.48 < sum(values) / len(values) < 0.52
    assert all(0 <= value < 1 for value in values)


def held_out(pairs, queries, *, fraction, seed=0):
    """Return the test queries of (query, group) pairs."""
    ids = pa.array(queries, pa.string())
    positives = pa.table({"query_id": [q for q, _ in pairs], "group": [g for _, g in pairs]}, schema=PAIRS)
    return set(
        ids.filter(pa.array(splits.held_out(ids, positives, fraction=fraction, seed=seed))).to_pylist()
    )


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 30)), max_size=40),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_training_queries_have_no_test_group(pairs, groups, fraction):
    pairs = [(f"q{q}", f"g{d % groups}") for q, d in pairs]
    queries = [f"q{q}" for q in range(16)]
    test = held_out(pairs, queries, fraction=fraction)
    assert not {g for q, g in pairs if q in test} & {g for q, g in pairs if q not in test}
    assert test == held_out(pairs[::-1], queries[::-1], fraction=fraction)
    assert test == {q for q in queries if uniform(_first_name(q, pairs), seed=0) < fraction}


def _first_name(query, pairs):
    """Return the first group of the query's component, found by a walk."""
    queries, groups = {query}, set()
    while True:
        reached_groups = {g for q, g in pairs if q in queries}
        reached_queries = queries | {q for q, g in pairs if g in reached_groups}
        if (reached_groups, reached_queries) == (groups, queries):
            return f"g:{min(groups)}" if groups else f"q:{query}"
        groups, queries = reached_groups, reached_queries
