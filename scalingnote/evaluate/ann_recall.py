"""Recall of an index: how much of the exact answer its approximate answer holds."""

from collections.abc import Sequence


def ann_recall(found: Sequence[Sequence[str]], exact: Sequence[Sequence[str]], *, k: int) -> float:
    """Mean share of each query's exact first `k` documents that are among the `k` that were found.

    Where the whole pool has fewer than `k` documents, the share is of those there are.
    """
    if len(found) != len(exact) or not exact:
        raise ValueError(f"{len(found)} answers for {len(exact)} queries: both must be the same, above 0")
    shares = [
        len(set(mine[:k]) & set(theirs[:k])) / max(len(theirs[:k]), 1)
        for mine, theirs in zip(found, exact, strict=True)
    ]
    return sum(shares) / len(shares)
