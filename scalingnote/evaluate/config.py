"""Settings of the report: depths of R@K, methods and their names, files of the user."""

import re
from typing import Annotated

from pydantic import Field, model_validator

from scalingnote.core.config import Config, Resources
from scalingnote.datasets.config import TableFile

# Behind the name of a query tower, in the name of a method that searches by it.
METHOD_SUFFIX = re.compile(r" \((index|sparse|hybrid|raw hybrid)\)$| \+ bm25$")
Depth = Annotated[int, Field(ge=1, le=1000)]  # 1000 is the deepest an index is searched


class MethodNames(Config):
    """Names of the query towers in the report, for example those of the literature."""

    dual_encoder: str = Field("scalingdual", min_length=1, description="stage I's own query tower")
    student: str = Field("scalingnote", min_length=1, description="the distilled query tower")

    @model_validator(mode="after")
    def _differ(self) -> "MethodNames":
        if self.student == self.dual_encoder:
            raise ValueError(f"evaluate.names calls both towers {self.student!r}: they are two rows")
        for name in (self.student, self.dual_encoder):
            if name == "bm25" or METHOD_SUFFIX.search(name):
                raise ValueError(
                    f"evaluate.names holds {name!r}, which is the name of another row: change it"
                )
        return self


class Hybrid(Config):
    """Interpolation of dense and sparse scores, if documents have term weights."""

    dense_weight: float = Field(
        0.5,
        ge=0,
        le=1,
        description="weight of dense scores, each mapped to [0, 1] over a query's whole pool; sparse scores, "
        "mapped too, have the rest",
    )
    raw: bool = Field(
        True,
        description="with a sparse head also a row of the sum of the scores as they are, cosines and inner "
        "products of terms",
    )


class Judgements(Config):
    """Judged pairs that replace the dataset's own (ScalingNote's Manual test set)."""

    path: str = Field(description="file or glob; .jsonl or .parquet")
    columns: dict[str, str] = Field(
        default_factory=dict, description="doc_id, query (its text) or query_id, labels -> the file's columns"
    )
    labels: tuple[str, ...] = Field(
        ("relevance",), min_length=1, description="columns of numbers, e.g. SAT and REL: each gives an AUC"
    )


class EvaluateConfig(Config):
    """Full retrieval: every test query against every document of the pool."""

    recall_at: tuple[Depth, ...] = Field(
        (1, 10, 50, 100), min_length=1, description="K of R@K; the paper shows 50, 100, 500 and 1000"
    )
    names: MethodNames = MethodNames()
    hybrid: Hybrid = Hybrid()
    bm25: bool = Field(True, description="compare with BM25 over the same documents")
    baseline: str | None = Field(
        None,
        description="method that all others are compared with; null: the first one, stage I's query tower",
    )
    typos: float = Field(
        0.2,
        ge=0,
        le=1,
        description="share of mistyped words in a second pass over all queries; 0: no second pass",
    )
    tower_measures: bool = Field(
        True, description="contrastive entropy of query towers, and the student's distance from the teacher"
    )
    qrels: str | None = Field(
        None, description="a TREC file with judgements of test queries that replaces the dataset's own"
    )
    judgements: Judgements | None = Field(
        None, description="pairs for AUC; null: the test queries' own judgements, if their grades differ"
    )
    candidates: str | None = Field(
        None, description="a TREC run of test queries to re-rank (EmbedDistill: a given top 1,000)"
    )
    answers: TableFile | None = Field(
        None,
        description="query_id, answers: documents that contain an answer count as relevant (relaxed R@K)",
    )
    resources: Resources = Resources()
