"""Scaling laws of dense retrieval: their form, fits to finished runs, and plots.

    L(N) = (C/N)^α + δ        L(D) = (C/D)^α + δ        L(N, D) = [(A/N)^(α/β) + B/D]^β + δ

L is contrastive entropy, N counts parameters without embeddings, D training pairs (ScalingNote, section 4.4;
the joint law is that of Kaplan et al., 2020, Eq. 1.5, over a floor δ).

    LADDER table ─read_runs─► Runs ─fit─► Fit ─► constants · R² · predictions · split of a budget

A fit minimizes Huber's loss on log entropies (Hoffmann et al., 2022, section 3.3), so that one failed run
does not bend the curve. Intervals come from a bootstrap of residuals: with five sizes, resampled runs would
often have too few sizes for a fit. With few degrees of freedom, the intervals are wider, like Student's t.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
from scipy.optimize import least_squares

from scalingnote.core.errors import DataError
from scalingnote.storage import schema

Values = Float[ndarray, "..."]
Kind = Literal["size", "data", "joint"]
NEEDS: dict[Kind, str] = {
    "size": "at least 4 model sizes, all with the same number of pairs",
    "data": "at least 4 numbers of pairs, all with the same model size",
    "joint": "at least 3 model sizes, 3 numbers of pairs and 7 runs in all",
}
# Larger errors of the logarithm count linearly instead of squared; runs that differ only in their seed have
# much smaller ones.
HUBER_THRESHOLD = 0.03
STARTS = (0.1, 0.5), (1e-3, 0.5), (0.3, 1.0)  # exponents, floors relative to the least entropy, outer
DRAWS = 200  # number of bootstrap fits for the intervals
LEVEL = 0.95  # of the intervals
CURVE_POINTS, CURVE_REACH = 60, 3.0  # of each plotted curve, which ends at this multiple of the largest size


def power_law(size: Any, c: Any, alpha: Any, delta: Any) -> Any:
    """Compute the entropy at a number of parameters, or of pairs (Eq. 18, 19); numbers or arrays."""
    return (c / size) ** alpha + delta


def joint_law(parameters: Any, data: Any, a: Any, b: Any, alpha: Any, beta: Any, delta: Any) -> Any:
    """Compute the entropy of `parameters` trained on `data` pairs (Eq. 20); numbers or arrays."""
    return ((a / parameters) ** (alpha / beta) + b / data) ** beta + delta


@dataclass(frozen=True)
class Runs:
    """Finished training runs; `data` counts pairs."""

    parameters: Float[ndarray, " runs"]
    data: Float[ndarray, " runs"]
    entropy: Float[ndarray, " runs"]


class Interval(NamedTuple):
    """A value with the bounds of its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fitted law: its constants by name, each an array with the value of the fit and then of all draws."""

    kind: Kind
    values: dict[str, Float[ndarray, " laws"]]
    runs: Runs
    r2: float  # share of the entropies' variance that the law explains
    scatter: float  # standard deviation of a run around the law, of the logarithm

    def constants(self) -> dict[str, Interval]:
        """Return every constant of the law with its interval, by name."""
        return {name: _interval(values) for name, values in self.values.items()}

    def predict(self, *, parameters: float, data: float) -> Interval:
        """Predict the entropy; a law of one size ignores the other size, and holds for that of its runs.

        The interval is that of the curve; single runs scatter around it.
        """
        return _interval(self.entropies(parameters, data))

    def entropies(self, parameters: Any, data: Any) -> Values:
        """Compute the entropies by the law and by each draw, along the last axis."""
        if self.kind == "joint":
            return np.asarray(joint_law(parameters, data, **self.values))
        return np.asarray(power_law(data if self.kind == "data" else parameters, **self.values))

    def split(self, budget: float, *, per_parameter: float) -> dict[str, Interval]:
        """Find N and D of least entropy with budget = per_parameter · N · D operations, by the joint law.

        The minimum along that line is where α/β (A/N)^(α/β) = B/D. Neither is below 1, nor above the budget:
        in a law fitted to few runs, one of them may have no effect.

        Args:
            budget: number of operations.
            per_parameter: operations of a pair for each parameter.

        Returns:
            The best `parameters` and `data`, and the resulting `entropy`.

        Raises:
            DataError: the law has only one size.
        """
        if self.kind != "joint":
            raise DataError(f"the {self.kind} law cannot split a budget: fit the joint law")
        a, b, inner = self.values["a"], self.values["b"], self.values["alpha"] / self.values["beta"]
        most = budget / per_parameter
        parameters = np.clip((inner * a**inner * most / b) ** (1 / (1 + inner)), 1.0, most)
        data = most / parameters
        entropy = self.entropies(parameters, data)
        optimum = {"parameters": parameters, "data": data, "entropy": entropy}
        return {name: _interval(values) for name, values in optimum.items()}

    @property
    def freedom(self) -> int:
        """Degrees of freedom: runs minus constants."""
        return len(self.runs.entropy) - len(self.values)

    @property
    def seed_scatter(self) -> float | None:
        """Standard deviation of the logarithm between runs of one size; None if every size has one run.

        A much larger `scatter` shows that the form of the law does not fit, which affects all seeds of a
        size: the intervals, which treat runs as independent, are then too narrow.
        """
        pairs, logs = np.stack([self.runs.parameters, self.runs.data]), np.log(self.runs.entropy)
        _, size, runs = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
        errors = logs - (np.bincount(size, weights=logs) / runs)[size]
        freedom = len(logs) - len(runs)
        return float(np.sqrt((errors**2).sum() / freedom)) if freedom else None


def _interval(values: Values) -> Interval:
    """Return the value of the law, which comes first, with the quantiles of its draws."""
    return Interval(float(values[0]), *_bounds(values[1:]).tolist())


def _bounds(draws: Values) -> Values:
    """Compute the lower and upper quantile along the last axis that contain LEVEL of the draws."""
    tail = (1 - LEVEL) / 2
    return np.asarray(np.quantile(draws, (tail, 1 - tail), axis=-1))


def read_runs(table: pa.Table) -> Runs:
    """Read runs from a :data:`scalingnote.storage.schema.LADDER` table.

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
                f"run {bad[0]} has {name}={values[bad[0]]:g}, but a fit needs numbers above 0: drop it"
            )
    return Runs(*columns)


def fit(kind: Kind, runs: Runs, *, draws: int = DRAWS) -> Fit:
    """Fit one law.

    Args:
        kind: `size` needs runs on equal data, `data` runs of one model size, `joint` a grid of both.
        runs: finished runs.
        draws: number of bootstrap fits for the intervals.

    Raises:
        DataError: there are too few sizes to identify the constants.
    """
    sizes, amounts = (len(np.unique(values)) for values in (runs.parameters, runs.data))
    count = len(runs.entropy)
    enough = {
        "size": sizes >= 4 and amounts == 1,
        "data": amounts >= 4 and sizes == 1,
        "joint": min(sizes, amounts) >= 3 and count >= 7,
    }
    if not enough[kind]:
        raise DataError(
            f"the {kind} law needs {NEEDS[kind]}; found {count} runs of {sizes} model sizes and {amounts} "
            "numbers of pairs"
        )
    target = np.log(runs.entropy)
    solutions = [_solve(kind, runs, target, start) for start in _starts(kind, runs)]
    best, _ = min(solutions, key=lambda solution: solution[1])
    fitted = _log_entropies(kind, runs, best)
    free = count - len(best)
    # A fit follows its runs, so residuals are smaller than the noise that caused them: rescale them.
    residuals = (target - fitted) * np.sqrt(count / free)
    rng = np.random.default_rng(0)
    # With few runs the size of the noise is uncertain, so each draw scales it by a sample of this
    # uncertainty, which turns a normal distribution into Student's t. Without it, 95 % intervals of 4 or 5
    # sizes held the truth 7 times in 10. Residuals are not centred: one failed run would shift all others.
    noise = (np.sqrt(free / rng.chisquare(free)) * rng.choice(residuals, count) for _ in range(draws))
    again = (_solve(kind, runs, fitted + errors, best)[0] for errors in noise)
    errors, spread = runs.entropy - np.exp(fitted), runs.entropy - runs.entropy.mean()
    return Fit(
        kind=kind,
        values=_constants(kind, runs, np.stack([best, *again])),
        runs=runs,
        r2=float(1 - (errors**2).sum() / (spread**2).sum()),
        scatter=float(np.sqrt((residuals**2).mean())),
    )


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


def _solve(kind: Kind, runs: Runs, target: Values, start: Values) -> tuple[Values, float]:
    """Search from `start` for the point that fits the `target` log entropies, and return it with its loss."""
    low = [-200.0, np.log(1e-3), 0.0, -200.0, np.log(1e-2)]
    high = [200.0, np.log(5.0), float(runs.entropy.min()), 200.0, np.log(10.0)]
    bounds = np.array(low[: len(start)]), np.array(high[: len(start)])
    solution = least_squares(
        lambda point: _log_entropies(kind, runs, point) - target,
        np.clip(start, bounds[0] + 1e-9, bounds[1] - 1e-9),
        bounds=bounds,
        loss="huber",
        f_scale=HUBER_THRESHOLD,
        x_scale="jac",
        max_nfev=200,
    )
    return solution.x, float(solution.cost)


def _log_entropies(kind: Kind, runs: Runs, point: Values) -> Values:
    """Compute the log entropies of the runs at a point of the search space."""
    sizes, amounts = (np.log(values) - np.log(values).mean() for values in (runs.parameters, runs.data))
    entropy = _exp(point[0] - _exp(point[1]) * (amounts if kind == "data" else sizes))
    if kind == "joint":
        entropy = (entropy + _exp(point[3] - amounts)) ** _exp(point[4])
    return np.asarray(np.log(entropy + point[2]))


def _constants(kind: Kind, runs: Runs, points: Float[ndarray, "points constants"]) -> dict[str, Values]:
    """Convert points of the search space to constants of laws."""
    exponent, delta = np.exp(points[:, 1]), points[:, 2]
    size = np.log(runs.data if kind == "data" else runs.parameters).mean()
    scale = _exp(points[:, 0] / exponent + size)
    if kind != "joint":
        return {"c": scale, "alpha": exponent, "delta": delta}
    beta = np.exp(points[:, 4])
    b = np.exp(points[:, 3] + np.log(runs.data).mean())
    return {"a": scale, "b": b, "alpha": exponent * beta, "beta": beta, "delta": delta}


def _exp(value: Any) -> Any:
    """Compute exp without overflow: a step of the search may go far from the runs."""
    return np.exp(np.minimum(value, 60.0))


def draw(fit: Fit, to: Path | BytesIO) -> None:
    """Plot runs, the fitted curve and its bootstrap band, as PNG or SVG (ScalingNote, Figure 5).

    A joint law has one curve over parameters per data size.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="tight")
    axes = figure.add_subplot()
    runs, joint = fit.runs, fit.kind == "joint"
    sizes = runs.data if fit.kind == "data" else runs.parameters
    along = np.geomspace(sizes.min(), sizes.max() * CURVE_REACH, CURVE_POINTS)
    amounts = np.unique(runs.data) if joint else runs.data[:1]
    colours = mpl.colormaps["viridis"](np.linspace(0.1, 0.9, len(amounts), endpoint=False))  # dark: few data
    for amount, colour in zip(amounts, colours, strict=True):
        is_drawn = runs.data == amount if joint else np.full(len(sizes), True)
        label = f"{amount:,.0f} examples" if joint else "runs"
        axes.plot(sizes[is_drawn], runs.entropy[is_drawn], "o", color=colour, markersize=5, label=label)
        curves = fit.entropies(along[:, None], amount if joint else along[:, None])
        axes.plot(along, curves[:, 0], "--", color=colour, linewidth=1.4)
        axes.fill_between(along, *_bounds(curves[:, 1:]), color=colour, alpha=0.18, linewidth=0)
    labels = {"xlabel": "training pairs" if fit.kind == "data" else "parameters without embeddings"}
    axes.set(xscale="log", yscale="log", ylabel="contrastive entropy", **labels)
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(ScalarFormatter())  # entropies span less than a decade
    quality = f"R² = {fit.r2:.4f}, degrees of freedom: {fit.freedom}"
    axes.set_title(f"{quality}, band: {LEVEL:.0%} of {curves.shape[1] - 1} draws", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(to, dpi=130)
