"""The simulated click log: position bias, relevance, exposed documents, determinism.

test_click_recovery.py estimates position bias, grades and dwell times from its log.
"""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core.config import validate
from scalingnote.core.errors import ConfigError
from scalingnote.datasets import simulate as simulator
from scalingnote.datasets.config import PositionClicks, SampledDataset
from scalingnote.datasets.simulate import browse, probability_by_grade, simulate
from scalingnote.storage.schema import IMPRESSIONS, QRELS

DOCS = [f"d{n:04d}" for n in range(2000)]
TOPICS = [f"t{n % 20}" for n in range(2000)]


def judged(queries=1000, grades=(1,)):
    rows = [
        {"query_id": f"q{q}", "doc_id": DOCS[(7 * q + 20 * n) % len(DOCS)], "relevance": grade}
        for q in range(queries)
        for n, grade in enumerate(grades)
    ]
    return pa.Table.from_pylist(rows, schema=QRELS)


def log(qrels, **settings):
    chunks = simulate(qrels, doc_ids=DOCS, topics=TOPICS, config=PositionClicks(**settings))
    return pa.concat_tables(chunks)


def test_a_skilled_engine_ranks_relevant_documents_higher():
    def mean_rank(skill):
        table = log(judged(500), ranker_skill=skill)
        relevant = {(r["query_id"], r["doc_id"]) for r in judged(500).to_pylist()}
        return np.mean(
            [row["position"] for row in table.to_pylist() if (row["query_id"], row["doc_id"]) in relevant]
        )

    assert mean_rank(3.0) < mean_rank(1.0) < mean_rank(0.0)


def test_a_session_is_a_list_without_repeats_or_gaps():
    table = log(judged(200, grades=(2, 1, 0)))
    sessions = {}
    for row in table.to_pylist():
        sessions.setdefault(row["session_id"], []).append(row)
    assert len(sessions) == 600
    assert table.schema.equals(IMPRESSIONS)
    assert min(table["dwell_s"].drop_null().to_pylist()) > 0
    for rows in sessions.values():
        assert [row["position"] for row in rows] == list(range(1, 11))
        assert len({row["doc_id"] for row in rows}) == 10
        assert len({(row["query_id"], row["user_id"], row["timestamp"]) for row in rows}) == 1


def test_only_given_documents_are_exposed():
    qrels = judged(300, grades=(1, 1))
    given_docs = DOCS[::2]
    table = pa.concat_tables(simulate(qrels, doc_ids=given_docs, topics=TOPICS[::2], config=PositionClicks()))
    assert set(table["doc_id"].to_pylist()) <= set(given_docs)
    # A query with only hidden relevant documents is never issued.
    usable = {row["query_id"] for row in qrels.to_pylist() if row["doc_id"] in set(given_docs)}
    assert set(table["query_id"].to_pylist()) == usable


def test_the_share_of_exposures_with_the_same_topic(monkeypatch):
    topic_of = dict(zip(DOCS, TOPICS, strict=True))
    relevant = {row["query_id"]: row["doc_id"] for row in judged().to_pylist()}
    for share in (0.0, 0.5, 1.0):
        monkeypatch.setattr(simulator, "_SAME_TOPIC_SHARE", share)
        rows = [r for r in log(judged()).to_pylist() if r["doc_id"] != relevant[r["query_id"]]]
        same_topic = np.mean([topic_of[row["doc_id"]] == topic_of[relevant[row["query_id"]]] for row in rows])
        assert same_topic == pytest.approx(share + (1 - share) / 20, abs=0.03)


def test_chunks_are_in_the_order_of_time(monkeypatch):
    monkeypatch.setattr(simulator, "_SESSIONS_PER_CHUNK", 40)
    chunks = list(simulate(judged(50), doc_ids=DOCS, topics=TOPICS, config=PositionClicks()))
    assert [len(chunk["session_id"].unique()) for chunk in chunks] == [40, 40, 40, 30]
    table = pa.concat_tables(chunks)
    assert table.equals(log(judged(50)))
    assert not table.equals(log(judged(50), seed=2))
    start = np.datetime64("2024-01-01T00:00:00")
    np.testing.assert_array_equal(
        table["timestamp"].to_numpy(), np.repeat(start + 30 * np.arange(150).astype("m8[s]"), 10)
    )


def test_a_pool_smaller_than_the_list_gives_short_lists():
    qrels = pa.Table.from_pylist([{"query_id": "q", "doc_id": "a", "relevance": 1}], schema=QRELS)
    (table,) = simulate(qrels, doc_ids=["a", "b"], topics=["", ""], config=PositionClicks())
    assert set(table["doc_id"].to_pylist()) <= {"a", "b"}
    assert table["position"].to_pylist()[0] == 1


def test_without_a_relevant_document_the_log_is_empty():
    qrels = pa.Table.from_pylist([{"query_id": "q", "doc_id": "d0000", "relevance": 0}], schema=QRELS)
    assert log(qrels).equals(IMPRESSIONS.empty_table())


# --- all users at once, compared with one user at a time, place by place ------------------------------------


def one_user(attraction, satisfaction, click_draws, satisfaction_draws, *, eta):
    """Simulate the clicks of one list, place by place: (clicked, satisfied)."""
    clicked, satisfied = [], []
    for i in range(len(attraction)):
        examination = (i + 1) ** -eta
        clicked.append(bool(click_draws[i] < examination * attraction[i]))
        satisfied.append(clicked[i] and bool(satisfaction_draws[i] < satisfaction[i]))
    return clicked, satisfied


@given(st.sampled_from([0.0, 1.0, 2.0]), st.integers(1, 7), st.integers(0, 10_000), st.booleans())
def test_browse_equals_one_user_at_a_time(eta, places, seed, eager):
    shape = (20, places)
    attraction, satisfaction = np.random.default_rng([seed, 2]).random((2, *shape))
    attraction = np.ones(shape) if eager else attraction
    actual_clicks, actual_satisfied = browse(
        attraction,
        satisfaction,
        eta=eta,
        rng=np.random.default_rng(seed),
        satisfaction_rng=np.random.default_rng([seed, 1]),
    )
    click_draws = np.random.default_rng(seed).random(shape)
    satisfaction_draws = np.random.default_rng([seed, 1]).random(shape)
    for row in range(len(attraction)):
        rows = (each[row] for each in (attraction, satisfaction, click_draws, satisfaction_draws))
        clicked, satisfied = one_user(*rows, eta=eta)
        assert actual_clicks[row].tolist() == clicked
        assert actual_satisfied[row].tolist() == satisfied


def test_probabilities_are_proportional_to_grades():
    np.testing.assert_allclose(
        probability_by_grade(np.array([0, 0.1, 0.5, 1]), best=0.8, other=0.2), [0.2, 0.2, 0.4, 0.8]
    )


def read(**click_model):
    return validate(SampledDataset, {"click_model": click_model}, source="test").click_model


def test_a_config_may_set_one_field_of_the_default_model():
    assert SampledDataset().click_model == PositionClicks() == read()
    assert read(eta=0.5) == PositionClicks(eta=0.5)
    assert validate(SampledDataset, {"click_model": None}, source="test").click_model is None


def test_an_unknown_key_is_an_error_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"did you mean 'click_model\.eta'"):
        read(etta=0.5)
