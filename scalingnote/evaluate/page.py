"""report.html: measures, plots, example queries and lineage on one self-contained page."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain, zip_longest
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray

from scalingnote import reports
from scalingnote.evaluate.documents import find_documents
from scalingnote.evaluate.lineage import Ancestor
from scalingnote.evaluate.measures import Rankings
from scalingnote.evaluate.report import (
    DISTANCE,
    READING,
    Report,
    documents_column,
    measures_of,
    notes,
    report_sections,
    significance_mark,
    stage_table,
)
from scalingnote.evaluate.test_set import TestSet
from scalingnote.reports import Markup
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner

RESULTS_PER_EXAMPLE = 3
# Distinguishable with red-green blindness (Okabe and Ito), on white and on black.
COLOURS = ("#0f8b8d", "#e69f00", "#cc6f9c", "#4c8bd6", "#8a8f98", "#d55e00", "#59a14f", "#9a79c4")
_INK = "#010203"  # placeholder for the page's text colour, which SVG calls currentColor


@dataclass(frozen=True)
class ResultDocument:
    """A search result as the page shows it."""

    doc_id: str
    title: str
    relevant: bool


@dataclass(frozen=True)
class ExampleQuery:
    """A test query with the first results of each method (like ScalingNote's Table 9)."""

    query: str
    results: Mapping[str, Sequence[ResultDocument]]
    first_relevant: Mapping[str, int | None] = field(default_factory=dict)  # rank per method; None: not found
    method: str = ""  # the method it was chosen for; empty if it was drawn at random
    difference: float = 0.0  # that method's value minus the baseline's


@dataclass(frozen=True)
class ChosenQuery:
    """A row of the test set, and the difference from the baseline that it was chosen for."""

    row: int
    method: str = ""
    difference: float = 0.0


def choose_queries(
    values: Mapping[str, Float[ndarray, " queries"]], *, baseline: str, number: int, seed: int
) -> list[ChosenQuery]:
    """Queries on which methods differ most from the baseline.

    They are the next greatest win and the next greatest loss of each method in turn. The seed decides between
    equal differences, and draws the rest once no method differs any more.

    Args:
        values: each method's measure per query.
        baseline: one of the methods.
        number: of queries to choose.
        seed: of the draw.
    """
    random_order = np.random.default_rng(seed).permutation(len(values[baseline]))
    turns = []
    for method, method_values in values.items():
        # Differences of rounding alone are none.
        differences = np.round(method_values - values[baseline], 9)[random_order]
        for sign in (1, -1):
            order = np.argsort(-sign * differences, kind="stable")
            order = order[sign * differences[order] > 0]
            turns.append([ChosenQuery(int(random_order[i]), method, float(differences[i])) for i in order])
    chosen: dict[int, ChosenQuery] = {}
    for one in chain(
        chain.from_iterable(zip_longest(*turns)), (ChosenQuery(int(row)) for row in random_order)
    ):
        if one is not None and len(chosen) < number:
            chosen.setdefault(one.row, one)
    return list(chosen.values())


def example_queries(
    dataset: Artifact,
    rankings: Mapping[str, Rankings],
    chosen: Sequence[ChosenQuery],
    *,
    test: TestSet,
    each: TaskRunner = map,
) -> list[ExampleQuery]:
    """The chosen test queries, with the first results of each method; `each` runs the tasks."""
    query_ids = [test.query_ids[one.row] for one in chosen]
    shown = {
        query_id: {name: ranking[query_id][:RESULTS_PER_EXAMPLE] for name, ranking in rankings.items()}
        for query_id in query_ids
    }
    doc_ids = {doc for row in shown.values() for docs in row.values() for doc in docs}
    found = find_documents(dataset, doc_ids, ["title"], each=each)
    titles = dict(zip(found["doc_id"].to_pylist(), found["title"].to_pylist(), strict=True))
    examples = []
    for one, query_id in zip(chosen, query_ids, strict=True):
        relevant = {doc for doc, grade in test.qrels[query_id].items() if grade > 0}
        results = {
            name: [ResultDocument(doc, titles.get(doc) or "", doc in relevant) for doc in docs]
            for name, docs in shown[query_id].items()
        }
        first_relevant = {
            name: next((rank for rank, doc in enumerate(ranking[query_id], 1) if doc in relevant), None)
            for name, ranking in rankings.items()
        }
        query = test.queries[one.row]
        examples.append(ExampleQuery(query, results, first_relevant, one.method, one.difference))
    return examples


def recall_bars(methods: Mapping[str, Mapping[str, float]]) -> str:
    """Grouped bars: for each R@K, one bar per method."""
    cutoffs = [name for name in next(iter(methods.values())) if name.startswith("R@")]
    width = 0.8 / len(methods)
    figure, axes = _axes(8.4, 3.6)
    all_bars = []
    for i, row in enumerate(methods.values()):
        left = [place - 0.4 + (i + 0.5) * width for place in range(len(cutoffs))]
        values = [row[name] for name in cutoffs]
        bars = axes.bar(left, values, width=width * 0.9, color=COLOURS[i % len(COLOURS)])
        all_bars.append(bars)
        if len(methods) <= 5:
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, color=_INK)
    axes.set_xticks(range(len(cutoffs)), cutoffs)
    axes.set_ylabel("share of queries")
    axes.set_ylim(0, 1.08)
    # Names are passed with their bars because matplotlib omits labels that begin with an underscore, and
    # dollars are escaped because it would parse a formula between them.
    names = [method.replace("$", r"\$") for method in methods]
    right: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
    axes.legend(all_bars, names, **right, frameon=False, labelcolor=_INK, fontsize=9)
    return _svg(figure, name="recall of the methods")


def index_bars(index: Mapping[str, float]) -> str:
    """Horizontal bars: recall of the index against exact search."""
    recalls = {name: index[name] for name in ("recall@100", "recall@10") if name in index}
    figure, axes = _horizontal_bars(recalls, row_height=0.45, colour=COLOURS[0], number="%.3f")
    axes.set_xlim(0, 1.08)
    axes.set_xlabel("share of the exact answer")
    return _svg(figure, name="recall of the index")


def stage_bars(seconds: Mapping[str, float]) -> str:
    """Horizontal bars: time of each stage."""
    top_down = dict(reversed(list(seconds.items())))
    figure, axes = _horizontal_bars(top_down, row_height=0.3, colour=COLOURS[3], number="%.1f")
    axes.margins(x=0.1)
    axes.set_xlabel("seconds")
    return _svg(figure, name="time of the stages")


def _horizontal_bars(
    values: Mapping[str, float], *, row_height: float, colour: str, number: str
) -> tuple[Figure, Axes]:
    figure, axes = _axes(8.4, 0.7 + row_height * len(values))
    bars = axes.barh(list(values), list(values.values()), color=colour, height=0.6)
    axes.bar_label(bars, fmt=number, fontsize=9, padding=4, color=_INK)
    return figure, axes


def discrepancy_histogram(pairs: Mapping[str, Any]) -> str:
    """Histogram of the teacher's distance between two queries minus the student's."""
    edges = pairs["edges"]
    figure, axes = _axes(8.4, 2.6)
    axes.bar(edges[:-1], pairs["counts"], width=edges[1] - edges[0], align="edge", color=COLOURS[0])
    axes.set_xlabel("distance by the teacher less distance by the student")
    axes.set_ylabel("pairs of queries")
    return _svg(figure, name="discrepancy of pairwise distances")


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="tight")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    return figure, axes


def _svg(figure: Figure, *, name: str) -> str:
    stream = io.StringIO()
    # A fixed salt and no date: equal numbers give equal bytes. Text stays text for screen readers and search.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # unused ids, which would repeat on the page
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def page(report: Report, *, examples: Sequence[ExampleQuery], ancestors: Sequence[Ancestor]) -> str:
    """The HTML page of a report. Everything that comes from data is escaped.

    Args:
        report: the values of report.json.
        examples: test queries to show.
        ancestors: all artifacts behind the report.
    """
    dataset = str(report["dataset"])
    queries, documents = f"{report['num_queries']:,}", f"{report['num_documents']:,}"
    header = (
        f'<p class="facts"><b>{escape(dataset)}</b> · <b>{queries}</b> test queries against all '
        f"<b>{documents}</b> documents</p>"
    )
    for note in notes(report):
        header += f'\n<p class="note">{note}</p>'
    size = f"A vector takes {report['index']['bytes_per_vector']:g} bytes."
    last = measures_of(report["methods"])[-1]
    about_examples = (
        f"Where a method differs most from {report['significance']['baseline']} by {last}: of each "
        "method the greatest win, the greatest loss, and so on; where none differs, drawn at random. ✓ marks "
        "a document judged relevant, beside a method stands the rank of its first."
    )
    shown = [_example_html(example, measure=last) for example in examples] or ["<p>None were asked for.</p>"]
    about_lineage = "Every artifact these numbers rest on. A digest covers settings, inputs and bytes."
    sections = [
        reports.section(
            "Methods",
            _methods_table(report),
            f"<figure>{recall_bars(report['methods'])}</figure>",
            f'<p class="small">{READING}</p>',
        ),
        *_tables(report),
        reports.section(
            "Index",
            f"<figure>{index_bars(report['index'])}</figure>" if "sample" not in report else "",
            text=size
            if "sample" in report
            else f"Against exact search with the same query embeddings. {size}",
        ),
        reports.section("Example queries", *shown, text=about_examples),
        reports.section(
            "Stages",
            f"<figure>{stage_bars(report['seconds'])}</figure>" if report["seconds"] else "",
            reports.html(*stage_table(report)),
        ),
        reports.section("Lineage", _lineage_table(ancestors), text=about_lineage),
        reports.section("Environment", reports.definitions(report["environment"])),
    ]
    return reports.page("Retrieval report", subject=dataset, header=header, sections=sections)


def _methods_table(report: Report) -> str:
    methods: dict[str, dict[str, float]] = report["methods"]
    names = measures_of(methods)
    best = {name: max(row[name] for row in methods.values()) for name in names}
    documents = documents_column(report)
    rows = []
    for method, row in methods.items():
        cells = {name: f"{row[name]:.3f}{significance_mark(report, method, name)}" for name in names}
        marked = (
            Markup(f'<span class="good">{cell}</span>') if row[name] == best[name] else cell
            for name, cell in cells.items()
        )
        rows.append([method, *([documents[method]] if documents else []), *marked])
    return reports.html(["method", *(["documents"] if documents else []), *names], rows)


def _tables(report: Report) -> list[str]:
    """The sections that Markdown has too; the distance from the teacher also as a histogram."""
    sections = []
    for part in report_sections(report):
        plot = ""
        if part.title == DISTANCE and (pairs := report["distance"]["discrepancy"]):
            plot = f"<figure>{discrepancy_histogram(pairs)}</figure>"
        sections.append(reports.section(part.title, reports.html(part.head, part.rows), plot, text=part.text))
    return sections


def _example_html(example: ExampleQuery, *, measure: str) -> str:
    columns = []
    for method, documents in example.results.items():
        items = "".join(
            f'<li class="{"relevant" if document.relevant else "other"}">'
            + escape(document.title or document.doc_id)
            + ('<span class="mark" title="judged relevant"> ✓</span>' if document.relevant else "")
            + f"<code>{escape(document.doc_id)}</code></li>"
            for document in documents
        )
        rank = ""
        if method in example.first_relevant:
            rank = f" · first relevant: {example.first_relevant[method] or 'not found'}"
        columns.append(f"<div><h4>{escape(method + rank)}</h4><ol>{items}</ol></div>")
    reason = ""
    if example.method:
        difference = escape(f"{example.method} {example.difference:+.3f} {measure}")
        reason = f' <span class="small">{difference}</span>'
    return (
        f"<details><summary>{escape(example.query)}{reason}</summary>"
        f'<div class="columns">{"".join(columns)}</div></details>'
    )


def _lineage_table(ancestors: Iterable[Ancestor]) -> str:
    rows = []
    for ancestor in ancestors:
        counts = ancestor.artifact.counts if ancestor.artifact else {}
        known = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())
        digest = escape(ancestor.digest)
        rows.append(
            [
                ancestor.stage,
                ancestor.kind,
                Markup(f'<code title="{digest}">{digest[:12]}</code>'),
                known if ancestor.artifact else "no longer there",
                Markup(f"<code>{escape(ancestor.uri)}</code>"),
            ]
        )
    return reports.html(["stage", "artifact", "digest", "counts", "where"], rows, text=5)
