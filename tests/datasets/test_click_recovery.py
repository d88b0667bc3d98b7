"""The click model's parameters, estimated only from its log, equal those of the simulation.

The estimators use only impressions: session, document, position, click and dwell time. Relevance grades give
the true values and are not used for estimates.
"""

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.datasets import simulate as simulator
from scalingnote.datasets.config import PositionClicks
from scalingnote.datasets.simulate import simulate
from scalingnote.storage.schema import QRELS

K = 6
QUERIES, DOCS = 6, 24  # few pairs, each seen often: each has an attractiveness to estimate
PAIRS = QUERIES * DOCS
GRADES = np.zeros((QUERIES, DOCS), int)
for query in range(QUERIES):
    GRADES[query, 3 * query : 3 * query + 3] = 3, 2, 1
GRADES = GRADES.ravel()
ATTRACTIVENESS = np.array([0.15, 0.3, 0.6, 0.9])[GRADES]
SATISFIED = (0.05, 0.8 / 3, 1.6 / 3, 0.8)  # by grade
SATISFACTION = np.array(SATISFIED)[GRADES]
USERS = PositionClicks(eta=0.7, ranker_skill=1.5)


@dataclass
class Log:
    """Matrices with places as rows (the top first) and sessions as columns."""

    pair: np.ndarray
    clicked: np.ndarray
    dwell: np.ndarray  # NaN if not clicked


@pytest.fixture(scope="module")
def log():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulator, "SESSIONS_PER_QUERY", 5000)
        patched.setattr(simulator, "RESULTS_PER_SESSION", K)
        patched.setattr(simulator, "CLICK_NOISE", 0.15)
        return _simulated()


def _simulated():
    qrels = [
        {"query_id": f"q{n // DOCS}", "doc_id": f"d{n % DOCS}", "relevance": grade}
        for n, grade in enumerate(GRADES.tolist())
    ]
    chunks = simulate(
        pa.Table.from_pylist(qrels, schema=QRELS),
        doc_ids=[f"d{n}" for n in range(DOCS)],
        topics=["one"] * DOCS,
        config=USERS,
    )
    table = pa.concat_tables(chunks).combine_chunks()
    # Sessions are in order, and each one has all K places filled.
    np.testing.assert_array_equal(table["position"].to_numpy().reshape(-1, K), [[*range(1, K + 1)]] * 30_000)
    query, doc = (
        np.array([int(name[1:]) for name in table[column].to_pylist()]) for column in ("query_id", "doc_id")
    )
    columns = (query * DOCS + doc, table["clicked"].to_numpy(), table["dwell_s"].to_numpy())
    return Log(*(np.ascontiguousarray(column.reshape(-1, K).T) for column in columns))


def assert_recovered(estimate, truth, *, of_grade, of_pair):
    """Check the mean over each grade's pairs, and every relevant pair, each with its tolerance."""
    for grade in range(4):
        assert estimate[grade == GRADES].mean() == pytest.approx(truth[grade == GRADES][0], abs=of_grade)
    assert np.abs(estimate - truth)[GRADES > 0].max() < of_pair


def test_expectation_maximisation_recovers_position_bias(log):
    """Examination and attractiveness are separated, although better documents have higher positions."""
    cell = log.pair + PAIRS * np.arange(K)[:, None]
    exposures = np.bincount(cell.ravel(), minlength=K * PAIRS).reshape(K, PAIRS)
    clicks = np.bincount(cell[log.clicked], minlength=K * PAIRS).reshape(K, PAIRS)

    examined, attractive = np.full((K, 1), 0.5), np.full(PAIRS, 0.5)
    for _ in range(200):
        both = examined * attractive
        was_examined = clicks + (exposures - clicks) * (examined - both) / (1 - both)
        was_attractive = clicks + (exposures - clicks) * (attractive - both) / (1 - both)
        examined = was_examined.sum(1, keepdims=True) / exposures.sum(1, keepdims=True)
        attractive = was_attractive.sum(0) / exposures.sum(0)
    # A log has only their product: the top place counts as examined.
    examined, attractive = examined[:, 0] / examined[0], attractive * examined[0]

    np.testing.assert_allclose(examined, np.arange(1, K + 1) ** -0.7, atol=0.03)
    eta = -np.polyfit(np.log(np.arange(1, K + 1)), np.log(examined), 1)[0]
    assert eta == pytest.approx(0.7, abs=0.03)
    assert_recovered(attractive, ATTRACTIVENESS, of_grade=0.02, of_pair=0.06)


def test_a_lognormal_mixture_recovers_dwell_times(log):
    """Dwell times are enough to estimate both medians, their spread, and the share of satisfied clicks."""
    np.testing.assert_array_equal(np.isnan(log.dwell), ~log.clicked)
    seconds = np.log(log.dwell[log.clicked].astype(float))
    share, means, spread = 0.5, np.quantile(seconds, [0.9, 0.1]), seconds.std()
    for _ in range(60):
        odds = np.exp(((seconds - means[1]) ** 2 - (seconds - means[0]) ** 2) / (2 * spread**2))
        satisfied = share * odds / (share * odds + 1 - share)
        share = satisfied.mean()
        means = np.array([np.average(seconds, weights=w) for w in (satisfied, 1 - satisfied)])
        squared_deviations = (
            satisfied * (seconds - means[0]) ** 2 + (1 - satisfied) * (seconds - means[1]) ** 2
        )
        spread = math.sqrt(squared_deviations.mean())
    np.testing.assert_allclose(np.exp(means), [60, 10], rtol=0.08)
    assert spread == pytest.approx(0.8, abs=0.03)
    assert share == pytest.approx(SATISFACTION[log.pair[log.clicked]].mean(), abs=0.03)


def test_a_dwell_threshold_finds_satisfying_documents(log):
    """The share of clicks that last 30 s, as for `min_dwell_s`, increases with the grade."""
    grade = GRADES[log.pair[log.clicked]]
    shares = [(log.dwell[log.clicked][grade == g] >= 30).mean() for g in range(4)]
    # 81 % of the satisfied clicks and 8 % of the others.
    np.testing.assert_allclose(shares, [0.807 * s + 0.085 * (1 - s) for s in SATISFIED], atol=0.03)
