"""ScalingNote's Algorithm 1 as printed: a dictionary per query, every pair compared; and the join in memory.

The slow reference of the join, and the join's steps over all queries at once, in tests and in
benchmarks/collect.py.
"""

from collections.abc import Sequence
from itertools import combinations

import pyarrow as pa
from jaxtyping import UInt64
from numpy import ndarray

from scalingnote.triplets.collect.association import (
    KINDS,
    candidate_keys,
    join,
    key_filter,
    mutual_pairs,
    own_keys,
)
from scalingnote.triplets.config import AssociationConfig
from scalingnote.triplets.planner.planner import TermScores

NOWHERE = float("-inf")  # the score of a word that a query lacks
Scores = dict[str, float]  # term -> importance, in order of first occurrence


def top(scores: Scores, n: int) -> list[str] | None:
    """The `n` best terms, ties to the earlier one; None when it has fewer (the paper is silent)."""
    if len(scores) < n:
        return None
    return sorted(scores, key=lambda term: -scores[term])[:n]


def all_above(terms: list[str] | None, scores: Scores, threshold: float) -> bool:
    if terms is None:
        return False
    for term in terms:  # noqa: SIM110  # a loop is three times as fast as all()
        if not scores.get(term, NOWHERE) > threshold:
            return False
    return True


def every_pair(queries: Sequence[Scores], th_click: float, th_rel: float) -> set[tuple[int, int, int]]:
    """(2 or 4 top terms, q1, q2) for each association, q1 taking from q2; queries by their position."""
    planned = [(i, scores, top(scores, 2), top(scores, 4)) for i, scores in enumerate(queries)]
    found = set()
    for (q1, s1, t1_2, t1_4), (q2, s2, t2_2, t2_4) in combinations(planned, 2):
        if all_above(t1_2, s2, th_click):
            found.add((2, q1, q2))
        if all_above(t2_2, s1, th_click):
            found.add((2, q2, q1))
        if all_above(t1_4, s2, th_rel) and all_above(t2_4, s1, th_rel):
            found |= {(4, q1, q2), (4, q2, q1)}
    return found


def associations(
    scores: TermScores, ids: UInt64[ndarray, " queries"], *, config: AssociationConfig
) -> tuple[pa.Table, dict[str, int]]:
    """All steps of the join: ASSOCIATIONS sorted by kind, query and associate, and all counts."""
    own, own_counts = own_keys(scores, ids, config=config)
    owned = key_filter([own], keys=own.num_rows)
    candidates, candidate_counts = candidate_keys(scores, ids, config=config, owned=owned)
    settled, one_way, join_counts = join(own, candidates, config=config)
    pairs = pa.concat_tables([settled, mutual_pairs(one_way)])
    pairs = pairs.sort_by([(name, "ascending") for name in ("kind", "query", "associate")])
    kinds = pairs["kind"].to_numpy()
    by_kind = {name: int((kinds == kind).sum()) for kind, name in KINDS.items()}
    return pairs, own_counts | candidate_counts | join_counts | by_kind
