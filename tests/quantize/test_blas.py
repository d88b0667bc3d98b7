import faiss

from scalingnote.quantize.blas import blas_only


def test_blas_is_pinned_until_the_last_of_overlapping_blocks_ends() -> None:
    before = faiss.cvar.distance_compute_blas_threshold
    assert before != 1
    one, two = blas_only(), blas_only()  # as of two threads
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert faiss.cvar.distance_compute_blas_threshold == 1
    two.__exit__(None, None, None)
    assert faiss.cvar.distance_compute_blas_threshold == before
