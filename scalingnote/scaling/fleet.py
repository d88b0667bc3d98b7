"""What serves: shards of the index, replicas, query encoders and gateways, for so many queries a second.

    index bytes ─► shards of a node size ─► replicas for the queries ─► the cheapest node size

How time grows beyond the million documents that were measured is an assumption: inverted lists as many as
4·sqrt(documents), of which as many are scanned as at a million, so a scan grows with the square root.
"""

from dataclasses import dataclass

from scalingnote.scaling import constants
from scalingnote.scaling.config import PlanConfig
from scalingnote.scaling.constants import FAMILIES, Family
from scalingnote.scaling.knobs import knob
from scalingnote.scaling.quantity import Ledger, Quantity, of, plain, root, up

MONTH = 730.0  # hours


@dataclass(frozen=True)
class Searchers:
    """Nodes of one size that hold and search the index."""

    node_gb: int
    cores: float  # of a node
    shards: float
    replicas: float  # of each shard
    nodes: float
    shard_ms: float  # that a query takes of one core in each shard
    month: float  # US dollars


@dataclass(frozen=True)
class Replicas:
    """Processes of one core each."""

    name: str
    count: float
    month: float


@dataclass(frozen=True)
class Index:
    """The index in the family that is cheapest at the recall asked for."""

    family: Family
    document_bytes: float
    gb: float  # of one version
    sizes: tuple[Searchers, ...]
    best: Searchers


def search(ledger: Ledger, config: PlanConfig) -> Index:
    """The cheapest family and node size at the recall asked for."""
    # A recall of 1 is what comparing all documents gives, so some family is always left.
    able = [family for family in FAMILIES if family.recall.value >= config.recall]
    tried = [(_index(Ledger(), config, family), family) for family in able]
    cheapest = min(tried, key=lambda one: one[0].best.month)[1]
    return _index(ledger, config, cheapest)


def encoders(ledger: Ledger, config: PlanConfig) -> Replicas:
    """Query encoders, at the rate measured for their form, in proportion to the tokens of a query.

    A table's too: most of its time goes into making tokens of the words. Rough far from the length that was
    measured, as some of the time does not grow: of 4 tokens 0.5 of the time of 13, not 0.3.
    """
    measured, tokens = of(constants.ENCODERS[config.query_tower]), knob(config, "query_tokens", "tokens")
    rate = ledger.step(
        "queries a second of one core, at their length",
        measured * of(constants.ENCODER_TOKENS) / tokens,
        "1/s",
    )
    return _replicas(ledger, config, "query encoders", knob(config, "qps", "1/s") / rate)


def gateways(ledger: Ledger, config: PlanConfig) -> Replicas:
    """Gateways, at what a request took of that machine in all: the load generator and a search counted in."""
    each = ledger.step(
        "core seconds a request, all processes",
        of(constants.GATEWAY_CORES) / of(constants.GATEWAY_RATE),
        "s",
    )
    return _replicas(ledger, config, "gateways", knob(config, "qps", "1/s") * each)


def core_hour(config: PlanConfig) -> Quantity:
    """Price of a core with its memory."""
    memory = of(constants.GB_A_CORE) * knob(config, "memory_price", "USD")
    return knob(config, "core_price", "USD") + memory


def _index(ledger: Ledger, config: PlanConfig, family: Family) -> Index:
    ledger.step(f"recall@100 of {family.label}", of(family.recall), "")
    documents = knob(config, "documents", "documents")
    dim = knob(config, "dims", "")
    wide = of(family.size) + of(family.width) * (dim - of(constants.MEASURED_DIM))
    each = ledger.step("index bytes a document", wide, "bytes")
    whole = ledger.step("index", documents * each / plain(1e9), "GB")
    grown = documents / of(constants.MEASURED_DOCUMENTS)
    growth = ledger.step("growth of a scan", grown if family.exhaustive else root(grown), "times")
    scan = ledger.step(
        "scan of a query, one core",
        of(family.time) * growth * dim / of(constants.MEASURED_DIM),
        "µs",
    )
    apart = (of(constants.FOUR_SHARDS) - of(constants.ONE_INDEX)) / plain(3.0)
    apart = ledger.step("cost of one more shard", apart, "µs")
    core = ledger.step("price of a core with its memory", core_hour(config), "USD an hour")
    sizes = tuple(
        _searchers(ledger, config, memory, index=whole, scan=scan, apart=apart, core=core)
        for memory in config.node_memory
    )
    best = min(sizes, key=lambda one: (one.month, one.nodes))
    return Index(family, each.value, whole.value, sizes, best)


def _searchers(
    ledger: Ledger,
    config: PlanConfig,
    memory: int,
    *,
    index: Quantity,
    scan: Quantity,
    apart: Quantity,
    core: Quantity,
) -> Searchers:
    on = f"on nodes of {memory} GB"
    size = plain(float(memory))
    cores = ledger.step(f"cores {on}", size / of(constants.GB_A_CORE), "cores")
    held = index * of(constants.VERSIONS) / (size * of(constants.USABLE))
    shards = ledger.step(f"shards {on}", up(held), "shards")
    spent = (scan + apart * (shards - plain(1.0))) / shards / plain(1000.0)
    each = ledger.step(f"core ms a query in each shard {on}", spent, "ms")
    busy = knob(config, "qps", "1/s") * each / plain(1000.0) / of(constants.BUSY)
    busy = ledger.step(f"cores that search a shard {on}", busy, "cores")
    replicas = ledger.step(
        f"replicas of a shard {on}",
        up(busy / cores, least=knob(config, "replicas", "")),
        "replicas",
    )
    nodes = ledger.step(f"searchers {on}", shards * replicas, "nodes")
    month = ledger.step(f"searchers a month {on}", nodes * cores * core * plain(MONTH), "USD")
    return Searchers(memory, cores.value, shards.value, replicas.value, nodes.value, each.value, month.value)


def _replicas(ledger: Ledger, config: PlanConfig, name: str, work: Quantity) -> Replicas:
    cores = ledger.step(f"cores of {name}", work / of(constants.BUSY), "cores")
    count = ledger.step(name, up(cores, least=knob(config, "replicas", "")), "replicas of one core")
    month = ledger.step(f"{name} a month", count * core_hour(config) * plain(MONTH), "USD")
    return Replicas(name, count.value, month.value)
