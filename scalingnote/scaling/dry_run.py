"""The dry run of stage I: memory per GPU, arithmetic and time from the config, nothing started.

TrainConfig, Assumptions -> Estimate
"""

from dataclasses import dataclass
from math import ceil

from scalingnote.errors import ConfigError
from scalingnote.models.config import LookupConfig, Scratch, TokenWiseConfig, TowerConfig
from scalingnote.models.flops import Shape, Work, adapter_parameters, backbone_shape
from scalingnote.models.flops import loss as loss_work
from scalingnote.models.prompt import PLACEHOLDERS
from scalingnote.scaling import flops, memory
from scalingnote.scaling.activations import Numbers, tower_bytes
from scalingnote.scaling.config import Assumptions
from scalingnote.scaling.flops import Side
from scalingnote.scaling.hardware import GIB, GPUS, Gpu, exchanged
from scalingnote.scaling.memory import State
from scalingnote.train.config import Ddp, TrainConfig

RUNTIME = 1.5 * GIB  # CUDA's context, NCCL's buffers
NODE = 8  # GPUs of a node
FRAGMENTED = 0.05  # of what is allocated: blocks the allocator cannot join


@dataclass(frozen=True)
class Tower:
    """One tower of the run, and what a step feeds it."""

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
    """What a run of stage I takes. Bytes on one GPU; work of a whole step over all GPUs."""

    config: TrainConfig
    assumed: Assumptions
    numbers: Numbers
    towers: tuple[Tower, Tower]
    parameters: int
    trained: int
    state: State
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
        return (self.state.total + self.activations + self.scores) * (1 + FRAGMENTED) + RUNTIME

    @property
    def fits(self) -> bool:
        """Whether that is less than the GPU has."""
        return self.memory <= self.gpu.memory

    @property
    def step_tokens(self) -> float:
        """Tokens of a step, over all GPUs."""
        return self.gpus * sum(tower.rows * tower.tokens for tower in self.towers)

    @property
    def work_seconds(self) -> float:
        """Arithmetic of one step, at the assumed share of the peak."""
        return self.work.total / (self.gpus * self.gpu.peak * self.assumed.mfu)

    @property
    def exchange_seconds(self) -> float:
        """What is sent in one step: over the network, or inside a node where one suffices."""
        # A ring through all GPUs crosses into each node once, over all of the node's cards together.
        gigabytes = min(self.gpu.link, self.assumed.network) if self.gpus > NODE else self.gpu.link
        return self.exchanged / (gigabytes * 1e9)

    @property
    def step_seconds(self) -> float:
        """One step: sending hides behind arithmetic, or the other way round."""
        return max(self.work_seconds, self.exchange_seconds)

    @property
    def steps(self) -> int | None:
        """Of the run; None when nobody said how many rows there are."""
        if self.assumed.rows is None:
            return None
        return round(self.assumed.rows // self.config.global_batch * self.config.epochs)


def estimate(config: TrainConfig, assumed: Assumptions) -> Estimate:
    """Work out a run; ConfigError when a backbone's shape cannot be known without downloading it."""
    numbers = _numbers(config)
    towers = (_tower("query", config, assumed), _tower("document", config, assumed))
    shared = _shares_base(config)
    bases = [tower for tower in towers if tower.frozen][: 1 if shared else 2]
    frozen = sum(tower.frozen for tower in bases)
    trained = sum(tower.trained for tower in towers)
    ranks, rows = config.ranks, config.global_batch // config.ranks
    losses = config.losses
    views = _views(config.document)
    columns = 1 + (assumed.negatives if losses.denominator == "positives_and_negatives" else 0)
    work = loss_work(
        rows=config.global_batch,
        columns=columns,
        views=views,
        prefixes=losses.matryoshka,
        bidirectional=losses.bidirectional,
    )
    both = (_settings("query", config), config.document)
    query, document = (
        Side(
            tower.shape,
            tower.tokens,
            rows=tower.rows // rows,
            pooled=pooled,
            lora=settings.lora,
        )
        for tower, settings, pooled in zip(towers, both, (1, views), strict=True)
    )
    of_pair = flops.of_pair(
        query,
        document,
        dim=config.dim,
        checkpointing=config.memory.gradient_checkpointing,
        grad_cache=config.memory.grad_cache is not None,
    )
    work += of_pair.times(ranks * rows)
    return Estimate(
        config=config,
        assumed=assumed,
        numbers=numbers,
        towers=towers,
        parameters=trained + frozen,
        trained=trained,
        state=memory.state(
            config.strategy,
            config.optimizer,
            trained=trained,
            frozen=frozen,
            frozen_tables=sum(tower.shape.embedding_parameters for tower in bases),
            largest=max(
                tower.shape.embedding_parameters + 2 * tower.shape.layer_parameters for tower in towers
            ),
            gpus=ranks,
            numbers=numbers,
        ),
        activations=_activations(config, towers, numbers),
        scores=memory.scores(
            rows=rows,
            ranks=ranks,
            columns=columns,
            views=views,
            prefixes=losses.matryoshka,
            dim=config.dim,
            masked=losses.mask_known,
        ),
        work=work,
        exchanged=_exchanged(config, towers, trained=trained, numbers=numbers),
    )


def _exchanged(config: TrainConfig, towers: tuple[Tower, Tower], *, trained: int, numbers: Numbers) -> float:
    """A plain step gathers weights forward and backward; GradCache does for each chunk, forward twice."""
    cache = config.memory.grad_cache
    sizes = (cache.query_rows, cache.document_rows) if cache else tuple(tower.rows for tower in towers)
    chunks = [ceil(tower.rows / size) for tower, size in zip(towers, sizes, strict=True)]
    pairs = list(zip(towers, chunks, strict=True))
    return exchanged(
        config.strategy,
        gathered=1.0 * sum((3 * n if cache else 2) * (tower.trained + tower.frozen) for tower, n in pairs),
        reduced=1.0 * sum(n * tower.trained for tower, n in pairs),
        trained=trained,
        gpus=config.ranks,
        numbers=numbers,
    )


def _tower(name: str, config: TrainConfig, assumed: Assumptions) -> Tower:
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
    borrowed = name == "query" and config.shares_backbone
    # Padded rows cost what the longest one does.
    tokens = mean if mean is not None and config.memory.packing else float(settings.max_length)
    # Each token is read with an end token of its own, and once more where the whole query teaches. An
    # instruction is shared by many of them, and a token that a batch holds twice is read once.
    times = (2 + (config.align is not None)) if isinstance(settings, TokenWiseConfig) else 1
    return Tower(
        name=name,
        backbone=f"scratch {backbone.architecture}" if isinstance(backbone, Scratch) else backbone.path,
        shape=shape,
        trained=(0 if borrowed else learnt) + projection,
        frozen=shape.parameters if settings.lora and not borrowed else 0,
        rows=rows if name == "query" else rows * (1 + assumed.negatives),
        tokens=min(tokens, float(settings.max_length)) * times,
        longest=settings.max_length * times,
    )


def _settings(name: str, config: TrainConfig) -> TowerConfig | TokenWiseConfig:
    found = config.query_tower if name == "query" else config.document
    if isinstance(found, LookupConfig):
        raise ConfigError(
            "a lookup query tower has no backbone to size: dry runs are for towers that have one"
        )
    return found


def _activations(config: TrainConfig, towers: tuple[Tower, Tower], numbers: Numbers) -> float:
    """With GradCache one chunk of one tower is alive, without it all rows of both are."""
    cache = config.memory.grad_cache
    chunks = (cache.query_rows, cache.document_rows) if cache else tuple(tower.rows for tower in towers)
    alive = [
        min(chunk, tower.rows)
        * tower.longest
        * tower_bytes(tower.shape, numbers, checkpointing=config.memory.gradient_checkpointing)
        for chunk, tower in zip(chunks, towers, strict=True)
    ]
    return float(max(alive) if cache else sum(alive))


def _numbers(config: TrainConfig) -> Numbers:
    if config.precision == "float32":
        return "float32"
    return "autocast" if isinstance(config.strategy, Ddp) else "bfloat16"


def _shares_base(config: TrainConfig) -> bool:
    query, document = _settings("query", config), config.document
    both = query.lora is not None and document.lora is not None
    return config.share_base and both and query.backbone == document.backbone


def _views(document: TowerConfig) -> int:
    return sum(placeholder in document.prompt for placeholder in PLACEHOLDERS)
