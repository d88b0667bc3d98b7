"""Queries that were encoded once, and looked up by their text as often as they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float
from numpy import ndarray

from scalingnote.storage import vectors


@dataclass(frozen=True)
class Encoded:
    """Different queries and their embeddings, as the tower gives them."""

    queries: Sequence[str]
    embeddings: Float[ndarray, "queries dim"]

    @cached_property
    def _row(self) -> dict[str, int]:
        return {query: row for row, query in enumerate(self.queries)}

    def of(self, queries: Sequence[str]) -> Float[ndarray, "asked dim"]:
        """The embeddings of some of them, as the tower gives them."""
        found: ndarray = self.embeddings[[self._row[query] for query in queries]]
        return found

    def unit(self, queries: Sequence[str]) -> Float[ndarray, "asked dim"]:
        """The same at length 1, as they are searched with."""
        return vectors.unit(self.of(queries))

    def some(self, queries: Sequence[str]) -> "Encoded":
        """Only these, each once."""
        chosen = list(dict.fromkeys(queries))
        return Encoded(chosen, self.of(chosen))
