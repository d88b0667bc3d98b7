import math
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from scalingnote.evaluate.experiment.config import Arm, ExperimentConfig, TrafficSplit
from scalingnote.evaluate.experiment.report import UnitSums, arm_difference, compare_arms, sample_ratio


def each(values: Iterable[float]) -> UnitSums:
    """One request per unit."""
    return UnitSums(array := np.asarray(values, float), np.ones(len(array)))


def users(
    rng: np.random.Generator, count: int, *, rate: float, effect: float = 0.0, spread: float = 0.0
) -> UnitSums:
    """Users with 1 + Poisson(3) requests each, alike in what comes of them."""
    requests = 1 + rng.poisson(3, count)
    own = np.clip(rate + effect + spread * rng.standard_normal(count), 0, 1)
    return UnitSums(rng.binomial(requests, own).astype(float), requests.astype(float))


def test_one_request_per_unit_is_the_textbooks_welch_test():
    rng = np.random.default_rng(0)
    control, treatment = rng.gamma(2, 3, 80), rng.gamma(2, 4, 50)
    theirs = stats.ttest_ind(treatment, control, equal_var=False)
    found = arm_difference(each(control), each(treatment))
    assert found.difference == pytest.approx(treatment.mean() - control.mean())
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert found.relative == pytest.approx(treatment.mean() / control.mean() - 1)


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
def test_a_a_is_significant_at_the_nominal_rate(effect: float):
    rng = np.random.default_rng(2)
    pairs = [
        (users(rng, 400, rate=0.3, spread=0.08), users(rng, 400, rate=0.3, effect=effect, spread=0.08))
        for _ in range(600)
    ]
    compared = [arm_difference(*pair) for pair in pairs]
    covered = np.mean([found.low <= effect <= found.high for found in compared])
    low, high = stats.binom.interval(0.999, len(pairs), 0.95)
    assert low <= len(pairs) * covered <= high
    significant = sum(found.p < 0.05 for found in compared)
    if effect:
        assert np.mean([found.difference for found in compared]) == pytest.approx(effect, abs=0.002)
        assert significant > 400
    else:
        low, high = stats.binom.interval(0.999, len(pairs), 0.05)
        assert low <= significant <= high
        assert stats.kstest([found.p for found in compared], "uniform").pvalue > 0.001


def test_what_cannot_be_tested_is_nan():
    empty = arm_difference(each([]), each([1.0, 2.0]))
    assert all(map(math.isnan, (empty.difference, empty.p, empty.relative)))
    single = arm_difference(each([1.0]), each([1.0, 2.0]))
    assert (single.difference, math.isnan(single.p)) == (0.5, True)
    constant = arm_difference(each([0.1] * 9), each([0.3] * 9))
    assert constant.difference == pytest.approx(0.2)
    assert math.isnan(constant.p)
    assert math.isnan(constant.low)


def test_sample_ratio_by_hand():
    # (560 - 525)^2 / 525 + (490 - 525)^2 / 525 = 4.667 on one degree of freedom
    assert sample_ratio([560, 490], [0.5, 0.5]) == pytest.approx(stats.chi2.sf(4 + 2 / 3, 1))
    assert sample_ratio([100, 200], [1 / 3, 2 / 3]) == pytest.approx(1)
    assert sample_ratio([0, 0], [0.5, 0.5]) == 1


@pytest.mark.parametrize(("control", "mismatch"), [(560, False), (580, True)])  # p = 0.031 and 0.0007
def test_groups_of_improbable_sizes_are_a_mismatch(control: int, mismatch: bool):
    split = TrafficSplit(arms=(Arm(name="control", share=0.5), Arm(name="treatment", share=0.5)))
    units = pa.table({"arm": ["control"] * control + ["treatment"] * (1050 - control)})
    config = ExperimentConfig(logs=("log",), split=split)
    assert compare_arms(config, units, [])["sample_ratio"]["mismatch"] is mismatch
