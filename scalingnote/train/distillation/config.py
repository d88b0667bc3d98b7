"""Settings of stage II: a cheap query tower learns from a teacher's stored embeddings, and from labels.

The defaults are ScalingNote's query-based knowledge distillation (QKD, Eq. 13-15 and appendix A): only
queries. The other losses are EmbedDistill's (section 4, appendix A); they read triplets and documents too.
"""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.core.config import Config
from scalingnote.models.config import LookupConfig, Pretrained, Scratch, StudentConfig, TowerConfig
from scalingnote.train.config import Optimizer, Schedule, ValidationSchedule


class DistillLosses(Config):
    """Weights of the losses; 0 leaves one out, and the data that only it needs is not read.

    EmbedDistill's losses compare in the same way as the teacher. With a teacher by cosine: cosines divided by
    `temperature`, and vectors of length 1. With a teacher by dot product, as in the paper: the inner product
    of unchanged embeddings.
    """

    qkd: float = Field(1.0, ge=0, description="||q - q'||^2 - cos(q, q') (ScalingNote, Eq. 15; lambda is 1)")
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
        0.05,
        gt=0,
        lt=1,
        description="temperature of the cosines of one_hot and scores; inner products have none",
    )

    @property
    def reads_documents(self) -> bool:
        """Whether a batch needs candidates, and so triplets and document embeddings."""
        return max(self.document_matching, self.one_hot, self.scores) > 0

    @model_validator(mode="after")
    def _teaches(self) -> "DistillLosses":
        if not (self.reads_documents or max(self.qkd, self.cosine, self.query_matching)):
            raise ValueError("every weight is 0: give at least one loss a weight")
        return self


class StudentValidation(ValidationSchedule):
    """Measurement of a student on held-out queries in training; the best weights are kept."""

    metric = "cosine"
    every: int = Field(100, ge=1, description="steps between measurements")
    queries: int = Field(4096, ge=1, description="number of validation queries, drawn by the seed")

    @property
    def keeps_best(self) -> bool:
        """Always true."""
        return True


class DistillConfig(Schedule):
    """Stage II: training of a student query tower on the teacher's query embeddings."""

    student: StudentConfig = TowerConfig(backbone=Scratch(architecture="bert"), max_length=32)
    document: TowerConfig | None = Field(
        None, description="a student for documents too (symmetric); null inherits the teacher's embeddings"
    )
    teacher_layers: tuple[int, ...] | Literal["even"] | None = Field(
        None,
        description="layers of the teacher that a student from scratch starts with, from 0, or from the "
        "end, for example -1; even: `backbone.layers` of them, evenly spaced, including the last. The "
        "teacher's kind and sizes are then used, and all its tokens and its projection are copied. null: "
        "random weights",
    )
    tokenizer: str = Field(
        "teacher",
        description="tokenizer of a student from scratch; teacher: the teacher's tokenizer and token "
        "embeddings; own: one of `vocabulary` tokens, learnt from the training queries; else a "
        "tokenizer.json, or a folder or hub id with one",
    )
    new_vocabulary: int = Field(
        0,
        ge=0,
        description="upper limit of the number of frequent words of the queries that become separate "
        "tokens; in a lookup table also pairs of adjacent words, each added to its pieces. The paper's "
        "student has 84,522 tokens in total",
    )
    losses: DistillLosses = DistillLosses()
    optimizer: Optimizer = Optimizer(peak_lr=1e-3)
    global_batch: int = Field(512, ge=2, description="queries per step over all ranks; 40,000 in the paper")
    epochs: float = Field(10.0, ge=0, description="passes over the queries; 100 in the paper")
    validation: StudentValidation | None = StudentValidation()

    @property
    def reads(self) -> tuple[str, ...]:
        """Kinds of artifacts that are read in addition to the teacher's query embeddings."""
        if not self.losses.reads_documents:
            return ()
        return ("triplets", "embeddings") if self.document is None else ("triplets", "embeddings", "dataset")

    @property
    def inherits(self) -> bool:
        """Whether the student starts with the teacher's tokenizer and its weights of each token."""
        is_pretrained = isinstance(self.student, TowerConfig) and isinstance(
            self.student.backbone, Pretrained
        )
        return self.tokenizer == "teacher" and self.teacher_layers is None and not is_pretrained

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
        if self.teacher_layers is not None and isinstance(self.student, LookupConfig):
            raise ValueError("a lookup student has no layers: leave distill.teacher_layers out")
        if self.teacher_layers is not None and isinstance(self.student.backbone, Pretrained):  # type: ignore[union-attr]
            raise ValueError("a pretrained student has its own weights: leave distill.teacher_layers out")
        published = isinstance(self.student, TowerConfig) and self.student.pooling != "placeholders"
        if published and self.new_vocabulary:
            raise ValueError("a published student uses its own tokenizer: leave new_vocabulary out")
        table = self.student if isinstance(self.student, LookupConfig) else None
        if table is not None and self.new_vocabulary and (table.bigrams or table.ends or table.attention):
            raise ValueError(
                "new words are only for tables of tokens: set new_vocabulary to 0, or leave the student's "
                "bigrams, ends and attention out"
            )
        return self


class ScreenConfig(Config):
    """`scalingnote screen`: a closed-form table of each teacher, to compare teachers before distillation."""

    count: int = Field(
        5000, ge=500, le=50_000, description="number of pseudo-queries drawn, before equal ones are merged"
    )
