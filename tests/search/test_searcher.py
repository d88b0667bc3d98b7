import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from in_process import run_without_ray
from scalingnote import topk
from scalingnote.errors import ArtifactError, SearchError
from scalingnote.hybrid import Joining
from scalingnote.index import families, ivf, job
from scalingnote.index.config import FastScan, Flat, IndexConfig
from scalingnote.index.shard import Layout, Shard
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.searcher import Candidates, Searcher, rank, with_documents
from synthetic_corpus import Corpus, queries, vectors

# Every list is scanned and every document re-ranked by its floats: the index leaves nothing to chance.
EXACT = IndexConfig(
    shards=3,
    family=FastScan(refine="flat"),
    nlist=8,
    nprobe=8,
    iterations=4,
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
def asked(corpus: Corpus) -> np.ndarray:
    return queries(corpus.matrix, 30)


@pytest.fixture
def copy(uri: str, tmp_path: Path) -> Path:
    """The index in a place where it may be damaged."""
    return Path(shutil.copytree(uri, tmp_path / "index"))


def test_an_exhaustive_search_equals_exact_search(
    searcher: Searcher, corpus: Corpus, asked: np.ndarray
) -> None:
    scores, rows = topk.search(asked, corpus.matrix, k=10)
    found = searcher.search(3.0 * asked, k=10)  # a query's length does not matter
    assert [[result.doc_id for result in results] for results in found] == [
        [f"d{row}" for row in line] for line in rows
    ]
    np.testing.assert_allclose([[r.score for r in results] for results in found], scores, atol=1e-5)


def test_what_searchers_of_some_shards_find_merges_to_what_one_of_all_finds(
    searcher: Searcher, uri: str, asked: np.ndarray
) -> None:
    others = [Searcher.open(uri, shards=numbers) for numbers in ([0], [1, 2])]
    answers = [other.find(asked, k=10) for other in others]
    for query, results in enumerate(searcher.search(asked, k=10)):
        ranked = rank([a[query] for a in answers], k=10, joining=Joining(), layout=searcher.layout)
        merged = with_documents(ranked, searcher.store).hits()
        assert [(hit.document["doc_id"], hit.score, hit.shard) for hit in merged] == [
            (result.doc_id, result.score, result.shard) for result in results
        ]


def test_an_exact_search_misses_nothing_that_few_lists_miss(
    searcher: Searcher, corpus: Corpus, asked: np.ndarray
) -> None:
    _, rows = topk.search(asked, corpus.matrix, k=10)
    best = [[f"d{row}" for row in line] for line in rows]
    for exact in (False, True):
        found = [
            with_documents(each, searcher.store).documents
            for each in searcher.find(asked, k=10, nprobe=1, exact=exact)
        ]
        assert ([[document["doc_id"] for document in line] for line in found] == best) == exact


def test_a_document_and_its_vector_are_found_by_its_id(searcher: Searcher, corpus: Corpus) -> None:
    document, vector = searcher.get("d400"), searcher.vector("d400")
    assert document is not None
    assert vector is not None
    assert document["title"] == "Title 400"
    np.testing.assert_allclose(vector, corpus.matrix[400], atol=1e-6)
    assert searcher.get("nothing") is None
    assert searcher.vector("nothing") is None
    topics = np.bincount(np.arange(640) % 7).tolist()
    assert searcher.facets(most=7) == {"topic": {f"topic {n}": count for n, count in enumerate(topics)}}
    assert searcher.facets(most=6) == {}


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


def test_searchers_of_single_shards_merge_to_the_whole_in_any_order(
    searcher: Searcher, uri: str, asked: np.ndarray
) -> None:
    parts = [Searcher.open(uri, shards=[number]) for number in (2, 0, 1)]
    assert [len(part) for part in parts] == [214, 213, 213]
    layout, joining = searcher.layout, Joining()
    for query in asked:
        found = [part.find(query[None], k=12)[0] for part in parts]
        ranked, of_all = (
            with_documents(rank(each, k=12, joining=joining, layout=layout), searcher.store)
            for each in (found, searcher.find(query[None], k=12))
        )
        merged = ranked.hits()
        assert merged == of_all.hits()
        assert [hit.document["doc_id"] for hit in merged] == [
            result.doc_id for result in searcher.search(query[None], k=12)[0]
        ]


def test_a_batch_and_its_queries_one_by_one_find_the_same(searcher: Searcher, asked: np.ndarray) -> None:
    batch = searcher.search(asked, k=7, nprobe=3)
    assert [searcher.search(query[None], k=7, nprobe=3)[0] for query in asked] == batch
    assert searcher.search(asked, k=7, nprobe=3) == batch


def test_nprobe_is_chosen_per_search_and_bounded_by_the_lists(
    searcher: Searcher, uri: str, asked: np.ndarray
) -> None:
    few, all_lists = (searcher.search(asked, k=10, nprobe=nprobe) for nprobe in (1, 10**6))
    assert few != all_lists == searcher.search(asked, k=10)
    assert Searcher.open(uri, nprobe=1).search(asked, k=10) == few


def test_of_equal_scores_the_lower_id_comes_first(searcher: Searcher) -> None:
    def answer(scores: list[float], ids: list[int]) -> Candidates:
        documents = [{"doc_id": str(number)} for number in ids]
        return Candidates(
            np.array(ids), np.zeros(len(ids), int), np.array(scores, np.float32), None, documents, 1
        )

    answers = [answer([0.5, 0.5], [40, 47]), answer([0.5, 0.9, 0.5], [28, 29, 23])]
    merged = rank(answers, k=4, joining=Joining(), layout=searcher.layout).hits()
    assert [hit.document["doc_id"] for hit in merged] == ["29", "23", "28", "40"]
    assert [hit.score for hit in merged] == pytest.approx([0.9, 0.5, 0.5, 0.5])


def test_k_beyond_the_documents_gives_all_of_them(asked: np.ndarray, tmp_path: Path) -> None:
    small = Corpus.build(f"{tmp_path}/small", sizes=[40], dim=16)
    config = EXACT.model_copy(update={"nlist": 1, "shards": 50})  # ten shards hold nothing
    searcher = Searcher.open(run_without_ray(job.run, config, **small.uris, output=f"{tmp_path}/index").uri)
    found = searcher.search(asked, k=1000)
    assert all({r.doc_id for r in results} == {f"d{i}" for i in range(40)} for results in found)
    assert all([r.score for r in rs] == sorted((r.score for r in rs), reverse=True) for rs in found)
    empty = next(
        number for number in searcher.shards if not len(Searcher.open(f"{tmp_path}/index", shards=[number]))
    )
    assert Searcher.open(f"{tmp_path}/index", shards=[empty]).search(asked, k=5) == [[] for _ in asked]
    assert searcher.search(asked[:0], k=5) == []


def test_a_missing_shard_is_named(copy: Path, asked: np.ndarray) -> None:
    (copy / "shard-00001/lists.faiss").unlink()
    with pytest.raises(ArtifactError, match=r"shard-00001/lists.faiss is missing"):
        Searcher.open(str(copy))
    assert len(Searcher.open(str(copy), shards=[0, 2])) == 427  # the others are still there to be searched


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_is_refused_by_its_name(copy: Path, damage: str) -> None:
    parts = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    assert {path.name for path in parts} == {
        *("coarse.faiss", "index.json", "lists.faiss", "kept.faiss", "ids.npy"),
        *("columns.arrow", "documents.arrow"),
    }
    for path in parts:
        whole = path.read_bytes()
        half = len(whole) // 2
        flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
        path.write_bytes(flipped if damage == "flip" else whole[:-1])
        with pytest.raises(ArtifactError, match=f"{path.relative_to(copy)} is damaged"):
            assert Searcher.open(str(copy)).store
        path.write_bytes(whole)
    assert len(Searcher.open(str(copy)).store) == 640


def test_a_searcher_opens_no_documents(searcher: Searcher, copy: Path, asked: np.ndarray) -> None:
    for path in copy.rglob("documents.arrow"):
        path.unlink()
    alone = Searcher.open(str(copy))
    for found, same in zip(alone.find(asked, k=5), searcher.find(asked, k=5), strict=True):
        assert (found.ids.tolist(), found.documents) == (same.ids.tolist(), ())
    assert alone.facets(most=7) == searcher.facets(most=7)
    np.testing.assert_array_equal(alone.vector("d400"), searcher.vector("d400"))
    with pytest.raises(ArtifactError, match=r"documents.arrow is missing"):
        alone.search(asked, k=5)


def test_an_index_of_an_earlier_release_is_searched(
    searcher: Searcher, copy: Path, asked: np.ndarray
) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["parts"] = {
        n: p for n, p in manifest["parts"].items() if not n.endswith((".npy", "columns.arrow"))
    }
    (copy / "manifest.json").write_text(json.dumps(manifest))
    earlier = Searcher.open(str(copy))
    assert earlier.search(asked, k=5) == searcher.search(asked, k=5)
    assert (earlier.get("d400"), earlier.get("none")) == (searcher.get("d400"), None)


def test_a_shard_that_does_not_exist_is_refused(uri: str) -> None:
    with pytest.raises(SearchError, match="has no shard 3: its shards are 0 to 2"):
        Searcher.open(uri, shards=[0, 3])


def _with(value: float) -> np.ndarray:
    broken = vectors(3, 16)
    broken[1] = value
    return broken


@pytest.mark.parametrize(
    ("asked", "k", "message"),
    [
        (vectors(2, 15), 5, r"queries have shape \(2, 15\), the index has embeddings of dim 16"),
        (vectors(2, 16)[0], 5, r"shape \(16,\)"),
        (np.ones((2, 16), np.int64), 5, "queries are int64"),
        (_with(np.nan), 5, "query 1 is not finite"),
        (_with(np.inf), 5, "query 1 is not finite"),
        (_with(0.0), 5, "query 1 is not finite or all zero"),
        (vectors(2, 16), 0, "k is 0: ask for 1 to 1000"),
        (vectors(2, 16), 1001, "k is 1001"),
    ],
)
def test_a_query_that_cannot_be_searched_is_refused(
    asked: np.ndarray, k: int, message: str, searcher: Searcher
) -> None:
    # Below the type checker of the tests, as a caller without one would.
    search = getattr(Searcher.find, "__wrapped__", Searcher.find)
    with pytest.raises(SearchError, match=message):
        search(searcher, asked, k=k)


def test_an_nprobe_of_zero_is_refused(searcher: Searcher, asked: np.ndarray) -> None:
    with pytest.raises(SearchError, match="nprobe is 0"):
        searcher.search(asked, k=3, nprobe=0)


def test_a_filter_finds_only_what_it_describes(searcher: Searcher, corpus: Corpus, asked: np.ndarray) -> None:
    wanted = np.array([i for i in range(640) if i % 7 in (2, 5)])
    found = searcher.search(asked, k=10, where={"topic": ["topic 2", "topic 5"]})
    _, exact = topk.search(asked, corpus.matrix[wanted], k=10)
    assert [[result.doc_id for result in results] for results in found] == [
        [f"d{wanted[row]}" for row in line] for line in exact
    ]
    assert searcher.search(asked, k=10, where={"topic": "none"}) == [[] for _ in asked]
    with pytest.raises(SearchError, match="no filter by 'price': this index has topic"):
        searcher.search(asked, k=10, where={"price": 3})


def _digits(numbers: list[int]) -> SparseRows:
    """Queries for documents whose numbers have these digits."""
    terms = [sorted({int(digit) for digit in str(number)}) for number in numbers]
    offsets = np.cumsum([0, *map(len, terms)])
    flat = np.concatenate([np.array(each, np.int32) for each in terms])
    return SparseRows(offsets, flat, np.ones(len(flat), np.float32))


def test_embeddings_and_terms_together_equal_brute_force(asked: np.ndarray, tmp_path: Path) -> None:
    corpus = Corpus.build(f"{tmp_path}/corpus", sizes=[300, 340], dim=16, sparse=True)
    index = run_without_ray(job.run, EXACT, **corpus.uris, output=f"{tmp_path}/index").uri
    searcher, mapped = Searcher.open(index), Searcher.open(index, mapped=True)
    numbers = [17, 404, 639, 8]
    queries_of = asked[: len(numbers)]
    terms = np.array([[str(i).count(str(t)) for t in range(10)] for i in range(640)], np.float32)
    weights = np.array([[float(str(t) in str(number)) for t in range(10)] for number in numbers], np.float32)
    dense, sparse = queries_of @ corpus.matrix.T, weights @ terms.T
    for where, rows in ((None, np.arange(640)), ({"topic": "topic 3"}, np.arange(3, 640, 7))):
        joining = Joining(dense_weight=0.3, candidates=1000)
        found, of_mapped = (
            each.search(queries_of, _digits(numbers), k=9, joining=joining, where=where)
            for each in (searcher, mapped)
        )
        assert of_mapped == found
        best = np.maximum(dense[:, rows], 0.0)  # nothing was tuned: the background is 0
        scores = 0.3 * best / best.max(1, keepdims=True)
        scores += 0.7 * sparse[:, rows] / np.maximum(sparse[:, rows].max(1, keepdims=True), 1e-9)
        exact = np.take_along_axis(rows[None], np.lexsort((np.tile(rows, (4, 1)), -scores))[:, :9], axis=1)
        np.testing.assert_allclose(
            [[r.score for r in line] for line in found], -np.sort(-scores, axis=1)[:, :9], atol=1e-5
        )
        assert [[r.doc_id for r in line] for line in found] == [[f"d{i}" for i in line] for line in exact]
    ranked = searcher.search(queries_of, _digits(numbers), k=5, joining=Joining(kind="reciprocal_rank"))
    assert all(line[0].score <= 2 / 61 for line in ranked)


def test_an_index_without_terms_says_so(searcher: Searcher, asked: np.ndarray) -> None:
    with pytest.raises(SearchError, match="this index has no terms"):
        searcher.search(asked[:1], _digits([3]), k=3)


def test_vectors_left_in_their_files_are_searched_as_those_in_memory(
    searcher: Searcher, uri: str, asked: np.ndarray, copy: Path
) -> None:
    mapped = Searcher.open(uri, mapped=True)
    with open("/proc/self/maps") as maps:
        assert sum(f"{uri}/shard-" in line and line.split()[5].endswith(".faiss") for line in maps) >= 3
    for where in (None, {"topic": "topic 3"}):
        assert mapped.search(asked, k=12, where=where) == searcher.search(asked, k=12, where=where)
    for part in (0, 300, 639):
        np.testing.assert_array_equal(mapped.vector(f"d{part}"), searcher.vector(f"d{part}"))
    damaged = copy / "shard-00001/kept.faiss"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match=r"shard-00001/kept\.faiss is damaged"):
        Searcher.open(str(copy), mapped=True)


def test_documents_are_found_in_more_text_than_a_column_of_one_chunk_holds() -> None:
    matrix = vectors(60, 8)
    lists = ivf.empty(families.train(matrix, Flat(), nlist=1, iterations=1, seed=0))
    ivf.add(lists, matrix)
    texts = pa.chunked_array([pa.array(["short", "x" * 2**27])] * 30)
    layout = Layout(
        *(8, 60, 1, "flat", "flat", 1), nprobe=1, refine_factor=1, recall=None, filters=("title",)
    )
    searcher = Searcher(layout, [Shard(0, lists, pa.table({"doc_id": texts, "title": texts}))])
    ((first, *_),) = searcher.search(matrix[58:59], k=1)
    assert first.doc_id == "short"
    assert first.document == {"doc_id": "short", "title": "short"}
