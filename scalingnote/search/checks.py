"""What can be searched for: checks of queries and of what an index keeps, before any work is done."""

from typing import no_type_check

import numpy as np
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.index.compiled import compiled
from scalingnote.index.shard import Layout

MAX_K = 1000


def unit_queries(queries: Shaped[ndarray, "..."], *, dim: int, k: int) -> Float[ndarray, "queries dim"]:
    """Queries as unit vectors; SearchError says what is wrong with them, or with `k`."""
    if not isinstance(k, int | np.integer) or not 1 <= k <= MAX_K:
        raise SearchError(f"k is {k!r}: ask for 1 to {MAX_K} results")
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise SearchError(
            f"queries have shape {queries.shape}, the index has embeddings of dim {dim}: "
            f"pass [queries, {dim}] from the query tower this index was built for"
        )
    if not np.issubdtype(queries.dtype, np.floating):
        raise SearchError(f"queries are {queries.dtype}: pass floats")
    unit, broken = _scaled(queries if queries.dtype == np.float64 else np.asarray(queries, np.float32))
    if broken >= 0:
        raise SearchError(f"query {broken} is not finite or all zero: its direction says nothing")
    return unit  # type: ignore[no-any-return]


def require_vectors(layout: Layout) -> None:
    """SearchError unless the index keeps its documents' vectors."""
    if layout.refine == "none":
        raise SearchError(
            f"{layout.family} keeps no vectors of documents: index with index.family.refine=sq8"
        )


def require_both(layout: Layout) -> None:
    """SearchError where an index cannot be searched by embeddings and terms together."""
    if not layout.sparse:
        raise SearchError(
            "this index has no terms: set bm25, or train with train.sparse and encode, then index anew"
        )
    if layout.refine == "none":
        raise SearchError(
            f"{layout.family} keeps no vectors to score by what terms find: index with "
            "index.family.refine=sq8"
        )


def checked_nprobe(nprobe: int, nlist: int) -> int:
    """As many lists as there are at most; SearchError for none."""
    if nprobe < 1:
        raise SearchError(f"nprobe is {nprobe}: scan 1 to {nlist} lists")
    return min(nprobe, nlist)


@compiled
@no_type_check
def _scaled(queries):
    """Queries of unit length, and the first that cannot be so or -1; numpy would take as long to begin."""
    unit = np.empty(queries.shape, np.float32)
    for q in range(len(queries)):
        total = 0.0
        for j in range(queries.shape[1]):
            total += np.float64(queries[q, j]) * np.float64(queries[q, j])
        if not 0.0 < total < np.inf:  # nor is NaN
            return unit, q
        length = np.sqrt(total)
        for j in range(queries.shape[1]):
            unit[q, j] = queries[q, j] / length
    return unit, -1
