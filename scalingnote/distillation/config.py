"""Settings of stage II: a cheap query tower learns from a teacher's stored embeddings, and from labels.

The defaults are ScalingNote's query-based knowledge distillation (QKD, Eq. 13-15 and appendix A): queries
only. The other losses are EmbedDistill's (section 4, appendix A); they read triplets and documents too.
"""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.config import Config
from scalingnote.models.config import LookupConfig, Pretrained, Scratch, StudentConfig, TowerConfig
from scalingnote.train.config import Optimizer, Schedule, ValidationSchedule


class NewVocabulary(Config):
    """Frequent words of the queries as tokens of their own: shorter rows, and an embedding per word."""

    tokens: int = Field(
        ge=1, description="number of new tokens; the paper's student has 84,522 tokens in all"
    )
    min_count: int = Field(5, ge=1, description="queries that must hold the word")


class DistillLosses(Config):
    """Weights of the losses; 0 leaves one out, and the data that only it needs is not read.

    EmbedDistill's compare as the teacher does: by cosine over `temperature`, and vectors of length 1; or, of
    a teacher by dot product, as in the paper, by the inner product of embeddings as they are.
    """

    qkd: float = Field(1.0, ge=0, description="||q - q'||^2 - lambda cos(q, q') (ScalingNote, Eq. 15)")
    cosine_weight: float = Field(1.0, ge=0, description="lambda of Eq. 15")
    cosine: float = Field(
        0.0, ge=0, description="1 - cos(q, q'); half of LEAF's squared distance of unit vectors"
    )
    query_matching: float = Field(0.0, ge=0, description="||q - q'||, not squared (EmbedDistill, Eq. 7)")
    document_matching: float = Field(
        0.0, ge=0, description="the same for documents (Eq. 8); needs a document student"
    )
    one_hot: float = Field(
        0.0, ge=0, description="softmax cross entropy of labels, in-batch and sampled negatives (Eq. 9)"
    )
    scores: float = Field(0.0, ge=0, description="the teacher's scores of the same candidates (Eq. 11-13)")
    scores_kind: Literal["softmax", "bce", "mse"] = Field(
        "softmax",
        description="loss of `scores`; softmax: cross entropy over a query's candidates (Eq. 11), bce: "
        "binary cross entropy of each candidate (Eq. 12), mse: squared difference of scores (Eq. 13)",
    )
    temperature: float = Field(
        0.05, gt=0, lt=1, description="of the cosines of one_hot and scores; inner products have none"
    )

    @property
    def reads_documents(self) -> bool:
        """Whether a batch needs candidates, and so triplets and document embeddings."""
        return max(self.document_matching, self.one_hot, self.scores) > 0

    @model_validator(mode="after")
    def _teaches(self) -> "DistillLosses":
        if not max(
            self.qkd, self.cosine, self.query_matching, self.document_matching, self.one_hot, self.scores
        ):
            raise ValueError("every weight is 0: give at least one loss a weight")
        return self


class StudentValidation(ValidationSchedule):
    """Measuring a student on held-out queries while it trains."""

    every: int = Field(100, ge=1, description="steps between measurements")
    queries: int = Field(4096, ge=1, description="validation queries drawn, seeded")
    metric: Literal["cosine", "squared_distance", "qkd"] = Field(
        "cosine",
        description="of the teacher's embeddings and the student's; qkd: the loss of Eq. 15, held out as in "
        "Table 6; chooses the best checkpoint",
    )
    keep: Literal["last", "best"] = Field("best", description="which weights become the artifact")


class DistillConfig(Schedule):
    """A student query tower learns the teacher's query embeddings."""

    student: StudentConfig = TowerConfig(backbone=Scratch(architecture="bert"), max_length=32)
    document: TowerConfig | None = Field(
        None, description="a student for documents too (symmetric); null inherits the teacher's embeddings"
    )
    start: Literal["random", "teacher"] = Field(
        "random",
        description="initial weights of a student from scratch; teacher: copies of `backbone.layers` of "
        "the teacher's layers, whose kind and sizes then hold, and of all its tokens and its projection",
    )
    teacher_layers: tuple[int, ...] | None = Field(
        None,
        description="start: teacher; which layers, from 0, or from the end, as -1; null spreads them "
        "evenly, the last included",
    )
    inherit_tokens: bool = Field(
        True,
        description="a student from scratch starts with the teacher's tokenizer and token embeddings, "
        "instead of its own `vocabulary`; "
        "false: it learns a tokenizer of its own from the training queries",
    )
    new_vocabulary: NewVocabulary | None = None
    losses: DistillLosses = DistillLosses()
    optimizer: Optimizer = Optimizer(peak_lr=1e-3)
    global_batch: int = Field(512, ge=2, description="queries per step over all ranks; 40,000 in the paper")
    epochs: float = Field(10.0, ge=0, description="passes over the queries; 100 in the paper")
    validation: StudentValidation | None = StudentValidation()

    @property
    def reads(self) -> tuple[str, ...]:
        """Kinds of artifacts that are read beside the teacher's query embeddings."""
        if not self.losses.reads_documents:
            return ()
        return ("triplets", "embeddings") if self.document is None else ("triplets", "embeddings", "dataset")

    @property
    def inherits(self) -> bool:
        """Whether the student starts with the teacher's tokenizer and its weights of each token."""
        own = isinstance(self.student, TowerConfig) and isinstance(self.student.backbone, Pretrained)
        return self.inherit_tokens and self.start == "random" and not own

    @property
    def reads_tokens(self) -> bool:
        """Whether the student starts from the teacher's embeddings of single tokens."""
        return self.inherits and isinstance(self.student, LookupConfig)

    @model_validator(mode="after")
    def _fits(self) -> "DistillConfig":
        if self.losses.document_matching and self.document is None:
            raise ValueError("losses.document_matching needs a document student: set distill.document")
        if self.document is not None and not self.losses.reads_documents:
            raise ValueError(
                "no loss reads documents, so distill.document would learn nothing: give losses.one_hot, "
                "scores or document_matching a weight"
            )
        if self.start == "teacher" and isinstance(self.student, LookupConfig):
            raise ValueError("a lookup student has no layers: leave distill.start at random")
        if self.start == "teacher" and isinstance(self.student.backbone, Pretrained):  # type: ignore[union-attr]
            raise ValueError("a pretrained student brings its own weights: leave distill.start at random")
        published = isinstance(self.student, TowerConfig) and self.student.pooling != "placeholders"
        if published and self.new_vocabulary is not None:
            raise ValueError("a published student reads by its own tokenizer: leave new_vocabulary out")
        if self.teacher_layers is not None and self.start != "teacher":
            raise ValueError("distill.teacher_layers is only used with distill.start=teacher")
        return self


class ScreenConfig(Config):
    """`scalingnote screen`: a closed-form table of each teacher, to compare them before one is distilled."""

    count: int = Field(
        5000, ge=500, le=50_000, description="pseudo-queries drawn, before equal ones are merged"
    )
    held_out: float = Field(0.2, gt=0, lt=1, description="share of the documents whose texts are measured")
    ridge: float = Field(
        0.01,
        gt=0,
        description="weight of the squared norm of the table; on feedbackqa with all-MiniLM-L6-v2 .001, .01 "
        "and .1 give overlaps of .48, .51 and .44",
    )
    seed: int = Field(0, ge=0, description="of the sampled documents, the draws and the held-out documents")
