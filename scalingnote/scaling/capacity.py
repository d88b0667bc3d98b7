"""The plan of a whole system: GPU hours, bytes, machines and money for a corpus and its traffic.

    PlanConfig ─► operations ─► GPU hours · documents ─► offline stages, storage, index ─► searchers, gateways

All arithmetic is formulas of a :class:`Ledger`, so `plan --explain` prints exactly what was computed, with
constants and their sources. Scan times beyond the measured million documents are an assumption: with
4·sqrt(documents) inverted lists, of which as many are probed as at a million, they grow with sqrt(documents).
"""

from dataclasses import dataclass
from math import isqrt
from pathlib import Path

from scalingnote.models import flops
from scalingnote.models.config import Lora, Pretrained, Scratch
from scalingnote.models.flops import Shape, adapter_parameters, backbone_shape
from scalingnote.scaling import constants, training_cost
from scalingnote.scaling.config import PlanConfig
from scalingnote.scaling.constants import FAMILIES, Constant, IndexFamily, Ledger, PlanStep, StatedSource
from scalingnote.scaling.stage_costs import StageCost, stage_costs
from scalingnote.scaling.training_cost import GIB, GPUS, TowerInput
from scalingnote.train.config import Ddp, Fsdp2, Optimizer

VIEWS = 3  # embeddings of a document in training (ScalingNote, section 3.2)
STUDENT = Scratch(  # the published query tower (Table 8): RED Bert-4L
    architecture="bert", layers=4, hidden=768, heads=12, intermediate=3072, vocabulary=84_522
)
BYTES_PER_NUMBER = {"float16": 2, "int8": 1}
GATEWAY_MAX_DOCUMENTS = 2_000_000  # up to which a gateway holds the index itself (docs/guides/serve.md)
TRAINING_POINTS_PER_LIST = 39
MAX_TRAIN_DOCUMENTS = 4_000_000  # index.train_documents, unless it is set
MONTH_HOURS = 730
CORE_HOUR = "{core price} + {GB of memory a core} × {memory price}"  # US dollars


@dataclass(frozen=True)
class GpuPhase:
    """Work on GPUs that is done once."""

    name: str
    operations: float
    gpu_hours: float
    days: float
    cost: float


@dataclass(frozen=True)
class EmbeddingStorage:
    """Embeddings of all documents at one dimension."""

    dim: int
    gb: dict[str, float]  # by type of number
    month: float  # US dollars, of the first type


@dataclass(frozen=True)
class SearcherFleet:
    """Nodes of one size that hold and search the index."""

    node_gb: int
    cores: float  # of a node
    shards: float
    replicas: float  # of each shard
    nodes: float
    shard_ms: float  # of one core, for a query in each shard
    fan_out_cores: float  # of gateways, for calls to shards beyond the first
    month: float  # US dollars, with those cores


@dataclass(frozen=True)
class ReplicaFleet:
    """Processes of one core each."""

    name: str
    count: float
    month: float  # US dollars


@dataclass(frozen=True)
class IndexPlan:
    """The index in the family that is cheapest at the requested recall."""

    family: IndexFamily
    document_bytes: float  # of vectors and ids
    row_bytes: float  # with what is shown of a document
    gb: float  # of one version
    sizes: tuple[SearcherFleet, ...]
    best: SearcherFleet


@dataclass(frozen=True)
class CapacityPlan:
    """The result; money in US dollars."""

    config: PlanConfig
    shape: Shape
    phases: tuple[GpuPhase, ...]
    offline: tuple[StageCost, ...]
    stored: tuple[EmbeddingStorage, ...]
    index: IndexPlan
    serving: tuple[ReplicaFleet, ...]
    once: float
    month: float
    notes: tuple[str, ...]
    steps: tuple[PlanStep, ...]
    constants: tuple[Constant, ...]


def plan(config: PlanConfig) -> CapacityPlan:
    """Compute the plan.

    Raises:
        ConfigError: the model's shape is not known offline.
    """
    folder = Path(config.model)
    shape = backbone_shape(
        Pretrained(path=str(folder.parent) if folder.name == "config.json" else config.model)
    )
    ledger = Ledger(config)
    phases = _phases(ledger, config, shape)
    stored = tuple(_storage(ledger, dim) for dim in config.dims)
    index = _cheapest_index(ledger, config)
    serving = (_encoders(ledger, config), _gateways(ledger))
    offline = stage_costs(
        documents=config.documents,
        tokens=config.tokens,
        dim=config.dims[-1],
        cores=config.nodes * config.node_cores,
        core_price=config.core_price + constants.GB_A_CORE.value * config.memory_price,
        request_price=config.request_price,
    )
    return CapacityPlan(
        config=config,
        shape=shape,
        phases=phases,
        offline=tuple(offline),
        stored=stored,
        index=index,
        serving=serving,
        once=sum(phase.cost for phase in phases) + sum(stage.cost for stage in offline),
        month=stored[-1].month + index.best.month + sum(part.month for part in serving),
        notes=tuple(_notes(config, shape, index)),
        steps=tuple(ledger.steps),
        constants=tuple(ledger.constants),
    )


def _phases(ledger: Ledger, config: PlanConfig, shape: Shape) -> tuple[GpuPhase, ...]:
    peak, price = f"peak of an {config.gpu}", "gpu price"
    dense = StatedSource("maker", "dense bfloat16 operations a second")
    ledger.add(Constant(peak, GPUS[config.gpu].peak, "1/s", dense))
    if config.gpu_price is None:
        price = f"price of an {config.gpu} hour"
        public = StatedSource("assumed", "of the order of public offers without commitment (--gpu-price)")
        ledger.add(Constant(price, constants.GPU_PRICES[config.gpu], "USD", public))
    _count_operations(ledger, config, shape)
    distil = "{pairs} × {operations of the teacher's query}"
    if config.query_tower != "lookup":  # a table has no matrix products
        distil = (
            "{pairs} × ({operations of the teacher's query} + "
            "{distill epochs} × {operations of a student's query})"
        )

    def phase(name: str, work: str, speed: str) -> GpuPhase:
        return GpuPhase(
            name,
            ledger.step(f"operations to {name}", "", work),
            ledger.step(f"GPU hours to {name}", "hours", f"{{operations to {name}}} / {{{speed}}} / 3,600"),
            ledger.step(f"days to {name}", "days", f"{{GPU hours to {name}}} / {{gpus}} / 24"),
            ledger.step(f"cost to {name}", "USD", f"{{GPU hours to {name}}} × {{{price}}}"),
        )

    speed, encode_speed = "operations a second of a GPU", "the same in an encode job"
    ledger.step(speed, "1/s", f"{{{peak}}} × {{MFU}}")
    train = phase("train", "{pairs} × {operations of a training pair}", speed)
    distillation = phase("distil", distil, speed)
    kept = "{share of a bare loop's speed that the encode job keeps}"
    ledger.step(encode_speed, "1/s", f"{{{speed}}} × {kept}")
    return train, distillation, phase("encode", "{documents} × {operations of a document}", encode_speed)


def _count_operations(ledger: Ledger, config: PlanConfig, shape: Shape) -> None:
    """Add the operations of a training pair, a distilled query and an encoded document to the ledger."""
    lora = Lora(rank=config.lora) if config.lora else None
    rows, dim, query_tokens = 1 + config.negatives, config.dims[-1], config.query_tokens
    weights = f"{shape.layers * shape.layer_weights:,} weights"
    student = backbone_shape(STUDENT)
    learns = f"adapters of rank {config.lora} learn" if lora else "all weights learn"
    pair = training_cost.pair_work(
        TowerInput(shape, query_tokens, lora=lora),
        TowerInput(shape, config.tokens, rows=rows, pooled=VIEWS, lora=lora),
        dim=dim,
        checkpointing=True,
    )

    def add(name: str, operations: float, how: str, *inputs: str) -> None:
        source = StatedSource("counted", f"models/flops.py, {how}")
        ledger.add(Constant(f"operations of {name}", operations, "", source), *inputs)

    add(
        "a training pair",
        pair.total,
        f"row: {weights}, rows of {query_tokens:g} and {rows} x {config.tokens:g} tokens, {learns}, "
        "activations recomputed",
        *("query tokens", "tokens", "negatives"),
    )
    add(
        "the teacher's query",
        flops.forward(shape, tokens=query_tokens),
        f"forward: {weights}, {query_tokens:g} tokens",
        "query tokens",
    )
    add(
        "a student's query",
        flops.row(student, tokens=query_tokens, pooled=1, dim=dim).total,
        f"row: {student.layers} layers of {student.hidden}, {query_tokens:g} tokens",
    )
    add(
        "a document",
        flops.forward(shape, tokens=config.tokens),
        f"forward: {weights}, {config.tokens:g} tokens",
        "tokens",
    )


def _storage(ledger: Ledger, dim: int) -> EmbeddingStorage:
    gb = {
        kind: ledger.step(
            f"{kind} embeddings of {dim} dimensions", "GB", f"{{documents}} × {dim * size:,} / 1e9"
        )
        for kind, size in BYTES_PER_NUMBER.items()
    }
    month = ledger.step(
        f"their storage a month, {dim} dimensions",
        "USD",
        f"{{{next(iter(gb))} embeddings of {dim} dimensions}} × {{storage price}}",
    )
    return EmbeddingStorage(dim, gb, month)


def _cheapest_index(ledger: Ledger, config: PlanConfig) -> IndexPlan:
    """The cheapest family and node size at the requested recall."""
    # Exhaustive search has a recall of 1, so at least one family qualifies.
    qualified = [family for family in FAMILIES if family.recall.value >= config.recall]
    cheapest = min(qualified, key=lambda family: _index(Ledger(config), config, family).best.month)
    return _index(ledger, config, cheapest)


def _index(ledger: Ledger, config: PlanConfig, family: IndexFamily) -> IndexPlan:
    for constant in (family.recall, family.size, family.width, family.time):
        ledger.add(constant)
    ledger.step(f"recall@100 of {family.label}", "", "{recall@100 measured}")
    document_bytes = ledger.step(
        "index bytes a document",
        "bytes",
        "{bytes a document at 128 dimensions} + "
        "{bytes a dimension} × ({dimensions} - {dimensions measured on})",
    )
    row_bytes = ledger.step(
        "bytes a document in a searcher",
        "bytes",
        "{index bytes a document} + {bytes of its id, title and snippet}",
    )
    gb = ledger.step("index", "GB", "{documents} × {bytes a document in a searcher} / 1e9")
    growth = "{documents} / {documents measured on}"
    ledger.step("growth of a scan", "times", growth if family.exhaustive else f"sqrt({growth})")
    ledger.step(
        "scan of a query, one core",
        "µs",
        "{µs a query at a million documents} × {growth of a scan} × {dimensions} / {dimensions measured on}",
    )
    ledger.step("cost of one more shard", "µs", "({µs in four shards apart} - {µs in one index}) / 3")
    ledger.step("price of a core with its memory", "USD an hour", CORE_HOUR)
    # The request through replicas makes two calls more than one that is answered inside its gateway.
    ledger.step(
        "core seconds of a call to a replica",
        "s",
        "({cores of that machine} / {requests a second through replicas of their own} - "
        "{cores of that machine} / {requests a second inside a gateway}) / 2",
    )
    sizes = tuple(_searchers(ledger, memory) for memory in config.node_memory)
    best = min(sizes, key=lambda size: (size.month, size.nodes))
    return IndexPlan(family, document_bytes, row_bytes, gb, sizes, best)


def _searchers(ledger: Ledger, memory: int) -> SearcherFleet:
    """Nodes of `memory` GB: shards so that the index fits, replicas so that the queries are answered."""
    on = f"on nodes of {memory} GB"

    def step(name: str, unit: str, formula: str) -> float:
        return ledger.step(f"{name} {on}", unit, formula.replace("@", on))

    open_versions = "{index} × {index versions held open}"
    usable = f"({memory:,} × {{share of a node's memory for the index}})"
    cores = step("cores", "cores", f"{memory:,} / {{GB of memory a core}}")
    shards = step("shards", "shards", f"ceil({open_versions} / {usable})")
    query_ms = step(
        "core ms a query in each shard",
        "ms",
        "({scan of a query, one core} + {cost of one more shard} × ({shards @} - 1)) / {shards @} / 1,000",
    )
    step(
        "cores that search a shard",
        "cores",
        "{queries a second} × {core ms a query in each shard @} / 1,000 / {busy share of a core}",
    )
    replicas = step(
        "replicas of a shard",
        "replicas",
        "max({replicas}, ceil({cores that search a shard @} / {cores @}))",
    )
    nodes = step("searchers", "nodes", "{shards @} × {replicas of a shard @}")
    fan_out = step(
        "cores to fan out",
        "cores",
        "{queries a second} × {core seconds of a call to a replica} × ({shards @} - 1) / "
        "{busy share of a core}",
    )
    month = step(
        "searchers a month",
        "USD",
        "({searchers @} × {cores @} + {cores to fan out @}) × {price of a core with its memory} × "
        f"{MONTH_HOURS}",
    )
    return SearcherFleet(memory, cores, shards, replicas, nodes, query_ms, fan_out, month)


def _encoders(ledger: Ledger, config: PlanConfig) -> ReplicaFleet:
    """Query encoders at the rate measured for their form, in proportion to the tokens of a query.

    That holds for lookup tables too: most of their time is tokenization. It is rough far from the measured
    length, because part of the time does not grow: 4 tokens take 0.5 of the time of 13, not 0.3.
    """
    measured = constants.ENCODERS[config.query_tower]
    ledger.add(measured)
    rate = "queries a second of one core, at their length"
    formula = f"{{{measured.name}}} × {{tokens of a query that encoders were measured on}} / {{query tokens}}"
    ledger.step(rate, "1/s", formula)
    return _replicas(ledger, "query encoders", f"{{queries a second}} / {{{rate}}}")


def _gateways(ledger: Ledger) -> ReplicaFleet:
    """Gateways at the CPU time a request took on the measured machine, load generator and search included."""
    seconds = "core seconds a request, all processes"
    formula = "{cores of that machine} / {requests a second through replicas of their own}"
    ledger.step(seconds, "s", formula)
    return _replicas(ledger, "gateways", f"{{queries a second}} × {{{seconds}}}")


def _replicas(ledger: Ledger, name: str, busy_cores: str) -> ReplicaFleet:
    """Processes of one core each; `busy_cores` is the formula of the cores that work all the time."""
    ledger.step(f"cores of {name}", "cores", f"{busy_cores} / {{busy share of a core}}")
    count = ledger.step(name, "replicas of one core", f"max({{replicas}}, ceil({{cores of {name}}}))")
    month = ledger.step(f"{name} a month", "USD", f"{{{name}}} × ({CORE_HOUR}) × {MONTH_HOURS}")
    return ReplicaFleet(name, count, month)


def _notes(config: PlanConfig, shape: Shape, index: IndexPlan) -> list[str]:
    notes = []
    required, available = _training_state(config, shape), GPUS[config.gpu].memory
    if required > available:
        remedy = "more --gpus" if config.lora else "more --gpus, or --lora 16"
        notes.append(
            f"TRAINING DOES NOT FIT: weights, gradients and optimizer take {required / GIB:.0f} GiB of each "
            f"{config.gpu}'s {available / GIB:.0f}: {remedy}; `scalingnote train --dry-run` counts "
            "activations too"
        )
    if 2.0 * shape.parameters > available:
        notes.append(
            f"ENCODING DOES NOT FIT: weights in bfloat16 take {2 * shape.parameters / GIB:.0f} GiB of an "
            f"{config.gpu}'s {available / GIB:.0f}: choose a larger --gpu or a smaller --model"
        )
    if index.family.exhaustive:
        most = max(family.recall.value for family in constants.FAMILIES if not family.exhaustive)
        notes.append(
            f"recall of {config.recall:g}: settings with inverted lists were measured up to {most:g}, so "
            "every document is compared; a larger nprobe may reach it for less, which nobody measured"
        )
    if config.dims[-1] != constants.MEASURED_DIM.value and not index.family.exhaustive:
        notes.append(
            f"recall was measured at {constants.MEASURED_DIM.value:g} dimensions, with {config.dims[-1]} "
            "nobody measured it: tune an index of your embeddings before you rely on it"
        )
    if config.documents <= GATEWAY_MAX_DOCUMENTS:
        notes.append(
            f"up to {GATEWAY_MAX_DOCUMENTS:,} documents a gateway searches by itself, "
            "for less than is planned here"
        )
    elif not index.family.exhaustive:
        notes.append(
            "recall was measured on a million documents; nprobe and refine factor are assumed to keep it"
        )
    lists = 4 * isqrt(config.documents)
    sample = min(lists * TRAINING_POINTS_PER_LIST, config.documents)
    if not index.family.exhaustive and sample > MAX_TRAIN_DOCUMENTS:
        notes.append(
            f"the scan is that of {lists:,} lists: set index.train_documents={sample}, which they are "
            "trained with"
        )
    return notes


def _training_state(config: PlanConfig, shape: Shape) -> float:
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
