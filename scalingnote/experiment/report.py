"""The report of an experiment: arms compared with tests and intervals, as JSON, Markdown and an HTML page.

{"experiment", "control", "alpha", "first", "last", "days", "requests": {"read", "used", "left_out", ...},
 "measures": [{"name", "text", "better"}],
 "arms": {ARM: {"share", "units", "measures": {MEASURE: {"mean", "units", "count"}},
                "latency_ms": {STAGE: [p50, p90, p99]}}},
 "comparisons": {ARM: {MEASURE: {"difference", "low", "high", "p", "p_holm", "relative",
                                 "bootstrap_low", "bootstrap_high"}}},
 "sample_ratio": {"p", "mismatch"}, "judge": {...}, "warnings": [...], "environment": {...}}

An undefined number is null. A measure of an arm is a ratio, the sum over its requests by their count.
Requests of one user are correlated, so units (users) are the independent observations: the ratio's variance
is that of ``(sum - ratio * count) / mean count`` over units (delta method; Deng et al., 2018, "Applying the
delta method in metric analytics"). With one request per unit this is the Welch test.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any
from warnings import catch_warnings

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from scalingnote import reports
from scalingnote.experiment.config import ExperimentConfig
from scalingnote.experiment.outcomes import Measure
from scalingnote.reports import Markup

_ROUNDING = 1e-9  # share of a mean below which differences are rounding errors
_MAX_DRAWS_IN_MEMORY = 4_000_000  # numbers: 32 MB
PERCENTILES = (50, 90, 99)
CLASSES = {"✓": "good", "✗": "bad", "·": "quiet"}
READING = (
    "Differences are to the control, over units (users; requests without one), by Welch's t-test. "
    "p is Holm's over the arms of a line, not over the lines: decide by one measure, named before. "
    "✓ better, ✗ worse, · not significant."
)
Report = dict[str, Any]


@dataclass(frozen=True)
class UnitSums:
    """A measure in one arm: each unit's sum over its requests, and their count (> 0)."""

    sum: Float[ndarray, " units"]
    count: Float[ndarray, " units"]

    @property
    def mean(self) -> float:
        """Mean over requests; NaN without requests."""
        requests = float(self.count.sum())
        return float(self.sum.sum()) / requests if requests else math.nan

    @property
    def linear(self) -> Float[ndarray, " units"]:
        """A value per unit, whose mean is :attr:`mean` and whose variance is clustered (delta method)."""
        linear: ndarray = self.mean + (self.sum - self.mean * self.count) / self.count.mean()
        return linear


@dataclass(frozen=True)
class ArmDifference:
    """Treatment minus control; NaN with too few units."""

    difference: float
    low: float  # of Welch's interval
    high: float
    p: float  # two-sided
    relative: float  # to the control's mean
    bootstrap_low: float
    bootstrap_high: float


def arm_difference(
    control: UnitSums, treatment: UnitSums, *, alpha: float, replicates: int, rng: np.random.Generator
) -> ArmDifference:
    """Compare two arms in one measure by Welch's t-test and a percentile bootstrap over units."""
    difference, low, high, p = welch(control, treatment, alpha=alpha)
    differences = resampled(treatment, replicates, rng=rng) - resampled(control, replicates, rng=rng)
    defined = differences[np.isfinite(differences)]
    ends = np.quantile(defined, [alpha / 2, 1 - alpha / 2]).tolist() if len(defined) else [math.nan] * 2
    relative = difference / control.mean if control.mean else math.nan
    return ArmDifference(difference, low, high, p, relative, *ends)


def welch(control: UnitSums, treatment: UnitSums, *, alpha: float) -> tuple[float, float, float, float]:
    """Difference of means, the bounds of its interval, and the p-value (Welch, 1947).

    If all units within each arm are equal, the standard error is unknown. Then p is that of a permutation
    test, and a difference has no interval.
    """
    difference, (n, m) = treatment.mean - control.mean, (len(control.sum), len(treatment.sum))
    if min(n, m) < 2:
        return difference, math.nan, math.nan, math.nan
    errors = [arm.linear.std(ddof=1) / math.sqrt(len(arm.sum)) for arm in (control, treatment)]
    rounding = _ROUNDING * max(abs(control.mean), abs(treatment.mean))
    if math.hypot(*errors) <= rounding:  # nothing varies, as with a measure that is 0 everywhere
        if abs(difference) <= rounding:
            return difference, difference, difference, 1.0
        assignments = math.lgamma(n + m + 1) - math.lgamma(n + 1) - math.lgamma(m + 1)
        return difference, math.nan, math.nan, min(1.0, 2 * math.exp(-assignments))
    with catch_warnings(action="ignore"):  # one arm alone may be constant up to rounding
        test = stats.ttest_ind(treatment.linear, control.linear, equal_var=False)
    low, high = test.confidence_interval(1 - alpha)
    return difference, float(low), float(high), float(test.pvalue)


def resampled(arm: UnitSums, replicates: int, *, rng: np.random.Generator) -> Float[ndarray, " replicates"]:
    """Bootstrap means of an arm: as many units are drawn with replacement.

    Units with equal sums and counts are drawn together. The distribution is the same, and much faster to
    sample, because counts of binary events have few distinct pairs.
    """
    if not len(arm.sum):
        return np.full(replicates, math.nan)
    pairs, times = np.unique(np.stack([arm.sum, arm.count], axis=1), axis=0, return_counts=True)
    sums = resampled_sums(pairs, times, replicates=replicates, rng=rng)
    means: Float[ndarray, " replicates"] = sums[:, 0] / sums[:, 1]
    return means


def resampled_sums(
    rows: Float[ndarray, "rows columns"],
    times: Sequence[int] | ndarray | None = None,
    *,
    replicates: int,
    rng: np.random.Generator,
) -> Float[ndarray, "replicates columns"]:
    """Sums over as many rows as there are, drawn with replacement; row i is there `times[i]` times (once)."""
    counts = np.ones(len(rows), np.int64) if times is None else np.asarray(times)
    drawn = int(counts.sum())
    sums = np.empty((replicates, rows.shape[1]))
    at_once = max(1, _MAX_DRAWS_IN_MEMORY // len(rows))
    for start in range(0, replicates, at_once):
        size = min(at_once, replicates - start)
        sums[start : start + size] = rng.multinomial(drawn, counts / drawn, size=size) @ rows
    return sums


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p-values with Holm's correction for several tests (Holm, 1979); NaN is no test and stays."""
    tests = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    adjusted, highest = dict(p), 0.0
    for rank, (value, name) in enumerate(tests):
        highest = max(highest, min((len(tests) - rank) * value, 1.0))
        adjusted[name] = highest
    return adjusted


def sample_ratio(units: Sequence[int], shares: Sequence[float]) -> float:
    """p-value of the chi-squared test that groups have sizes by these shares; 1 without units."""
    total = sum(units)
    if not total:
        return 1.0
    expected = np.array(shares) / math.fsum(shares) * total
    return float(stats.chisquare(units, expected).pvalue)


def compare_arms(config: ExperimentConfig, units: pa.Table, measures: Sequence[Measure]) -> Report:
    """The report's arms, comparisons and sample ratio, from the sums per unit of :meth:`Outcomes.units`."""
    first, *rest = (arm for arm in config.split.arms if arm.share > 0)
    arms = [first, *sorted(rest, key=lambda arm: arm.name)]  # the order of a JSON file with sorted keys
    control, *others = (arm.name for arm in arms)
    counts = [int(pc.sum(pc.equal(units["arm"], arm.name)).as_py() or 0) for arm in arms]
    sums = {(arm.name, m.name): unit_sums(units, arm.name, m.name) for arm in arms for m in measures}
    comparisons: dict[str, dict[str, dict[str, float]]] = {name: {} for name in others}
    for measure in measures:
        differences = {
            name: arm_difference(
                sums[control, measure.name],
                sums[name, measure.name],
                alpha=config.alpha,
                replicates=config.bootstrap,
                # A generator per measure and arm: adding one to a report does not change the others.
                rng=np.random.default_rng([config.seed, *f"{name} {measure.name}".encode()]),
            )
            for name in others
        }
        adjusted = holm({name: difference.p for name, difference in differences.items()})
        for name, difference in differences.items():
            comparisons[name][measure.name] = asdict(difference) | {"p_holm": adjusted[name]}
    p = sample_ratio(counts, [arm.share for arm in arms])
    report = {
        "experiment": config.split.name,
        "control": control,
        "alpha": config.alpha,
        "measures": [measure._asdict() for measure in measures],
        "arms": {
            arm.name: {
                "share": arm.share,
                "units": count,
                "measures": {
                    m.name: {
                        "mean": (arm_sums := sums[arm.name, m.name]).mean,
                        "units": len(arm_sums.sum),
                        "count": arm_sums.count.sum(),
                    }
                    for m in measures
                },
            }
            for arm, count in zip(arms, counts, strict=True)
        },
        "comparisons": comparisons,
        "sample_ratio": {"p": p, "mismatch": p < config.mismatch_alpha},
    }
    values: Report = _json_values(report)
    return values


def unit_sums(units: pa.Table, arm: str, measure: str) -> UnitSums:
    """Sums and counts of one arm's units in one measure."""
    of_arm = units.filter(pc.equal(units["arm"], arm))
    total, count = (of_arm[f"{measure}.{name}"].to_numpy() for name in ("sum", "count"))
    return UnitSums(total[count > 0], count[count > 0])


def verdict(difference: Mapping[str, float | None], *, better: str, alpha: float) -> str:
    """✓ significantly better, ✗ significantly worse, · neither."""
    p, value = difference["p_holm"], difference["difference"]
    if p is None or value is None or p >= alpha or not value:
        return "·"
    return "✓" if (value < 0) == (better == "lower") else "✗"


def warnings(report: Report) -> list[str]:
    """Reasons to distrust the report, the worst first."""
    messages = []
    arms, requests = report["arms"], report["requests"]
    if report["sample_ratio"]["mismatch"]:
        sizes = ", ".join(f"{name} {arm['units']:,} (share {arm['share']:g})" for name, arm in arms.items())
        messages.append(
            f"SAMPLE RATIO MISMATCH (p = {report['sample_ratio']['p']:.2g}): the groups are not of the sizes "
            f"that the split gives: {sizes} units. Something loses or adds units of one arm, so that no "
            "comparison can be believed: find it first."
        )
    if empty := [name for name, arm in arms.items() if arm["units"] < 2]:
        messages.append(f"Arm {empty[0]} has {arms[empty[0]]['units']} units: nothing can be said of it.")
    used = requests["used"]
    other_arms = requests["left_out"].get("not by this split", 0)
    if other_arms > 0.01 * (used + other_arms):
        messages.append(
            f"{other_arms:,} requests were answered by another arm than the split gives their unit: shares "
            "changed in between. They are left out: set `start` to when they did."
        )
    if requests["rejected"] > 0.01 * requests["read"]:
        messages.append(
            f"{requests['rejected']:,} of {requests['read']:,} lines of the log could not be used."
        )
    if report["days"] < 7:
        messages.append(
            f"The log covers {report['days']:.1f} days. Users differ over a week: let an experiment run for "
            "whole weeks, and decide at its end only."
        )
    judge = report["judge"]
    if judge and judge["pairs"] and judge["unknown"] > 0.05 * judge["pairs"]:
        messages.append(
            f"{judge['unknown']:,} of {judge['pairs']:,} judged pairs have no score and count nowhere."
        )
    return messages


def _json_values(value: Any) -> Any:
    """Values for JSON: Python numbers, and null for those that are not finite."""
    if isinstance(value, dict):
        return {key: _json_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- Markdown and HTML -------------------------------------------------------------------------------------


def markdown(report: Report) -> str:
    """report.md: warnings, comparisons, latencies, and what the measures mean."""
    parts = [f"# Experiment {report['experiment']}", summary(report)]
    parts += [f"> **{text}**" for text in report["warnings"]]
    parts += [comparison_table(report), READING, reports.markdown(*_latencies(report), text=2)]
    parts += ["\n".join(f"- {m['name']}: {m['text']}" for m in report["measures"]), judge_line(report)]
    return "\n\n".join([*parts, reports.environment_line(report["environment"])]) + "\n"


def summary(report: Report) -> str:
    """One line: number of requests, days, units per arm and the sample ratio."""
    names, arms = [report["control"], *report["comparisons"]], report["arms"]
    groups = ", ".join(f"{name} {arms[name]['units']:,} ({arms[name]['share']:.0%})" for name in names)
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
