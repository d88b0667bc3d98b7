"""Queries: text and user become the input of a search; and which queries a teacher encodes again.

    text ─► query tower ─► unit embedding ─► query fusion (planner, features of the user) ─► final embedding
      └───► terms, where documents have terms

    search ─► ten best scores close together? ─► the teacher encodes the query ─► search again
                                              └► otherwise: unchanged

Unknown users, and all users where no query fusion was trained, get the plain embedding, bit for bit.

Escalation: a student finds nearly the same documents as its teacher, but orders them worse. The order is
uncertain where candidates have similar scores, that is, where the ten best scores have a small standard
deviation. :class:`scalingnote.Index` searches this way; this module decides when, and measures the effect.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError
from scalingnote.fuse.feature_store import FeatureStore
from scalingnote.index.filters import Filter
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.planner.planner import Planner
from scalingnote.storage import arrow

if TYPE_CHECKING:  # it needs torch, a lookup tower does not
    from scalingnote.fuse.fusion import QueryFusion

COMPARED = 10  # best scores whose standard deviation is taken
DEPTH = 100  # candidates of a query that the teacher scores
SHARES = tuple(step / 10 for step in range(11))


@dataclass(frozen=True)
class Personal:
    """Query fusion for users with features."""

    fusion: "QueryFusion"
    store: FeatureStore
    planner: Planner | None = None


@dataclass(frozen=True)
class Query:
    """The input of a search: an encoded query, and how to search."""

    embedding: Float[ndarray, "one dim"]  # of unit length
    terms: SparseRows | None = None  # one row
    personalised: bool = False
    k: int = 10
    nprobe: int | None = None
    where: Filter | None = None
    exact: bool = False
    version: str = ""  # of the index, where several are served

    @cached_property
    def batch_key(self) -> tuple[str | int | bool, ...]:
        """Queries with equal keys differ in embedding and terms only, and are searched together."""
        where = json.dumps(self.where, sort_keys=True) if self.where else ""
        return self.version, self.k, self.nprobe or 0, self.exact, self.terms is None, where


@dataclass(frozen=True)
class QueryPath:
    """Encoder of queries: embeddings, terms and personalisation. Threads may share one."""

    encoder: QueryEncoder
    sparse: SparseQuery | None = None
    personal: Personal | None = None

    def __call__(self, queries: Sequence[str], users: Sequence[str | None] = ()) -> list[Query]:
        """Encode queries.

        Args:
            queries: texts.
            users: id of the user of each query, None where unknown; (): no query has a user.
        """
        embeddings = arrow.l2_normalize(self.encoder.encode_queries(queries))
        terms = None if self.sparse is None else self.sparse.encode(queries)
        encoded = [Query(embeddings[n : n + 1], _row(terms, n)) for n in range(len(queries))]
        if self.personal is None or not any(users):
            return encoded
        return _personalised(encoded, queries, users, self.personal)


def _row(terms: SparseRows | None, row: int) -> SparseRows | None:
    """One row of sparse rows."""
    if terms is None:
        return None
    start, stop = terms.offsets[row : row + 2].tolist()
    return SparseRows(np.array([0, stop - start]), terms.terms[start:stop], terms.values[start:stop])


def _personalised(
    encoded: list[Query], queries: Sequence[str], users: Sequence[str | None], personal: Personal
) -> list[Query]:
    named = [number for number, user in enumerate(users) if user]
    features = personal.store.get_many([users[number] or "" for number in named])
    known = {n: user for n, user in zip(named, features, strict=True) if user.profile or user.history}
    if not known:
        return encoded
    texts = [queries[number] for number in known]
    embeddings = personal.fusion.fuse(
        np.concatenate([encoded[number].embedding for number in known]),
        terms=None if personal.planner is None else personal.planner.term_scores(texts),
        users=list(known.values()),
    )
    for row, number in enumerate(known):
        encoded[number] = replace(encoded[number], embedding=embeddings[row : row + 1], personalised=True)
    return encoded


# --- escalation ------------------------------------------------------------------------------------------


def doubt(scores: Float[ndarray, "queries k"]) -> Float[ndarray, " queries"]:
    """How uncertain the student's order is: minus the standard deviation of a query's ten best scores.

    Args:
        scores: best first; -inf where a query has no further candidate.

    Returns:
        At most 0, which is most doubt; -inf where there are fewer than two candidates to order.
    """
    best = scores[:, :COMPARED].astype(np.float64)
    found = np.isfinite(best)
    count = np.maximum(found.sum(axis=1), 1)
    mean = np.where(found, best, 0.0).sum(axis=1) / count
    squares = np.where(found, np.where(found, best, 0.0) - mean[:, None], 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=1) / count)
    return np.where(found.sum(axis=1) > 1, -deviation, -np.inf)


def threshold(doubts: Float[ndarray, " queries"], share: float) -> float:
    """The doubt above which a query escalates, such that at most `share` of these queries do.

    Args:
        doubts: of held-out queries, from :func:`doubt`.
        share: in [0, 1]. 0 gives inf (no query escalates), 1 gives -inf (every query with two candidates).

    Raises:
        ConfigError: `share` is outside [0, 1], or there are no queries to tune on.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of queries that escalate is {share:g}: give a number from 0 to 1")
    if share in (0, 1):
        return float("-inf" if share else "inf")
    if not len(doubts):
        raise ConfigError("no held-out queries to tune the threshold of escalation on: give some")
    most = int(share * len(doubts) + 1e-9)  # 0.29 * 100 is 28.999999999999996
    return float(np.sort(doubts)[::-1][most])


@dataclass(frozen=True)
class EscalationPoint:
    """One share of queries that escalate, with its quality and cost."""

    share: float
    """Asked for."""
    escalated: float
    """Reached: less than `share` where doubts are equal, more or less where tuned on other queries."""
    value: float
    """Mean of the metric."""
    cost: float
    """Mean per query, in the unit of the costs given."""


def curve(
    doubts: Float[ndarray, " queries"],
    student: Int[ndarray, "queries k"],
    teacher: Int[ndarray, "queries k"],
    metric: Callable[[Int[ndarray, "queries k"]], Float[ndarray, " queries"]],
    *,
    student_cost: float,
    teacher_cost: float,
    shares: Sequence[float] = SHARES,
    held_out: Float[ndarray, " queries2"] | None = None,
) -> list[EscalationPoint]:
    """Quality against cost, from no query escalated to all of them.

    Args:
        doubts: of the queries that are measured.
        student: the student's ranking of each query.
        teacher: the ranking once the teacher has re-ordered it.
        metric: maps the rankings of all queries to a value per query, e.g. nDCG@10.
        student_cost: of encoding and searching one query; every query costs it.
        teacher_cost: of encoding one query, in the same unit; escalated queries cost it on top.
        shares: points of the curve.
        held_out: doubts of other queries to tune each threshold on; None tunes on `doubts`.

    Raises:
        ConfigError: as :func:`threshold`.
    """
    before, after = metric(student), metric(teacher)
    points = []
    for share in shares:
        chosen = doubts > threshold(doubts if held_out is None else held_out, share)
        escalated = float(chosen.mean())
        value = float(np.where(chosen, after, before).mean())
        points.append(EscalationPoint(share, escalated, value, student_cost + escalated * teacher_cost))
    return points
