"""Queries: text and user become the input of a search; and which queries a teacher encodes again.

    text ─► query tower ─► unit embedding ─► query fusion (planner, features of the user) ─► final embedding
      └───► terms, where documents have terms

    search ─► ten best scores close together? ─► the teacher encodes the query ─► search again
                                              └► otherwise: unchanged

Unknown users, and all users where no query fusion was trained, get the plain embedding, bit for bit.

Escalation: a student finds nearly the same documents as its teacher, but orders them worse. The order is
uncertain where candidates have similar scores, that is, where the ten best scores have a small standard
deviation. :class:`scalingnote.Index` and :mod:`scalingnote.serve.escalation` search this way; this module
decides when.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError
from scalingnote.fuse.feature_store import FeatureStore
from scalingnote.index.filters import Filter
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.planner.planner import Planner
from scalingnote.storage import arrow
from scalingnote.texts import checked_texts

if TYPE_CHECKING:  # it needs torch, a lookup tower does not
    from scalingnote.fuse.fusion import QueryFusion

COMPARED = 10  # best scores whose standard deviation is taken


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

        Raises:
            DataError: a query is no text.
        """
        queries = checked_texts(queries, name="query")
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

    `scores` are best first, -inf where a query has no further candidate. The result is at most 0, which is
    most doubt; -inf where there are fewer than two candidates to order.
    """
    best = scores[:, :COMPARED].astype(np.float64)
    found = np.isfinite(best)
    count = np.maximum(found.sum(axis=1), 1)
    best = np.where(found, best, 0.0)
    mean = best.sum(axis=1) / count
    squares = np.where(found, best - mean[:, None], 0.0) ** 2
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
