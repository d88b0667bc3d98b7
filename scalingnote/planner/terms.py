"""The words of many queries and their importances, as three flat arrays."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int64, UInt64
from numpy import ndarray


@dataclass(frozen=True)
class TermScores:
    """Importance of every distinct word of every query: query i holds entries offsets[i] to offsets[i + 1].

    One entry per distinct word of a query, in order of first occurrence. A word is its stable 64-bit hash.
    """

    offsets: Int64[ndarray, " offsets"]  # one more than there are queries
    terms: UInt64[ndarray, " terms"]
    scores: Float32[ndarray, " terms"]

    def to_arrow(self) -> pa.Table:
        """One row per query, two lists in it."""
        offsets = pa.array(self.offsets.astype(np.int32))  # of one bucket or slice: below 2^31
        columns = {"terms": self.terms, "scores": self.scores}
        return pa.table(
            {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in columns.items()}
        )

    @classmethod
    def from_arrow(cls, table: pa.Table) -> "TermScores":
        """What :meth:`to_arrow` made."""
        terms, scores = (table[name].combine_chunks() for name in ("terms", "scores"))
        lengths = terms.value_lengths().to_numpy(zero_copy_only=False)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(offsets, terms.flatten().to_numpy(), scores.flatten().to_numpy())
