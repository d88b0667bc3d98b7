"""Plots of docs/performance.md: recall over latency, quality over query cost, throughput over documents."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.line import Report, mean

OURS, PEER, GREY = "#0f8b8d", "#e69f00", "#8a8f98"
MARKERS = "osD^vP*X"
FAMILIES = {
    "lookup": PEER,
    "lightretriever": "#7b4ab8",
    "scalingnote": OURS,
    "scalingdual": "#202020",
    "embed": "#2b6cb0",
}
Reports = Mapping[str, Report]


def draw(reports: Reports, folder: Path) -> None:
    """Write every plot whose data is there, and remove the others."""
    for name, (_, needed, plot) in PLOTS.items():
        path = folder / f"{name}.png"
        if needed not in reports:
            path.unlink(missing_ok=True)
            continue
        with mpl.rc_context({"font.size": 9}):
            plot(reports).savefig(path, dpi=150)


def markdown(reports: Reports) -> str:
    """The plots, and for one without data what it waits for."""
    return "\n\n".join(
        f"![{title}](results/{name}.png)"
        if needed in reports
        else f"{title}: not drawn yet, `python -m benchmarks.{needed}` gives the data."
        for name, (title, needed, _) in PLOTS.items()
    )


def recall_latency(reports: Reports) -> Figure:
    """Every index of the family at the setting tuned for recall@100 of 0.95."""
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, batch in zip(panels, (1, 64), strict=True):
        for row in reports["index"]["family"]:
            _point(axes, row[f"us, batch {batch}"], row["R@100"], row["index"])
        axes.axhline(0.95, color=GREY, linewidth=0.8, linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel(f"processor time a query, µs, {batch} at a time")
        _bare(axes)
    panels[0].set_ylabel("recall@100 (dotted: what tuning aims at)")
    _legend(panels[1])
    return figure


def quality_cost(reports: Reports) -> Figure:
    """R@50 of every query side over what a query costs, a panel for each dataset and kind of backbone.

    What does not find half of what the best does is named, not drawn: the others would lie on one another.
    """
    tables = reports["distillation"]["tables"]
    least = {
        title: max(mean(row["R@50"]) for row in rows if _costs(row)) / 2 for title, rows in tables.items()
    }
    shown = {
        title: [row for row in rows if mean(row["R@50"]) >= least[title]] for title, rows in tables.items()
    }
    names = sorted({row["query side"] for rows in shown.values() for row in rows if _costs(row)}, key=_family)
    across = min(len(tables), 2)
    down = -(-len(tables) // across)
    figure = Figure(figsize=(4.6 * across + 2.6, max(3.8 * down, 0.23 * len(names))), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flat
    for axes, (title, rows) in zip(panels, tables.items(), strict=False):
        if low := [row["query side"] for row in rows if row not in shown[title]]:
            named = "\n".join([f"below {least[title]:.2f}:", *low])
            axes.annotate(named, (0.45, 0.02), xycoords="axes fraction", fontsize=7, color=GREY)
        for row in sorted(
            shown[title], key=lambda row: names.index(row["query side"]) if _costs(row) else -1
        ):
            if _costs(row):
                _side(axes, 1e6 / row["queries/s"], mean(row["R@50"]), row["query side"], names)
            else:
                axes.axhline(mean(row["R@50"]), color=GREY, linewidth=0.8, linestyle=":")
                place = (0.01, mean(row["R@50"]))
                axes.annotate(row["query side"], place, xycoords=("axes fraction", "data"), fontsize=7)
        axes.set_xscale("log")
        axes.set_xlabel("µs a query, one thread, one at a time")
        axes.set_ylabel("R@50 (dotted: no tower)")
        axes.set_title(title)
        _bare(axes)
    drawn = {
        label: line
        for axes in figure.axes
        for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        [drawn[name] for name in names], names, frameon=False, loc="outside right upper", fontsize=8
    )
    return figure


def _costs(row: Mapping[str, Any]) -> bool:
    """Whether a query side has a tower or a table whose time was taken."""
    return bool(row["queries/s"] != "-")


def _family(name: str) -> tuple[int, str]:
    """A query side's place in the legend: with those of its kind."""
    return next((n for n, start in enumerate(FAMILIES) if name.startswith(start)), len(FAMILIES)), name


def _side(axes: Axes, x: float, y: float, name: str, names: list[str]) -> None:
    """A query side in the colour of its family, with a marker that no other of it has."""
    family, _ = _family(name)
    colour = [*FAMILIES.values(), GREY][family]
    number = [one for one in names if _family(one)[0] == family].index(name)
    axes.plot([x], [y], MARKERS[number % len(MARKERS)], color=colour, label=name, linestyle="none")


def form_cost(reports: Reports) -> Figure:
    """One transformer in every form: its least cosine to float32, over what a query costs."""
    rows = [r for r in reports["query_encoder"]["measurements"] if (r["threads"], r["batch"]) == (1, 1)]
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for row in rows:
        if row["form"] in (
            "lookup",
            "tokenizer alone",
        ):  # another tower, and none: they have a cost only here
            axes.axvline(1e6 / row["queries/cpu s"], color=GREY, linewidth=0.8, linestyle=":")
            place = (1e6 / row["queries/cpu s"], 0.02)
            axes.annotate(row["form"], place, xycoords=("data", "axes fraction"), rotation=90, fontsize=7)
        else:
            _point(axes, 1e6 / row["queries/cpu s"], row["cosine"], row["form"])
    _legend(axes)
    axes.set_xscale("log")
    axes.set_xlabel("processor time a query, µs, one at a time")
    axes.set_ylabel("least cosine to torch in float32")
    _bare(axes)
    return figure


def throughput_documents(reports: Reports) -> Figure:
    """Rows a second as there are more of them: a line that does not fall scales."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    encode = reports["encode"]["overheads"]
    _curve(axes, encode, "documents", "documents/s", "encode, the job's own work (2 workers)", OURS)
    if "collect" in reports:
        growth = [row for row in reports["collect"]["growth"] if row["workers"] == 1]
        _curve(axes, growth, "queries", "queries/s", "association of queries (1 process)", PEER)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("documents, or queries")
    axes.set_ylabel("a second")
    axes.legend(frameon=False)
    _bare(axes)
    return figure


def _curve(axes: Axes, rows: Any, x: str, y: str, label: str, colour: str) -> None:
    axes.plot([row[x] for row in rows], [row[y] for row in rows], "o-", color=colour, label=label)


def _point(axes: Axes, x: float, y: float, label: str) -> None:
    """One way, with a marker of its own; filled as long as there are markers."""
    number = len(axes.get_legend_handles_labels()[1])
    colour = PEER if label.startswith(("faiss", "sentence-transformers")) else OURS
    (drawn,) = axes.plot([x], [y], MARKERS[number % len(MARKERS)], color=colour, label=label)
    drawn.set_markerfacecolor(colour if number < len(MARKERS) else "none")


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


# File -> (what it shows, the results that it cannot do without, how it is drawn).
PLOTS: Mapping[str, tuple[str, str, Callable[[Reports], Figure]]] = {
    "recall_latency": ("Recall against latency of the index family", "index", recall_latency),
    "quality_cost": ("Quality against query cost", "distillation", quality_cost),
    "form_cost": ("What the forms of one query tower keep and cost", "query_encoder", form_cost),
    "throughput_documents": ("Throughput against documents", "encode", throughput_documents),
}
