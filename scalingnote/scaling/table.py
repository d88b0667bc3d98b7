"""An estimate as text: towers, memory per GPU, arithmetic, time, and everything that was assumed."""

from collections.abc import Sequence

from scalingnote.scaling.dry_run import FRAGMENTED, NODE, RUNTIME, Estimate
from scalingnote.scaling.hardware import GIB
from scalingnote.train.config import DeepSpeed, TrainConfig

DAY = 86_400
WIDE = 38


def text(estimate: Estimate) -> str:
    """The whole page, one block of lines per question."""
    head = (
        f"stage I on {estimate.gpus} x {estimate.assumed.gpu}, one worker each; nothing is started\n"
        f"{', '.join(_knobs(estimate))}"
    )
    blocks = (_towers, _memory, _work, _time)
    assumed = "\n".join(["assumed", *(f"  - {line}" for line in _assumed(estimate))])
    return "\n\n".join([head, *("\n".join(_block(*block(estimate))) for block in blocks), assumed])


def _block(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [f"  {label:<{WIDE}}" + "".join(f"{cell:<28}" for cell in cells) for label, *cells in rows]
    return [line.rstrip() for line in (title, *lines)]


def _knobs(e: Estimate) -> list[str]:
    config, memory = e.config, e.config.memory
    strategy = config.strategy
    numbers = {"autocast": "bfloat16 products", "bfloat16": "bfloat16", "float32": "float32"}[e.numbers]
    return [
        f"ZeRO-{strategy.stage}" if isinstance(strategy, DeepSpeed) else strategy.kind,
        numbers,
        *(["gradient checkpointing"] if memory.gradient_checkpointing else []),
        *(["GradCache"] if memory.grad_cache else []),
        "packed rows" if memory.packing else "padded rows",
        f"global batch {config.global_batch:,}",
    ]


def _towers(e: Estimate) -> tuple[str, list[tuple[str, ...]]]:
    towers = e.towers
    return f"  {'':<{WIDE}}" + "".join(f"{tower.name:<28}" for tower in towers), [
        ("backbone", *(tower.backbone for tower in towers)),
        ("parameters", *(f"{tower.shape.parameters:,}" for tower in towers)),
        ("without embeddings", *(f"{tower.shape.non_embedding_parameters:,}" for tower in towers)),
        ("trained, with the projection", *(f"{tower.trained:,}" for tower in towers)),
        ("rows of a GPU in a step", *(f"{tower.rows:,}" for tower in towers)),
        ("tokens of a row, mean", *(f"{tower.tokens:,.0f}" for tower in towers)),
        ("tokens of a row, longest", *(f"{tower.longest:,}" for tower in towers)),
    ]


def _memory(e: Estimate) -> tuple[str, list[tuple[str, ...]]]:
    state = e.state
    together = f"{_gib(e.memory)} of {e.gpu.memory / GIB:.0f} GiB: " + ("fits" if e.fits else "DOES NOT FIT")
    rows: list[tuple[str, ...]] = [
        ("weights", _gib(state.weights)),
        ("gradients", _gib(state.gradients)),
        ("optimizer state", _gib(state.optimizer)),
        ("gathered and reduced at once", _gib(state.gathered)),
        ("activations", _gib(e.activations)),
        ("gathered embeddings and scores", _gib(e.scores)),
        ("CUDA, NCCL, fragmentation", _gib(e.memory - state.total - e.activations - e.scores)),
        ("together", together),
    ]
    # Every worker builds both towers in float32 before they are spread.
    rows.append(("host memory of a worker, at the start", _gib(4.0 * e.parameters)))
    if state.host:
        rows.append(("host memory of a worker, offloaded", _gib(state.host)))
    if not e.fits:
        rows.append(("to make it fit", _remedy(e)))
    return "memory of one GPU at the peak", rows


def _work(e: Estimate) -> tuple[str, list[tuple[str, ...]]]:
    work = e.work
    return "one step, all GPUs", [
        ("tokens", f"{e.step_tokens:,.0f}"),
        ("operations forward", _short(work.forward)),
        ("operations backward", _short(work.backward)),
        ("operations repeated to save memory", _short(work.again)),
        ("seconds of arithmetic", f"{e.work_seconds:.3g}"),
        ("sent by each GPU", _gib(e.exchanged)),
        ("seconds of sending", f"{e.exchange_seconds:.3g}"),
        ("seconds, the longer of the two", f"{e.step_seconds:.3g}"),
        ("tokens a second, each GPU", f"{e.step_tokens / e.step_seconds / e.gpus:,.0f}"),
        ("MFU (repeated operations left out)", f"{_mfu(e):.0%}"),
    ]


def _time(e: Estimate) -> tuple[str, list[tuple[str, ...]]]:
    if e.steps is None:
        return "the run", [("steps, tokens, days", "unknown before `collect`: give --rows N")]
    seconds = e.steps * e.step_seconds
    return "the run", [
        ("training rows, epochs", f"{e.assumed.rows:,}, {e.config.epochs:g}"),
        ("steps", f"{e.steps:,}"),
        ("tokens", _short(e.steps * e.step_tokens)),
        ("operations", _short(e.steps * e.work.total)),
        ("days", f"{seconds / DAY:,.2f} ({seconds * e.gpus / 3600:,.0f} GPU hours)"),
    ]


def _mfu(e: Estimate) -> float:
    return e.work.model / (e.step_seconds * e.gpus * e.gpu.peak)


def _assumed(e: Estimate) -> list[str]:
    given = e.assumed
    across = f"{e.gpu.link:g} GB/s between the GPUs of a node"
    if e.gpus > NODE:
        across = f"nodes of {NODE}, {given.network:g} GB/s between them"
    return [
        f"{given.mfu:.0%} of {e.gpu.peak / 1e12:,.0f} TFLOP/s a GPU, repeated operations counted as work",
        f"{across}; the shorter of sending and arithmetic hides behind the longer",
        f"{given.negatives} hard negative(s) a row; activations are counted at the longest rows",
        _lengths(e),
        "only matrix products are counted; a causal model computes half of its attention scores",
        "fused attention: no matrix of all tokens by all tokens is kept",
        f"{RUNTIME / GIB:g} GiB for CUDA and NCCL, {FRAGMENTED:.0%} lost to fragmentation",
        "AdamW keeps two float32 numbers a trained parameter, adamw_8bit two bytes",
        "not counted: evaluation, checkpoints, reading data, waiting for the slowest GPU (lower --mfu)",
    ]


def _lengths(e: Estimate) -> str:
    if not e.config.memory.packing:
        return "arithmetic is counted at the longest rows: without packing all are padded to them"
    means = {"queries": e.assumed.query_tokens, "documents": e.assumed.document_tokens}
    unknown = [side for side, tokens in means.items() if tokens is None]
    if not unknown:
        return "arithmetic is counted at the mean lengths given"
    options = ", ".join(f"--{'query' if side == 'queries' else 'document'}-tokens" for side in unknown)
    return f"arithmetic is counted as if all {' and '.join(unknown)} were as long as the longest ({options})"


def _remedy(e: Estimate) -> str:
    config: TrainConfig = e.config
    largest = max(
        (e.activations, "activations"),
        (e.scores, "scores"),
        (e.state.optimizer + e.state.gradients + e.state.weights, "state"),
        (e.state.gathered, "gathered"),
    )[1]
    if largest == "activations":
        if not config.memory.gradient_checkpointing:
            return "--set train.memory.gradient_checkpointing=true"
        return "--set train.memory.grad_cache.document_rows=4, or more GPUs"
    if largest == "scores":
        return "a smaller train.global_batch, or more GPUs"
    if config.strategy.kind == "ddp":
        return "--set train.strategy.kind=fsdp2, or LoRA: --set train.document.lora.rank=16 and the query's"
    if largest == "gathered" and config.strategy.kind == "fsdp2" and not config.strategy.reshard:
        return "--set train.strategy.reshard=true"
    if largest == "gathered" and config.strategy.kind != "fsdp2":
        return "--set train.strategy.kind=fsdp2"
    return "more GPUs, offloading (train.strategy), or LoRA (train.document.lora, train.query.lora)"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _short(count: float) -> str:
    for letter, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= unit:
            return f"{count / unit:,.4g} {letter}"
    return f"{count:,.0f}"
