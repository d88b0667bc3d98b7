"""Importance from corpus statistics: how many texts hold a word, and what that says of it.

    share      p   = (df + 1/2) / (texts + 1)            of the texts that hold the word, never 0 or 1
    idf        i   = -ln p
    importance     = i^s / (i^s + h^s),   h = -ln half   0 for p -> 1, 1/2 at p = half, 1 for p -> 0

Only the share counts, not the size of the corpus: "above 0.5" means "in fewer than `half` of the texts"
wherever it is said. Stop words fall near 0 because most texts hold them, without a list. `saturation` s
is how fast idf saturates. With the defaults (half 0.01, s 3), shares of 50%, 10%, 1%, 0.1% and 0.001% give
0.00, 0.11, 0.50, 0.77 and 0.94.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray

from scalingnote.planner.config import Statistics
from scalingnote.planner.words import hash_words, words

COUNTS = pa.schema({"word": pa.string(), "df": pa.int64()})


def importance(
    df: Int64[ndarray, " words"], *, texts: int, half: float, saturation: float
) -> Float64[ndarray, " words"]:
    """Importance in [0, 1] of words that `df` of `texts` texts hold; falls as df rises."""
    idf = -np.log((df + 0.5) / (texts + 1))
    scores: ndarray = 1 / (1 + (-np.log(half) / idf) ** saturation)
    return scores


def count(texts: Iterable[str]) -> pa.Table:
    """How many of the texts hold each word."""
    found: Counter[str] = Counter()
    for text in texts:
        found.update(set(words(text)))
    return pa.table([list(found.keys()), list(found.values())], schema=COUNTS)


def merge(counts: Sequence[pa.Table]) -> pa.Table:
    """Counts of the texts of all tables together."""
    whole = pa.concat_tables([COUNTS.empty_table(), *counts])
    summed = whole.group_by("word", use_threads=False).aggregate([("df", "sum")])
    return summed.select(["word", "df_sum"]).rename_columns(COUNTS.names)


def at_least(counts: pa.Table, min_df: int) -> pa.Table:
    """The words that enough texts hold."""
    return counts.filter(pc.greater_equal(counts["df"], min_df))


def most_frequent(counts: pa.Table, size: int) -> pa.Table:
    """At most `size` words, the most frequent first, ties by word: the order they came in is forgotten."""
    return counts.sort_by([("df", "descending"), ("word", "ascending")]).slice(0, size)


class WordStatistics:
    """Looks words up. Held are a hash and a score per word, 12 bytes: a million words take 12 MB."""

    def __init__(self, counts: pa.Table, *, texts: int, config: Statistics) -> None:
        # The last one stands for every word that is not found.
        df = np.append(counts["df"].to_numpy(), 0)
        scores = importance(df, texts=texts, half=config.half, saturation=config.saturation)
        hashes = hash_words(counts["word"].to_pylist())
        order = np.argsort(hashes)
        self._hashes = hashes[order]
        self._scores = scores[:-1][order].astype(np.float32)
        self._unknown = np.float32(scores[-1] if config.unknown is None else config.unknown)

    def __call__(self, texts: Sequence[Sequence[str]]) -> Float32[ndarray, " terms"]:
        """Importances of the distinct words of each text, in order of first occurrence, text after text."""
        hashes = hash_words([word for text in texts for word in dict.fromkeys(text)])
        if not len(self._hashes):
            return np.full(len(hashes), self._unknown)
        at = np.searchsorted(self._hashes, hashes).clip(max=len(self._hashes) - 1)
        return np.where(self._hashes[at] == hashes, self._scores[at], self._unknown)
