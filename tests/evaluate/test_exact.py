"""Exact search part by part equals all scores at once: dense, sparse, and both."""

import numpy as np
import pyarrow as pa
import pytest

from scalingnote import hybrid, topk
from scalingnote.encode.encoder import TopTerms
from scalingnote.evaluate import exact_search
from scalingnote.evaluate.exact_search import PoolPart
from scalingnote.models.sparse_query import SparseRows
from scalingnote.storage import arrow, schema
from scalingnote.storage.artifact import Artifact, Draft
from tiny import Nothing

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
QUERIES, DOCUMENTS, DIM, VOCABULARY, K = 7, 50, 6, 20, 12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "QUERY_BLOCK", 3)
    monkeypatch.setattr(topk, "DOCUMENT_BLOCK", 8)


def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    queries, documents = rng.normal(size=(QUERIES, DIM)), rng.normal(size=(DOCUMENTS, DIM))
    counts = rng.integers(0, 3, (QUERIES, VOCABULARY)).astype(np.float32)
    weights = np.maximum(rng.normal(size=(DOCUMENTS, VOCABULARY)), 0).astype(np.float16)
    counts[2] = 0  # an empty query
    weights[5] = 0
    return queries.astype(np.float32), documents.astype(np.float32), counts, weights


def sparse_rows(counts: np.ndarray) -> SparseRows:
    terms = [np.flatnonzero(row) for row in counts]
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in terms])])
    values = np.concatenate([row[t] for row, t in zip(counts, terms, strict=True)])
    return SparseRows(offsets.astype(np.int64), np.concatenate(terms).astype(np.int32), values)


def columns(weights: np.ndarray) -> list[pa.Array]:
    terms = TopTerms.empty(len(weights), VOCABULARY + 3)
    order = np.argsort(-weights, axis=1)
    terms.put(np.arange(len(weights)), order, np.take_along_axis(weights, order, axis=1))
    return terms.columns()


def artifact(uri: str, documents: np.ndarray, weights: np.ndarray) -> Artifact:
    draft = Draft(uri, kind="embeddings", config=Nothing(), parents={})
    layout, schema_hash = schema.embeddings(["summary"], DIM, sparse=True), schema.CONTENT_HASH.type
    for number, rows in enumerate(np.split(np.arange(DOCUMENTS), [20, 41])):
        ids = pa.array([f"d{i}" for i in rows])
        hashes = pa.array([bytes(16)] * len(rows), schema_hash)
        made = pa.table(
            [ids, hashes, arrow.to_arrow(documents[rows]), *columns(weights[rows])], schema=layout
        )
        draft.write_table(f"embeddings/part-{number:05d}.parquet", made)
    return draft.commit(counts={"documents": DOCUMENTS})


def check(found: exact_search.TopDocuments, scores: np.ndarray) -> None:
    rows = topk.select(scores, k=K)
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, rows, axis=1), **CLOSE)
    np.testing.assert_allclose(
        np.take_along_axis(scores, found.rows, axis=1), found.scores, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose([found.low, found.high], [scores.min(1), scores.max(1)], **CLOSE)


def test_every_kind_of_search_equals_all_scores_at_once(tmp_path):
    queries, documents, counts, weights = drawn()
    embeddings = artifact(str(tmp_path / "embeddings"), documents, weights)
    matrix = exact_search.query_matrix(sparse_rows(counts), vocabulary=VOCABULARY)
    knobs = {"queries": QUERIES, "k": K}
    by_embeddings = exact_search.search(embeddings, exact_search.dense_score(queries), dim=DIM, **knobs)
    check(by_embeddings, queries @ documents.T)
    by_terms = exact_search.search(embeddings, exact_search.sparse_score(matrix), terms=VOCABULARY, **knobs)
    check(by_terms, counts @ weights.T.astype(np.float32))
    score = exact_search.hybrid_score(queries, matrix, ranges=(by_embeddings, by_terms), dense_weight=0.3)
    joined = exact_search.search(embeddings, score, dim=DIM, terms=VOCABULARY, **knobs)
    first, second = (
        hybrid.normalised(scores, scores.min(1), scores.max(1))
        for scores in (queries @ documents.T, counts @ weights.T.astype(np.float32))
    )
    check(joined, 0.3 * first + 0.7 * second)


def test_rows_that_were_found_get_their_documents_names(tmp_path):
    _, documents, _, weights = drawn()
    embeddings = artifact(str(tmp_path / "embeddings"), documents, weights)
    rows = np.array([[49, 3, -1], [20, 3, 19], [41, 40, 0]])
    wanted, doc_ids = exact_search.document_ids(embeddings, rows)
    assert wanted.tolist() == [0, 3, 19, 20, 40, 41, 49]
    assert doc_ids.to_pylist() == [f"d{row}" for row in wanted]
    wanted, doc_ids = exact_search.document_ids(embeddings, np.full((2, 2), -1))
    assert (len(wanted), len(doc_ids)) == (0, 0)


def test_terms_are_ascending_and_positive_and_those_no_query_has_are_left_out():
    weights = np.array([[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 1, 5]], np.float16)
    terms, impacts = (pa.chunked_array([column]) for column in columns(weights))
    assert terms.to_pylist() == [[1, 3], [], [0, 2, 3]]
    assert impacts.to_pylist() == [[2, 1], [], [3, 1, 5]]
    sliced = exact_search.document_matrix(terms.slice(1), impacts.slice(1), vocabulary=3)
    assert sliced.toarray().tolist() == [[0, 0, 0], [3, 0, 1]]
    assert len(PoolPart(sparse=sliced)) == 2
