"""Train and test never share a group, whatever joins them."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.datasets import splits
from scalingnote.datasets.splits import uniform

PAIRS = pa.schema({"query_id": pa.string(), "group": pa.string()})


def test_uniform_depends_on_key_and_seed_only():
    assert uniform("a", seed=0) == uniform("a", seed=0)
    assert uniform("a", seed=0) != uniform("a", seed=1)
    values = [uniform(str(n), seed=0) for n in range(5000)]
    assert 0.48 < sum(values) / len(values) < 0.52
    assert all(0 <= value < 1 for value in values)


def held_out(pairs, queries, *, fraction, seed=0):
    """The test queries of (query, group) pairs."""
    ids = pa.array(queries, pa.string())
    positives = pa.table({"query_id": [q for q, _ in pairs], "group": [g for _, g in pairs]}, schema=PAIRS)
    return set(
        ids.filter(pa.array(splits.held_out(ids, positives, fraction=fraction, seed=seed))).to_pylist()
    )


def test_the_share_is_about_the_fraction():
    pairs = [(f"q{n}", f"d{n}") for n in range(5000)]
    assert 430 < len(held_out(pairs, [q for q, _ in pairs], fraction=0.1, seed=3)) < 570


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 30)), max_size=40),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_no_training_query_touches_a_test_group(pairs, groups, fraction):
    pairs = [(f"q{q}", f"g{d % groups}") for q, d in pairs]
    queries = [f"q{q}" for q in range(16)]
    test = held_out(pairs, queries, fraction=fraction)
    assert not {g for q, g in pairs if q in test} & {g for q, g in pairs if q not in test}
    assert test == held_out(pairs[::-1], queries[::-1], fraction=fraction)
    assert test == {q for q in queries if uniform(_first_name(q, pairs), seed=0) < fraction}


def _first_name(query, pairs):
    """The first group of the query's component, found by a walk."""
    queries, groups = {query}, set()
    while True:
        found = {g for q, g in pairs if q in queries}
        joined = queries | {q for q, g in pairs if g in found}
        if (found, joined) == (groups, queries):
            return f"g:{min(groups)}" if groups else f"q:{query}"
        groups, queries = found, joined


def test_all_or_nothing():
    assert held_out([("q", "g")], ["q"], fraction=1.0) == {"q"}
    assert held_out([("q", "g")], ["q"], fraction=0.0) == set()
