"""The plot of a scaling law: runs, the fitted curve, the band that its bootstrap draws span (Figure 5)."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from scalingnote.scaling.fit import Fit, value
from scalingnote.scaling.laws import Values

POINTS = 60  # of a curve


def draw(fit: Fit, path: Path, *, reach: float = 3.0, level: float = 0.95) -> None:
    """Write a PNG or SVG; curves go on to `reach` times the largest size that was run.

    A joint law has one curve per data size, over parameters.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="tight")
    axes = figure.add_subplot()
    over_data = fit.kind == "data"
    sizes = fit.runs.data if over_data else fit.runs.parameters
    along = np.geomspace(sizes.min(), sizes.max() * reach, POINTS)
    groups = np.unique(fit.runs.data).tolist() if fit.kind == "joint" else [None]
    for number, held in enumerate(groups):
        chosen = np.full(len(sizes), True) if held is None else fit.runs.data == held
        colour = mpl.colormaps["viridis"](0.1 + 0.8 * number / len(groups))  # dark: little data
        label = "runs" if held is None else f"{held:,.0f} examples"
        axes.plot(sizes[chosen], fit.runs.entropy[chosen], "o", color=colour, markersize=5, label=label)
        law, *draws = (
            value(one, fit.kind, along, along if over_data else held) for one in (fit.law, *fit.draws)
        )
        low, high = _band(draws, level)
        axes.plot(along, law, "--", color=colour, linewidth=1.4)
        axes.fill_between(along, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(ScalarFormatter())  # entropies span less than a power of ten
    axes.set_xlabel("training pairs" if over_data else "parameters without embeddings")
    axes.set_ylabel("contrastive entropy")
    quality = f"R² = {fit.r2:.4f}, degrees of freedom: {fit.freedom}"
    axes.set_title(f"{quality}, band: {level:.0%} of {len(fit.draws)} draws", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _band(draws: list[Values], level: float) -> tuple[Values, Values]:
    tail = (1 - level) / 2
    low, high = np.quantile(np.stack(draws), (tail, 1 - tail), axis=0)
    return low, high
