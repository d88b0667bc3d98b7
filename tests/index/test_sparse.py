"""Sparse search, compared with the computation of every score: masks, ties, segments, files."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core.errors import ArtifactError, DataError, SearchError
from scalingnote.index import postings, sparse
from scalingnote.models.sparse_query import SparseRows

VOCABULARY = 12
# Few values give many ties; null documents, documents without terms and impacts of 0 are included.
Document = dict[int, float] | None
documents_of = st.lists(
    st.none()
    | st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([0, 0.5, 1.0, 1.5]), max_size=5),
    max_size=40,
)
queries_of = st.lists(
    st.dictionaries(st.integers(0, VOCABULARY + 2), st.sampled_from([1.0, 2.0]), max_size=4), max_size=4
)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(postings, "DOCUMENTS_PER_BLOCK", 7)
        yield


def columns(documents: Sequence[Document]) -> tuple[pa.Array, pa.Array]:
    """Return terms and impacts in the form of an embeddings artifact."""
    ordered = [None if d is None else sorted(d.items()) for d in documents]
    terms = [None if d is None else [term for term, _ in d] for d in ordered]
    impacts = [None if d is None else [np.float16(impact) for _, impact in d] for d in ordered]
    return pa.array(terms, pa.list_(pa.int32())), pa.array(impacts, pa.list_(pa.float16()))


def rows_of(queries: Sequence[dict[int, float]]) -> SparseRows:
    items = [sorted(query.items()) for query in queries]
    flat = [item for query in items for item in query]
    return SparseRows(
        np.cumsum([0, *map(len, items)], dtype=np.int64),
        np.array([term for term, _ in flat], np.int32),
        np.array([value for _, value in flat], np.float32),
    )


def brute_force(
    documents: Sequence[Document], query: dict[int, float], k: int, allowed: np.ndarray
) -> tuple[list[float], list[int]]:
    scores = np.zeros(len(documents), np.float32)
    for row, document in enumerate(documents):
        for term, value in sorted(query.items()):
            scores[row] += np.float32(value) * np.float32((document or {}).get(term, 0))
    order = [row for row in np.argsort(-scores, kind="stable") if scores[row] > 0 and allowed[row]][:k]
    rest = k - len(order)
    return [*scores[order].tolist(), *[-np.inf] * rest], [*map(int, order), *[-1] * rest]


@settings(max_examples=40)
@given(documents_of, queries_of, st.integers(1, 9), st.data())
def test_search_equals_brute_force(documents, queries, k, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(documents)), max_size=3)))
    pieces = [documents[a:b] for a, b in zip([0, *cuts], [*cuts, len(documents)], strict=True)]
    segments = [postings.build(*columns(piece)) for piece in pieces]
    draw = st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))
    allowed = data.draw(st.none() | draw.map(lambda mask: np.array(mask, bool)))
    all_allowed = np.ones(len(documents), bool) if allowed is None else allowed

    scores, rows = sparse.search(segments, rows_of(queries), k=k, allowed=allowed)
    expected = [brute_force(documents, query, k, all_allowed) for query in queries]
    assert list(zip(scores.tolist(), rows.tolist(), strict=True)) == expected
    # Rows that search found, and all others, have the score of search.
    all_rows = np.tile(np.arange(-1, len(documents)), (len(queries), 1))
    row_scores = sparse.scores_of(segments, rows_of(queries), all_rows)
    assert row_scores.shape == all_rows.shape
    for query, row in zip(queries, row_scores, strict=True):
        best_scores, order = brute_force(documents, query, len(documents), np.ones(len(documents), bool))
        full = np.zeros(len(documents), np.float32)
        full[[o for o in order if o >= 0]] = [s for s in best_scores if s > 0]
        assert row.tolist() == [0.0, *full.tolist()]


@settings(max_examples=20)
@given(documents_of, st.data())
def test_merged_segments_equal_those_built_of_kept_documents(documents, data):
    cut = data.draw(st.integers(0, len(documents)))
    segments = [postings.build(*columns(piece)) for piece in (documents[:cut], documents[cut:])]
    mask = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents))), bool
    )
    kept_documents = [document for document, keep in zip(documents, mask, strict=True) if keep]
    assert postings.dump(postings.merge(segments)) == postings.dump(postings.build(*columns(documents)))
    assert postings.dump(postings.merge(segments, kept=mask)) == postings.dump(
        postings.build(*columns(kept_documents))
    )


def test_appended_segments_remain_few_and_keep_their_rows():
    documents = [{row % VOCABULARY: 1.0, VOCABULARY: 1.0} for row in range(100)]
    segments: tuple[postings.Postings, ...] = ()
    for document in documents:
        segments = postings.append(segments, postings.build(*columns([document])))
        sizes = [len(segment) for segment in segments]
        assert sizes == sorted(set(sizes), reverse=True)
    assert sizes == [64, 32, 4]
    one_segment = postings.build(*columns(documents))
    queries = rows_of([{3: 1.0}, {VOCABULARY: 2.0}])
    for one, other in zip(
        sparse.search(segments, queries, k=20), sparse.search([one_segment], queries, k=20), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=20)
@given(documents_of, st.integers(1, 4))
def test_the_strongest_terms_are_kept(documents, k):
    def strongest(document):
        order = sorted((document or {}).items(), key=lambda item: (-item[1], item[0]))
        return dict(order[:k])

    segment = postings.build(*columns(documents), strongest=k)
    expected = postings.build(*columns([strongest(document) for document in documents]))
    assert postings.dump(segment) == postings.dump(expected)


def test_threads_share_postings():
    rng = np.random.default_rng(0)
    documents = [dict.fromkeys(rng.choice(VOCABULARY, 3, replace=False).tolist(), 1.0) for _ in range(200)]
    segments = [postings.build(*columns(documents))]
    queries = [rows_of([{int(t): 1.0} for t in rng.choice(VOCABULARY, 3)]) for _ in range(30)]
    one_by_one = [sparse.search(segments, query, k=5) for query in queries]
    with ThreadPoolExecutor(4) as pool:
        in_threads = list(pool.map(lambda query: sparse.search(segments, query, k=5), queries))
    np.testing.assert_equal(in_threads, one_by_one)


def random_postings(count: int = 30) -> postings.Postings:
    rng = np.random.default_rng(1)
    return postings.build(
        *columns(
            [dict.fromkeys(rng.choice(VOCABULARY, 4, replace=False).tolist(), 0.5) for _ in range(count)]
        )
    )


def test_files_are_mapped_without_a_copy(tmp_path):
    original = random_postings()
    mapped = {}
    for name, data in postings.dump(original).items():
        (tmp_path / name).write_bytes(data)
        mapped[name] = pa.memory_map(str(tmp_path / name)).read_buffer()
    for files in (mapped, postings.dump(original)):
        loaded = postings.load(files)
        assert postings.dump(loaded) == postings.dump(original)
        assert len(loaded) == 30
        assert not loaded.rows.flags.writeable
    assert not postings.load(mapped).rows.flags.owndata
    queries = rows_of([{1: 1.0, 5: 2.0}])
    np.testing.assert_equal(
        sparse.search([postings.load(mapped)], queries, k=4), sparse.search([original], queries, k=4)
    )


def test_postings_without_documents_can_be_searched():
    empty = postings.build(*columns([]))
    assert postings.dump(postings.load(postings.dump(empty))) == postings.dump(postings.merge([]))
    scores, rows = sparse.search([empty], rows_of([{1: 1.0}]), k=3)
    assert np.isneginf(scores).all()
    assert (rows == -1).all()
    assert sparse.search([random_postings()], rows_of([]), k=3)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("rows", lambda a: np.where(np.arange(len(a)) == 9, 7, a)),  # a document that is not in the block
        ("rows", lambda a: a[::-1]),
        ("rows", lambda a: a[:-1]),
        ("rows", lambda a: a.astype(np.int32)),
        ("terms", lambda a: a[::-1]),
        ("terms", lambda a: a - 1),
        ("terms", lambda a: a[:, None]),
        ("offsets", lambda a: a + 1),
        ("offsets", lambda a: np.where(np.arange(len(a)) == 3, a[-1] + 1, a)),
        ("impacts", lambda a: np.where(np.arange(len(a)) == 2, np.float16(np.nan), a)),
        ("impacts", lambda a: -a),
        ("impacts", lambda a: a[:-1]),
        ("blocks", lambda a: a + 1),
        ("blocks", lambda a: a[:-1]),
        ("blocks", lambda a: a[:0]),
        ("blocks", lambda a: a.ravel()),
    ],
)
def test_files_that_do_not_fit_are_refused(part, change):
    files, name = postings.dump(random_postings()), f"sparse.{part}.npy"
    file = io.BytesIO()
    np.save(file, change(np.load(io.BytesIO(files[name]))))
    with pytest.raises(ArtifactError, match=r"sparse\.\w+\.npy .*re-run index"):
        postings.load({**files, name: file.getvalue()})


def test_truncated_and_missing_files_are_named():
    files = postings.dump(random_postings())
    with pytest.raises(ArtifactError, match=r"sparse\.rows\.npy is damaged"):
        postings.load({**files, "sparse.rows.npy": files["sparse.rows.npy"][:-1]})
    with pytest.raises(ArtifactError, match=r"sparse\.terms\.npy is damaged"):
        postings.load({**files, "sparse.terms.npy": b"no array"})
    with pytest.raises(ArtifactError, match="has 30 documents, the shard has 31"):
        postings.load(files, documents=31)
    del files["sparse.impacts.npy"]
    with pytest.raises(ArtifactError, match=r"sparse\.impacts\.npy is missing"):
        postings.load(files)


@pytest.mark.parametrize(
    ("terms", "impacts", "message"),
    [
        ([[1], [3, 2]], [[1.0], [1.0, 1.0]], "document 1 has term 2 with impact 1.0"),
        ([[1], [2, 2]], [[1.0], [1.0, 1.0]], "document 1 has term 2"),
        ([[-1]], [[1.0]], "document 0 has term -1"),
        ([[1], [2]], [[1.0], [np.nan]], "document 1 has term 2 with impact nan"),
        ([[1], [2]], [[1.0], [-1.0]], "document 1 has term 2 with impact -1.0"),
        ([[1], [2]], [[1.0], [1e6]], "document 1 has term 2 with impact 1000000.0"),
        ([[1], [2]], [[1.0], []], "document 1 has 1 terms and 0 impacts"),
        ([[1]], [[1.0], []], "1 documents have terms and 2 have impacts"),
    ],
)
def test_documents_with_invalid_terms_are_named(terms, impacts, message):
    with pytest.raises(DataError, match=message):
        postings.build(pa.array(terms, pa.list_(pa.int32())), pa.array(impacts, pa.list_(pa.float32())))


@pytest.mark.parametrize(
    ("stop", "weight", "message"),
    [(1, np.nan, "not a finite number"), (2, 1, "offsets 0 to 2 for 1 terms and 1 weights")],
)
def test_invalid_queries_are_refused(stop, weight, message):
    queries = SparseRows(np.array([0, stop]), np.ones(1, np.int32), np.full(1, weight, np.float32))
    with pytest.raises(SearchError, match=message):
        sparse.search([random_postings()], queries, k=1)
    with pytest.raises(SearchError, match=message):
        sparse.scores_of([random_postings()], queries, np.array([[0]]))


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(SearchError, match="allowed has 3 rows, the segments have 30"):
        sparse.search([random_postings()], rows_of([{1: 1.0}]), k=1, allowed=np.ones(3, bool))
