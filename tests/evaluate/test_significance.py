"""Significance against scipy's paired t-test, a bootstrap in loops, and Holm's steps by hand."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from scalingnote.errors import ConfigError
from scalingnote.evaluate.measures import bootstrap, differences_from_baseline, paired_t_test
from scalingnote.experiment import report


def drawn(queries: int = 60) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    base = rng.random(queries)
    better = base + rng.normal(0.1, 0.2, queries)
    same = base + rng.normal(0.0, 0.2, queries)
    values = {"teacher": base, "better": better, "same": same, "twin": base.copy()}
    return {name: {"nDCG@10": row, "R@1": (row > 0.5).astype(float)} for name, row in values.items()}


def test_t_test_is_scipys():
    methods = drawn()
    base = methods["teacher"]["nDCG@10"]
    for name in ("better", "same"):
        found = paired_t_test((methods[name]["nDCG@10"] - base)[:, None])
        assert found[0] == pytest.approx(stats.ttest_rel(methods[name]["nDCG@10"], base).pvalue)


def test_t_test_where_nothing_varies_and_where_nothing_can_be_said():
    columns = np.stack([np.zeros(5), np.full(5, 0.1)], axis=1)
    assert paired_t_test(columns).tolist() == [
        1.0,
        2 / 2**5,
    ]  # of 32 ways to sign five, two are as far from 0
    assert paired_t_test(np.full((2, 1), 0.3)).tolist() == [0.5]
    assert math.isnan(paired_t_test(np.ones((1, 1)))[0])


def test_bootstrap_is_that_of_loops(monkeypatch):
    monkeypatch.setattr(report, "_MAX_DRAWS_IN_MEMORY", 700)  # several blocks of draws
    values = np.random.default_rng(0).normal(0.2, 1.0, 40)
    low, high = bootstrap(values[:, None], alpha=0.1, resamples=4000, seed=1)[:, 0]
    draw = random.Random(2)
    means = sorted(sum(draw.choices(values.tolist(), k=40)) / 40 for _ in range(4000))
    assert low == pytest.approx(means[200], abs=0.03)
    assert high == pytest.approx(means[3800], abs=0.03)
    assert low < values.mean() < high


def test_intervals_of_a_family_hold_all_at_once():
    """Nine methods that do not differ from the baseline: how often is there one that seems to?"""
    rng, missed, alone = np.random.default_rng(5), 0, 0
    for trial in range(200):
        differences = rng.normal(size=(80, 9)) + rng.normal(size=(80, 1))
        knobs = {"alpha": 0.1, "resamples": 300, "seed": trial}
        low, high = bootstrap(differences, families=["R@1"] * 9, **knobs)
        missed += bool(((low > 0) | (high < 0)).any())
        low, high = bootstrap(differences, **knobs)
        alone += bool(((low > 0) | (high < 0)).any())
    assert missed <= 0.17 * 200  # two standard errors above alpha, and what 80 queries are too few for
    assert alone > 0.3 * 200


def test_each_family_has_a_correction_of_its_own():
    columns = np.random.default_rng(1).normal(0.3, 1.0, (50, 4))
    columns[:, 3] = 0.1  # nothing varies but by rounding
    knobs = {"alpha": 0.05, "resamples": 500, "seed": 2}
    together = bootstrap(columns, families=["a", "b", "b", "b"], **knobs)
    apart = bootstrap(columns, **knobs)
    np.testing.assert_array_equal(together[:, 0], apart[:, 0])
    assert (together[1, 1:3] > apart[1, 1:3]).all()
    np.testing.assert_allclose(together[:, 3], 0.1)
    without = bootstrap(columns[:, :3], families=["a", "b", "b"], **knobs)
    np.testing.assert_allclose(together[:, :3], without)


def test_every_method_is_compared_with_the_baseline_and_corrected():
    methods = drawn()
    found = differences_from_baseline("teacher", methods, alpha=0.05, resamples=200, seed=0)
    assert set(found) == {"better", "same", "twin"}
    p = {name: row["nDCG@10"].p for name, row in found.items()}
    order = sorted(p, key=p.__getitem__)
    expected = {order[0]: 3 * p[order[0]]}
    expected[order[1]] = max(2 * p[order[1]], expected[order[0]])
    assert {name: found[name]["nDCG@10"].p_holm for name in order[:2]} == pytest.approx(expected)
    assert found["better"]["nDCG@10"].p_holm < 0.05 < found["same"]["nDCG@10"].p_holm
    assert found["better"]["nDCG@10"].low > 0
    rows = {name: row["nDCG@10"] - methods["teacher"]["nDCG@10"] for name, row in methods.items()}
    columns = np.stack([rows[name] for name in found], axis=1)
    ends = bootstrap(columns, families=["nDCG@10"] * 3, alpha=0.05, resamples=200, seed=0)
    assert [row["nDCG@10"].low for row in found.values()] == pytest.approx(ends[0].tolist())
    assert [row["nDCG@10"].high for row in found.values()] == pytest.approx(ends[1].tolist())
    twin = found["twin"]["R@1"]
    assert (twin.difference, twin.low, twin.high, twin.p) == (0, 0, 0, 1)
    assert differences_from_baseline("teacher", methods, alpha=0.05, resamples=200, seed=0) == found


def test_a_baseline_that_is_no_method_is_refused():
    with pytest.raises(ConfigError, match="'bm25' is none of the methods: teacher, better"):
        differences_from_baseline("bm25", drawn(), alpha=0.05, resamples=10, seed=0)
    assert differences_from_baseline("a", {"a": {"R@1": np.ones(3)}}, alpha=0.05, resamples=10, seed=0) == {}
