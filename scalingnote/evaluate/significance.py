"""Whether two systems differ: a value per query of each comes in; tests, intervals and corrections go out.

Both systems answered the same queries, so what is looked at is each query's difference.
"""

import math
from collections.abc import Mapping, Sequence
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
    low: float  # of the bootstrap's interval, corrected for the number of methods that are compared
    high: float
    p: float  # of the t-test, two-sided
    p_holm: float  # the same, corrected for the number of methods that are compared


def against(
    baseline: str, methods: Mapping[str, Values], *, alpha: float, resamples: int, seed: int
) -> dict[str, dict[str, Difference]]:
    """Method -> measure -> its difference from the baseline, every method but the baseline itself.

    Corrections are over the methods in each measure: the chance of at least one false mark in a column of a
    table, or of one interval there that misses the truth, is about `alpha` at most. ConfigError when there is
    no such baseline.
    """
    if baseline not in methods:
        raise ConfigError(f"evaluate.baseline={baseline!r} is none of the methods: {', '.join(methods)}")
    keys = [(name, measure) for name, row in methods.items() if name != baseline for measure in row]
    if not keys:
        return {}
    differences = np.stack([methods[n][m] - methods[baseline][m] for n, m in keys], axis=1)
    p = dict(zip(keys, paired_t_test(differences).tolist(), strict=True))
    families = [measure for _, measure in keys]
    ends = bootstrap(differences, families=families, alpha=alpha, resamples=resamples, seed=seed)
    low, high = ends.tolist()
    found: dict[str, dict[str, Difference]] = {}
    for i, (name, measure) in enumerate(keys):
        corrected = holm({other: value for (other, m), value in p.items() if m == measure})
        difference = float(differences[:, i].mean())
        one = Difference(difference, low[i], high[i], p[name, measure], corrected[name])
        found.setdefault(name, {})[measure] = one
    return found


def paired_t_test(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """p-values, two-sided, that the mean of each column is 0 (Student, 1908).

    Where nothing varies there is no t: it is 1 if all differences are 0, else the share of signs they could
    have had that are all the same (Fisher's randomisation: 1/2 of two queries). NaN for fewer than two.
    """
    queries, columns = differences.shape
    if queries < 2:
        return np.full(columns, math.nan)
    mean, deviation = differences.mean(0), differences.std(0, ddof=1)
    constant = deviation <= _rounding(differences)
    t = np.abs(mean) / np.where(constant, 1.0, deviation / math.sqrt(queries))
    p = 2 * stats.t.sf(t, queries - 1)
    found: ndarray = np.where(constant, np.where(mean == 0, 1.0, 2.0 ** (1 - queries)), p)
    return found


def bootstrap(
    differences: Float[ndarray, "queries columns"],
    *,
    families: Sequence[str] | None = None,
    alpha: float,
    resamples: int,
    seed: int,
) -> Float[ndarray, "2 columns"]:
    """Ends of each mean's interval over resampled queries; all of a family hold at once at level 1 - `alpha`.

    They reach as many standard errors to both sides as the farthest column of a family strays from its mean
    in all draws but a share of `alpha` (max-t; Westfall and Young, 1993). Columns of one family have the same
    name in `families`; None: every column is one of its own. All columns are resampled together, so that a
    draw costs the same for one comparison or a hundred.
    """
    means = _resampled(differences, resamples=resamples, seed=seed)
    mean, error = differences.mean(0), means.std(0)
    strayed = np.abs(means - mean) / np.where(error > _rounding(differences), error, np.inf)
    reach = np.empty(len(mean))
    of = np.array(range(len(mean)) if families is None else families)
    for family in np.unique(of):
        mine = of == family
        reach[mine] = np.quantile(strayed[:, mine].max(1), 1 - alpha)
    ends: ndarray = np.stack([mean - reach * error, mean + reach * error])
    return ends


def _rounding(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """A deviation that is no larger is rounding alone."""
    found: ndarray = 1e-12 * np.abs(differences).max(0)
    return found


def _resampled(
    differences: Float[ndarray, "queries columns"], *, resamples: int, seed: int
) -> Float[ndarray, "resamples columns"]:
    rng = np.random.default_rng(seed)
    queries, columns = differences.shape
    share = np.full(queries, 1 / queries)
    means = np.empty((resamples, columns))
    at_once = max(1, _DRAWN_AT_ONCE // queries)
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        times = rng.multinomial(queries, share, size=size)
        means[start : start + size] = times @ differences / queries
    return means
