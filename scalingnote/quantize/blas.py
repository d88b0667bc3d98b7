"""faiss computes distances by its own loops or by BLAS; this pins BLAS while codebooks are made and used.

faiss leaves BLAS below a batch size that is right on some machines only: on others the same batch is 5 to
11 times faster through BLAS (flat search of 64 to 200 queries, K-means of short sub-vectors). Timing the two
at start-up would find the faster, but they round differently, and a codebook must not depend on the clock.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import faiss


@contextmanager
def blas_only() -> Iterator[None]:
    """Within the block every distance of this process that faiss can compute by BLAS is."""
    before = faiss.cvar.distance_compute_blas_threshold
    faiss.cvar.distance_compute_blas_threshold = 1
    try:
        yield
    finally:
        faiss.cvar.distance_compute_blas_threshold = before
