"""Settings of a dual-pooled cross-encoder (EmbedDistill, section 4.2 and appendix B)."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from scalingnote.config import Config
from scalingnote.models.config import Backbone, Scratch
from scalingnote.train.config import Optimizer, Schedule


class CrossEncoderLosses(Config):
    """Weights of the losses, 0 leaves one out."""

    one_hot: float = Field(1.0, ge=0, description="softmax cross entropy of the positive among candidates")
    teacher: float = Field(
        0.0, ge=0, description="a ranking model's scores of the triplets, where collect left any (Eq. 11)"
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
    """A cross-encoder whose score is the product of two pooled states, a query's and a document's."""

    backbone: Backbone = Scratch(architecture="bert")
    pooling: Literal["special", "segments"] = Field(
        "segments",
        description="special: the states at [CLS] and [SEP] (Eq. 14); "
        "segments: a sum over each segment's tokens, by 1/sqrt(its length) (Eq. 15)",
    )
    dim: int | None = Field(
        None, ge=2, description="width of both after a projection; null: states as they are, as in the paper"
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="auto: the fastest one available"
    )
    query_length: int = Field(32, ge=4, description="tokens of a query, [CLS] and [SEP] included")
    document_length: int = Field(96, ge=8, description="tokens of a document; content is cut first")
    template: str = Field("{title} {topic} {content}", description="layout of a document's fields")
    in_batch: int = Field(
        4, ge=0, description="positives of other queries that a query is paired with, as further negatives"
    )
    score: Literal["cosine", "product"] = Field(
        "cosine",
        description="cosine: of both states, over `temperature`; product: by 1/sqrt(dim), as in the paper. "
        "Students and the index compare as it does, by cosine or by dot",
    )
    temperature: float = Field(0.05, gt=0, lt=1, description="of score=cosine")
    losses: CrossEncoderLosses = CrossEncoderLosses()
    optimizer: Optimizer = Optimizer()
    global_batch: int = Field(64, ge=2, description="queries per step over all ranks")


def score_temperature(stored: Mapping[str, Any]) -> float | None:
    """The temperature of the cosines that a cross-encoder with this stored config scores by.

    None: by products, as every cross-encoder from before `score` was a setting.
    """
    return stored["temperature"] if stored.get("score") == "cosine" else None
