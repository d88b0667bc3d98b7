"""The dry run of stage I: memory per GPU, arithmetic and time from the config alone, nothing is started.

TrainConfig, Assumptions ─estimate─► Estimate ─as_text─► towers, memory, one step, the run, assumptions
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from scalingnote.errors import ConfigError
from scalingnote.models.config import LookupConfig, Scratch, TokenWiseConfig, TowerConfig
from scalingnote.models.flops import Shape, Work, adapter_parameters, backbone_shape
from scalingnote.models.flops import loss as loss_work
from scalingnote.models.prompt import PLACEHOLDERS
from scalingnote.scaling import training_cost
from scalingnote.scaling.config import Assumptions
from scalingnote.scaling.training_cost import (
    GIB,
    GPUS,
    Gpu,
    Numbers,
    TowerInput,
    TrainingState,
    exchanged,
    tower_bytes,
)
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, TrainConfig

RUNTIME_BYTES = 1.5 * GIB  # CUDA's context, NCCL's buffers
NODE_GPUS = 8
FRAGMENTATION = 0.05  # share of allocated memory in blocks that the allocator cannot join
DAY_S = 86_400
LABEL_WIDTH = 38


@dataclass(frozen=True)
class TowerEstimate:
    """One tower of the run, and its input in a step."""

    name: str
    backbone: str
    shape: Shape
    trained: int
    frozen: int
    rows: int  # of a GPU in a step
    tokens: float  # of a row, for arithmetic
    longest: int  # of a row, for memory


@dataclass(frozen=True)
class Estimate:
    """Resources of a run of stage I: bytes on one GPU, operations of a step over all GPUs."""

    config: TrainConfig
    assumed: Assumptions
    numbers: Numbers
    towers: tuple[TowerEstimate, TowerEstimate]
    parameters: int
    trained: int
    state: TrainingState
    activations: float
    scores: float
    work: Work
    exchanged: float  # bytes that one GPU sends in a step

    @property
    def gpus(self) -> int:
        """One to a worker."""
        return self.config.ranks

    @property
    def gpu(self) -> Gpu:
        """The kind of GPU."""
        return GPUS[self.assumed.gpu]

    @property
    def memory(self) -> float:
        """Bytes on one GPU at the peak."""
        return (self.state.total + self.activations + self.scores) * (1 + FRAGMENTATION) + RUNTIME_BYTES

    @property
    def fits(self) -> bool:
        """Whether the peak fits in the GPU's memory."""
        return self.memory <= self.gpu.memory

    @property
    def step_tokens(self) -> float:
        """Tokens of a step, over all GPUs."""
        return self.gpus * sum(tower.rows * tower.tokens for tower in self.towers)

    @property
    def work_seconds(self) -> float:
        """Time of one step's arithmetic at the assumed MFU."""
        return self.work.total / (self.gpus * self.gpu.peak * self.assumed.mfu)

    @property
    def exchange_seconds(self) -> float:
        """Time of one step's collectives, over the network or inside a single node."""
        # A ring through all GPUs enters each node once, over all of the node's network cards together.
        gigabytes = min(self.gpu.link, self.assumed.network) if self.gpus > NODE_GPUS else self.gpu.link
        return self.exchanged / (gigabytes * 1e9)

    @property
    def step_seconds(self) -> float:
        """Time of one step: communication and arithmetic overlap, so the longer one counts."""
        return max(self.work_seconds, self.exchange_seconds)

    @property
    def steps(self) -> int | None:
        """Steps of the run; None if the number of rows is unknown."""
        if self.assumed.rows is None:
            return None
        return round(self.assumed.rows // self.config.global_batch * self.config.epochs)


def estimate(config: TrainConfig, assumed: Assumptions) -> Estimate:
    """Estimate a run.

    Args:
        config: of stage I.
        assumed: hardware, rows and mean lengths.

    Raises:
        ConfigError: a backbone's shape is not known offline, or the query tower is a lookup table.
    """
    towers = (_tower("query", config, assumed), _tower("document", config, assumed))
    # Adapters of both towers on one base hold its frozen weights once.
    bases = [tower for tower in towers if tower.frozen][: 1 if _shares_base(config) else 2]
    frozen, trained = sum(tower.frozen for tower in bases), sum(tower.trained for tower in towers)
    strategy = config.strategy_for(trained)
    config = config.model_copy(update={"strategy": strategy})
    numbers = _number_format(config)
    columns = 1 + (assumed.negatives if config.losses.denominator == "positives_and_negatives" else 0)
    state = training_cost.training_state(
        strategy,
        config.optimizer,
        trained=trained,
        frozen=frozen,
        frozen_tables=sum(tower.shape.embedding_parameters for tower in bases),
        largest=max(tower.shape.embedding_parameters + 2 * tower.shape.layer_parameters for tower in towers),
        gpus=config.ranks,
        numbers=numbers,
    )
    scores = training_cost.score_bytes(
        rows=config.global_batch // config.ranks,
        ranks=config.ranks,
        columns=columns,
        views=_views(config.document),
        prefixes=config.losses.matryoshka,
        dim=config.dim,
        masked=config.losses.mask_known,
    )
    return Estimate(
        config=config,
        assumed=assumed,
        numbers=numbers,
        towers=towers,
        parameters=trained + frozen,
        trained=trained,
        state=state,
        activations=_activations(config, towers, numbers),
        scores=scores,
        work=_step_work(config, towers, columns=columns),
        exchanged=_exchanged(config, towers, trained=trained, numbers=numbers),
    )


def _step_work(config: TrainConfig, towers: tuple[TowerEstimate, TowerEstimate], *, columns: int) -> Work:
    """Operations of a step over all GPUs: both towers and the loss."""
    per_gpu, views = config.global_batch // config.ranks, _views(config.document)
    loras = (_settings("query", config).lora, config.document.lora)
    query, document = (
        TowerInput(tower.shape, tower.tokens, rows=tower.rows // per_gpu, pooled=pooled, lora=lora)
        for tower, lora, pooled in zip(towers, loras, (1, views), strict=True)
    )
    pair = training_cost.pair_work(
        query,
        document,
        dim=config.dim,
        checkpointing=config.memory.gradient_checkpointing,
        grad_cache=config.memory.grad_cache is not None,
    )
    loss = loss_work(
        rows=config.global_batch,
        columns=columns,
        views=views,
        prefixes=config.losses.matryoshka,
        bidirectional=config.losses.bidirectional,
    )
    return loss + pair.times(config.ranks * per_gpu)


def _exchanged(
    config: TrainConfig, towers: tuple[TowerEstimate, TowerEstimate], *, trained: int, numbers: Numbers
) -> float:
    """A plain step gathers weights forward and backward; GradCache twice forward and once backward per
    chunk."""
    cache = config.memory.grad_cache
    sizes = (cache.query_rows, cache.document_rows) if cache else tuple(tower.rows for tower in towers)
    chunks = [ceil(tower.rows / size) for tower, size in zip(towers, sizes, strict=True)]
    pairs = list(zip(towers, chunks, strict=True))
    return exchanged(
        _strategy(config),
        gathered=1.0 * sum((3 * n if cache else 2) * (tower.trained + tower.frozen) for tower, n in pairs),
        reduced=1.0 * sum(n * tower.trained for tower, n in pairs),
        trained=trained,
        gpus=config.ranks,
        numbers=numbers,
    )


def _tower(name: str, config: TrainConfig, assumed: Assumptions) -> TowerEstimate:
    settings = _settings(name, config)
    backbone = settings.backbone
    assert backbone is not None
    shape = backbone_shape(backbone)
    projection = shape.hidden * config.dim
    rows = config.global_batch // config.ranks
    mean = assumed.query_tokens if name == "query" else assumed.document_tokens
    # Under an adapter the document tower also learns the embeddings of its placeholders.
    new = len(PLACEHOLDERS) * shape.hidden if name == "document" else 0
    learnt = adapter_parameters(shape, settings.lora) + new if settings.lora else shape.parameters
    shares_weights = name == "query" and config.shares_backbone
    # A padded row costs as much as the longest one.
    tokens = mean if mean is not None and config.memory.packing else float(settings.max_length)
    # A token-wise tower encodes each token together with an end token, and once more if the whole query is
    # the target (align). Instructions shared by tokens and repeated tokens of a batch are encoded once.
    times = (2 + (config.align is not None)) if isinstance(settings, TokenWiseConfig) else 1
    return TowerEstimate(
        name=name,
        backbone=f"scratch {backbone.architecture}" if isinstance(backbone, Scratch) else backbone.path,
        shape=shape,
        trained=(0 if shares_weights else learnt) + projection,
        frozen=shape.parameters if settings.lora and not shares_weights else 0,
        rows=rows if name == "query" else rows * (1 + assumed.negatives),
        tokens=min(tokens, float(settings.max_length)) * times,
        longest=settings.max_length * times,
    )


def _settings(name: str, config: TrainConfig) -> TowerConfig | TokenWiseConfig:
    settings = config.query_tower if name == "query" else config.document
    if isinstance(settings, LookupConfig):
        raise ConfigError(
            "a lookup query tower has no backbone to size: dry runs are for towers that have one"
        )
    return settings


def _activations(config: TrainConfig, towers: tuple[TowerEstimate, TowerEstimate], numbers: Numbers) -> float:
    """Bytes of activations: of one chunk of one tower with GradCache, else of all rows of both towers."""
    cache = config.memory.grad_cache
    chunks = (cache.query_rows, cache.document_rows) if cache else tuple(tower.rows for tower in towers)
    alive = [
        min(chunk, tower.rows)
        * tower.longest
        * tower_bytes(tower.shape, numbers, checkpointing=config.memory.gradient_checkpointing)
        for chunk, tower in zip(chunks, towers, strict=True)
    ]
    return float(max(alive) if cache else sum(alive))


def _strategy(config: TrainConfig) -> Ddp | Fsdp2 | DeepSpeed:
    """The strategy of an estimate's config, which names one."""
    assert config.strategy is not None
    return config.strategy


def _number_format(config: TrainConfig) -> Numbers:
    if config.precision == "float32":
        return "float32"
    return "autocast" if isinstance(config.strategy, Ddp) else "bfloat16"


def _shares_base(config: TrainConfig) -> bool:
    query, document = _settings("query", config), config.document
    both = query.lora is not None and document.lora is not None
    return config.share_base and both and query.backbone == document.backbone


def _views(document: TowerConfig) -> int:
    return sum(placeholder in document.prompt for placeholder in PLACEHOLDERS)


def as_text(estimate: Estimate) -> str:
    """The estimate as text: towers, memory of a GPU, one step, the run, and all assumptions."""
    head = (
        f"stage I on {estimate.gpus} x {estimate.assumed.gpu}, one worker each; nothing is started\n"
        f"{', '.join(_knobs(estimate))}"
    )
    blocks = (_towers, _memory, _work, _time)
    assumed = "\n".join(["assumed", *(f"  - {line}" for line in _assumed(estimate))])
    return "\n\n".join([head, *("\n".join(_block(*block(estimate))) for block in blocks), assumed])


def _block(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [f"  {label:<{LABEL_WIDTH}}" + "".join(f"{cell:<28}" for cell in cells) for label, *cells in rows]
    return [line.rstrip() for line in (title, *lines)]


def _knobs(e: Estimate) -> list[str]:
    config, memory = e.config, e.config.memory
    strategy = _strategy(config)
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
    return f"  {'':<{LABEL_WIDTH}}" + "".join(f"{tower.name:<28}" for tower in towers), [
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
    # Every worker builds both towers in float32 before they are sharded.
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
        ("days", f"{seconds / DAY_S:,.2f} ({seconds * e.gpus / 3600:,.0f} GPU hours)"),
    ]


def _mfu(e: Estimate) -> float:
    return e.work.model / (e.step_seconds * e.gpus * e.gpu.peak)


def _assumed(e: Estimate) -> list[str]:
    assumed = e.assumed
    across = f"{e.gpu.link:g} GB/s between the GPUs of a node"
    if e.gpus > NODE_GPUS:
        across = f"nodes of {NODE_GPUS}, {assumed.network:g} GB/s between them"
    return [
        f"{assumed.mfu:.0%} of {e.gpu.peak / 1e12:,.0f} TFLOP/s a GPU, repeated operations counted as work",
        f"{across}; the shorter of sending and arithmetic hides behind the longer",
        f"{assumed.negatives} hard negative(s) a row; activations are counted at the longest rows",
        _lengths(e),
        "only matrix products are counted; a causal model computes half of its attention scores",
        "fused attention: no matrix of all tokens by all tokens is kept",
        f"{RUNTIME_BYTES / GIB:g} GiB for CUDA and NCCL, {FRAGMENTATION:.0%} lost to fragmentation",
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
    strategy = _strategy(config)
    if strategy.kind == "ddp":
        return "--set train.strategy.kind=fsdp2, or LoRA: --set train.document.lora.rank=16 and the query's"
    if largest == "gathered" and strategy.kind == "fsdp2" and not strategy.reshard:
        return "--set train.strategy.reshard=true"
    if largest == "gathered" and strategy.kind != "fsdp2":
        return "--set train.strategy.kind=fsdp2"
    return "more GPUs, offloading (train.strategy), or LoRA (train.document.lora, train.query.lora)"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _short(count: float) -> str:
    for letter, unit in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= unit:
            return f"{count / unit:,.4g} {letter}"
    return f"{count:,.0f}"
