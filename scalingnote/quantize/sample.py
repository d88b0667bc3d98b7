"""Which rows of a corpus kept in parts make up a training sample, decided without listing its rows.

Systematic sampling: the corpus is one line of rows, and marks stand on it at equal distances from a random
start. Where they fall says how many rows a part gives; which of its rows, the part's own draw. Every row of
the corpus is as likely to be taken, and the driver keeps one number per part.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from jaxtyping import Int
from numpy import ndarray


def shares(rows: Sequence[int], *, size: int, seed: int) -> list[int]:
    """How many rows each part gives to a sample of `size` rows of the whole, or of all if there are no more.

    `rows` is the number of rows of every part; the same rows, size and seed give the same shares.
    """
    total = sum(rows)
    if size >= total:
        return list(rows)
    # In whole numbers: floats cannot tell apart the rows of a corpus of billions.
    start = int(np.random.default_rng(seed).integers(total))
    marks = [(size * end + start) // total for end in accumulate(rows, initial=0)]
    return [after - before for before, after in pairwise(marks)]


def draw(rows: int, *, take: int, seed: int, part: int) -> Int[ndarray, " chosen"]:
    """Ascending row numbers of a part of `rows` rows, its share of the sample, without replacement."""
    if take >= rows:
        return np.arange(rows)
    # numpy takes (seed, 0) for seed, whose numbers place the marks.
    return np.sort(np.random.default_rng((seed, part + 1)).choice(rows, take, replace=False))
