"""Settings of ladders, dry runs and capacity plans, and the constants that plans calculate with.

Every constant of a plan states its source: a benchmark's JSON (a test compares the two), or a reason.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from scalingnote.config import Config
from scalingnote.models.config import Backbone, Scratch

GpuName = Literal["H200", "H100", "A100", "L40S", "L4"]
QueryTower = Literal["bert-int8", "lookup"]
Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Assumptions(Config):
    """Assumptions of a dry run: one GPU per training worker, all of one kind."""

    gpu: GpuName = Field("H100", description="kind of GPU")
    mfu: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the GPU's peak that is reached, repeated passes counted as work",
    )
    network: float = Field(
        400.0, gt=0, description="GB/s in and out of a node of 8 GPUs; 400 is eight cards of 400 Gb/s"
    )
    rows: int | None = Field(None, ge=1, description="training rows; null: steps and days are left out")
    negatives: int = Field(1, ge=0, description="hard negatives of a row")
    query_tokens: float | None = Field(None, gt=0, description="mean length; null: max_length of the tower")
    document_tokens: float | None = Field(
        None, gt=0, description="mean length; null: max_length of the tower"
    )


def _rung(layers: int, hidden: int, heads: int) -> Scratch:
    return Scratch(layers=layers, hidden=hidden, heads=heads, intermediate=2 * hidden)


class LadderConfig(Config):
    """Sizes of stage I, in all combinations, for the scaling laws (ScalingNote, section 4.4)."""

    backbones: tuple[Backbone, ...] = Field(
        (_rung(1, 16, 1), _rung(1, 32, 1), _rung(1, 48, 2), _rung(2, 64, 2), _rung(2, 96, 3)),
        min_length=1,
        description="of both towers",
    )
    pairs: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (896, 1792, 3584, 7168),
        min_length=1,
        description="training pairs, each seen once; whole batches of them",
    )
    seeds: tuple[int, ...] = Field(
        (0, 1, 2), min_length=1, description="of training; each seed is a separate run"
    )
    lr_by_width: float = Field(
        1.0,
        ge=0,
        description="peak_lr is train's times (narrowest width / a rung's width) to this power; 0: the same",
    )
    draws: int = Field(200, ge=10, description="bootstrap samples behind the intervals")
    level: float = Field(0.95, gt=0, lt=1, description="of the intervals")
    budgets: tuple[Size, ...] = Field(
        (1.0, 10.0, 100.0),
        description="operations to split by the joint law, as multiples of the largest run",
    )
    predict: tuple[tuple[Size, Size], ...] = Field(
        (), description="models to predict: parameters without embeddings, pairs"
    )

    @model_validator(mode="after")
    def _differ(self) -> "LadderConfig":
        for name in ("backbones", "pairs", "seeds"):
            values = getattr(self, name)
            if len(set(map(str, values))) < len(values):
                raise ValueError(f"ladder.{name} repeats a value: each is run once")
        return self


class PlanConfig(Config):
    """A corpus, its traffic, and assumptions about everything else. Prices are in US dollars."""

    model_config = ConfigDict(allow_inf_nan=False)

    documents: int = Field(ge=1, description="documents of the corpus")
    tokens: float = Field(gt=0, description="mean tokens of a document, its prompt counted in")
    model: str = Field(description="backbone of both towers: a published name or a folder with config.json")
    qps: float = Field(gt=0, description="queries a second at the peak")
    recall: float = Field(0.95, gt=0, le=1, description="of the exact 100 best documents")
    gpu: GpuName = Field("H100", description="kind of GPU")
    gpus: int = Field(8, ge=1, description="GPUs that work at the same time")
    query_tokens: float = Field(16.0, gt=0, description="mean tokens of a query")
    dims: tuple[int, ...] = Field(
        (16, 32, 64, 128), min_length=1, description="Matryoshka dimensions; the last one is indexed"
    )
    pairs: int = Field(100_000_000, ge=1, description="training pairs; the paper chose 10^8 for 7B")
    negatives: int = Field(1, ge=0, description="hard negatives of a pair, one in the paper")
    lora: int | None = Field(None, ge=1, description="rank of both towers' adapters; null: all weights learn")
    queries: int | None = Field(
        None,
        ge=1,
        description="distinct training queries that `collect` ranks by BM25 and `mine` searches, each over "
        "all documents; null: a tenth of the pairs",
    )
    levels: int = Field(6, ge=1, description="codes of a semantic ID")
    codes: int = Field(256, ge=2, description="K of each level: 8,192 for billions of documents")
    distill_epochs: float = Field(100.0, gt=0, description="passes over the pairs' queries, 100 in the paper")
    query_tower: QueryTower = Field("bert-int8", description="what encodes queries in service")
    mfu: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the GPU's peak that is reached; measured so far: 0.26, padded rows of a 7B "
        "tower on an H100",
    )
    node_memory: tuple[Annotated[int, Field(ge=16)], ...] = Field(
        (64, 128, 256, 512, 1024), min_length=1, description="GB of the nodes that searchers may run on"
    )
    nodes: int = Field(16, ge=1, description="CPU nodes that the offline stages run on")
    node_cores: int = Field(16, ge=1, description="cores of each of them")
    replicas: int = Field(2, ge=1, description="copies of everything that serves, at least: one may die")
    gpu_price: float | None = Field(None, ge=0, description="of a GPU hour; null: by the kind of GPU")
    core_price: float = Field(0.03, ge=0, description="of a CPU core's hour")
    memory_price: float = Field(0.004, ge=0, description="of a GB of memory for an hour")
    storage_price: float = Field(0.023, ge=0, description="of a GB in object storage for a month")
    request_price: float = Field(
        5.0, ge=0, description="of a million requests to object storage, as for writes"
    )

    @property
    def train_queries(self) -> int:
        """Distinct training queries."""
        return max(self.pairs // 10, 1) if self.queries is None else self.queries

    @model_validator(mode="after")
    def _ascends(self) -> "PlanConfig":
        if list(self.dims) != sorted(set(self.dims)) or self.dims[0] < 1:
            raise ValueError(f"dims {list(self.dims)} must ascend from 1 or more")
        return self


@dataclass(frozen=True)
class Constant:
    """A number of a plan. `source` is "measured", "counted", "design", "given" or "assumed", and the reason.

    A measured number is docs/results/`file`: `key` of its `table`, in the row that `row` selects.
    """

    name: str
    value: float
    unit: str
    source: str
    file: str = ""
    key: str = ""
    table: str = "metrics"
    row: tuple[tuple[str, str | int], ...] = ()


def _measured(name: str, value: float, unit: str, place: str, *, on: str = "", **row: str | int) -> Constant:
    """A constant that a benchmark wrote to `place`: "FILE TABLE KEY", of the row with these values."""
    file, table, key = place.split(" ", 2)
    pairs = tuple((column.replace("_", " "), each) for column, each in row.items())
    selected = f"[{', '.join(f'{column}={each}' for column, each in pairs)}]" if pairs else ""
    measured = f"measured on {on}" if on else "measured"
    source = f"{measured}: docs/results/{file}, {table}{selected}, {key!r}"
    return Constant(name, value, unit, source, file, key, table, pairs)


@dataclass(frozen=True)
class IndexFamily:
    """An index family, at the setting that tuning chose for a million documents of 128 dimensions."""

    label: str
    recall: Constant
    size: Constant  # bytes of a document
    time: Constant  # µs of a query on one core
    width: Constant  # bytes that one more dimension takes

    @property
    def exhaustive(self) -> bool:
        """Whether every document is compared."""
        return self.label == "flat"


def _family(row: str, *, recall: float, size: float, time: float, width: float) -> IndexFamily:
    place = "index.json family"
    return IndexFamily(
        row.removesuffix(" (default)"),
        _measured("recall@100 measured", recall, "", f"{place} R@100", index=row),
        _measured("bytes a document at 128 dimensions", size, "bytes", f"{place} bytes/vector", index=row),
        _measured("µs a query at a million documents", time, "µs", f"{place} us, batch 1", index=row),
        Constant(
            "bytes a dimension", width, "bytes", "design: codes and kept vectors (docs/guides/index.md)"
        ),
    )


def _encoder(form: str, rate: float) -> Constant:
    name, place = f"queries a second of one core, {form}", "query_encoder.json measurements queries/cpu s"
    return _measured(name, rate, "1/s", place, threads=1, batch=8, form=form)


FAMILIES = (
    _family("ivfpq_fast_scan + sq8 (default)", recall=0.962, size=170.1, time=490.0, width=1.25),
    _family("ivfpq_fast_scan", recall=0.746, size=42.1, time=680.0, width=0.25),
    _family("ivf_sq8", recall=0.97, size=136.0, time=835.0, width=1.0),
    _family("ivfpq_fast_scan + flat", recall=0.971, size=554.1, time=484.0, width=4.25),
    _family("flat", recall=1.0, size=512.0, time=70764.0, width=4.0),
)
_SHARDS, _SERVED = "index.json shards us, batch 1", "serve.json table requests/s"
ONE_INDEX = _measured("µs in one index", 621.0, "µs", _SHARDS, search_of="one index")
FOUR_SHARDS = _measured(
    "µs in four shards apart", 1969.0, "µs", _SHARDS, search_of="4 shards, lists chosen once"
)
MEASURED_DOCUMENTS = Constant(
    "documents measured on", 1e6, "documents", "design: size of the corpus of benchmarks/index.py"
)
MEASURED_DIM = Constant("dimensions measured on", 128.0, "", "design: embeddings of benchmarks/index.py")
ENCODERS: dict[QueryTower, Constant] = {
    "bert-int8": _encoder("onnx int8", 153.6021627184554),
    "lookup": _encoder("lookup", 83533.56099492958),
}
_TOKENS = "query_encoder.json metrics tokens_per_query"
ENCODER_TOKENS = _measured("tokens of a query that encoders were measured on", 9.6796875, "tokens", _TOKENS)
GATEWAY_RATE = _measured(
    "requests a second through replicas of their own",
    174.0,
    "1/s",
    _SERVED,
    server="replicas",
    connections=16,
)
GATEWAY_ALONE_RATE = _measured(
    "requests a second inside a gateway", 403.0, "1/s", _SERVED, server="int8 x 1", connections=16
)
GATEWAY_CORES = _measured("cores of that machine", 2.0, "cores", "serve.json environment cpus")
_KEPT = "encode.json metrics tokens_per_s_over_floor_equal_lengths"
ENCODE_KEPT = _measured("share of a bare loop's speed that the encode job keeps", 0.914, "", _KEPT, on="CPUs")
VERSIONS = Constant(
    "index versions held open", 2.0, "", "design: serve.versions_kept: a swap needs room for the next one"
)
_SEARCHERS = "searcher_memory.json searchers"
RESERVED_BYTES = _measured(
    "bytes a document reserved for a searcher, 32 dimensions",
    105.5,
    "bytes",
    f"{_SEARCHERS} reserved bytes per document",
    documents=10_000_000,
)
VECTOR_BYTES = _measured(
    "bytes a document of vectors there",
    56.1,
    "bytes",
    f"{_SEARCHERS} index bytes per document",
    documents=10_000_000,
)
SHOWN_BYTES = Constant(
    "bytes of its id, title and snippet",
    340.0,
    "bytes",
    "design: index.snippet_chars 240, and about 100 of ids, title and topic; on the gateways' disks",
)
QUERIES_PER_PASS = 1 << 16  # mine.search.QUERIES_PER_BATCH, which a test compares
USABLE = Constant(
    "share of a node's memory for the index",
    0.75,
    "",
    "assumed: the rest: interpreter, other files, growth",
)
BUSY = Constant("busy share of a core", 0.6, "", "assumed: headroom for peaks; latency rises steeply beyond")
GB_A_CORE = Constant("GB of memory a core", 8.0, "GB", "assumed: memory-optimised machines: 8 GB to a core")
# US dollars an hour, of the order of public offers without long commitments; --gpu-price overrides.
GPU_PRICES: dict[GpuName, float] = {"H200": 4.0, "H100": 3.0, "A100": 2.0, "L40S": 1.2, "L4": 0.7}
