"""Settings of ladders, dry runs and capacity plans."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from scalingnote.config import Config
from scalingnote.models.config import Backbone, Scratch

GpuName = Literal["H200", "H100", "A100", "L40S", "L4"]
QueryTower = Literal["bert-int8", "lookup"]
Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Assumptions(Config):
    """Assumptions of a dry run: one GPU per training worker, all of one kind."""

    gpu: GpuName = Field("H100", description="kind of GPU")
    mfu: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the GPU's peak that is reached, repeated passes counted as work",
    )
    network: float = Field(
        400.0, gt=0, description="GB/s in and out of a node of 8 GPUs; 400 is eight cards of 400 Gb/s"
    )
    rows: int | None = Field(None, ge=1, description="training rows; null: steps and days are left out")
    negatives: int = Field(1, ge=0, description="hard negatives of a row")
    query_tokens: float | None = Field(None, gt=0, description="mean length; null: max_length of the tower")
    document_tokens: float | None = Field(
        None, gt=0, description="mean length; null: max_length of the tower"
    )


def _rung(layers: int, hidden: int, heads: int) -> Scratch:
    return Scratch(layers=layers, hidden=hidden, heads=heads, intermediate=2 * hidden)


class LadderConfig(Config):
    """Sizes of stage I, in all combinations, for the scaling laws (ScalingNote, section 4.4)."""

    backbones: tuple[Backbone, ...] = Field(
        (_rung(1, 16, 1), _rung(1, 32, 1), _rung(1, 48, 2), _rung(2, 64, 2), _rung(2, 96, 3)),
        min_length=1,
        description="of both towers",
    )
    pairs: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (896, 1792, 3584, 7168),
        min_length=1,
        description="training pairs, each seen once; whole batches of them",
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="of training; each seed is a separate run")
    lr_by_width: float = Field(
        1.0,
        ge=0,
        description="peak_lr is train's times (narrowest width / a rung's width) to this power; 0: the same",
    )
    draws: int = Field(200, ge=10, description="bootstrap samples behind the intervals")
    level: float = Field(0.95, gt=0, lt=1, description="of the intervals")
    budgets: tuple[Size, ...] = Field(
        (1.0, 10.0, 100.0),
        description="operations to split by the joint law, as multiples of the largest run",
    )
    predict: tuple[tuple[Size, Size], ...] = Field(
        (), description="models to predict: parameters without embeddings, pairs"
    )

    @model_validator(mode="after")
    def _differ(self) -> "LadderConfig":
        for name in ("backbones", "pairs", "seeds"):
            values = getattr(self, name)
            if len(set(map(str, values))) < len(values):
                raise ValueError(f"ladder.{name} repeats a value: each is run once")
        return self


class PlanConfig(Config):
    """A corpus, its traffic, and assumptions about everything else. Prices are in US dollars."""

    model_config = ConfigDict(allow_inf_nan=False)

    documents: int = Field(ge=1, description="documents of the corpus")
    tokens: float = Field(gt=0, description="mean tokens of a document, its prompt counted in")
    model: str = Field(description="backbone of both towers: a published name or a folder with config.json")
    qps: float = Field(gt=0, description="queries a second at the peak")
    recall: float = Field(0.95, gt=0, le=1, description="of the exact 100 best documents")
    gpu: GpuName = Field("H100", description="kind of GPU")
    gpus: int = Field(8, ge=1, description="GPUs that work at the same time")
    query_tokens: float = Field(16.0, gt=0, description="mean tokens of a query")
    dims: tuple[int, ...] = Field(
        (16, 32, 64, 128), min_length=1, description="Matryoshka dimensions; the last one is indexed"
    )
    pairs: int = Field(100_000_000, ge=1, description="training pairs; the paper chose 10^8 for 7B")
    negatives: int = Field(1, ge=0, description="hard negatives of a pair, one in the paper")
    lora: int | None = Field(None, ge=1, description="rank of both towers' adapters; null: all weights learn")
    distill_epochs: float = Field(100.0, gt=0, description="passes over the pairs' queries, 100 in the paper")
    query_tower: QueryTower = Field("bert-int8", description="what encodes queries in service")
    mfu: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the GPU's peak that is reached; nobody measured it with this code on any GPU "
        "yet: benchmarks/gpu.py does",
    )
    node_memory: tuple[Annotated[int, Field(ge=16)], ...] = Field(
        (64, 128, 256, 512, 1024), min_length=1, description="GB of the nodes that searchers may run on"
    )
    nodes: int = Field(16, ge=1, description="CPU nodes that the offline stages run on")
    node_cores: int = Field(16, ge=1, description="cores of each of them")
    replicas: int = Field(2, ge=1, description="copies of everything that serves, at least: one may die")
    gpu_price: float | None = Field(None, ge=0, description="of a GPU hour; null: by the kind of GPU")
    core_price: float = Field(0.03, ge=0, description="of a CPU core's hour")
    memory_price: float = Field(0.004, ge=0, description="of a GB of memory for an hour")
    storage_price: float = Field(0.023, ge=0, description="of a GB in object storage for a month")
    request_price: float = Field(
        5.0, ge=0, description="of a million requests to object storage, as for writes"
    )

    @model_validator(mode="after")
    def _ascends(self) -> "PlanConfig":
        if list(self.dims) != sorted(set(self.dims)) or self.dims[0] < 1:
            raise ValueError(f"dims {list(self.dims)} must ascend from 1 or more")
        return self
