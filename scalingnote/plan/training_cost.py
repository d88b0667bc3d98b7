"""Memory of one GPU, arithmetic, and the time of a run of stage I.

    TrainConfig, Assumptions ─estimate─► Estimate ─dry_run_text─► the output of `run --dry-run`

Time is the number of operations at an assumed share of the GPU's peak (MFU), which includes communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scalingnote.core import DAY_S, reports
from scalingnote.core.errors import ConfigError
from scalingnote.models import flops
from scalingnote.models.config import LookupConfig, Lora, Scratch, TokenWiseConfig
from scalingnote.models.flops import Shape, Work, adapter_parameters, backbone_shape
from scalingnote.models.prompt import PLACEHOLDERS
from scalingnote.plan.config import GPUS, Assumptions
from scalingnote.plan.memory import (
    FRAGMENTATION,
    RUNTIME_BYTES,
    Numbers,
    TrainingState,
    score_bytes,
    tower_bytes,
    training_state,
)
from scalingnote.train.config import Ddp, Strategy, TrainConfig


@dataclass(frozen=True)
class TowerEstimate:
    """One tower of the run, and its rows on one GPU in a step."""

    name: str
    backbone: str
    shape: Shape
    lora: Lora | None  # None: all weights are trained
    trained: int  # number of parameters, including those of the projection
    frozen: int
    rows: int
    chunk: int  # rows of one forward pass: all, unless GradCache divides them
    pooled: int  # hidden states of a row that become embeddings
    tokens: float  # mean number per row
    longest: int  # largest number of tokens of a row, for memory


@dataclass(frozen=True)
class Estimate:
    """Resources of a run of stage I: bytes on one GPU, operations and time of a step over all GPUs."""

    config: TrainConfig
    assumed: Assumptions
    negatives: int  # hard negatives of a row
    strategy: Strategy  # of the config, or the one that training chooses
    numbers: Numbers
    towers: tuple[TowerEstimate, TowerEstimate]
    parameters: int
    state: TrainingState
    activations: float
    scores: float
    memory: float  # total at the peak
    work: Work
    step_tokens: float
    step_seconds: float  # at the assumed MFU
    steps: int | None  # None if the number of rows is unknown

    @property
    def fits(self) -> bool:
        """Whether the peak fits in the GPU's memory."""
        return self.memory <= GPUS[self.assumed.gpu].memory


def estimate(config: TrainConfig, assumed: Assumptions, *, negatives: int = 1) -> Estimate:
    """Estimate a run of stage I with the assumed hardware, rows and lengths.

    `negatives` is the number of hard negatives of a row.

    Raises:
        ConfigError: the shape of a backbone is not known offline, or the query tower is a lookup table.
    """
    gpu, ranks = GPUS[assumed.gpu], config.ranks
    query, document = towers = (
        _tower(config, assumed, "query", per_pair=1),
        _tower(config, assumed, "document", per_pair=1 + negatives),
    )
    # Adapters of both towers on one base share its frozen weights.
    bases = {tower.backbone: tower for tower in towers if tower.frozen}.values()
    frozen, trained = sum(tower.frozen for tower in bases), sum(tower.trained for tower in towers)
    strategy = config.strategy_for(trained)
    half: Numbers = "autocast" if isinstance(strategy, Ddp) else "bfloat16"
    numbers: Numbers = "float32" if config.precision == "float32" else half
    state = training_state(
        strategy,
        config.optimizer,
        trained=trained,
        frozen=frozen,
        frozen_tables=sum(tower.shape.embedding_parameters for tower in bases),
        largest=max(tower.shape.embedding_parameters + 2 * tower.shape.layer_parameters for tower in towers),
        gpus=ranks,
        numbers=numbers,
        base=config.document.lora.base if config.document.lora else "full",
    )
    activations = _activations(config, towers, numbers)
    columns = 1 + negatives * (config.losses.denominator == "positives_and_negatives")
    scores = score_bytes(
        rows=query.rows,
        ranks=ranks,
        columns=columns,
        views=document.pooled,
        prefixes=config.losses.matryoshka,
        dim=config.dim,
    )
    work = _step_work(config, towers, columns=columns)
    return Estimate(
        config=config,
        assumed=assumed,
        negatives=negatives,
        strategy=strategy,
        numbers=numbers,
        towers=towers,
        parameters=trained + frozen,
        state=state,
        activations=activations,
        scores=scores,
        memory=(state.total + activations + scores) * (1 + FRAGMENTATION) + RUNTIME_BYTES,
        work=work,
        step_tokens=ranks * sum(tower.rows * tower.tokens for tower in towers),
        step_seconds=work.total / (ranks * gpu.peak * assumed.mfu),
        steps=_steps(config, assumed.rows),
    )


def _activations(config: TrainConfig, towers: Sequence[TowerEstimate], numbers: Numbers) -> float:
    """Compute the bytes of one chunk of one tower with GradCache, otherwise of all rows of both towers."""
    checkpointing = config.memory.gradient_checkpointing
    tower_sizes = [
        float(tower.chunk * tower.longest) * tower_bytes(tower.shape, numbers, checkpointing=checkpointing)
        for tower in towers
    ]
    return max(tower_sizes) if config.memory.grad_cache else sum(tower_sizes)


def _step_work(config: TrainConfig, towers: Sequence[TowerEstimate], *, columns: int) -> Work:
    """Count the operations of a step over all GPUs: the loss and both towers."""
    _, document = towers
    work = flops.loss(
        rows=config.global_batch,
        columns=columns,
        views=document.pooled,
        prefixes=config.losses.matryoshka,
        bidirectional=config.losses.bidirectional,
    )
    for tower in towers:
        row = flops.row(
            tower.shape,
            tokens=tower.tokens,
            pooled=tower.pooled,
            dim=config.dim,
            lora=tower.lora,
            checkpointing=config.memory.gradient_checkpointing,
            grad_cache=config.memory.grad_cache is not None,
        )
        work += row.times(config.ranks * tower.rows)
    return work


def _steps(config: TrainConfig, rows: int | None) -> int | None:
    """Compute the number of steps over the rows; None if the number of rows is not known."""
    if rows is None:
        return None
    steps = round(rows // config.global_batch * config.epochs)
    return min(steps, config.max_steps or steps)


def _tower(
    config: TrainConfig, assumed: Assumptions, name: Literal["query", "document"], *, per_pair: int
) -> TowerEstimate:
    """Estimate a tower that encodes `per_pair` rows of each training pair."""
    is_query = name == "query"
    settings = config.query_tower if is_query else config.document
    if isinstance(settings, LookupConfig):
        raise ConfigError(
            "a lookup query tower has no backbone to estimate: use a query tower with a backbone"
        )
    backbone, lora = settings.backbone, settings.lora
    assert backbone is not None
    shape = backbone_shape(backbone)
    trained, frozen = shape.parameters, 0
    if lora:
        # With an adapter, the document tower also learns the embeddings of its placeholders.
        placeholders = 0 if is_query else len(PLACEHOLDERS) * shape.hidden
        trained, frozen = adapter_parameters(shape, lora) + placeholders, shape.parameters
    if is_query and config.shares_backbone:
        trained = frozen = 0
    rows = config.global_batch // config.ranks * per_pair
    # A padded row costs as much as the longest one.
    tokens = getattr(assumed, f"{name}_tokens") or settings.max_length
    # A token-wise tower encodes each token together with an end token, and once more if the complete query is
    # the target (align). Instructions shared by tokens, and repeated tokens of a batch, are encoded once.
    times = 2 + config.align if isinstance(settings, TokenWiseConfig) else 1
    return TowerEstimate(
        name=name,
        backbone=f"scratch {backbone.architecture}" if isinstance(backbone, Scratch) else backbone.path,
        shape=shape,
        lora=lora,
        trained=trained + shape.hidden * config.dim,
        frozen=frozen,
        rows=rows,
        chunk=min(getattr(config.memory.grad_cache, f"{name}_rows", rows), rows),
        pooled=1 if is_query else sum(token in config.document.prompt for token in PLACEHOLDERS),
        tokens=float(min(tokens, settings.max_length)) * times,
        longest=settings.max_length * times,
    )


def dry_run_text(estimated: Estimate) -> str:
    """Format the estimate as text: towers, memory of a GPU, one step, the run, and all assumptions."""
    text = reports.render(
        "dry_run.txt",
        e=estimated,
        gpu=GPUS[estimated.assumed.gpu],
        runtime_bytes=RUNTIME_BYTES,
        fragmentation=FRAGMENTATION,
        day_s=DAY_S,
    )
    return reports.align_columns(text, label=40, cell=26)
