"""Which members of a gathered batch are no negatives: duplicates, and documents known to answer a query.

All ids are integers. Rows of a batch are (query, positive); known positives are padded with -1.
"""

from jaxtyping import Bool, Int
from torch import Tensor


def answers(
    query_ids: Int[Tensor, " queries"],
    positive_ids: Int[Tensor, " queries"],
    known: Int[Tensor, "queries known"],
    *,
    all_query_ids: Int[Tensor, " all"],
    candidate_ids: Int[Tensor, " docs"],
) -> Bool[Tensor, "queries docs"]:
    """Candidates that answer a row's query: its positive again, a known one, or another row's of that query.

    The first candidates are the positives of all rows, in the order of `all_query_ids`.
    """
    found = positive_ids[:, None] == candidate_ids
    # One known positive at a time: all at once would take `known` times the memory.
    for one in known.unbind(1):
        found |= one[:, None] == candidate_ids
    found[:, : len(all_query_ids)] |= query_ids[:, None] == all_query_ids
    return found


def answered(
    query_ids: Int[Tensor, " queries"],
    positive_ids: Int[Tensor, " queries"],
    *,
    all_query_ids: Int[Tensor, " all"],
    all_positive_ids: Int[Tensor, " all"],
    all_known: Int[Tensor, "all known"],
) -> Bool[Tensor, "queries all"]:
    """Queries that a row's positive answers: the row's own again, and those it is a positive of."""
    found = query_ids[:, None] == all_query_ids
    found |= positive_ids[:, None] == all_positive_ids
    for one in all_known.unbind(1):
        found |= positive_ids[:, None] == one
    return found
