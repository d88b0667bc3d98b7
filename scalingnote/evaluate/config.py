"""Settings of the report: depths of R@K, methods and their names, and files of the user."""

import re
from typing import Annotated

from pydantic import Field, model_validator

from scalingnote.core.config import Config, Resources
from scalingnote.datasets.config import TableFile

# The name of a method is that of its query tower with such a suffix.
METHOD_SUFFIX = re.compile(r" \((index|sparse|hybrid|raw hybrid)\)$| \+ bm25$")
Depth = Annotated[int, Field(ge=1, le=1000)]  # 1000 is the limit of results of an index


class MethodNames(Config):
    """Names of the query towers in the report, for example those of the literature."""

    dual_encoder: str = Field("scalingdual", min_length=1, description="query tower of stage I")
    student: str = Field("scalingnote", min_length=1, description="distilled query tower")

    @model_validator(mode="after")
    def _differ(self) -> "MethodNames":
        if self.student == self.dual_encoder:
            raise ValueError(f"evaluate.names has {self.student!r} for both towers: set two different names")
        for name in (self.student, self.dual_encoder):
            if name == "bm25" or METHOD_SUFFIX.search(name):
                raise ValueError(f"evaluate.names has {name!r}, which is the name of another row: change it")
        return self


class Hybrid(Config):
    """Settings of the interpolation of dense and sparse scores, if documents have term weights."""

    dense_weight: float = Field(
        0.5,
        ge=0,
        le=1,
        description="weight of dense scores, which are mapped to [0, 1] over the entire pool of a query; "
        "sparse scores, mapped in the same way, have the rest",
    )
    raw: bool = Field(
        True,
        description="with a sparse head, add a row for the sum of the unchanged scores: cosines, and inner "
        "products of terms",
    )


class Judgements(Config):
    """Judged pairs that replace those of the dataset (ScalingNote's Manual test set)."""

    path: str = Field(description="file or glob; .jsonl or .parquet")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="doc_id, query (its text) or query_id, labels -> columns of the file",
    )
    labels: tuple[str, ...] = Field(
        ("relevance",),
        min_length=1,
        description="columns of numbers, for example SAT and REL: each gives an AUC",
    )


class EvaluateConfig(Config):
    """Settings of full retrieval: every test query is compared with every document of the pool."""

    recall_at: tuple[Depth, ...] = Field(
        (1, 10, 50, 100), min_length=1, description="values of K of R@K; the paper has 50, 100, 500 and 1000"
    )
    names: MethodNames = MethodNames()
    hybrid: Hybrid = Hybrid()
    bm25: bool = Field(True, description="compare with BM25 over the same documents")
    baseline: str | None = Field(
        None,
        description="method with which all others are compared; null: the first one, the query tower of "
        "stage I",
    )
    typos: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share of mistyped words in a second pass over all queries; 0: no second pass",
    )
    tower_measures: bool = Field(
        True, description="measure contrastive entropy, and the distance of the student from the teacher"
    )
    qrels: str | None = Field(
        None, description="TREC file with judgements of test queries, which replaces those of the dataset"
    )
    judgements: Judgements | None = Field(
        None, description="pairs for AUC; null: the judgements of the test queries, if their grades differ"
    )
    candidates: str | None = Field(
        None, description="TREC run of test queries to re-rank (EmbedDistill: the top 1,000 of another model)"
    )
    answers: TableFile | None = Field(
        None,
        description="query_id, answers: documents that contain an answer count as relevant (relaxed R@K)",
    )
    resources: Resources = Resources()
