"""Constants of a capacity plan with their sources, and the ledger that records the arithmetic on them.

A source is a benchmark's JSON, a manufacturer or an assumption. A test compares each measured constant with
the file it names.
"""

import re
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal

from scalingnote.reports import four_digits
from scalingnote.scaling.config import GpuName, PlanConfig, QueryTower

# Options that enter formulas. Their names in formulas are those of the options, except for KNOB_LABELS.
KNOB_UNITS = {
    "documents": "documents",
    "tokens": "tokens",
    "qps": "1/s",
    "query_tokens": "tokens",
    "dims": "",
    "pairs": "pairs",
    "negatives": "",
    "distill_epochs": "",
    "gpus": "GPUs",
    "mfu": "",
    "replicas": "",
    "gpu_price": "USD",
    "core_price": "USD",
    "memory_price": "USD",
    "storage_price": "USD",
}
KNOB_LABELS = {"qps": "queries a second", "mfu": "MFU", "dims": "dimensions"}
# US dollars an hour, of the order of public offers without long commitments; --gpu-price overrides.
GPU_PRICES: dict[GpuName, float] = {"H200": 4.0, "H100": 3.0, "A100": 2.0, "L40S": 1.2, "L4": 0.7}


@dataclass(frozen=True)
class MeasuredSource:
    """A figure of a benchmark's JSON: `key` of its metrics, or of the row of a table that `where` selects.

    `on` names the machine if a plan applies the figure to another one.
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
class StatedSource:
    """A figure that was not measured here, and the reason for its value."""

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
    source: MeasuredSource | StatedSource


@dataclass(frozen=True)
class IndexFamily:
    """An index family, at the setting that tuning chose for a million documents of 128 dimensions."""

    label: str
    recall: Constant
    size: Constant
    time: Constant
    width: Constant  # bytes that one more dimension takes
    exhaustive: bool = False


def _index(row: str, label: str, *, recall: float, size: float, time: float, width: float) -> IndexFamily:
    def measured(key: str) -> MeasuredSource:
        return MeasuredSource("docs/results/index.json", key, "family", (("index", row),))

    return IndexFamily(
        label,
        recall=Constant("recall@100 measured", recall, "", measured("R@100")),
        size=Constant("bytes a document at 128 dimensions", size, "bytes", measured("bytes/vector")),
        time=Constant("µs a query at a million documents", time, "µs", measured("us, batch 1")),
        width=Constant(
            "bytes a dimension",
            width,
            "bytes",
            StatedSource("design", "codes and kept vectors (docs/guides/index.md)"),
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


def _shards(of: str) -> MeasuredSource:
    return MeasuredSource("docs/results/index.json", "us, batch 1", "shards", (("search of", of),))


ONE_INDEX = Constant("µs in one index", 621.0, "µs", _shards("one index"))
FOUR_SHARDS = Constant("µs in four shards apart", 1969.0, "µs", _shards("4 shards, lists chosen once"))
MEASURED_DOCUMENTS = Constant(
    "documents measured on",
    1e6,
    "documents",
    StatedSource("design", "size of the corpus of benchmarks/index.py"),
)
MEASURED_DIM = Constant(
    "dimensions measured on", 128.0, "", StatedSource("design", "embeddings of benchmarks/index.py")
)


def _encoder(form: str, rate: float) -> Constant:
    where = (("threads", 1), ("batch", 8), ("form", form))
    source = MeasuredSource("docs/results/query_encoder.json", "queries/cpu s", "measurements", where)
    return Constant(f"queries a second of one core, {form}", rate, "1/s", source)


ENCODERS: dict[QueryTower, Constant] = {
    "bert-int8": _encoder("onnx int8", 103.63743159653085),
    "lookup": _encoder("lookup", 16645.44589053825),
}
ENCODER_TOKENS = Constant(
    "tokens of a query that encoders were measured on",
    12.953125,
    "tokens",
    MeasuredSource("docs/results/query_encoder.json", "tokens_per_query"),
)

GATEWAY_RATE = Constant(
    "requests a second through replicas of their own",
    101.0,
    "1/s",
    MeasuredSource(
        "docs/results/serve.json", "requests/s", "table", (("server", "replicas"), ("connections", 16))
    ),
)
GATEWAY_ALONE_RATE = Constant(
    "requests a second inside a gateway",
    346.0,
    "1/s",
    MeasuredSource(
        "docs/results/serve.json", "requests/s", "table", (("server", "int8 x 1"), ("connections", 16))
    ),
)
GATEWAY_CORES = Constant(
    "cores of that machine", 2.0, "cores", MeasuredSource("docs/results/serve.json", "cpus", "environment")
)
ENCODE_KEPT = Constant(
    "share of a bare loop's speed that the encode job keeps",
    0.929,
    "",
    MeasuredSource("docs/results/encode.json", "tokens_per_s_over_floor", on="CPUs"),
)

VERSIONS = Constant(
    "index versions held open",
    2.0,
    "",
    StatedSource("design", "serve.versions_kept: a swap needs room for the next one"),
)
SHOWN_BYTES = Constant(
    "bytes of its id, title and snippet",
    340.0,
    "bytes",
    StatedSource("design", "index.snippet_chars 240, and about 100 of ids, title and topic; held in memory"),
)
USABLE = Constant(
    "share of a node's memory for the index",
    0.75,
    "",
    StatedSource("assumed", "the rest: interpreter, page cache of titles and snippets, growth"),
)
BUSY = Constant(
    "busy share of a core",
    0.6,
    "",
    StatedSource("assumed", "headroom for peaks; latency rises steeply beyond"),
)
GB_A_CORE = Constant(
    "GB of memory a core", 8.0, "GB", StatedSource("assumed", "memory-optimised machines: 8 GB to a core")
)


@dataclass(frozen=True)
class PlanStep:
    """One line of arithmetic: `names` and `numbers` are its formula in words and in figures."""

    name: str
    value: float
    unit: str
    names: str
    numbers: str


class Ledger:
    """The steps of a plan in their order, and the constants that entered them.

    A formula is Python's arithmetic over names in braces, with × for multiplication and commas in thousands:
    ``ceil({queries a second} × {seconds}) / 3,600``. Names are those of constants and of earlier steps.
    """

    def __init__(self, config: PlanConfig) -> None:
        self.steps: list[PlanStep] = []
        self.constants: list[Constant] = []  # in the order of their first use in a formula
        self._values: dict[str, float] = {}
        self._sources: dict[str, list[Constant]] = {}
        for constant in (one for one in globals().values() if isinstance(one, Constant)):
            self.add(constant)
        for name in KNOB_UNITS:
            if getattr(config, name) is not None:
                self.add(_knob(config, name))

    def add(self, constant: Constant, *inputs: str) -> None:
        """Make a constant known to formulas.

        Args:
            constant: the constant. It is listed once a formula uses it.
            inputs: names of the constants it was computed from, which are listed after it.
        """
        self._values[constant.name] = constant.value
        self._sources[constant.name] = [constant, *(one for name in inputs for one in self._sources[name])]

    def step(self, name: str, unit: str, formula: str) -> float:
        """Evaluate a formula, record it under `name` for later formulas, and return its value."""
        parts = re.split(r"{(.*?)}", formula)  # text, name, text, name, ..., text
        values = [self._values[known] for known in parts[1::2]]
        operators = [re.sub(r"(?<=\d),(?=\d)", "", text).replace("×", "*") for text in parts[::2]]
        expression = operators[0] + "".join(f"v[{i}]{text}" for i, text in enumerate(operators[1:]))
        # Formulas are written in this package, never by a user, so they are safe to evaluate.
        value = float(eval(expression, {"ceil": _round_up, "sqrt": sqrt, "max": max, "v": values}))
        sources = (one for known in parts[1::2] for one in self._sources.get(known, ()))
        self.constants = list(dict.fromkeys([*self.constants, *sources]))
        names = "".join(parts)
        parts[1::2] = map(four_digits, values)
        self.steps.append(PlanStep(name, value, unit, names, "".join(parts)))
        self._values[name] = value
        return value


def _knob(config: PlanConfig, name: str) -> Constant:
    """An option as a constant, whose source tells whether the user set it."""
    description, option = PlanConfig.model_fields[name].description, f"--{name.replace('_', '-')}"
    source = StatedSource("assumed", f"{description} ({option})")
    if name in config.model_fields_set:
        source = StatedSource("given", f"{option}: {description}")
    value = getattr(config, name)
    number = float(value[-1] if isinstance(value, tuple) else value)
    return Constant(KNOB_LABELS.get(name, name.replace("_", " ")), number, KNOB_UNITS[name], source)


def _round_up(value: float) -> float:
    """The next whole number; the factor keeps a rounding error from adding one."""
    return float(ceil(value * (1 - 1e-12)))
