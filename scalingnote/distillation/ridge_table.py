"""A token table in closed form: ridge regression from token shares to a teacher's embeddings.

X [texts, tokens]   sparse: each token's share of its text
Y [texts, dim]      the teacher's embeddings
W [tokens, dim]     argmin |X W - Y|^2 + ridge |W|^2
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
from jaxtyping import Float
from numpy import ndarray


@dataclass(frozen=True)
class RidgeTable:
    """A vector per token that was seen: a text's embedding is the mean of its tokens' vectors, normalised."""

    columns: ndarray
    """Of each token id, its row in `rows`; -1 where it was not seen."""
    rows: Float[ndarray, "tokens dim"]

    @classmethod
    def fit(
        cls, texts: Sequence[Sequence[int]], targets: Float[ndarray, "texts dim"], *, ridge: float
    ) -> "RidgeTable":
        """The ridge regression from token shares to unit embeddings.

        Args:
            texts: token ids of each text, at least one each.
            targets: the teacher's embeddings of them.
            ridge: weight of the squared norm of the vectors.
        """
        seen = np.unique(np.concatenate([np.asarray(ids) for ids in texts]))
        columns = np.full(int(seen[-1]) + 1, -1)
        columns[seen] = np.arange(len(seen))
        return cls(columns, ridge_fit(shares(texts, columns), targets, ridge=ridge).astype(np.float32))

    def embed(self, texts: Sequence[Sequence[int]]) -> Float[ndarray, "texts dim"]:
        """Unit embeddings; 0 for a text of which no token was seen."""
        return unit(np.asarray(shares(texts, self.columns) @ self.rows))

    def embed_one(self, ids: Sequence[int]) -> Float[ndarray, " dim"]:
        """The same for one text, without sparse arrays: what a query costs."""
        known = np.asarray(ids)
        found = self.columns[known[known < len(self.columns)]]
        vector = self.rows[found[found >= 0]].sum(axis=0)
        result: ndarray = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return result


def shares(texts: Sequence[Sequence[int]], columns: ndarray) -> Any:
    """Sparse [texts, tokens seen]: each token's share of its text; tokens that were not seen have none."""
    lengths = np.array([len(ids) for ids in texts])
    ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in texts])
    rows, values = np.repeat(np.arange(len(texts)), lengths), np.repeat(1 / np.maximum(lengths, 1), lengths)
    found = np.where(ids < len(columns), columns[np.minimum(ids, len(columns) - 1)], -1)
    known = found >= 0
    shape = (len(texts), int(columns.max()) + 1)
    return scipy.sparse.csr_array((values[known], (rows[known], found[known])), shape)


def ridge_fit(
    features: Any, targets: Float[ndarray, "texts dim"], *, ridge: float
) -> Float[ndarray, "tokens dim"]:
    """argmin over W of |features W - targets|^2 + ridge |W|^2, exactly, in float64.

    The normal equations are solved on the smaller side: [texts, texts] or [tokens, tokens].
    """
    texts, tokens = features.shape
    wanted = targets.astype(np.float64)
    if texts < tokens:
        gram = (features @ features.T).toarray()
        gram[np.diag_indices(texts)] += ridge
        return np.asarray(features.T @ scipy.linalg.solve(gram, wanted, assume_a="pos", overwrite_a=True))
    gram = (features.T @ features).toarray()
    gram[np.diag_indices(tokens)] += ridge
    return np.asarray(scipy.linalg.solve(gram, features.T @ wanted, assume_a="pos", overwrite_a=True))


def unit(vectors: Float[ndarray, "rows dim"]) -> Float[ndarray, "rows dim"]:
    """Rows of length 1; a row of zeros stays one."""
    made: ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return made
