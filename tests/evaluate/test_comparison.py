import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from scalingnote.evaluate.experiment.config import Arm, ExperimentConfig, TrafficSplit
from scalingnote.evaluate.experiment.report import arm_difference, compare_arms, comparison_table, unit_values


def values(total, count) -> np.ndarray:
    sums = {"errors.sum": np.asarray(total, float), "errors.count": np.asarray(count)}
    return unit_values(pa.table(sums), "errors")


def users(
    rng: np.random.Generator, count: int, *, rate: float, effect: float = 0.0, spread: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Draw sums and counts of users with 1 + Poisson(3) requests each, which have equal success rates."""
    requests = 1 + rng.poisson(3, count)
    rates = np.clip(rate + effect + spread * rng.standard_normal(count), 0, 1)
    return rng.binomial(requests, rates), requests


def test_one_request_per_unit_gives_welchs_test():
    rng = np.random.default_rng(0)
    control, treatment = rng.gamma(2, 3, 80), rng.gamma(2, 4, 50)
    welch = stats.ttest_ind(treatment, control, equal_var=False)
    difference = arm_difference(*(values(one, np.ones(len(one))) for one in (control, treatment)))
    assert difference["difference"] == pytest.approx(treatment.mean() - control.mean())
    assert difference["p"] == pytest.approx(welch.pvalue)
    assert (difference["low"], difference["high"]) == pytest.approx(tuple(welch.confidence_interval(0.95)))


def test_variance_equals_that_of_repeated_draws_of_users():
    """Compare the delta method with the variance of means over many draws of users."""
    rng = np.random.default_rng(1)
    draws = [users(rng, 300, rate=0.3, spread=0.2) for _ in range(2000)]
    means = [total.sum() / count.sum() for total, count in draws]
    linear = [values(*one) for one in draws]
    assert [one.mean() for one in linear] == pytest.approx(means)
    variances = [one.var(ddof=1) / len(one) for one in linear]
    assert np.mean(variances) == pytest.approx(np.var(means), rel=0.1)
    independent = means[0] * (1 - means[0]) / draws[0][1].sum()  # the variance of independent requests
    assert variances[0] > 1.5 * independent


@pytest.mark.parametrize("effect", [0.0, 0.05])
def test_equal_arms_are_significant_at_the_nominal_rate(effect: float):
    rng = np.random.default_rng(2)
    pairs = [
        (users(rng, 400, rate=0.3, spread=0.08), users(rng, 400, rate=0.3, effect=effect, spread=0.08))
        for _ in range(600)
    ]
    results = [arm_difference(values(*control), values(*treatment)) for control, treatment in pairs]
    coverage = sum(result["low"] <= effect <= result["high"] for result in results)
    low, high = stats.binom.interval(0.999, len(pairs), 0.95)
    assert low <= coverage <= high
    rejections = sum(result["p"] < 0.05 for result in results)
    if effect:
        assert np.mean([result["difference"] for result in results]) == pytest.approx(effect, abs=0.002)
        assert rejections > 400
    else:
        low, high = stats.binom.interval(0.999, len(pairs), 0.05)
        assert low <= rejections <= high
        assert stats.kstest([result["p"] for result in results], "uniform").pvalue > 0.001


def test_arms_that_cannot_be_tested_have_no_p():
    unknown = {"low": None, "high": None, "p": None}
    empty = arm_difference(values([], []), values([1.0, 2.0], [1, 1]))
    assert empty == {"difference": None, **unknown}
    single = arm_difference(values([1.0, 5.0], [1, 0]), values([1.0, 2.0], [1, 1]))  # one unit has no request
    assert single == {"difference": 0.5, **unknown}
    constant = arm_difference(np.full(9, 0.1), np.full(9, 0.3))
    assert constant == {"difference": pytest.approx(0.2), **unknown}


# (560 - 525)^2 / 525 + (490 - 525)^2 / 525 = 4.667 on one degree of freedom
@pytest.mark.parametrize(("control", "squares"), [(560, 4 + 2 / 3), (580, 2 * 55**2 / 525)])
def test_improbable_sizes_of_groups_are_a_mismatch(control: int, squares: float):
    split = TrafficSplit(arms=(Arm(name="control", share=0.5), Arm(name="treatment", share=0.5)))
    units = pa.table({"arm": ["control"] * control + ["treatment"] * (1050 - control)})
    requests = units.append_column("time", pa.array(np.zeros(1050)))
    requests = requests.append_column("latency_ms", pa.array([10.0, 20.0, *[None] * 1048]))
    report = compare_arms(ExperimentConfig(logs=("log",), split=split), requests, units)
    p = stats.chi2.sf(squares, 1)
    assert report["sample_ratio"] == {"p": pytest.approx(p), "mismatch": p < 0.001}
    assert report["arms"]["control"]["latency_ms"] == pytest.approx([15.0, 19.0, 19.9])
    assert report["arms"]["treatment"]["latency_ms"] == [None, None, None]


def test_marks_show_the_better_arm():
    def result(difference: float | None, p: float | None) -> dict:
        return {"difference": difference, "low": None, "high": 1234.5, "p_holm": p}

    differences = {
        "errors": result(-0.125, 1e-5),
        "satisfaction": result(-0.125, 0.01),
        "click_through": result(0.125, 0.01),
        "partial": result(0.125, 0.05),
        "latency_ms": result(None, None),
    }
    arm = {"means": dict.fromkeys(differences, 0.5)}
    report = {"control": "old", "alpha": 0.05, "arms": {"old": arm, "new": arm}}
    rows = comparison_table(report | {"comparisons": {"new": differences}}).rows
    assert {row[0]: row[-1] for row in rows} == {
        "satisfaction": "✗",
        "click_through": "✓",
        "latency_ms": "·",
        "partial": "·",
        "errors": "✓",
    }
    assert rows[-1] == ["errors", "new", "0.5", "0.5", "-0.125", "– … +1234", "1e-05", "✓"]
