"""Compiled loops, where numpy would outlast the search itself; and the heap that keeps their k best.

A heap holds scores and rows, the worst on top: the lowest score, and of equal scores the highest row.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, no_type_check

import numba

# Sums in any order, so that loops over dimensions run on vectors; infinities stay what they are.
_REORDERED = {"reassoc", "contract", "nsz"}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled at the first call, without Python's lock; kept on disk where there is a folder to write to."""
    try:
        made: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # no such folder
        made = numba.njit(nogil=True, **options)(function)
    return made


reordered = partial(compiled, fastmath=_REORDERED)


@compiled
@no_type_check
def climb(scores, rows, place, score, row):
    """Put a candidate into a heap at its first free place."""
    while place > 0:
        parent = (place - 1) >> 1
        if scores[parent] < score or (scores[parent] == score and rows[parent] > row):
            break
        scores[place], rows[place] = scores[parent], rows[parent]
        place = parent
    scores[place], rows[place] = score, row


@compiled
@no_type_check
def sink(scores, rows, size, score, row):
    """Put a candidate into a heap in place of the worst."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            scores[right] < scores[child] or (scores[right] == scores[child] and rows[right] > rows[child])
        ):
            child = right
        if scores[child] > score or (scores[child] == score and rows[child] < row):
            break
        scores[place], rows[place] = scores[child], rows[child]
        place = child
    scores[place], rows[place] = score, row


@compiled
@no_type_check
def sort(scores, rows, size):
    """Turn a heap into a ranking, best first."""
    for last in range(size - 1, 0, -1):
        score, row = scores[last], rows[last]
        scores[last], rows[last] = scores[0], rows[0]
        sink(scores, rows, last, score, row)
