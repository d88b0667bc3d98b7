"""The plan of a whole system: a corpus and its traffic go in, GPU hours, bytes, machines and money out.

    PlanConfig ─► operations ─► GPU hours · documents ─► storage, index ─► searchers, encoders, gateways

All arithmetic goes through a Ledger, so every figure can be traced to its constants and their sources.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path

from scalingnote.models import flops as tower_flops
from scalingnote.models.config import Lora, Pretrained, Scratch
from scalingnote.models.flops import Shape, adapter_parameters, backbone_shape
from scalingnote.scaling import constants, fleet, flops, memory
from scalingnote.scaling.config import PlanConfig
from scalingnote.scaling.constants import Constant, Stated
from scalingnote.scaling.fleet import Index, Replicas
from scalingnote.scaling.flops import Side
from scalingnote.scaling.hardware import GIB, GPUS
from scalingnote.scaling.knobs import knob
from scalingnote.scaling.quantity import Ledger, Quantity, Step, of, plain
from scalingnote.train.config import Ddp, Fsdp2, Optimizer

VIEWS = 3  # embeddings of a document in training (ScalingNote, section 3.2)
STUDENT = Scratch(  # the published query tower (Table 8): RED Bert-4L
    architecture="bert", layers=4, hidden=768, heads=12, intermediate=3072, vocabulary=84_522
)
TYPES = {"float16": 2, "int8": 1}  # bytes
GATEWAY_ALONE = 2_000_000  # documents up to which a gateway holds the index itself (docs/serving.md)
POINTS_PER_LIST = 39  # training documents of an inverted list


@dataclass(frozen=True)
class Phase:
    """Work on GPUs that is done once."""

    name: str
    operations: float
    gpu_hours: float
    days: float
    cost: float


@dataclass(frozen=True)
class Stored:
    """Embeddings of all documents at one dimension; bytes by type of number."""

    dim: int
    gb: dict[str, float]
    month: float  # of the first type


@dataclass(frozen=True)
class Plan:
    """What it all takes; money in US dollars."""

    config: PlanConfig
    shape: Shape
    phases: tuple[Phase, ...]
    stored: tuple[Stored, ...]
    index: Index
    serving: tuple[Replicas, ...]
    once: float
    month: float
    notes: tuple[str, ...]
    steps: tuple[Step, ...]
    constants: tuple[Constant, ...]


def plan(config: PlanConfig) -> Plan:
    """Work it out; ConfigError when the model's shape is not known here."""
    folder = Path(config.model)
    shape = backbone_shape(
        Pretrained(path=str(folder.parent) if folder.name == "config.json" else config.model)
    )
    ledger = Ledger()
    phases = _phases(ledger, config, shape)
    stored = tuple(_stored(ledger, config, dim) for dim in config.dims)
    index = fleet.search(ledger, config)
    serving = (fleet.encoders(ledger, config), fleet.gateways(ledger, config))
    return Plan(
        config=config,
        shape=shape,
        phases=phases,
        stored=stored,
        index=index,
        serving=serving,
        once=sum(phase.cost for phase in phases),
        month=stored[-1].month + index.best.month + sum(part.month for part in serving),
        notes=tuple(_notes(config, shape, index)),
        steps=tuple(ledger.steps),
        constants=tuple(ledger.constants),
    )


def _phases(ledger: Ledger, config: PlanConfig, shape: Shape) -> tuple[Phase, ...]:
    peak = GPUS[config.gpu].peak
    maker = Constant(
        f"peak of an {config.gpu}", peak, "1/s", Stated("maker", "dense bfloat16 operations a second")
    )
    speed = ledger.step("operations a second of a GPU", of(maker) * knob(config, "mfu", ""), "1/s")
    pairs = knob(config, "pairs", "pairs")
    query_tokens, tokens = knob(config, "query_tokens", "tokens"), knob(config, "tokens", "tokens")
    lora = Lora(rank=config.lora) if config.lora else None
    query = Side(shape, config.query_tokens, lora=lora)
    document = Side(shape, config.tokens, rows=1 + config.negatives, pooled=VIEWS, lora=lora)
    of_pair = flops.of_pair(query, document, dim=config.dims[-1], checkpointing=True)
    weights = f"{shape.layers * shape.layer_weights:,} weights"
    learnt = f"adapters of rank {config.lora} learn" if lora else "all weights learn"
    train = pairs * _counted(
        "operations of a training pair",
        of_pair.total,
        f"models/flops.py, row: {weights}, rows of {config.query_tokens:g} and {1 + config.negatives} x "
        f"{config.tokens:g} tokens, {learnt}, activations recomputed",
        *(query_tokens, tokens, knob(config, "negatives", "")),
    )
    taught = _counted(
        "operations of the teacher's query",
        tower_flops.forward(shape, tokens=config.query_tokens),
        f"models/flops.py, forward: {weights}, {config.query_tokens:g} tokens",
        query_tokens,
    )
    distil = pairs * taught
    if config.query_tower != "lookup":  # a table has no products to speak of
        student = backbone_shape(STUDENT)
        step = tower_flops.row(student, tokens=config.query_tokens, pooled=1, dim=config.dims[-1])
        learnt_once = _counted(
            "operations of a student's query",
            step.total,
            f"models/flops.py, row: {student.layers} layers of {student.hidden}, "
            f"{config.query_tokens:g} tokens",
        )
        distil = pairs * (taught + knob(config, "distill_epochs", "") * learnt_once)
    encode = knob(config, "documents", "documents") * _counted(
        "operations of a document",
        tower_flops.forward(shape, tokens=config.tokens),
        f"models/flops.py, forward: {weights}, {config.tokens:g} tokens",
        tokens,
    )
    kept = speed * of(constants.ENCODE_KEPT)
    return (
        _phase(ledger, config, "train", train, speed),
        _phase(ledger, config, "distil", distil, speed),
        _phase(ledger, config, "encode", encode, ledger.step("the same in an encode job", kept, "1/s")),
    )


def _phase(ledger: Ledger, config: PlanConfig, name: str, work: Quantity, speed: Quantity) -> Phase:
    operations = ledger.step(f"operations to {name}", work, "")
    hours = ledger.step(f"GPU hours to {name}", operations / speed / plain(3600.0), "hours")
    days = ledger.step(f"days to {name}", hours / knob(config, "gpus", "GPUs") / plain(24.0), "days")
    cost = ledger.step(f"cost to {name}", hours * _gpu_price(config), "USD")
    return Phase(name, operations.value, hours.value, days.value, cost.value)


def _gpu_price(config: PlanConfig) -> Quantity:
    if config.gpu_price is not None:
        return knob(config, "gpu_price", "USD")
    why = "of the order of public offers without commitment (--gpu-price)"
    price = constants.GPU_PRICES[config.gpu]
    return of(Constant(f"price of an {config.gpu} hour", price, "USD", Stated("assumed", why)))


def _counted(name: str, operations: float, how: str, *inputs: Quantity) -> Quantity:
    counted = of(Constant(name, operations, "", Stated("counted", how)))
    # What was counted with is listed beside the count.
    return replace(counted, constants=(*counted.constants, *(one for q in inputs for one in q.constants)))


def _stored(ledger: Ledger, config: PlanConfig, dim: int) -> Stored:
    documents = knob(config, "documents", "documents")
    sizes = {
        kind: ledger.step(
            f"{kind} embeddings of {dim} dimensions", documents * plain(float(dim * wide)) / plain(1e9), "GB"
        )
        for kind, wide in TYPES.items()
    }
    first = next(iter(sizes.values()))
    price = ledger.step(
        f"their storage a month, {dim} dimensions", first * knob(config, "storage_price", "USD"), "USD"
    )
    return Stored(dim, {kind: size.value for kind, size in sizes.items()}, price.value)


def _notes(config: PlanConfig, shape: Shape, index: Index) -> Sequence[str]:
    notes = []
    held, has = _training_state(config, shape), GPUS[config.gpu].memory
    if held > has:
        remedy = "more --gpus" if config.lora else "more --gpus, or --lora 16"
        notes.append(
            f"TRAINING DOES NOT FIT: weights, gradients and optimizer take {held / GIB:.0f} GiB of each "
            f"{config.gpu}'s {has / GIB:.0f}: {remedy}; `scalingnote train --dry-run` counts activations too"
        )
    if 2.0 * shape.parameters > has:
        notes.append(
            f"ENCODING DOES NOT FIT: weights in bfloat16 take {2 * shape.parameters / GIB:.0f} GiB of an "
            f"{config.gpu}'s {has / GIB:.0f}: choose a larger --gpu or a smaller --model"
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
    if config.documents <= GATEWAY_ALONE:
        notes.append(
            f"up to {GATEWAY_ALONE:,} documents a gateway searches by itself, for less than is planned here"
        )
    elif not index.family.exhaustive:
        notes.append(
            "recall was measured on a million documents; nprobe and refine factor are assumed to keep it"
        )
    lists = 4 * isqrt(config.documents)
    if not index.family.exhaustive and lists * POINTS_PER_LIST > 200_000:
        sample = min(lists * POINTS_PER_LIST, config.documents)
        notes.append(
            f"the scan is that of index.nlist={lists} trained with index.train_documents={sample}: set both"
        )
    return notes


def _training_state(config: PlanConfig, shape: Shape) -> float:
    """Bytes of one GPU that do not depend on the batch, sharded where there are several GPUs."""
    lora = Lora(rank=config.lora) if config.lora else None
    trained = 2 * (adapter_parameters(shape, lora) if lora else shape.parameters)
    return memory.state(
        Fsdp2() if config.gpus > 1 else Ddp(),
        Optimizer(),
        trained=trained,
        frozen=shape.parameters if lora else 0,  # both adapters stand on one base
        frozen_tables=shape.embedding_parameters if lora else 0,
        largest=shape.embedding_parameters + 2 * shape.layer_parameters,
        gpus=config.gpus,
        numbers="bfloat16" if config.gpus > 1 else "autocast",
    ).total
