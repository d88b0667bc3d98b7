"""Micro-batches of similar length under a token budget, so that little of a forward pass is padding."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray


def by_tokens(lengths: Sequence[int], *, budget: int) -> Iterator[Int[ndarray, " rows"]]:
    """Row numbers, longest first, cut so that rows x longest stays within `budget` padded tokens.

    A row longer than the budget goes alone. Every row appears exactly once.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    start = 0
    while start < len(order):
        longest = max(lengths[order[start]], 1)
        size = max(budget // longest, 1)
        yield order[start : start + size]
        start += size
