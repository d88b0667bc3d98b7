"""Rows of a lookup table beyond those of tokens: for pairs of neighbours, and for tokens at a query's ends.

    token ids -> ids, then the numbers of those pairs and end tokens that have a row

A mean of token rows knows neither order nor which word asks. A row for "how to", and one for "who" as the
first token, hold what the mean lacks, at the price of a few more rows to add up. Only features that occurred
in the training texts have rows, so an unseen pair changes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray

MIN_COUNT = 2  # training texts that a feature occurs in
SMOOTHING = 3e-4  # share of all tokens at which a weight starts at one half
FEATURE_WEIGHT = 0.5


class LookupFeatures:
    """The features that have rows, in the order of their rows."""

    ENDS = 4  # of a query at most: its first, second, last but one and last token

    def __init__(self, keys: Int64[ndarray, " features"], *, tokens: int) -> None:
        """`keys` as :func:`learn` gives them; row `tokens + i` of the table belongs to ``keys[i]``."""
        self.keys, self.tokens = keys, tokens
        self._rows = {key: tokens + row for row, key in enumerate(keys.tolist())}
        # Kinds that no row belongs to are not looked for.
        self._bigrams = bool(len(keys)) and int(keys.min()) < tokens * tokens
        self._ends = bool(len(keys)) and int(keys.max()) >= tokens * tokens

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, ids: Sequence[int]) -> list[int]:
        """`ids` and behind them the row numbers of their features."""
        found = [*ids]
        rows, tokens = self._rows, self.tokens
        if self._bigrams:
            for first, second in pairwise(ids):
                row = rows.get(first * tokens + second)
                if row is not None:
                    found.append(row)
        if self._ends:
            for key in _end_keys(ids, tokens):
                row = rows.get(key)
                if row is not None:
                    found.append(row)
        return found


def learn(
    texts: Iterable[Sequence[int]], *, tokens: int, bigrams: int, ends: bool
) -> Int64[ndarray, " features"]:
    """Keys of the features that occur in at least :data:`MIN_COUNT` texts, most frequent first.

    Args:
        texts: token ids of each text.
        tokens: size of the vocabulary.
        bigrams: largest number of pairs.
        ends: whether tokens at the ends have rows of their own.
    """
    pairs: Counter[int] = Counter()
    at_ends: Counter[int] = Counter()
    for ids in texts:
        if bigrams:
            pairs.update({first * tokens + second for first, second in pairwise(ids)})
        if ends:
            at_ends.update(set(_end_keys(ids, tokens)))
    return np.array([*_frequent(pairs)[:bigrams], *_frequent(at_ends)], np.int64)


def start_weights(counts: Int64[ndarray, " tokens"], features: LookupFeatures) -> Float32[ndarray, " rows"]:
    """Smoothed inverse frequencies of the tokens, then a constant for each feature.

    Args:
        counts: occurrences of each token in the training texts.
        features: those whose rows follow the tokens'.
    """
    weights = SMOOTHING / (SMOOTHING + counts / max(int(counts.sum()), 1))
    return np.concatenate([weights, np.full(len(features), FEATURE_WEIGHT)]).astype(np.float32)


def is_bigram(keys: Int64[ndarray, " features"], *, tokens: int) -> ndarray:
    """Which features are pairs; the others are end tokens."""
    found: ndarray = keys < tokens * tokens
    return found


def _end_keys(ids: Sequence[int], tokens: int) -> list[int]:
    """Keys behind those of all pairs: first, last, and from two tokens on second and last but one."""
    if not ids:
        return []
    base = tokens * tokens
    keys = [base + ids[0], base + tokens + ids[-1]]
    if len(ids) > 1:
        keys += [base + 2 * tokens + ids[1], base + 3 * tokens + ids[-2]]
    return keys


def _frequent(counts: Counter[int]) -> list[int]:
    """Keys by falling count; equal counts by the key, so that the order is the same everywhere."""
    kept = [(-count, key) for key, count in counts.items() if count >= MIN_COUNT]
    return [key for _, key in sorted(kept)]
