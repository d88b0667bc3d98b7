"""Train and test never share a group, whatever joins them."""

from hypothesis import given
from hypothesis import strategies as st

from scalingnote.datasets.splits import held_out, uniform


def test_uniform_depends_on_key_and_seed_only():
    assert uniform("a", seed=0) == uniform("a", seed=0)
    assert uniform("a", seed=0) != uniform("a", seed=1)
    values = [uniform(str(n), seed=0) for n in range(5000)]
    assert 0.48 < sum(values) / len(values) < 0.52
    assert all(0 <= value < 1 for value in values)


def test_the_share_is_about_the_fraction():
    positives = [(f"q{n}", f"d{n}") for n in range(5000)]
    group_of = {d: d for _, d in positives}
    test = held_out(positives, query_ids=[q for q, _ in positives], group_of=group_of, fraction=0.1, seed=3)
    assert 430 < len(test) < 570


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 30)), max_size=40),
    st.integers(1, 40),
    st.floats(0, 1),
)
def test_no_training_query_touches_a_test_group(pairs, groups, fraction):
    positives = [(f"q{q}", f"d{d}") for q, d in pairs]
    group_of = {f"d{d}": f"g{d % groups}" for d in range(31)}
    queries = [f"q{q}" for q in range(16)]
    test = held_out(positives, query_ids=queries, group_of=group_of, fraction=fraction, seed=0)
    of_test = {group_of[d] for q, d in positives if q in test}
    of_train = {group_of[d] for q, d in positives if q not in test}
    assert not of_test & of_train
    again = held_out(positives[::-1], query_ids=queries[::-1], group_of=group_of, fraction=fraction, seed=0)
    assert test == again


def test_all_or_nothing():
    positives, group_of = [("q", "d")], {"d": "g"}
    assert held_out(positives, query_ids=["q"], group_of=group_of, fraction=1.0, seed=0) == {"q"}
    assert held_out(positives, query_ids=["q"], group_of=group_of, fraction=0.0, seed=0) == set()
