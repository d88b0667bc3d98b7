"""Candidates of a shard for both kinds of search: what either finds goes in, with both of its scores out."""

from collections.abc import Callable

from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote import hybrid
from scalingnote.hybrid import Both
from scalingnote.index import sparse
from scalingnote.index.postings import Segments
from scalingnote.models.sparse_query import SparseRows

# Scores of rows for each query; -inf where the row is -1.
Score = Callable[[Int[ndarray, "queries candidates"]], Float[ndarray, "queries candidates"]]


def candidates(
    found: Int[ndarray, "queries _"],
    score: Score,
    segments: Segments,
    terms: SparseRows,
    *,
    k: int,
    allowed: Bool[ndarray, " documents"] | None = None,
) -> Both:
    """The rows that dense search has `found`, and the k best by terms, each with both of its scores.

    None is missing in a list: a document that only one side has found is scored by the other, too.
    """
    _, by_terms = sparse.search(segments, terms, k=k, allowed=allowed)
    rows = hybrid.union(found, by_terms)
    return Both(rows, score(rows), sparse.scores_of(segments, terms, rows))
