"""What a training step costs: memory and traffic of one GPU, arithmetic, and the time of a run of stage I.

    TrainConfig, Assumptions ─estimate─► Estimate; `train --dry-run` prints it (scaling/output.py)

Activations are counted tensor by tensor for transformers' layers with fused attention (a test compares them
with what autograd really saves), without dropout masks and the low-rank states of adapters (a few percent).
What a strategy keeps whole, shards or gathers follows from its engine in `train/strategies`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from scalingnote.errors import ConfigError
from scalingnote.models import flops
from scalingnote.models.config import LookupConfig, Lora, Scratch, Stored, TokenWiseConfig, TowerConfig
from scalingnote.models.flops import Shape, Work, adapter_parameters, backbone_shape
from scalingnote.models.prompt import PLACEHOLDERS
from scalingnote.scaling.config import Assumptions, GpuName
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Optimizer, Strategy, TrainConfig

# autocast: float32 weights, cast for every matrix product. bfloat16: weights and residual stream.
Numbers = Literal["float32", "autocast", "bfloat16"]
GIB = 2.0**30
STORED_BYTES = {"int8": 1.0, "nf4": 0.5 + 2 / 64}  # of a frozen weight; nf4 has a scale for 64
# DeepSpeed's own defaults, in elements: weights gathered at once, gradients reduced at once.
MAX_LIVE_PARAMETERS = 1e9
BUCKET_ELEMENTS = 5e8
RUNTIME_BYTES = 1.5 * GIB  # CUDA's context, NCCL's buffers
NODE_GPUS = 8
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
class Gpu:
    """A kind of GPU, by its manufacturer's figures."""

    memory: float  # bytes that a program can use
    peak: float  # dense bfloat16 operations per second
    link: float  # GB/s to the other GPUs of its node, one way


GPUS: dict[GpuName, Gpu] = {
    "H200": Gpu(139 * GIB, 989e12, 450.0),
    "H100": Gpu(79 * GIB, 989e12, 450.0),
    "A100": Gpu(79 * GIB, 312e12, 300.0),
    "L40S": Gpu(44 * GIB, 362e12, 32.0),
    "L4": Gpu(22 * GIB, 121e12, 32.0),
}


def exchanged(
    strategy: Strategy, *, gathered: float, reduced: float, trained: int, gpus: int, numbers: Numbers
) -> float:
    """Bytes that one GPU sends in a step of ring collectives. Gradients are reduced in float32.

    `gathered` are the parameters of sharded towers, times how often a step gathers them; `reduced` the same,
    times how often it reduces their gradients; `trained` those that learn; `gpus` those of all nodes.
    """
    wide = 4 if numbers == "float32" else 2
    match strategy:
        case Ddp():
            moved = 2 * 4.0 * trained  # reduce-scatter and all-gather, once a step
        case Fsdp2(reshard=reshard):
            moved = wide * (gathered if reshard else gathered / 2) + 4.0 * reduced
        case DeepSpeed(stage=3):
            moved = wide * gathered + 4.0 * reduced
        case DeepSpeed(stage=stage):
            moved = 4.0 * (reduced if stage == 2 else trained) + wide * trained
    return moved * (gpus - 1) / gpus


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
    if config.offload_optimizer:  # the optimizer steps on the host
        shard = 4.0 * trained / gpus
        host, optimizer, gradients = optimizer + shard, 0.0, gradients - shard
    if config.offload_parameters and config.stage == 3:
        host, weights = host + weights, 0.0
    return TrainingState(weights, gradients, optimizer, gathered, host)


def score_bytes(
    *, rows: int, ranks: int, columns: int, views: int, prefixes: tuple[int, ...], dim: int, masked: bool
) -> float:
    """Bytes of the loss: embeddings of all ranks, their prefixes, and one score matrix of this GPU's rows.

    Each matrix is freed before the next view or prefix allocates its own; only gradients of embeddings
    remain.
    """
    everywhere = rows * ranks * (columns * views + 1)
    # Of each prefix: the normalized copy, its accumulated gradient, and the gradient in flight.
    embeddings = 4.0 * everywhere * (dim + 3 * sum(prefixes))
    pairs = float(rows * rows * ranks * columns)
    return embeddings + 2 * 4.0 * pairs + (2.0 * pairs if masked else 0.0)


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
    work = Work(0.0, 0.0)
    for side in (query, document):
        of_row = flops.row(
            side.shape,
            tokens=side.tokens,
            pooled=side.pooled,
            dim=dim,
            lora=side.lora,
            checkpointing=checkpointing,
            grad_cache=grad_cache,
        )
        work += of_row.times(side.rows)
    return work


def operations_per_parameter(
    query: TowerInput, document: TowerInput, *, dim: int, checkpointing: bool = False
) -> float:
    """The k of budget = k·N·D: operations of a pair per parameter.

    N are the document tower's parameters without embeddings, D training pairs (ScalingNote, section 4.4).
    """
    work = pair_work(query, document, dim=dim, checkpointing=checkpointing)
    return work.total / document.shape.non_embedding_parameters


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
    strategy: Strategy  # the config's, or the one that training chooses
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
    def work_seconds(self) -> float:
        """Time of one step's arithmetic at the assumed MFU."""
        return self.work.total / (self.config.ranks * self.gpu.peak * self.assumed.mfu)

    @property
    def exchange_seconds(self) -> float:
        """Time of one step's collectives, over the network or inside a single node."""
        # A ring through all GPUs enters each node once, over all of the node's network cards together.
        several_nodes = self.config.ranks > NODE_GPUS
        gigabytes = min(self.gpu.link, self.assumed.network) if several_nodes else self.gpu.link
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
        steps = round(self.assumed.rows // self.config.global_batch * self.config.epochs)
        return steps if self.config.max_steps is None else min(steps, self.config.max_steps)


def estimate(config: TrainConfig, assumed: Assumptions) -> Estimate:
    """Estimate a run of stage I with the assumed hardware, rows and lengths.

    Raises:
        ConfigError: a backbone's shape is not known offline, or the query tower is a lookup table.
    """
    query, document = towers = (_tower("query", config, assumed), _tower("document", config, assumed))
    # Adapters of both towers on one base hold its frozen weights once.
    bases = [tower for tower in towers if tower.frozen][: 1 if _shares_base(config) else 2]
    frozen, trained = sum(tower.frozen for tower in bases), sum(tower.trained for tower in towers)
    strategy = config.strategy_for(trained)
    half: Numbers = "autocast" if isinstance(strategy, Ddp) else "bfloat16"
    numbers: Numbers = "float32" if config.precision == "float32" else half
    columns = 1 + (assumed.negatives if config.losses.denominator == "positives_and_negatives" else 0)
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
        masked=config.losses.mask_known,
    )
    return Estimate(
        config=config,
        assumed=assumed,
        strategy=strategy,
        numbers=numbers,
        towers=towers,
        parameters=trained + frozen,
        trained=trained,
        state=state,
        activations=_activations(config, towers, numbers),
        scores=scores,
        work=_step_work(config, query, document, columns=columns),
        exchanged=_exchanged(config, strategy, towers, numbers),
    )


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


def _activations(config: TrainConfig, towers: Sequence[TowerEstimate], numbers: Numbers) -> float:
    """Bytes of activations: of one chunk of one tower with GradCache, else of all rows of both towers."""
    alive = [
        float(tower.chunk * tower.longest)
        * tower_bytes(tower.shape, numbers, checkpointing=config.memory.gradient_checkpointing)
        for tower in towers
    ]
    return max(alive) if config.memory.grad_cache else sum(alive)


def _exchanged(
    config: TrainConfig, strategy: Strategy, towers: Sequence[TowerEstimate], numbers: Numbers
) -> float:
    """Bytes that one GPU sends.

    A plain step gathers weights forward and backward; GradCache twice forward and once backward per chunk.
    """
    gathers = 3 if config.memory.grad_cache else 2
    passes = [(tower, ceil(tower.rows / tower.chunk)) for tower in towers]
    return exchanged(
        strategy,
        gathered=1.0 * sum(gathers * n * (tower.trained + tower.frozen) for tower, n in passes),
        reduced=1.0 * sum(n * tower.trained for tower, n in passes),
        trained=sum(tower.trained for tower in towers),
        gpus=config.ranks,
        numbers=numbers,
    )


def _tower(name: Literal["query", "document"], config: TrainConfig, assumed: Assumptions) -> TowerEstimate:
    settings = config.document if name == "document" else _query_settings(config)
    backbone = settings.backbone
    assert backbone is not None
    shape = backbone_shape(backbone)
    pairs, cache = config.global_batch // config.ranks, config.memory.grad_cache
    if name == "query":
        per_pair, pooled, new, mean = 1, 1, 0, assumed.query_tokens
        chunk = cache.query_rows if cache else pairs
    else:
        per_pair, pooled = 1 + assumed.negatives, sum(p in config.document.prompt for p in PLACEHOLDERS)
        # Under an adapter the document tower also learns the embeddings of its placeholders.
        new, mean = len(PLACEHOLDERS) * shape.hidden, assumed.document_tokens
        chunk = cache.document_rows if cache else pairs * per_pair
    learnt = adapter_parameters(shape, settings.lora) + new if settings.lora else shape.parameters
    shares_weights = name == "query" and config.shares_backbone
    # A padded row costs as much as the longest one.
    tokens = mean if mean is not None and config.memory.packing else float(settings.max_length)
    # A token-wise tower encodes each token together with an end token, and once more if the whole query is
    # the target (align). Instructions shared by tokens and repeated tokens of a batch are encoded once.
    times = (2 + (config.align is not None)) if isinstance(settings, TokenWiseConfig) else 1
    tokens = min(tokens, float(settings.max_length)) * times
    return TowerEstimate(
        name=name,
        backbone=f"scratch {backbone.architecture}" if isinstance(backbone, Scratch) else backbone.path,
        input=TowerInput(shape, tokens, per_pair, pooled, settings.lora),
        trained=(0 if shares_weights else learnt) + shape.hidden * config.dim,
        frozen=shape.parameters if settings.lora and not shares_weights else 0,
        rows=pairs * per_pair,
        chunk=min(chunk, pairs * per_pair),
        longest=settings.max_length * times,
    )


def _query_settings(config: TrainConfig) -> TowerConfig | TokenWiseConfig:
    settings = config.query_tower
    if isinstance(settings, LookupConfig):
        raise ConfigError(
            "a lookup query tower has no backbone to size: dry runs are for towers that have one"
        )
    return settings


def _shares_base(config: TrainConfig) -> bool:
    query, document = _query_settings(config), config.document
    both = query.lora is not None and document.lora is not None
    return config.share_base and both and query.backbone == document.backbone
