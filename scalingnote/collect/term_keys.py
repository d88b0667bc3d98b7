"""Sets of terms as 64-bit keys: a query owns the set it asks for, and answers for every set it covers.

The key of a set is a mix of the sum of its mixed term hashes: order-free, and the same on every machine.
A false match needs two sets with one key. Among O owned and C emitted keys at most O * C / 2^64 pairs
are expected to collide: 0.02 in a log of 100 million queries that emit 20 keys each.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int64, Shaped, UInt8, UInt64
from numpy import ndarray

from scalingnote.collect.config import AssociationConfig
from scalingnote.errors import DataError
from scalingnote.planner.terms import TermScores

# A kind of association, named by the number of top terms that must match.
CLICK, RELEVANCE = 2, 4
KINDS = {CLICK: "click", RELEVANCE: "relevance"}

OWN = pa.schema({"kind": pa.uint8(), "key": pa.uint64(), "query": pa.uint64()})
CANDIDATES = pa.schema(
    [
        *OWN,
        pa.field("strength", pa.float32()),  # smallest score among the key's terms
        pa.field("tie", pa.uint64()),  # which of two equally strong ones goes first
    ]
)

_CHUNK = 1 << 18  # keys held while they are formed and filtered: fits the cache
_BITS_PER_KEY = 16  # one probe of a table this sparse passes 6 % of the keys nobody owns


@dataclass(frozen=True)
class KeyFilter:
    """Tells keys that nobody owns from those somebody may: one bit per slot, a key's slot by its value."""

    bits: UInt8[ndarray, " bytes"]

    def may_hold(self, keys: UInt64[ndarray, " keys"]) -> Bool[ndarray, " keys"]:
        """True for every key that was put in, and for one in sixteen others."""
        slots = keys % np.uint64(8 * len(self.bits))
        bytes_ = self.bits[(slots >> np.uint64(3)).astype(np.int64)]
        return ((bytes_ >> (slots & np.uint64(7)).astype(np.uint8)) & np.uint8(1)).astype(bool)


def key_filter(own: Iterable[pa.Table], *, keys: int) -> KeyFilter:
    """The filter over all OWN tables, which hold about `keys` rows: two bytes of memory for each."""
    bits = np.zeros(max(1, _BITS_PER_KEY * keys // 8), np.uint8)
    for table in own:
        slots = table["key"].to_numpy() % np.uint64(8 * len(bits))
        masks = np.uint8(1) << (slots & np.uint64(7)).astype(np.uint8)
        np.bitwise_or.at(bits, (slots >> np.uint64(3)).astype(np.int64), masks)
    return KeyFilter(bits)


def own_keys(
    scores: TermScores, ids: UInt64[ndarray, " queries"], *, config: AssociationConfig
) -> tuple[pa.Table, dict[str, int]]:
    """The key of every query's top 2 and top 4 terms, as OWN rows; `ids` are distinct.

    A query with fewer than n distinct terms has no top n and asks for nothing of that kind: fewer terms
    would match half the log. Such queries are counted as ``{kind}_too_short``.
    """
    ranked = _best_first(scores, ids)
    lengths = np.diff(ranked.offsets)
    tables, counts = [OWN.empty_table()], {"queries": len(ids)}
    for kind, name in KINDS.items():
        counts[f"{name}_too_short"] = int((lengths < kind).sum())
        asks = lengths >= kind
        if kind == RELEVANCE:
            # Mutual: what lends to q1 must find its own top 4, so 4 terms at least, above the threshold in
            # q1. Then q1's own top 4 are above it too, and any other query's key is asked for in vain.
            asks &= _above(ranked, config.relevance_threshold) >= kind
        rows = np.flatnonzero(asks)
        terms = ranked.terms[ranked.offsets[rows, None] + np.arange(kind)]
        tables.append(_table(OWN, kind, _key(terms), ids[rows]))
    return pa.concat_tables(tables), counts


def candidate_keys(
    scores: TermScores,
    ids: UInt64[ndarray, " queries"],
    *,
    config: AssociationConfig,
    ties: UInt64[ndarray, " queries"] | None = None,
    owned: KeyFilter | None = None,
) -> tuple[pa.Table, dict[str, int]]:
    """The key of every 2 and every 4 terms that a query scores above the threshold, as CANDIDATES rows.

    A query answers with its `max_terms` best terms; queries that had more are counted as
    ``{kind}_truncated``. Keys that `owned` does not hold are dropped here, before they cost a shuffle:
    counts hold the keys formed (``candidate_keys``) and left (``candidate_keys_kept``).

    `ties` decide between queries that answer equally well. Ids that tell where a query lies, and so change
    with the number of buckets, must not: then give hashes of what the query is.
    """
    ties = mix(ids) if ties is None else ties
    ranked = _best_first(scores, ids)
    tables, counts = [CANDIDATES.empty_table()], {"candidate_keys": 0}
    for kind, threshold in ((CLICK, config.click_threshold), (RELEVANCE, config.relevance_threshold)):
        above = _above(ranked, threshold)
        counts[f"{KINDS[kind]}_truncated"] = int((above > config.max_terms).sum())
        for rows, keys, strengths in _combinations(ranked, np.minimum(above, config.max_terms), kind):
            counts["candidate_keys"] += keys.size
            kept = owned.may_hold(keys) if owned else np.ones(len(keys), bool)
            rows = rows[kept]
            tables.append(_table(CANDIDATES, kind, keys[kept], ids[rows], strengths[kept], ties[rows]))
    table = pa.concat_tables(tables)
    return table, counts | {"candidate_keys_kept": table.num_rows}


def mix(values: UInt64[ndarray, "*shape"]) -> UInt64[ndarray, "*shape"]:
    """A bijection of 64 bits after which equal spacing or shared bits are gone (splitmix64's finaliser)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64[ndarray, "*shape"] = values ^ (values >> np.uint64(31))
    return mixed


def _best_first(scores: TermScores, ids: UInt64[ndarray, " queries"]) -> TermScores:
    """Entries of each query by falling score, ties to the earlier term; terms mixed, ready to be summed."""
    queries = len(scores.offsets) - 1
    if queries != len(ids):
        raise DataError(f"{queries} queries have term scores but {len(ids)} ids came: pass one id per query")
    rows = np.repeat(np.arange(queries, dtype=np.uint64), np.diff(scores.offsets))
    bad = np.flatnonzero(~np.isfinite(scores.scores))
    if len(bad):
        query, score = ids[rows[bad[0]]], scores.scores[bad[0]]
        raise DataError(f"query {query} has a term score of {score}: a planner's scores are finite")
    # One integer holds query and falling score, so one sort over nearly sorted rows does (8 times lexsort).
    # + 0.0 makes -0.0 and 0.0 a tie; then floats order as their bits do, once negative ones are flipped.
    bits = (scores.scores + np.float32(0.0)).view(np.uint32)
    rising = np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))
    order = np.argsort((rows << np.uint64(32)) | (~rising).astype(np.uint64), kind="stable")
    return TermScores(scores.offsets, mix(scores.terms[order]), scores.scores[order])


def _above(ranked: TermScores, threshold: float) -> Int64[ndarray, " queries"]:
    """How many terms of each query score above the threshold, strictly, in the scores' own precision."""
    total = np.concatenate([[0], np.cumsum(ranked.scores > np.float32(threshold))]).astype(np.int64)
    return np.diff(total[ranked.offsets])


def _combinations(
    ranked: TermScores, above: Int64[ndarray, " queries"], kind: int
) -> Iterator[tuple[Int64[ndarray, " keys"], UInt64[ndarray, " keys"], Float32[ndarray, " keys"]]]:
    """Row, key and strength of every `kind` of each query's first `above` terms, in chunks."""
    for terms in range(kind, int(above.max(initial=0)) + 1):
        choices = np.array(list(combinations(range(terms), kind)))
        rows = np.flatnonzero(above == terms)
        step = max(1, _CHUNK // len(choices))
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            entries = ranked.offsets[chunk, None] + np.arange(terms)
            keys = _key(ranked.terms[entries][:, choices])
            # Scores fall, so the last term of a choice is its weakest.
            strengths = ranked.scores[entries][:, choices[:, -1]]
            yield np.repeat(chunk, len(choices)), keys.ravel(), strengths.ravel()


def _key(terms: UInt64[ndarray, "*sets kind"]) -> UInt64[ndarray, "*sets"]:
    """Key of each set of mixed term hashes; sets of another size get other keys."""
    return mix(terms.sum(axis=-1, dtype=np.uint64) + np.uint64(terms.shape[-1]))


def _table(schema: pa.Schema, kind: int, *columns: Shaped[ndarray, " rows"]) -> pa.Table:
    return pa.table([np.full(len(columns[0]), kind, np.uint8), *columns], schema=schema)
