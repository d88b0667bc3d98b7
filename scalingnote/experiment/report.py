"""A comparison as text: what :mod:`scalingnote.experiment.comparison` found in, lines and tables out."""

from scalingnote import tables
from scalingnote.experiment.comparison import Report, verdict

PERCENTILES = (50, 90, 99)
READING = (
    "Differences are to the control, over units (users; requests without one), by Welch's t-test. "
    "p is Holm's over the arms of a line, not over the lines: decide by one measure, named before. "
    "✓ better, ✗ worse, · not significant."
)


def markdown(report: Report) -> str:
    """report.md: warnings, the arms, each measure, latencies, and how to read them."""
    lines = [f"# Experiment {report['experiment']}", "", summary(report), ""]
    lines += [f"> **{text}**\n" for text in report["warnings"]]
    lines += [table(report), "", READING, ""]
    rows = [
        [name, stage, *(f"{value:,.1f}" for value in values)]
        for name, arm in report["arms"].items()
        for stage, values in arm["latency_ms"].items()
    ]
    lines += [tables.markdown(["arm", "ms", *(f"p{p}" for p in PERCENTILES)], rows, text=2)]
    lines += ["", *(f"- {m['name']}: {m['text']}" for m in report["measures"]), "", judged(report), ""]
    lines += [", ".join(f"{name} {value}" for name, value in report["environment"].items()), ""]
    return "\n".join(lines)


def summary(report: Report) -> str:
    """One line: what was compared, how long, over how many."""
    names = [report["control"], *report["comparisons"]]
    arms = [(name, report["arms"][name]) for name in names]
    groups = ", ".join(f"{name} {arm['units']:,} ({arm['share']:.0%})" for name, arm in arms)
    left = sum(report["requests"]["left_out"].values())
    return (
        f"{report['requests']['used']:,} requests in {report['days']:.1f} days, {left:,} left out; "
        f"units: {groups}; sample ratio p = {p_value(report['sample_ratio']['p'])}"
    )


def judged(report: Report) -> str:
    """Who judged the results, and how many."""
    judge = report["judge"]
    if not judge:
        return "Results were not judged."
    return (
        f"Judge: {judge['kind']}, irrelevant below {judge['irrelevant_below']:g}; {judge['pairs']:,} pairs "
        f"of {judge['requests']:,} sampled requests, {judge['unknown']:,} without a score."
    )


def table(report: Report) -> str:
    """Markdown: a line per measure and arm that is compared with the control."""
    rows = []
    for measure in report["measures"]:
        name = measure["name"]
        base = report["arms"][report["control"]]["measures"][name]["mean"]
        for arm, comparison in report["comparisons"].items():
            d = comparison[name]
            rows.append(
                [
                    name,
                    arm,
                    number(base),
                    number(report["arms"][arm]["measures"][name]["mean"]),
                    number(d["difference"], sign=True),
                    f"{number(d['low'], sign=True)} … {number(d['high'], sign=True)}",
                    f"{number(d['bootstrap_low'], sign=True)} … {number(d['bootstrap_high'], sign=True)}",
                    "–" if d["relative"] is None else f"{d['relative']:+.2%}",
                    p_value(d["p_holm"]),
                    verdict(d, better=measure["better"], alpha=report["alpha"]),
                ]
            )
    level = f"{1 - report['alpha']:.0%}"
    head = ["measure", "arm", report["control"], "arm's", "difference", f"{level} interval", "bootstrap"]
    return tables.markdown([*head, "relative", "p", ""], rows, text=2)


def number(value: float | None, *, sign: bool = False) -> str:
    """Four digits that matter less than the order of magnitude; an en dash for what cannot be told."""
    if value is None:
        return "–"
    return f"{value:{'+' if sign else ''}.{1 if abs(value) >= 100 else 4}f}"


def p_value(value: float | None) -> str:
    """Four digits, which is more than a decision needs."""
    if value is None:
        return "–"
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"
