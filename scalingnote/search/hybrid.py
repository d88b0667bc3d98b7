"""One answer of two retrievals: candidates with both of their scores go in, the best documents come out."""

from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import hybrid
from scalingnote.hybrid import Both
from scalingnote.index.shard import Layout
from scalingnote.search.config import Joining

UNTUNED_WEIGHT = 0.5


def best(
    both: Both, joining: Joining, *, layout: Layout, candidates: int, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best candidates of each query, best first; -inf and -1 behind the last.

    `candidates` were fetched by either side. The weight and the background are the index's own where the
    request does not say.
    """
    if joining.kind == "reciprocal_rank":
        return hybrid.by_rank(both, k=joining.k, candidates=candidates, depth=k)
    weights = (joining.dense_weight, layout.dense_weight, UNTUNED_WEIGHT)
    weight = next(weight for weight in weights if weight is not None)
    return hybrid.by_score(both, dense_weight=weight, background=layout.background or 0.0, depth=k)
