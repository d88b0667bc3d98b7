"""Queries: a text and a user become the input of a search; the teacher encodes a few in place of the student.

    text ─► query tower ─► unit embedding ─► query fusion (planner, features of the user) ─► final embedding
      └───► terms, if documents have terms

Unknown users get the plain embedding, bit for bit, and so do all users if no query fusion was trained.

    search ─► five best scores close together? ─► the teacher encodes the query ─► search again
                                               └► otherwise: unchanged

A student finds nearly the same documents as its teacher, but orders them worse. The order is uncertain if the
five best scores have a small standard deviation relative to their mean. :class:`scalingnote.Index` tunes the
threshold on held-out queries, :mod:`scalingnote.serve.escalation` on the latest queries.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import ConfigError
from scalingnote.core.words import checked_texts
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.fuse.feature_store import FeatureStore
from scalingnote.index.filters import Filter
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.storage import arrow
from scalingnote.triplets.planner.planner import Planner

if TYPE_CHECKING:  # fusion needs torch, a lookup tower does not
    from scalingnote.fuse.fusion import QueryFusion

COMPARED = 5  # number of best scores in the coefficient of variation
WINDOW = 1000  # number of latest queries that a share refers to
MIN_QUERIES = 100  # queries before the first one escalates, unless all do
TUNING_INTERVAL = 20  # queries


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
    version: str = ""  # of the index, if several are served
    record: int | None = None  # of a delta's log: the search sees the index as of it; None: as it was built

    @cached_property
    def batch_key(self) -> tuple[str | int | bool, ...]:
        """Key of a batch: queries with equal keys differ only in embedding and terms, and share a search."""
        where = json.dumps(self.where, sort_keys=True) if self.where else ""
        record = -1 if self.record is None else self.record
        return self.version, self.k, self.nprobe or 0, self.exact, self.terms is None, where, record


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
            users: id of the user of each query, None if unknown; (): no query has a user.

        Raises:
            DataError: a query is not a text.
        """
        queries = checked_texts(queries, name="query")
        embeddings = arrow.l2_normalize(self.encoder.encode_queries(queries))
        terms = None if self.sparse is None else self.sparse.encode(queries)
        rows = [None if terms is None else terms.take([n]) for n in range(len(queries))]
        encoded = [Query(embeddings[n : n + 1], rows[n]) for n in range(len(queries))]
        if self.personal is None or not any(users):
            return encoded
        return _personalise(encoded, queries, users, self.personal)


def _personalise(
    encoded: list[Query], queries: Sequence[str], users: Sequence[str | None], personal: Personal
) -> list[Query]:
    with_user = [number for number, user in enumerate(users) if user]
    features = personal.store.get_many([users[number] or "" for number in with_user])
    known = {n: user for n, user in zip(with_user, features, strict=True) if user.profile or user.history}
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


# --- which queries the teacher encodes ------------------------------------------------------------------


def doubt(scores: Float[ndarray, "queries k"]) -> Float[ndarray, " queries"]:
    """Compute how uncertain the student's order is: minus the variation coefficient of the five best scores.

    That is their standard deviation over their mean. `scores` are best first, padded with -inf. The result is
    at most 0, the most doubt, which it also is if the mean is not above 0: then no document resembles the
    query. It is -inf if there are fewer than two candidates to order.
    """
    best = scores[:, :COMPARED].astype(np.float64)
    is_score = np.isfinite(best)
    count = np.maximum(is_score.sum(axis=1), 1)
    best = np.where(is_score, best, 0.0)
    mean = best.sum(axis=1) / count
    squares = np.where(is_score, best - mean[:, None], 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=1) / count)
    variation = np.divide(deviation, mean, out=np.zeros_like(mean), where=mean > 0)
    return np.where(is_score.sum(axis=1) > 1, -variation, -np.inf)


def escalation_threshold(doubts: Float[ndarray, " queries"], share: float) -> float:
    """Compute the doubt above which a query escalates, so that at most `share` of these queries do.

    Args:
        doubts: doubts of held-out queries, from :func:`doubt`.
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
    ranked = np.sort(doubts)[::-1]
    # Between two of them: the last digits of a query's scores depend on its batch.
    return float((ranked[max(most - 1, 0)] + ranked[most]) / 2)


class DoubtWindow:
    """Selection of the queries that escalate in a stream of queries.

    Args:
        share: share of the latest WINDOW queries.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._doubts: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._limit = float("-inf") if share == 1 else float("inf")

    def is_uncertain(self, scores: Float[ndarray, " candidates"]) -> bool:
        """Return whether a query with these scores, in any order, escalates; count it for later queries."""
        value = float(doubt(-np.sort(-scores)[np.newaxis, :COMPARED])[0])
        uncertain = value > self._limit  # its own doubt does not count yet
        if self._share < 1:
            self._doubts.append(value)
            self._seen += 1
            if self._seen >= MIN_QUERIES and self._seen % TUNING_INTERVAL == 0:
                self._limit = escalation_threshold(np.array(self._doubts), self._share)
        return uncertain
