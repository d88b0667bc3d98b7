import math

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from scalingnote.experiment.config import Arm, ExperimentConfig, TrafficSplit
from scalingnote.experiment.report import (
    UnitSums,
    arm_difference,
    compare_arms,
    holm,
    resampled,
    sample_ratio,
    welch,
)


def each(values) -> UnitSums:
    """One request per unit."""
    return UnitSums(np.asarray(values, float), np.ones(len(values)))


def users(rng, count, *, rate, effect=0.0, spread=0.0) -> UnitSums:
    """Users with 1 + Poisson(3) requests each, alike in what comes of them."""
    requests = 1 + rng.poisson(3, count)
    own = np.clip(rate + effect + spread * rng.standard_normal(count), 0, 1)
    return UnitSums(rng.binomial(requests, own).astype(float), requests.astype(float))


def test_one_request_per_unit_is_the_textbooks_welch_test():
    rng = np.random.default_rng(0)
    control, treatment = rng.gamma(2, 3, 80), rng.gamma(2, 4, 50)
    theirs = stats.ttest_ind(treatment, control, equal_var=False)
    difference, low, high, p = welch(each(control), each(treatment), alpha=0.05)
    assert (difference, p) == (pytest.approx(treatment.mean() - control.mean()), pytest.approx(theirs.pvalue))
    assert (low, high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))


def test_variance_is_that_of_clusters_drawn_anew():
    """The delta method against the spread of means over many draws of users."""
    rng = np.random.default_rng(1)
    drawn = [users(rng, 300, rate=0.3, spread=0.2) for _ in range(2000)]
    spread = np.var([arm.mean for arm in drawn])
    variances = [arm.linear.var(ddof=1) / len(arm.linear) for arm in drawn]
    assert np.mean(variances) == pytest.approx(spread, rel=0.1)
    one = drawn[0]
    requests = int(one.count.sum())
    assert variances[0] > 1.5 * one.mean * (1 - one.mean) / requests  # that of requests taken for independent


@pytest.mark.parametrize("effect", [0.0, 0.05])
def test_a_a_is_significant_at_the_nominal_rate_and_a_planted_effect_is_found(effect):
    rng = np.random.default_rng(2)
    pairs = [
        (users(rng, 400, rate=0.3, spread=0.08), users(rng, 400, rate=0.3, effect=effect, spread=0.08))
        for _ in range(600)
    ]
    told = [welch(*pair, alpha=0.05) for pair in pairs]
    covered = np.mean([low <= effect <= high for _, low, high, _ in told])
    low, high = stats.binom.interval(0.999, len(pairs), 0.95)
    assert low <= len(pairs) * covered <= high
    significant = sum(p < 0.05 for *_, p in told)
    if effect:
        assert np.mean([difference for difference, *_ in told]) == pytest.approx(effect, abs=0.002)
        assert significant > 400
    else:
        low, high = stats.binom.interval(0.999, len(pairs), 0.05)
        assert low <= significant <= high
        p = [p for *_, p in told]
        assert stats.kstest(p, "uniform").pvalue > 0.001


def test_the_bootstrap_draws_units():
    """Against resampling done plainly; and its interval is near Welch's where users are many."""
    rng = np.random.default_rng(3)
    arm = users(rng, 200, rate=0.3, spread=0.2)
    rows = rng.integers(200, size=(4000, 200))
    plain = arm.sum[rows].sum(1) / arm.count[rows].sum(1)
    ours = resampled(arm, 4000, rng=rng)
    assert stats.ks_2samp(plain, ours).pvalue > 0.001
    other = users(rng, 200, rate=0.4, spread=0.2)
    found = arm_difference(arm, other, alpha=0.05, replicates=4000, rng=rng)
    width = found.high - found.low
    assert found.bootstrap_low == pytest.approx(found.low, abs=0.1 * width)
    assert found.bootstrap_high == pytest.approx(found.high, abs=0.1 * width)
    assert found.relative == pytest.approx(other.mean / arm.mean - 1)


def test_what_cannot_be_told_is_nan_and_what_never_varies_is_plain():
    rng = np.random.default_rng(4)
    found = arm_difference(each([]), each([1.0, 2.0]), alpha=0.05, replicates=100, rng=rng)
    assert all(map(math.isnan, (found.difference, found.p, found.relative, found.bootstrap_low)))
    single = arm_difference(each([1.0]), each([1.0, 2.0]), alpha=0.05, replicates=100, rng=rng)
    assert (single.difference, math.isnan(single.p)) == (0.5, True)
    never = arm_difference(each([0.0] * 9), each([0.0] * 9), alpha=0.05, replicates=100, rng=rng)
    assert (never.difference, never.p, math.isnan(never.relative)) == (0.0, 1.0, True)
    always = arm_difference(each([0.0] * 9), each([1.0] * 9), alpha=0.05, replicates=100, rng=rng)
    assert (always.difference, math.isnan(always.low)) == (1.0, True)
    assert always.p == pytest.approx(
        2 / math.comb(18, 9)
    )  # of all ways to deal them out, two are as far apart
    few = arm_difference(each([0.0] * 2), each([1.0] * 2), alpha=0.05, replicates=100, rng=rng)
    assert few.p == pytest.approx(1 / 3)


def test_holm_by_hand():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    adjusted = holm({"a": math.nan, "b": 0.03})
    assert (math.isnan(adjusted["a"]), adjusted["b"]) == (True, 0.03)


def test_sample_ratio_by_hand():
    # (560 - 525)^2 / 525 + (490 - 525)^2 / 525 = 4.667 on one degree of freedom
    assert sample_ratio([560, 490], [0.5, 0.5]) == pytest.approx(stats.chi2.sf(4 + 2 / 3, 1))
    assert sample_ratio([100, 200], [1 / 3, 2 / 3]) == pytest.approx(1)
    assert sample_ratio([0, 0], [0.5, 0.5]) == 1


def test_groups_are_a_mismatch_where_p_is_below_the_level_that_is_set():
    split = TrafficSplit(arms=(Arm(name="control", share=0.5), Arm(name="treatment", share=0.5)))
    units = pa.table({"arm": ["control"] * 560 + ["treatment"] * 490})  # p = 0.031
    for level, mismatch in ((0.01, False), (0.05, True)):
        config = ExperimentConfig(logs=("log",), split=split, mismatch_alpha=level)
        assert compare_arms(config, units, [])["sample_ratio"]["mismatch"] is mismatch
    assert ExperimentConfig(logs=("log",), split=split).mismatch_alpha == 0.001
