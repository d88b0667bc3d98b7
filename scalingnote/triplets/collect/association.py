"""Query association (ScalingNote, Algorithm 1) as a join of 64-bit keys: term scores to pairs of queries.

Algorithm 1 compares all pairs of queries: *q1 takes from q2 if q2 scores each of q1's top n terms above a
threshold* (clicks, n = 2), and for rankings (n = 4) *each takes from the other*. Here no pairs are compared.
Every query owns one key, of its top n terms, and emits candidate keys, of all sets of n of its terms above
the threshold. Equal keys are associations. A log of any size takes three steps, and each reads one slice or
one bucket:

    term scores ─► own_keys ───────┬─ by key ─► join ─┬─ settled ───────────────────────────► ASSOCIATIONS
                └► candidate_keys ─┘                  └─ one way, by pair ─► mutual_pairs ───►

Three differences to Algorithm 1 are counted. A query of fewer than n distinct terms owns no key and takes
nothing. Only the `max_terms` best terms of a query above the threshold are combined (8 by default). A query
takes only from its `max_associates` strongest others (32). See :func:`own_keys`, :func:`candidate_keys` and
:func:`join`.

The key of a set of terms is a bit mix of the sum of the terms' mixed hashes: it is independent of their order
and equal on every machine. A false match needs two sets with the same key. O * C / 2^64 pairs of O own and C
candidate keys are expected to collide: 0.02 for 100 million queries with 2 own and 20 candidate keys each.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float32, Int64, Shaped, UInt8, UInt64
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.triplets.config import AssociationConfig
from scalingnote.triplets.planner.planner import TermScores

# Kinds of association; each number is the number of top terms that must match.
CLICK, RELEVANCE = 2, 4
KINDS = {CLICK: "click", RELEVANCE: "relevance"}

OWN_KEYS = pa.schema({"kind": pa.uint8(), "key": pa.uint64(), "query": pa.uint64()})
CANDIDATES = pa.schema(
    [
        *OWN_KEYS,
        pa.field("strength", pa.float32()),  # smallest score among the key's terms
        pa.field("tie", pa.uint64()),  # sorts equally strong candidates
    ]
)
ASSOCIATIONS = pa.schema(
    {
        "kind": pa.uint8(),  # CLICK or RELEVANCE
        "query": pa.uint64(),  # q1, which receives triplets
        "associate": pa.uint64(),  # q2, which has these triplets
        "strength": pa.float32(),  # smallest score of q1's top terms in q2; mutual: in both directions
    }
)

_CHUNK_KEYS = 1 << 18  # keys that are formed and filtered at once: they fit in the cache
_FILTER_BITS_PER_KEY = 16  # at this density one probe passes 6 % of the keys that no query owns
_MAX_FILTER_BYTES = 1 << 28  # of the file that every task maps; above 130 million own keys more keys pass


def key_filter(own: Iterable[pa.Table], *, keys: int) -> UInt8[ndarray, " bytes"]:
    """Build a Bloom filter with one probe, which excludes most keys that no row of OWN_KEYS tables has.

    It has two bytes for each of about `keys` rows, at most 256 MiB; a key selects its bit.
    """
    bits = np.zeros(min(max(1, _FILTER_BITS_PER_KEY * keys // 8), _MAX_FILTER_BYTES), np.uint8)
    for table in own:
        byte, mask = _bit_of(table["key"].to_numpy(), bits)
        np.bitwise_or.at(bits, byte, mask)
    return bits


def _bit_of(
    keys: UInt64[ndarray, " keys"], bits: UInt8[ndarray, " bytes"]
) -> tuple[Int64[ndarray, " keys"], UInt8[ndarray, " keys"]]:
    """Compute the byte of each key in a filter, and the mask of its bit in this byte."""
    slots = keys % np.uint64(8 * len(bits))
    masks = np.uint8(1) << (slots & np.uint64(7)).astype(np.uint8)
    return (slots >> np.uint64(3)).astype(np.int64), masks


def _may_be_owned(keys: UInt64[ndarray, " keys"], bits: UInt8[ndarray, " bytes"]) -> Bool[ndarray, " keys"]:
    """Return True for every own key, and for about one in sixteen others."""
    byte, mask = _bit_of(keys, bits)
    passed: Bool[ndarray, " keys"] = (bits[byte] & mask).astype(bool)
    return passed


def own_keys(
    scores: TermScores, ids: UInt64[ndarray, " queries"], *, config: AssociationConfig
) -> tuple[pa.Table, dict[str, int]]:
    """Compute the keys of every query's top 2 and top 4 terms, as OWN_KEYS rows, and counts.

    A query with fewer than n distinct terms has no key of that kind, because fewer terms would match half of
    the log. Such queries are counted as ``{kind}_too_short``. `ids` are distinct, one per query.
    """
    ranked = _best_first(scores, ids)
    lengths = np.diff(ranked.offsets)
    tables, counts = [OWN_KEYS.empty_table()], dict[str, int]()
    for kind, name in KINDS.items():
        counts[f"{name}_too_short"] = int((lengths < kind).sum())
        has_key = lengths >= kind
        if kind == RELEVANCE:
            # Mutual: q1 must score the top 4 terms of its associate above the threshold, so at least 4 of its
            # terms are above it, and these include its own top 4. Other queries cannot match.
            has_key &= _terms_above(ranked, config.relevance_threshold) >= kind
        rows = np.flatnonzero(has_key)
        terms = ranked.terms[ranked.offsets[rows, None] + np.arange(kind)]
        tables.append(_table(OWN_KEYS, kind, _key(terms), ids[rows]))
    return pa.concat_tables(tables), counts


def candidate_keys(
    scores: TermScores,
    ids: UInt64[ndarray, " queries"],
    *,
    config: AssociationConfig,
    ties: UInt64[ndarray, " queries"] | None = None,
    owned: UInt8[ndarray, " bytes"] | None = None,
) -> tuple[pa.Table, dict[str, int]]:
    """Compute the keys of all 2 and all 4 terms that a query scores above the threshold, as CANDIDATES rows.

    Only the `max_terms` best terms of a query are combined; queries with more are counted as
    ``{kind}_truncated``. Counts also have the keys formed (``candidate_keys``) and those that passed `owned`
    (``candidate_keys_kept``), a :func:`key_filter` that excludes most keys that no query owns.

    `ties` sort equally strong candidates; the default is hashes of `ids`. If ids depend on the number of
    buckets, pass hashes of the queries: otherwise the result would depend on it, too.
    """
    ties = mix_bits(ids) if ties is None else ties
    ranked = _best_first(scores, ids)
    tables, counts = [CANDIDATES.empty_table()], {"candidate_keys": 0}
    for kind, threshold in ((CLICK, config.click_threshold), (RELEVANCE, config.relevance_threshold)):
        above = _terms_above(ranked, threshold)
        counts[f"{KINDS[kind]}_truncated"] = int((above > config.max_terms).sum())
        for rows, keys, strengths in _combinations(ranked, np.minimum(above, config.max_terms), kind):
            counts["candidate_keys"] += keys.size
            passed = np.ones(len(keys), bool) if owned is None else _may_be_owned(keys, owned)
            rows = rows[passed]
            tables.append(_table(CANDIDATES, kind, keys[passed], ids[rows], strengths[passed], ties[rows]))
    table = pa.concat_tables(tables)
    return table, counts | {"candidate_keys_kept": table.num_rows}


def join(
    own: pa.Table, candidates: pa.Table, *, config: AssociationConfig
) -> tuple[pa.Table, pa.Table, dict[str, int]]:
    """Find pairs of queries with an equal key, from all OWN_KEYS and CANDIDATES rows of one bucket of keys.

    A key that A queries own and B queries emit makes A * B pairs, so each query is associated only with the
    `max_associates` strongest others: output is linear in `own`. Keys with more candidates are counted as
    ``{kind}_hot_keys``, the pairs left out as ``{kind}_pairs_left_out`` (relevance: in one direction).

    Returns:
        Settled pairs, pairs that :func:`mutual_pairs` must check, and counts. All click pairs are settled,
        and relevance pairs of two queries that own the same key, because they match in both directions.
    """
    settled, one_way = [ASSOCIATIONS.empty_table()], [ASSOCIATIONS.empty_table()]
    counts: dict[str, int] = {}
    for kind, name in KINDS.items():
        owners, emitters = (table.filter(pc.equal(table["kind"], kind)) for table in (own, candidates))
        selves = _own_candidates(owners, emitters)
        owner, candidate, hot, left_out = _join_keys(owners, emitters, selves, config.max_associates)
        counts |= {f"{name}_hot_keys": hot, f"{name}_pairs_left_out": left_out}
        emitted = emitters["strength"].to_numpy()
        strength = emitted[candidate]
        both = np.zeros(len(owner), bool)
        if kind == RELEVANCE:
            is_own = np.zeros(len(emitted), bool)
            is_own[selves[selves >= 0]] = True
            both = is_own[candidate] & (selves[owner] >= 0)
            strength[both] = np.minimum(strength[both], emitted[selves[owner[both]]])
        queries = owners["query"].to_numpy()[owner], emitters["query"].to_numpy()[candidate]
        pairs = _table(ASSOCIATIONS, kind, *queries, strength)
        is_settled = pa.array(both | (kind == CLICK))
        settled.append(pairs.filter(is_settled))
        one_way.append(pairs.filter(pc.invert(is_settled)))
    return pa.concat_tables(settled), pa.concat_tables(one_way), counts


def pair_keys(pairs: pa.Table) -> UInt64[ndarray, " pairs"]:
    """Compute a key for every pair of queries, equal for both directions, to scatter relevance pairs by."""
    query, associate = pairs["query"].to_numpy(), pairs["associate"].to_numpy()
    return mix_bits(mix_bits(query) + mix_bits(associate))


def mutual_pairs(pairs: pa.Table) -> pa.Table:
    """Find pairs of one bucket that exist in both directions, as two rows with the weaker strength."""
    query, associate, strength = (pairs[name].to_numpy() for name in ("query", "associate", "strength"))
    low, high = np.minimum(query, associate), np.maximum(query, associate)
    order = np.lexsort((query, high, low))
    low, high, query = low[order], high[order], query[order]
    first = np.flatnonzero((low[1:] == low[:-1]) & (high[1:] == high[:-1]) & (query[1:] != query[:-1]))
    weaker = np.minimum(strength[order[first]], strength[order[first + 1]])
    both = _table(
        ASSOCIATIONS,
        RELEVANCE,
        np.concatenate([low[first], high[first]]),
        np.concatenate([high[first], low[first]]),
        np.concatenate([weaker, weaker]),
    )
    return both.sort_by([("query", "ascending"), ("associate", "ascending")])


def mix_bits(values: UInt64[ndarray, "*shape"]) -> UInt64[ndarray, "*shape"]:
    """Map 64-bit integers one-to-one so that patterns such as equal spacing vanish: SplitMix64's finalizer.

    Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64[ndarray, "*shape"] = values ^ (values >> np.uint64(31))
    return mixed


def _best_first(scores: TermScores, ids: UInt64[ndarray, " queries"]) -> TermScores:
    """Sort the entries of each query by falling score, ties in their order, and mix the terms for sums."""
    queries = len(scores.offsets) - 1
    if queries != len(ids):
        raise DataError(
            f"{queries} queries have term scores, but there are {len(ids)} ids: pass one id per query"
        )
    rows = np.repeat(np.arange(queries, dtype=np.uint64), np.diff(scores.offsets))
    bad = np.flatnonzero(~np.isfinite(scores.scores))
    if len(bad):
        query, score = ids[rows[bad[0]]], scores.scores[bad[0]]
        raise DataError(f"query {query} has a term score of {score}: a planner's scores must be finite")
    # One integer has the query and its falling score: one sort of nearly sorted rows is 8 times as fast as
    # lexsort. + 0.0 converts -0.0 to 0.0. Floats then sort like their bits, if negative ones are flipped.
    bits = (scores.scores + np.float32(0.0)).view(np.uint32)
    rising = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))
    order = np.argsort((rows << np.uint64(32)) | (~rising).astype(np.uint64), kind="stable")
    return TermScores(scores.offsets, mix_bits(scores.terms[order]), scores.scores[order])


def _terms_above(ranked: TermScores, threshold: float) -> Int64[ndarray, " queries"]:
    """Count the terms of each query with a score strictly above the threshold, in the scores' precision."""
    total = np.concatenate([[0], np.cumsum(ranked.scores > np.float32(threshold))]).astype(np.int64)
    return np.diff(total[ranked.offsets])


def _combinations(
    ranked: TermScores, above: Int64[ndarray, " queries"], kind: int
) -> Iterator[tuple[Int64[ndarray, " keys"], UInt64[ndarray, " keys"], Float32[ndarray, " keys"]]]:
    """Yield row, key and strength of all sets of `kind` terms of each query's first `above`, in chunks."""
    for terms in range(kind, int(above.max(initial=0)) + 1):
        choices = np.array(list(combinations(range(terms), kind)))
        rows = np.flatnonzero(above == terms)
        step = max(1, _CHUNK_KEYS // len(choices))
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            entries = ranked.offsets[chunk, None] + np.arange(terms)
            keys = _key(ranked.terms[entries][:, choices])
            # Scores fall, so the last term of a choice is the weakest.
            strengths = ranked.scores[entries][:, choices[:, -1]]
            yield np.repeat(chunk, len(choices)), keys.ravel(), strengths.ravel()


def _key(terms: UInt64[ndarray, "*sets kind"]) -> UInt64[ndarray, "*sets"]:
    """Compute the key of each set of mixed term hashes; sets of different sizes have different keys."""
    return mix_bits(terms.sum(axis=-1, dtype=np.uint64) + np.uint64(terms.shape[-1]))


def _table(schema: pa.Schema, kind: int, *columns: Shaped[ndarray, " rows"]) -> pa.Table:
    return pa.table([np.full(len(columns[0]), kind, np.uint8), *columns], schema=schema)


def _own_candidates(own: pa.Table, candidates: pa.Table) -> Int64[ndarray, " own"]:
    """Find, for every row of `own`, the candidate row of the same query and key, or -1."""
    query, key = own["query"].to_numpy(), own["key"].to_numpy()
    selves = np.full(len(query), -1)
    if len(query) and len(candidates):
        order = np.argsort(query, kind="stable")
        emitter = candidates["query"].to_numpy()
        at = order[np.minimum(np.searchsorted(query, emitter, sorter=order), len(order) - 1)]
        rows = np.flatnonzero((query[at] == emitter) & (key[at] == candidates["key"].to_numpy()))
        selves[at[rows]] = rows
    return selves


def _join_keys(
    own: pa.Table, candidates: pa.Table, selves: Int64[ndarray, " own"], cap: int
) -> tuple[Int64[ndarray, " pairs"], Int64[ndarray, " pairs"], int, int]:
    """Join one kind by sort and merge: rows of `own` and of the candidates, hot keys, pairs left out.

    Pairs are sorted by query, then associate, for any order of the input.
    """
    query = candidates["query"].to_numpy()
    key, strength, tie = (candidates[name].to_numpy() for name in ("key", "strength", "tie"))
    by_query = np.argsort(own["query"].to_numpy(), kind="stable")  # nearly free if already sorted
    order = np.argsort(query, kind="stable")
    order = order[np.argsort(key[order], kind="stable")]
    groups, group_of = np.unique(own["key"].to_numpy()[by_query], return_inverse=True)
    starts = np.searchsorted(key[order], groups)
    sizes = np.searchsorted(key[order], groups, side="right") - starts

    # Each query leaves out one of the best cap + 1 candidates: itself if it is among them, else the last.
    rank = np.zeros(len(query), np.int64)
    others = sizes[group_of] - (selves[by_query] >= 0)
    hot = np.unique(group_of[others > cap])
    left_out = int(np.maximum(others - cap, 0).sum())
    if len(hot):
        rows = order[_ranges(starts[hot], sizes[hot])]
        which = np.repeat(np.arange(len(hot)), sizes[hot])
        best_first = np.lexsort((tie[rows], -strength[rows], which))
        rank[rows[best_first]] = _ranges(np.zeros_like(hot), sizes[hot])
        # Kept candidates move to the front of their group, still in the order of their ids.
        kept_sizes = np.minimum(sizes[hot], cap + 1)
        order[_ranges(starts[hot], kept_sizes)] = rows[rank[rows] <= cap]
        sizes[hot] = kept_sizes

    counts = sizes[group_of]
    owner = np.repeat(by_query, counts)
    candidate = order[_ranges(starts[group_of], counts)]
    in_best = np.zeros(len(selves), bool)
    with_self = np.flatnonzero(selves >= 0)
    in_best[with_self] = rank[selves[with_self]] < cap
    is_pair = (candidate != selves[owner]) & ((rank[candidate] < cap) | in_best[owner])
    return owner[is_pair], candidate[is_pair], len(hot), left_out


def _ranges(starts: Int64[ndarray, " ranges"], counts: Int64[ndarray, " ranges"]) -> Int64[ndarray, " total"]:
    """Concatenate start, start + 1, ... (`count` numbers) of every range."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)
