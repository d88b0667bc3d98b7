"""Whether two systems differ: a value per query of each comes in; tests, intervals and corrections go out.

Both systems answered the same queries, so what is looked at is each query's difference.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from scalingnote.errors import ConfigError
from scalingnote.experiment.statistics import holm

Values = Mapping[str, Float[ndarray, " queries"]]  # measure -> value of each query
_DRAWN_AT_ONCE = 4_000_000  # numbers: 32 MB


@dataclass(frozen=True)
class Difference:
    """A method minus the baseline, in one measure. p is NaN for fewer than two queries."""

    difference: float
    low: float  # of the bootstrap's interval
    high: float
    p: float  # of the t-test, two-sided
    p_holm: float  # the same, corrected for the number of methods that are compared


def against(
    baseline: str, methods: Mapping[str, Values], *, alpha: float, resamples: int, seed: int
) -> dict[str, dict[str, Difference]]:
    """Method -> measure -> its difference from the baseline, every method but the baseline itself.

    Holm's correction is over the methods in each measure: the chance of at least one false mark in a column
    of a table is below `alpha`. ConfigError when there is no such baseline.
    """
    if baseline not in methods:
        raise ConfigError(f"evaluate.baseline={baseline!r} is none of the methods: {', '.join(methods)}")
    keys = [(name, measure) for name, row in methods.items() if name != baseline for measure in row]
    if not keys:
        return {}
    differences = np.stack([methods[n][m] - methods[baseline][m] for n, m in keys], axis=1)
    p = dict(zip(keys, paired_t_test(differences).tolist(), strict=True))
    low, high = bootstrap(differences, alpha=alpha, resamples=resamples, seed=seed).tolist()
    found: dict[str, dict[str, Difference]] = {}
    for i, (name, measure) in enumerate(keys):
        corrected = holm({other: value for (other, m), value in p.items() if m == measure})
        difference = float(differences[:, i].mean())
        one = Difference(difference, low[i], high[i], p[name, measure], corrected[name])
        found.setdefault(name, {})[measure] = one
    return found


def paired_t_test(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """p-values, two-sided, that the mean of each column is 0 (Student, 1908).

    Where nothing varies it is 1 if all differences are 0, else 0; NaN for fewer than two queries.
    """
    queries, columns = differences.shape
    if queries < 2:
        return np.full(columns, math.nan)
    mean, deviation = differences.mean(0), differences.std(0, ddof=1)
    # A deviation that is rounding alone is none.
    constant = deviation <= 1e-12 * np.abs(differences).max(0)
    t = np.abs(mean) / np.where(constant, 1.0, deviation / math.sqrt(queries))
    p = 2 * stats.t.sf(t, queries - 1)
    found: ndarray = np.where(constant, (mean == 0).astype(float), p)
    return found


def bootstrap(
    differences: Float[ndarray, "queries columns"], *, alpha: float, resamples: int, seed: int
) -> Float[ndarray, "2 columns"]:
    """Ends of each mean's interval of level 1 - `alpha`: percentiles over resampled queries (Efron, 1979).

    All columns are resampled together, so that a draw costs the same for one comparison or a hundred.
    """
    rng = np.random.default_rng(seed)
    queries, columns = differences.shape
    share = np.full(queries, 1 / queries)
    means = np.empty((resamples, columns))
    at_once = max(1, _DRAWN_AT_ONCE // queries)
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        times = rng.multinomial(queries, share, size=size)
        means[start : start + size] = times @ differences / queries
    ends: ndarray = np.quantile(means, [alpha / 2, 1 - alpha / 2], axis=0)
    return ends
