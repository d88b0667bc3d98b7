"""Queries: text and user become the input of a search.

    text ─► query tower ─► unit embedding ─► query fusion (planner, features of the user) ─► final embedding
      └───► terms, where documents have terms

Unknown users, and all users where no query fusion was trained, get the plain embedding, bit for bit.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.words import checked_texts
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.fuse.feature_store import FeatureStore
from scalingnote.index.filters import Filter
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.storage import arrow
from scalingnote.triplets.planner.planner import Planner

if TYPE_CHECKING:  # it needs torch, a lookup tower does not
    from scalingnote.fuse.fusion import QueryFusion


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
    record: int | None = None  # of a delta's log, as of which the index is searched; None: as it was built

    @cached_property
    def batch_key(self) -> tuple[str | int | bool, ...]:
        """Queries with equal keys differ in embedding and terms only, and are searched together."""
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
            users: id of the user of each query, None where unknown; (): no query has a user.

        Raises:
            DataError: a query is no text.
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
