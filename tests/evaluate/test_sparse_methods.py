"""Methods of a report from a document tower with a sparse head: part files, sparse search and hybrid."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import light
import tiny
from in_process import without_ray
from scalingnote.core.bm25 import BM25, document_texts
from scalingnote.core.parts import map_here
from scalingnote.encode import job as encoding
from scalingnote.encode.config import BM25Config, EncodeConfig
from scalingnote.encode.lexical import job as lexical
from scalingnote.evaluate import job, retrieval_methods, test_set
from scalingnote.evaluate.config import EvaluateConfig, Hybrid, MethodNames
from scalingnote.storage.artifact import Artifact, Draft

CONFIG = EvaluateConfig(names=MethodNames(dual_encoder="light", student="cheap"), bm25=False)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("run")
    dataset = tiny.dataset(str(folder / "dataset"))
    towers = Draft(str(folder / "dual_encoder"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    light.stage().eval().towers.save(Path(towers.path("")))
    dual_encoder = towers.commit(counts={})
    parents = {"dataset": dataset, "dual_encoder": dual_encoder}
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        embeddings = encoding.run(
            EncodeConfig(top_k=400, token_budget=512),
            dataset=dataset.uri,
            dual_encoder=dual_encoder.uri,
            output=str(folder / "embeddings"),
        )
    return parents | {"embeddings": embeddings, "index": embeddings, "student": dual_encoder}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    monkeypatch.setattr(retrieval_methods, "_through_index", lambda *_, **__: {})


def retrieve(parents: dict[str, Artifact], **joining: Any) -> dict[str, Any]:
    config = CONFIG.model_copy(update={"hybrid": Hybrid(**joining)})
    test = test_set.load_test_set(parents["dataset"])
    methods = retrieval_methods.Methods(config, parents)
    towers = {name: parents[kind] for name, kind in methods.towers.items()}
    queries = dict.fromkeys(towers, test.queries)
    encoded = job.encode_queries(
        towers, queries, config=config, keep=lambda task, items, **_: map_here(task, items)
    )
    return retrieval_methods.retrieve(methods, encoded, None, test=test)[0]


def test_a_student_has_hybrid_methods_but_no_sparse_one(parents: dict[str, Artifact]):
    runs = retrieve(parents)
    assert set(runs) == {
        "light",
        "light (sparse)",
        "light (hybrid)",
        "light (raw hybrid)",
        "cheap",
        "cheap (hybrid)",
        "cheap (raw hybrid)",
        "cheap (index)",
    }
    assert list(runs) == retrieval_methods.Methods(CONFIG, parents).names
    without = {kind: artifact for kind, artifact in parents.items() if kind != "student"}
    names = {"light", "light (sparse)", "light (hybrid)", "light (index)"}
    assert set(retrieve(without)) == names | {"light (raw hybrid)"}
    assert set(retrieve(without, raw=False)) == names


def test_a_raw_hybrid_adds_unchanged_scores(parents: dict[str, Artifact]):
    runs = retrieve(parents, dense_weight=0.9)
    for query_id, hits in runs["light (raw hybrid)"].items():
        dense, sparse = (dict(runs[name][query_id]) for name in ("light", "light (sparse)"))
        sums = {doc: score + sparse.get(doc, 0.0) for doc, score in dense.items()}
        assert len(sums) == len(hits) == tiny.DOCUMENTS
        best = sorted(sums.values(), reverse=True)
        np.testing.assert_allclose([2 * score for _, score in hits], best, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose([sums[doc] for doc, _ in hits], best, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("weight", "method"), [(1.0, "light"), (0.0, "light (sparse)")])
def test_all_weight_on_one_side_gives_the_ranking_of_that_side(
    parents: dict[str, Artifact], weight: float, method: str
):
    runs = retrieve(parents, dense_weight=weight)
    for query_id, hits in runs["light (hybrid)"].items():
        scores = dict(runs[method][query_id])
        ordered = [scores.get(doc, 0.0) for doc, _ in hits]
        assert len(ordered) == len(scores)
        np.testing.assert_allclose(ordered, sorted(ordered, reverse=True), atol=1e-5)


def test_a_document_without_a_common_term_has_no_rank(
    parents: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
):
    search = retrieval_methods.exact_search.search

    def few(*arguments: Any, **knobs: Any) -> Any:
        """Search as if only the ten best documents had common terms with the query."""
        results = search(*arguments, **knobs)
        if retrieval_methods.TERM_SCORES in results:  # not in the search of joined scores
            results[retrieval_methods.TERM_SCORES].scores[:, 10:] = 0.0
        return results

    monkeypatch.setattr(retrieval_methods.exact_search, "search", few)
    runs = retrieve(parents, dense_weight=0.0)
    for query_id, hits in runs["light (sparse)"].items():
        assert len(hits) == 10
        assert [doc for doc, _ in runs["light (hybrid)"][query_id]] == [doc for doc, _ in hits]


@pytest.fixture(scope="module")
def words(parents: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    output = str(tmp_path_factory.mktemp("bm25") / "bm25_terms")
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return lexical.run(BM25Config(), dataset=parents["dataset"].uri, output=output)


def test_every_tower_has_a_hybrid_with_bm25(parents: dict[str, Artifact], words: Artifact):
    with_words = parents | {"bm25_terms": words}
    runs = retrieve(with_words)
    assert list(runs) == retrieval_methods.Methods(CONFIG, with_words).names
    assert {"light + bm25", "cheap + bm25"} == runs.keys() - retrieve(parents).keys()
    documents = parents["dataset"].table("documents")
    bm25 = BM25.build(document_texts(documents))
    test = test_set.load_test_set(parents["dataset"])
    weights = [0.0, 0.5, 1.0]
    by_weight = [retrieve(with_words, dense_weight=weight)["light + bm25"] for weight in weights]
    for query_id, query in zip(test.query_ids, test.queries, strict=True):
        lexical_scores = dict(zip(documents["doc_id"].to_pylist(), bm25.scores(query).tolist(), strict=True))
        dense_scores = dict(runs["light"][query_id])
        for weight, hybrid_runs in zip(weights, by_weight, strict=True):
            expected = {
                doc: weight * _scaled(dense_scores, doc) + (1 - weight) * _scaled(lexical_scores, doc)
                for doc in dense_scores
                if weight or lexical_scores[doc] > 0
            }
            assert dict(hybrid_runs[query_id]) == pytest.approx(expected, abs=2e-3)


def _scaled(scores: dict[str, float], doc: str) -> float:
    low, high = min(scores.values()), max(scores.values())
    return (scores[doc] - low) / (high - low)
