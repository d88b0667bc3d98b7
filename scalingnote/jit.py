"""Loops that numba compiles, and the heap that keeps the best candidates of a search in them."""

from collections.abc import Callable
from typing import Any, no_type_check

import numba


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile at the first call, run without the GIL; cache on disk where a folder is writable."""
    try:
        made: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder for its cache
        made = numba.njit(nogil=True, **options)(function)
    return made


@compiled
@no_type_check
def heap_push(scores, rows, place, score, row):
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
def heap_replace(scores, rows, size, score, row):
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
def heap_sort(scores, rows, size):
    """Turn a heap into a ranking, best first."""
    for last in range(size - 1, 0, -1):
        score, row = scores[last], rows[last]
        scores[last], rows[last] = scores[0], rows[0]
        heap_replace(scores, rows, last, score, row)
