"""The plan of a whole system: GPU hours, bytes, machines and money for a corpus and its traffic.

    PlanConfig ─► GPU hours · embeddings · offline stages · index ─► searchers, encoders, gateways

Plain arithmetic on the constants of constants.json; docs/guides/scaling.md states each formula. Scan times
beyond the measured million documents are an assumption: with 4·sqrt(documents) inverted lists, of which as
many are probed as at a million, they grow with sqrt(documents).
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from scalingnote.core import reports
from scalingnote.core.config import validate
from scalingnote.core.units import GIB
from scalingnote.models import flops
from scalingnote.models.config import Lora, Pretrained, Scratch
from scalingnote.models.flops import Shape, adapter_parameters, backbone_shape
from scalingnote.plan import training_cost
from scalingnote.plan.config import CONSTANTS, GPUS, PlanConfig, constant
from scalingnote.plan.training_cost import TowerInput, four_digits
from scalingnote.train.config import Ddp, Fsdp2, Optimizer

VIEWS = 3  # embeddings of a document in training (ScalingNote, section 3.2)
STUDENT = Scratch(  # the published query tower (Table 8): RED Bert-4L
    architecture="bert", layers=4, hidden=768, heads=12, intermediate=3072, vocabulary=84_522
)
BYTES_PER_NUMBER = {"float16": 2, "int8": 1}
MONTH_HOURS = 730
STAGE_FIGURES = ("seconds", "driver GB", "read MB", "written MB", "requests")
Figures = dict[str, float]


@dataclass(frozen=True)
class CapacityPlan:
    """The result; rows are figures by name, money is in US dollars.

    phases    gpu_hours, days, cost of work on GPUs that is done once
    offline   core_hours, hours (on all nodes), read_gb, written_gb, requests, cost, driver_gb of a stage
    stored    of a dimension: GB by type of number, and a month's cost of the first type
    sizes     searchers on nodes of one size; `best` is the cheapest
    serving   processes of one core each, by name
    """

    config: PlanConfig
    shape: Shape
    phases: dict[str, Figures]
    offline: dict[str, Figures]
    stored: dict[int, Figures]
    family: str
    index: Figures
    sizes: dict[int, Figures]
    best: int
    serving: dict[str, Figures]
    once: float
    months: dict[str, float]
    notes: list[str]

    @property
    def month(self) -> float:
        """The cost of a month."""
        return sum(self.months.values())


def plan(config: PlanConfig) -> CapacityPlan:
    """Compute the plan; ConfigError if the model's shape is not known offline."""
    folder = Path(config.model)
    path = str(folder.parent) if folder.name == "config.json" else config.model
    shape = backbone_shape(Pretrained(path=path))
    phases, offline = _phases(config, shape), stage_costs(config)
    stored = {dim: _storage(config, dim) for dim in config.dims}
    families: Mapping[str, Any] = CONSTANTS["families"]
    # Searchers by family and memory. Exhaustive search has a recall of 1, so at least one family qualifies.
    indexes = {
        name: _index(config, name)
        for name, family in families.items()
        if family["recall"]["value"] >= config.recall
    }
    searchers = {
        (name, memory): _searchers(config, memory, index)
        for name, index in indexes.items()
        for memory in config.node_memory
    }
    family, _ = min(searchers, key=lambda each: searchers[each]["month"])
    sizes = {memory: searchers[family, memory] for memory in config.node_memory}
    best = min(sizes, key=lambda memory: (sizes[memory]["month"], sizes[memory]["nodes"]))
    serving = {"query encoders": _encoders(config), "gateways": _gateways(config)}
    rows = {"embeddings": stored[config.dims[-1]], "searchers": sizes[best], **serving}
    return CapacityPlan(
        config=config,
        shape=shape,
        phases=phases,
        offline=offline,
        stored=stored,
        family=family,
        index=indexes[family],
        sizes=sizes,
        best=best,
        serving=serving,
        once=sum(row["cost"] for row in (*phases.values(), *offline.values())),
        months={name: row["month"] for name, row in rows.items()},
        notes=_notes(config, shape, family),
    )


def _phases(config: PlanConfig, shape: Shape) -> dict[str, Figures]:
    """Training, distillation and encoding on GPUs."""
    lora, dim = Lora(rank=config.lora) if config.lora else None, config.dims[-1]
    documents = 1 + int(constant("hard_negatives"))
    pair = training_cost.pair_work(
        TowerInput(shape, config.query_tokens, lora=lora),
        TowerInput(shape, config.tokens, rows=documents, pooled=VIEWS, lora=lora),
        dim=dim,
        checkpointing=True,
    )
    distilled = flops.forward(shape, tokens=config.query_tokens)
    if config.query_tower != "lookup":  # a lookup table has no matrix products
        student = flops.row(backbone_shape(STUDENT), tokens=config.query_tokens, pooled=1, dim=dim)
        distilled += constant("distill_epochs") * student.total
    encoded = config.documents * flops.forward(shape, tokens=config.tokens)
    work = {
        "train": config.pairs * pair.total,
        "distil": config.pairs * distilled,
        "encode": encoded / constant("encode_share"),
    }
    gpu = GPUS[config.gpu]
    phases = {}
    for name, operations in work.items():
        hours = operations / (gpu.peak * config.mfu) / 3600
        phases[name] = {"gpu_hours": hours, "days": hours / config.gpus / 24, "cost": hours * gpu.price}
    return phases


def _storage(config: PlanConfig, dim: int) -> Figures:
    """GB of embeddings by type of number, and a month's cost of the first type."""
    gb = {kind: config.documents * dim * size / 1e9 for kind, size in BYTES_PER_NUMBER.items()}
    return gb | {"month": next(iter(gb.values())) * constant("storage_price")}


def _index(config: PlanConfig, name: str) -> Figures:
    """Bytes of the index in a family, and the time of a scan on one core."""
    family, dim = CONSTANTS["families"][name], config.dims[-1]
    values: Figures = {key: family[key]["value"] for key in ("recall", "bytes", "us", "bytes_per_dimension")}
    measured_dim = constant("index_dimensions")
    document = values["bytes"] + values["bytes_per_dimension"] * (dim - measured_dim)
    # What a searcher holds of a document beside its vector: ids and filters.
    row = document + constant("searcher_bytes") - constant("searcher_vector_bytes")
    growth = config.documents / constant("index_documents")
    growth = growth if name == "flat" else sqrt(growth)
    texts = config.documents * constant("text_bytes") * constant("index_versions")
    return {
        "recall": values["recall"],
        "document_bytes": document,
        "row_bytes": row,
        "gb": config.documents * row / 1e9,
        "texts_gb": texts / 1e9,  # of all shards: each searcher has a copy of those of its own
        "scan_us": values["us"] * growth * dim / measured_dim,
    }


def _searchers(config: PlanConfig, memory: int, index: Figures) -> Figures:
    """Nodes of `memory` GB: shards so that the index fits, replicas so that the queries are answered."""
    cores = memory / constant("gb_per_core")
    held = index["gb"] * constant("index_versions")
    shards = _round_up(held / (memory * constant("usable_memory")))
    more_us = (constant("index_us_four_shards") - constant("index_us_one")) / 3  # of one more shard
    shard_ms = (index["scan_us"] + more_us * (shards - 1)) / shards / 1000
    busy_cores = config.qps * shard_ms / 1000 / constant("busy")
    replicas = max(float(config.replicas), _round_up(busy_cores / cores))
    # A request through replicas makes two calls more than one that is answered inside its gateway.
    machine = constant("gateway_cores")
    call_s = (machine / constant("gateway_rate") - machine / constant("gateway_rate_in_process")) / 2
    fan_out = config.qps * call_s * (shards - 1) / constant("busy")
    month = (shards * replicas * cores + fan_out) * core_price() * MONTH_HOURS
    figures = {"cores": cores, "shards": shards, "replicas": replicas, "nodes": shards * replicas}
    return figures | {"shard_ms": shard_ms, "fan_out_cores": fan_out, "month": month}


def core_price() -> float:
    """US dollars of a core's hour with its memory."""
    return constant("core_price") + constant("gb_per_core") * constant("memory_price")


def _encoders(config: PlanConfig) -> Figures:
    """Query encoders at the rate measured for their form, in proportion to the tokens of a query.

    That holds for lookup tables too: most of their time is tokenization. It is rough far from the measured
    length, because part of the time does not grow: 4 tokens take 0.5 of the time of 13, not 0.3.
    """
    measured = constant(f"encoder_rate_{config.query_tower}")
    return _replicas(config, config.qps * config.query_tokens / (measured * constant("encoder_tokens")))


def _gateways(config: PlanConfig) -> Figures:
    """Gateways at the CPU time a request took on the measured machine, load generator and search included."""
    return _replicas(config, config.qps * constant("gateway_cores") / constant("gateway_rate"))


def _replicas(config: PlanConfig, working_cores: float) -> Figures:
    """Processes of one core each; `working_cores` is the number of cores that work all the time."""
    count = max(float(config.replicas), _round_up(working_cores / constant("busy")))
    return {"count": count, "month": count * core_price() * MONTH_HOURS}


def _round_up(value: float) -> float:
    """The next whole number; the factor keeps a rounding error from adding one."""
    return float(ceil(value * (1 - 1e-12)))


def stage_figures(costs: Mapping[str, Any], *, documents: int, units: int = 0) -> Figures:
    """Figures of one stage: a + b·documents·passes + c·units + d·documents·units for each [a, b, c, d].

    Args:
        costs: of the stage, an entry of "stages" in constants.json.
        documents: of the corpus.
        units: queries, or codes, that the work of the stage also grows with.
    """
    passes = ceil(units / costs["units_per_pass"]) if costs["units_per_pass"] else 1

    def figure(name: str) -> float:
        fixed, document, unit, pair = costs[name]
        times = 1 if name == "driver GB" else passes  # one driver runs them all
        return float(fixed + document * documents * times + unit * units + pair * documents * units)

    return {name: figure(name) for name in STAGE_FIGURES}


def stage_costs(config: PlanConfig) -> dict[str, Figures]:
    """What every measured stage takes. Work that grows with the corpus is divided evenly among the cores.

    Work and bytes of texts grow with the tokens of a document, those of embeddings with their dimensions.
    """
    units = {"queries": config.train_queries, "codes": int(constant("semantic_codes"))}
    times = {
        "texts": config.tokens / constant("stage_tokens"),
        "embeddings": config.dims[-1] / constant("stage_dimensions"),
    }
    found = {}
    for name, costs in CONSTANTS["stages"].items():
        figures = stage_figures(costs, documents=config.documents, units=units.get(costs["units"], 0))
        scale, fixed = times[costs["rows"]], costs["seconds"][0]
        growing = (figures["seconds"] - fixed) * constant("stage_cores") * scale
        core_hours = (growing + fixed) / 3600
        found[name] = {
            "core_hours": core_hours,
            "hours": (growing / config.cores + fixed) / 3600,
            "read_gb": figures["read MB"] * scale / 1e3,
            "written_gb": figures["written MB"] * scale / 1e3,
            "requests": figures["requests"],
            "cost": core_hours * core_price() + figures["requests"] / 1e6 * constant("request_price"),
            "driver_gb": figures["driver GB"],
        }
    return found


def training_state(config: PlanConfig, shape: Shape) -> float:
    """Bytes on one GPU that do not depend on the batch, sharded over several GPUs."""
    lora = Lora(rank=config.lora) if config.lora else None
    trained = 2 * (adapter_parameters(shape, lora) if lora else shape.parameters)
    return training_cost.training_state(
        Fsdp2() if config.gpus > 1 else Ddp(),
        Optimizer(),
        trained=trained,
        frozen=shape.parameters if lora else 0,  # the adapters of both towers share one base
        frozen_tables=shape.embedding_parameters if lora else 0,
        largest=shape.embedding_parameters + 2 * shape.layer_parameters,
        gpus=config.gpus,
        numbers="bfloat16" if config.gpus > 1 else "autocast",
    ).total


def _notes(config: PlanConfig, shape: Shape, family: str) -> list[str]:
    """What does not fit, and what was not measured."""
    notes, available = [], GPUS[config.gpu].memory
    if (required := training_state(config, shape)) > available:
        remedy = "more --gpus" if config.lora else "more --gpus, or --lora 16"
        notes.append(
            f"TRAINING DOES NOT FIT: weights, gradients and optimizer take {required / GIB:.0f} GiB of each "
            f"{config.gpu}'s {available / GIB:.0f}: {remedy}; `scalingnote run --dry-run` counts "
            "activations too"
        )
    if 2.0 * shape.parameters > available:
        notes.append(
            f"ENCODING DOES NOT FIT: weights in bfloat16 take {2 * shape.parameters / GIB:.0f} GiB of "
            f"an {config.gpu}'s {available / GIB:.0f}: choose a larger --gpu or a smaller --model"
        )
    if family == "flat":
        notes.append(
            f"no setting with inverted lists was measured at a recall of {config.recall:g}, so every "
            "document is compared; a larger nprobe may reach it for less"
        )
    else:
        notes.append(
            f"recall was measured on a million documents at {constant('index_dimensions'):g} dimensions: "
            "tune an index of your embeddings before you rely on it"
        )
    return notes


# --- the command and its text ------------------------------------------------------------------------------

TEXT_OPTIONS = ("model", "gpu", "query_tower")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `scalingnote plan`: the fields of PlanConfig."""
    for name, field in PlanConfig.model_fields.items():
        has_default = not field.is_required() and field.default is not None
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=str if name in TEXT_OPTIONS else float,
            nargs="+" if isinstance(field.default, tuple) else None,
            required=field.is_required(),
            metavar="TEXT" if name in TEXT_OPTIONS else "N",
            help=f"{field.description}, default: {_as_typed(field.default)}"
            if has_default
            else field.description,
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures too")


def print_plan(options: argparse.Namespace) -> int:
    """Compute and print the plan.

    Raises:
        ConfigError: an option is out of bounds, or the model is not known.
    """
    names = PlanConfig.model_fields
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    planned = plan(validate(PlanConfig, given, source="plan"))
    print(plan_text(planned))
    if options.json:
        figures = vars(planned) | {"month": planned.month, "shape": asdict(planned.shape)}
        figures |= {"config": planned.config.model_dump(mode="json")}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(f"\n{options.json}")
    return 0


def plan_text(planned: CapacityPlan) -> str:
    """The whole plan as text: figures, assumptions and notes."""
    config = planned.config
    options = [
        f"--{name.replace('_', '-')} {_as_typed(value)}: {field.description}"
        for name, field in PlanConfig.model_fields.items()
        if name not in config.model_fields_set and (value := getattr(config, name)) is not None
    ]
    assumed = [
        f"{one['what']} {one['value']:g}: {one['source'].removeprefix('assumed: ')}"
        for one in CONSTANTS["constants"].values()
        if one["source"].startswith("assumed: ")
    ]
    text = reports.render(
        "plan.txt",
        plan=planned,
        config=config,
        number_kinds=[*BYTES_PER_NUMBER],
        assumed=options + assumed,
        row=_row,
        short=_short,
        count=four_digits,
    )
    return reports.align_columns(text, label=36, cell=14)


def _row(label: str, values: Iterable[float]) -> str:
    return " | ".join([label, *map(_short, values)])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _as_typed(value: object) -> str:
    """The value of an option as it is typed."""
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(f"{one:g}" if isinstance(one, int | float) else str(one) for one in values)
