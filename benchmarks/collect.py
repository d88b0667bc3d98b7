"""Query association (Algorithm 1) as a join: speed and memory by the size of the log, against every pair.

    python -m benchmarks.collect --json docs/results/collect.json [--queries N ...]

The log is synthetic, and its match density does not depend on its size. Every hundred queries are about one
topic with 200 separate words (Zipf). They express its ten intents, each 2 to 6 of those words, and add up to
four words of a vocabulary that all topics share (2,000 words, Zipf). So the vocabulary grows with the log,
like that of real logs. A word's importance rises with its rarity and varies from query to query. Times are
processor seconds of one process per size.
"""

import time
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64
from numpy import ndarray

from benchmarks.algorithm_one import associations, every_pair
from benchmarks.report import arguments, peak_memory_mb, run_isolated, show, write
from scalingnote.triplets.collect.association import mix_bits
from scalingnote.triplets.config import AssociationConfig
from scalingnote.triplets.planner.planner import TermScores

Row = dict[str, Any]
NO_CAPS = AssociationConfig(max_terms=16, max_associates=1_000_000)
PAIRED_QUERIES = (2_000, 5_000)  # sizes at which every pair is compared
TOPIC, INTENTS = 100, 10  # queries and intents of a topic
TOPIC_WORDS, COMMON_WORDS = 200, 2_000


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--queries", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    growth = [run_isolated(join, queries) for queries in options.queries]
    show("Association as the log grows", growth)
    pairs = [run_isolated(against_every_pair, queries) for queries in PAIRED_QUERIES]
    show("Against every pair, with equal results", pairs)
    logs = np.log([[row["queries"], row["cpu s"]] for row in growth])
    metrics = {
        "association_growth_exponent": float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]),
        "association_queries_per_second": growth[-1]["queries/cpu s"],
        "association_peak_mb": growth[-1]["peak MB"],
        "association_speedup_over_every_pair": pairs[-1]["ratio"],
    }
    write(options.json, metrics=metrics, growth=growth, every_pair=pairs)


def join(queries: int) -> Row:
    """Measure one join, after a small one that compiles and imports."""
    config = AssociationConfig()
    associations(*term_scores(TOPIC), config=config)
    scores, ids = term_scores(queries)
    start = time.process_time()
    table, _ = associations(scores, ids, config=config)
    seconds = time.process_time() - start
    return {
        "queries": queries,
        "cpu s": seconds,
        "queries/cpu s": queries / seconds,
        "peak MB": peak_memory_mb(),
        "associations": table.num_rows,
    }


def against_every_pair(queries: int) -> Row:
    """Measure the join and Algorithm 1 as printed; AssertionError if the results differ."""
    scores, ids = term_scores(queries)
    planned = [
        dict(zip(scores.terms[a:b].tolist(), scores.scores[a:b].tolist(), strict=True))
        for a, b in zip(scores.offsets[:-1].tolist(), scores.offsets[1:].tolist(), strict=True)
    ]
    # In float32, like the scores.
    thresholds = [float(np.float32(x)) for x in (NO_CAPS.click_threshold, NO_CAPS.relevance_threshold)]
    associations(scores, ids, config=NO_CAPS)  # compiles
    marks = [time.process_time()]
    expected = every_pair(planned, *thresholds)
    marks.append(time.process_time())
    table, _ = associations(scores, ids, config=NO_CAPS)
    marks.append(time.process_time())
    columns = (table[name].to_pylist() for name in ("kind", "query", "associate"))
    if set(zip(*columns, strict=True)) != expected:
        raise AssertionError(f"the join differs from Algorithm 1 over {queries} queries")
    slow, fast = np.diff(marks).tolist()
    return {"queries": queries, "every pair s": slow, "join s": fast, "ratio": slow / fast}


def term_scores(queries: int) -> tuple[TermScores, UInt64[ndarray, " queries"]]:
    """Return scores and ids of queries, of complete topics."""
    rng = np.random.default_rng([0, 0])
    intent = np.arange(queries) // TOPIC * INTENTS + rng.integers(0, INTENTS, queries)
    words = rng.integers(2, 7, int(intent.max()) + 1)
    word = _zipf(rng, TOPIC_WORDS, int(words.sum()))
    counts = words[intent]
    topic_rows = np.repeat(np.arange(queries), counts)
    within = np.arange(len(topic_rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    topic_word = word[np.repeat((np.cumsum(words) - words)[intent], counts) + within]
    rows = np.concatenate([topic_rows, np.repeat(np.arange(queries), rng.integers(0, 5, queries))])
    rank = np.concatenate([topic_word, _zipf(rng, COMMON_WORDS, len(rows) - len(topic_rows))])
    common = np.arange(len(rows)) >= len(topic_rows)

    vocabulary = np.where(common, 0, 1 + rows // TOPIC).astype(np.uint64)
    terms = mix_bits((vocabulary << np.uint64(32)) | rank.astype(np.uint64))
    rarity = np.log(rank) / np.log(np.where(common, COMMON_WORDS, TOPIC_WORDS))
    base = np.where(common, 0.05 + 0.4 * rarity, 0.45 + 0.4 * rarity)
    scores = np.clip(base + rng.uniform(-0.15, 0.15, len(rows)), 0, 1).astype(np.float32)

    _, first = np.unique(np.stack([rows.astype(np.uint64), terms]), axis=1, return_index=True)
    first.sort()  # by occurrence, then by query: the order of a planner
    first = first[np.argsort(rows[first], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[first], minlength=queries))])
    return TermScores(offsets, terms[first], scores[first]), np.arange(queries, dtype=np.uint64)


def _zipf(rng: np.random.Generator, words: int, count: int) -> Int64[ndarray, " count"]:
    """Return ranks from 1 to `words`, the r-th with probability proportional to 1 / r."""
    shares = np.cumsum(1 / np.arange(1, words + 1))
    return 1 + np.searchsorted(shares / shares[-1], rng.random(count)).clip(max=words - 1)


if __name__ == "__main__":
    main()
