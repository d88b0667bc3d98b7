"""Capacity plans and dry runs as text, and the options of `scalingnote plan`."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isqrt
from pathlib import Path

from scalingnote.config import validate
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.reports import four_digits
from scalingnote.scaling import capacity
from scalingnote.scaling.capacity import CapacityPlan, training_state
from scalingnote.scaling.config import FAMILIES, MEASURED_DIM, PlanConfig
from scalingnote.scaling.training_cost import FRAGMENTATION, GIB, GPUS, NODE_GPUS, RUNTIME_BYTES, Estimate
from scalingnote.train.config import DeepSpeed

GATEWAY_MAX_DOCUMENTS = 2_000_000  # up to which a gateway holds the index itself (docs/guides/serve.md)
TRAINING_POINTS_PER_LIST = 39
MAX_TRAIN_DOCUMENTS = 4_000_000  # index.train_documents, unless it is set
DAY_S = 86_400
SAMPLED_PER_CODE = 200  # documents (docs/guides/encode.md: some hundreds)

TEXT_OPTIONS = ("model", "gpu", "query_tower")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `scalingnote plan`: the fields of PlanConfig."""
    for name, field in PlanConfig.model_fields.items():
        has_default = not field.is_required() and field.default is not None
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        shown = " ".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in values)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=str if name in TEXT_OPTIONS else float,
            nargs="+" if isinstance(field.default, tuple) else None,
            required=field.is_required(),
            metavar="TEXT" if name in TEXT_OPTIONS else "N",
            help=f"{field.description}, default: {shown}" if has_default else field.description,
        )
    parser.add_argument("--explain", action="store_true", help="then every step and every constant's source")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, steps and constants too")


def print_plan(options: argparse.Namespace) -> int:
    """Compute and print the plan.

    Raises:
        ConfigError: an option is out of bounds, or the model is not known.
    """
    names = PlanConfig.model_fields
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    plan = capacity.plan(validate(PlanConfig, given, source="plan"))
    print(plan_text(plan))
    if options.explain:
        print(f"\n{explanation(plan)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        figures = {name: value for name, value in vars(plan).items() if name not in ("steps", "constants")}
        figures |= {"config": plan.config.model_dump(mode="json"), "shape": asdict(plan.shape)}
        figures |= {"family": plan.family.label, "best": plan.best, "notes": notes(plan)}
        constants = [asdict(one) for one in plan.constants]
        document = {"plan": figures, "steps": plan.steps, "constants": constants}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\n{options.json}")
    return 0


def plan_text(plan: CapacityPlan) -> str:
    """The whole plan as text: figures, assumptions and notes."""
    config = plan.config
    head = (
        f"{config.documents:,} documents of {config.tokens:g} tokens, {config.qps:,g} queries a second\n"
        f"{config.model}: {plan.shape.non_embedding_parameters:,} parameters without embeddings in each tower"
    )
    assumed = [
        f"{one.name} {four_digits(one.value)} {one.unit}".rstrip() + one.source.removeprefix("assumed")
        for one in plan.constants
        if one.source.startswith("assumed: ")
    ]
    blocks = [_gpu_work(plan), _storage(plan), _offline(plan), *_serving(plan), _cost(plan)]
    return "\n\n".join([head, *blocks, _list("assumed", assumed), _list("to know", notes(plan))])


def explanation(plan: CapacityPlan) -> str:
    """Every step of the arithmetic, and every constant with its source."""
    constants = [
        f"{one.name} = {four_digits(one.value)} {one.unit}".rstrip() + f"  [{one.source}]"
        for one in plan.constants
    ]
    return "\n  ".join(["arithmetic", *plan.steps]) + "\n\n" + "\n  ".join(["constants", *constants])


def _gpu_work(plan: CapacityPlan) -> str:
    rows = [
        (name, four_digits(p["operations"]), _short(p["gpu_hours"]), _short(p["days"]), _money(p["cost"]))
        for name, p in plan.phases.items()
    ]
    hours, days = (sum(phase[name] for phase in plan.phases.values()) for name in ("gpu_hours", "days"))
    rows.append(("together", "", _short(hours), _short(days), _money(plan.once)))
    title = (f"once, on {plan.config.gpus} x {plan.config.gpu}", "operations", "GPU hours", "days", "USD")
    return _table(title, rows)


def _storage(plan: CapacityPlan) -> str:
    kinds = [name for name in plan.stored[plan.config.dims[0]] if name != "month"]
    rows = [
        (f"{dim} dimensions", *(_short(one[kind]) for kind in kinds), _money(one["month"]))
        for dim, one in plan.stored.items()
    ]
    return _table(("embeddings, GB", *kinds, "USD a month"), rows)


def _offline(plan: CapacityPlan) -> str:
    rows = [
        (
            name,
            *(_short(one[figure]) for figure in ("core_hours", "hours", "read_gb", "written_gb")),
            *(four_digits(one["requests"]), _money(one["cost"]), _short(one["driver_gb"])),
        )
        for name, one in plan.offline.items()
    ]
    title = f"offline, on {plan.config.nodes} nodes of {plan.config.node_cores} cores"
    columns = ("core hours", "hours", "GB read", "GB written", "requests", "USD", "driver GB")
    return _table((title, *columns), rows)


def _serving(plan: CapacityPlan) -> Iterator[str]:
    index = [
        ("recall@100, measured", f"{plan.family.recall.value:g}"),
        ("bytes a document", f"{plan.index['document_bytes']:,.1f}"),
        ("with its ids and filters", f"{plan.index['row_bytes']:,.1f}"),
        ("GB of one version in searchers", _short(plan.index["gb"])),
        ("GB of texts on a gateway's disk", _short(plan.index["texts_gb"])),
    ]
    yield _table(("index", plan.family.label), index)
    searchers = [
        (
            f"{gb:,} GB, {one['cores']:g} cores" + (" (cheapest)" if gb == plan.best else ""),
            *(f"{one[name]:,.0f}" for name in ("shards", "replicas", "nodes")),
            *(_short(one["shard_ms"]), _short(one["fan_out_cores"]), _money(one["month"])),
        )
        for gb, one in plan.sizes.items()
    ]
    columns = ("shards", "replicas", "nodes", "ms in a shard", "cores to fan out", "USD a month")
    yield _table(("searchers, by size of node", *columns), searchers)
    replicas = [(name, f"{one['count']:,.0f}", _money(one["month"])) for name, one in plan.serving.items()]
    yield _table((f"beside them, {plan.config.query_tower}", "cores", "USD a month"), replicas)


def _cost(plan: CapacityPlan) -> str:
    months = {"embeddings": plan.stored[plan.config.dims[-1]], "searchers": plan.sizes[plan.best]}
    parts = [f"{name} {_money(one['month'])}" for name, one in (months | plan.serving).items()]
    rows = [("once", _money(plan.once)), ("a month", f"{_money(plan.month)} ({', '.join(parts)})")]
    return _table(("cost", "USD"), rows)


def notes(plan: CapacityPlan) -> list[str]:
    """What does not fit, and what nobody measured."""
    config, exhaustive, said = plan.config, plan.family.exhaustive, []
    required, available = training_state(config, plan.shape), GPUS[config.gpu].memory
    if required > available:
        remedy = "more --gpus" if config.lora else "more --gpus, or --lora 16"
        said.append(
            f"TRAINING DOES NOT FIT: weights, gradients and optimizer take {required / GIB:.0f} GiB of each "
            f"{config.gpu}'s {available / GIB:.0f}: {remedy}; `scalingnote train --dry-run` counts "
            "activations too"
        )
    if 2.0 * plan.shape.parameters > available:
        said.append(
            f"ENCODING DOES NOT FIT: weights in bfloat16 take {2 * plan.shape.parameters / GIB:.0f} GiB of "
            f"an {config.gpu}'s {available / GIB:.0f}: choose a larger --gpu or a smaller --model"
        )
    if exhaustive:
        most = max(family.recall.value for family in FAMILIES if not family.exhaustive)
        said.append(
            f"recall of {config.recall:g}: settings with inverted lists were measured up to {most:g}, so "
            "every document is compared; a larger nprobe may reach it for less, which nobody measured"
        )
    elif config.dims[-1] != MEASURED_DIM.value:
        said.append(
            f"recall was measured at {MEASURED_DIM.value:g} dimensions, with {config.dims[-1]} "
            "nobody measured it: tune an index of your embeddings before you rely on it"
        )
    if config.documents <= GATEWAY_MAX_DOCUMENTS:
        said.append(
            f"up to {GATEWAY_MAX_DOCUMENTS:,} documents a gateway searches by itself, "
            "for less than is planned here"
        )
    elif not exhaustive:
        said.append(
            "recall was measured on a million documents; nprobe and refine factor are assumed to keep it"
        )
    queries, passes = config.train_queries, capacity.AXES["mine"].passes(config.train_queries)
    said.append(
        f"mine compares {queries:,} queries with every document and reads all embeddings {passes:,} times: "
        "mine.max_documents, mine.search=index or fewer queries take less; `evaluate` is for 500 test queries"
    )
    if (sample := SAMPLED_PER_CODE * config.codes) > QuantizeConfig().sample_documents:
        said.append(
            f"codebooks are counted as fitted to {QuantizeConfig().sample_documents:,} documents; "
            f"{config.codes:,} codes need about {sample:,}: set quantize.sample_documents"
        )
    said.append(
        "offline stages were measured on one machine and its disk: the network to a bucket is not counted"
    )
    lists = 4 * isqrt(config.documents)
    sample = min(lists * TRAINING_POINTS_PER_LIST, config.documents)
    if not exhaustive and sample > MAX_TRAIN_DOCUMENTS:
        said.append(
            f"the scan is that of {lists:,} lists: set index.train_documents={sample}, which they are "
            "trained with"
        )
    return said


def dry_run_text(e: Estimate) -> str:
    """The estimate of a run of stage I: towers, memory of a GPU, one step, the run, and all assumptions."""
    config, memory, strategy = e.config, e.config.memory, e.strategy
    knobs = [
        f"ZeRO-{strategy.stage}" if isinstance(strategy, DeepSpeed) else strategy.kind,
        {"autocast": "bfloat16 products", "bfloat16": "bfloat16", "float32": "float32"}[e.numbers],
        *(["gradient checkpointing"] if memory.gradient_checkpointing else []),
        *(["GradCache"] if memory.grad_cache else []),
        "packed rows" if memory.packing else "padded rows",
        f"global batch {config.global_batch:,}",
    ]
    head = f"stage I on {config.ranks} x {e.assumed.gpu}, one worker each; nothing is started"
    tables = (_towers(e), _memory(e), _step(e), _run(e))
    blocks = [_table(title, rows, label=40, cell=26) for title, rows in tables]
    return "\n\n".join([f"{head}\n{', '.join(knobs)}", *blocks, _list("assumed", _assumed(e))])


_Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _towers(e: Estimate) -> _Table:
    towers = e.towers
    return ("", *(tower.name for tower in towers)), [
        ("backbone", *(tower.backbone for tower in towers)),
        ("parameters", *(f"{tower.shape.parameters:,}" for tower in towers)),
        ("without embeddings", *(f"{tower.shape.non_embedding_parameters:,}" for tower in towers)),
        ("trained, with the projection", *(f"{tower.trained:,}" for tower in towers)),
        ("rows of a GPU in a step", *(f"{tower.rows:,}" for tower in towers)),
        ("tokens of a row, mean", *(f"{tower.input.tokens:,.0f}" for tower in towers)),
        ("tokens of a row, longest", *(f"{tower.longest:,}" for tower in towers)),
    ]


def _memory(e: Estimate) -> _Table:
    state, fits = e.state, "fits" if e.fits else "DOES NOT FIT"
    rows: list[tuple[str, ...]] = [
        ("weights", _gib(state.weights)),
        ("gradients", _gib(state.gradients)),
        ("optimizer state", _gib(state.optimizer)),
        ("gathered and reduced at once", _gib(state.gathered)),
        ("activations", _gib(e.activations)),
        ("gathered embeddings and scores", _gib(e.scores)),
        ("CUDA, NCCL, fragmentation", _gib(e.memory - state.total - e.activations - e.scores)),
        ("together", f"{_gib(e.memory)} of {e.gpu.memory / GIB:.0f} GiB: {fits}"),
        # Every worker builds both towers in float32 before they are sharded.
        ("host memory of a worker, at the start", _gib(4.0 * e.parameters)),
    ]
    if state.host:
        rows.append(("host memory of a worker, offloaded", _gib(state.host)))
    if not e.fits:
        rows.append(("to make it fit", _remedy(e)))
    return ("memory of one GPU at the peak",), rows


def _step(e: Estimate) -> _Table:
    work, gpus = e.work, e.config.ranks
    return ("one step, all GPUs",), [
        ("tokens", f"{e.step_tokens:,.0f}"),
        ("operations forward", _operations(work.forward)),
        ("operations backward", _operations(work.backward)),
        ("operations repeated to save memory", _operations(work.again)),
        ("seconds of arithmetic", f"{e.work_seconds:.3g}"),
        ("sent by each GPU", _gib(e.exchanged)),
        ("seconds of sending", f"{e.exchange_seconds:.3g}"),
        ("seconds, the longer of the two", f"{e.step_seconds:.3g}"),
        ("tokens a second, each GPU", f"{e.step_tokens / e.step_seconds / gpus:,.0f}"),
        ("MFU (repeated operations left out)", f"{work.model / (e.step_seconds * gpus * e.gpu.peak):.0%}"),
    ]


def _run(e: Estimate) -> _Table:
    if e.steps is None:
        return ("the run",), [("steps, tokens, days", "unknown before `collect`: give --rows N")]
    seconds = e.steps * e.step_seconds
    return ("the run",), [
        ("training rows, epochs", f"{e.assumed.rows:,}, {e.config.epochs:g}"),
        ("steps", f"{e.steps:,}"),
        ("tokens", _operations(e.steps * e.step_tokens)),
        ("operations", _operations(e.steps * e.work.total)),
        ("days", f"{seconds / DAY_S:,.2f} ({seconds * e.config.ranks / 3600:,.0f} GPU hours)"),
    ]


def _assumed(e: Estimate) -> list[str]:
    assumed = e.assumed
    across = f"{e.gpu.link:g} GB/s between the GPUs of a node"
    if e.config.ranks > NODE_GPUS:
        across = f"nodes of {NODE_GPUS}, {assumed.network:g} GB/s between them"
    lengths = {"--query-tokens": assumed.query_tokens, "--document-tokens": assumed.document_tokens}
    unknown = [option for option, mean in lengths.items() if mean is None]
    counted = "at the mean lengths given"
    if not e.config.memory.packing:
        counted = "at the longest rows: without packing all are padded to them"
    elif unknown:
        sides = " and ".join("queries" if option == "--query-tokens" else "documents" for option in unknown)
        counted = f"as if all {sides} were as long as the longest ({', '.join(unknown)})"
    return [
        f"{assumed.mfu:.0%} of {e.gpu.peak / 1e12:,.0f} TFLOP/s a GPU, repeated operations counted as work",
        f"{across}; the shorter of sending and arithmetic hides behind the longer",
        f"{assumed.negatives} hard negative(s) a row; activations are counted at the longest rows",
        f"arithmetic is counted {counted}",
        "only matrix products are counted; a causal model computes half of its attention scores",
        "fused attention: no matrix of all tokens by all tokens is kept",
        f"{RUNTIME_BYTES / GIB:g} GiB for CUDA and NCCL, {FRAGMENTATION:.0%} lost to fragmentation",
        "AdamW keeps two float32 numbers a trained parameter, adamw_8bit two bytes",
        "not counted: evaluation, checkpoints, reading data, waiting for the slowest GPU (lower --mfu)",
    ]


def _remedy(e: Estimate) -> str:
    config, state = e.config, e.state
    sizes = {
        "activations": e.activations,
        "scores": e.scores,
        "state": state.optimizer + state.gradients + state.weights,
        "gathered": state.gathered,
    }
    largest, strategy = max(sizes, key=sizes.__getitem__), e.strategy
    if largest == "activations" and not config.memory.gradient_checkpointing:
        return "--set train.memory.gradient_checkpointing=true"
    if largest == "activations":
        return "--set train.memory.grad_cache.document_rows=4, or more GPUs"
    if largest == "scores":
        return "a smaller train.global_batch, or more GPUs"
    if strategy.kind == "ddp":
        return "--set train.strategy.kind=fsdp2, or LoRA: --set train.document.lora.rank=16 and the query's"
    if largest == "gathered":
        if strategy.kind == "deepspeed":
            return "--set train.strategy.kind=fsdp2"
        if not strategy.reshard:
            return "--set train.strategy.reshard=true"
    return "more GPUs, offloading (train.strategy), or LoRA (train.document.lora, train.query.lora)"


def _table(title: Sequence[str], rows: Sequence[tuple[str, ...]], *, label: int = 36, cell: int = 14) -> str:
    """Lines of a label and cells, padded to these widths in characters; rows are indented."""
    lines = [tuple(title), *((f"  {first}", *cells) for first, *cells in rows)]
    return "\n".join(
        (f"{first:<{label}}" + "".join(f"{each:<{cell}}  " for each in cells)).rstrip()
        for first, *cells in lines
    )


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  - {line}" for line in lines)])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _money(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:,.2f}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _operations(count: float) -> str:
    for letter, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= unit:
            return f"{count / unit:,.4g} {letter}"
    return f"{count:,.0f}"
