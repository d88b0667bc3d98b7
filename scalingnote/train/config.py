"""Settings of stage I, of every training, and of a cross-encoder that is trained in place of stage I.

The defaults of stage I are those of ScalingNote, section 4.2 and appendix A.
"""

from collections.abc import Sequence
from math import lcm
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from scalingnote.core.config import Config, ElasticResources, ExecutionConfig
from scalingnote.models.config import (
    BackboneConfig,
    LookupConfig,
    QueryTowerConfig,
    Scratch,
    TaskName,
    TokenWiseConfig,
    TowerConfig,
)


def steps_of(length: float, steps: Any) -> Any:
    """Convert `length` to steps, without rounding: below 1 it is a share of all `steps` of a run."""
    return length * steps if length < 1 else length


class Optimizer(Config):
    """AdamW with linear warm-up, and linear or cosine decay."""

    kind: Literal["adamw", "adamw_8bit", "row_adam"] = Field(
        "adamw",
        description="adamw_8bit needs bitsandbytes and a GPU; row_adam is for lookup tables: it moves only "
        "the rows that a step reads, without weight decay",
    )
    peak_lr: float = Field(3e-4, gt=0, description="3e-6 for a 7B backbone (appendix A)")
    warmup: float = Field(
        0.1, ge=0, description="steps over which the rate rises; below 1: a share of all steps"
    )
    schedule: Literal["linear", "cosine"] = Field(
        "linear", description="how the rate falls after the warm-up"
    )
    floor: float = Field(0.0, ge=0, le=1, description="rate at the last step, as a share of the peak")
    weight_decay: float = Field(1e-3, ge=0, description="decoupled (AdamW), per unit of the rate")


class Losses(Config):
    """L = L_con + alpha * L_hard, summed over views and Matryoshka prefixes (Eq. 5-12)."""

    temperature: float = Field(0.05, gt=0, lt=1, description="tau; not given in the paper")
    denominator: Literal["positives_only", "positives_and_negatives"] = Field(
        "positives_and_negatives",
        description="whether a query's softmax also includes the gathered hard negatives",
    )
    bidirectional: bool = Field(True, description="add the loss from document to query (Eq. 6)")
    margin: float = Field(0.2, ge=0, description="margin of the margin loss, in cosine")
    alpha: float = Field(0.5, ge=0, description="weight of the margin loss")
    matryoshka: tuple[int, ...] = Field(
        (16, 32, 64, 128),
        description="prefix lengths: the listed ones below `dim`, and always `dim` itself",
    )
    teacher: float = Field(
        0.0,
        ge=0,
        description="weight of the KL to a ranking model's softmax, for triplets with scores of their "
        "documents",
    )


def prefix_lengths(lengths: Sequence[int], *, dim: int) -> tuple[int, ...]:
    """Return the lengths of the prefixes that losses read: those in `lengths`, and always the full one.

    Without the full length, dimensions behind the longest prefix would be searched although no loss
    trains them.
    """
    within = tuple(length for length in lengths if length <= dim)
    return within if dim in within else (*within, dim)


class Sparse(Config):
    """Term weights of documents in addition to embeddings; a query is its tokens (LightRetriever, 2.3)."""

    ramp: float = Field(
        0.0,
        ge=0,
        description="steps over which the losses of sparse scores grow from weight 0 to 1; below 1: a share "
        "of all steps. At full weight from the first step these losses are nearly all of the gradient, and "
        "the dense half learns nothing",
    )
    flops: float = Field(1e-3, ge=0, description="weight of the FLOPs regulariser (Eq. 9)")
    flops_ramp: float = Field(
        1 / 3,
        ge=0,
        description="steps over which this weight grows, as a square; below 1: a share of all steps. 4,000 "
        "of 12,000 in the paper",
    )
    query: Literal["counts", "binary"] = Field(
        "counts", description="counts: how often a token occurs; binary: only that it occurs"
    )


class Ddp(Config):
    """Strategy with all weights on every rank; gradients are averaged."""

    kind: Literal["ddp"] = "ddp"


class Fsdp2(Config):
    """Strategy with weights, gradients and optimizer state sharded over the ranks (torch `fully_shard`)."""

    kind: Literal["fsdp2"] = "fsdp2"
    reshard: bool = Field(True, description="free a layer's gathered weights between forward and backward")
    offload: bool = Field(False, description="keep shards in CPU memory")


class DeepSpeed(Config):
    """Strategy ZeRO: sharded optimizer state (1), gradients too (2), weights too (3)."""

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[1, 2, 3] = Field(3, description="stage of ZeRO")
    offload: bool = Field(False, description="keep optimizer state, and with stage 3 weights, in CPU memory")


Strategy = Annotated[Ddp | Fsdp2 | DeepSpeed, Field(discriminator="kind")]
MIXED = "mixture/"  # prefix of the name of a parent from another run: then follow set and kind
LARGE_PARAMETERS = 10**9  # with ddp each rank holds 16 bytes per parameter: weight, gradient, two moments


class GradCache(Config):
    """Large batches in constant memory: forward in chunks without a graph, loss, then chunks again."""

    query_rows: int = Field(64, ge=1, description="rows per chunk of the query tower, on each rank")
    document_rows: int = Field(16, ge=1, description="rows per chunk of the document tower")


class Memory(Config):
    """Ways to trade time for memory."""

    grad_cache: GradCache | None = None
    gradient_checkpointing: bool = Field(False, description="keep layer inputs only, recompute the rest")


class Batching(Config):
    """Selection of the rows of a batch: a pure function of step and seed."""

    sources: Literal["mixed", "homogeneous"] = Field(
        "mixed", description="homogeneous: all rows of a batch, on all ranks, have one source and hop"
    )


class DataAccess(ExecutionConfig):
    """Access of ranks to the training rows. Batches have the same rows with every setting."""

    copy_limit_gb: float = Field(
        32.0,
        ge=0,
        description="a remote store up to this size is copied to every node; the rows of a larger one are "
        "written once in the order of the run, and each rank reads its share; 0: use the second way for any "
        "store",
    )


class ValidationSchedule(Config):
    """Schedule of measurements on held-out queries during training; for both stages."""

    metric: ClassVar[str]  # chooses the best checkpoint: larger is better
    every: int = Field(200, ge=1, description="steps between measurements")
    queries: int = Field(256, ge=1, description="number of validation queries, drawn by the seed")
    patience: int | None = Field(
        None,
        ge=1,
        description="stop after this number of measurements without an improvement, and keep the best "
        "weights",
    )

    @property
    def keeps_best(self) -> bool:
        """Whether the artifact gets the best weights, not the last ones."""
        return self.patience is not None


class Validation(ValidationSchedule):
    """Measurement of both towers of stage I on held-out queries."""

    metric = "MRR@10"
    documents: int = Field(
        2000, ge=1, description="size of the pool for recall and MRR, including the positives"
    )


class Tracking(ExecutionConfig):
    """Trackers of the numbers in addition to TensorBoard files, which are always written."""

    wandb: str | None = Field(None, description="project name; needs the `track` extra")
    mlflow: str | None = Field(None, description="experiment name; needs the `track` extra")


class Ranks(ElasticResources):
    """Processes of a training run, and their resources."""

    workers: int = Field(
        2,
        ge=0,
        description="ranks; 0: the driver process trains, without Ray workers, on all its cores or, with "
        "gpus_per_worker, on its GPU: the quickest start for small runs",
    )
    min_workers: int | None = Field(
        None,
        ge=1,
        description="train with as many ranks as the nodes allow, but at least this number: when nodes "
        "leave or join, the run continues from its newest checkpoint with fewer or more ranks; null: always "
        "`workers`",
    )


class Schedule(Config):
    """Optimization, memory, checkpoints and resources; common to both stages."""

    optimizer: Optimizer = Optimizer()
    global_batch: int = Field(
        128, ge=2, description="rows per step over all ranks; 480 and 40,000 in the paper"
    )
    epochs: float = Field(1.0, ge=0, description="passes over the rows; 0 leaves the weights untrained")
    max_steps: int | None = Field(
        None, ge=1, description="upper limit of the steps; the rate falls until then"
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 if the hardware multiplies it faster, else float32"
    )
    strategy: Strategy | None = Field(
        None, description="null: fsdp2 if more than one rank trains over a billion parameters, else ddp"
    )
    memory: Memory = Memory()
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints")
    max_failures: int = Field(
        2,
        ge=0,
        description="restarts of the workers before the run fails; with resources.workers: 0 there are none",
    )
    seed: int = Field(0, description="seed of initial weights and batches")
    tracking: Tracking = Tracking()
    resources: Ranks = Ranks()

    @property
    def ranks(self) -> int:
        """Processes that train together."""
        return max(self.resources.workers, 1)

    def strategy_for(self, trained: int) -> Ddp | Fsdp2 | DeepSpeed:
        """Return the strategy of this schedule for a model with `trained` trained parameters."""
        if self.strategy is not None:
            return self.strategy
        large = trained > LARGE_PARAMETERS and self.ranks > 1 and self.optimizer.kind == "adamw"
        return Fsdp2() if large else Ddp()

    @model_validator(mode="after")
    def _can_run(self) -> "Schedule":
        # Ranks average their gradients, so all need the same number of rows.
        rank_counts = range(self.resources.min_workers or self.ranks, self.ranks + 1)
        for ranks in rank_counts:
            if self.global_batch % ranks:
                raise ValueError(
                    f"global_batch {self.global_batch} does not divide over {ranks} workers: a multiple of "
                    f"{lcm(*rank_counts)} does"
                )
        if self.resources.min_workers is not None and isinstance(self.strategy, DeepSpeed):
            raise ValueError(
                "resources.min_workers: a checkpoint of strategy deepspeed fits one number of workers only; "
                "choose ddp or fsdp2"
            )
        if self.optimizer.kind == "row_adam" and not isinstance(self.strategy, Ddp | None):
            raise ValueError("optimizer.kind=row_adam needs unsharded tables: choose strategy ddp")
        if isinstance(self.strategy, Fsdp2) and self.optimizer.kind == "adamw_8bit":
            raise ValueError(
                "optimizer.kind=adamw_8bit cannot step on the shards of fsdp2: choose adamw, or strategy ddp "
                "or deepspeed"
            )
        return self


class MixtureSet(Config):
    """One of several data sets that are trained on together: the results of its `prepare` and `collect`."""

    dataset: str | None = Field(None, description="URI of its artifact `dataset`; null: the one of this run")
    triplets: str | None = Field(
        None, description="URI of its artifact `triplets`; null: the one of this run"
    )
    epochs: float = Field(
        1.0,
        gt=0,
        description="passes over its rows in one pass over the mixture (LightRetriever, Table 5)",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> "MixtureSet":
        if (self.dataset is None) != (self.triplets is None):
            raise ValueError(
                "give both dataset and triplets of another run, or neither for those of this run"
            )
        return self


class TrainConfig(Schedule):
    """Stage I: joint training of both towers."""

    query: QueryTowerConfig = TowerConfig(max_length=32)
    document: TowerConfig = TowerConfig(max_length=96)
    dim: int = Field(128, ge=2, description="embedding width after the projection")
    losses: Losses = Field(Losses(), validate_default=True)
    sparse: Sparse | None = None
    align: bool = Field(
        False,
        description="add the KL of the scores of cheap queries to those of the uncut query through the "
        "entire backbone (LightRetriever, Eq. 5). The uncut query is that of a transformer query tower, or "
        "the text of the query as the backbone of a token_wise tower reads it. It learns by the contrastive "
        "loss; the KL gives it no gradient",
    )
    mixture: dict[TaskName, MixtureSet] = Field(
        {},
        description="sets that are trained on, by name; empty: only the set of this run. "
        "`query.instructions` has instructions for each",
    )
    batching: Batching = Batching()
    data: DataAccess = DataAccess()
    validation: Validation | None = Validation()
    merge_adapters: bool = Field(True, description="merge the LoRA weights into the saved towers")

    @field_validator("losses")
    @classmethod
    def _see_the_whole(cls, losses: Losses, info: Any) -> Losses:  # pydantic's ValidationInfo is uncheckable
        if "dim" not in info.data:  # dim itself is invalid, and pydantic reports it
            return losses
        prefixes = prefix_lengths(losses.matryoshka, dim=info.data["dim"])
        return losses.model_copy(update={"matryoshka": prefixes})

    @model_validator(mode="after")
    def _fits(self) -> "TrainConfig":
        if self.align and not self.sparse and not isinstance(self.query, TokenWiseConfig):
            raise ValueError("align has no effect: it needs sparse, or query.kind=token_wise")
        if self.align and isinstance(self.query, LookupConfig):
            raise ValueError("align needs a query tower with a backbone, and a lookup has none")
        of_students = ("bigrams", "ends", "centring")  # stage I has no texts to fill them from
        if isinstance(self.query, LookupConfig) and (
            filled := [name for name in of_students if getattr(self.query, name)]
        ):
            raise ValueError(f"query.{filled[0]} is for students (stage II): leave it out")
        unsharded = isinstance(self.strategy, Ddp | None)
        if isinstance(self.query, TokenWiseConfig) and self.query.reads == "embeddings" and not unsharded:
            raise ValueError("query.reads=embeddings reads a table that the strategy shards: choose ddp")
        self._check_mixture()
        loras = [getattr(tower, "lora", None) for tower in (self.query, self.document)]
        if not self.merge_adapters and any(lora is not None and lora.base != "full" for lora in loras):
            raise ValueError(
                "merge_adapters=false keeps adapters and the path of their base model, but with lora.base "
                "int8 or nf4 adapters fit only its packed weights: leave it true"
            )
        return self

    def _check_mixture(self) -> None:
        if sum(entry.dataset is None for entry in self.mixture.values()) > 1:
            raise ValueError(
                "mixture: only one set can be that of this run: give the others dataset and triplets"
            )
        instructions = self.query.instructions if isinstance(self.query, TokenWiseConfig) else {}
        if unknown := sorted(set(instructions) - set(self.mixture)):
            raise ValueError(
                f"query.instructions names {', '.join(unknown)}, which is not a set of `mixture`"
            )
        if instructions and self.batching.sources != "homogeneous":
            raise ValueError(
                "query.instructions: all queries of a batch are read behind one instruction: set "
                "batching.sources to homogeneous"
            )

    @property
    def set_epochs(self) -> dict[str, float]:
        """Passes over each set of the mixture; empty without one."""
        return {name: entry.epochs for name, entry in self.mixture.items()}

    @property
    def shares_backbone(self) -> bool:
        """Whether both towers are one backbone, including its adapter."""
        return isinstance(self.query, TokenWiseConfig) and self.query.backbone is None

    @property
    def query_tower(self) -> TowerConfig | LookupConfig | TokenWiseConfig:
        """`query`, with backbone, adapter and projection of the document tower if it has no backbone."""
        if not self.shares_backbone:
            return self.query
        shared = {name: getattr(self.document, name) for name in ("backbone", "lora", "projection")}
        return self.query.model_copy(update=shared)


class CrossEncoderLosses(Config):
    """Weights of a cross-encoder's losses; 0 leaves one out."""

    one_hot: float = Field(1.0, ge=0, description="softmax cross entropy of the positive among candidates")
    teacher: float = Field(
        0.0, ge=0, description="KL to a ranking model's scores of the triplets, if collect left any (Eq. 11)"
    )
    reconstruction: float = Field(
        1.0, ge=0, description="predict every token from its own last state, which keeps the states distinct"
    )

    @model_validator(mode="after")
    def _ranks(self) -> "CrossEncoderLosses":
        if not max(self.one_hot, self.teacher):
            raise ValueError("no loss teaches the cross-encoder to rank: give one_hot or teacher a weight")
        return self


class DualPooledConfig(Schedule):
    """A cross-encoder that compares two pooled states (EmbedDistill, section 4.2, appendix B)."""

    backbone: BackboneConfig = Scratch(architecture="bert")
    pooling: Literal["special", "segments"] = Field(
        "segments",
        description="special: the states at [CLS] and [SEP] (Eq. 14); segments: a sum over the tokens of "
        "each segment, divided by the square root of its length (Eq. 15)",
    )
    query_length: int = Field(32, ge=4, description="tokens of a query, including [CLS] and [SEP]")
    document_length: int = Field(
        96, ge=8, description="tokens of title, topic and content of a document; content is cut first"
    )
    in_batch: int = Field(
        4,
        ge=0,
        description="number of positives of other queries that a query is paired with, as further negatives",
    )
    temperature: float | None = Field(
        0.05,
        gt=0,
        lt=1,
        description="temperature of scores that are cosines of both states; null: scores are products "
        "divided by sqrt(dim), as in the paper. Students and the index then compare in the same way, by "
        "cosine or by dot",
    )
    losses: CrossEncoderLosses = CrossEncoderLosses()
