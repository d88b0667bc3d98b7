"""Knobs of the query planner: which backend, and what it learns from."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scalingnote.core.config import Config, Resources
from scalingnote.models.config import BackboneConfig, Scratch

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
    resources: Resources = Field(Resources(), description="tasks that count")


class Learned(Config):
    """Importance from a small encoder that learnt which words of a query its positives repeat (DeepCT)."""

    kind: Literal["learned"] = "learned"
    backbone: BackboneConfig = Field(Scratch(architecture="bert"), description="any bidirectional encoder")
    max_length: int = Field(64, ge=4, description="tokens read of a query; words behind them have score 0")
    positives: tuple[Literal["clicks", "judgements"], ...] = Field(
        ("clicks", "judgements"), min_length=1, description="what makes a document a query's positive"
    )
    epochs: int = Field(3, ge=1, description="passes over the queries")
    peak_lr: float = Field(
        5e-4, gt=0, description="AdamW, linear warm-up and decay; 2e-5 for a pretrained encoder (DeepCT)"
    )
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
