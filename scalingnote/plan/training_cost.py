"""Memory of one GPU, arithmetic, and the time of a run of stage I.

    TrainConfig, Assumptions ─estimate─► Estimate ─dry_run_text─► what `run --dry-run` prints

Time is arithmetic at an assumed share of the GPU's peak (MFU), in which communication is included.

Activations are counted tensor by tensor for transformers' layers with fused attention (a test compares them
with what autograd really saves), without dropout masks and the low-rank states of adapters (a few percent).
What a strategy keeps whole, shards or gathers follows from its engine in `train/strategies`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scalingnote.core import reports
from scalingnote.core.errors import ConfigError
from scalingnote.core.units import DAY_S, GIB
from scalingnote.models import flops
from scalingnote.models.config import LookupConfig, Lora, Scratch, Stored, TokenWiseConfig, TowerConfig
from scalingnote.models.flops import Shape, Work, adapter_parameters, backbone_shape
from scalingnote.models.prompt import PLACEHOLDERS
from scalingnote.plan.config import GPUS, Assumptions, Gpu
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Optimizer, Strategy, TrainConfig

# autocast: float32 weights, cast for every matrix product. bfloat16: weights and residual stream.
Numbers = Literal["float32", "autocast", "bfloat16"]
STORED_BYTES = {"int8": 1.0, "nf4": 0.5 + 2 / 64}  # of a frozen weight; nf4 has a scale for 64
# DeepSpeed's own defaults, in elements: weights gathered at once, gradients reduced at once.
MAX_LIVE_PARAMETERS = 1e9
BUCKET_ELEMENTS = 5e8
RUNTIME_BYTES = 1.5 * GIB  # CUDA's context, NCCL's buffers
FRAGMENTATION = 0.05  # share of allocated memory in blocks that the allocator cannot join


def layer_bytes(shape: Shape, numbers: Numbers) -> int:
    """Bytes that autograd keeps of one token in one layer until its backward pass, without recomputation."""
    wide = 4 if numbers == "float32" else 2
    heads = 4 * shape.heads  # log-sum-exp of the softmax
    if not shape.causal:
        # Both norms, the inputs of all matrices, queries, keys, values and the output of attention.
        states, sums = {"float32": (32, 16), "autocast": (24, 16), "bfloat16": (16, 8)}[numbers]
        return states * shape.hidden + 2 * wide * shape.intermediate + heads + sums
    # RMSNorm computes in float32 for every input type; under autocast each matrix also keeps a cast copy.
    states = {"float32": 24, "autocast": 26, "bfloat16": 16}[numbers] * shape.hidden
    attention = 2 * wide * (shape.query_width + shape.kv_width) + heads
    if shape.qk_norm:
        attention += (2 * wide + (0 if wide == 4 else 2)) * (shape.query_width + shape.kv_width)
        attention += 4 * (shape.heads + shape.kv_heads)
    return states + attention + 4 * wide * shape.intermediate + 8


def tower_bytes(shape: Shape, numbers: Numbers, *, checkpointing: bool) -> int:
    """Bytes of one token's activations in all layers at their peak."""
    layer = layer_bytes(shape, numbers)
    residual = (2 if numbers == "bfloat16" else 4) * shape.hidden
    # Gradients of the feed-forward part, the widest in a layer, during its backward pass.
    feed_forward = 3 * (4 if numbers == "float32" else 2) * shape.intermediate
    ends = 3 * residual  # token embeddings, the last norm
    if checkpointing:
        return shape.layers * residual + layer + feed_forward + ends
    return shape.layers * layer + feed_forward + ends


@dataclass(frozen=True)
class TrainingState:
    """Bytes on one GPU that do not depend on the batch; `host` bytes are offloaded to the node's memory."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """On the GPU."""
        return self.weights + self.gradients + self.optimizer + self.gathered


def training_state(
    strategy: Strategy,
    optimizer: Optimizer,
    *,
    trained: int,
    frozen: int,
    frozen_tables: int = 0,
    largest: int,
    gpus: int,
    numbers: Numbers,
    base: Stored = "full",
) -> TrainingState:
    """Bytes of weights, gradients and optimizer state on one GPU.

    `trained` and `frozen` are numbers of parameters; `frozen_tables` those of frozen embeddings, which stay
    float32 if other frozen weights do not; `largest` most parameters that are gathered together: a tower's
    token embeddings and two layers; `gpus` those of all nodes; `base` how frozen linear layers are stored.
    """
    moments = 2 if optimizer.kind == "adamw_8bit" else 8  # bytes per parameter: two numbers
    everything = trained + frozen
    wide = 4 if numbers == "float32" else 2
    stored = STORED_BYTES.get(base, wide) * (frozen - frozen_tables)
    weights = stored + 4.0 * (trained + frozen_tables)
    match strategy:
        case Ddp():
            casts = 2.0 * trained * (numbers == "autocast")  # cached until the step ends
            return TrainingState(weights, 4.0 * trained, float(moments * trained), casts)
        case Fsdp2(reshard=reshard, offload=offload):
            shares = (weights / gpus, 4.0 * trained / gpus, moments * trained / gpus)
            whole = largest if reshard else everything
            gathered = (wide * whole + 4.0 * min(largest, trained)) * (gpus > 1)
            if offload:
                return TrainingState(0.0, 0.0, 0.0, gathered, host=sum(shares))
            return TrainingState(*shares, gathered)
        case DeepSpeed():
            return _zero(strategy, moments, trained=trained, everything=everything, gpus=gpus, wide=wide)


def _zero(
    config: DeepSpeed, moments: int, *, trained: int, everything: int, gpus: int, wide: int
) -> TrainingState:
    copy = 4 if wide == 2 else 0  # float32 master weights beside the bfloat16 ones
    weights = float(wide * everything) / (gpus if config.stage == 3 else 1)
    optimizer = (copy + moments) * trained / gpus
    gradients = 4.0 * trained / gpus + (float(wide * trained) if config.stage == 1 else 0.0)
    gathered = 4.0 * min(BUCKET_ELEMENTS, trained)
    if config.stage == 3:
        gathered += wide * min(MAX_LIVE_PARAMETERS, everything)
    host = 0.0
    if config.offload:  # the optimizer steps on the host
        shard = 4.0 * trained / gpus
        host, optimizer, gradients = optimizer + shard, 0.0, gradients - shard
    if config.offload and config.stage == 3:
        host, weights = host + weights, 0.0
    return TrainingState(weights, gradients, optimizer, gathered, host)


def score_bytes(
    *, rows: int, ranks: int, columns: int, views: int, prefixes: tuple[int, ...], dim: int
) -> float:
    """Bytes of the loss: embeddings of all ranks, their prefixes, and one score matrix of this GPU's rows.

    Each matrix is freed before the next view or prefix allocates its own; only gradients of embeddings
    remain.
    """
    everywhere = rows * ranks * (columns * views + 1)
    # Of each prefix: the normalized copy, its accumulated gradient, and the gradient in flight.
    embeddings = 4.0 * everywhere * (dim + 3 * sum(prefixes))
    pairs = float(rows * rows * ranks * columns)
    return embeddings + 2 * 4.0 * pairs + 2.0 * pairs


@dataclass(frozen=True)
class TowerInput:
    """The part of a training pair that one tower encodes."""

    shape: Shape
    tokens: float  # of a row
    rows: int = 1  # 1 for a query; positive and hard negatives for documents
    pooled: int = 1  # hidden states of a row that become embeddings
    lora: Lora | None = None  # None: all weights learn


def pair_work(
    query: TowerInput,
    document: TowerInput,
    *,
    dim: int,
    checkpointing: bool = False,
    grad_cache: bool = False,
) -> Work:
    """Operations of a query, its positive and its hard negatives, forward and backward, without the loss."""
    of_query, of_document = (
        flops.row(
            side.shape,
            tokens=side.tokens,
            pooled=side.pooled,
            dim=dim,
            lora=side.lora,
            checkpointing=checkpointing,
            grad_cache=grad_cache,
        ).times(side.rows)
        for side in (query, document)
    )
    return of_query + of_document


@dataclass(frozen=True)
class TowerEstimate:
    """One tower of the run, and its input in a step."""

    name: str
    backbone: str
    input: TowerInput  # of a training pair
    trained: int
    frozen: int
    rows: int  # of a GPU in a step
    chunk: int  # rows of one forward pass: all, unless GradCache divides them
    longest: int  # tokens of a row, for memory

    @property
    def shape(self) -> Shape:
        """Of the backbone."""
        return self.input.shape


@dataclass(frozen=True)
class Estimate:
    """Resources of a run of stage I: bytes on one GPU, operations of a step over all GPUs."""

    config: TrainConfig
    assumed: Assumptions
    negatives: int  # hard negatives of a row
    strategy: Strategy  # the config's, or the one that training chooses
    numbers: Numbers
    towers: tuple[TowerEstimate, TowerEstimate]
    parameters: int
    trained: int
    state: TrainingState
    activations: float
    scores: float
    work: Work

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
        return self.config.ranks * sum(tower.rows * tower.input.tokens for tower in self.towers)

    @property
    def step_seconds(self) -> float:
        """Time of one step at the assumed MFU."""
        return self.work.total / (self.config.ranks * self.gpu.peak * self.assumed.mfu)

    @property
    def steps(self) -> int | None:
        """Steps of the run; None if the number of rows is unknown."""
        if self.assumed.rows is None:
            return None
        steps = round(self.assumed.rows // self.config.global_batch * self.config.epochs)
        return steps if self.config.max_steps is None else min(steps, self.config.max_steps)


def estimate(config: TrainConfig, assumed: Assumptions, *, negatives: int = 1) -> Estimate:
    """Estimate a run of stage I with the assumed hardware, rows and lengths.

    `negatives` is the number of hard negatives of a row.

    Raises:
        ConfigError: a backbone's shape is not known offline, or the query tower is a lookup table.
    """
    if isinstance(config.query_tower, LookupConfig):
        raise ConfigError(
            "a lookup query tower has no backbone to size: dry runs are for towers that have one"
        )
    query, document = towers = (
        _tower(config, config.query_tower, assumed),
        _tower(config, config.document, assumed, negatives=negatives),
    )
    loras = [tower.input.lora for tower in towers]
    # Adapters of both towers on one base hold its frozen weights once.
    shared = None not in loras and query.backbone == document.backbone
    bases = [tower for tower in towers if tower.frozen][: 1 if shared else 2]
    frozen, trained = sum(tower.frozen for tower in bases), sum(tower.trained for tower in towers)
    strategy = config.strategy_for(trained)
    half: Numbers = "autocast" if isinstance(strategy, Ddp) else "bfloat16"
    numbers: Numbers = "float32" if config.precision == "float32" else half
    columns = 1 + (negatives if config.losses.denominator == "positives_and_negatives" else 0)
    state = training_state(
        strategy,
        config.optimizer,
        trained=trained,
        frozen=frozen,
        frozen_tables=sum(tower.shape.embedding_parameters for tower in bases),
        largest=max(tower.shape.embedding_parameters + 2 * tower.shape.layer_parameters for tower in towers),
        gpus=config.ranks,
        numbers=numbers,
        base=config.document.lora.base if config.document.lora else "full",
    )
    scores = score_bytes(
        rows=query.rows,
        ranks=config.ranks,
        columns=columns,
        views=document.input.pooled,
        prefixes=config.losses.matryoshka,
        dim=config.dim,
    )
    return Estimate(
        config=config,
        assumed=assumed,
        negatives=negatives,
        strategy=strategy,
        numbers=numbers,
        towers=towers,
        parameters=trained + frozen,
        trained=trained,
        state=state,
        activations=_activations(config, towers, numbers),
        scores=scores,
        work=_step_work(config, query, document, columns=columns),
    )


def _activations(config: TrainConfig, towers: Sequence[TowerEstimate], numbers: Numbers) -> float:
    """Bytes of activations: of one chunk of one tower with GradCache, else of all rows of both towers."""
    alive = [
        float(tower.chunk * tower.longest)
        * tower_bytes(tower.shape, numbers, checkpointing=config.memory.gradient_checkpointing)
        for tower in towers
    ]
    return max(alive) if config.memory.grad_cache else sum(alive)


def _step_work(config: TrainConfig, query: TowerEstimate, document: TowerEstimate, *, columns: int) -> Work:
    """Operations of a step over all GPUs: both towers and the loss."""
    pair = pair_work(
        query.input,
        document.input,
        dim=config.dim,
        checkpointing=config.memory.gradient_checkpointing,
        grad_cache=config.memory.grad_cache is not None,
    )
    loss = flops.loss(
        rows=config.global_batch,
        columns=columns,
        views=document.input.pooled,
        prefixes=config.losses.matryoshka,
        bidirectional=config.losses.bidirectional,
    )
    return loss + pair.times(config.ranks * query.rows)


def _tower(
    config: TrainConfig,
    settings: TowerConfig | TokenWiseConfig,
    assumed: Assumptions,
    *,
    negatives: int | None = None,
) -> TowerEstimate:
    """The query tower, or with a number of hard negatives the document tower."""
    assert settings.backbone is not None
    shape, cache = backbone_shape(settings.backbone), config.memory.grad_cache
    pairs, is_query = config.global_batch // config.ranks, negatives is None
    per_pair = 1 if negatives is None else 1 + negatives
    if is_query:
        pooled, new, mean = 1, 0, assumed.query_tokens
        chunk = cache.query_rows if cache else None
    else:
        pooled, mean = sum(p in config.document.prompt for p in PLACEHOLDERS), assumed.document_tokens
        # Under an adapter the document tower also learns the embeddings of its placeholders.
        new, chunk = len(PLACEHOLDERS) * shape.hidden, cache.document_rows if cache else None
    learnt = adapter_parameters(shape, settings.lora) + new if settings.lora else shape.parameters
    shares_weights = is_query and config.shares_backbone
    # A padded row costs as much as the longest one.
    tokens = mean if mean is not None else float(settings.max_length)
    # A token-wise tower encodes each token together with an end token, and once more if the whole query is
    # the target (align). Instructions shared by tokens and repeated tokens of a batch are encoded once.
    times = (2 + (config.align is not None)) if isinstance(settings, TokenWiseConfig) else 1
    backbone = settings.backbone
    return TowerEstimate(
        name="query" if is_query else "document",
        backbone=f"scratch {backbone.architecture}" if isinstance(backbone, Scratch) else backbone.path,
        input=TowerInput(
            shape, min(tokens, float(settings.max_length)) * times, per_pair, pooled, settings.lora
        ),
        trained=(0 if shares_weights else learnt) + shape.hidden * config.dim,
        frozen=shape.parameters if settings.lora and not shares_weights else 0,
        rows=pairs * per_pair,
        chunk=min(chunk or pairs * per_pair, pairs * per_pair),
        longest=settings.max_length * times,
    )


# --- the dry run as text -----------------------------------------------------------------------------------


def dry_run_text(estimated: Estimate) -> str:
    """The estimate as text: towers, memory of a GPU, one step, the run, and all assumptions."""
    strategy, assumed = estimated.strategy, estimated.assumed
    means = {"--query-tokens": assumed.query_tokens, "--document-tokens": assumed.document_tokens}
    text = reports.render(
        "dry_run.txt",
        e=estimated,
        config=estimated.config,
        strategy=f"ZeRO-{strategy.stage}" if isinstance(strategy, DeepSpeed) else strategy.kind,
        remedy=None if estimated.fits else _remedy(estimated),
        without_mean=[option for option, mean in means.items() if mean is None],
        runtime_bytes=RUNTIME_BYTES,
        fragmentation=FRAGMENTATION,
        day_s=DAY_S,
        size=_size,
        count=four_digits,
    )
    return reports.align_columns(text, label=40, cell=26)


def _remedy(e: Estimate) -> str:
    """The setting that reduces the largest part of the memory."""
    config, state = e.config, e.state
    sizes = {
        "activations": e.activations,
        "scores": e.scores,
        "state": state.optimizer + state.gradients + state.weights,
        "gathered": state.gathered,
    }
    match max(sizes, key=sizes.__getitem__):
        case "activations" if not config.memory.gradient_checkpointing:
            return "--set train.memory.gradient_checkpointing=true"
        case "activations":
            return "--set train.memory.grad_cache.document_rows=4, or more GPUs"
        case "scores":
            return "a smaller train.global_batch, or more GPUs"
        case "gathered" if e.strategy.kind == "fsdp2" and not e.strategy.reshard:
            return "--set train.strategy.reshard=true"
        case _ if e.strategy.kind == "ddp":
            return "--set train.strategy.kind=fsdp2, or LoRA (train.document.lora, train.query.lora)"
        case _:
            return "more GPUs, offloading (train.strategy), or LoRA (train.document.lora, train.query.lora)"


def _size(value: float) -> str:
    """Bytes as GiB or MiB."""
    return f"{value / GIB:.2f} GiB" if value >= GIB / 10 else f"{value / 2**20:.1f} MiB"


def four_digits(value: float) -> str:
    """A number with four significant digits if it is not a small whole number: 1,234 or 6.526e9."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
