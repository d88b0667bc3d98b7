"""Tables of trials on pretrained towers: quality and cost, the papers' orders, gains of training, logs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.distillation import LIGHTRETRIEVER, Row
from benchmarks.pretrained import CE, CE_SCORES, LADDER, LEARNING_ATTEMPT, ZERO_QUERY, Found, data_of, label
from benchmarks.query_costs import dollars, speeds
from benchmarks.trial import ESCALATED, Outcome
from scalingnote.evaluate.measures import paired_t_test
from scalingnote.experiment.report import holm

NDCG, QUALITY = "nDCG@10", "quality and cost, "
ENOUGH = 0.99  # of the teacher's nDCG@10: what "equal" is
SIGNIFICANT = 0.05

# What stands in a published model's place, by its label, each alone and with BM25: the table of all data.
OVERVIEW = {
    "as published": "published, {}",
    "tuned": "scalingdual, {}",
    "two layers, distilled from the tuned": "scalingnote-2l, {}",
    "two layers, tuned": "twinbert, {}",
    "table, distilled without a query": "table, {}, 0 queries",
}


@dataclass(frozen=True)
class Order:
    """What a paper says of two methods, by their labels, and where."""

    paper: str
    better: str
    worse: str


ORDERS = (
    *(
        Order("ScalingNote, Table 4", f"{better}, {kind}", f"{worse}, {other}")
        for better, worse, kind, other in (
            ("scalingdual", "scalingdoc", "SmolLM2", "SmolLM2"),
            ("scalingdoc", "twinbert", "SmolLM2", "MiniLM"),
            ("scalingnote-2l", "scalingdoc", "SmolLM2", "SmolLM2"),
            ("scalingdual", "scalingdoc", "MiniLM", "MiniLM"),
            ("scalingdoc", "twinbert", "MiniLM", "MiniLM"),
            ("scalingnote-2l", "scalingdoc", "MiniLM", "MiniLM"),
            ("scalingdual", "scalingdoc", "M3E", "M3E"),
            ("scalingdoc", "twinbert", "M3E", "M3E"),
            ("scalingnote-2l", "scalingdoc", "M3E", "M3E"),
        )
    ),
    *(
        Order("LightRetriever, Table 2", f"{LIGHTRETRIEVER} (hybrid), {kind}", f"{half}, {kind}")
        for kind in ("SmolLM2", f"SmolLM2, {LEARNING_ATTEMPT}")
        for half in (LIGHTRETRIEVER, f"{LIGHTRETRIEVER} (sparse)")
    ),
    *(
        Order("EmbedDistill, Table 1", f"{better}, MiniLM", f"{worse}, MiniLM")
        for worse, better in pairwise(LADDER)
    ),
    *(
        Order("EmbedDistill, Table 5", f"{name}, MiniLM", "embeddistill-one-hot, MiniLM")
        for name in (CE_SCORES, CE)
    ),
)


def p_value(row: Row, other: Row) -> float:
    """Two-sided paired t-test over queries, of nDCG@10 averaged over the seeds of both; NaN without one."""
    mine, theirs = row.beside(other)
    if not mine.sides:
        return math.nan
    first, second = (
        np.mean([side.gains for side in each.sides.values() if side.gains is not None], axis=0)
        for each in (mine, theirs)
    )
    return float(paired_t_test((first - second)[:, None])[0])


def tables(found: Found, outcomes: Iterable[Outcome]) -> dict[str, list[dict[str, Any]]]:
    """Every table of docs/results/pretrained.md that there are trials for."""
    made = {"all data": overview(found)}
    made |= {f"{QUALITY}{dataset}": quality(sides) for dataset, sides in found.items()}
    made |= {
        "orders": orders(found),
        "before training": untrained(found),
        "query logs": logs(found),
        "cross-encoder": cross_encoders(outcomes),
        "hours": hours(outcomes),
    }
    return {title: rows for title, rows in made.items() if rows}


def overview(found: Found) -> list[dict[str, str]]:
    """nDCG@10 on CPUs, a column for each dataset: BM25, a model of its language, and what replaces it."""
    models = {
        data: kind
        for data, sides in found.items()
        for kind in ("MiniLM", "M3E")
        if f"published, {kind}" in sides and "," not in data  # nor on a GPU, nor of all documents
    }
    named = {"BM25": "bm25"} | {
        f"{name}{said}": f"{side}{plus}"
        for name, side in OVERVIEW.items()
        for said, plus in (("", ""), (" + BM25", " + bm25"))
    }
    rows = []
    for name, side in named.items():
        cells = {data: found[data].get(side.format(kind)) for data, kind in models.items()}
        if any(cells.values()):
            shown = {data: "-" if row is None else row.shown(NDCG) for data, row in cells.items()}
            rows.append({"query side": name} | shown)
    return rows


def quality(sides: Mapping[str, Row]) -> list[dict[str, Any]]:
    """A row for each query side, the best nDCG@10 first; of hybrids with BM25 nDCG@10 alone."""
    rows, speed = [], speeds(sides)
    plain = [name for name in sides if not name.endswith(" + bm25")]
    for name in sorted(plain, key=lambda name: -sides[name].mean(NDCG)):
        row, joined = sides[name], sides.get(f"{name} + bm25")
        line: dict[str, Any] = {"query side": name, "seeds": len(row.sides)}
        line |= {measure: row.shown(measure) for measure in (NDCG, "R@10", "R@100")}
        line["+ BM25, nDCG@10"] = "-" if joined is None else joined.shown(NDCG)
        line["queries/s"] = round(speed[name]) if name in speed else "-"
        line |= {"USD a million": dollars(speed.get(name)), "USD at equal nDCG": equal(name, sides, speed)}
        rows.append(line)
    return rows


def equal(name: str, sides: Mapping[str, Row], speed: Mapping[str, float]) -> str:
    """Cost where the teacher answers as many queries as it takes to keep ENOUGH of its nDCG@10."""
    row, teacher = sides[name], sides.get(teacher_of(name))
    if teacher is None or not speed.keys() >= {name, teacher_of(name)}:
        return "-"
    if row is teacher:
        return dollars(speed[name])
    both, best = row.beside(teacher)
    if not both.sides:
        return "-"
    measures = next(iter(both.sides.values())).measures
    for measure in sorted(
        (m for m in measures if m.startswith(ESCALATED)), key=lambda m: int(m.removeprefix(ESCALATED)[:-1])
    ):
        if both.mean(measure) >= ENOUGH * best.mean(NDCG):
            share = int(measure.removeprefix(ESCALATED)[:-1]) / 100
            cost = dollars(speed[name], teacher=speed[teacher_of(name)], share=share)
            return f"{cost} ({share:.0%} by the teacher)"
    return "-"


def teacher_of(name: str) -> str:
    """The label of a student's teacher."""
    method, kind = name.split(", ")[:2] if ", " in name else (name, "")
    return f"published, {kind}" if method == ZERO_QUERY else f"scalingdual, {kind}"


def orders(found: Found) -> list[dict[str, Any]]:
    """What the papers order, by nDCG@10; p after Holm's correction for the whole table."""
    pairs = [
        (dataset, order, sides[order.better], sides[order.worse])
        for dataset, sides in found.items()
        for order in ORDERS
        if order.better in sides and order.worse in sides
    ]
    p = holm({str(at): p_value(better, worse) for at, (*_, better, worse) in enumerate(pairs)})
    rows = []
    for at, (dataset, order, better, worse) in enumerate(pairs):
        gap = better.mean(NDCG) - worse.mean(NDCG)
        clear = p[str(at)] < SIGNIFICANT
        verdict = ("yes" if gap > 0 else "reversed") if clear else "cannot be told"
        rows.append(
            {
                "paper": order.paper,
                "data": dataset,
                "said to be better": order.better,
                "than": order.worse,
                "nDCG@10": f"{better.mean(NDCG):.3f}",
                "of the other": f"{worse.mean(NDCG):.3f}",
                "p": f"{p[str(at)]:.2g}",
                "holds": verdict,
            }
        )
    return rows


def untrained(found: Found) -> list[dict[str, Any]]:
    """Every trained side beside its architecture before training; all of MiniLM: the published model."""
    rows = []
    for dataset, sides in found.items():
        for name, row in sides.items():
            if name.endswith(" + bm25"):
                continue
            before = sides.get(f"{name}, untrained")
            if name.startswith("scalingdual, "):  # a published model is its tower before training
                before = before or sides.get(name.replace("scalingdual", "published"))
            if before is not None:
                gap = row.mean(NDCG) - before.mean(NDCG)
                numbers = {"before": f"{before.mean(NDCG):.3f}", "after": f"{row.mean(NDCG):.3f}"}
                p = p_value(row, before)
                rows.append(
                    {"data": dataset, "query side": name, **numbers, "gain": f"{gap:+.3f}", "p": f"{p:.2g}"}
                )
    return rows


def logs(found: Found) -> list[dict[str, Any]]:
    """A table distilled without queries, and with those of a log, beside its teacher."""
    rows = []
    for dataset, sides in found.items():
        for name, row in sides.items():
            best = sides.get(teacher_of(name)) if name.startswith(f"{ZERO_QUERY}, ") else None
            if best is None or name.endswith(" + bm25"):
                continue
            kept = row.mean(NDCG) / best.mean(NDCG)
            line = {"data": dataset, "real queries": name.split(", ")[2].removesuffix(" queries")}
            line |= {
                "seeds": str(len(row.sides)),
                NDCG: row.shown(NDCG),
                "of the teacher's": f"{kept:.1%}",
            }
            rows.append(line)
    return rows


def cross_encoders(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Whether the documents that a student inherits keep the order of its cross-encoder's scores."""
    return [
        {
            "data": data_of(outcome.trial),
            "student": label(outcome.trial, outcome.trial.method.removeprefix("methods/")),
            "seed": outcome.trial.seed,
        }
        | {name: f"{outcome.validation[name]:.3f}" for name in ("ce_rank_agreement", "ce_joint_agreement")}
        for outcome in outcomes
        if "ce_rank_agreement" in outcome.validation
    ]


def hours(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """What the trials of each dataset took."""
    by_data: dict[str, list[float]] = {}
    for outcome in outcomes:
        by_data.setdefault(data_of(outcome.trial), []).append(outcome.seconds)
    return [
        {"data": dataset, "trials": len(seconds), "hours": f"{sum(seconds) / 3600:.2f}"}
        for dataset, seconds in by_data.items()
    ]


def metrics(found: Found, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Orders that hold, what training adds at least, and the cross-encoder's agreement at worst."""
    values: dict[str, float] = {}
    if rows := orders(found):
        values["order_kept"] = sum(row["holds"] == "yes" for row in rows)
        values["orders_reversed"] = sum(row["holds"] == "reversed" for row in rows)
        values["orders_compared"] = len(rows)
    if rows := untrained(found):
        values["untrained_gap"] = round(min(float(row["gain"]) for row in rows), 3)
    agreed = [o.validation["ce_rank_agreement"] for o in outcomes if "ce_rank_agreement" in o.validation]
    if agreed:
        values["ce_rank_agreement"] = min(agreed)
    return values
