"""Query association (ScalingNote, Algorithm 1) as a join: term scores come in, pairs of queries go out.

Over all pairs of queries the algorithm reads: *q1 takes from q2 when q2 scores each of q1's top n terms
above a threshold* (clicks: n = 2), and for rankings (n = 4) *each takes from the other*. No pair is ever
looked at to find that out. Every query owns one key, its top n terms; it answers for the keys of all n of
its terms above the threshold; equal keys are the associations. So a log of any size is three steps, each
of which sees one slice or one bucket:

    term scores ─► own_keys ───────┬─ by key ─► join ─┬─ click ────────────────────────► associations
                └► candidate_keys ─┘                  └─ relevance, by pair ─► mutual ─►

What could explode is bounded, and what the bounds cost is counted: see `join` and `candidate_keys`.
"""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float32, Int64, UInt64
from numpy import ndarray

from scalingnote.collect.config import AssociationConfig
from scalingnote.collect.term_keys import KINDS, RELEVANCE, candidate_keys, key_filter, mix, own_keys
from scalingnote.planner.terms import TermScores

ASSOCIATIONS = pa.schema(
    {
        "kind": pa.uint8(),  # CLICK or RELEVANCE
        "query": pa.uint64(),  # q1: takes the evidence
        "associate": pa.uint64(),  # q2: lends it
        "strength": pa.float32(),  # q2's smallest score among q1's top terms; of both ways, if mutual
    }
)


def associations(
    scores: TermScores, ids: UInt64[ndarray, " queries"], *, config: AssociationConfig
) -> tuple[pa.Table, dict[str, int]]:
    """All three steps in memory: ASSOCIATIONS sorted by kind, query and associate, and every count."""
    own, counted = own_keys(scores, ids, config=config)
    counts = Counter(counted)
    owned = key_filter([own], keys=own.num_rows)
    candidates, counted = candidate_keys(scores, ids, config=config, owned=owned)
    counts.update(counted)
    pairs, counted = join(own, candidates, config=config)
    counts.update(counted)
    relevance = pc.equal(pairs["kind"], RELEVANCE)
    found = pa.concat_tables([pairs.filter(pc.invert(relevance)), mutual(pairs.filter(relevance))])
    for kind, name in KINDS.items():
        counts[name] = pc.sum(pc.equal(found["kind"], kind)).as_py() or 0
    return found, dict(counts)


def join(
    own: pa.Table, candidates: pa.Table, *, config: AssociationConfig
) -> tuple[pa.Table, dict[str, int]]:
    """Pairs of queries with an equal key, from all OWN and CANDIDATES rows of one bucket of keys.

    Click pairs are final; relevance pairs go one way and still need `mutual`. A key asked for by A queries
    and answered by B makes A * B pairs, so only its `max_associates` strongest candidates count (strength,
    then a stable hash of the id): output is linear in `own`. Keys that had more are counted as
    ``{kind}_hot_keys``, the pairs this cost as ``{kind}_pairs_left_out`` (relevance: one way).
    """
    tables = [ASSOCIATIONS.empty_table()]
    counts: dict[str, int] = {}
    for kind, name in KINDS.items():
        own_key, own_query = _columns(own, kind, "key", "query")
        key, query, strength = _columns(candidates, kind, "key", "query", "strength")
        owner, candidate, hot, left_out = _join(
            own_key, own_query, key, query, strength, config.max_associates
        )
        columns = [own_query[owner], query[candidate], strength[candidate]]
        tables.append(pa.table([np.full(len(owner), kind, np.uint8), *columns], schema=ASSOCIATIONS))
        counts |= {f"{name}_hot_keys": hot, f"{name}_pairs_left_out": left_out}
    return pa.concat_tables(tables), counts


def pair_keys(pairs: pa.Table) -> UInt64[ndarray, " pairs"]:
    """A key for every pair, whichever way it goes: what relevance pairs are scattered by."""
    query, associate = pairs["query"].to_numpy(), pairs["associate"].to_numpy()
    return mix(mix(query) + mix(associate))


def mutual(pairs: pa.Table) -> pa.Table:
    """Those of one bucket's pairs that go both ways, as two rows with the weaker strength of the two."""
    query, associate, strength = (pairs[name].to_numpy() for name in ("query", "associate", "strength"))
    low, high = np.minimum(query, associate), np.maximum(query, associate)
    order = np.lexsort((query, high, low))
    low, high, query = low[order], high[order], query[order]
    first = np.flatnonzero((low[1:] == low[:-1]) & (high[1:] == high[:-1]) & (query[1:] != query[:-1]))
    weaker = np.minimum(strength[order[first]], strength[order[first + 1]])
    found = pa.table(
        [
            np.full(2 * len(first), RELEVANCE, np.uint8),
            np.concatenate([low[first], high[first]]),
            np.concatenate([high[first], low[first]]),
            np.concatenate([weaker, weaker]),
        ],
        schema=ASSOCIATIONS,
    )
    return found.sort_by([("query", "ascending"), ("associate", "ascending")])


def _join(
    own_key: UInt64[ndarray, " own"],
    own_query: UInt64[ndarray, " own"],
    key: UInt64[ndarray, " candidates"],
    query: UInt64[ndarray, " candidates"],
    strength: Float32[ndarray, " candidates"],
    cap: int,
) -> tuple[Int64[ndarray, " pairs"], Int64[ndarray, " pairs"], int, int]:
    """Sort-merge join of one kind: rows of `own` and of the candidates, hot keys, pairs left out.

    Rows come by query, then associate, whatever the order of the input.
    """
    by_query = np.argsort(own_query, kind="stable")  # nearly free: rows come in this order already
    order = np.argsort(query, kind="stable")
    order = order[np.argsort(key[order], kind="stable")]
    groups, group_of, owners = np.unique(own_key[by_query], return_inverse=True, return_counts=True)
    starts = np.searchsorted(key[order], groups)
    sizes = np.searchsorted(key[order], groups, side="right") - starts

    hot = np.flatnonzero(sizes > cap)
    left_out = int((owners[hot] * (sizes[hot] - cap)).sum())
    if len(hot):
        rows = order[_ranges(starts[hot], sizes[hot])]
        which = np.repeat(np.arange(len(hot)), sizes[hot])
        best_first = np.lexsort((mix(query[rows]), -strength[rows], which))
        rank = np.empty_like(best_first)
        rank[best_first] = _ranges(np.zeros_like(hot), sizes[hot])
        left_out -= int(_own(rows[rank >= cap], own_key, own_query, key, query).sum())
        # The kept ones move to the front of their group, still in the order of their ids.
        kept = np.full(len(hot), cap)
        order[_ranges(starts[hot], kept)] = rows[rank < cap]
        sizes[hot] = kept

    counts = sizes[group_of]
    owner = np.repeat(by_query, counts)
    candidate = order[_ranges(starts[group_of], counts)]
    other = own_query[owner] != query[candidate]
    return owner[other], candidate[other], len(hot), left_out


def _own(
    rows: Int64[ndarray, " rows"],
    own_key: UInt64[ndarray, " own"],
    own_query: UInt64[ndarray, " own"],
    key: UInt64[ndarray, " candidates"],
    query: UInt64[ndarray, " candidates"],
) -> Bool[ndarray, " rows"]:
    """Whether a candidate's key is the one its own query asks for: it would have been paired with itself."""
    order = np.argsort(own_query, kind="stable")
    at = order[np.minimum(np.searchsorted(own_query, query[rows], sorter=order), len(order) - 1)]
    found: Bool[ndarray, " rows"] = (own_query[at] == query[rows]) & (own_key[at] == key[rows])
    return found


def _ranges(starts: Int64[ndarray, " ranges"], counts: Int64[ndarray, " ranges"]) -> Int64[ndarray, " total"]:
    """start, start + 1, ... for `count` numbers of every range, one range after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)


def _columns(table: pa.Table, kind: int, *names: str) -> list[ndarray]:
    table = table.filter(pc.equal(table["kind"], kind))
    return [table[name].to_numpy() for name in names]
