"""From what a user types, and who they are, to what an index is searched with.

    text ─► query tower ─► unit embedding ─► query fusion (planner, features of the user) ─► final embedding
      └───► terms, where documents have terms

A user who is not known, and any user where nothing was fused, gets the plain embedding, bit for bit.
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
from scalingnote.storage import vectors

if TYPE_CHECKING:  # it needs torch, a lookup tower does not
    from scalingnote.fuse.fusion import QueryFusion


@dataclass(frozen=True)
class Personal:
    """What turns the query of a known user into theirs."""

    fusion: "QueryFusion"
    store: FeatureStore
    planner: Planner | None = None


@dataclass(frozen=True)
class Asked:
    """Queries, ready to be searched with: a row each."""

    embeddings: Float[ndarray, "queries dim"]  # of unit length
    terms: SparseRows | None
    personalised: Bool[ndarray, " queries"]

    def __getitem__(self, query: int) -> "Asked":
        """One of them."""
        rows = slice(query, query + 1)
        return Asked(self.embeddings[rows], one(self.terms, query), self.personalised[rows])


@dataclass(frozen=True)
class QueryPath:
    """All that lies between a query and the index. Threads may share one."""

    encoder: QueryEncoder
    sparse: SparseQuery | None = None
    personal: Personal | None = None

    def __call__(self, queries: Sequence[str], users: Sequence[str | None] | None = None) -> Asked:
        """Queries and the ids of those who ask them, None where nobody is known."""
        embeddings = vectors.unit(self.encoder.encode_queries(queries))
        terms = None if self.sparse is None else self.sparse.encode(queries)
        asked = Asked(embeddings, terms, np.zeros(len(queries), bool))
        if self.personal is None or users is None or not any(users):
            return asked
        return _personalised(asked, queries, users, self.personal)


def one(terms: SparseRows | None, row: int) -> SparseRows | None:
    """A row of sparse rows, as such."""
    if terms is None:
        return None
    start, stop = terms.offsets[row : row + 2].tolist()
    return SparseRows(np.array([0, stop - start]), terms.terms[start:stop], terms.values[start:stop])


def _personalised(
    asked: Asked, queries: Sequence[str], users: Sequence[str | None], personal: Personal
) -> Asked:
    named = [number for number, user in enumerate(users) if user]
    features = personal.store.get_many([users[number] or "" for number in named])
    users_known = {n: user for n, user in zip(named, features, strict=True) if user.profile or user.history}
    if not users_known:
        return asked
    known = list(users_known)
    texts = [queries[number] for number in known]
    embeddings = asked.embeddings.copy()
    embeddings[known] = personal.fusion.fuse(
        asked.embeddings[known],
        terms=None if personal.planner is None else personal.planner.term_scores(texts),
        users=list(users_known.values()),
    )
    fused = asked.personalised.copy()
    fused[known] = True
    return replace(asked, embeddings=embeddings, personalised=fused)
