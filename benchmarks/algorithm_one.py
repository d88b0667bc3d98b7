"""ScalingNote's Algorithm 1 as printed (a dictionary per query, every pair compared), and the join in memory.

Tests and benchmarks/collect.py use both: the slow reference of the join, and its steps over all queries.
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

NOWHERE = float("-inf")  # the score of a missing word
Scores = dict[str, float]  # term -> importance, in order of first occurrence


def top(scores: Scores, n: int) -> list[str] | None:
    """Return the `n` best terms, ties to the earlier one; None if there are fewer (the paper is silent)."""
    if len(scores) < n:
        return None
    return sorted(scores, key=lambda term: -scores[term])[:n]


def all_above(terms: list[str] | None, scores: Scores, threshold: float) -> bool:
    """Return whether the scores of all terms are above the threshold; False without terms."""
    if terms is None:
        return False
    for term in terms:  # noqa: SIM110  # a loop is three times as fast as all()
        if not scores.get(term, NOWHERE) > threshold:
            return False
    return True


def every_pair(queries: Sequence[Scores], th_click: float, th_rel: float) -> set[tuple[int, int, int]]:
    """Return (2 or 4 top terms, q1, q2) for each association, if q1 takes from q2; queries by position."""
    planned = [(i, scores, top(scores, 2), top(scores, 4)) for i, scores in enumerate(queries)]
    associates = set()
    for (q1, s1, t1_2, t1_4), (q2, s2, t2_2, t2_4) in combinations(planned, 2):
        if all_above(t1_2, s2, th_click):
            associates.add((2, q1, q2))
        if all_above(t2_2, s1, th_click):
            associates.add((2, q2, q1))
        if all_above(t1_4, s2, th_rel) and all_above(t2_4, s1, th_rel):
            associates |= {(4, q1, q2), (4, q2, q1)}
    return associates


def associations(
    scores: TermScores, ids: UInt64[ndarray, " queries"], *, config: AssociationConfig
) -> tuple[pa.Table, dict[str, int]]:
    """Run all steps of the join; return ASSOCIATIONS sorted by kind, query and associate, and all counts."""
    own, key_counts = own_keys(scores, ids, config=config)
    is_key = key_filter([own], keys=own.num_rows)
    candidates, candidate_counts = candidate_keys(scores, ids, config=config, owned=is_key)
    final_pairs, one_way, join_counts = join(own, candidates, config=config)
    pairs = pa.concat_tables([final_pairs, mutual_pairs(one_way)])
    pairs = pairs.sort_by([(name, "ascending") for name in ("kind", "query", "associate")])
    kinds = pairs["kind"].to_numpy()
    by_kind = {name: int((kinds == kind).sum()) for kind, name in KINDS.items()}
    return pairs, key_counts | candidate_counts | join_counts | by_kind
