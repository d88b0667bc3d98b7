"""The report of an experiment as Markdown and as an HTML page."""

from collections.abc import Mapping
from html import escape

from scalingnote import reports
from scalingnote.experiment.comparison import Report, verdict
from scalingnote.reports import Markup

PERCENTILES = (50, 90, 99)
CLASSES = {"✓": "good", "✗": "bad", "·": "quiet"}
READING = (
    "Differences are to the control, over units (users; requests without one), by Welch's t-test. "
    "p is Holm's over the arms of a line, not over the lines: decide by one measure, named before. "
    "✓ better, ✗ worse, · not significant."
)


def markdown(report: Report) -> str:
    """report.md: warnings, comparisons, latencies, and what the measures mean."""
    lines = [f"# Experiment {report['experiment']}", "", summary(report), ""]
    lines += [f"> **{text}**\n" for text in report["warnings"]]
    lines += [comparison_table(report), "", READING, ""]
    lines += [reports.markdown(*_latencies(report), text=2)]
    lines += ["", *(f"- {m['name']}: {m['text']}" for m in report["measures"]), "", judge_line(report), ""]
    lines += [", ".join(f"{name} {value}" for name, value in report["environment"].items()), ""]
    return "\n".join(lines)


def summary(report: Report) -> str:
    """One line: number of requests, days, units per arm and the sample ratio."""
    names = [report["control"], *report["comparisons"]]
    arms = [(name, report["arms"][name]) for name in names]
    groups = ", ".join(f"{name} {arm['units']:,} ({arm['share']:.0%})" for name, arm in arms)
    left = sum(report["requests"]["left_out"].values())
    return (
        f"{report['requests']['used']:,} requests in {report['days']:.1f} days, {left:,} left out; "
        f"units: {groups}; sample ratio p = {p_value(report['sample_ratio']['p'])}"
    )


def judge_line(report: Report) -> str:
    """One line: the judge, and how many pairs it scored."""
    judge = report["judge"]
    if not judge:
        return "Results were not judged."
    return (
        f"Judge: {judge['kind']}, irrelevant below {judge['irrelevant_below']:g}; {judge['pairs']:,} pairs "
        f"of {judge['requests']:,} sampled requests, {judge['unknown']:,} without a score."
    )


def comparison_table(report: Report) -> str:
    """A Markdown table with a line per measure and per arm that is compared with the control."""
    rows = [
        [measure["name"], arm, *_cells(report, arm, measure)]
        for measure in report["measures"]
        for arm in report["comparisons"]
    ]
    return reports.markdown(["measure", "arm", *_heads(report, "arm's")], rows, text=2)


def _heads(report: Report, arm: str) -> list[str]:
    """Names of the columns of :func:`_cells`."""
    level = f"{1 - report['alpha']:.0%}"
    return [report["control"], arm, "difference", f"{level} interval", "bootstrap", "relative", "p", ""]


def _cells(report: Report, arm: str, measure: Mapping[str, str]) -> list[str]:
    """One measure of an arm against the control, as text."""
    name = measure["name"]
    d = report["comparisons"][arm][name]
    return [
        *(number(report["arms"][one]["measures"][name]["mean"]) for one in (report["control"], arm)),
        number(d["difference"], sign=True),
        f"{number(d['low'], sign=True)} … {number(d['high'], sign=True)}",
        f"{number(d['bootstrap_low'], sign=True)} … {number(d['bootstrap_high'], sign=True)}",
        "–" if d["relative"] is None else f"{d['relative']:+.2%}",
        p_value(d["p_holm"]),
        verdict(d, better=measure["better"], alpha=report["alpha"]),
    ]


def _latencies(report: Report) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: percentiles in ms, per arm and stage."""
    rows = [
        [name, stage, *(f"{value:,.1f}" for value in values)]
        for name, arm in report["arms"].items()
        for stage, values in arm["latency_ms"].items()
    ]
    return ["arm", "ms", *(f"p{at}" for at in PERCENTILES)], rows


def number(value: float | None, *, sign: bool = False) -> str:
    """A number with four decimals, one from 100 on; an en dash for null."""
    if value is None:
        return "–"
    return f"{value:{'+' if sign else ''}.{1 if abs(value) >= 100 else 4}f}"


def p_value(value: float | None) -> str:
    """A p-value with four decimals; an en dash for null."""
    if value is None:
        return "–"
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def page(report: Report) -> str:
    """The HTML page of a report. Everything that comes from data is escaped."""
    warnings = [f'<p class="warning" role="alert">{escape(text)}</p>' for text in report["warnings"]]
    measures = {measure["name"]: measure["text"] for measure in report["measures"]}
    left_out = {reason: f"{count:,}" for reason, count in report["requests"]["left_out"].items()}
    sections = [
        *(_comparison_section(report, arm) for arm in report["comparisons"]),
        f'<p class="small">{READING}</p>',
        reports.section("Latency", reports.html(*_latencies(report), text=2)),
        reports.section("Measures", reports.definitions(measures), text=judge_line(report)),
        reports.section(
            "Left out",
            reports.definitions(left_out),
            text="Requests in the log that say nothing about the arms.",
        ),
        reports.section("Environment", reports.definitions(report["environment"])),
    ]
    header = "\n".join([f'<p class="facts">{escape(summary(report))}</p>', *warnings])
    title = f"Experiment {report['experiment']}"
    return reports.page(title, subject=report["control"], header=header, sections=sections)


def _comparison_section(report: Report, arm: str) -> str:
    rows = []
    for measure in report["measures"]:
        name, difference = measure["name"], report["comparisons"][arm][measure["name"]]
        *cells, p, mark = _cells(report, arm, measure)
        colour = CLASSES[mark]
        heading = Markup(f'<span title="{escape(measure["text"])}">{escape(name)}</span>')
        verdict_cell = Markup(f'<span class="{colour}">{mark}</span>')
        rows.append([heading, *cells, Markup(_interval(difference, colour=colour)), p, verdict_cell])
    *heads, p, mark = _heads(report, arm)
    table = reports.html(["measure", *heads, "", p, mark], rows)
    return reports.section(f"{arm} against {report['control']}", table)


def _interval(difference: Mapping[str, float | None], *, colour: str) -> str:
    """An SVG bar from low to high around a line at zero; every row has its own scale."""
    low, high, middle = difference["low"], difference["high"], difference["difference"]
    if low is None or high is None or middle is None or not (reach := max(abs(low), abs(high))):
        return ""
    left, right, at = (60 + 56 * value / reach for value in (low, high, middle))
    return (
        f'<svg class="{colour}" width="120" height="14" role="img" aria-label="from {low:g} to {high:g}">'
        '<path d="M60 0V14" class="zero"/>'
        f'<path d="M{left:.1f} 7H{right:.1f}" class="bar"/><circle cx="{at:.1f}" cy="7" r="3.5"/></svg>'
    )
