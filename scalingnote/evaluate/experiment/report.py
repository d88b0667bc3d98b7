"""The report of an experiment: the comparison of its arms, and what report.md and report.html show of it.

{"experiment", "control", "alpha", "first", "last", "days", "requests": {"read", "used", "left_out", ...},
 "measures": [{"name", "text", "better"}],
 "arms": {ARM: {"share", "units", "measures": {MEASURE: {"mean", "units", "count"}},
                "latency_ms": {STAGE: [p50, p90, p99]}}},
 "comparisons": {ARM: {MEASURE: {"difference", "low", "high", "p", "p_holm", "relative"}}},
 "sample_ratio": {"p", "mismatch"}, "judge": {...}, "warnings": [...], "environment": {...}}

An undefined number is null.

A measure of an arm is a ratio, the sum over its requests by their count. Requests of one user are correlated,
so units (users) are the independent observations: the ratio's variance is that of
``(sum - ratio * count) / mean count`` over units (delta method; Deng et al., 2018, "Applying the delta method
in metric analytics"). With one request per unit this is the Welch test.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from warnings import catch_warnings

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from scalingnote.core.reports import ReportPage, ReportSection, ReportTable, environment_line
from scalingnote.evaluate.experiment.config import ExperimentConfig
from scalingnote.evaluate.experiment.outcomes import Measure
from scalingnote.evaluate.measures import SIGNIFICANCE_LEVEL, holm

MISMATCH_LEVEL = 0.001  # p below which the groups' sizes are a sample ratio mismatch
ROUNDING = 1e-9  # share of a value below which a difference is a rounding error
PERCENTILES = (50, 90, 99)
ARMS_NOTE = (
    "Differences are to the control, over units (users; requests without one), by Welch's t-test. "
    "p is Holm's over the arms of a line, not over the lines: decide by one measure, named before. "
    "✓ better, ✗ worse, · not significant."
)
ExperimentReport = dict[str, Any]


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
    """Treatment minus control; NaN with too few units, or if nothing varies."""

    difference: float
    low: float  # of Welch's interval
    high: float
    p: float  # two-sided
    relative: float  # to the control's mean


def arm_difference(control: UnitSums, treatment: UnitSums) -> ArmDifference:
    """Compare two arms in one measure by Welch's t-test (Welch, 1947)."""
    difference = treatment.mean - control.mean
    relative = difference / control.mean if control.mean else math.nan
    if min(len(control.sum), len(treatment.sum)) < 2:
        return ArmDifference(difference, math.nan, math.nan, math.nan, relative)
    arms = (treatment.linear, control.linear)
    if all(np.ptp(arm) <= ROUNDING * np.abs(arm).max() for arm in arms):
        return ArmDifference(difference, math.nan, math.nan, math.nan, relative)
    with catch_warnings(action="ignore"):  # one of the arms may be constant
        test = stats.ttest_ind(*arms, equal_var=False)
    low, high = test.confidence_interval(1 - SIGNIFICANCE_LEVEL)
    return ArmDifference(difference, float(low), float(high), float(test.pvalue), relative)


def sample_ratio(units: Sequence[int], shares: Sequence[float]) -> float:
    """p-value of the chi-squared test that groups have sizes by these shares; 1 without units."""
    total = sum(units)
    if not total:
        return 1.0
    expected = np.array(shares) / math.fsum(shares) * total
    return float(stats.chisquare(units, expected).pvalue)


def compare_arms(config: ExperimentConfig, units: pa.Table, measures: Sequence[Measure]) -> ExperimentReport:
    """The report's arms, comparisons and sample ratio, from the sums per unit of :meth:`Outcomes.units`."""
    first, *rest = (arm for arm in config.split.arms if arm.share > 0)
    arms = [first, *sorted(rest, key=lambda arm: arm.name)]  # the order of a JSON file with sorted keys
    control, *others = (arm.name for arm in arms)
    sums = {arm.name: {m.name: unit_sums(units, arm.name, m.name) for m in measures} for arm in arms}
    comparisons: dict[str, dict[str, dict[str, float]]] = {name: {} for name in others}
    for measure in (measure.name for measure in measures):
        found = {name: arm_difference(sums[control][measure], sums[name][measure]) for name in others}
        adjusted = holm({name: difference.p for name, difference in found.items()})
        for name, difference in found.items():
            comparisons[name][measure] = asdict(difference) | {"p_holm": adjusted[name]}
    counts = [int(pc.sum(pc.equal(units["arm"], arm.name)).as_py() or 0) for arm in arms]
    p = sample_ratio(counts, [arm.share for arm in arms])
    report: ExperimentReport = _json_values(
        {
            "experiment": config.split.name,
            "control": control,
            "alpha": SIGNIFICANCE_LEVEL,
            "measures": [measure._asdict() for measure in measures],
            "arms": {
                arm.name: {
                    "share": arm.share,
                    "units": count,
                    "measures": {
                        name: {"mean": one.mean, "units": len(one.sum), "count": one.count.sum()}
                        for name, one in sums[arm.name].items()
                    },
                }
                for arm, count in zip(arms, counts, strict=True)
            },
            "comparisons": comparisons,
            "sample_ratio": {"p": p, "mismatch": p < MISMATCH_LEVEL},
        }
    )
    return report


def unit_sums(units: pa.Table, arm: str, measure: str) -> UnitSums:
    """Sums and counts of one arm's units in one measure."""
    of_arm = units.filter(pc.equal(units["arm"], arm))
    total, count = (of_arm[f"{measure}.{name}"].to_numpy() for name in ("sum", "count"))
    return UnitSums(total[count > 0], count[count > 0])


def _json_values(value: Any) -> Any:
    """Values for JSON: Python numbers, and null for those that are not finite."""
    if isinstance(value, dict):
        return {key: _json_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_values(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- what report.md and report.html show --------------------------------------------------------------------


def verdict(difference: Mapping[str, float | None], *, better: str, alpha: float) -> str:
    """✓ significantly better, ✗ significantly worse, · neither."""
    p, value = difference["p_holm"], difference["difference"]
    if p is None or value is None or p >= alpha or not value:
        return "·"
    return "✓" if (value < 0) == (better == "lower") else "✗"


def warnings(report: ExperimentReport) -> list[str]:
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


def report_page(report: ExperimentReport) -> ReportPage:
    """What report.md and report.html show, in their order."""
    from scalingnote.evaluate import pictures  # late: matplotlib takes seconds, and few callers draw

    drawn = []
    for arm, measures in report["comparisons"].items():
        rows = {name: (d["low"], d["difference"], d["high"]) for name, d in measures.items()}
        known = {name: row for name, row in rows.items() if None not in row and any(row)}
        if known:
            draw = partial(pictures.draw_intervals, intervals=known)
            name = f"{arm} against {report['control']}: intervals around zero, every line on its own scale"
            drawn.append(pictures.svg(name, draw, height=0.4 + 0.25 * len(known)))
    left_out = [[reason, f"{count:,}"] for reason, count in report["requests"]["left_out"].items()]
    meanings = ReportTable(
        ["measure", "meaning"], [[measure["name"], measure["text"]] for measure in report["measures"]], text=2
    )
    sections = [
        ReportSection("Arms", ARMS_NOTE, [comparison_table(report)], drawn),
        ReportSection("Latency", tables=[_latencies(report)]),
        ReportSection("Measures", judge_line(report), [meanings]),
        ReportSection(
            "Left out",
            "Requests in the log that say nothing about the arms.",
            [ReportTable(["reason", "requests"], left_out)],
        ),
        ReportSection("Environment", environment_line(report["environment"])),
    ]
    title = f"Experiment {report['experiment']}"
    return ReportPage(title, sections, summary=summary(report), warnings=report["warnings"])


def summary(report: ExperimentReport) -> str:
    """One line: number of requests, days, units per arm and the sample ratio."""
    names, arms = [report["control"], *report["comparisons"]], report["arms"]
    groups = ", ".join(f"{name} {arms[name]['units']:,} ({arms[name]['share']:.0%})" for name in names)
    left = sum(report["requests"]["left_out"].values())
    return (
        f"{report['requests']['used']:,} requests in {report['days']:.1f} days, {left:,} left out; "
        f"units: {groups}; sample ratio p = {p_value(report['sample_ratio']['p'])}"
    )


def judge_line(report: ExperimentReport) -> str:
    """One line: the judge, and how many pairs it scored."""
    judge = report["judge"]
    if not judge:
        return "Results were not judged."
    return (
        f"Judge: {judge['kind']}, irrelevant below {judge['irrelevant_below']:g}; {judge['pairs']:,} pairs "
        f"of {judge['requests']:,} sampled requests, {judge['unknown']:,} without a score."
    )


def comparison_table(report: ExperimentReport) -> ReportTable:
    """A line per measure and per arm that is compared with the control."""
    level, control = f"{1 - report['alpha']:.0%}", report["control"]
    head = ["measure", "arm", control, "arm's", "difference", f"{level} interval", "relative"]
    rows = [
        [measure["name"], arm, *_cells(report, arm, measure)]
        for measure in report["measures"]
        for arm in report["comparisons"]
    ]
    return ReportTable([*head, "p", ""], rows, text=2)


def _cells(report: ExperimentReport, arm: str, measure: Mapping[str, str]) -> list[str]:
    """One measure of an arm against the control, as text."""
    name = measure["name"]
    d = report["comparisons"][arm][name]
    return [
        *(number(report["arms"][one]["measures"][name]["mean"]) for one in (report["control"], arm)),
        number(d["difference"], sign=True),
        f"{number(d['low'], sign=True)} … {number(d['high'], sign=True)}",
        "–" if d["relative"] is None else f"{d['relative']:+.2%}",
        p_value(d["p_holm"]),
        verdict(d, better=measure["better"], alpha=report["alpha"]),
    ]


def _latencies(report: ExperimentReport) -> ReportTable:
    """Percentiles in ms, per arm and stage."""
    rows = [
        [name, stage, *(f"{value:,.1f}" for value in values)]
        for name, arm in report["arms"].items()
        for stage, values in arm["latency_ms"].items()
    ]
    return ReportTable(["arm", "ms", *(f"p{at}" for at in PERCENTILES)], rows, text=2)


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
