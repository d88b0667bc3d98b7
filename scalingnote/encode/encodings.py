"""What an engine gives for the token rows of documents: embeddings, terms of a sparse head, and cost."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.models.prompt import TokenRow


@dataclass(frozen=True)
class Cost:
    """Work of a forward pass."""

    tokens: int = 0  # without padding
    padded: int = 0  # with padding
    flops: float = 0.0  # 0 if the shape of the architecture is unknown
    cut_texts: int = 0  # that are longer than the model reads
    lost_tokens: int = 0  # of these, which are not read

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class TopTerms:
    """Up to k terms of each row by a sparse head, in any order; a weight of 0 means no term."""

    terms: Int[ndarray, "rows k"]
    impacts: Float[ndarray, "rows k"]

    @classmethod
    def empty(cls, rows: int, k: int) -> "TopTerms":
        """Rows without terms."""
        return cls(np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float16))

    def put(
        self,
        rows: Int[ndarray, " chosen"],
        terms: Int[ndarray, "chosen k"],
        impacts: Float[ndarray, "chosen k"],
    ) -> None:
        """Set the terms of some rows; fewer than k if the vocabulary is smaller."""
        width = terms.shape[1]
        self.terms[rows, :width], self.impacts[rows, :width] = terms, impacts

    def columns(self) -> list[pa.Array]:
        """List columns ``terms``, ascending in each row, and ``impacts``."""
        order = np.argsort(self.terms, axis=1, kind="stable")
        terms, impacts = (np.take_along_axis(part, order, axis=1) for part in (self.terms, self.impacts))
        kept = impacts > 0
        offsets = np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.int32)
        return [pa.ListArray.from_arrays(offsets, pa.array(part[kept])) for part in (terms, impacts)]


class RowEncoding(NamedTuple):
    """The result of an engine for some token rows."""

    embeddings: Float[ndarray, "rows views dim"]  # not normalised
    terms: TopTerms | None  # None for a tower without a sparse head
    cost: Cost


@runtime_checkable
class EncoderEngine(Protocol):
    """An encoder of token rows, which a worker loads once."""

    dim: int
    views: tuple[str, ...]  # of the embeddings of a row, in order

    def encode_with_cost(self, rows: Sequence[TokenRow], *, top_k: int = 256) -> RowEncoding:
        """Embeddings of token rows, with a sparse head their `top_k` terms of largest weight, and cost."""

    def peak(self) -> float:
        """FLOPs per second of large matrix products in this process."""
