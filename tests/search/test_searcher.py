"""A searcher finds the same as brute force; several searchers answer like one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from in_process import run_without_ray
from scalingnote.core.errors import ArtifactError, SearchError
from scalingnote.index import filters, hybrid, job
from scalingnote.index.config import FastScan, IndexConfig
from scalingnote.index.shard import IndexLayout
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.searcher import Candidates, Searcher, concatenate, rank
from synthetic_corpus import Corpus, queries

# All lists are scanned, and all documents are re-ranked by float vectors, so that the index is exact.
EXACT = IndexConfig(
    shards=3,
    family=FastScan(refine="flat"),
    nlist=8,
    nprobe=8,
    train_documents=500,
    refine_factor=100,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.build(f"{tmp_path_factory.mktemp('corpus')}", sizes=[300, 340], dim=16)


@pytest.fixture(scope="module")
def uri(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_without_ray(
        job.run, EXACT, **corpus.uris, output=f"{tmp_path_factory.mktemp('index')}/index"
    ).uri


@pytest.fixture(scope="module")
def searcher(uri: str) -> Searcher:
    return Searcher.open(uri)


@pytest.fixture(scope="module")
def probes(corpus: Corpus) -> np.ndarray:
    return queries(corpus.matrix, 30)


@pytest.fixture
def copy(uri: str, tmp_path: Path) -> Path:
    """Return a copy of the index that a test may damage."""
    return Path(shutil.copytree(uri, tmp_path / "index"))


def test_a_result_leads_to_its_document(searcher: Searcher, corpus: Corpus) -> None:
    result = searcher.search(corpus.matrix[400:401], k=1)[0][0]
    assert (result.doc_id, result.shard) == ("d400", 1)
    assert result.score == pytest.approx(1.0, abs=1e-5)
    assert result.document == {
        "doc_id": "d400",
        "title": "Title 400",
        "topic": "topic 1",
        "snippet": ("Text of document 400. " * 30)[:240],
        "semantic_id": "1-0-400",
    }


def test_nprobe_is_set_per_search_and_limited_to_the_lists(
    searcher: Searcher, uri: str, probes: np.ndarray
) -> None:
    few, all_lists = (searcher.search(probes, k=10, nprobe=nprobe) for nprobe in (1, 10**6))
    assert few != all_lists == searcher.search(probes, k=10)


def test_a_large_k_returns_all_documents(probes: np.ndarray, tmp_path: Path) -> None:
    small = Corpus.build(f"{tmp_path}/small", sizes=[40], dim=16)
    config = EXACT.model_copy(update={"nlist": 1, "shards": 50})  # at least ten shards are empty
    searcher = Searcher.open(run_without_ray(job.run, config, **small.uris, output=f"{tmp_path}/index").uri)
    answers = searcher.search(probes, k=1000)
    assert all({r.doc_id for r in results} == {f"d{i}" for i in range(40)} for results in answers)
    assert all([r.score for r in rs] == sorted((r.score for r in rs), reverse=True) for rs in answers)
    empty = next(
        number for number in searcher.shards if not len(Searcher.open(f"{tmp_path}/index", shards=[number]))
    )
    assert Searcher.open(f"{tmp_path}/index", shards=[empty]).search(probes, k=5) == [[] for _ in probes]
    assert searcher.search(probes[:0], k=5) == []


def test_a_missing_shard_is_named(copy: Path, probes: np.ndarray) -> None:
    (copy / "shard-00001/lists.faiss").unlink()
    with pytest.raises(ArtifactError, match=r"shard-00001/lists.faiss is missing"):
        Searcher.open(str(copy))
    assert len(Searcher.open(str(copy), shards=[0, 2])) == 427  # the other shards can be searched


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_is_refused_by_its_name(copy: Path, damage: str) -> None:
    parts = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    assert {path.name for path in parts} == {
        *("coarse.faiss", "index.json", "lists.faiss", "kept.faiss", "ids.npy"),
        *("columns.arrow", "documents.arrow"),
    }
    for path in parts:
        content = path.read_bytes()
        half = len(content) // 2
        flipped = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
        path.write_bytes(flipped if damage == "flip" else content[:-1])
        with pytest.raises(ArtifactError, match=f"{path.relative_to(copy)} is damaged"):
            assert Searcher.open(str(copy)).store
        path.write_bytes(content)
    assert len(Searcher.open(str(copy)).store) == 640


def test_a_searcher_opens_no_documents(searcher: Searcher, copy: Path, probes: np.ndarray) -> None:
    for path in copy.rglob("documents.arrow"):
        path.unlink()
    without = Searcher.open(str(copy))
    for candidates, expected in zip(without.find(probes, k=5), searcher.find(probes, k=5), strict=True):
        assert (candidates.ids.tolist(), candidates.documents) == (expected.ids.tolist(), ())
    assert filters.facets(without.documents(), without.fields, most=7) == filters.facets(
        searcher.documents(), searcher.fields, most=7
    )
    np.testing.assert_array_equal(without.vector("d400"), searcher.vector("d400"))
    with pytest.raises(ArtifactError, match=r"documents.arrow is missing"):
        without.search(probes, k=5)


def test_an_index_of_an_earlier_release_can_be_searched(
    searcher: Searcher, copy: Path, probes: np.ndarray
) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["parts"] = {
        n: p for n, p in manifest["parts"].items() if not n.endswith((".npy", "columns.arrow"))
    }
    (copy / "manifest.json").write_text(json.dumps(manifest))
    earlier = Searcher.open(str(copy))
    assert earlier.search(probes, k=5) == searcher.search(probes, k=5)
    assert (earlier.get("d400"), earlier.get("none")) == (searcher.get("d400"), None)


def _digits(numbers: list[int]) -> SparseRows:
    """Build queries with the digits of numbers as terms."""
    terms = [sorted({int(digit) for digit in str(number)}) for number in numbers]
    offsets = np.cumsum([0, *map(len, terms)])
    flat = np.concatenate([np.array(each, np.int32) for each in terms])
    return SparseRows(offsets, flat, np.ones(len(flat), np.float32))


def test_embeddings_and_terms_together_equal_brute_force(
    probes: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "CANDIDATES_PER_SCORE", 1000)
    corpus = Corpus.build(f"{tmp_path}/corpus", sizes=[300, 340], dim=16, sparse=True)
    index = run_without_ray(job.run, EXACT, **corpus.uris, output=f"{tmp_path}/index").uri
    searcher, mapped = Searcher.open(index), Searcher.open(index, mapped=True)
    numbers = [17, 404, 639, 8]
    queries_of = probes[: len(numbers)]
    terms = np.array([[str(i).count(str(t)) for t in range(10)] for i in range(640)], np.float32)
    weights = np.array([[float(str(t) in str(number)) for t in range(10)] for number in numbers], np.float32)
    dense, sparse = queries_of @ corpus.matrix.T, weights @ terms.T
    for where, rows in ((None, np.arange(640)), ({"topic": "topic 3"}, np.arange(3, 640, 7))):
        answers, of_mapped = (
            each.search(queries_of, _digits(numbers), k=9, dense_weight=0.3, where=where)
            for each in (searcher, mapped)
        )
        assert of_mapped == answers
        best = np.maximum(dense[:, rows], 0.0)  # without tuning, the background is 0
        scores = 0.3 * best / best.max(1, keepdims=True)
        scores += 0.7 * sparse[:, rows] / np.maximum(sparse[:, rows].max(1, keepdims=True), 1e-9)
        exact = np.take_along_axis(rows[None], np.lexsort((np.tile(rows, (4, 1)), -scores))[:, :9], axis=1)
        np.testing.assert_allclose(
            [[r.score for r in line] for line in answers], -np.sort(-scores, axis=1)[:, :9], atol=1e-5
        )
        assert [[r.doc_id for r in line] for line in answers] == [[f"d{i}" for i in line] for line in exact]


def test_a_weight_outside_0_to_1_is_refused(searcher: Searcher, probes: np.ndarray) -> None:
    for weight in (-0.1, 1.5):
        with pytest.raises(SearchError, match=f"dense_weight is {weight}: pass a number from 0 to 1"):
            searcher.search(probes[:1], k=3, dense_weight=weight)


def test_mapped_vectors_are_searched_like_those_in_memory(
    searcher: Searcher, uri: str, probes: np.ndarray, copy: Path
) -> None:
    mapped = Searcher.open(uri, mapped=True)
    with open("/proc/self/maps") as maps:
        assert sum(f"{uri}/shard-" in line and line.split()[5].endswith(".faiss") for line in maps) >= 3
    for where in (None, {"topic": "topic 3"}):
        assert mapped.search(probes, k=12, where=where) == searcher.search(probes, k=12, where=where)
    for part in (0, 300, 639):
        np.testing.assert_array_equal(mapped.vector(f"d{part}"), searcher.vector(f"d{part}"))
    damaged = copy / "shard-00001/kept.faiss"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match=r"shard-00001/kept\.faiss is damaged"):
        Searcher.open(str(copy), mapped=True)


DOCUMENTS, CANDIDATES, K = 400, 10, 10
LAYOUT = IndexLayout(
    dim=16,
    documents=DOCUMENTS,
    shards=4,
    family="FastScan",
    refine="flat",
    nlist=8,
    nprobe=8,
    refine_factor=4,
    recall=None,
    filters=(),
    sparse=True,
    background=0.3,
    dense_weight=0.4,
)


def candidates(dense: np.ndarray, sparse: np.ndarray | None, numbers: np.ndarray) -> Candidates:
    """Return the candidates, dense and sparse, of a searcher that holds some documents."""
    ids = numbers[np.argsort(-dense[numbers], kind="stable")[:CANDIDATES]]
    if sparse is not None:
        by_terms = numbers[np.argsort(-sparse[numbers], kind="stable")[:CANDIDATES]]
        ids = np.union1d(ids, by_terms[sparse[by_terms] > 0])
    documents = [{"doc_id": f"d{number}"} for number in ids]
    return Candidates(ids, ids % 4, dense[ids], None if sparse is None else sparse[ids], documents, 1)


@pytest.mark.parametrize("kind", ["embeddings", "hybrid"])
def test_four_searchers_answer_like_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution of shards does not matter, and of equal scores the lower id is first."""
    monkeypatch.setattr(hybrid, "CANDIDATES_PER_SCORE", CANDIDATES)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        dense = rng.integers(0, 40, DOCUMENTS).astype(np.float32)  # many scores are equal
        sparse = np.maximum(rng.standard_normal(DOCUMENTS), 0).astype(np.float32)
        if kind != "embeddings":
            dense = rng.random(DOCUMENTS, np.float32)
        terms = None if kind == "embeddings" else sparse
        every = np.arange(DOCUMENTS)
        one = rank(candidates(dense, terms, every), k=K, layout=LAYOUT).hits()
        searchers = [candidates(dense, terms, every[every % 4 == number]) for number in (2, 0, 3, 1)]
        assert rank(concatenate(searchers), k=K, layout=LAYOUT).hits() == one
        assert len(one) == K
        if kind == "embeddings":
            assert [hit.doc_id for hit in one] == [f"d{n}" for n in np.lexsort((every, -dense))[:K]]
