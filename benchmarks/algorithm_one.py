"""ScalingNote's Algorithm 1 as printed: a dictionary per query, every pair compared.

The slow reference of the join, in tests and in benchmarks/collect.py.
"""

from collections.abc import Sequence
from itertools import combinations

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
