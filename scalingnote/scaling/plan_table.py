"""A plan as text: GPU hours, storage, machines, cost, what was assumed; and, asked to explain, every step."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scalingnote.scaling.capacity import Plan
from scalingnote.scaling.constants import Measured
from scalingnote.scaling.quantity import number

WIDE, CELL = 36, 14
Rows = Sequence[tuple[str, ...]]


def text(plan: Plan) -> str:
    """The whole page."""
    config = plan.config
    head = (
        f"{config.documents:,} documents of {config.tokens:g} tokens, {config.qps:,g} queries a second\n"
        f"{config.model}: {plan.shape.non_embedding_parameters:,} parameters without embeddings in each tower"
    )
    blocks = [_once(plan), _embeddings(plan), _index(plan), _searchers(plan), _serving(plan), _cost(plan)]
    assumed = [
        f"{constant.name} {_value(constant.value, constant.unit)}: {constant.source.why}"
        for constant in plan.constants
        if not isinstance(constant.source, Measured) and constant.source.kind == "assumed"
    ]
    return "\n\n".join([head, *blocks, _list("assumed", assumed), _list("to know", plan.notes)])


def explained(plan: Plan) -> str:
    """Every step of the arithmetic, in names and in numbers, and every constant with its source."""
    lines = ["arithmetic"]
    for step in plan.steps:
        lines += [f"  {step.name} = {step.names}", f"    = {step.numbers} = {_value(step.value, step.unit)}"]
    lines += ["", "constants"]
    for constant in plan.constants:
        lines.append(f"  {constant.name} = {_value(constant.value, constant.unit)}  [{constant.source}]")
    return "\n".join(lines)


def as_json(plan: Plan) -> str:
    """The same for a program: figures, steps, constants."""
    figures: dict[str, Any] = asdict(plan)
    figures["index"]["family"] = plan.index.family.label
    for name in ("steps", "constants"):
        del figures[name]
    figures["config"] = plan.config.model_dump(mode="json")
    steps = [
        {"name": step.name, "value": step.value, "unit": step.unit, "formula": step.names}
        for step in plan.steps
    ]
    constants = [
        {"name": one.name, "value": one.value, "unit": one.unit, "source": str(one.source)}
        for one in plan.constants
    ]
    return json.dumps({"plan": figures, "steps": steps, "constants": constants}, indent=1)


def _once(plan: Plan) -> str:
    config = plan.config
    rows = [
        (
            phase.name,
            number(phase.operations),
            _short(phase.gpu_hours),
            _short(phase.days),
            _money(phase.cost),
        )
        for phase in plan.phases
    ]
    hours, days = sum(phase.gpu_hours for phase in plan.phases), sum(phase.days for phase in plan.phases)
    title = (f"once, on {config.gpus} x {config.gpu}", "operations", "GPU hours", "days", "USD")
    return _table(title, [*rows, ("together", "", _short(hours), _short(days), _money(plan.once))])


def _embeddings(plan: Plan) -> str:
    kinds = list(plan.stored[0].gb)
    rows = [
        (f"{one.dim} dimensions", *(_short(one.gb[kind]) for kind in kinds), _money(one.month))
        for one in plan.stored
    ]
    return _table(("embeddings, GB", *kinds, "USD a month"), rows)


def _index(plan: Plan) -> str:
    index = plan.index
    return _table(
        ("index", index.family.label),
        [
            ("recall@100, measured", f"{index.family.recall.value:g}"),
            ("bytes a document", f"{index.document_bytes:,.1f}"),
            ("GB of one version", _short(index.gb)),
        ],
    )


def _searchers(plan: Plan) -> str:
    rows = [
        (
            f"{one.node_gb:,} GB, {one.cores:g} cores" + (" (cheapest)" if one is plan.index.best else ""),
            *(f"{count:,.0f}" for count in (one.shards, one.replicas, one.nodes)),
            _short(one.shard_ms),
            _money(one.month),
        )
        for one in plan.index.sizes
    ]
    title = ("searchers, by size of node", "shards", "replicas", "nodes", "ms in a shard", "USD a month")
    return _table(title, rows)


def _serving(plan: Plan) -> str:
    rows = [(part.name, f"{part.count:,.0f}", _money(part.month)) for part in plan.serving]
    tower = plan.config.query_tower
    return _table((f"beside them, {tower}", "cores", "USD a month"), rows)


def _cost(plan: Plan) -> str:
    parts = ", ".join(
        f"{name} {_money(month)}"
        for name, month in (
            ("embeddings", plan.stored[-1].month),
            ("searchers", plan.index.best.month),
            *((part.name, part.month) for part in plan.serving),
        )
    )
    return _table(
        ("cost", "USD"), [("once", _money(plan.once)), ("a month", f"{_money(plan.month)} ({parts})")]
    )


def _table(title: tuple[str, ...], rows: Rows) -> str:
    lines = [title, *((f"  {label}", *cells) for label, *cells in rows)]
    return "\n".join(
        (f"{label:<{WIDE}}" + "".join(f"{cell:<{CELL}}  " for cell in cells)).rstrip()
        for label, *cells in lines
    )


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  - {line}" for line in lines)])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _money(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:,.2f}"


def _value(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()
