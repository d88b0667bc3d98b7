"""Multi-hop triplets: a query receives the triplets of its associated queries.

    associations ⋈ ONE_HOP triplets of the associates ─► multi_hop_candidates ─► select_multi_hop

The association q1 <- q2 gives q1 the positives and hard negatives of q2 (ScalingNote, section 4.1). The
evidence of q1 itself takes precedence, and a document that answers q1 never becomes its negative.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int64
from numpy import ndarray

from scalingnote.collect.one_hop import hash_fraction, rank_within_runs

MULTI_HOP = pa.schema(
    {
        "row": pa.int64(),  # of the query that receives the triplet
        "via": pa.string(),  # query_id of the associate that it comes from
        "strength": pa.float32(),  # of the association
        "positive": pa.string(),
        "negatives": pa.list_(pa.string()),
        "source": pa.string(),
    }
)


def multi_hop_candidates(
    triplets: pa.Table,
    query_ids: pa.Array,
    *,
    source: str,
    associates: Int64[ndarray, " pairs"],
    queries: Int64[ndarray, " pairs"],
    strength: ndarray,
    limit: int,
    seed: int,
) -> tuple[pa.Table, int]:
    """MULTI_HOP rows: the ONE_HOP triplets of `source` of each pair's associate, for the pair's query.

    `associates` are rows of `query_ids`; `queries` may have any numbering and are copied to ``row``. An
    associate with more than `limit` triplets provides those of the smallest seeded hash, or one popular
    associate could fill the memory; also returned is the number of rows that this left out.
    """
    triplets = triplets.filter(pc.equal(triplets["source"], source))
    # By query_id, not by row: rows change with the number of buckets.
    keys = zip(query_ids.take(triplets["row"]).to_pylist(), triplets["positive"].to_pylist(), strict=True)
    hashes = pa.array(
        [hash_fraction(f"lend {via} {doc_id}", seed=seed) for via, doc_id in keys], pa.float64()
    )
    triplets = triplets.append_column("hash", hashes)
    order = [("row", "ascending"), ("hash", "ascending"), ("positive", "ascending")]
    triplets = triplets.take(pc.sort_indices(triplets, order))
    rows = triplets["row"].to_numpy()
    start = np.searchsorted(rows, associates)
    full = np.searchsorted(rows, associates, side="right") - start
    count = np.minimum(full, limit)
    pair = np.repeat(np.arange(len(associates)), count)
    within = np.arange(len(pair)) - np.repeat(np.cumsum(count) - count, count)
    taken = triplets.take(pa.array(start[pair] + within))
    columns = {
        "row": queries[pair],
        "via": query_ids.take(pa.array(associates[pair])),
        "strength": strength[pair],
        **{name: taken[name] for name in ("positive", "negatives", "source")},
    }
    return pa.table(columns, schema=MULTI_HOP), int((full - count).sum())


def select_multi_hop(
    candidates: pa.Table, known: pa.Table, *, limit: int, seed: int
) -> tuple[pa.Table, dict[str, int]]:
    """The MULTI_HOP candidates of one bucket's queries to train on, strongest associate first, and counts.

    At most `limit` are kept per query and source, each document once, through its strongest associate. Left
    out and counted: ``multi_already_known`` (a positive of the query itself), ``multi_contradicted`` (a
    document that the query's users or ranking rejected), ``multi_negative_is_positive`` (a negative answers
    the query, by its KNOWN documents or by another candidate), ``multi_duplicate``, ``multi_over_cap``.
    """
    usable, pairs, counts = _usable_candidates(candidates.combine_chunks(), known.combine_chunks())
    selected = candidates.filter(pa.array(usable)).append_column("pair", pa.array(pairs[usable]))
    # Ties are common, because all triplets of one associate are equally strong. Ids must not break them.
    keys = zip(selected["via"].to_pylist(), selected["positive"].to_pylist(), strict=True)
    hashes = [hash_fraction(f"borrow {via} {doc_id}", seed=seed) for via, doc_id in keys]
    selected = selected.append_column("hash", pa.array(hashes, pa.float64()))
    best_first = [
        ("row", "ascending"), ("source", "ascending"), ("strength", "descending"),
        ("hash", "ascending"), ("via", "ascending"), ("positive", "ascending"),
    ]  # fmt: skip
    selected = selected.take(pc.sort_indices(selected, best_first)).combine_chunks()
    source = selected["source"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    first = np.zeros(len(selected), bool)
    by_source = np.stack([selected["pair"].to_numpy(), source], axis=1)
    first[np.unique(by_source, axis=0, return_index=True)[1]] = True
    counts["multi_duplicate"] = int((~first).sum())
    selected, source = selected.filter(pa.array(first)), source[first]
    rank = rank_within_runs(selected["row"].to_numpy(), source)
    counts["multi_over_cap"] = int((rank >= limit).sum())
    return selected.filter(pa.array(rank < limit)).select(MULTI_HOP.names), counts


def _usable_candidates(
    candidates: pa.Table, known: pa.Table
) -> tuple[Bool[ndarray, " candidates"], Int64[ndarray, " candidates"], dict[str, int]]:
    """Which candidates the query's evidence allows, a number for each (query, positive), and counts."""
    negatives = candidates["negatives"].combine_chunks()
    documents = pa.concat_arrays(
        [known["doc_id"].combine_chunks(), candidates["positive"].combine_chunks(), negatives.flatten()]
    ).dictionary_encode()
    codes = documents.indices.to_numpy().astype(np.int64)
    known_codes, positive_codes, negative_codes = np.split(codes, np.cumsum([len(known), len(candidates)]))
    # One integer per (query, document), so that pairs are compared as sets of integers.
    width = max(len(documents.dictionary), 1)
    rows = candidates["row"].to_numpy()
    pairs = rows * width + positive_codes
    known_pairs = known["row"].to_numpy() * width + known_codes
    is_positive = known["positive"].to_numpy(zero_copy_only=False)
    already_known = np.isin(pairs, known_pairs[is_positive])
    contradicted = np.isin(pairs, known_pairs[~is_positive]) & ~already_known
    consistent = ~already_known & ~contradicted

    answers = np.concatenate([known_pairs[is_positive], pairs[consistent]])
    lengths = pc.list_value_length(negatives).to_numpy(zero_copy_only=False).astype(np.int64)
    owner = np.repeat(np.arange(len(candidates)), lengths)
    false_negative = np.zeros(len(candidates), bool)
    false_negative[owner[np.isin(rows[owner] * width + negative_codes, answers)]] = True
    counts = {
        "multi_already_known": int(already_known.sum()),
        "multi_contradicted": int(contradicted.sum()),
        "multi_negative_is_positive": int((consistent & false_negative).sum()),
    }
    return consistent & ~false_negative, pairs, counts
