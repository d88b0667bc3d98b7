"""What a part of triplets is made of: counts that add up over parts, and a few rows for people to read."""

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.collect.triplet import share
from scalingnote.planner.words import words

SAMPLES = 20  # rows per source
MAX_POSITIVES_SHOWN = 5


def describe(triplets: pa.Table) -> dict[str, int]:
    """Pairs, queries, words of queries, pairs that two sources agree on, and positives per query.

    ``queries_with_{n}_positives`` counts queries; the last n stands for "or more".
    """
    counts: Counter[str] = Counter()
    pairs = triplets.select(["query_id", "positive", "query", "source"])
    by_pair = pairs.group_by(["query_id", "positive"], use_threads=False).aggregate(
        [("source", "count_distinct")]
    )
    counts["pairs"] = len(by_pair)
    counts["pairs_of_both_sources"] = pc.sum(pc.greater(by_pair["source_count_distinct"], 1)).as_py() or 0
    by_query = by_pair.group_by("query_id", use_threads=False).aggregate([("positive", "count")])
    counts["queries_with_triplets"] = len(by_query)
    for number in by_query["positive_count"].to_pylist():
        counts[f"queries_with_{min(number, MAX_POSITIVES_SHOWN)}_positives"] += 1
    for query in triplets.group_by("query_id").aggregate([("query", "min")])["query_min"].to_pylist():
        counts["query_words"] += len(words(query))
    return dict(counts)


def sample(triplets: pa.Table, *, seed: int) -> pa.Table:
    """Up to SAMPLES rows of each source and hop, by smallest hash: a part's share of a fair draw."""
    keys = zip(
        triplets["source"].to_pylist(),
        triplets["hop"].to_pylist(),
        triplets["query_id"].to_pylist(),
        triplets["positive"].to_pylist(),
        strict=True,
    )
    drawn = sorted(
        (source, hop, share(f"{query} {doc}", seed=seed), i)
        for i, (source, hop, query, doc) in enumerate(keys)
    )
    taken: Counter[tuple[str, str]] = Counter()
    rows = []
    for source, hop, _, i in drawn:
        taken[source, hop] += 1
        if taken[source, hop] <= SAMPLES:
            rows.append(i)
    return triplets.take(pa.array(rows, pa.int64()))
