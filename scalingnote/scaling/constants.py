"""Every number that a plan rests on, with where it comes from: a benchmark's JSON, a maker, or an assumption.

A test compares each measured one with the file it names.
"""

from dataclasses import dataclass
from typing import Literal

from scalingnote.scaling.config import GpuName, QueryTower


@dataclass(frozen=True)
class Measured:
    """A figure of a benchmark's JSON: `key` in its metrics, or of that row of a table that `where` picks.

    on: the machine, where a plan uses the figure for another.
    """

    file: str
    key: str
    table: str = "metrics"
    where: tuple[tuple[str, str | int], ...] = ()
    on: str = ""

    def __str__(self) -> str:
        row = ", ".join(f"{name}={value}" for name, value in self.where)
        measured = f"measured on {self.on}" if self.on else "measured"
        return f"{measured}: {self.file}, {self.table}" + (f"[{row}]" if row else "") + f", {self.key!r}"


@dataclass(frozen=True)
class Stated:
    """A figure that nobody measured here, and why it is what it is."""

    kind: Literal["assumed", "given", "maker", "counted", "design"]
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}"


@dataclass(frozen=True)
class Constant:
    """A value with its unit and its source."""

    name: str
    value: float
    unit: str
    source: Measured | Stated


@dataclass(frozen=True)
class Family:
    """An index family, at the setting that tuning chose for a million documents of 128 dimensions."""

    label: str
    recall: Constant
    size: Constant
    time: Constant
    width: Constant  # bytes that one more dimension takes
    exhaustive: bool = False


def _index(row: str, label: str, *, recall: float, size: float, time: float, width: float) -> Family:
    def measured(key: str) -> Measured:
        return Measured("docs/results/index.json", key, "family", (("index", row),))

    return Family(
        label,
        recall=Constant("recall@100 measured", recall, "", measured("R@100")),
        size=Constant("bytes a document at 128 dimensions", size, "bytes", measured("bytes/vector")),
        time=Constant("µs a query at a million documents", time, "µs", measured("us, batch 1")),
        width=Constant(
            "bytes a dimension", width, "bytes", Stated("design", "codes and kept vectors (docs/index.md)")
        ),
        exhaustive=row == "flat",
    )


FAMILIES = (
    _index(
        "ivfpq_fast_scan + sq8 (default)",
        "ivfpq_fast_scan + sq8",
        recall=0.962,
        size=170.1,
        time=490.0,
        width=1.25,
    ),
    _index("ivfpq_fast_scan", "ivfpq_fast_scan", recall=0.746, size=42.1, time=680.0, width=0.25),
    _index("ivf_sq8", "ivf_sq8", recall=0.97, size=136.0, time=835.0, width=1.0),
    _index(
        "ivfpq_fast_scan + flat", "ivfpq_fast_scan + flat", recall=0.971, size=554.1, time=484.0, width=4.25
    ),
    _index("flat", "flat", recall=1.0, size=512.0, time=70764.0, width=4.0),
)


def _shards(of: str) -> Measured:
    return Measured("docs/results/index.json", "us, batch 1", "shards", (("search of", of),))


ONE_INDEX = Constant("µs in one index", 621.0, "µs", _shards("one index"))
FOUR_SHARDS = Constant("µs in four shards apart", 1969.0, "µs", _shards("4 shards, lists chosen once"))
MEASURED_DOCUMENTS = Constant(
    "documents measured on", 1e6, "documents", Stated("design", "size of the corpus of benchmarks/index.py")
)
MEASURED_DIM = Constant(
    "dimensions measured on", 128.0, "", Stated("design", "embeddings of benchmarks/index.py")
)


def _encoder(form: str, rate: float) -> Constant:
    where = (("threads", 1), ("batch", 8), ("form", form))
    source = Measured("docs/results/query_encoder.json", "queries/cpu s", "measurements", where)
    return Constant(f"queries a second of one core, {form}", rate, "1/s", source)


ENCODERS: dict[QueryTower, Constant] = {
    "bert-int8": _encoder("onnx int8", 103.63743159653085),
    "lookup": _encoder("lookup", 16645.44589053825),
}
ENCODER_TOKENS = Constant(
    "tokens of a query that encoders were measured on",
    12.953125,
    "tokens",
    Measured("docs/results/query_encoder.json", "tokens_per_query"),
)

GATEWAY_RATE = Constant(
    "requests a second through replicas of their own",
    101.0,
    "1/s",
    Measured("docs/results/serve.json", "requests/s", "table", (("server", "replicas"), ("connections", 16))),
)
GATEWAY_CORES = Constant(
    "cores of that machine", 2.0, "cores", Measured("docs/results/serve.json", "cpus", "environment")
)
ENCODE_KEPT = Constant(
    "share of a bare loop's speed that the encode job keeps",
    0.929,
    "",
    Measured("docs/results/encode.json", "tokens_per_s_over_floor", on="CPUs"),
)

VERSIONS = Constant(
    "index versions held open",
    2.0,
    "",
    Stated("design", "serve.versions_kept: a swap needs room for the next one"),
)
USABLE = Constant(
    "share of a node's memory for the index",
    0.75,
    "",
    Stated("assumed", "the rest: interpreter, page cache of titles and snippets, growth"),
)
BUSY = Constant(
    "busy share of a core", 0.6, "", Stated("assumed", "headroom for peaks; latency rises steeply beyond")
)
GB_A_CORE = Constant(
    "GB of memory a core", 8.0, "GB", Stated("assumed", "memory-optimised machines: 8 GB to a core")
)

# US dollars an hour, of the order of public offers without long commitments; --gpu-price overrides.
GPU_PRICES: dict[GpuName, float] = {"H200": 4.0, "H100": 3.0, "A100": 2.0, "L40S": 1.2, "L4": 0.7}
