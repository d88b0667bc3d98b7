"""Knobs of stage I; the defaults of the losses are ScalingNote's, section 4.2 and appendix A."""

from collections.abc import Sequence
from math import lcm
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from scalingnote.config import Config, ElasticResources, ExecutionConfig
from scalingnote.models.config import LookupConfig, QueryTowerConfig, TaskName, TokenWiseConfig, TowerConfig


def steps_of(length: float, steps: int) -> int:
    """Steps of a part of a run: `length` is a share of all `steps` if it is below 1, else their number."""
    return round(length * steps) if length < 1 else round(length)


class Optimizer(Config):
    """AdamW with linear warm-up, and linear or cosine decay."""

    kind: Literal["adamw", "adamw_8bit", "row_adam"] = Field(
        "adamw",
        description="adamw_8bit needs bitsandbytes and a GPU; row_adam, for lookup tables: only rows that a "
        "step reads are moved, without weight decay",
    )
    peak_lr: float = Field(3e-4, gt=0, description="3e-6 for a 7B backbone (appendix A)")
    warmup: float = Field(
        0.1, ge=0, description="steps over which the rate rises; below 1: a share of all steps"
    )
    schedule: Literal["linear", "cosine"] = Field("linear", description="how the rate falls after it")
    floor: float = Field(0.0, ge=0, le=1, description="share of the peak at the last step")
    weight_decay: float = Field(1e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, gt=0, description="largest global gradient norm")


class TeacherScores(Config):
    """Learning from the scores a ranking model gave to each triplet's documents, where it gave any."""

    kind: Literal["kl", "margin_mse"] = Field(
        "kl", description="kl: the softmax over positive and negatives; margin_mse: differences of scores"
    )
    weight: float = Field(1.0, gt=0)
    temperature: float = Field(1.0, gt=0, description="of the teacher's softmax (kl)")


class Losses(Config):
    """L = L_con + alpha * L_hard, on every view and every Matryoshka prefix (Eq. 5-12)."""

    temperature: float = Field(0.05, gt=0, lt=1, description="tau; not given in the paper")
    learn_temperature: bool = Field(False, description="`temperature` is its initial value")
    denominator: Literal["positives_only", "positives_and_negatives"] = Field(
        "positives_and_negatives",
        description="whether a query's softmax also includes the gathered hard negatives",
    )
    bidirectional: bool = Field(True, description="also document to query (Eq. 6)")
    mask_known: bool = Field(
        True, description="mask duplicates and known positives of a query out of its negatives"
    )
    margin: float = Field(0.2, ge=0)
    alpha: float = Field(0.5, ge=0, description="weight of the margin loss")
    view_weights: dict[Literal["title", "content", "summary"], float] = Field(
        {}, description="weight of a view in every loss; 1 by default"
    )
    matryoshka: tuple[int, ...] = Field(
        (16, 32, 64, 128),
        description="prefix lengths, all weighted: those below `dim`, and always `dim` itself",
    )
    matryoshka_weights: tuple[float, ...] | None = Field(
        None, description="w^m; None means all 1. With weights, every prefix is named"
    )
    teacher: TeacherScores | None = None


def prefix_lengths(named: Sequence[int], *, dim: int) -> tuple[int, ...]:
    """Lengths of the prefixes that losses read: those `named`, and always the whole embedding.

    Without it, dimensions behind the longest prefix would be searched although no loss trains them.
    """
    within = tuple(length for length in named if length <= dim)
    return within if dim in within else (*within, dim)


class Sparse(Config):
    """Term weights of documents beside their embeddings; a query is its tokens (LightRetriever, 2.3)."""

    weight: float = Field(1.0, gt=0, description="of the contrastive loss of sparse scores")
    align_weight: float = Field(
        1.0, ge=0, description="of the KL of sparse scores to the whole query's dense ones; with `align` only"
    )
    ramp: float = Field(
        0.0,
        ge=0,
        description="steps over which both weights grow from 0; below 1: a share of all steps. At full "
        "weight from the first step they are nearly all of the gradient, and the dense half learns nothing",
    )
    temperature: float = Field(1.0, gt=0, description="of sparse scores, which no norm bounds")
    flops: float = Field(1e-3, ge=0, description="weight of the FLOPs regulariser (Eq. 9)")
    flops_ramp: float = Field(
        1 / 3,
        ge=0,
        description="steps over which it grows, as a square; below 1: a share of all steps. 4,000 of 12,000 "
        "in the paper",
    )
    query: Literal["counts", "binary"] = Field(
        "counts", description="how often a token occurs, or that it does"
    )


class Align(Config):
    """KL of cheap queries' scores to those of the whole query through the whole backbone (Eq. 5).

    The teacher is a transformer query tower, or the backbone of a token_wise one reading the query as a text.
    It learns by the contrastive loss at the same time; the KL gives it no gradient.
    """

    weight: float = Field(1.0, gt=0, description="of the KL of dense scores")
    prefix: Literal["widest", "same"] = Field(
        "widest",
        description="Matryoshka prefix of the teacher's scores: for all prefixes the widest, or each its own",
    )


class Ddp(Config):
    """Every rank holds all weights; gradients are averaged."""

    kind: Literal["ddp"] = "ddp"


class Fsdp2(Config):
    """Weights, gradients and optimizer state are sharded over the ranks (torch `fully_shard`)."""

    kind: Literal["fsdp2"] = "fsdp2"
    reshard: bool = Field(True, description="free a layer's gathered weights between forward and backward")
    offload: bool = Field(False, description="keep shards in CPU memory")


class DeepSpeed(Config):
    """ZeRO: sharded optimizer state (1), gradients too (2), weights too (3)."""

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[1, 2, 3] = 3
    offload_optimizer: bool = Field(False, description="keep optimizer state in CPU memory")
    offload_parameters: bool = Field(False, description="keep weights in CPU memory (stage 3)")

    @model_validator(mode="after")
    def _has_shards(self) -> "DeepSpeed":
        if self.offload_parameters and self.stage != 3:
            raise ValueError(
                f"offload_parameters needs stage 3, found {self.stage}: stages 1 and 2 keep whole weights on "
                "every rank"
            )
        return self


Strategy = Annotated[Ddp | Fsdp2 | DeepSpeed, Field(discriminator="kind")]
MIXED = "mixture/"  # before a set and a kind: the name of a training's parent that another run has made
LARGE_PARAMETERS = 10**9  # with ddp each rank would hold 16 bytes of each: weight, gradient, two moments


class GradCache(Config):
    """Large batches in constant memory: forward in chunks without a graph, loss, then chunks again."""

    query_rows: int = Field(64, ge=1, description="rows per chunk of the query tower, on each rank")
    document_rows: int = Field(16, ge=1, description="rows per chunk of the document tower")


class Memory(Config):
    """Ways to trade time for memory, or compilation for speed."""

    grad_cache: GradCache | None = None
    gradient_checkpointing: bool = Field(False, description="keep layer inputs only, recompute the rest")
    packing: bool = Field(True, description="no padding: rows lie one after the other")
    compile: bool = Field(False, description="torch.compile the towers")


class Batching(Config):
    """Which rows form a batch; a pure function of step and seed."""

    sources: Literal["mixed", "homogeneous"] = Field(
        "mixed", description="homogeneous: all rows of a batch, on all ranks, are of one source and hop"
    )
    ratios: dict[str, float] = Field(
        {},
        description="share of rows by source (`click`) or source and hop (`click/multi`), drawn with "
        "repetition where a part is too small; empty: as they are",
    )
    length_window: int = Field(
        1, ge=1, description="batches over which rows are sorted by length, so that padding is short; 1: none"
    )


class DataAccess(ExecutionConfig):
    """How ranks reach the training rows. Batches have the same rows either way."""

    stream: Literal["auto", "always", "never"] = Field(
        "auto",
        description="always: rows are written once in the order of the run, and each rank reads its share of "
        "them; never: ranks draw rows from a mapped store, which every node copies if it is remote; auto: "
        "always where the copy would exceed copy_limit_gb",
    )
    copy_limit_gb: float = Field(32.0, gt=0, description="of a remote store, on the disk of every node")


class ValidationSchedule(Config):
    """When to measure on held-out queries while training, and how it selects weights; for both stages."""

    every: int = Field(200, ge=1, description="steps between measurements")
    queries: int = Field(256, ge=1, description="validation queries drawn, seeded")
    metric: str = Field(description="chooses the best checkpoint")
    patience: int | None = Field(
        None, ge=1, description="stop after this many measurements without a better one"
    )
    keep: Literal["last", "best"] = Field("last", description="which weights become the artifact")


class Validation(ValidationSchedule):
    """Measuring both towers of stage I on held-out queries."""

    negatives: int = Field(256, ge=1, description="sampled per query for the contrastive entropy")
    documents: int = Field(2000, ge=1, description="pool of recall and MRR, the positives among them")
    metric: Literal["contrastive_entropy", "R@1", "R@10", "MRR@10"] = Field(
        "MRR@10", description="chooses the best checkpoint"
    )


class Tracking(ExecutionConfig):
    """Trackers of the numbers beside TensorBoard files, which are always written."""

    wandb: str | None = Field(None, description="project name; needs the `track` extra")
    mlflow: str | None = Field(None, description="experiment name; needs the `track` extra")


class Ranks(ElasticResources):
    """Processes of a training, and their resources."""

    workers: int = Field(
        2,
        ge=0,
        description="ranks; 0: the driver's own process trains, without Ray's workers, on all its cores or, "
        "with gpus_per_worker, on its GPU: the quickest start for small runs",
    )
    min_workers: int | None = Field(
        None,
        ge=1,
        description="train with as many ranks as there are nodes for, at least this many: when nodes leave "
        "or join, the run goes on from its newest checkpoint with fewer or more; null: always `workers`",
    )


class Schedule(Config):
    """Optimization, memory, checkpoints and resources; common to both stages."""

    optimizer: Optimizer = Optimizer()
    global_batch: int = Field(
        128, ge=2, description="rows per step over all ranks; 480 and 40,000 in the paper"
    )
    epochs: float = Field(1.0, ge=0, description="passes over the rows; 0 leaves the weights untrained")
    max_steps: int | None = Field(None, ge=1, description="end here at the latest; the rate falls until then")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the hardware multiplies it faster, else float32"
    )
    strategy: Strategy | None = Field(
        None, description="null: fsdp2 where more than one rank trains over a billion parameters, else ddp"
    )
    memory: Memory = Memory()
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1)
    max_failures: int = Field(
        2,
        ge=0,
        description="restarts of the workers before giving up; with resources.workers: 0 there are none",
    )
    seed: int = 0
    tracking: Tracking = Tracking()
    resources: Ranks = Ranks()

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return max(self.resources.workers, 1)

    def strategy_for(self, trained: int) -> Ddp | Fsdp2 | DeepSpeed:
        """The strategy of this schedule for a model with so many trained parameters."""
        if self.strategy is not None:
            return self.strategy
        large = trained > LARGE_PARAMETERS and self.ranks > 1 and self.optimizer.kind == "adamw"
        return Fsdp2() if large else Ddp()

    @model_validator(mode="after")
    def _can_run(self) -> "Schedule":
        # Ranks average their gradients, so each needs as many rows as the others.
        groups = range(self.resources.min_workers or self.ranks, self.ranks + 1)
        for ranks in groups:
            if self.global_batch % ranks:
                raise ValueError(
                    f"global_batch {self.global_batch} does not divide over {ranks} workers: a multiple of "
                    f"{lcm(*groups)} does"
                )
        if self.resources.min_workers is not None and isinstance(self.strategy, DeepSpeed):
            raise ValueError(
                "resources.min_workers: a checkpoint of strategy deepspeed fits one number of workers only; "
                "choose ddp or fsdp2"
            )
        if self.optimizer.kind == "row_adam" and not isinstance(self.strategy, Ddp | None):
            raise ValueError("optimizer.kind=row_adam moves whole tables: choose strategy ddp")
        if isinstance(self.strategy, Fsdp2) and self.optimizer.kind == "adamw_8bit":
            raise ValueError(
                "optimizer.kind=adamw_8bit cannot step on the shards of fsdp2: choose adamw, or strategy ddp "
                "or deepspeed"
            )
        return self


class MixtureSet(Config):
    """One of several data sets that are trained on together: what `prepare` and `collect` made of it."""

    dataset: str | None = Field(None, description="URI of its artifact `dataset`; null: this run's own")
    triplets: str | None = Field(None, description="URI of its artifact `triplets`; null: this run's own")
    epochs: float = Field(
        1.0,
        gt=0,
        description="passes over its rows in one over the mixture (LightRetriever, Table 5)",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> "MixtureSet":
        if (self.dataset is None) != (self.triplets is None):
            raise ValueError("give both dataset and triplets of another run, or neither for this run's own")
        return self


class TrainConfig(Schedule):
    """Stage I: both towers, trained together."""

    query: QueryTowerConfig = TowerConfig(max_length=32)
    document: TowerConfig = TowerConfig(max_length=96)
    dim: int = Field(128, ge=2, description="embedding width after the projection")
    losses: Losses = Field(Losses(), validate_default=True)
    sparse: Sparse | None = None
    align: Align | None = None
    document_seed: int | None = Field(
        None,
        description="of the weights of a document tower from scratch; null: seed + 1. With `seed` "
        "both towers have equal weights, which match words before any training",
    )
    mixture: dict[TaskName, MixtureSet] = Field(
        {},
        description="sets that are trained on, by name; empty: this run's own. `query.instructions` has "
        "instructions for each",
    )
    batching: Batching = Batching()
    data: DataAccess = DataAccess()
    validation: Validation | None = Validation()
    share_base: bool = Field(
        True, description="two LoRA towers on one backbone: frozen weights once, two adapters"
    )
    merge_adapters: bool = Field(True, description="saved towers have their LoRA weights merged in")

    @field_validator("losses")
    @classmethod
    def _see_the_whole(cls, losses: Losses, info: Any) -> Losses:  # pydantic's ValidationInfo is uncheckable
        if "dim" not in info.data:  # dim itself is invalid, and pydantic reports it
            return losses
        prefixes = prefix_lengths(losses.matryoshka, dim=info.data["dim"])
        if losses.matryoshka_weights and len(losses.matryoshka_weights) != len(losses.matryoshka):
            raise ValueError("matryoshka_weights needs one weight per prefix")
        if losses.matryoshka_weights and prefixes != losses.matryoshka:
            raise ValueError(
                f"dim {info.data['dim']} makes the prefixes {list(prefixes)}, and matryoshka_weights has "
                f"{list(losses.matryoshka)}: set matryoshka to {list(prefixes)}, and a weight for each"
            )
        return losses.model_copy(update={"matryoshka": prefixes})

    @model_validator(mode="after")
    def _fits(self) -> "TrainConfig":
        if self.align and not self.sparse and not isinstance(self.query, TokenWiseConfig):
            raise ValueError("align has no effect: it needs sparse, or query.kind=token_wise")
        if self.align and isinstance(self.query, LookupConfig):
            raise ValueError("align needs a query tower with a backbone, and a lookup has none")
        whole = isinstance(self.strategy, Ddp | None)
        if isinstance(self.query, TokenWiseConfig) and self.query.reads == "embeddings" and not whole:
            raise ValueError("query.reads=embeddings reads a table that the strategy shards: choose ddp")
        self._check_mixture()
        loras = [getattr(tower, "lora", None) for tower in (self.query, self.document)]
        if not self.merge_adapters and any(lora is not None and lora.base != "full" for lora in loras):
            raise ValueError(
                "merge_adapters=false keeps adapters beside the path of their whole backbone, but with "
                "lora.base int8 or nf4 they fit its packed weights: leave it true"
            )
        return self

    def _check_mixture(self) -> None:
        if sum(one.dataset is None for one in self.mixture.values()) > 1:
            raise ValueError("mixture: two sets are this run's own: give one of them dataset and triplets")
        if self.mixture and self.batching.ratios:
            raise ValueError("a mixture has epochs of each set: leave batching.ratios out")
        instructions = self.query.instructions if isinstance(self.query, TokenWiseConfig) else {}
        if unknown := sorted(set(instructions) - set(self.mixture)):
            raise ValueError(f"query.instructions names {', '.join(unknown)}, which is no set of `mixture`")
        if instructions and self.batching.sources != "homogeneous":
            raise ValueError(
                "query.instructions: all queries of a batch are read behind one instruction; set "
                "batching.sources to homogeneous"
            )

    @property
    def set_epochs(self) -> dict[str, float]:
        """Passes over each set of the mixture; empty without one."""
        return {name: one.epochs for name, one in self.mixture.items()}

    @property
    def shares_backbone(self) -> bool:
        """Whether both towers are one backbone, its adapter included."""
        return isinstance(self.query, TokenWiseConfig) and self.query.backbone is None

    @property
    def query_tower(self) -> TowerConfig | LookupConfig | TokenWiseConfig:
        """`query`, with the document tower's backbone and projection where it has none of its own."""
        if not self.shares_backbone:
            return self.query
        shared = {name: getattr(self.document, name) for name in ("backbone", "lora", "projection")}
        return self.query.model_copy(update=shared)
