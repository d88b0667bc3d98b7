"""The association join equals Algorithm 1 as it is printed in the paper."""

import hashlib
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.algorithm_one import all_above, associations, every_pair, top
from scalingnote.core.errors import DataError
from scalingnote.triplets.collect.association import (
    ASSOCIATIONS,
    KINDS,
    candidate_keys,
    join,
    key_filter,
    mix_bits,
    own_keys,
)
from scalingnote.triplets.config import AssociationConfig
from scalingnote.triplets.planner.planner import TermScores

NO_CAPS = {"max_terms": 16, "max_associates": 10**6}
LEVELS = st.sampled_from(
    [0.0, 0.25, 0.5, 0.75, 1.0]
)  # exact in float32: ties, and scores equal to thresholds
WORDS = st.sampled_from("abcdefg")
QUERY = st.dictionaries(WORDS, LEVELS, max_size=7) | st.dictionaries(WORDS, LEVELS, min_size=4, max_size=6)
QUERIES = st.lists(QUERY, max_size=14)
THRESHOLDS = st.sampled_from([0.0, 0.25, 0.5])


def term_scores(queries):
    words = [word for query in queries for word in query]
    hashes = [int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest()) for word in words]
    return TermScores(
        np.cumsum([0, *map(len, queries)], dtype=np.int64),
        np.array(hashes, np.uint64),
        np.array([score for query in queries for score in query.values()], np.float32),
    )


def numbered(count):
    """Make ids like those of the stage, bucket << 40 | row, but not in the order of the queries."""
    rows = np.arange(count, dtype=np.uint64)
    return (rows % np.uint64(3) << np.uint64(40)) | (np.uint64(1000) - rows)


def triples(table, ids):
    place = {number: row for row, number in enumerate(ids.tolist())}
    columns = table["kind"].to_pylist(), table["query"].to_pylist(), table["associate"].to_pylist()
    rows = [(kind, place[q1], place[q2]) for kind, q1, q2 in zip(*columns, strict=True)]
    assert len(set(rows)) == len(rows)
    return set(rows)


@settings(max_examples=100, deadline=None)
@given(QUERIES, THRESHOLDS, THRESHOLDS)
def test_equals_algorithm_one(queries, click, relevance):
    ids = numbered(len(queries))
    config = AssociationConfig(click_threshold=click, relevance_threshold=relevance, **NO_CAPS)
    table, counts = associations(term_scores(queries), ids, config=config)
    expected = every_pair(queries, click, relevance)
    assert triples(table, ids) == expected
    assert table.schema == ASSOCIATIONS
    assert {name: counts[name] for name in KINDS.values()} == {
        name: sum(kind == pair[0] for pair in expected) for kind, name in KINDS.items()
    }
    place = {number: row for row, number in enumerate(ids.tolist())}
    for row in table.to_pylist():
        kind, q1, q2 = row["kind"], place[row["query"]], place[row["associate"]]
        weakest = min(queries[q2][term] for term in top(queries[q1], kind))
        if kind == 4:
            weakest = min(weakest, *(queries[q1][term] for term in top(queries[q2], kind)))
        assert row["strength"] == weakest


def test_a_score_at_the_threshold_is_not_above_it():
    ids = numbered(2)
    queries = [{"red": 0.9, "shoes": 0.3}] * 2
    at = AssociationConfig(
        click_threshold=0.3
    )  # not exact in binary: compared in the precision of the scores
    below = AssociationConfig(click_threshold=0.29)
    assert associations(term_scores(queries), ids, config=at)[0].num_rows == 0
    assert associations(term_scores(queries), ids, config=below)[0].num_rows == 2


def test_short_queries_receive_nothing_and_are_counted():
    queries = [{}, {"red": 1.0}, {"red": 1.0, "shoes": 1.0}, {"red": 1.0, "shoes": 1.0, "size": 0.9}]
    ids = numbered(4)
    table, counts = associations(term_scores(queries), ids, config=AssociationConfig())
    assert triples(table, ids) == {(2, 2, 3), (2, 3, 2)}
    assert (counts["click_too_short"], counts["relevance_too_short"]) == (2, 4)


@settings(max_examples=100, deadline=None)
@given(QUERIES, THRESHOLDS, st.integers(1, 4), st.integers(4, 6))
def test_caps_keep_the_strongest_and_count_the_rest(queries, threshold, max_associates, max_terms):
    ids = numbered(len(queries))
    config = AssociationConfig(
        click_threshold=threshold,
        relevance_threshold=threshold,
        max_terms=max_terms,
        max_associates=max_associates,
    )
    table, counts = associations(term_scores(queries), ids, config=config)
    expected, expected_counts = _capped(queries, mix_bits(ids), threshold, max_associates, max_terms)
    assert triples(table, ids) == expected
    assert expected <= every_pair(queries, threshold, threshold)
    assert {name: counts[name] for name in expected_counts} == expected_counts


def _capped(queries, ties, threshold, max_associates, max_terms):
    """Apply the caps, one key after the other."""
    counts = {}
    associated = set()
    for kind, name in KINDS.items():
        above = [{t: s for t, s in query.items() if s > threshold} for query in queries]
        counts[f"{name}_truncated"] = sum(len(terms) > max_terms for terms in above)
        above = [{t: terms[t] for t in top(terms, min(len(terms), max_terms))} for terms in above]
        owners = {i: frozenset(top(query, kind)) for i, query in enumerate(queries) if len(query) >= kind}
        if kind == 4:  # other queries cannot be in a mutual association
            owners = {i: key for i, key in owners.items() if all_above(list(key), queries[i], threshold)}
        directed, settled, hot, left_out = set(), set(), 0, 0
        for key in set(owners.values()):
            key_owners = [i for i in owners if owners[i] == key]
            emitters = [j for j, terms in enumerate(above) if key <= set(terms)]
            emitters.sort(key=lambda j: (-min(above[j][term] for term in key), ties[j]))
            others = {i: [j for j in emitters if j != i] for i in key_owners}
            lost = sum(max(len(rows) - max_associates, 0) for rows in others.values())
            hot += lost > 0
            left_out += lost
            pairs = {(i, j) for i, rows in others.items() for j in rows[:max_associates]}
            # Two owners of a key match in both directions, also if a cap leaves out one of them.
            both = {(i, j) for i, j in pairs if kind == 2 or j in key_owners}
            settled |= both
            directed |= pairs - both
        counts |= {f"{name}_hot_keys": hot, f"{name}_pairs_left_out": left_out}
        settled |= {(i, j) for i, j in directed if (j, i) in directed}
        associated |= {(kind, i, j) for i, j in settled}
    return associated, counts


def zipf_queries(count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, count)
    words = [dict.fromkeys(f"w{word}" for word in rng.zipf(1.3, length) % 20) for length in lengths]
    return [{word: float(np.float32(rng.random())) for word in query} for query in words]


def test_the_filter_excludes_only_keys_without_an_owner():
    queries = zipf_queries(600)
    scores, ids = term_scores(queries), numbered(600)
    config = AssociationConfig(click_threshold=0.1, relevance_threshold=0.1)
    own, _ = own_keys(scores, ids, config=config)
    everything, _ = candidate_keys(scores, ids, config=config)
    passed, counts = candidate_keys(scores, ids, config=config, owned=key_filter([own], keys=own.num_rows))
    assert counts["candidate_keys"] == everything.num_rows
    own_set = set(own["key"].to_pylist())
    matching = everything.filter(pa.compute.is_in(everything["key"], value_set=own["key"].combine_chunks()))
    assert matching.num_rows <= passed.num_rows < matching.num_rows + 0.15 * everything.num_rows
    assert set(passed["key"].to_pylist()) & own_set == set(everything["key"].to_pylist()) & own_set
    assert join(own, passed, config=config)[:2] == join(own, everything, config=config)[:2]


def test_ties_depend_on_the_query_and_not_on_its_number():
    """Thirty equal queries, more than the cap: with other numbers the same pairs are associated."""
    count = 30
    scores = term_scores([{"red": 1.0, "shoes": 1.0, "for": 0.9, "men": 0.9}] * count)
    config = AssociationConfig(max_associates=3)
    ties = mix_bits(np.arange(count, dtype=np.uint64))
    results = []
    for ids in (numbered(count), np.arange(count, dtype=np.uint64)):
        own, _ = own_keys(scores, ids, config=config)
        candidates, _ = candidate_keys(scores, ids, config=config, ties=ties)
        settled, one_way, counts = join(own, candidates, config=config)
        assert (len(one_way), counts["relevance_pairs_left_out"]) == (0, count * (count - 1 - 3))
        results.append(triples(settled, ids))
    assert results[0] == results[1]
    assert Counter(kind for kind, _, _ in results[0]) == {2: 3 * count, 4: 3 * count}


def test_keys_ignore_order_and_distinguish_sets():
    """Small, equally spaced hashes are the worst case: every set still has its own key."""
    rows = np.array([[i, j] for i in range(60) for j in range(60) if i != j], np.uint64)
    scores = TermScores(np.arange(len(rows) + 1) * 2, rows.ravel(), np.ones(rows.size, np.float32))
    own, _ = own_keys(scores, numbered(len(rows)), config=AssociationConfig())
    keys = dict(zip(map(tuple, rows.tolist()), own["key"].to_pylist(), strict=True))
    assert len(set(keys.values())) == 60 * 59 // 2
    assert all(key == keys[j, i] for (i, j), key in keys.items())


def test_invalid_scores_and_ids_are_refused():
    with pytest.raises(DataError, match="finite"):
        associations(term_scores([{"a": float("nan")}]), numbered(1), config=AssociationConfig())
    with pytest.raises(DataError, match="one id per query"):
        associations(term_scores([{"a": 1.0}]), numbered(2), config=AssociationConfig())
