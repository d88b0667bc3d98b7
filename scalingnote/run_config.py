"""The config of a run: a section for each stage."""

from pydantic import Field, model_validator

from scalingnote.adopt.config import AdoptConfig
from scalingnote.collect.config import CollectConfig
from scalingnote.config import Config
from scalingnote.cross_encoder.config import DualPooledConfig
from scalingnote.datasets.config import AnyDataset
from scalingnote.distillation.config import DistillConfig
from scalingnote.encode.config import EncodeConfig, TeacherConfig
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.fuse.config import FuseConfig
from scalingnote.index.config import IndexConfig
from scalingnote.lexical.config import BM25Config
from scalingnote.mine.config import MineConfig
from scalingnote.planner.config import PlannerConfig, Statistics
from scalingnote.pseudo_queries.config import PseudoQueriesConfig
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.scaling.config import LadderConfig
from scalingnote.serve_config import ServeConfig
from scalingnote.train.config import TrainConfig


class RunConfig(Config):
    """Everything a run needs, one section per stage."""

    run_dir: str = Field("runs/default", description="where artifacts go: a path or a URI (s3://...)")
    address: str | None = Field(None, description="Ray cluster; None starts a private local one")
    nodes_wait_s: float = Field(
        0.0,
        ge=0,
        description="seconds that a stage waits for nodes it lacks, where an autoscaler brings them, before "
        "it is refused",
    )
    dataset: AnyDataset
    planner: PlannerConfig = Statistics()
    collect: CollectConfig = CollectConfig()
    rounds: int = Field(
        1, ge=1, description="of stage I; each but the first trains on negatives mined with the one before"
    )
    mine: MineConfig = MineConfig()
    adopt: AdoptConfig | None = Field(
        None, description="a published embedding model as the dual encoder, in place of stage I's training"
    )
    train: TrainConfig = TrainConfig()
    cross_encoder: DualPooledConfig | None = Field(
        None, description="a teacher in place of stage I's dual encoder (EmbedDistill, section 4.2)"
    )
    pseudo_queries: PseudoQueriesConfig | None = Field(
        None, description="texts of the documents for a student to learn from, beside triplets or alone"
    )
    teacher: TeacherConfig = TeacherConfig()
    distill: DistillConfig | None = Field(DistillConfig(), description="null: serve stage I's query tower")
    encode: EncodeConfig = EncodeConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    fuse: FuseConfig | None = Field(
        None, description="null: the index holds the documents' embeddings as encoded"
    )
    bm25: BM25Config | None = Field(
        None, description="words of the documents, weighted by BM25, for hybrid search beside the embeddings"
    )
    index: IndexConfig = IndexConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    serve: ServeConfig = ServeConfig()
    ladder: LadderConfig = LadderConfig()

    def with_seed(self, number: int) -> "RunConfig":
        """The same run with other random numbers in every training: `number` is added to their seeds."""
        trained = {name: getattr(self, name) for name in ("train", "cross_encoder", "distill")}
        return self.model_copy(
            update={
                name: section.model_copy(update={"seed": section.seed + number})
                for name, section in trained.items()
                if section is not None
            }
        )

    @model_validator(mode="after")
    def _has_a_query_tower(self) -> "RunConfig":
        if self.cross_encoder is not None and self.distill is None:
            raise ValueError("a cross-encoder has no query tower to serve: give it a student, set distill")
        if self.adopt is not None and (self.cross_encoder is not None or self.rounds > 1):
            raise ValueError("adopt takes the place of stage I: leave cross_encoder out, and rounds at 1")
        trained = self.cross_encoder is None and self.adopt is None
        if trained and self.distill is not None and self.train.query.kind == "token_wise":
            raise ValueError("a query tower that reads tokens one by one is no teacher: set distill to null")
        if self.distill is not None and self.distill.reads_tokens and not self.teacher.tokens:
            raise ValueError(
                "a lookup student starts from the teacher's embeddings of single tokens: leave "
                "teacher.tokens at true, or set distill.inherit_tokens to false"
            )
        if self.cross_encoder is not None and self.pseudo_queries is not None:
            raise ValueError("a cross-encoder reads a query beside a document: leave pseudo_queries out")
        if self.pseudo_queries is not None and self.distill is None:
            raise ValueError("pseudo_queries are for a student to learn from: set distill, or leave them out")
        if self.cross_encoder is not None and self.rounds > 1:
            raise ValueError("rounds are of stage I, which cross_encoder takes the place of: set rounds to 1")
        if self.encode.engine != "own" and (
            self.cross_encoder is not None or (trained and self.train.sparse)
        ):
            raise ValueError(
                f"encode.engine {self.encode.engine} reads no pairs and gives no terms: set it to "
                "own, or leave cross_encoder and train.sparse out"
            )
        return self
