"""Matryoshka prefixes: every loss is computed on the first m dimensions, for each m."""

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def prefixes(
    *embeddings: Float[Tensor, "..."], dims: Sequence[int], weights: Sequence[float] | None = None
) -> Iterator[tuple[float, list[Float[Tensor, "..."]]]]:
    """Weight w^m and prefixes of length m, each at unit length again, for each m (Eq. 7 and 10).

    `weights` default to 1. The caller adds the weighted losses up.
    """
    # Adding up the products of blocks of dimensions, and dividing the sums by norms, takes half the
    # multiplications but more passes over [queries, docs], which are what costs: 1.5 times slower.
    for dim, weight in zip(dims, weights or [1.0] * len(dims), strict=True):
        yield weight, [F.normalize(embedding[..., :dim], dim=-1) for embedding in embeddings]
