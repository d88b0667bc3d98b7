"""The config of a run: a section for each stage."""

from typing import Any, Literal

from pydantic import Field, model_validator

from scalingnote.core.config import Config
from scalingnote.datasets.config import AnyDataset, VectorsConfig
from scalingnote.encode.config import BM25Config, EncodeConfig, EndpointConfig, TeacherConfig
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.fuse.config import FuseConfig
from scalingnote.index.config import IndexConfig
from scalingnote.models.config import AdoptConfig
from scalingnote.plan.config import LadderConfig
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.run.service_config import ServeConfig
from scalingnote.train.config import DualPooledConfig, TrainConfig
from scalingnote.train.distillation.config import DistillConfig
from scalingnote.triplets.config import (
    CollectConfig,
    MineConfig,
    PlannerConfig,
    PseudoQueriesConfig,
    Statistics,
)


class RunConfig(Config):
    """Settings of a run, with a section for each stage."""

    run_dir: str = Field("runs/default", description="folder of the artifacts: a path or a URI (s3://...)")
    address: str | None = Field(
        None, description="Ray cluster; None starts a private local one, in-process runs without Ray"
    )
    nodes_wait_s: float = Field(
        0.0,
        ge=0,
        description="seconds that a stage waits for missing nodes, which an autoscaler adds, before it is "
        "refused",
    )
    dataset: AnyDataset
    planner: PlannerConfig = Statistics()
    collect: CollectConfig = CollectConfig()
    rounds: int = Field(
        1, ge=1, description="rounds of stage I; after the first, negatives come from the round before"
    )
    mine: MineConfig = MineConfig()
    adopt: AdoptConfig | None = Field(
        None, description="a published embedding model as the dual encoder, instead of training in stage I"
    )
    endpoint: EndpointConfig | None = Field(
        None, description="an embedding model behind HTTP as the teacher, which also encodes the documents"
    )
    vectors: VectorsConfig | None = Field(
        None, description="texts with vectors of a model that is not available, as the teacher; no index"
    )
    train: TrainConfig = TrainConfig()
    cross_encoder: DualPooledConfig | None = Field(
        None, description="a teacher instead of stage I's dual encoder (EmbedDistill, section 4.2)"
    )
    pseudo_queries: PseudoQueriesConfig | None = Field(
        None, description="texts of the documents for a student to learn from, with or without triplets"
    )
    teacher: TeacherConfig = TeacherConfig()
    distill: DistillConfig | None = Field(DistillConfig(), description="null: serve stage I's query tower")
    encode: EncodeConfig = EncodeConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    fuse: FuseConfig | None = Field(
        None, description="null: the index holds the documents' embeddings as encoded"
    )
    bm25: BM25Config | None = Field(
        None, description="words of the documents, weighted by BM25, for hybrid search with the embeddings"
    )
    index: IndexConfig = IndexConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    serve: ServeConfig = ServeConfig()
    ladder: LadderConfig = LadderConfig()

    @property
    def trains_stage_one(self) -> bool:
        """Whether a dual encoder is trained; otherwise it is external, or a cross-encoder."""
        return not any((self.adopt, self.endpoint, self.vectors, self.cross_encoder))

    @property
    def query_tower_kind(self) -> Literal["student", "dual_encoder"]:
        """Kind of the artifact with the query tower that serves."""
        return "dual_encoder" if self.distill is None else "student"

    @property
    def reads_triplets(self) -> bool:
        """Whether some stage learns from triplets: stage I, or a student without pseudo-queries."""
        if self.trains_stage_one or self.cross_encoder is not None:
            return True
        student = self.distill
        return student is not None and (self.pseudo_queries is None or "triplets" in student.reads)

    def with_seed(self, number: int) -> "RunConfig":
        """Return the same run with other seeds: `number` is added to the seed of each training."""
        sections = {name: getattr(self, name) for name in ("train", "cross_encoder", "distill")}
        return self.model_copy(
            update={
                name: section.model_copy(update={"seed": section.seed + number})
                for name, section in sections.items()
                if section is not None
            }
        )

    @model_validator(mode="before")
    @classmethod
    def _tokens_are_the_models(cls, values: Any) -> Any:
        """Set the tokenizer of passages to that of the adopted model, unless the config has one."""
        if not isinstance(values, dict):
            return values
        dataset, adopt = values.get("dataset"), values.get("adopt")
        if not isinstance(dataset, dict) or not isinstance(adopt, dict):
            return values
        passages = dataset.get("passages")
        if not isinstance(passages, dict) or passages.get("tokenizer") is not None:
            return values
        return {**values, "dataset": {**dataset, "passages": {**passages, "tokenizer": adopt.get("path")}}}

    @model_validator(mode="after")
    def _has_a_query_tower(self) -> "RunConfig":
        if self.cross_encoder is not None and self.distill is None:
            raise ValueError("a cross-encoder has no query tower to serve: give it a student, set distill")
        in_place = ("adopt", "endpoint", "vectors", "cross_encoder")
        others = [name for name in in_place if getattr(self, name) is not None]
        if len(others) > 1 or (others and self.rounds > 1):
            raise ValueError(
                f"{' and '.join(others)} takes the place of stage I: give one of {', '.join(in_place)}, and "
                "leave rounds at 1"
            )
        if self.endpoint is not None or self.vectors is not None:
            self._is_taught_by_vectors()
        trains_towers = self.trains_stage_one
        if trains_towers and self.distill is not None and self.train.query.kind == "token_wise":
            raise ValueError("a query tower that reads tokens one by one cannot teach: set distill to null")
        if self.distill is not None and self.distill.reads_tokens and not self.teacher.tokens:
            raise ValueError(
                "a lookup student starts from the teacher's embeddings of single tokens: leave "
                "teacher.tokens at true, or set distill.tokenizer to own"
            )
        if self.cross_encoder is not None and self.pseudo_queries is not None:
            raise ValueError("a cross-encoder reads a query with a document: leave pseudo_queries out")
        if self.pseudo_queries is not None and self.distill is None:
            raise ValueError("pseudo_queries are for a student to learn from: set distill, or leave them out")
        if self.dataset.passages is not None and (self.reads_triplets or self.fuse is not None):
            raise ValueError(
                "dataset.passages divides documents, but clicks and judgements are of uncut documents, so "
                "nothing can be trained on them: set adopt, pseudo_queries for a student, and leave fuse out"
            )
        if self.encode.engine != "own" and (
            self.cross_encoder is not None or (trains_towers and self.train.sparse)
        ):
            raise ValueError(
                f"encode.engine {self.encode.engine} takes no pairs and returns no terms: set it to "
                "own, or leave cross_encoder and train.sparse out"
            )
        return self

    def _is_taught_by_vectors(self) -> None:
        """Raise ValueError if the student needs more of its teacher than vectors of texts."""
        student = self.distill
        if student is None or (self.endpoint is not None and self.pseudo_queries is None):
            raise ValueError("endpoint is a teacher of pseudo-queries: set distill and pseudo_queries")
        if student.teacher_layers is not None or student.inherits or student.reads:
            raise ValueError(
                "endpoint and vectors give a student only vectors of texts: set distill.tokenizer to own, "
                "and leave distill.teacher_layers and losses over documents out"
            )
