"""Fits of the scaling laws: finished runs go in, constants come out, with intervals and what they foretell.

    LADDER table ─read─► Runs ─fit─► Fit ─► constants · R² · predict (beyond what was run) · split of a budget

Errors are those of the logarithm, under Huber's loss (Hoffmann et al., 2022, section 3.3), so that one
failed run does not bend the curve. Intervals come from a bootstrap of residuals: with five sizes, a sample of
the runs themselves would often hold too few of them to fit at all. They widen, as Student's t does, where few
degrees of freedom are left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray
from scipy.optimize import least_squares

from scalingnote.errors import DataError
from scalingnote.scaling.laws import JointLaw, PowerLaw, Sizes, Split, Values
from scalingnote.storage import schema

Kind = Literal["size", "data", "joint"]
# An error of the logarithm beyond it counts by its size, not its square: runs that differ by their seed alone
# stay well below.
HUBER = 0.03
STARTS = (0.1, 0.5), (1e-3, 0.5), (0.3, 1.0)  # exponents, floors over the least, outer


@dataclass(frozen=True)
class Runs:
    """Finished trainings; `data` counts pairs or tokens."""

    parameters: Float[ndarray, " runs"]
    data: Float[ndarray, " runs"]
    entropy: Float[ndarray, " runs"]

    def __len__(self) -> int:
        return len(self.entropy)


@dataclass(frozen=True)
class Interval:
    """A value and the bounds that so many of a hundred bootstrap fits lie between."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fitted law; `draws` are the same law fitted to bootstrap samples of the same runs."""

    kind: Kind
    law: PowerLaw | JointLaw
    runs: Runs
    r2: float  # share of the entropies' variance that the law explains
    scatter: float  # standard deviation of a run around the law, of the logarithm
    draws: tuple[PowerLaw | JointLaw, ...]

    def constants(self, *, level: float = 0.95) -> dict[str, Interval]:
        """Every constant of the law, by its name."""
        return {
            field.name: _interval([getattr(law, field.name) for law in self._laws], level)
            for field in fields(self.law)
        }

    def predict(
        self, *, parameters: float | None = None, data: float | None = None, level: float = 0.95
    ) -> Interval:
        """Entropy that the law foretells; the interval is the curve's, around which runs scatter."""
        return _interval([float(value(law, self.kind, parameters, data)) for law in self._laws], level)

    def split(self, budget: float, *, per_parameter: float, level: float = 0.95) -> dict[str, Interval]:
        """Parameters, data and entropy that a budget of operations is best spent on; the joint law only."""
        laws = [law for law in self._laws if isinstance(law, JointLaw)]
        if not laws:
            raise DataError(f"a law of {self.kind} alone cannot split a budget: fit the joint law")
        splits = [law.split(budget, per_parameter=per_parameter) for law in laws]
        return {
            field.name: _interval([getattr(split, field.name) for split in splits], level)
            for field in fields(Split)
        }

    @property
    def freedom(self) -> int:
        """Degrees of freedom: runs beyond the constants, which could have contradicted the law."""
        return len(self.runs) - len(fields(self.law))

    @property
    def _laws(self) -> tuple[PowerLaw | JointLaw, ...]:
        return (self.law, *self.draws)


def read(table: pa.Table, *, data: Literal["examples", "tokens"] = "examples") -> Runs:
    """Runs of a :data:`scalingnote.storage.schema.LADDER` table; DataError for values no law can have."""
    needed = ("parameters", data, "contrastive_entropy")
    if missing := [name for name in needed if name not in table.column_names]:
        raise DataError(f"runs lack {missing}, they have {table.column_names}; needed: {schema.LADDER.names}")
    columns = [np.asarray(table[name].to_numpy(), dtype=float) for name in needed]
    for name, values in zip(needed, columns, strict=True):
        if len(bad := np.flatnonzero(~(np.isfinite(values) & (values > 0)))):
            raise DataError(
                f"run {bad[0]} has {name}={values[bad[0]]:g}: only numbers above 0 can be fitted: drop it"
            )
    return Runs(*columns)


def fit(kind: Kind, runs: Runs, *, draws: int = 200, seed: int = 0, huber: float = HUBER) -> Fit:
    """Fit one law; DataError when the runs cannot tell its constants apart.

    kind: `size` wants runs on equal data, `data` runs of one size, `joint` a grid of both.
    """
    _require(kind, runs)
    target = np.log(runs.entropy)
    best = min(
        (_solve(kind, runs, target, start, huber=huber) for start in _starts(kind, runs)), key=lambda s: s[1]
    )[0]
    fitted = _model(kind, runs)(best)
    free = len(runs) - len(best)
    # A fit follows its own runs: residuals are smaller than the scatter that made them.
    residuals = (target - fitted) * np.sqrt(len(runs) / free)
    rng = np.random.default_rng(seed)
    # Few runs leave open how large the scatter is: every draw takes another that it may be, which makes
    # Student's t of a normal distribution. Without it 95 % intervals of 4 or 5 sizes held the truth 7 times
    # in 10. Residuals are not centred: one failed run would shift all others.
    noise = (np.sqrt(free / rng.chisquare(free)) * rng.choice(residuals, len(runs)) for _ in range(draws))
    again = (_solve(kind, runs, fitted + errors, best, huber=huber)[0] for errors in noise)
    errors = runs.entropy - np.exp(fitted)
    return Fit(
        kind=kind,
        law=_law(kind, runs, best),
        runs=runs,
        r2=float(1 - (errors**2).sum() / ((runs.entropy - runs.entropy.mean()) ** 2).sum()),
        scatter=float(np.sqrt((residuals**2).mean())),
        draws=tuple(_law(kind, runs, solution) for solution in again),
    )


def value(law: PowerLaw | JointLaw, kind: Kind, parameters: Sizes | None, data: Sizes | None) -> Values:
    """Entropy by a law of a kind; DataError when a size that it needs is missing."""
    if isinstance(law, JointLaw):
        if parameters is not None and data is not None:
            return law(parameters, data)
    elif (size := data if kind == "data" else parameters) is not None:
        return law(size)
    names = {"size": "parameters", "data": "data", "joint": "parameters and data"}[kind]
    raise DataError(f"the {kind} law is a function of {names}: give them")


def _interval(values: Sequence[float], level: float) -> Interval:
    """Of the law itself, which comes first, by what its draws say."""
    tail = (1 - level) / 2
    low, high = np.quantile(values[1:], (tail, 1 - tail))
    return Interval(float(values[0]), float(low), float(high))


def _require(kind: Kind, runs: Runs) -> None:
    sizes, amounts = (len(np.unique(values)) for values in (runs.parameters, runs.data))
    found = f"found {len(runs)} runs of {sizes} model sizes on {amounts} data sizes"
    match kind:
        case "size" if amounts > 1:
            raise DataError(f"a law of model size alone needs equal data, {found}: keep one, or fit joint")
        case "data" if sizes > 1:
            raise DataError(f"a law of data alone needs one model size, {found}: keep one, or fit joint")
        case "size" | "data" if max(sizes, amounts) < 4:
            raise DataError(f"three constants need at least 4 sizes, {found}")
        case "joint" if min(sizes, amounts) < 3 or len(runs) < 7:
            raise DataError(
                f"five constants need at least 3 model sizes, 3 data sizes and 7 runs in all, {found}"
            )
        case _:
            pass


# What is searched: (size term, exponent, floor), joint: (..., data term, outer exponent); logarithms, but for
# the floor, which may be 0. Terms are those at the mean logarithm of the sizes, where they depend least on
# the exponents.


def _starts(kind: Kind, runs: Runs) -> Iterator[Values]:
    least = float(runs.entropy.min())
    middle = float(np.exp(np.log(runs.entropy).mean()))
    exponents, floors, outers = STARTS
    for exponent, floor, outer in product(exponents, floors, outers if kind == "joint" else (1.0,)):
        term = np.log(middle - floor * least) / outer
        one = [term, np.log(exponent), floor * least]
        yield np.array([*one, term - 1.0, np.log(outer)] if kind == "joint" else one)


def _solve(kind: Kind, runs: Runs, target: Values, start: Values, *, huber: float) -> tuple[Values, float]:
    low = [-200.0, np.log(1e-3), 0.0, -200.0, np.log(1e-2)]
    high = [200.0, np.log(5.0), float(runs.entropy.min()), 200.0, np.log(10.0)]
    bounds = np.array(low[: len(start)]), np.array(high[: len(start)])
    model = _model(kind, runs)
    found = least_squares(
        lambda point: model(point) - target,
        np.clip(start, bounds[0] + 1e-9, bounds[1] - 1e-9),
        bounds=bounds,
        loss="huber",
        f_scale=huber,
        x_scale="jac",
        max_nfev=200,
    )
    return found.x, float(found.cost)


def _model(kind: Kind, runs: Runs) -> Callable[[Values], Values]:
    """Logarithms of the runs' entropies by a point of the search."""
    sizes, amounts = (np.log(values) - np.log(values).mean() for values in (runs.parameters, runs.data))
    if kind == "joint":
        return lambda p: np.log((_exp(p[0] - _exp(p[1]) * sizes) + _exp(p[3] - amounts)) ** _exp(p[4]) + p[2])
    along = amounts if kind == "data" else sizes
    return lambda p: np.log(_exp(p[0] - _exp(p[1]) * along) + p[2])


def _law(kind: Kind, runs: Runs, point: Values) -> PowerLaw | JointLaw:
    exponent, floor = float(np.exp(point[1])), float(point[2])
    size = np.log(runs.data if kind == "data" else runs.parameters).mean()
    scale = float(_exp(point[0] / exponent + size))
    if kind != "joint":
        return PowerLaw(scale, exponent, floor)
    outer = float(np.exp(point[4]))
    amount = float(np.exp(point[3] + np.log(runs.data).mean()))
    return JointLaw(scale, amount, alpha=exponent * outer, beta=outer, delta=floor)


def _exp(value: Any) -> Any:
    """Far from the runs a search may overflow, which is no error: it turns back."""
    return np.exp(np.minimum(value, 60.0))
