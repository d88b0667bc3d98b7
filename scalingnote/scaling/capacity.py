"""The plan of a whole system: GPU hours, bytes, machines and money for a corpus and its traffic.

    PlanConfig ─► operations ─► GPU hours · documents ─► offline stages, storage, index ─► searchers, gateways

Every figure is arithmetic on floats; beside it stands the line that `plan --explain` prints, which a test
evaluates. Scan times beyond the measured million documents are an assumption: with 4·sqrt(documents) inverted
lists, of which as many are probed as at a million, they grow with sqrt(documents).

What an offline stage takes lies on the straight line through its two largest runs of benchmarks/scale.py, as
every stage works part by part; ranking and mining also take time for each query and document, semantic IDs
for each centroid and document, by runs that differ in these. The measured documents have 18 words and
embeddings of 32 dimensions: work and bytes of texts are multiplied by a corpus's tokens / 18, those of
embeddings by its dimensions / 32.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from scalingnote.models import flops
from scalingnote.models.config import Lora, Pretrained, Scratch
from scalingnote.models.flops import Shape, adapter_parameters, backbone_shape
from scalingnote.reports import four_digits
from scalingnote.scaling import config as known
from scalingnote.scaling import training_cost
from scalingnote.scaling.config import FAMILIES, Constant, IndexFamily, PlanConfig
from scalingnote.scaling.training_cost import GPUS, TowerInput
from scalingnote.train.config import Ddp, Fsdp2, Optimizer

VIEWS = 3  # embeddings of a document in training (ScalingNote, section 3.2)
STUDENT = Scratch(  # the published query tower (Table 8): RED Bert-4L
    architecture="bert", layers=4, hidden=768, heads=12, intermediate=3072, vocabulary=84_522
)
BYTES_PER_NUMBER = {"float16": 2, "int8": 1}
MONTH_HOURS = 730
MEASURED_TOKENS, MEASURED_STAGE_DIM, MEASURED_CORES = 18, 32, 2  # of stage_costs.json
VECTOR_STAGES = ("quantize", "index", "mine", "evaluate")  # the rows of other stages are texts
FIGURES = ("seconds", "driver GB", "read MB", "written MB", "requests")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """What the work of a stage grows with beside the documents: a column of its measured runs."""

    name: str
    per_pass: int | None = None  # so many of them read all documents once; None: however many

    def passes(self, count: int) -> int:
        """How often the documents are read."""
        return 1 if self.per_pass is None else ceil(count / self.per_pass)


AXES = {
    "collect (BM25)": Axis("queries"),
    "mine": Axis("queries", known.QUERIES_PER_PASS),
    "quantize": Axis("codes"),  # levels times codes of a level
}


@dataclass(frozen=True)
class CapacityPlan:
    """The result; rows are figures by name, money is in US dollars.

    phases    operations, gpu_hours, days, cost of work on GPUs that is done once
    offline   core_hours, hours (on all nodes), read_gb, written_gb, requests, cost, driver_gb of a stage
    stored    of a dimension: GB by type of number, and a month's cost of the first type
    sizes     searchers on nodes of one size; `best` is the cheapest
    serving   processes of one core each, by name
    """

    config: PlanConfig
    shape: Shape
    phases: dict[str, dict[str, float]]
    offline: dict[str, dict[str, float]]
    stored: dict[int, dict[str, float]]
    family: IndexFamily
    index: dict[str, float]
    sizes: dict[int, dict[str, float]]
    serving: dict[str, dict[str, float]]
    once: float
    month: float
    steps: list[str]
    constants: list[Constant]

    @property
    def best(self) -> int:
        """GB of the cheapest nodes for searchers."""
        return min(self.sizes, key=lambda gb: (self.sizes[gb]["month"], self.sizes[gb]["nodes"]))


class Steps:
    """The lines of `--explain`: every step with its numbers and their names."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, value: float, unit: str, line: str) -> float:
        """Add "name = formula" and its value; returns the value."""
        self.lines.append(f"{line} = {n(value)} {unit}".rstrip())
        return value


def n(value: float | int) -> str:
    """A number as `--explain` prints it."""
    return four_digits(float(value))


def plan(config: PlanConfig) -> CapacityPlan:
    """Compute the plan; ConfigError if the model's shape is not known offline."""
    folder = Path(config.model)
    path = str(folder.parent) if folder.name == "config.json" else config.model
    shape, steps = backbone_shape(Pretrained(path=path)), Steps()
    work = _operations(config, shape)
    phases = _phases(config, work, steps)
    stored = {dim: _storage(config, dim, steps) for dim in config.dims}
    # Exhaustive search has a recall of 1, so at least one family qualifies.
    qualified = [family for family in FAMILIES if family.recall.value >= config.recall]
    tried = {family: _index(config, family, Steps()) for family in qualified}
    family = min(qualified, key=lambda one: min(size["month"] for size in tried[one][1].values()))
    index, sizes = _index(config, family, steps)
    serving = {"query encoders": _encoders(config, steps), "gateways": _gateways(config, steps)}
    offline = stage_costs(config)
    searchers = min(size["month"] for size in sizes.values())
    return CapacityPlan(
        config=config,
        shape=shape,
        phases=phases,
        offline=offline,
        stored=stored,
        family=family,
        index=index,
        sizes=sizes,
        serving=serving,
        once=sum(row["cost"] for row in (*phases.values(), *offline.values())),
        month=stored[config.dims[-1]]["month"] + searchers + sum(row["month"] for row in serving.values()),
        steps=steps.lines,
        constants=_constants(config, family, work),
    )


def _constants(config: PlanConfig, family: IndexFamily, work: dict[str, Constant]) -> list[Constant]:
    """The constants of a plan, in the order in which it uses them."""

    def option(name: str, unit: str = "", label: str = "") -> Constant:
        flag, why = f"--{name.replace('_', '-')}", PlanConfig.model_fields[name].description
        value = getattr(config, name)
        source = f"given: {flag}: {why}" if name in config.model_fields_set else f"assumed: {why} ({flag})"
        number = float(value[-1] if isinstance(value, tuple) else value)
        return Constant(label or name.replace("_", " "), number, unit, source)

    price = Constant(
        f"price of an {config.gpu} hour",
        known.GPU_PRICES[config.gpu],
        "USD",
        "assumed: of the order of public offers without commitment (--gpu-price)",
    )
    maker = "maker: dense bfloat16 operations a second"
    peak = Constant(f"peak of an {config.gpu}", GPUS[config.gpu].peak, "1/s", maker)
    pair = [peak, option("mfu", label="MFU"), option("pairs", "pairs"), work["pair"]]
    tokens = [option("query_tokens", "tokens"), option("tokens", "tokens"), option("negatives")]
    searched = [
        Constant(
            "queries that are ranked and mined for",
            float(config.train_queries),
            "queries",
            "given: --queries"
            if "queries" in config.model_fields_set
            else "assumed: a tenth of the pairs (--queries)",
        ),
        option("levels", label="levels of semantic IDs"),
        option("codes", label="codes of a level"),
    ]
    gpus = [option("gpus", "GPUs"), price if config.gpu_price is None else option("gpu_price", "USD")]
    student = [] if config.query_tower == "lookup" else [option("distill_epochs"), work["student"]]
    encoding = [
        work["query"],
        *student,
        known.ENCODE_KEPT,
        option("documents", "documents"),
        work["document"],
    ]
    storage = [option("storage_price", "USD"), option("dims", label="dimensions")]
    vectors = [family.recall, family.size, family.width, known.MEASURED_DIM, family.time]
    rows = [known.RESERVED_BYTES, known.VECTOR_BYTES, known.SHOWN_BYTES]
    shards = [known.MEASURED_DOCUMENTS, known.FOUR_SHARDS, known.ONE_INDEX]
    cores = [option("core_price", "USD"), known.GB_A_CORE, option("memory_price", "USD")]
    calls = [known.GATEWAY_CORES, known.GATEWAY_RATE, known.GATEWAY_ALONE_RATE]
    searchers = [known.VERSIONS, known.USABLE, option("qps", "1/s", "queries a second")]
    replicas = [known.BUSY, option("replicas"), known.ENCODERS[config.query_tower], known.ENCODER_TOKENS]
    once = [*pair, *tokens, *gpus, *encoding, *searched]
    return [*once, *storage, *vectors, *rows, *shards, *cores, *calls, *searchers, *replicas]


def _operations(config: PlanConfig, shape: Shape) -> dict[str, Constant]:
    """Operations of a training pair, a distilled query and an encoded document."""
    lora = Lora(rank=config.lora) if config.lora else None
    rows, dim, query_tokens = 1 + config.negatives, config.dims[-1], config.query_tokens
    weights, student = f"{shape.layers * shape.layer_weights:,} weights", backbone_shape(STUDENT)
    learns = f"adapters of rank {config.lora} learn" if lora else "all weights learn"
    pair = training_cost.pair_work(
        TowerInput(shape, query_tokens, lora=lora),
        TowerInput(shape, config.tokens, rows=rows, pooled=VIEWS, lora=lora),
        dim=dim,
        checkpointing=True,
    )

    def counted(name: str, operations: float, how: str) -> Constant:
        return Constant(f"operations of {name}", operations, "", f"counted: models/flops.py, {how}")

    return {
        "pair": counted(
            "a training pair",
            pair.total,
            f"row: {weights}, rows of {query_tokens:g} and {rows} x {config.tokens:g} tokens, {learns}, "
            "activations recomputed",
        ),
        "query": counted(
            "the teacher's query",
            flops.forward(shape, tokens=query_tokens),
            f"forward: {weights}, {query_tokens:g} tokens",
        ),
        "student": counted(
            "a student's query",
            flops.row(student, tokens=query_tokens, pooled=1, dim=dim).total,
            f"row: {student.layers} layers of {student.hidden}, {query_tokens:g} tokens",
        ),
        "document": counted(
            "a document",
            flops.forward(shape, tokens=config.tokens),
            f"forward: {weights}, {config.tokens:g} tokens",
        ),
    }


def _phases(config: PlanConfig, work: dict[str, Constant], steps: Steps) -> dict[str, dict[str, float]]:
    """Training, distillation and encoding on GPUs."""
    price = known.GPU_PRICES[config.gpu] if config.gpu_price is None else config.gpu_price
    pair, query, student, document = (work[name].value for name in ("pair", "query", "student", "document"))
    peak, kept = GPUS[config.gpu].peak, known.ENCODE_KEPT.value

    def phase(name: str, operations: float, formula: str, speed: float) -> dict[str, float]:
        done = steps(operations, "", f"operations to {name} = {formula}")
        hours = done / speed / 3600
        steps(hours, "hours", f"GPU hours to {name} = {n(done)} operations / {n(speed)} a second / 3,600")
        days, cost = hours / config.gpus / 24, hours * price
        steps(days, "days", f"days to {name} = {n(hours)} hours / {n(config.gpus)} GPUs / 24")
        steps(cost, "USD", f"cost to {name} = {n(hours)} hours × {n(price)} USD")
        return {"operations": done, "gpu_hours": hours, "days": days, "cost": cost}

    speed = peak * config.mfu
    steps(speed, "1/s", f"operations a second of a GPU = {n(peak)} at its peak × {n(config.mfu)} MFU")
    line = f"{n(config.pairs)} pairs × {n(pair)} operations of a training pair"
    train = phase("train", config.pairs * pair, line, speed)
    # A lookup table has no matrix products.
    epochs = 0.0 if config.query_tower == "lookup" else config.distill_epochs
    line = f"{n(config.pairs)} pairs × {n(query)} operations of the teacher's query"
    if epochs:
        line = (
            f"{n(config.pairs)} pairs × ({n(query)} operations of the teacher's query + {n(epochs)} epochs × "
            f"{n(student)} operations of a student's query)"
        )
    distil = phase("distil", config.pairs * (query + epochs * student), line, speed)
    encode_speed = steps(
        speed * kept, "1/s", f"the same in an encode job = {n(speed)} × {n(kept)} of a bare loop's speed"
    )
    line = f"{n(config.documents)} documents × {n(document)} operations of a document"
    encode = phase("encode", config.documents * document, line, encode_speed)
    return {"train": train, "distil": distil, "encode": encode}


def _storage(config: PlanConfig, dim: int, steps: Steps) -> dict[str, float]:
    """GB of embeddings by type of number, and a month's cost of the first type."""
    gb = {kind: config.documents * dim * size / 1e9 for kind, size in BYTES_PER_NUMBER.items()}
    for kind, size in BYTES_PER_NUMBER.items():
        line = f"{n(config.documents)} documents × {dim * size:,} bytes / 1e9"
        steps(gb[kind], "GB", f"{kind} embeddings of {dim} dimensions = {line}")
    first = next(iter(gb.values()))
    month = first * config.storage_price
    line = f"{n(first)} GB × {n(config.storage_price)} USD"
    return gb | {"month": steps(month, "USD", f"their storage a month, {dim} dimensions = {line}")}


def _index(
    config: PlanConfig, family: IndexFamily, steps: Steps
) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
    """Bytes of the index in a family, and searchers for each size of nodes."""
    dim, measured = config.dims[-1], known.MEASURED_DIM.value
    size, width = family.size.value, family.width.value
    steps(family.recall.value, "", f"recall@100 of {family.label} = {n(family.recall.value)} measured")
    line = f"{n(size)} + {n(width)} a dimension × ({n(dim)} dimensions - {n(measured)} measured)"
    document = steps(size + width * (dim - measured), "bytes", f"index bytes a document = {line}")
    reserved, vectors = known.RESERVED_BYTES.value, known.VECTOR_BYTES.value
    line = f"{n(document)} + {n(reserved)} reserved - {n(vectors)} of vectors: ids and filters"
    row = steps(document + reserved - vectors, "bytes", f"bytes a document in a searcher = {line}")
    gb = config.documents * row / 1e9
    steps(gb, "GB", f"index = {n(config.documents)} documents × {n(row)} bytes / 1e9")
    growth = config.documents / known.MEASURED_DOCUMENTS.value
    line = f"{n(config.documents)} documents / {n(known.MEASURED_DOCUMENTS.value)} measured"
    growth = growth if family.exhaustive else sqrt(growth)
    steps(growth, "times", f"growth of a scan = {line if family.exhaustive else f'sqrt({line})'}")
    time = family.time.value
    line = f"{n(time)} µs at a million × {n(growth)} times × {n(dim)} dimensions / {n(measured)}"
    scan = steps(time * growth * dim / measured, "µs", f"scan of a query, one core = {line}")
    apart, one = known.FOUR_SHARDS.value, known.ONE_INDEX.value
    line = f"({n(apart)} µs in four shards - {n(one)} in one index) / 3"
    shard = steps((apart - one) / 3, "µs", f"cost of one more shard = {line}")
    line = f"{n(config.core_price)} USD + {n(known.GB_A_CORE.value)} GB × {n(config.memory_price)} USD"
    steps(core_price(config), "USD an hour", f"price of a core with its memory = {line}")
    times = {"scan": scan, "shard": shard, "call": _call_seconds(steps)}
    sizes = {memory: _searchers(config, memory, gb, **times, steps=steps) for memory in config.node_memory}
    return {"document_bytes": document, "row_bytes": row, "gb": gb, "texts_gb": _texts(config, steps)}, sizes


def _texts(config: PlanConfig, steps: Steps) -> float:
    """GB that every machine with gateways copies to its disk: the documents, which searchers do not hold."""
    shown, versions = known.SHOWN_BYTES.value, known.VERSIONS.value
    line = f"{n(config.documents)} documents × {n(shown)} bytes × {n(versions)} versions / 1e9"
    gb = config.documents * shown * versions / 1e9
    return steps(gb, "GB", f"documents on the disk of a machine with gateways = {line}")


def _searchers(
    config: PlanConfig, memory: int, gb: float, *, scan: float, shard: float, call: float, steps: Steps
) -> dict[str, float]:
    """Nodes of one size: shards so that the index fits, replicas so that the queries are answered.

    `memory` is that of a node and `gb` that of one version of the index, in GB; `scan` the µs of a query over
    all documents on one core, `shard` those that one more shard adds, `call` the core seconds of a call to a
    replica.
    """
    on, qps, busy, price = f"on nodes of {memory} GB", config.qps, known.BUSY.value, core_price(config)
    versions, usable, core_gb = known.VERSIONS.value, known.USABLE.value, known.GB_A_CORE.value
    cores = steps(memory / core_gb, "cores", f"cores {on} = {memory:,} GB / {n(core_gb)} GB a core")
    shards = _round_up(gb * versions / (memory * usable))
    line = f"ceil({n(gb)} GB × {n(versions)} versions / ({memory:,} GB × {n(usable)} usable))"
    steps(shards, "shards", f"shards {on} = {line}")
    query_ms = (scan + shard * (shards - 1)) / shards / 1000
    line = f"({n(scan)} µs + {n(shard)} µs × ({n(shards)} shards - 1)) / {n(shards)} / 1,000"
    steps(query_ms, "ms", f"core ms a query in each shard {on} = {line}")
    searching = qps * query_ms / 1000 / busy
    line = f"{n(qps)} queries a second × {n(query_ms)} ms / 1,000 / {n(busy)} busy"
    steps(searching, "cores", f"cores that search a shard {on} = {line}")
    replicas = max(float(config.replicas), _round_up(searching / cores))
    line = f"max({config.replicas} at least, ceil({n(searching)} cores / {n(cores)} of a node))"
    steps(replicas, "replicas", f"replicas of a shard {on} = {line}")
    nodes = shards * replicas
    steps(nodes, "nodes", f"searchers {on} = {n(shards)} shards × {n(replicas)} replicas")
    fan_out = qps * call * (shards - 1) / busy
    line = f"{n(qps)} queries a second × {n(call)} s of a call × ({n(shards)} shards - 1) / {n(busy)} busy"
    steps(fan_out, "cores", f"cores to fan out {on} = {line}")
    month = (nodes * cores + fan_out) * price * MONTH_HOURS
    line = f"({n(nodes)} nodes × {n(cores)} cores + {n(fan_out)} cores) × {n(price)} USD × {MONTH_HOURS}"
    steps(month, "USD", f"searchers a month {on} = {line}")
    figures = {"cores": cores, "shards": shards, "replicas": replicas, "nodes": nodes, "shard_ms": query_ms}
    return figures | {"fan_out_cores": fan_out, "month": month}


def core_price(config: PlanConfig) -> float:
    """US dollars of a core's hour with its memory."""
    return config.core_price + known.GB_A_CORE.value * config.memory_price


def _call_seconds(steps: Steps) -> float:
    """Core seconds of a call to a replica.

    A request through replicas makes two calls more than one that is answered inside its gateway.
    """
    cores, apart, inside = (
        one.value for one in (known.GATEWAY_CORES, known.GATEWAY_RATE, known.GATEWAY_ALONE_RATE)
    )
    line = f"({n(cores)} cores / {n(apart)} requests - {n(cores)} cores / {n(inside)} inside a gateway) / 2"
    seconds = (cores / apart - cores / inside) / 2
    return steps(seconds, "s", f"core seconds of a call to a replica = {line}")


def _encoders(config: PlanConfig, steps: Steps) -> dict[str, float]:
    """Query encoders at the rate measured for their form, in proportion to the tokens of a query.

    That holds for lookup tables too: most of their time is tokenization. It is rough far from the measured
    length, because part of the time does not grow: 4 tokens take 0.5 of the time of 13, not 0.3.
    """
    measured, tokens = known.ENCODERS[config.query_tower].value, known.ENCODER_TOKENS.value
    rate = measured * tokens / config.query_tokens
    line = f"{n(measured)} × {n(tokens)} tokens / {n(config.query_tokens)} tokens"
    steps(rate, "1/s", f"queries a second of one core, at their length = {line}")
    return _replicas(config, "query encoders", config.qps / rate, f"{n(config.qps)} / {n(rate)}", steps)


def _gateways(config: PlanConfig, steps: Steps) -> dict[str, float]:
    """Gateways at the CPU time a request took on the measured machine, load generator and search included."""
    cores, rate = known.GATEWAY_CORES.value, known.GATEWAY_RATE.value
    line = f"{n(cores)} cores / {n(rate)} requests a second"
    seconds = steps(cores / rate, "s", f"core seconds a request, all processes = {line}")
    busy = f"{n(config.qps)} queries a second × {n(seconds)} s"
    return _replicas(config, "gateways", config.qps * seconds, busy, steps)


def _replicas(config: PlanConfig, name: str, working: float, line: str, steps: Steps) -> dict[str, float]:
    """Processes of one core each; `working` is the number of cores that work all the time."""
    cores = working / known.BUSY.value
    steps(cores, "cores", f"cores of {name} = {line} / {n(known.BUSY.value)} busy")
    count = max(float(config.replicas), _round_up(cores))
    line = f"max({config.replicas} at least, ceil({n(cores)} cores))"
    steps(count, "replicas of one core", f"{name} = {line}")
    price = core_price(config)
    month = count * price * MONTH_HOURS
    steps(month, "USD", f"{name} a month = {n(count)} cores × {n(price)} USD × {MONTH_HOURS}")
    return {"count": count, "month": month}


def _round_up(value: float) -> float:
    """The next whole number; the factor keeps a rounding error from adding one."""
    return float(ceil(value * (1 - 1e-12)))


def measured(table: str) -> list[Row]:
    """A table of stage_costs.json, as benchmarks/scale.py wrote it: "stages" or "axes"."""
    text = files("scalingnote.scaling").joinpath("stage_costs.json").read_text(encoding="utf-8")
    rows: list[Row] = json.loads(text)[table]
    return rows


def predict(
    rows: Sequence[Row], *, documents: int, beside: Sequence[Row] = (), of: int | None = None
) -> dict[str, float]:
    """Figures of one stage for a corpus of `documents`.

    They lie on the line through the two largest measured sizes. A stage of AXES takes time for each query, or
    centroid, and document as well: what one more takes is fitted to runs that differ in them.

    Args:
        rows: measured at several sizes, with the same number of queries, or of centroids.
        documents: of the corpus.
        beside: runs of the stage with several numbers of them, each at several sizes.
        of: their number; None: that of `rows`.

    Returns:
        Every figure of FIGURES, and ``fixed seconds``, the part of the seconds that does not grow.
    """
    small, large = sorted(rows, key=lambda row: row["documents"])[-2:]
    found = {}
    for figure in FIGURES:
        slope = (large[figure] - small[figure]) / (large["documents"] - small["documents"])
        slope = max(slope, 0.0)  # noise of a stage that does not grow
        fixed = max(large[figure] - slope * large["documents"], 0.0)
        found[figure] = large[figure] + slope * (documents - large["documents"])
        if figure == "seconds":
            found["fixed seconds"] = fixed
        if of is None or figure == "driver GB":  # one driver ran them all
            continue
        axis = AXES[large["stage"]]
        each, pair = _slopes(beside, axis.name, figure)
        base = large[axis.name]
        # The line counts the pairs of its own queries; what is left is done once for each pass.
        once = max(slope - pair * base, 0.0)
        found[figure] += documents * (once * (axis.passes(of) - 1) + pair * (of - base))
        found[figure] = max(found[figure] + each * (of - base), fixed)
    return found


def _slopes(rows: Sequence[Row], name: str, figure: str) -> tuple[float, float]:
    """What one more query, or centroid, adds to a figure: by itself, and for each document.

    Least squares of the relative error, from the runs' differences to the one of their size with the fewest.
    """
    import numpy as np  # late: `plan --help` needs neither
    from scipy.optimize import nnls

    first: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row[name]):
        first.setdefault(row["documents"], row)
    pairs = [(first[row["documents"]], row) for row in rows if row is not first[row["documents"]]]
    more = np.array([row[name] - base[name] for base, row in pairs], np.float64)
    added = np.array([row[figure] - base[figure] for base, row in pairs], np.float64)
    sizes = np.array([row["documents"] for _, row in pairs], np.float64)
    weight = 1 / np.maximum([row[figure] for _, row in pairs], 1e-9)
    scale = np.array([more.max(), (more * sizes).max()])
    features = np.stack([more, more * sizes], axis=1) / scale
    (each, pair), _ = nnls(features * weight[:, None], added * weight)
    return float(each / scale[0]), float(pair / scale[1])


def stage_costs(config: PlanConfig) -> dict[str, dict[str, float]]:
    """What every measured stage takes. Work that grows with the corpus is divided evenly among the cores."""
    cores = config.nodes * config.node_cores
    rows, axes = measured("stages"), measured("axes")
    counts = {"queries": config.train_queries, "codes": config.levels * config.codes}
    costs = {}
    for name in dict.fromkeys(row["stage"] for row in rows):
        found = predict(
            [row for row in rows if row["stage"] == name],
            documents=config.documents,
            beside=[row for row in axes if row["stage"] == name],
            of=counts[AXES[name].name] if name in AXES else None,
        )
        times = config.tokens / MEASURED_TOKENS
        if name in VECTOR_STAGES:
            times = config.dims[-1] / MEASURED_STAGE_DIM
        growing = (found["seconds"] - found["fixed seconds"]) * MEASURED_CORES * times
        core_hours = (growing + found["fixed seconds"]) / 3600
        costs[name] = {
            "core_hours": core_hours,
            "hours": (growing / cores + found["fixed seconds"]) / 3600,
            "read_gb": found["read MB"] * times / 1e3,
            "written_gb": found["written MB"] * times / 1e3,
            "requests": found["requests"],
            "cost": core_hours * core_price(config) + found["requests"] / 1e6 * config.request_price,
            "driver_gb": found["driver GB"],
        }
    return costs


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
