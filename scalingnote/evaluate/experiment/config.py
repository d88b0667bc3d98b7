"""Settings of online experiments, and the assignment of units of traffic to arms.

Assignment needs no state: every process, Python release and reader of the log computes the same arm. For
each arm an exponential waiting time is drawn from a hash of (experiment, arm, unit), with the share as its
rate, and the arm with the shortest time is chosen (weighted rendezvous hashing). So the probability of an arm
is its share, independently of the order of arms. When shares change,

- between any two arms, units move only to the one with the larger growth factor of its share;
- with two arms, or if one arm grows and all others shrink in proportion (for example, a new arm), the minimal
  share of units moves;
- otherwise at most 2d / (1 + d) move if at least d must move. In the worst case no rule that depends only on
  the current shares moves fewer (correlated sampling; Bavarian et al., 2016, "The optimality of correlated
  sampling").
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
        None,
        min_length=1,
        description="URI of a student, dual_encoder or query_encoder; null: the query tower of the run",
    )
    index: str | None = Field(None, min_length=1, description="URI of an index; null: the active one")
    personalised: bool = Field(
        True, description="add features of the user to the query, if the run has a fusion model"
    )
    share: float = Field(
        1.0, ge=0, le=1, description="share of the traffic; 0: only requests that name the arm"
    )


class TrafficSplit(Config):
    """Arms and their shares; the first arm is the control."""

    name: str = Field(
        "default", pattern=NAME, description="seed of the split: another name gives other groups of users"
    )
    arms: tuple[Arm, ...] = Field((Arm(),), min_length=1, description="arms with shares that sum to 1")

    @model_validator(mode="after")
    def _splits_all_traffic(self) -> "TrafficSplit":
        names = [arm.name for arm in self.arms]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"arms repeat the name {repeated[0]!r}: give each arm a different name")
        total = math.fsum(arm.share for arm in self.arms)
        if not math.isclose(total, 1, abs_tol=1e-6):
            shares = ", ".join(f"{arm.name} {arm.share:g}" for arm in self.arms)
            raise ValueError(f"shares sum to {total:g} ({shares}): change them so that they sum to 1")
        return self


class Relevance(Config):
    """Settings of the judgement of results by a ranking model (ScalingNote, section 4.6)."""

    judge: CrossEncoderConfig = Field(description="model that scores each pair of a query and a result")
    irrelevant_below: float = Field(0.5, description="documents with a lower score are irrelevant")
    requests_per_arm: int = Field(1000, ge=2, description="size of the random sample of queries to judge")


class ExperimentConfig(Config):
    """Settings of a report on one experiment from access logs."""

    run_dir: str = Field("runs/quickstart", description="folder of the served run, which gets the report")
    logs: tuple[str, ...] = Field(min_length=1, description="access logs: files, folders, globs or URIs")
    split: TrafficSplit = Field(description="the served split: arms, shares and name of the experiment")
    start: AwareDatetime | None = Field(
        None, description="time with a time zone; earlier requests are left out"
    )
    end: AwareDatetime | None = Field(
        None, description="time with a time zone; requests at this time or later are left out"
    )
    relevance: Relevance | None = Field(None, description="null: results are not judged")
    feedback: str | None = Field(
        None,
        description=".jsonl or .parquet file, or a glob, with request_id and satisfied (true/false, or 0 to "
        "1)",
    )
    clicks: str | None = Field(None, description=".jsonl or .parquet file, or a glob, with request_id")
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _compares_something(self) -> "ExperimentConfig":
        if sum(arm.share > 0 for arm in self.split.arms) < 2:
            raise ValueError("split has fewer than two arms with traffic: add an arm to compare")
        if not self.split.arms[0].share:
            raise ValueError(f"the control {self.split.arms[0].name!r} has no traffic: put another arm first")
        if self.start and self.end and self.start >= self.end:
            raise ValueError(f"start={self.start} is not before end={self.end}: swap them")
        return self


def unit_of(user_id: str | None, request_id: str, *, secret: str = "") -> str:
    """Return the assigned and logged unit: ``u:`` and a hash of the user's id, or ``r:`` and a request id.

    Args:
        user_id: None or empty for anonymous requests.
        request_id: of the request.
        secret: key of the hash, equal in all gateways during an experiment. Without a secret the hash is not
            anonymous, because ids can be guessed.
    """
    if not user_id:
        return f"r:{request_id}"
    key = blake2b(secret.encode()).digest()
    return f"u:{blake2b(user_id.encode('utf-8', 'surrogatepass'), digest_size=16, key=key).hexdigest()}"


def arm_of(unit: str, split: TrafficSplit) -> Arm:
    """Return the arm of a unit; arms are independent between experiments with different names."""
    if len(split.arms) == 1:
        return split.arms[0]
    with_traffic = (arm for arm in split.arms if arm.share > 0)
    return min(with_traffic, key=lambda arm: (_waiting(split.name, arm.name, unit) / arm.share, arm.name))


def _waiting(*parts: str) -> float:
    """Compute a pseudo-random number with an exponential distribution of mean 1 from `parts`."""
    text = "\x1f".join(parts).encode("utf-8", "surrogatepass")
    uniform = int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 11  # a float has 53 bits
    return -math.log((uniform + 0.5) / 2**53)
