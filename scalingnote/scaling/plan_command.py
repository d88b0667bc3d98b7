"""`scalingnote plan`: options, and the plan as text or JSON.

The command line imports this module for every command, so all heavier modules are imported when a plan runs.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scalingnote.reports import four_digits

if TYPE_CHECKING:
    from scalingnote.scaling.capacity import CapacityPlan

LABEL_WIDTH, CELL_WIDTH = 36, 14  # characters

# Option -> metavar and help. They repeat the descriptions of PlanConfig, which would need pydantic to read; a
# test compares the defaults.
NEEDED = {
    "documents": ("N", "documents of the corpus, e.g. 2e9"),
    "tokens": ("N", "mean tokens of a document, its prompt counted in"),
    "model": ("NAME", "backbone of both towers: a published name, or a folder with config.json"),
    "qps": ("N", "queries a second at the peak"),
}
CORPUS = {
    "recall": ("R", "of the exact 100 best documents, default: 0.95"),
    "query_tokens": ("N", "mean tokens of a query, default: 16"),
    "dims": ("N", "Matryoshka dimensions, the last one indexed, default: 16 32 64 128"),
    "query_tower": ("KIND", "bert-int8 (the default) or lookup"),
    "pairs": ("N", "training pairs, default: 1e8"),
    "negatives": ("N", "hard negatives of a pair, default: 1"),
    "lora": ("RANK", "train adapters, default: all weights"),
    "distill_epochs": ("N", "passes over the pairs' queries, default: 100"),
}
MACHINES = {
    "gpu": ("KIND", "H200, H100 (the default), A100, L40S or L4"),
    "gpus": ("N", "that work at the same time, default: 8"),
    "mfu": ("SHARE", "of the peak that is reached, default: 0.4"),
    "node_memory": ("GB", "sizes of searchers' nodes, default: 64 128 256 512 1024"),
    "nodes": ("N", "CPU nodes of the offline stages, default: 16"),
    "node_cores": ("N", "cores of each of them, default: 16"),
    "replicas": ("N", "copies of everything that serves, at least, default: 2"),
}
PRICES = {
    "gpu_price": ("USD", "of a GPU hour, default: by kind"),
    "core_price": ("USD", "of a CPU core's hour, default: 0.03"),
    "memory_price": ("USD", "of a GB of memory for an hour, default: 0.004"),
    "storage_price": ("USD", "of a GB in object storage for a month, default: 0.023"),
    "request_price": ("USD", "of a million requests to it, default: 5"),
}
TEXT_OPTIONS, LIST_OPTIONS = ("model", "gpu", "query_tower"), ("dims", "node_memory")


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    groups = (("needed", NEEDED), ("corpus and model", CORPUS), ("machines", MACHINES), ("prices", PRICES))
    for title, options in groups:
        group = parser.add_argument_group(title)
        for name, (metavar, text) in options.items():
            group.add_argument(
                f"--{name.replace('_', '-')}",
                type=str if name in TEXT_OPTIONS else float,
                nargs="+" if name in LIST_OPTIONS else None,
                required=title == "needed",
                metavar=metavar,
                help=text,
            )
    parser.add_argument("--explain", action="store_true", help="then every step and every constant's source")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, steps and constants too")


def run(options: argparse.Namespace) -> int:
    """Compute and print the plan.

    Raises:
        ConfigError: an option is out of bounds, or the model is not known.
    """
    from scalingnote.config import validate
    from scalingnote.scaling import capacity
    from scalingnote.scaling.config import PlanConfig

    given = {
        name: value
        for name in (*NEEDED, *CORPUS, *MACHINES, *PRICES)
        if (value := getattr(options, name)) is not None
    }
    plan = capacity.plan(validate(PlanConfig, given, source="plan"))
    print(as_text(plan))
    if options.explain:
        print(f"\n{explanation(plan)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(f"{as_json(plan)}\n", encoding="utf-8")
        print(f"\n{options.json}")
    return 0


def as_text(plan: "CapacityPlan") -> str:
    """The whole plan as text: figures, assumptions and notes."""
    from scalingnote.scaling.constants import StatedSource

    config = plan.config
    head = (
        f"{config.documents:,} documents of {config.tokens:g} tokens, {config.qps:,g} queries a second\n"
        f"{config.model}: {plan.shape.non_embedding_parameters:,} parameters without embeddings in each tower"
    )
    blocks = [*_gpu_and_storage(plan), _offline(plan), *_index_and_serving(plan), _cost(plan)]
    assumed = [
        f"{constant.name} {_value(constant.value, constant.unit)}: {constant.source.why}"
        for constant in plan.constants
        if isinstance(constant.source, StatedSource) and constant.source.kind == "assumed"
    ]
    return "\n\n".join([head, *blocks, _list("assumed", assumed), _list("to know", plan.notes)])


def explanation(plan: "CapacityPlan") -> str:
    """Every step of the arithmetic in names and in numbers, and every constant with its source."""
    lines = ["arithmetic"]
    for step in plan.steps:
        lines += [f"  {step.name} = {step.names}", f"    = {step.numbers} = {_value(step.value, step.unit)}"]
    lines += ["", "constants"]
    for constant in plan.constants:
        lines.append(f"  {constant.name} = {_value(constant.value, constant.unit)}  [{constant.source}]")
    return "\n".join(lines)


def as_json(plan: "CapacityPlan") -> str:
    """The plan for programs: figures, steps and constants."""
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


def _gpu_and_storage(plan: "CapacityPlan") -> list[str]:
    phases, kinds = plan.phases, list(plan.stored[0].gb)
    rows = [
        (p.name, four_digits(p.operations), _short(p.gpu_hours), _short(p.days), _money(p.cost))
        for p in phases
    ]
    hours, days = sum(phase.gpu_hours for phase in phases), sum(phase.days for phase in phases)
    rows.append(("together", "", _short(hours), _short(days), _money(plan.once)))
    title = (f"once, on {plan.config.gpus} x {plan.config.gpu}", "operations", "GPU hours", "days", "USD")
    embeddings = [
        (f"{one.dim} dimensions", *(_short(one.gb[kind]) for kind in kinds), _money(one.month))
        for one in plan.stored
    ]
    return [_table(title, rows), _table(("embeddings, GB", *kinds, "USD a month"), embeddings)]


def _offline(plan: "CapacityPlan") -> str:
    rows = [
        (
            one.name,
            *map(_short, (one.core_hours, one.hours, one.read_gb, one.written_gb)),
            four_digits(one.requests),
            _money(one.cost),
            _short(one.driver_gb),
        )
        for one in plan.offline
    ]
    title = f"offline, on {plan.config.nodes} nodes of {plan.config.node_cores} cores"
    columns = ("core hours", "hours", "GB read", "GB written", "requests", "USD", "driver GB")
    return _table((title, *columns), rows)


def _index_and_serving(plan: "CapacityPlan") -> list[str]:
    index = plan.index
    about_index = [
        ("recall@100, measured", f"{index.family.recall.value:g}"),
        ("bytes a document", f"{index.document_bytes:,.1f}"),
        ("with its title and snippet", f"{index.row_bytes:,.1f}"),
        ("GB of one version", _short(index.gb)),
    ]
    searchers = [
        (
            f"{one.node_gb:,} GB, {one.cores:g} cores" + (" (cheapest)" if one is index.best else ""),
            *(f"{count:,.0f}" for count in (one.shards, one.replicas, one.nodes)),
            _short(one.shard_ms),
            _short(one.fan_out_cores),
            _money(one.month),
        )
        for one in index.sizes
    ]
    replicas = [(part.name, f"{part.count:,.0f}", _money(part.month)) for part in plan.serving]
    size_title = (
        "searchers, by size of node",
        "shards",
        "replicas",
        "nodes",
        "ms in a shard",
        "cores to fan out",
        "USD a month",
    )
    return [
        _table(("index", index.family.label), about_index),
        _table(size_title, searchers),
        _table((f"beside them, {plan.config.query_tower}", "cores", "USD a month"), replicas),
    ]


def _cost(plan: "CapacityPlan") -> str:
    months = {"embeddings": plan.stored[-1].month, "searchers": plan.index.best.month}
    months |= {part.name: part.month for part in plan.serving}
    parts = ", ".join(f"{name} {_money(month)}" for name, month in months.items())
    rows = [("once", _money(plan.once)), ("a month", f"{_money(plan.month)} ({parts})")]
    return _table(("cost", "USD"), rows)


def _table(title: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [title, *((f"  {label}", *cells) for label, *cells in rows)]
    return "\n".join(
        (f"{label:<{LABEL_WIDTH}}" + "".join(f"{cell:<{CELL_WIDTH}}  " for cell in cells)).rstrip()
        for label, *cells in lines
    )


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  - {line}" for line in lines)])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _money(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:,.2f}"


def _value(value: float, unit: str) -> str:
    return f"{four_digits(value)} {unit}".rstrip()
