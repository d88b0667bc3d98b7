"""Scaling laws of dense retrieval: their form, fits to finished runs, and plots.

    L(N) = (C/N)^α + δ        L(D) = (C/D)^α + δ        L(N, D) = [(A/N)^(α/β) + B/D]^β + δ

L is contrastive entropy, N counts parameters without embeddings, D training pairs (ScalingNote, section 4.4;
the joint law is that of Kaplan et al., 2020, Eq. 1.5, over a floor δ).

    LADDER table ─read_runs─► Runs ─fit─► Fit ─► constants · R² · predictions · split of a budget

A fit minimizes Huber's loss on log entropies (Hoffmann et al., 2022, section 3.3), so that one failed run
does not bend the curve. Intervals come from a bootstrap of residuals: with five sizes, resampled runs would
often hold too few sizes to fit at all. The intervals widen like Student's t if few degrees of freedom are
left.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import pyarrow as pa
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from numpy import ndarray
from numpy.typing import NDArray
from scipy.optimize import least_squares

from scalingnote.core.errors import DataError
from scalingnote.storage import schema

Values = NDArray[np.float64]
Sizes = float | Values
Kind = Literal["size", "data", "joint"]
# Errors of the logarithm above it count linearly instead of squared; runs that differ only in their seed stay
# well below.
HUBER_THRESHOLD = 0.03
STARTS = (0.1, 0.5), (1e-3, 0.5), (0.3, 1.0)  # exponents, floors over the least, outer
DRAWS = 200  # bootstrap fits behind the intervals
LEVEL = 0.95  # of the intervals
CURVE_POINTS, CURVE_REACH = 60, 3.0  # of each plotted curve; it ends at so many times the largest size


@dataclass(frozen=True)
class PowerLaw:
    """Law of one size, with the other one constant (Eq. 18, 19)."""

    c: float
    alpha: float
    delta: float

    def __call__(self, size: Sizes) -> Values:
        """Contrastive entropy at a number of parameters, or of pairs."""
        return np.asarray((self.c / np.asarray(size)) ** self.alpha + self.delta)


class BudgetSplit(NamedTuple):
    """The best use of a budget: parameters, pairs, and the resulting entropy."""

    parameters: float
    data: float
    entropy: float


@dataclass(frozen=True)
class JointLaw:
    """Law of both sizes (Eq. 20)."""

    a: float
    b: float
    alpha: float
    beta: float
    delta: float

    @property
    def inner(self) -> float:
        """α/β, the exponent of A/N in Eq. 20."""
        return self.alpha / self.beta

    def __call__(self, parameters: Sizes, data: Sizes) -> Values:
        """Contrastive entropy of a model with `parameters` trained on `data` pairs."""
        size = (self.a / np.asarray(parameters)) ** self.inner
        return np.asarray((size + self.b / np.asarray(data)) ** self.beta + self.delta)

    def split(self, budget: float, *, per_parameter: float) -> BudgetSplit:
        """The N and D of least entropy with budget = per_parameter · N · D operations.

        The minimum along that line is where α/β (A/N)^(α/β) = B/D. Neither is below 1, nor above the budget:
        a law fitted to few runs may find no use in one of them.
        """
        product = budget / per_parameter
        parameters = (self.inner * self.a**self.inner * product / self.b) ** (1 / (1 + self.inner))
        parameters = min(max(parameters, 1.0), product)
        data = product / parameters
        return BudgetSplit(parameters, data, float(self(parameters, data)))


@dataclass(frozen=True)
class Runs:
    """Finished training runs; `data` counts pairs."""

    parameters: Float[ndarray, " runs"]
    data: Float[ndarray, " runs"]
    entropy: Float[ndarray, " runs"]

    def __len__(self) -> int:
        return len(self.entropy)


class Interval(NamedTuple):
    """A value with the bounds of its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fitted law; `draws` are fits of the same law to bootstrap samples."""

    kind: Kind
    law: PowerLaw | JointLaw
    runs: Runs
    r2: float  # share of the entropies' variance that the law explains
    scatter: float  # standard deviation of a run around the law, of the logarithm
    draws: tuple[PowerLaw | JointLaw, ...]

    def constants(self) -> dict[str, Interval]:
        """Every constant of the law with its interval, by its name."""
        return {
            field.name: _interval([getattr(law, field.name) for law in self._laws])
            for field in fields(self.law)
        }

    def predict(self, *, parameters: float | None = None, data: float | None = None) -> Interval:
        """Predicted entropy; the interval is that of the curve, around which single runs scatter."""
        return _interval([float(law_value(law, self.kind, parameters, data)) for law in self._laws])

    def split(self, budget: float, *, per_parameter: float) -> dict[str, Interval]:
        """The best split of a budget of operations and its entropy; only for the joint law."""
        laws = [law for law in self._laws if isinstance(law, JointLaw)]
        if not laws:
            raise DataError(f"a law of {self.kind} alone cannot split a budget: fit the joint law")
        splits = [law.split(budget, per_parameter=per_parameter) for law in laws]
        columns = zip(BudgetSplit._fields, zip(*splits, strict=True), strict=True)
        return {name: _interval(values) for name, values in columns}

    @property
    def freedom(self) -> int:
        """Degrees of freedom: runs minus constants."""
        return len(self.runs) - len(fields(self.law))

    @property
    def sizes(self) -> int:
        """Number of different sizes; runs of one size differ in their seed alone."""
        return int(self._size_of_runs().max()) + 1

    @property
    def seed_scatter(self) -> float | None:
        """Standard deviation of the logarithm between runs of one size; None if every size has one run.

        A `scatter` well above it is a misfit of the law's form, which all seeds of a size share: the
        intervals, which take runs as independent, are then too narrow.
        """
        size, logs = self._size_of_runs(), np.log(self.runs.entropy)
        freedom = len(logs) - self.sizes
        if not freedom:
            return None
        means = np.bincount(size, weights=logs) / np.bincount(size)
        return float(np.sqrt(((logs - means[size]) ** 2).sum() / freedom))

    def _size_of_runs(self) -> NDArray[np.int64]:
        pairs = np.stack([self.runs.parameters, self.runs.data])
        return np.asarray(np.unique(pairs, axis=1, return_inverse=True)[1], dtype=np.int64).reshape(-1)

    @property
    def _laws(self) -> tuple[PowerLaw | JointLaw, ...]:
        return (self.law, *self.draws)


def read_runs(table: pa.Table) -> Runs:
    """Runs of a :data:`scalingnote.storage.schema.LADDER` table.

    Raises:
        DataError: a column is missing, or a value is not a positive finite number.
    """
    needed = ("parameters", "examples", "contrastive_entropy")
    if missing := [name for name in needed if name not in table.column_names]:
        raise DataError(f"runs lack {missing}, they have {table.column_names}; needed: {schema.LADDER.names}")
    columns = [np.asarray(table[name].to_numpy(), dtype=float) for name in needed]
    for name, values in zip(needed, columns, strict=True):
        if len(bad := np.flatnonzero(~(np.isfinite(values) & (values > 0)))):
            raise DataError(
                f"run {bad[0]} has {name}={values[bad[0]]:g}: only numbers above 0 can be fitted: drop it"
            )
    return Runs(*columns)


def fit(kind: Kind, runs: Runs, *, draws: int = DRAWS, seed: int = 0, huber: float = HUBER_THRESHOLD) -> Fit:
    """Fit one law.

    Args:
        kind: `size` needs runs on equal data, `data` runs of one model size, `joint` a grid of both.
        runs: finished runs.
        draws: bootstrap fits behind the intervals.
        seed: of the bootstrap.
        huber: errors of log entropy above it count linearly.

    Raises:
        DataError: there are too few sizes to identify the constants.
    """
    _require(kind, runs)
    target = np.log(runs.entropy)
    best = min(
        (_solve(kind, runs, target, start, huber=huber) for start in _starts(kind, runs)), key=lambda s: s[1]
    )[0]
    fitted = _model(kind, runs)(best)
    free = len(runs) - len(best)
    # A fit follows its own runs, so residuals are smaller than the noise that caused them: rescale.
    residuals = (target - fitted) * np.sqrt(len(runs) / free)
    rng = np.random.default_rng(seed)
    # With few runs the size of the noise is uncertain, so each draw scales it by a sample of that
    # uncertainty, which turns a normal distribution into Student's t. Without it, 95 % intervals of 4 or 5
    # sizes held the truth 7 times in 10. Residuals are not centred: one failed run would shift all others.
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


def law_value(law: PowerLaw | JointLaw, kind: Kind, parameters: Sizes | None, data: Sizes | None) -> Values:
    """Entropy by a law; DataError if a size that its kind needs is missing."""
    if isinstance(law, JointLaw):
        if parameters is not None and data is not None:
            return law(parameters, data)
    elif (size := data if kind == "data" else parameters) is not None:
        return law(size)
    names = {"size": "parameters", "data": "data", "joint": "parameters and data"}[kind]
    raise DataError(f"the {kind} law is a function of {names}: give them")


def _interval(values: Sequence[float]) -> Interval:
    """The value of the law, which comes first, with the quantiles of its draws."""
    low, high = _bounds(values[1:])
    return Interval(float(values[0]), float(low), float(high))


def _bounds(draws: Sequence[Any]) -> Values:
    """The lower and upper quantile of draws, numbers or curves, that hold LEVEL of them."""
    tail = (1 - LEVEL) / 2
    return np.asarray(np.quantile(draws, (tail, 1 - tail), axis=0))


def _require(kind: Kind, runs: Runs) -> None:
    sizes, amounts = (len(np.unique(values)) for values in (runs.parameters, runs.data))
    sizes_found = f"found {len(runs)} runs of {sizes} model sizes on {amounts} data sizes"
    match kind:
        case "size" if amounts > 1:
            raise DataError(
                f"a law of model size alone needs equal data, {sizes_found}: keep one, or fit joint"
            )
        case "data" if sizes > 1:
            raise DataError(
                f"a law of data alone needs one model size, {sizes_found}: keep one, or fit joint"
            )
        case "size" | "data" if max(sizes, amounts) < 4:
            raise DataError(f"three constants need at least 4 sizes, {sizes_found}")
        case "joint" if min(sizes, amounts) < 3 or len(runs) < 7:
            raise DataError(
                f"five constants need at least 3 model sizes, 3 data sizes and 7 runs in all, {sizes_found}"
            )
        case _:
            pass


# The search space: (size term, exponent, floor), for the joint law also (data term, outer exponent). All are
# logarithms except the floor, which may be 0. Terms are taken at the mean log size, where they depend least
# on the exponents.


def _starts(kind: Kind, runs: Runs) -> Iterator[Values]:
    least = float(runs.entropy.min())
    middle = float(np.exp(np.log(runs.entropy).mean()))
    exponents, floors, outers = STARTS
    for exponent, floor, outer in product(exponents, floors, outers if kind == "joint" else (1.0,)):
        term = np.log(middle - floor * least) / outer
        start = [term, np.log(exponent), floor * least]
        yield np.array([*start, term - 1.0, np.log(outer)] if kind == "joint" else start)


def _solve(kind: Kind, runs: Runs, target: Values, start: Values, *, huber: float) -> tuple[Values, float]:
    low = [-200.0, np.log(1e-3), 0.0, -200.0, np.log(1e-2)]
    high = [200.0, np.log(5.0), float(runs.entropy.min()), 200.0, np.log(10.0)]
    bounds = np.array(low[: len(start)]), np.array(high[: len(start)])
    model = _model(kind, runs)
    solution = least_squares(
        lambda point: model(point) - target,
        np.clip(start, bounds[0] + 1e-9, bounds[1] - 1e-9),
        bounds=bounds,
        loss="huber",
        f_scale=huber,
        x_scale="jac",
        max_nfev=200,
    )
    return solution.x, float(solution.cost)


def _model(kind: Kind, runs: Runs) -> Callable[[Values], Values]:
    """Log entropies of the runs as a function of a point of the search space."""
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
    """exp without overflow: a search step may go far from the runs before it turns back."""
    return np.exp(np.minimum(value, 60.0))


def draw(fit: Fit, to: Path | BytesIO) -> None:
    """Plot runs, the fitted curve and its bootstrap band, as PNG or SVG (ScalingNote, Figure 5).

    A joint law has one curve over parameters per data size.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="tight")
    axes = figure.add_subplot()
    over_data, joint = fit.kind == "data", fit.kind == "joint"
    sizes = fit.runs.data if over_data else fit.runs.parameters
    along = np.geomspace(sizes.min(), sizes.max() * CURVE_REACH, CURVE_POINTS)
    amounts = np.unique(fit.runs.data).tolist() if joint else [None]
    colours = mpl.colormaps["viridis"](np.linspace(0.1, 0.9, len(amounts), endpoint=False))  # dark: few data
    for amount, colour in zip(amounts, colours, strict=True):
        chosen = fit.runs.data == amount if joint else np.full(len(sizes), True)
        label = f"{amount:,.0f} examples" if joint else "runs"
        axes.plot(sizes[chosen], fit.runs.entropy[chosen], "o", color=colour, markersize=5, label=label)
        curves = [law_value(law, fit.kind, along, along if over_data else amount) for law in fit._laws]
        axes.plot(along, curves[0], "--", color=colour, linewidth=1.4)
        axes.fill_between(along, *_bounds(curves[1:]), color=colour, alpha=0.18, linewidth=0)
    labels = {"xlabel": "training pairs" if over_data else "parameters without embeddings"}
    axes.set(xscale="log", yscale="log", ylabel="contrastive entropy", **labels)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(ScalarFormatter())  # entropies span less than a decade
    quality = f"R² = {fit.r2:.4f}, degrees of freedom: {fit.freedom}"
    axes.set_title(f"{quality}, band: {LEVEL:.0%} of {len(fit.draws)} draws", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(to, dpi=130)
