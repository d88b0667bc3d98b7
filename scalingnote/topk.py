"""Exact top-k search, selection and merging, with deterministic ties: higher scores first, then lower ids."""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

# One block of scores is 512 x 16,384 floats = 32 MB, whatever the corpus and the number of queries.
QUERY_BLOCK = 512
DOCUMENT_BLOCK = 16_384


def search(
    queries: Float[ndarray, "queries dim"], documents: Float[ndarray, "docs dim"], *, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """Inner products and row numbers of each query's k best documents; fewer columns for fewer documents."""
    width = min(k, len(documents))
    scores = np.empty((len(queries), width), np.result_type(queries, documents))
    rows = np.empty((len(queries), width), np.int64)
    for start in range(0, len(queries), QUERY_BLOCK):
        chosen = slice(start, start + QUERY_BLOCK)
        scores[chosen], rows[chosen] = _search_block(queries[chosen], documents, width)
    return scores, rows


def select(scores: Float[ndarray, "queries columns"], *, k: int) -> Int[ndarray, "queries k"]:
    """The columns of each row's k highest scores, best first; of equal scores the lower column first."""
    columns = scores.shape[1]
    k = min(k, columns)
    if k in (0, columns):
        return np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.argpartition(scores, columns - k, axis=1)[:, columns - k :]
    # argpartition breaks ties at the k-th place arbitrarily: rows with such a tie are sorted in full.
    lowest = np.take_along_axis(scores, best[:, :1], axis=1)
    tied = np.flatnonzero((scores >= lowest).sum(axis=1) > k)
    best[tied] = np.argsort(-scores[tied], axis=1, kind="stable")[:, :k]
    order = np.lexsort((best, -np.take_along_axis(scores, best, axis=1)))
    return np.take_along_axis(best, order, axis=1)


def merge(
    scores: Float[ndarray, "queries candidates"], ids: Int[ndarray, "queries candidates"], *, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best of the candidates of several searches, concatenated along the columns.

    An id of -1 means "none" and must score -inf. Ties go to the lower id, so the answer does not depend on
    the order of the searches.
    """
    last = np.where(ids < 0, np.iinfo(ids.dtype).max, ids)
    columns = scores.shape[1]
    if 0 < k < columns:
        # Select before sorting, which costs more than the rest; ties at the k-th place need the full sort.
        best = np.argpartition(scores, columns - k, axis=1)[:, columns - k :]
        lowest = np.take_along_axis(scores, best[:, :1], axis=1)
        if not ((scores >= lowest).sum(axis=1) > k).any():
            scores, ids, last = (np.take_along_axis(x, best, axis=1) for x in (scores, ids, last))
    order = np.lexsort((last, -scores))[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)


def _search_block(
    queries: Float[ndarray, "queries dim"], documents: Float[ndarray, "docs dim"], k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    found: list[tuple[ndarray, ndarray]] = []
    for start in range(0, max(len(documents), 1), DOCUMENT_BLOCK):
        products = queries @ documents[start : start + DOCUMENT_BLOCK].T
        columns = select(products, k=k)
        found.append((np.take_along_axis(products, columns, axis=1), columns + start))
        if len(found) > 1:
            scores, rows = (np.concatenate(both, axis=1) for both in zip(*found, strict=True))
            found = [merge(scores, rows, k=k)]
    return found[0]
