"""report.html: an experiment's report on one page that needs nothing else."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from string import Template

from scalingnote import tables
from scalingnote.experiment.comparison import Report, verdict
from scalingnote.experiment.report import PERCENTILES, READING, judged, number, p_value, summary

CLASSES = {"✓": "good", "✗": "bad", "·": "quiet"}


def page(report: Report) -> str:
    """The whole page. Everything that comes from data is escaped."""
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    environment = report["environment"].items()
    left_out = report["requests"]["left_out"].items()
    return template.substitute(
        experiment=escape(report["experiment"]),
        summary=escape(summary(report)),
        warnings="".join(
            f'<p class="warning" role="alert">{escape(text)}</p>' for text in report["warnings"]
        ),
        arms="".join(_comparison(report, arm) for arm in report["comparisons"]),
        reading=READING,
        latency=_latency(report),
        measures="".join(
            f"<dt>{escape(m['name'])}</dt><dd>{escape(m['text'])}</dd>" for m in report["measures"]
        ),
        judged=escape(judged(report)),
        left_out="".join(f"<dt>{escape(reason)}</dt><dd>{count:,}</dd>" for reason, count in left_out),
        environment="".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in environment),
    )


def _comparison(report: Report, arm: str) -> str:
    control = report["control"]
    rows = []
    for measure in report["measures"]:
        name = measure["name"]
        d = report["comparisons"][arm][name]
        means = (report["arms"][one]["measures"][name]["mean"] for one in (control, arm))
        mark = verdict(d, better=measure["better"], alpha=report["alpha"])
        cells = [
            *map(number, means),
            number(d["difference"], sign=True),
            "–" if d["relative"] is None else f"{d['relative']:+.2%}",
            f"{number(d['low'], sign=True)} … {number(d['high'], sign=True)}",
            f"{number(d['bootstrap_low'], sign=True)} … {number(d['bootstrap_high'], sign=True)}",
            _interval(d, colour=CLASSES[mark]),
            p_value(d["p_holm"]),
            f'<span class="{CLASSES[mark]}">{mark}</span>',
        ]
        first = f'<th scope="row" title="{escape(measure["text"])}">{escape(name)}</th>'
        rows.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    level = f"{1 - report['alpha']:.0%}"
    head = ["measure", control, arm, "difference", "relative", f"{level} interval", "bootstrap", "", "p", ""]
    return f"<h2>{escape(arm)} against {escape(control)}</h2>{tables.html(head, rows)}"


def _interval(d: Mapping[str, float | None], *, colour: str) -> str:
    """A bar from low to high around a line at zero, at a scale of its own."""
    low, high, middle = d["low"], d["high"], d["difference"]
    if low is None or high is None or middle is None or not (reach := max(abs(low), abs(high))):
        return ""
    left, right, at = (60 + 56 * value / reach for value in (low, high, middle))
    return (
        f'<svg class="{colour}" width="120" height="14" role="img" aria-label="from {low:g} to {high:g}">'
        '<path d="M60 0V14" class="zero"/>'
        f'<path d="M{left:.1f} 7H{right:.1f}" class="bar"/><circle cx="{at:.1f}" cy="7" r="3.5"/></svg>'
    )


def _latency(report: Report) -> str:
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td class="text">{escape(stage)}</td>'
        + "".join(f"<td>{value:,.1f}</td>" for value in values)
        + "</tr>"
        for name, arm in report["arms"].items()
        for stage, values in arm["latency_ms"].items()
    ]
    return tables.html(["arm", "ms", *(f"p{at}" for at in PERCENTILES)], rows)
