"""report.html: a report, its plots, example queries and lineage on one page that needs nothing else."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from scalingnote import tables
from scalingnote.evaluate import plots
from scalingnote.evaluate.examples import Example
from scalingnote.evaluate.lineage import Ancestor
from scalingnote.evaluate.report import READING, SIMULATED, measures_of
from scalingnote.evaluate.sections import DISTANCE, Report, Section, mark, sections


def page(report: Report, *, examples: Sequence[Example], ancestors: Sequence[Ancestor]) -> str:
    """The whole page. Everything that comes from data is escaped."""
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    environment = report["environment"].items()
    return template.substitute(
        dataset=escape(str(report["dataset"])),
        documents=f"{report['num_documents']:,}",
        queries=f"{report['num_queries']:,}",
        simulated=f'<p class="note">{SIMULATED}</p>' if report["simulated_clicks"] else "",
        methods=_methods(report),
        recall_plot=plots.recall_bars(report["methods"]),
        reading=READING,
        sections="\n".join(_section(section, _plot(section, report)) for section in sections(report)),
        index_plot=plots.index_bars(report["index"]),
        bytes_per_vector=f"{report['index']['bytes_per_vector']:g}",
        seconds_plot=plots.stage_bars(report["seconds"]) if report["seconds"] else "",
        examples_text=escape(_examples_text(report)),
        examples="\n".join(_example(example, report) for example in examples)
        or "<p>None were asked for.</p>",
        lineage=_lineage(ancestors),
        environment="".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in environment),
    )


def _methods(report: Report) -> str:
    methods: dict[str, dict[str, float]] = report["methods"]
    names = measures_of(methods)
    best = {name: max(row[name] for row in methods.values()) for name in names}
    rows = []
    for method, row in methods.items():
        cells = (
            ('<td class="best">' if row[name] == best[name] else "<td>")
            + f"{row[name]:.3f}{mark(report, method, name)}</td>"
            for name in names
        )
        rows.append(f'<tr><th scope="row">{escape(method)}</th>{"".join(cells)}</tr>')
    return tables.html(["method", *names], rows)


def _plot(section: Section, report: Report) -> str:
    found = report["distance"]["discrepancy"] if section.title == DISTANCE else None
    return f"<figure>{plots.discrepancy(found)}</figure>" if found else ""


def _section(section: Section, plot: str) -> str:
    rows = [
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in section.rows
    ]
    return (
        f'<section class="part">\n<h2>{escape(section.title)}</h2>\n'
        f'<p class="small">{escape(section.text)}</p>\n'
        f"{tables.html(section.head, rows)}{plot}\n</section>"
    )


def _examples_text(report: Report) -> str:
    return (
        f"Where a method differs most from {report['significance']['baseline']} by {_last(report)}: of each "
        "method the greatest win, the greatest loss, and so on; where none differs, drawn at random. ✓ marks "
        "a document judged relevant, beside a method stands the rank of its first."
    )


def _last(report: Report) -> str:
    """The measure by which examples are chosen: nDCG is the last of all."""
    return measures_of(report["methods"])[-1]


def _example(example: Example, report: Report) -> str:
    columns = []
    for method, hits in example.results.items():
        items = "".join(
            f'<li class="{"relevant" if hit.relevant else "other"}">{escape(hit.title or hit.doc_id)}'
            + ('<span class="mark" title="judged relevant"> ✓</span>' if hit.relevant else "")
            + f"<code>{escape(hit.doc_id)}</code></li>"
            for hit in hits
        )
        rank = ""
        if method in example.first_relevant:
            rank = f" · first relevant: {example.first_relevant[method] or 'not found'}"
        columns.append(f"<div><h4>{escape(method + rank)}</h4><ol>{items}</ol></div>")
    body = f'<div class="columns">{"".join(columns)}</div>'
    why = ""
    if example.method:
        told = f"{example.method} {example.difference:+.3f} {_last(report)}"
        why = f' <span class="small">{escape(told)}</span>'
    return f"<details><summary>{escape(example.query)}{why}</summary>{body}</details>"


def _lineage(ancestors: Iterable[Ancestor]) -> str:
    rows = []
    for ancestor in ancestors:
        counts = ancestor.artifact.counts if ancestor.artifact else {}
        known = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())
        digest = f'<code title="{escape(ancestor.digest)}">{escape(ancestor.digest[:12])}</code>'
        rows.append(
            f'<tr><th scope="row">{escape(ancestor.stage)}</th><td class="text">{escape(ancestor.kind)}</td>'
            f'<td class="text">{digest}</td>'
            f'<td class="text">{escape(known) if ancestor.artifact else "no longer there"}</td>'
            f'<td class="text"><code>{escape(ancestor.uri)}</code></td></tr>'
        )
    return tables.html(["stage", "artifact", "digest", "counts", "where"], rows)
