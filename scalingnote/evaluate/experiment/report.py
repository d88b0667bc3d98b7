"""The report of an experiment: the comparison of its arms, and the contents of report.md and report.html.

{"experiment", "control", "alpha", "days", "requests": {"used", "left_out": {REASON: N}, "rejected"},
 "arms": {ARM: {"share", "units", "means": {MEASURE: mean}, "latency_ms": [p50, p90, p99]}},
 "comparisons": {ARM: {MEASURE: {"difference", "low", "high", "p", "p_holm"}}},
 "sample_ratio": {"p", "mismatch"}, "judge": {"path", "irrelevant_below", "pairs", "unknown"},
 "warnings": [...], "environment": {...}}

An undefined number is null; `judge` is null if results were not judged.

A measure of an arm is a ratio, the sum over its requests divided by their count. Requests of one user are
correlated, so units (users) are the independent observations: the variance of the ratio is that of
``(sum - ratio * count) / mean count`` over units (delta method; Deng et al., 2018, "Applying the delta method
in metric analytics"). With one request per unit this is the Welch test.
"""

from typing import Any
from warnings import catch_warnings

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from scalingnote.core import DAY_S
from scalingnote.core.reports import ReportPage, ReportSection, ReportTable, environment_line
from scalingnote.evaluate.experiment.config import ExperimentConfig
from scalingnote.evaluate.experiment.outcomes import MEASURES
from scalingnote.evaluate.measures import SIGNIFICANCE_LEVEL, holm

HIGHER_IS_BETTER = ("satisfaction", "click_through")  # for all other measures, lower is better
PERCENTILES = (50, 90, 99)  # of latencies
MISMATCH_LEVEL = 0.001  # a smaller p-value of the sizes of the groups is a sample ratio mismatch
ROUNDING = 1e-9  # a smaller relative difference is a rounding error
ARMS_NOTE = (
    "Differences from the control over units (users; single requests if there is no user), by Welch's "
    "t-test. p has Holm's correction over the arms of a line, but not over the lines: choose the measure "
    "that decides before the experiment. ✓ better, ✗ worse, · not significant."
)
ExperimentReport = dict[str, Any]


def unit_values(units: pa.Table, measure: str) -> Float[ndarray, " units"]:
    """Compute a value for each unit with the measure: the linearized ratio of the delta method.

    Their mean is the measure of the arm, and their variance considers the correlation of a unit's requests.
    `units` are the sums of one arm.
    """
    observed_units = units.filter(pc.greater(units[f"{measure}.count"], 0))
    total, count = (observed_units[f"{measure}.{kind}"].to_numpy() for kind in ("sum", "count"))
    if not len(total):
        return np.empty(0)
    mean = total.sum() / count.sum()
    linear: ndarray = mean + (total - mean * count) / count.mean()
    return linear


def arm_difference(
    control: Float[ndarray, " control"], treatment: Float[ndarray, " treatment"]
) -> dict[str, float | None]:
    """Compare two arms in one measure by Welch's t-test (Welch, 1947).

    Returns:
        `difference` (treatment minus control; None with an empty arm), `low` and `high` of its interval, and
        the two-sided `p` (None with fewer than two units in an arm, or if neither arm varies).
    """
    arms, result = (treatment, control), dict[str, float | None].fromkeys(("difference", "low", "high", "p"))
    units = min(map(len, arms))
    if units:
        result["difference"] = float(treatment.mean() - control.mean())
    if units < 2 or all(np.ptp(arm) <= ROUNDING * np.abs(arm).max() for arm in arms):
        return result
    with catch_warnings(action="ignore"):  # one of the arms may be constant
        test = stats.ttest_ind(*arms, equal_var=False)
    low, high = test.confidence_interval(1 - SIGNIFICANCE_LEVEL)
    return result | {"low": float(low), "high": float(high), "p": float(test.pvalue)}


def compare_arms(config: ExperimentConfig, requests: pa.Table, units: pa.Table) -> ExperimentReport:
    """Compute the report's arms, comparisons and sample ratio (a chi-squared test) from :class:`Outcomes`."""
    first, *rest = (arm for arm in config.split.arms if arm.share > 0)
    arms = [first, *sorted(rest, key=lambda arm: arm.name)]  # like the keys of a sorted JSON file
    measures = [name for name in MEASURES if f"{name}.sum" in units.column_names]
    facts, values = {}, {}
    for arm in arms:
        of_arm = units.filter(pc.equal(units["arm"], arm.name))
        arm_values = values[arm.name] = {name: unit_values(of_arm, name) for name in measures}
        times = requests["latency_ms"].filter(pc.equal(requests["arm"], arm.name)).drop_null().to_numpy()
        facts[arm.name] = {
            "share": arm.share,
            "units": len(of_arm),
            "means": {name: float(one.mean()) if len(one) else None for name, one in arm_values.items()},
            "latency_ms": [float(np.percentile(times, at)) if len(times) else None for at in PERCENTILES],
        }
    control, *others = values
    comparisons: dict[str, dict[str, dict[str, float | None]]] = {arm: {} for arm in others}
    for name in measures:
        differences = {arm: arm_difference(values[control][name], values[arm][name]) for arm in others}
        p_holm = holm({arm: p for arm in others if (p := differences[arm]["p"]) is not None})
        for arm_name, difference in differences.items():
            comparisons[arm_name][name] = difference | {"p_holm": p_holm.get(arm_name)}
    sizes, shares = (np.array([fact[key] for fact in facts.values()]) for key in ("units", "share"))
    p = float(stats.chisquare(sizes, shares / shares.sum() * sizes.sum()).pvalue)
    times_range = pc.min_max(requests["time"]).as_py()
    return {
        "experiment": config.split.name,
        "control": control,
        "alpha": SIGNIFICANCE_LEVEL,
        "days": (times_range["max"] - times_range["min"]) / DAY_S,
        "arms": facts,
        "comparisons": comparisons,
        "sample_ratio": {"p": p, "mismatch": p < MISMATCH_LEVEL},
    }


# --- contents of report.md and report.html ------------------------------------------------------------------


def warnings(report: ExperimentReport) -> list[str]:
    """Return reasons to distrust the report, the most serious first."""
    messages, requests, ratio = [], report["requests"], report["sample_ratio"]
    if ratio["mismatch"]:
        arms = report["arms"].items()
        sizes = ", ".join(f"{name} {arm['units']:,} (share {arm['share']:g})" for name, arm in arms)
        messages.append(
            f"SAMPLE RATIO MISMATCH (p = {ratio['p']:.2g}): the sizes of the groups do not fit the split: "
            f"{sizes} units. Units of one arm are lost or added, so that no comparison is valid: find the "
            "reason first."
        )
    other_arms = requests["left_out"].get("not by this split", 0)
    if other_arms > 0.01 * (requests["used"] + other_arms):
        messages.append(
            f"{other_arms:,} requests were answered by another arm than that of their unit in the split, "
            "because shares changed. They are left out: set `start` to the time of the change."
        )
    if report["days"] < 7:
        messages.append(
            f"The log covers {report['days']:.1f} days. Users differ over a week: run an experiment for full "
            "weeks, and decide only at its end."
        )
    return messages


def report_page(report: ExperimentReport) -> ReportPage:
    """Build the page for report.md and report.html."""
    rows = [[name, *(_cell(ms, ",.1f") for ms in arm["latency_ms"])] for name, arm in report["arms"].items()]
    latencies = ReportTable(["ms per answer", *(f"p{at}" for at in PERCENTILES)], rows)
    sections = [
        ReportSection("Arms", ARMS_NOTE, [comparison_table(report), latencies]),
        ReportSection("Environment", environment_line(report["environment"])),
    ]
    title = f"Experiment {report['experiment']}"
    return ReportPage(title, sections, summary=summary(report), warnings=report["warnings"])


def summary(report: ExperimentReport) -> str:
    """Describe requests, days, units per arm, sample ratio, excluded requests, and the judge in a line."""
    requests, judge = report["requests"], report["judge"]
    groups = ", ".join(
        f"{name} {arm['units']:,} ({arm['share']:.0%})" for name, arm in report["arms"].items()
    )
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in requests["left_out"].items())
    judgement = "results were not judged"
    if judge:
        judgement = (
            f"{judge['pairs']:,} pairs judged by {judge['path']}, {judge['unknown']:,} without a score; "
            f"irrelevant below {judge['irrelevant_below']:g}"
        )
    return (
        f"{requests['used']:,} requests in {report['days']:.1f} days; left out: {left_out or 'none'}; "
        f"unusable lines: {requests['rejected']:,}; units: {groups}; "
        f"sample ratio p = {report['sample_ratio']['p']:.2g}; {judgement}"
    )


def comparison_table(report: ExperimentReport) -> ReportTable:
    """Build a table with a line per measure and per arm that is compared with the control."""
    control, alpha = report["control"], report["alpha"]
    rows = []
    for name in (name for name in MEASURES if name in report["arms"][control]["means"]):
        for arm, comparison in report["comparisons"].items():
            means = (report["arms"][one]["means"][name] for one in (control, arm))
            change, low, high = (
                _cell(comparison[name][key], "+.4g") for key in ("difference", "low", "high")
            )
            p = comparison[name]["p_holm"]
            mark = "·"
            if p is not None and p < alpha:
                mark = "✓" if (comparison[name]["difference"] > 0) == (name in HIGHER_IS_BETTER) else "✗"
            cells = [*(_cell(mean, ".4g") for mean in means), change, f"{low} … {high}", _cell(p, ".2g")]
            rows.append([name, arm, *cells, mark])
    head = ["measure", "arm", control, "arm's", "difference", f"{1 - alpha:.0%} interval", "p", ""]
    return ReportTable(head, rows, text=2)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
