"""The plan of a complete system: GPU hours, bytes, machines and cost for a corpus and its traffic.

    PlanConfig ─► GPU hours · embeddings · offline stages · index ─► searchers, encoders, gateways

It computes with the constants of constants.json; docs/guides/scaling.md states each formula. Scan times for
more than the measured million documents are an assumption: with 4·sqrt(documents) inverted lists, and the
same number of probed lists as for a million documents, they grow with sqrt(documents).
"""

from collections.abc import Mapping
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from scalingnote.core import reports
from scalingnote.models import flops
from scalingnote.models.config import Lora, Pretrained, Scratch
from scalingnote.models.flops import Shape, adapter_parameters, backbone_shape
from scalingnote.plan.config import CONSTANTS, GPUS, PlanConfig, constant
from scalingnote.plan.memory import training_state
from scalingnote.train.config import Ddp, Fsdp2, Optimizer

VIEWS = 3  # embeddings of a document in training (ScalingNote, section 3.2)
STUDENT = Scratch(  # the published query tower (Table 8): RED Bert-4L
    architecture="bert", layers=4, hidden=768, heads=12, intermediate=3072, vocabulary=84_522
)
MONTH_HOURS = 730
STAGE_FIGURES = ("seconds", "driver GB", "read MB", "written MB", "requests")
Figures = dict[str, float]


def plan(config: PlanConfig) -> dict[str, Any]:
    """Compute the plan.

    Returns:
        Figures by name, money in US dollars; plan.txt prints them:

        - config, parameters: the settings; parameters of a tower without embeddings
        - phases: gpu_hours, days and cost of one-time work on GPUs
        - training_bytes, encoding_bytes: bytes on one GPU, without activations
        - offline: core_hours, hours (on all nodes), read_gb, written_gb, requests, cost, driver_gb of a stage
        - embeddings: GB by type of number, and the cost of float16 per month
        - family, index: the cheapest family of indexes that reaches the recall, and its bytes and times
        - sizes, best: searchers on nodes of each size, and the cheapest size
        - serving: number of processes with one core each, by name
        - once, months, month: all costs

    Raises:
        ConfigError: the model's shape is not known offline.
    """
    folder = Path(config.model)
    path = str(folder.parent) if folder.name == "config.json" else config.model
    shape = backbone_shape(Pretrained(path=path))
    phases, offline = _phases(config, shape), stage_costs(config)
    families: Mapping[str, Any] = CONSTANTS["families"]
    # Exhaustive search has a recall of 1, so at least one family qualifies.
    indexes = {
        name: _index(config, name)
        for name, family in families.items()
        if family["recall"]["value"] >= config.recall
    }
    searchers = {
        name: {memory: _searchers(config, memory, index) for memory in config.node_memory}
        for name, index in indexes.items()
    }
    family = min(searchers, key=lambda name: min(one["month"] for one in searchers[name].values()))
    sizes = searchers[family]
    best = min(sizes, key=lambda memory: (sizes[memory]["month"], sizes[memory]["nodes"]))
    float16 = config.documents * config.dim * 2 / 1e9
    embeddings = {"float16": float16, "int8": float16 / 2, "month": float16 * constant("storage_price")}
    serving = _serving(config)
    months = {
        name: row["month"]
        for name, row in {"embeddings": embeddings, "searchers": sizes[best], **serving}.items()
    }
    return {
        "config": config,
        "parameters": shape.non_embedding_parameters,
        "phases": phases,
        "training_bytes": _training_bytes(config, shape),
        "encoding_bytes": 2.0 * shape.parameters,
        "offline": offline,
        "embeddings": embeddings,
        "family": family,
        "index": indexes[family],
        "sizes": sizes,
        "best": best,
        "serving": serving,
        "once": sum(row["cost"] for row in (*phases.values(), *offline.values())),
        "months": months,
        "month": sum(months.values()),
    }


def _phases(config: PlanConfig, shape: Shape) -> dict[str, Figures]:
    """Compute time and cost of training, distillation and encoding on GPUs."""
    lora, dim = Lora(rank=config.lora) if config.lora else None, config.dim
    query, document = (
        flops.row(shape, tokens=tokens, pooled=pooled, dim=dim, lora=lora, checkpointing=True).total
        for tokens, pooled in ((config.query_tokens, 1), (config.tokens, VIEWS))
    )
    distill_operations = flops.forward(shape, tokens=config.query_tokens)
    if config.query_tower != "lookup":  # a lookup table has no matrix products
        student = flops.row(backbone_shape(STUDENT), tokens=config.query_tokens, pooled=1, dim=dim)
        distill_operations += constant("distill_epochs") * student.total
    encode_operations = config.documents * flops.forward(shape, tokens=config.tokens)
    work = {
        "train": config.pairs * (query + (1 + constant("hard_negatives")) * document),
        "distil": config.pairs * distill_operations,
        "encode": encode_operations / constant("encode_share"),
    }
    gpu = GPUS[config.gpu]
    phases = {}
    for name, operations in work.items():
        hours = operations / (gpu.peak * config.mfu) / 3600
        phases[name] = {"gpu_hours": hours, "days": hours / config.gpus / 24, "cost": hours * gpu.price}
    return phases


def _training_bytes(config: PlanConfig, shape: Shape) -> float:
    """Compute the bytes on one GPU that do not depend on the batch, sharded over several GPUs."""
    lora = Lora(rank=config.lora) if config.lora else None
    return training_state(
        Fsdp2() if config.gpus > 1 else Ddp(),
        Optimizer(),
        trained=2 * (adapter_parameters(shape, lora) if lora else shape.parameters),
        frozen=shape.parameters if lora else 0,  # the adapters of both towers share one base
        frozen_tables=shape.embedding_parameters if lora else 0,
        largest=shape.embedding_parameters + 2 * shape.layer_parameters,
        gpus=config.gpus,
        numbers="bfloat16" if config.gpus > 1 else "autocast",
    ).total


def _index(config: PlanConfig, name: str) -> Figures:
    """Compute the bytes of the index in a family, and the time of a scan on one core."""
    family = {key: entry["value"] for key, entry in CONSTANTS["families"][name].items()}
    measured_dim = constant("index_dimensions")
    document = family["bytes"] + family["bytes_per_dimension"] * (config.dim - measured_dim)
    # A searcher holds ids and filters of a document in addition to its vector.
    row = document + constant("searcher_bytes") - constant("searcher_vector_bytes")
    growth = config.documents / constant("index_documents")
    growth = growth if name == "flat" else sqrt(growth)
    texts = config.documents * constant("text_bytes") * constant("index_versions")
    return {
        "recall": family["recall"],
        "document_bytes": document,
        "row_bytes": row,
        "gb": config.documents * row / 1e9,
        "texts_gb": texts / 1e9,  # of all shards: each searcher has a copy of the texts of its shards
        "scan_us": family["us"] * growth * config.dim / measured_dim,
    }


def _searchers(config: PlanConfig, memory: int, index: Figures) -> Figures:
    """Compute nodes of `memory` GB: enough shards to hold the index, enough replicas for the queries."""
    cores = memory / constant("gb_per_core")
    index_gb = index["gb"] * constant("index_versions")
    shards = _round_up(index_gb / (memory * constant("usable_memory")))
    more_us = (constant("index_us_four_shards") - constant("index_us_one")) / 3  # of one more shard
    shard_ms = (index["scan_us"] + more_us * (shards - 1)) / shards / 1000
    busy_cores = config.qps * shard_ms / 1000 / constant("busy")
    replicas = max(float(config.replicas), _round_up(busy_cores / cores))
    # A request through replicas needs two calls more than a request that the gateway itself answers.
    machine = constant("gateway_cores")
    call_s = (machine / constant("gateway_rate") - machine / constant("gateway_rate_in_process")) / 2
    fan_out = config.qps * call_s * (shards - 1) / constant("busy")
    month = (shards * replicas * cores + fan_out) * core_price() * MONTH_HOURS
    figures = {"cores": cores, "shards": shards, "replicas": replicas, "nodes": shards * replicas}
    return figures | {"shard_ms": shard_ms, "fan_out_cores": fan_out, "month": month}


def _serving(config: PlanConfig) -> dict[str, Figures]:
    """Compute the numbers of query encoders and gateways.

    Query encoders run at the rate measured for their form, in proportion to the tokens of a query. This is
    inaccurate far from the measured length, because part of the time is constant: 4 tokens take 0.5 of the
    time of 13, not 0.3. The CPU time of a gateway includes the load generator and the search.
    """
    queries_per_core = constant(f"encoder_rate_{config.query_tower}") * constant("encoder_tokens")
    requests_per_core = constant("gateway_rate") / constant("gateway_cores")
    return {
        "query encoders": _processes(config, config.qps * config.query_tokens / queries_per_core),
        "gateways": _processes(config, config.qps / requests_per_core),
    }


def _processes(config: PlanConfig, working_cores: float) -> Figures:
    """Compute a number of processes with one core each; `working_cores` cores are busy all the time."""
    count = max(float(config.replicas), _round_up(working_cores / constant("busy")))
    return {"count": count, "month": count * core_price() * MONTH_HOURS}


def core_price() -> float:
    """Compute the price of a core and its memory, in US dollars per hour."""
    return constant("core_price") + constant("gb_per_core") * constant("memory_price")


def _round_up(value: float) -> float:
    """Round up; the factor prevents a rounding error from adding one."""
    return float(ceil(value * (1 - 1e-12)))


def stage_figures(costs: Mapping[str, Any], *, documents: int, units: int = 0) -> Figures:
    """Compute the figures of a stage: a + b·documents·passes + c·units + d·documents·units by [a, b, c, d].

    Args:
        costs: costs of the stage, an entry of "stages" in constants.json.
        documents: number of documents of the corpus.
        units: number of queries or codes, with which the work of the stage also grows.
    """
    passes = ceil(units / costs["units_per_pass"]) if costs["units_per_pass"] else 1
    figures = {}
    for name in STAGE_FIGURES:
        fixed, document, unit, pair = costs[name]
        times = 1 if name == "driver GB" else passes  # one driver runs all passes
        figures[name] = float(fixed + document * documents * times + unit * units + pair * documents * units)
    return figures


def stage_costs(config: PlanConfig) -> dict[str, Figures]:
    """Compute the costs of every measured stage; work that grows with the corpus uses all cores evenly.

    Work and bytes of texts grow with the tokens of a document, those of embeddings with the dimension.
    """
    queries = config.queries or max(config.pairs // 10, 1)
    units = {"queries": queries, "codes": int(constant("semantic_codes"))}
    times = {
        "texts": config.tokens / constant("stage_tokens"),
        "embeddings": config.dim / constant("stage_dimensions"),
    }
    stages = {}
    for name, costs in CONSTANTS["stages"].items():
        figures = stage_figures(costs, documents=config.documents, units=units.get(costs["units"], 0))
        scale, fixed = times[costs["rows"]], costs["seconds"][0]
        growing = (figures["seconds"] - fixed) * constant("stage_cores") * scale
        core_hours = (growing + fixed) / 3600
        stages[name] = {
            "core_hours": core_hours,
            "hours": (growing / config.cores + fixed) / 3600,
            "read_gb": figures["read MB"] * scale / 1e3,
            "written_gb": figures["written MB"] * scale / 1e3,
            "requests": figures["requests"],
            "cost": core_hours * core_price() + figures["requests"] / 1e6 * constant("request_price"),
            "driver_gb": figures["driver GB"],
        }
    return stages


def plan_text(planned: Mapping[str, Any]) -> str:
    """Format the plan as text: figures, assumptions, and notes on poor fits and unmeasured cases."""
    text = reports.render(
        "plan.txt",
        plan=planned,
        config=planned["config"],
        fields=PlanConfig.model_fields,
        constants=CONSTANTS["constants"],
        gpu=GPUS[planned["config"].gpu],
    )
    return reports.align_columns(text, label=36, cell=14)
