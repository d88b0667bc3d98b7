"""Which rows of a corpus kept in parts make up a training sample."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int
from numpy import ndarray


def choose(rows: Sequence[int], *, size: int, seed: int) -> list[Int[ndarray, " chosen"]]:
    """Row numbers to take from each part, given the number of rows of every part.

    A uniform sample without replacement of `size` rows of the whole corpus, or all of them if there are no
    more, in corpus order; the same for the same rows and seed.
    """
    total = sum(rows)
    if size >= total:
        return [np.arange(count) for count in rows]
    chosen = np.sort(np.random.default_rng(seed).choice(total, size, replace=False))
    ends = np.cumsum(rows)
    bounds = np.searchsorted(chosen, np.concatenate([[0], ends]))
    return [
        chosen[first:last] - (end - count)
        for first, last, end, count in zip(bounds[:-1], bounds[1:], ends, rows, strict=True)
    ]
