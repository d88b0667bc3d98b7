"""Query association (ScalingNote, Algorithm 1) as a join: term scores come in, pairs of queries go out.

Over all pairs of queries the algorithm reads: *q1 takes from q2 when q2 scores each of q1's top n terms
above a threshold* (clicks: n = 2), and for rankings (n = 4) *each takes from the other*. No pair is ever
looked at to find that out. Every query owns one key, its top n terms; it answers for the keys of all n of
its terms above the threshold; equal keys are the associations. So a log of any size is three steps, each
of which sees one slice or one bucket:

    term scores ─► own_keys ───────┬─ by key ─► join ─┬─ settled ──────────────────────► associations
                └► candidate_keys ─┘                  └─ one way, by pair ─► mutual ───►

What could explode is bounded, and what the bounds cost is counted: see `join` and `candidate_keys`.
"""

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.collect.config import AssociationConfig
from scalingnote.collect.term_keys import CLICK, KINDS, RELEVANCE, candidate_keys, key_filter, mix, own_keys
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
    settled, one_way, counted = join(own, candidates, config=config)
    counts.update(counted)
    found = pa.concat_tables([settled, mutual(one_way)])
    found = found.sort_by([(name, "ascending") for name in ("kind", "query", "associate")])
    for kind, name in KINDS.items():
        counts[name] = pc.sum(pc.equal(found["kind"], kind)).as_py() or 0
    return found, dict(counts)


def join(
    own: pa.Table, candidates: pa.Table, *, config: AssociationConfig
) -> tuple[pa.Table, pa.Table, dict[str, int]]:
    """Pairs of queries with an equal key, from all OWN and CANDIDATES rows of one bucket of keys.

    Returned are the settled ones, the ones that still need `mutual`, and counts. Settled is every pair by
    click, and a pair by relevance where both own this key: each then takes from the other already.

    A key asked for by A queries and answered by B makes A * B pairs, so a query takes only from the
    `max_associates` strongest others: output is linear in `own`. Keys that had more are counted as
    ``{kind}_hot_keys``, the pairs this cost as ``{kind}_pairs_left_out`` (relevance: one way).
    """
    settled, one_way = [ASSOCIATIONS.empty_table()], [ASSOCIATIONS.empty_table()]
    counts: dict[str, int] = {}
    for kind, name in KINDS.items():
        asking, answers = _of(own, kind), _of(candidates, kind)
        selves = _selves(asking, answers)
        owner, candidate, hot, left_out = _join(asking, answers, selves, config.max_associates)
        counts |= {f"{name}_hot_keys": hot, f"{name}_pairs_left_out": left_out}
        query, strength = asking["query"].to_numpy(), answers["strength"].to_numpy()
        lent = strength[candidate]
        both = np.zeros(len(owner), bool)
        if kind == RELEVANCE:
            owned = np.zeros(len(strength), bool)
            owned[selves[selves >= 0]] = True
            both = owned[candidate] & (selves[owner] >= 0)
            lent[both] = np.minimum(lent[both], strength[selves[owner[both]]])
        columns = [np.full(len(owner), kind, np.uint8), query[owner], answers["query"].to_numpy()[candidate]]
        pairs = pa.table([*columns, lent], schema=ASSOCIATIONS)
        done = pa.array(both | (kind == CLICK))
        settled.append(pairs.filter(done))
        one_way.append(pairs.filter(pc.invert(done)))
    return pa.concat_tables(settled), pa.concat_tables(one_way), counts


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


def _selves(own: pa.Table, candidates: pa.Table) -> Int64[ndarray, " own"]:
    """For every query that asks, the row where it answers its own key, or -1."""
    query, key = own["query"].to_numpy(), own["key"].to_numpy()
    selves = np.full(len(query), -1)
    if len(query) and len(candidates):
        order = np.argsort(query, kind="stable")
        answering = candidates["query"].to_numpy()
        at = order[np.minimum(np.searchsorted(query, answering, sorter=order), len(order) - 1)]
        rows = np.flatnonzero((query[at] == answering) & (key[at] == candidates["key"].to_numpy()))
        selves[at[rows]] = rows
    return selves


def _join(
    own: pa.Table, candidates: pa.Table, selves: Int64[ndarray, " own"], cap: int
) -> tuple[Int64[ndarray, " pairs"], Int64[ndarray, " pairs"], int, int]:
    """Sort-merge join of one kind: rows of `own` and of the candidates, hot keys, pairs left out.

    Rows come by query, then associate, whatever the order of the input.
    """
    query = candidates["query"].to_numpy()
    key, strength, tie = (candidates[name].to_numpy() for name in ("key", "strength", "tie"))
    by_query = np.argsort(own["query"].to_numpy(), kind="stable")  # nearly free: rows come so already
    order = np.argsort(query, kind="stable")
    order = order[np.argsort(key[order], kind="stable")]
    groups, group_of = np.unique(own["key"].to_numpy()[by_query], return_inverse=True)
    starts = np.searchsorted(key[order], groups)
    sizes = np.searchsorted(key[order], groups, side="right") - starts

    # Of one more than the cap, each can do without one: itself if it is among them, else the last.
    rank = np.zeros(len(query), np.int64)
    others = sizes[group_of] - (selves[by_query] >= 0)
    hot = np.unique(group_of[others > cap])
    left_out = int(np.maximum(others - cap, 0).sum())
    if len(hot):
        rows = order[_ranges(starts[hot], sizes[hot])]
        which = np.repeat(np.arange(len(hot)), sizes[hot])
        best_first = np.lexsort((tie[rows], -strength[rows], which))
        rank[rows[best_first]] = _ranges(np.zeros_like(hot), sizes[hot])
        # The kept ones move to the front of their group, still in the order of their ids.
        kept = np.minimum(sizes[hot], cap + 1)
        order[_ranges(starts[hot], kept)] = rows[rank[rows] <= cap]
        sizes[hot] = kept

    counts = sizes[group_of]
    owner = np.repeat(by_query, counts)
    candidate = order[_ranges(starts[group_of], counts)]
    among = np.zeros(len(selves), bool)
    answers = np.flatnonzero(selves >= 0)
    among[answers] = rank[selves[answers]] < cap
    taken = (candidate != selves[owner]) & ((rank[candidate] < cap) | among[owner])
    return owner[taken], candidate[taken], len(hot), left_out


def _ranges(starts: Int64[ndarray, " ranges"], counts: Int64[ndarray, " ranges"]) -> Int64[ndarray, " total"]:
    """start, start + 1, ... for `count` numbers of every range, one range after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum(), dtype=np.int64)


def _of(table: pa.Table, kind: int) -> pa.Table:
    return table.filter(pc.equal(table["kind"], kind))
