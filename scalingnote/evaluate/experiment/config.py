"""Settings of online experiments, and which unit of traffic sees which arm.

Assignment needs no state: any process, Python release or reader of the log computes the same arm. Each arm
draws an exponential waiting time from a hash of (experiment, arm, unit), at the rate of its share, and the
shortest wins (weighted rendezvous hashing). So an arm wins with the probability of its share, independently
of the order of arms. When shares change,

- between any two arms units move only to the one whose share grew by the larger factor;
- with two arms, or if one arm grows at the cost of all others in proportion (a new one, for example), the
  minimal share of units moves;
- otherwise at most 2d / (1 + d) move where d must. In the worst case no rule that sees only the present
  shares moves fewer (correlated sampling; Bavarian et al., 2016, "The optimality of correlated sampling").
"""

import math
from hashlib import blake2b

from pydantic import AwareDatetime, Field, model_validator

from scalingnote.core.config import Config, Resources
from scalingnote.triplets.config import CrossEncoderConfig

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"


class Arm(Config):
    """A variant of the system that serves a share of the traffic."""

    name: str = Field("default", pattern=NAME, description="name in answers, logs and reports")
    query_tower: str | None = Field(
        None, min_length=1, description="URI of a student, dual_encoder or query_encoder; null: the run's own"
    )
    index: str | None = Field(None, min_length=1, description="URI of an index; null: the active one")
    personalised: bool = Field(
        True, description="fuse features of the user into the query, if the run has a fusion model"
    )
    share: float = Field(
        1.0, ge=0, le=1, description="share of the traffic; 0: only requests that name the arm"
    )


class TrafficSplit(Config):
    """Arms and their shares; the first is the control."""

    name: str = Field(
        "default", pattern=NAME, description="seed of the split: another name gives other groups"
    )
    arms: tuple[Arm, ...] = Field((Arm(),), min_length=1, description="their shares sum to 1")

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


class Relevance(Config):
    """Results judged by a ranking model (ScalingNote, section 4.6)."""

    judge: CrossEncoderConfig = Field(description="scores each pair of a query and a document that was shown")
    irrelevant_below: float = Field(0.5, description="documents that the judge scores lower are irrelevant")
    requests_per_arm: int = Field(1000, ge=2, description="random sample of logged queries to judge")


class ExperimentConfig(Config):
    """A report on one experiment, from access logs."""

    run_dir: str = Field("runs/quickstart", description="the run that was served; the report goes below it")
    logs: tuple[str, ...] = Field(min_length=1, description="access logs: files, folders, globs or URIs")
    split: TrafficSplit = Field(description="as it was served: arms, shares and the experiment's name")
    start: AwareDatetime | None = Field(None, description="earlier requests are left out; with a time zone")
    end: AwareDatetime | None = Field(None, description="requests from then on are left out")
    relevance: Relevance | None = Field(None, description="null: results are not judged")
    feedback: str | None = Field(
        None, description=".jsonl or .parquet of request_id, satisfied (true/false, or 0 to 1); a glob, too"
    )
    clicks: str | None = Field(None, description=".jsonl or .parquet of request_id; a glob, too")
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


def unit_of(user_id: str | None, request_id: str, *, secret: str = "") -> str:
    """The unit that is assigned and logged: ``u:`` and a hash of the user's id, or ``r:`` and a request id.

    Args:
        user_id: None or empty for anonymous requests.
        request_id: of the request.
        secret: key of the hash, equal in all gateways during an experiment. Without it a hash is not
            anonymous, because ids can be guessed.
    """
    if not user_id:
        return f"r:{request_id}"
    key = blake2b(secret.encode()).digest()
    return f"u:{blake2b(user_id.encode('utf-8', 'surrogatepass'), digest_size=16, key=key).hexdigest()}"


def arm_of(unit: str, split: TrafficSplit) -> Arm:
    """The arm of a unit in an experiment; independent between experiments of different names."""
    if len(split.arms) == 1:
        return split.arms[0]
    with_traffic = (arm for arm in split.arms if arm.share > 0)
    return min(with_traffic, key=lambda arm: (_waiting(split.name, arm.name, unit) / arm.share, arm.name))


def _waiting(*parts: str) -> float:
    """A pseudo-random number from the exponential distribution of mean 1, determined by `parts`."""
    text = "\x1f".join(parts).encode("utf-8", "surrogatepass")
    uniform = int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 11  # a float has 53 bits
    return -math.log((uniform + 0.5) / 2**53)
