"""faiss computes distances by its own loops or by BLAS; this pins BLAS while codebooks are made and used.

faiss leaves BLAS below a batch size that is right on some machines only: on others the same batch is 5 to
11 times faster through BLAS (flat search of 64 to 200 queries, K-means of short sub-vectors). Timing the two
at start-up would find the faster, but they round differently, and a codebook must not depend on the clock.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import faiss

_lock = threading.Lock()
_inside = 0  # threads, and blocks within blocks
_outside = 0  # faiss's threshold while none is


@contextmanager
def blas_only() -> Iterator[None]:
    """Within the block every distance of this process that faiss can compute by BLAS is."""
    global _inside, _outside
    with _lock:
        if not _inside:
            _outside = faiss.cvar.distance_compute_blas_threshold
            faiss.cvar.distance_compute_blas_threshold = 1
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                faiss.cvar.distance_compute_blas_threshold = _outside
