"""Compiled loops, where numpy would take longer than the search itself."""

from collections.abc import Callable
from typing import Any

import numba

# Sums may be taken in any order, so that loops over dimensions run on vectors; infinities stay what they are.
MATHS = {"reassoc", "contract", "nsz"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at the first call, without Python's lock; kept on disk where there is a folder to write to."""
    try:
        made: Callable[..., Any] = numba.njit(nogil=True, cache=True, fastmath=MATHS)(function)
    except RuntimeError:  # no such folder
        made = numba.njit(nogil=True, fastmath=MATHS)(function)
    return made
