"""Exact search part by part, compared with all scores at once: dense, sparse and joined."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tiny
from scalingnote.core import topk
from scalingnote.core.bm25 import BM25
from scalingnote.encode.engines import TopTerms
from scalingnote.evaluate import exact_search
from scalingnote.evaluate import pool as pools
from scalingnote.evaluate.exact_search import DenseScores, JoinedScores, SparseScores, TopDocuments
from scalingnote.evaluate.pool import Pool, Sample
from scalingnote.evaluate.retrieval_methods import weigh_words, word_scores
from scalingnote.index import hybrid
from scalingnote.models.sparse_query import SparseRows
from scalingnote.storage import arrow, schema, shuffle
from scalingnote.storage.artifact import Artifact

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
QUERIES, DOCUMENTS, DIM, VOCABULARY, K = 7, 50, 6, 20, 12


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "QUERY_BLOCK", 3)
    monkeypatch.setattr(topk, "DOCUMENT_BLOCK", 8)


def draw_pool() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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
    layout, tables = schema.embeddings(["summary"], DIM, sparse=True), {}
    for number, rows in enumerate(np.split(np.arange(DOCUMENTS), [20, 20, 41])):
        ids = pa.array([f"d{i}" for i in rows])
        hashes = pa.array([bytes(16)] * len(rows), schema.CONTENT_HASH.type)
        columns_of_part = [ids, hashes, arrow.to_arrow(documents[rows]), *columns(weights[rows])]
        tables[f"embeddings/part-{number:05d}.parquet"] = pa.table(columns_of_part, schema=layout)
    return tiny.artifact(uri, "embeddings", tables, documents=DOCUMENTS)


def check(results: TopDocuments, scores: np.ndarray) -> None:
    rows = topk.select(scores, k=K)
    np.testing.assert_allclose(results.scores, np.take_along_axis(scores, rows, axis=1), **CLOSE)
    np.testing.assert_allclose(
        np.take_along_axis(scores, results.ids, axis=1), results.scores, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(results.ranges, [scores.min(1), scores.max(1)], **CLOSE)
    assert results.documents == scores.shape[1]


def term_scores(counts: np.ndarray) -> SparseScores:
    matrix = exact_search.query_matrix(sparse_rows(counts), vocabulary=VOCABULARY)
    read_terms = partial(exact_search._term_matrix, words=None, vocabulary=VOCABULARY)
    return SparseScores(matrix, read_terms, ("terms", "impacts"))


def backwards(task: Callable[..., Any], items: Sequence[Any]) -> Iterator[Any]:
    """Run tasks in reverse order."""
    return map(task, reversed(items))


def check_equal(one: TopDocuments, other: TopDocuments) -> None:
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.scores, other.scores)
    np.testing.assert_array_equal(one.ranges, other.ranges)


@pytest.mark.parametrize("k", [K, DOCUMENTS + 5])
def test_every_search_equals_a_computation_of_all_scores(tmp_path, monkeypatch, k):
    queries, documents, counts, weights = draw_pool()
    pool = Pool(artifact(str(tmp_path / "embeddings"), documents, weights))
    sides = {"dense": DenseScores(queries), "terms": term_scores(counts)}
    single = exact_search.search(pool, sides, k=k)
    expected = {"dense": queries @ documents.T, "terms": counts @ weights.T.astype(np.float32)}
    joined = {"both": JoinedScores(("dense", "terms"), tuple(o.ranges for o in single.values()), 0.3)}
    both = exact_search.search(pool, sides, k=k, joined=joined)
    first, second = (hybrid.normalise(one, one.min(1), one.max(1)) for one in expected.values())
    expected["both"] = 0.3 * first + 0.7 * second
    if k == K:
        for name, results in (single | both).items():
            check(results, expected[name])
    else:  # k exceeds the number of documents
        for name, results in (single | both).items():
            np.testing.assert_allclose(
                results.scores[:, :DOCUMENTS], -np.sort(-expected[name], axis=1), **CLOSE
            )
            assert (results.ids[:, DOCUMENTS:] == -1).all()
    # One task for each part, in any order, gives exactly the same result.
    monkeypatch.setattr(shuffle, "MAX_SLICE_BYTES", 1)
    assert len(pool.groups()) == 4
    by_parts = exact_search.search(pool, sides, k=k, each=backwards)
    by_parts |= exact_search.search(pool, sides, k=k, joined=joined, each=backwards)
    for name, results in (single | both).items():
        check_equal(results, by_parts[name])


def test_the_first_of_documents_with_equal_scores_is_best(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "MAX_SLICE_BYTES", 1)
    rng = np.random.default_rng(2)
    documents = rng.integers(0, 2, (DOCUMENTS, DIM)).astype(np.float32)
    queries = rng.integers(0, 2, (QUERIES, DIM)).astype(np.float32)
    pool = Pool(artifact(str(tmp_path / "embeddings"), documents, np.zeros((DOCUMENTS, VOCABULARY))))
    results = exact_search.search(pool, {"dense": DenseScores(queries)}, k=K, each=backwards)["dense"]
    assert results.ids.tolist() == topk.select(queries @ documents.T, k=K).tolist()


def test_a_sample_has_its_share_and_judged_documents(tmp_path, monkeypatch):
    queries, documents, _, weights = draw_pool()
    embeddings = artifact(str(tmp_path / "embeddings"), documents, weights)
    sides = {"dense": DenseScores(queries)}
    rows_of_seed = {}
    for seed in (0, 1):
        sample = Sample(0.4, pa.array(["d3", "d49"]), seed)
        sample_rows = np.flatnonzero(sample.holds(pa.chunked_array([[f"d{i}" for i in range(DOCUMENTS)]])))
        assert {3, 49} <= set(sample_rows.tolist())
        assert 10 < len(sample_rows) < 35
        results = exact_search.search(Pool(embeddings, sample=sample), sides, k=5)["dense"]
        assert results.documents == len(sample_rows)
        best = topk.select((queries @ documents.T)[:, sample_rows], k=5)
        assert results.ids.tolist() == sample_rows[best].tolist()
        rows_of_seed[seed] = sample_rows.tolist()
    assert rows_of_seed[0] != rows_of_seed[1]


def test_ids_of_rows_are_read_from_their_parts(tmp_path, monkeypatch):
    _, documents, _, weights = draw_pool()
    pool = Pool(artifact(str(tmp_path / "embeddings"), documents, weights))
    rows = np.array([[49, 3, -1], [20, 3, 19], [41, 40, 0]])
    for group_bytes in (shuffle.MAX_SLICE_BYTES, 1):
        monkeypatch.setattr(shuffle, "MAX_SLICE_BYTES", group_bytes)
        distinct, doc_ids = pools.document_ids(pool, rows, each=backwards)
        assert distinct.tolist() == [0, 3, 19, 20, 40, 41, 49]
        assert doc_ids.to_pylist() == [f"d{row}" for row in distinct]
        distinct, doc_ids = pools.document_ids(pool, np.full((2, 2), -1))
        assert (len(distinct), len(doc_ids)) == (0, 0)


def test_pairs_are_scored_in_the_part_of_their_document(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "MAX_SLICE_BYTES", 1)
    monkeypatch.setattr(exact_search, "_PAIRS_PER_BLOCK", 2)
    queries, documents, counts, weights = draw_pool()
    pool = Pool(artifact(str(tmp_path / "embeddings"), documents, weights))
    # Sides may have any name: the default name of a student is `table`.
    sides = {"table": DenseScores(queries), "pair": term_scores(counts)}
    numbers, rows = np.array([0, 1, 1, 6, 0, 3]), [49, 0, 20, 20, 5, 4]
    names = [f"d{row}" for row in rows]
    names[4] = "nowhere"
    pairs = pa.table({"query": [f"query {n}" for n in numbers], "doc_id": names})
    texts = [f"query {n}" for n in range(QUERIES)]
    scores_of = exact_search.score_pairs(pool, sides, texts, pairs, each=backwards)
    all_scores = {"table": queries @ documents.T, "pair": counts @ weights.T.astype(np.float32)}
    for name, pair_scores in scores_of.items():
        expected = all_scores[name][numbers, rows].astype(np.float64)
        expected[4] = np.nan
        np.testing.assert_allclose(pair_scores, expected, **CLOSE)


def test_bm25_of_parts_equals_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "MAX_SLICE_BYTES", 1)
    rng = np.random.default_rng(3)
    words = [f"w{i}" for i in range(12)]
    texts = [" ".join(rng.choice(words, rng.integers(0, 9))) for _ in range(DOCUMENTS)]
    queries = [" ".join(rng.choice([*words, "unknown"], 4)) for _ in range(QUERIES)]
    ids, empty = [f"d{i}" for i in range(DOCUMENTS)], [""] * DOCUMENTS
    texts_of, embeddings = {}, {}
    for number, rows in enumerate((slice(0, 20), slice(20, 20), slice(20, 50))):
        columns = {"doc_id": ids[rows], "title": empty[rows], "topic": empty[rows], "content": texts[rows]}
        layout = pa.schema([(name, pa.string()) for name in columns])
        texts_of[f"documents/part-{number:05d}.parquet"] = pa.table(columns, schema=layout)
        # One document of the first part has no embedding, so it does not count.
        part_ids = pa.table({"doc_id": pa.array(ids[rows], pa.string())}).slice(number == 0)
        embeddings[f"embeddings/part-{number:05d}.parquet"] = part_ids
    dataset = tiny.artifact(tmp_path / "dataset", "dataset", texts_of)
    pool = Pool(
        tiny.artifact(tmp_path / "embeddings", "embeddings", embeddings, documents=DOCUMENTS - 1), dataset
    )
    index = BM25.build(texts[1:], k1=0.9, b=0.4)
    weights = weigh_words(pool, queries, k1=0.9, b=0.4, each=backwards)
    results = exact_search.search(pool, {"bm25": word_scores(weights, queries)}, k=K)["bm25"]
    for query, ids_of, scores in zip(queries, results.ids, results.scores, strict=True):
        expected = index.scores(query)
        np.testing.assert_allclose(scores, -np.sort(-expected)[:K], **CLOSE)
        np.testing.assert_allclose(scores, expected[ids_of], **CLOSE)
    pairs = pa.table({"query": [queries[0]] * 2, "doc_id": ["d1", "d49"]})
    results = exact_search.score_pairs(pool, {"bm25": word_scores(weights, queries)}, queries, pairs)
    np.testing.assert_allclose(results["bm25"], index.scores(queries[0])[[0, 48]], **CLOSE)


class CountedReads(Artifact):
    """An artifact that counts the reads of this process; workers get a plain artifact."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact.uri, artifact.manifest)
        self.reads: list[str] = []

    def __reduce__(self) -> Any:
        return Artifact, (self.uri, self.manifest)

    def open(self, name: str) -> pa.NativeFile:
        self.reads.append(name)
        return super().open(name)


def test_the_calling_process_reads_no_part(cluster, tmp_path, monkeypatch):
    from scalingnote.core import cluster as ray_cluster

    monkeypatch.setattr(shuffle, "MAX_SLICE_BYTES", 1)
    queries, documents, counts, weights = draw_pool()
    plain = artifact(str(tmp_path / "embeddings"), documents, weights)
    counting = CountedReads(plain)
    sides = {"dense": DenseScores(queries), "terms": term_scores(counts)}
    results = exact_search.search(Pool(counting), sides, k=K, each=ray_cluster.map_tasks)
    pools.document_ids(Pool(counting), results["dense"].ids, each=ray_cluster.map_tasks)
    pools.gather_embeddings(Pool(counting), ["d4", "d30"], each=ray_cluster.map_tasks)
    pairs = pa.table({"query": ["q", "q"], "doc_id": ["d4", "d30"]})
    exact_search.score_pairs(Pool(counting), sides, ["q"], pairs, each=ray_cluster.map_tasks)
    assert counting.reads == []
    for name, one in exact_search.search(Pool(plain), sides, k=K).items():
        check(one, {"dense": queries @ documents.T, "terms": counts @ weights.T.astype(np.float32)}[name])
        np.testing.assert_allclose(one.scores, results[name].scores, **CLOSE)


def test_terms_outside_the_vocabulary_are_left_out():
    weights = np.array([[0, 2, 0, 1], [0, 0, 0, 0], [3, 0, 1, 5]], np.float16)
    terms, impacts = (pa.chunked_array([column]) for column in columns(weights))
    assert terms.to_pylist() == [[1, 3], [], [0, 2, 3]]
    assert impacts.to_pylist() == [[2, 1], [], [3, 1, 5]]
    matrix = exact_search.document_matrix(terms.slice(1), impacts.slice(1), vocabulary=3)
    assert matrix.toarray().tolist() == [[0, 0, 0], [3, 0, 1]]
