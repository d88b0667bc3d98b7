"""Sparse vectors of documents: the strongest terms of each as two Arrow columns."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray


@dataclass(frozen=True)
class Terms:
    """Up to k terms of every row, in any order; a weight of 0 is no term."""

    terms: Int[ndarray, "rows k"]
    impacts: Float[ndarray, "rows k"]

    @classmethod
    def empty(cls, rows: int, k: int) -> "Terms":
        """No terms yet."""
        return cls(np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float16))

    def put(
        self,
        rows: Int[ndarray, " chosen"],
        terms: Int[ndarray, "chosen k"],
        impacts: Float[ndarray, "chosen k"],
    ) -> None:
        """The terms of some rows; fewer than k where the vocabulary has no more."""
        width = terms.shape[1]
        self.terms[rows, :width], self.impacts[rows, :width] = terms, impacts

    def columns(self) -> list[pa.Array]:
        """Columns ``terms``, ascending in each row, and ``impacts``."""
        order = np.argsort(self.terms, axis=1, kind="stable")
        terms, impacts = (np.take_along_axis(part, order, axis=1) for part in (self.terms, self.impacts))
        kept = impacts > 0
        offsets = np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.int32)
        return [pa.ListArray.from_arrays(offsets, pa.array(part[kept])) for part in (terms, impacts)]
