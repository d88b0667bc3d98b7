"""Term scores of a synthetic query log whose match density does not depend on its size.

Every hundred queries are about one topic with 200 words of its own (Zipf). They voice its ten intents, each
2 to 6 of those words, and add up to four words of a vocabulary that all topics share (2,000 words, Zipf).
So vocabulary grows with the log, as it does in real ones, and a query finds as many associates in a log of
ten thousand as in one of five million. A word's importance rises with its rarity and varies from query to
query, as a planner's does.
"""

import numpy as np
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.collect.association import mix_bits
from scalingnote.planner.planner import TermScores

TOPIC, INTENTS = 100, 10  # queries and intents of a topic
TOPIC_WORDS, COMMON_WORDS = 200, 2_000


def term_scores(
    start: int, stop: int, *, seed: int = 0, hot: float = 0.0
) -> tuple[TermScores, UInt64[ndarray, " queries"]]:
    """Scores and ids of queries `start` to `stop`, whole topics; a share `hot` has the same top 2 terms."""
    rng = np.random.default_rng([seed, start])
    queries = stop - start
    intent = np.arange(queries) // TOPIC * INTENTS + rng.integers(0, INTENTS, queries)
    words = rng.integers(2, 7, int(intent.max()) + 1)
    word = _zipf(rng, TOPIC_WORDS, int(words.sum()))
    counts = words[intent]
    own_rows = np.repeat(np.arange(queries), counts)
    within = np.arange(len(own_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    own_word = word[np.repeat((np.cumsum(words) - words)[intent], counts) + within]
    rows = np.concatenate([own_rows, np.repeat(np.arange(queries), rng.integers(0, 5, queries))])
    rank = np.concatenate([own_word, _zipf(rng, COMMON_WORDS, len(rows) - len(own_rows))])
    common = np.arange(len(rows)) >= len(own_rows)

    vocabulary = np.where(common, 0, 1 + (start + rows) // TOPIC).astype(np.uint64)
    terms = mix_bits((vocabulary << np.uint64(32)) | rank.astype(np.uint64))
    rarity = np.log(rank) / np.log(np.where(common, COMMON_WORDS, TOPIC_WORDS))
    base = np.where(common, 0.05 + 0.4 * rarity, 0.45 + 0.4 * rarity)
    scores = np.clip(base + rng.uniform(-0.15, 0.15, len(rows)), 0, 1)
    is_hot = np.repeat(np.flatnonzero(rng.random(queries) < hot), 2)
    rows = np.concatenate([rows, is_hot])
    terms = np.concatenate([terms, np.arange(len(is_hot), dtype=np.uint64) % np.uint64(2)])
    scores = np.concatenate([scores, 1 + rng.random(len(is_hot))]).astype(np.float32)  # above all others

    _, first = np.unique(np.stack([rows.astype(np.uint64), terms]), axis=1, return_index=True)
    first.sort()  # occurrence, then query: the order a planner gives
    first = first[np.argsort(rows[first], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[first], minlength=queries))])
    return TermScores(offsets, terms[first], scores[first]), np.arange(start, stop, dtype=np.uint64)


def _zipf(rng: np.random.Generator, words: int, count: int) -> Int64[ndarray, " count"]:
    """Ranks from 1 to `words`, the r-th with probability proportional to 1 / r."""
    shares = np.cumsum(1 / np.arange(1, words + 1))
    return 1 + np.searchsorted(shares / shares[-1], rng.random(count)).clip(max=words - 1)
