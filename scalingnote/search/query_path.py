"""Encode the text of a query, and the features of its user, to what an index is searched with.

    text ─► query tower ─► unit embedding ─► query fusion (planner, features of the user) ─► final embedding
      └───► terms, where documents have terms

Unknown users, and all users where no query fusion was trained, get the plain embedding, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float
from numpy import ndarray

from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.fuse.feature_store import FeatureStore
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.planner.planner import Planner
from scalingnote.storage import arrow

if TYPE_CHECKING:  # it needs torch, a lookup tower does not
    from scalingnote.fuse.fusion import QueryFusion


@dataclass(frozen=True)
class Personal:
    """Query fusion for users with features."""

    fusion: "QueryFusion"
    store: FeatureStore
    planner: Planner | None = None


@dataclass(frozen=True)
class EncodedQueries:
    """Encoded queries, one row each."""

    embeddings: Float[ndarray, "queries dim"]  # of unit length
    terms: SparseRows | None
    personalised: Bool[ndarray, " queries"]

    def __getitem__(self, query: int) -> "EncodedQueries":
        """A single query."""
        rows = slice(query, query + 1)
        return EncodedQueries(self.embeddings[rows], single_row(self.terms, query), self.personalised[rows])


@dataclass(frozen=True)
class QueryPath:
    """Encoder of queries: embeddings, terms and personalisation. Threads may share one."""

    encoder: QueryEncoder
    sparse: SparseQuery | None = None
    personal: Personal | None = None

    def __call__(self, queries: Sequence[str], users: Sequence[str | None] | None = None) -> EncodedQueries:
        """Encode queries.

        Args:
            queries: texts.
            users: id of the user of each query, None where unknown.
        """
        embeddings = arrow.l2_normalize(self.encoder.encode_queries(queries))
        terms = None if self.sparse is None else self.sparse.encode(queries)
        encoded = EncodedQueries(embeddings, terms, np.zeros(len(queries), bool))
        if self.personal is None or users is None or not any(users):
            return encoded
        return _personalised(encoded, queries, users, self.personal)


def single_row(terms: SparseRows | None, row: int) -> SparseRows | None:
    """One row of sparse rows."""
    if terms is None:
        return None
    start, stop = terms.offsets[row : row + 2].tolist()
    return SparseRows(np.array([0, stop - start]), terms.terms[start:stop], terms.values[start:stop])


def _personalised(
    encoded: EncodedQueries, queries: Sequence[str], users: Sequence[str | None], personal: Personal
) -> EncodedQueries:
    named = [number for number, user in enumerate(users) if user]
    features = personal.store.get_many([users[number] or "" for number in named])
    users_known = {n: user for n, user in zip(named, features, strict=True) if user.profile or user.history}
    if not users_known:
        return encoded
    known = list(users_known)
    texts = [queries[number] for number in known]
    embeddings = encoded.embeddings.copy()
    embeddings[known] = personal.fusion.fuse(
        encoded.embeddings[known],
        terms=None if personal.planner is None else personal.planner.term_scores(texts),
        users=list(users_known.values()),
    )
    fused = encoded.personalised.copy()
    fused[known] = True
    return replace(encoded, embeddings=embeddings, personalised=fused)
