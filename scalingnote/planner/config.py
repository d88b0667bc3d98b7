"""Knobs of the query planner: which backend, and what it learns from."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scalingnote.config import Config, Resources
from scalingnote.models.config import Backbone, Scratch

TextField = Literal["title", "topic", "content"]


class Statistics(Config):
    """Importance from how rare a word is in a corpus: inverse document frequency, saturated."""

    kind: Literal["statistics"] = "statistics"
    corpus: Literal["documents", "queries"] = Field(
        "documents", description="whose texts are counted: all documents, or the training queries"
    )
    fields: tuple[TextField, ...] = Field(
        ("title", "topic", "content"),
        min_length=1,
        description="fields of a document whose words are counted",
    )
    half: float = Field(
        0.01, gt=0, lt=1, description="a word that this share of the texts holds has importance 0.5"
    )
    saturation: float = Field(
        3.0, gt=0, description="how steeply importance leaves 0.5 on either side; large values make a step"
    )
    unknown: float | None = Field(
        None, ge=0, le=1, description="importance of a word without a count; None: that of a word never seen"
    )
    min_df: int = Field(2, ge=1, description="a word that fewer texts hold is not kept: mostly misspellings")
    max_words: int = Field(2_000_000, ge=1, description="words kept, the most frequent ones; 12 bytes each")
    resources: Resources = Field(Resources(), description="tasks that count")


class Learned(Config):
    """Importance from a small encoder that learnt which words of a query its positives repeat (DeepCT)."""

    kind: Literal["learned"] = "learned"
    backbone: Backbone = Field(Scratch(architecture="bert"), description="any bidirectional encoder")
    max_length: int = Field(64, ge=4, description="tokens read of a query; words behind them have score 0")
    positives: tuple[Literal["clicks", "judgements"], ...] = Field(
        ("clicks", "judgements"), min_length=1, description="what makes a document a query's positive"
    )
    fields: tuple[TextField, ...] = Field(
        ("title", "topic", "content"), min_length=1, description="of a positive, where words are looked up"
    )
    against_chance: bool = Field(
        True, description="take off what other queries' positives hold too, or stop words would matter most"
    )
    max_queries: int = Field(100_000, ge=1, description="training queries, drawn evenly")
    max_positives: int = Field(20, ge=1, description="positives read of a query, drawn evenly")
    validation_fraction: float = Field(0.1, ge=0, lt=1, description="share of the queries that only measures")
    epochs: int = Field(3, ge=1, description="passes over the queries")
    batch: int = Field(64, ge=1, description="queries per step")
    peak_lr: float = Field(
        5e-4, gt=0, description="AdamW, linear warm-up and decay; 2e-5 for a pretrained encoder (DeepCT)"
    )
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps")
    seed: int = Field(0, ge=0, description="of weights, draws and the order of the queries")
    resources: Resources = Field(Resources(workers=1), description="the one task that trains")

    @model_validator(mode="after")
    def _reads_both_ways(self) -> "Learned":
        if isinstance(self.backbone, Scratch) and self.backbone.architecture != "bert":
            raise ValueError(
                f"backbone.architecture={self.backbone.architecture} reads one way only, a word's importance "
                "depends on what follows it too: set bert"
            )
        return self


PlannerConfig = Annotated[Statistics | Learned, Field(discriminator="kind")]
