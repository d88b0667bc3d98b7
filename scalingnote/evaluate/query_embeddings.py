"""Distinct queries and their embeddings by one tower."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.storage import arrow


@dataclass(frozen=True)
class QueryEmbeddings:
    """Distinct queries and their embeddings, unnormalized."""

    queries: Sequence[str]
    embeddings: Float[ndarray, "queries dim"]

    @cached_property
    def _row(self) -> dict[str, int]:
        return {query: row for row, query in enumerate(self.queries)}

    def of(self, queries: Sequence[str]) -> Float[ndarray, "asked dim"]:
        """Unnormalized embeddings of some of the queries."""
        return np.asarray(self.embeddings[[self._row[query] for query in queries]])

    def unit(self, queries: Sequence[str]) -> Float[ndarray, "asked dim"]:
        """Embeddings of some of the queries at length 1, as search uses them."""
        return arrow.l2_normalize(self.of(queries))

    def subset(self, queries: Sequence[str]) -> "QueryEmbeddings":
        """Some of the queries, without repetitions."""
        distinct = list(dict.fromkeys(queries))
        return QueryEmbeddings(distinct, self.of(distinct))
