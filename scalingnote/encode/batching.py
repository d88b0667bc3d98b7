"""Micro-batches of similar length under a token budget, so that little of a forward pass is padding."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray


def by_tokens(
    lengths: Sequence[int], *, budget: int, packed: bool = False
) -> Iterator[Int[ndarray, " rows"]]:
    """Row numbers, longest first, cut so that a batch stays within `budget` tokens.

    They are rows x longest, pads included, or the rows' own tokens if `packed`. A row longer than the
    budget goes alone. Every row appears exactly once.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64)[order], 1)
    until = np.cumsum(sizes)
    start = 0
    while start < len(order):
        if packed:
            before = until[start - 1] if start else 0
            size = int(np.searchsorted(until, before + budget, side="right")) - start
        else:
            size = budget // int(sizes[start])
        size = max(size, 1)
        yield order[start : start + size]
        start += size
