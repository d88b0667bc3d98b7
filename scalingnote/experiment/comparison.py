"""Comparison of arms: differences with tests and intervals, from the sums of every unit.

{"experiment", "control", "alpha", "first", "last", "days", "requests": {"read", "used", "left_out", ...},
 "measures": [{"name", "text", "better"}],
 "arms": {ARM: {"share", "units", "measures": {MEASURE: {"mean", "units", "count"}},
                "latency_ms": {STAGE: [p50, p90, p99]}}},
 "comparisons": {ARM: {MEASURE: {"difference", "low", "high", "p", "p_holm", "relative",
                                 "bootstrap_low", "bootstrap_high"}}},
 "sample_ratio": {"p", "mismatch"}, "judge": {...}, "warnings": [...], "environment": {...}}

An undefined number is null. A measure of an arm is a ratio, the sum over its requests by their count.
Requests of one user are correlated, so units (users) are the independent observations: the ratio's variance
is that of ``(sum - ratio * count) / mean count`` over units (delta method; Deng et al., 2018, "Applying the
delta method in metric analytics"). With one request per unit this is the Welch test.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from scalingnote.experiment.config import ExperimentConfig
from scalingnote.experiment.outcomes import Measure

_ROUNDING = 1e-9  # share of a mean below which differences are rounding errors
Report = dict[str, Any]


@dataclass(frozen=True)
class UnitSums:
    """A measure in one arm: each unit's sum over its requests, and their count (> 0)."""

    sum: Float[ndarray, " units"]
    count: Float[ndarray, " units"]

    @property
    def mean(self) -> float:
        """Mean over requests; NaN without requests."""
        requests = float(self.count.sum())
        return float(self.sum.sum()) / requests if requests else math.nan

    @property
    def variance(self) -> float:
        """Variance of :attr:`mean`, clustered by unit; NaN for fewer than two units."""
        units = len(self.sum)
        if units < 2:
            return math.nan
        residual = (self.sum - self.mean * self.count) / self.count.mean()
        return float(residual @ residual) / (units - 1) / units


@dataclass(frozen=True)
class ArmDifference:
    """Treatment minus control; NaN with too few units."""

    difference: float
    low: float  # of Welch's interval
    high: float
    p: float  # two-sided
    relative: float  # to the control's mean
    bootstrap_low: float
    bootstrap_high: float


def arm_difference(
    control: UnitSums, treatment: UnitSums, *, alpha: float, replicates: int, rng: np.random.Generator
) -> ArmDifference:
    """Compare two arms in one measure by Welch's t-test and a percentile bootstrap over units."""
    difference, low, high, p = welch(control, treatment, alpha=alpha)
    differences = resampled(treatment, replicates, rng=rng) - resampled(control, replicates, rng=rng)
    defined = differences[np.isfinite(differences)]
    ends = np.quantile(defined, [alpha / 2, 1 - alpha / 2]).tolist() if len(defined) else [math.nan] * 2
    relative = difference / control.mean if control.mean else math.nan
    return ArmDifference(difference, low, high, p, relative, *ends)


def welch(control: UnitSums, treatment: UnitSums, *, alpha: float) -> tuple[float, float, float, float]:
    """Difference of means, the bounds of its interval, and the p-value (Welch, 1947).

    If all units within each arm are equal, the standard error is unknown. Then p is that of a permutation
    test, and a difference has no interval.
    """
    difference = treatment.mean - control.mean
    parts = [(arm.variance, len(arm.sum) - 1) for arm in (control, treatment)]
    variance = sum(part for part, _ in parts)
    if math.isnan(variance):
        return difference, math.nan, math.nan, math.nan
    rounding = _ROUNDING * max(abs(control.mean), abs(treatment.mean))
    if variance <= rounding**2:  # nothing varies, as with a measure that is 0 everywhere
        if abs(difference) <= rounding:
            return difference, difference, difference, 1.0
        n, m = len(control.sum), len(treatment.sum)
        assignments = math.lgamma(n + m + 1) - math.lgamma(n + 1) - math.lgamma(m + 1)
        return difference, math.nan, math.nan, min(1.0, 2 * math.exp(-assignments))
    freedom = variance**2 / sum(part**2 / units for part, units in parts)
    error = math.sqrt(variance)
    margin = float(stats.t.ppf(1 - alpha / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(difference) / error, freedom))
    return difference, difference - margin, difference + margin, p


def resampled(arm: UnitSums, replicates: int, *, rng: np.random.Generator) -> Float[ndarray, " replicates"]:
    """Bootstrap means of an arm: as many units are drawn with replacement.

    Units with equal sums and counts are drawn together by a multinomial. The distribution is the same, and
    much faster to sample, because counts of binary events have few distinct pairs.
    """
    units = len(arm.sum)
    if not units:
        return np.full(replicates, math.nan)
    pairs, times = np.unique(np.stack([arm.sum, arm.count], axis=1), axis=0, return_counts=True)
    share = times / units
    means = np.empty(replicates)
    at_once = max(1, 4_000_000 // len(pairs))
    for start in range(0, replicates, at_once):
        size = min(at_once, replicates - start)
        sums = rng.multinomial(units, share, size=size) @ pairs
        means[start : start + size] = sums[:, 0] / sums[:, 1]
    return means


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p-values with Holm's correction for several tests (Holm, 1979); NaN is no test and stays."""
    tests = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    adjusted, highest = dict(p), 0.0
    for rank, (value, name) in enumerate(tests):
        highest = max(highest, min((len(tests) - rank) * value, 1.0))
        adjusted[name] = highest
    return adjusted


def sample_ratio(units: Sequence[int], shares: Sequence[float]) -> float:
    """p-value of the chi-squared test that groups have sizes by these shares; 1 without units."""
    total = sum(units)
    if not total:
        return 1.0
    expected = np.array(shares) / math.fsum(shares) * total
    return float(stats.chisquare(units, expected).pvalue)


def compare_arms(config: ExperimentConfig, units: pa.Table, measures: Sequence[Measure]) -> Report:
    """The report's arms, comparisons and sample ratio.

    Args:
        config: the split, and settings of tests.
        units: a row per unit with sums and counts, as :meth:`Outcomes.units` returns them.
        measures: to compare.
    """
    first, *rest = (arm for arm in config.split.arms if arm.share > 0)
    arms = [first, *sorted(rest, key=lambda arm: arm.name)]  # the order of a JSON file with sorted keys
    control, *others = (arm.name for arm in arms)
    counts = [int(pc.sum(pc.equal(units["arm"], arm.name)).as_py() or 0) for arm in arms]
    sums = {(arm.name, m.name): unit_sums(units, arm.name, m.name) for arm in arms for m in measures}
    comparisons: dict[str, dict[str, dict[str, float]]] = {name: {} for name in others}
    for measure in measures:
        differences = {}
        for name in others:
            # A generator per measure and arm: adding one to a report does not change the others.
            rng = np.random.default_rng([config.seed, *f"{name} {measure.name}".encode()])
            differences[name] = arm_difference(
                sums[control, measure.name],
                sums[name, measure.name],
                alpha=config.alpha,
                replicates=config.bootstrap,
                rng=rng,
            )
        adjusted = holm({name: difference.p for name, difference in differences.items()})
        for name, difference in differences.items():
            comparisons[name][measure.name] = asdict(difference) | {"p_holm": adjusted[name]}
    p = sample_ratio(counts, [arm.share for arm in arms])
    report = {
        "experiment": config.split.name,
        "control": control,
        "alpha": config.alpha,
        "measures": [measure._asdict() for measure in measures],
        "arms": {
            arm.name: {
                "share": arm.share,
                "units": count,
                "measures": {
                    m.name: {
                        "mean": (arm_sums := sums[arm.name, m.name]).mean,
                        "units": len(arm_sums.sum),
                        "count": arm_sums.count.sum(),
                    }
                    for m in measures
                },
            }
            for arm, count in zip(arms, counts, strict=True)
        },
        "comparisons": comparisons,
        "sample_ratio": {"p": p, "mismatch": p < config.mismatch_alpha},
    }
    values: Report = _json_values(report)
    return values


def unit_sums(units: pa.Table, arm: str, measure: str) -> UnitSums:
    """Sums and counts of one arm's units in one measure."""
    of_arm = units.filter(pc.equal(units["arm"], arm))
    total, count = (of_arm[f"{measure}.{name}"].to_numpy() for name in ("sum", "count"))
    return UnitSums(total[count > 0], count[count > 0])


def verdict(difference: Mapping[str, float | None], *, better: str, alpha: float) -> str:
    """✓ significantly better, ✗ significantly worse, · neither."""
    p, value = difference["p_holm"], difference["difference"]
    if p is None or value is None or p >= alpha or not value:
        return "·"
    return "✓" if (value < 0) == (better == "lower") else "✗"


def warnings(config: ExperimentConfig, report: Report) -> list[str]:
    """Reasons to distrust the report, the worst first."""
    messages = []
    arms, requests = report["arms"], report["requests"]
    if report["sample_ratio"]["mismatch"]:
        sizes = ", ".join(f"{name} {arm['units']:,} (share {arm['share']:g})" for name, arm in arms.items())
        messages.append(
            f"SAMPLE RATIO MISMATCH (p = {report['sample_ratio']['p']:.2g}): the groups are not of the sizes "
            f"that the split gives: {sizes} units. Something loses or adds units of one arm, so that no "
            "comparison can be believed: find it first."
        )
    empty = [name for name, arm in arms.items() if arm["units"] < 2]
    if empty:
        messages.append(f"Arm {empty[0]} has {arms[empty[0]]['units']} units: nothing can be said of it.")
    used = requests["used"]
    other_arms = requests["left_out"].get("not by this split", 0)
    if other_arms > 0.01 * (used + other_arms):
        messages.append(
            f"{other_arms:,} requests were answered by another arm than the split gives their unit: shares "
            "changed in between. They are left out: set `start` to when they did."
        )
    if requests["rejected"] > 0.01 * requests["read"]:
        messages.append(
            f"{requests['rejected']:,} of {requests['read']:,} lines of the log could not be used."
        )
    if report["days"] < 7:
        messages.append(
            f"The log covers {report['days']:.1f} days. Users differ over a week: let an experiment run for "
            "whole weeks, and decide at its end only."
        )
    judge = report["judge"]
    if judge and judge["pairs"] and judge["unknown"] > 0.05 * judge["pairs"]:
        messages.append(
            f"{judge['unknown']:,} of {judge['pairs']:,} judged pairs have no score and count nowhere."
        )
    return messages


def _json_values(value: Any) -> Any:
    """Values for JSON: Python numbers, and null for those that are not finite."""
    if isinstance(value, dict):
        return {key: _json_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
