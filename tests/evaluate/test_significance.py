"""Significance against scipy's paired t-test, a bootstrap in loops, and Holm's steps by hand."""

import math
import random
from itertools import product

import numpy as np
import pytest
from scipy import stats

from scalingnote.evaluate import measures
from scalingnote.evaluate.measures import bootstrap, holm, paired_t_test, significance_section


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


def test_constant_differences_have_the_p_of_a_sign_flip_test():
    signs = np.array([*product((-1, 1), repeat=5)])
    by_hand = np.mean(np.abs(signs.mean(1)) >= 1)  # all signs equal: 2 of 32
    found = paired_t_test(np.stack([np.zeros(5), np.full(5, 0.1), np.full(5, -0.1)], axis=1))
    assert found.tolist() == [1, by_hand, by_hand]
    assert math.isnan(paired_t_test(np.ones((1, 1)))[0])


def test_holm_by_hand():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    adjusted = holm({"a": math.nan, "b": 0.03})
    assert (math.isnan(adjusted["a"]), adjusted["b"]) == (True, 0.03)


def test_bootstrap_is_that_of_loops(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measures, "MAX_DRAWS", 700)  # several blocks of draws
    monkeypatch.setattr(measures, "RESAMPLES", 4000)
    values = np.random.default_rng(0).normal(0.2, 1.0, 40)
    low, high = bootstrap(values[:, None], families="a", seed=1)[:, 0]
    draw = random.Random(2)
    means = sorted(sum(draw.choices(values.tolist(), k=40)) / 40 for _ in range(4000))
    assert low == pytest.approx(means[100], abs=0.03)
    assert high == pytest.approx(means[3900], abs=0.03)
    assert low < values.mean() < high


def test_intervals_of_a_family_hold_together(monkeypatch: pytest.MonkeyPatch):
    """How often does one of nine methods that equal the baseline seem to differ?"""
    monkeypatch.setattr(measures, "RESAMPLES", 300)
    monkeypatch.setattr(measures, "SIGNIFICANCE_LEVEL", 0.1)
    rng, together, apart = np.random.default_rng(5), 0, 0
    for trial in range(200):
        differences = rng.normal(size=(80, 9)) + rng.normal(size=(80, 1))
        low, high = bootstrap(differences, families=["R@1"] * 9, seed=trial)
        together += bool(((low > 0) | (high < 0)).any())
        low, high = bootstrap(differences, families=range(9), seed=trial)
        apart += bool(((low > 0) | (high < 0)).any())
    assert together <= 0.17 * 200  # two standard errors above the level, and what 80 queries are too few for
    assert apart > 0.3 * 200


def test_each_family_has_its_own_correction():
    columns = np.random.default_rng(1).normal(0.3, 1.0, (50, 4))
    columns[:, 3] = 0.1  # nothing varies except by rounding
    together = bootstrap(columns, families=["a", "b", "b", "b"], seed=2)
    apart = bootstrap(columns, families=range(4), seed=2)
    np.testing.assert_array_equal(together[:, 0], apart[:, 0])
    assert (together[1, 1:3] > apart[1, 1:3]).all()
    np.testing.assert_allclose(together[:, 3], 0.1)
    without = bootstrap(columns[:, :3], families=["a", "b", "b"], seed=2)
    np.testing.assert_allclose(together[:, :3], without)


def test_each_method_is_compared_with_the_baseline():
    methods = drawn()
    section = significance_section(methods, baseline="teacher")
    assert (section["baseline"], section["alpha"], section["resamples"]) == ("teacher", 0.05, 1000)
    found = section["differences"]
    assert set(found) == {"better", "same", "twin"}
    rows = {name: methods[name]["nDCG@10"] - methods["teacher"]["nDCG@10"] for name in found}
    columns = np.stack([*rows.values()], axis=1)
    low, high = bootstrap(columns, families=["nDCG@10"] * 3, seed=0)
    p_values = paired_t_test(columns).tolist()
    corrected = holm(dict(zip(rows, p_values, strict=True)))
    for number, (name, row) in enumerate(rows.items()):
        assert found[name]["nDCG@10"] == {
            "difference": pytest.approx(row.mean()),
            "low": pytest.approx(low[number]),
            "high": pytest.approx(high[number]),
            "p": pytest.approx(p_values[number]),
            "p_holm": pytest.approx(corrected[name]),
        }
    assert found["better"]["nDCG@10"]["p_holm"] < 0.05 < found["same"]["nDCG@10"]["p_holm"]
    assert found["twin"]["R@1"] == {"difference": 0, "low": 0, "high": 0, "p": 1, "p_holm": 1}
    single = significance_section({"a": {"R@1": np.ones(1)}, "b": {"R@1": np.zeros(1)}}, baseline="a")
    assert single["differences"]["b"]["R@1"]["p_holm"] is None
    assert significance_section({"a": {"R@1": np.ones(3)}}, baseline="a")["differences"] == {}
