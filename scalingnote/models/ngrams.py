"""Pairs and triples of neighbouring tokens that have a row of their own in a lookup table.

A list of them is an array [ngrams, 3], the third token of a pair -1. Token rows come laid end to end, each
token beside the number of its row: an n-gram never reaches over the end of a row.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int, Int64
from numpy import ndarray

from scalingnote.errors import ConfigError

_AT_ONCE = 1 << 22  # tokens counted before their n-grams are merged with those before
_LARGEST = 2_000_000  # three tokens of such a vocabulary still make a key of 63 bits


def mine(rows: Iterable[Sequence[int]], *, vocabulary: int, most: int) -> Int[ndarray, "ngrams 3"]:
    """The `most` frequent n-grams of some token rows, pairs and triples alike, the most frequent first.

    What occurs once is left out; ties go by the tokens' numbers. The order of rows does not matter.
    """
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    waiting: list[Sequence[int]] = []
    tokens = 0
    for row in rows:
        waiting.append(row)
        tokens += len(row)
        if tokens >= _AT_ONCE:
            keys, counts = _add(keys, counts, waiting, vocabulary)
            waiting, tokens = [], 0
    keys, counts = _add(keys, counts, waiting, vocabulary)
    keys, counts = keys[counts > 1], counts[counts > 1]
    return _tokens(keys[np.lexsort((keys, -counts))[:most]], vocabulary)


def find(
    ids: Int[ndarray, " tokens"],
    row: Int[ndarray, " tokens"],
    *,
    keys: Int64[ndarray, " ngrams"],
    vocabulary: int,
) -> tuple[Int64[ndarray, " found"], Int64[ndarray, " found"]]:
    """Which of the n-grams with these sorted `keys` occur, as often as they do, and in which row."""
    at, within = occurring(ids, row, vocabulary)
    place = np.minimum(np.searchsorted(keys, at), max(len(keys) - 1, 0))
    known = keys[place] == at if len(keys) else np.zeros(len(at), bool)
    return place[known], within[known]


def keys_of(ngrams: Int[ndarray, "ngrams 3"], vocabulary: int) -> Int64[ndarray, " ngrams"]:
    """A number for each n-gram. ConfigError when the vocabulary is too large for that."""
    if vocabulary > _LARGEST:
        raise ConfigError(f"n-grams of {vocabulary:,} tokens do not fit 64 bits: set ngrams=0")
    base = np.int64(vocabulary + 1)
    first, second, third = (ngrams.astype(np.int64) + 1).T
    keys: ndarray = (first * base + second) * base + third
    return keys


def occurring(
    ids: Int[ndarray, " tokens"], row: Int[ndarray, " tokens"], vocabulary: int
) -> tuple[Int64[ndarray, " occurring"], Int64[ndarray, " occurring"]]:
    """The keys of all pairs and then of all triples, and the row of each."""
    ids, row = ids.astype(np.int64), row.astype(np.int64)
    pairs, triples = row[1:] == row[:-1], row[2:] == row[:-2]
    nothing = np.full(int(pairs.sum()), -1, np.int64)
    found = np.concatenate(
        [
            np.stack([ids[:-1][pairs], ids[1:][pairs], nothing], axis=1),
            np.stack([ids[:-2][triples], ids[1:-1][triples], ids[2:][triples]], axis=1),
        ]
    )
    return keys_of(found, vocabulary), np.concatenate([row[:-1][pairs], row[:-2][triples]])


def _add(
    keys: Int64[ndarray, " ngrams"],
    counts: Int64[ndarray, " ngrams"],
    rows: Sequence[Sequence[int]],
    vocabulary: int,
) -> tuple[Int64[ndarray, " more"], Int64[ndarray, " more"]]:
    ids = np.array([token for row in rows for token in row], dtype=np.int64)
    row = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    new, often = np.unique(occurring(ids, row, vocabulary)[0], return_counts=True)
    merged, place = np.unique(np.concatenate([keys, new]), return_inverse=True)
    total = np.bincount(place, weights=np.concatenate([counts, often]), minlength=len(merged))
    return merged, total.astype(np.int64)


def _tokens(keys: Int64[ndarray, " ngrams"], vocabulary: int) -> Int[ndarray, "ngrams 3"]:
    base = vocabulary + 1
    parts = (keys // base // base, keys // base % base, keys % base)
    return np.stack([part - 1 for part in parts], axis=1).astype(np.int32)
