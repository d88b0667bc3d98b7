"""Loops that numba compiles."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile at the first call, run without the GIL; cache on disk where a folder is writable."""
    try:
        made: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder for its cache
        made = numba.njit(nogil=True, **options)(function)
    return made
