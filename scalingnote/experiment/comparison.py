"""Arms compared: a row of sums per unit comes in; arms, differences and warnings go out, as JSON values.

{"experiment", "control", "alpha", "first", "last", "days", "requests": {"read", "used", "left_out", ...},
 "measures": [{"name", "text", "better"}],
 "arms": {ARM: {"share", "units", "measures": {MEASURE: {"mean", "units", "count"}},
                "latency_ms": {STAGE: [p50, p90, p99]}}},
 "comparisons": {ARM: {MEASURE: {"difference", "low", "high", "p", "p_holm", "relative",
                                 "bootstrap_low", "bootstrap_high"}}},
 "sample_ratio": {"p", "mismatch"}, "judge": {...}, "warnings": [...], "environment": {...}}

A number that cannot be told is null.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.experiment.config import ExperimentConfig
from scalingnote.experiment.outcomes import Measure, sums
from scalingnote.experiment.statistics import compare, holm, sample_ratio

Report = dict[str, Any]


def compared(config: ExperimentConfig, units: pa.Table, measures: Sequence[Measure]) -> Report:
    """Arms, comparisons and the sample ratio, from a row of sums per unit."""
    first, *rest = (arm for arm in config.split.arms if arm.share > 0)
    arms = [first, *sorted(rest, key=lambda arm: arm.name)]  # as they come back from a JSON file
    control, *others = (arm.name for arm in arms)
    counts = [int(pc.sum(pc.equal(units["arm"], arm.name)).as_py() or 0) for arm in arms]
    of = {(arm.name, m.name): sums(units, arm.name, m.name) for arm in arms for m in measures}
    comparisons: dict[str, dict[str, dict[str, float]]] = {name: {} for name in others}
    for measure in measures:
        found = {}
        for name in others:
            # A generator of its own: what is added to a report changes nothing else in it.
            rng = np.random.default_rng([config.seed, *f"{name} {measure.name}".encode()])
            found[name] = compare(
                of[control, measure.name],
                of[name, measure.name],
                alpha=config.alpha,
                replicates=config.bootstrap,
                rng=rng,
            )
        adjusted = holm({name: difference.p for name, difference in found.items()})
        for name, difference in found.items():
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
                        "mean": (one := of[arm.name, m.name]).mean,
                        "units": len(one.sum),
                        "count": one.count.sum(),
                    }
                    for m in measures
                },
            }
            for arm, count in zip(arms, counts, strict=True)
        },
        "comparisons": comparisons,
        "sample_ratio": {"p": p, "mismatch": p < config.mismatch_alpha},
    }
    told: Report = _plain(report)
    return told


def verdict(difference: Mapping[str, float | None], *, better: str, alpha: float) -> str:
    """✓ significantly better, ✗ significantly worse, · neither."""
    p, value = difference["p_holm"], difference["difference"]
    if p is None or value is None or p >= alpha or not value:
        return "·"
    return "✓" if (value < 0) == (better == "lower") else "✗"


def warnings(config: ExperimentConfig, report: Report) -> list[str]:
    """What a reader must know before believing a number, the worst first."""
    found = []
    arms, requests = report["arms"], report["requests"]
    if report["sample_ratio"]["mismatch"]:
        got = ", ".join(f"{name} {arm['units']:,} (share {arm['share']:g})" for name, arm in arms.items())
        found.append(
            f"SAMPLE RATIO MISMATCH (p = {report['sample_ratio']['p']:.2g}): the groups are not of the sizes "
            f"that the split gives: {got} units. Something loses or adds units of one arm, so that no "
            "comparison can be believed: find it first."
        )
    empty = [name for name, arm in arms.items() if arm["units"] < 2]
    if empty:
        found.append(f"Arm {empty[0]} has {arms[empty[0]]['units']} units: nothing can be said of it.")
    own = requests["used"]
    strangers = requests["left_out"].get("not by this split", 0)
    if strangers > 0.01 * (own + strangers):
        found.append(
            f"{strangers:,} requests were answered by another arm than the split gives their unit: shares "
            "changed in between. They are left out: set `start` to when they did."
        )
    if requests["rejected"] > 0.01 * requests["read"]:
        found.append(f"{requests['rejected']:,} of {requests['read']:,} lines of the log could not be used.")
    if report["days"] < 7:
        found.append(
            f"The log covers {report['days']:.1f} days. Users differ over a week: let an experiment run for "
            "whole weeks, and decide at its end only."
        )
    judge = report["judge"]
    if judge and judge["pairs"] and judge["unknown"] > 0.05 * judge["pairs"]:
        found.append(
            f"{judge['unknown']:,} of {judge['pairs']:,} judged pairs have no score and count nowhere."
        )
    return found


def _plain(value: Any) -> Any:
    """JSON values: numbers of Python, null for what is not finite."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
