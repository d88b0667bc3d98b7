"""Knobs of online experiments: the arms that traffic is split between, and how their logs are compared."""

import math
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, model_validator

from scalingnote.collect.config import BM25Ranker, CrossEncoderConfig
from scalingnote.config import Config, Resources

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Arm(Config):
    """One way of answering: what serves a share of the traffic."""

    name: str = Field("default", pattern=NAME, description="in answers, logs and reports")
    query_tower: str | None = Field(
        None, min_length=1, description="URI of a student, dual_encoder or query_encoder; null: the run's own"
    )
    index: str | None = Field(None, min_length=1, description="URI of an index; null: whichever is active")
    personalised: bool = Field(True, description="fuse what is known of the user into the query, if one can")
    share: float = Field(1.0, ge=0, le=1, description="of the traffic; 0: only requests that name the arm")


class TrafficSplit(Config):
    """Arms and their shares; the first is the control, which the others are compared with."""

    name: str = Field("default", pattern=NAME, description="salts the split: another name, other groups")
    arms: tuple[Arm, ...] = Field((Arm(),), min_length=1)

    @model_validator(mode="after")
    def _splits_all_traffic(self) -> "TrafficSplit":
        names = [arm.name for arm in self.arms]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"arms repeat the name {repeated[0]!r}: give each its own")
        total = math.fsum(arm.share for arm in self.arms)
        if not math.isclose(total, 1, abs_tol=1e-6):
            shares = ", ".join(f"{arm.name} {arm.share:g}" for arm in self.arms)
            raise ValueError(f"shares sum to {total:g}, not to 1 ({shares}): change one")
        return self


class DualPooledJudge(Config):
    """A cross-encoder that this system trained."""

    kind: Literal["cross_encoder_artifact"] = "cross_encoder_artifact"
    uri: str = Field(
        min_length=1, description="of a cross_encoder artifact; scores are sigmoids of its logits"
    )
    token_budget: int = Field(8192, ge=64, description="padded tokens per forward pass")


AnyJudge = Annotated[BM25Ranker | CrossEncoderConfig | DualPooledJudge, Field(discriminator="kind")]


class Relevance(Config):
    """What a ranking model thinks of the results (ScalingNote, section 4.6)."""

    judge: AnyJudge = Field(
        BM25Ranker(), description="bm25 is the last resort: its score as a share of the query's best document"
    )
    irrelevant_below: float = Field(
        0.5, description="score of the judge under which a document is irrelevant"
    )
    depths: tuple[Annotated[int, Field(ge=1, le=1000)], ...] = Field(
        (4, 20), min_length=1, description="the share of irrelevant documents is measured in the top K"
    )
    requests_per_arm: int = Field(1000, ge=2, description="logged queries that are judged, drawn at random")


class ExperimentConfig(Config):
    """A report on one experiment, from access logs."""

    run_dir: str = Field("runs/quickstart", description="the run that was served; the report goes below it")
    logs: tuple[str, ...] = Field(min_length=1, description="access logs: files, folders, globs or URIs")
    split: TrafficSplit = Field(description="as it was served: arms, shares and the experiment's name")
    start: AwareDatetime | None = Field(None, description="earlier requests are left out; with a time zone")
    end: AwareDatetime | None = Field(None, description="requests from then on are left out")
    relevance: Relevance | None = Field(Relevance(), description="null: results are not judged")
    few_results: int = Field(5, ge=1, description="an answer with fewer documents is one too few")
    feedback: str | None = Field(
        None, description=".jsonl, .csv or .parquet of request_id, satisfied (true/false, or 0 to 1)"
    )
    clicks: str | None = Field(None, description=".jsonl, .csv or .parquet of request_id, doc_id")
    alpha: float = Field(0.05, gt=0, lt=0.5, description="significance level; intervals are of 1 - alpha")
    mismatch_alpha: float = Field(
        0.001, gt=0, lt=0.5, description="p below which the groups' sizes are a sample ratio mismatch"
    )
    bootstrap: int = Field(2000, ge=100, description="resamples behind each bootstrap interval")
    seed: int = Field(0, description="of the sample that is judged and of the bootstrap")
    inputs_sha256: tuple[str, ...] = Field(
        (), description="filled in when it starts: other contents of the files are another report"
    )
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _compares_something(self) -> "ExperimentConfig":
        if sum(arm.share > 0 for arm in self.split.arms) < 2:
            raise ValueError("split has fewer than two arms with traffic: there is nothing to compare")
        if not self.split.arms[0].share:
            raise ValueError(f"the control {self.split.arms[0].name!r} has no traffic: put another arm first")
        if self.start and self.end and self.start >= self.end:
            raise ValueError(f"start={self.start} is not before end={self.end}: swap them")
        return self
