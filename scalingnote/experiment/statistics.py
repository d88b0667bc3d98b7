"""Comparing arms: sums and counts of every unit come in, differences go out with tests and intervals.

A measure of an arm is a ratio, the sum over its requests by their count. Requests of one user are alike, so
the unit (see :mod:`scalingnote.experiment.assignment`) is what is independent: the ratio's variance is that
of ``(sum - ratio * count) / mean count`` over units (delta method; Deng et al., 2018, "Applying the delta
method in metric analytics"). With one request per unit all of this is the textbook's Welch test.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

_ROUNDING = 1e-9  # of a mean: what lies below is no difference between measurements


@dataclass(frozen=True)
class Sums:
    """What the units of one arm did: each one's sum of a measure over its requests, and their count (> 0)."""

    sum: Float[ndarray, " units"]
    count: Float[ndarray, " units"]

    @property
    def mean(self) -> float:
        """Over requests; NaN where there are none."""
        requests = float(self.count.sum())
        return float(self.sum.sum()) / requests if requests else math.nan

    @property
    def variance(self) -> float:
        """Of :attr:`mean`, clustered by unit; NaN for fewer than two units."""
        units = len(self.sum)
        if units < 2:
            return math.nan
        residual = (self.sum - self.mean * self.count) / self.count.mean()
        return float(residual @ residual) / (units - 1) / units


@dataclass(frozen=True)
class Difference:
    """Treatment minus control. NaN where there are too few units to say."""

    difference: float
    low: float  # of Welch's interval
    high: float
    p: float  # two-sided
    relative: float  # by the control's mean
    bootstrap_low: float
    bootstrap_high: float


def compare(
    control: Sums, treatment: Sums, *, alpha: float, replicates: int, rng: np.random.Generator
) -> Difference:
    """Two arms in one measure, by Welch's t-test and a percentile bootstrap over units."""
    difference, low, high, p = welch(control, treatment, alpha=alpha)
    drawn = resampled(treatment, replicates, rng=rng) - resampled(control, replicates, rng=rng)
    defined = drawn[np.isfinite(drawn)]
    ends = np.quantile(defined, [alpha / 2, 1 - alpha / 2]).tolist() if len(defined) else [math.nan] * 2
    relative = difference / control.mean if control.mean else math.nan
    return Difference(difference, low, high, p, relative, *ends)


def welch(control: Sums, treatment: Sums, *, alpha: float) -> tuple[float, float, float, float]:
    """Difference of means, the ends of its interval, and the p-value (Welch, 1947).

    Where no unit of an arm differs from another, no error can be told: then p is the chance that units dealt
    out at random fall apart like that, and a difference has no interval.
    """
    difference = treatment.mean - control.mean
    parts = [(arm.variance, len(arm.sum) - 1) for arm in (control, treatment)]
    variance = sum(part for part, _ in parts)
    if math.isnan(variance):
        return difference, math.nan, math.nan, math.nan
    rounding = _ROUNDING * max(abs(control.mean), abs(treatment.mean))
    if variance <= rounding**2:  # nothing varies: no errors in either arm, say
        if abs(difference) <= rounding:
            return difference, difference, difference, 1.0
        n, m = len(control.sum), len(treatment.sum)
        deals = math.lgamma(n + m + 1) - math.lgamma(n + 1) - math.lgamma(m + 1)
        return difference, math.nan, math.nan, min(1.0, 2 * math.exp(-deals))
    freedom = variance**2 / sum(part**2 / units for part, units in parts)
    error = math.sqrt(variance)
    margin = float(stats.t.ppf(1 - alpha / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(difference) / error, freedom))
    return difference, difference - margin, difference + margin, p


def resampled(arm: Sums, replicates: int, *, rng: np.random.Generator) -> Float[ndarray, " replicates"]:
    """Means of the arm with as many units drawn anew, with replacement.

    Units with equal sums and counts are drawn as one number of draws: the same distribution, and of the few
    pairs that counts of binary events make, in no time.
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
    """p-values adjusted for there being several (Holm, 1979); those that are NaN are no tests and stay."""
    tests = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    adjusted, highest = dict(p), 0.0
    for rank, (value, name) in enumerate(tests):
        highest = max(highest, min((len(tests) - rank) * value, 1.0))
        adjusted[name] = highest
    return adjusted


def sample_ratio(units: Sequence[int], shares: Sequence[float]) -> float:
    """p-value that groups of these sizes came of these shares (chi-squared); 1 where there is nobody."""
    total = sum(units)
    if not total:
        return 1.0
    expected = np.array(shares) / math.fsum(shares) * total
    return float(stats.chisquare(units, expected).pvalue)
