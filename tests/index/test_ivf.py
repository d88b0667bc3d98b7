from pathlib import Path

import faiss
import numpy as np
import pytest

from scalingnote.core import topk
from scalingnote.core.errors import ConfigError
from scalingnote.index import families, ivf
from scalingnote.index.config import (
    IVFPQ,
    Family,
    FastScan,
    Flat,
    IndexConfig,
    RaBitQ,
    Refine,
    ScalarQuantized,
)
from synthetic_corpus import queries, vectors

DIM, LISTS = 24, 12
SETTINGS = {"nlist": LISTS, "seed": 0}
FAMILIES = [FastScan(), IVFPQ(m=6, nbits=6), ScalarQuantized(), RaBitQ(), Flat()]
EXACT = FastScan(refine="flat")
by_kind = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)


@pytest.fixture(scope="module")
def documents() -> np.ndarray:
    return vectors(1200, DIM)


@pytest.fixture(scope="module")
def query_vectors(documents: np.ndarray) -> np.ndarray:
    return queries(documents, 40)


def _train(documents: np.ndarray, family: Family) -> families.Quantizer:
    return families.train(documents, family, **SETTINGS)


def _fill(quantizer: families.Quantizer, *pieces: np.ndarray) -> ivf.Lists:
    lists = ivf.empty(quantizer)
    for piece in pieces:
        ivf.add(lists, piece)
    return lists


def _search(
    lists: ivf.Lists,
    query_vectors: np.ndarray,
    *,
    k: int,
    nprobe: int,
    factor: int = 4,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    chosen = ivf.choose_lists(query_vectors, lists.coarse, nprobe=nprobe)
    candidates = ivf.candidates(
        lists, query_vectors, chosen=chosen, k=k, refine_factor=factor, allowed=allowed
    )
    return topk.merge(*candidates, k=k)


def _recall(found: np.ndarray, exact: np.ndarray) -> float:
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))


@pytest.mark.parametrize("family", [EXACT, IVFPQ(m=6, nbits=6, refine="flat"), RaBitQ(refine="flat"), Flat()])
def test_all_lists_and_kept_floats_equal_exact_search(
    family: Family, documents: np.ndarray, query_vectors: np.ndarray
) -> None:
    quantizer = _train(documents, family)
    lists = _fill(quantizer, documents)
    # Every document is a candidate, so codes do not change the result.
    scores, rows = _search(lists, query_vectors, k=10, nprobe=LISTS, factor=120)
    exact_scores, exact_rows = topk.search(query_vectors, documents, k=10)
    np.testing.assert_array_equal(rows, exact_rows)
    np.testing.assert_allclose(scores, exact_scores, atol=1e-6)


@by_kind
def test_vectors_of_any_length_are_found_by_inner_product(
    family: Family, documents: np.ndarray, query_vectors: np.ndarray
) -> None:
    lengths = np.random.default_rng(4).uniform(4, 12, (len(documents), 1)).astype(np.float32)
    longer = documents * lengths
    exact_scores, exact = topk.search(query_vectors, longer, k=10)
    assert (exact != topk.search(query_vectors, documents, k=10)[1]).any()
    scores, rows = _search(_fill(_train(longer, family), longer), query_vectors, k=10, nprobe=LISTS)
    assert _recall(rows, exact) > 0.9
    if families.refine_of(family) == "flat":
        np.testing.assert_allclose(scores, exact_scores, rtol=1e-5)


@by_kind
def test_read_and_mapped_files_give_the_same_lists(
    family: Family, documents: np.ndarray, query_vectors: np.ndarray, tmp_path: Path
) -> None:
    quantizer = _train(documents, family)
    lists = _fill(quantizer, documents)
    files = [tmp_path / f"{number}.faiss" for number in range(2)]
    paths = [file for file, data in zip(files, ivf.dump_files(lists), strict=False) if file.write_bytes(data)]
    expected = _search(lists, query_vectors, k=10, nprobe=3)
    loaded = ivf.load(families.parse(quantizer.coarse), *(file.read_bytes() for file in paths))
    for opened in (loaded, *(ivf.read(lists.coarse, paths, mapped=mapped) for mapped in (False, True))):
        for values, expected_values in zip(
            _search(opened, query_vectors, k=10, nprobe=3), expected, strict=True
        ):
            np.testing.assert_array_equal(values, expected_values)


@by_kind
def test_recall_rises_with_nprobe(family: Family, documents: np.ndarray, query_vectors: np.ndarray) -> None:
    exact = topk.search(query_vectors, documents, k=10)[1]
    quantizer = _train(documents, family)
    lists = _fill(quantizer, documents)
    recalls = [_recall(_search(lists, query_vectors, k=10, nprobe=n)[1], exact) for n in (1, 3, LISTS)]
    assert recalls == sorted(recalls)
    assert recalls[-1] > 0.9


@pytest.mark.parametrize("codes", [FastScan, IVFPQ, RaBitQ])
def test_kept_vectors_raise_recall_above_codes_only(
    codes: type[Family], documents: np.ndarray, query_vectors: np.ndarray
) -> None:
    exact = topk.search(query_vectors, documents, k=10)[1]
    recalls = []
    for refine in ("none", "sq8", "flat"):
        quantizer = _train(documents, codes(refine=refine))
        lists = _fill(quantizer, documents)
        recalls.append(_recall(_search(lists, query_vectors, k=10, nprobe=LISTS)[1], exact))
    assert recalls[0] + 0.05 < recalls[1] <= recalls[2] + 0.02


@by_kind
def test_shards_merged_in_memory_equal_one_index(
    family: Family, documents: np.ndarray, query_vectors: np.ndarray
) -> None:
    quantizer = _train(documents, family)
    expected = _search(_fill(quantizer, documents), query_vectors, k=15, nprobe=4)
    pieces = (documents[:500], documents[:0], documents[500:900], documents[900:])
    merged = ivf.merge([_fill(quantizer, piece) for piece in pieces])
    assert len(merged) == len(documents)
    results = _search(merged, query_vectors, k=15, nprobe=4)
    np.testing.assert_array_equal(results[0], expected[0])
    if families.refine_of(family) != "none":
        np.testing.assert_array_equal(results[1], expected[1])


@pytest.mark.parametrize("refine", ["flat", "sq8"])
def test_scores_are_those_of_the_kept_vectors(refine: Refine, documents: np.ndarray) -> None:
    """Check that equal documents have equal scores among any other candidates."""
    repeated = documents[:300].copy()
    repeated[50:60] = repeated[0]
    kept = _fill(_train(repeated, IVFPQ(m=6, nbits=6, refine=refine)), repeated).kept
    query_vectors = queries(repeated, 2)
    rows = np.stack([np.arange(300), np.arange(300)[::-1]])
    rows[0, 5] = -1
    scores = ivf.scores(kept, query_vectors, rows)
    exact = np.einsum("qd,qcd->qc", query_vectors, ivf.vectors(kept, np.arange(300))[rows])
    np.testing.assert_allclose(scores, np.where(rows < 0, -np.inf, exact), atol=1e-5)
    for q, c in [(0, 7), (1, 13), (1, 299)]:
        assert ivf.scores(kept, query_vectors[q : q + 1], rows[q : q + 1, c : c + 1])[0, 0] == scores[q, c]
    assert len({*scores[0, 50:60].tolist()}) == 1


def test_lists_of_a_shard_do_not_contain_the_centroids(documents: np.ndarray) -> None:
    quantizer = _train(documents, IVFPQ(m=6, nbits=6))
    codes = ivf.dump_files(_fill(quantizer, documents))[0]
    code_bytes = len(documents) * (5 + 8)  # 6 codes of 6 bits fill 5 bytes; a row number takes 8
    codebooks = (1 << 6) * DIM * 4
    assert len(codes) < code_bytes + codebooks + LISTS * 8 + 400


@by_kind
def test_training_and_filling_are_deterministic(family: Family, documents: np.ndarray) -> None:
    one, two = (_train(documents, family) for _ in range(2))
    assert ivf.dump_files(_fill(one, documents)) == ivf.dump_files(_fill(two, documents))
    pieces = _fill(one, documents[:100], documents[100:])
    assert ivf.dump_files(pieces) == ivf.dump_files(_fill(one, documents))


@by_kind
def test_fewer_documents_than_k_leave_the_rest_empty(
    family: Family, documents: np.ndarray, query_vectors: np.ndarray
) -> None:
    quantizer = _train(documents, family)
    scores, rows = _search(_fill(quantizer, documents[:3]), query_vectors, k=10, nprobe=LISTS)
    assert (np.sort(rows[:, :3], axis=1) == [0, 1, 2]).all()
    assert (rows[:, 3:] == -1).all()
    assert np.isneginf(scores[:, 3:]).all()
    none = _search(ivf.empty(quantizer), query_vectors, k=10, nprobe=LISTS)
    assert (none[1] == -1).all()


@pytest.mark.parametrize(
    ("family", "nlist", "message"),
    [
        (IVFPQ(m=7), 12, r"index.family.m=7 does not divide .* dim 24: set index.family.m=6"),
        (FastScan(m=7), 12, r"index.family.m=7 does not divide .* dim 24: set index.family.m=12"),
        (FastScan(), 21, r"index.nlist=21 needs 21 training documents, found 20"),
        (IVFPQ(), 12, r"codes of 8 bits need 256 training documents, found 20: set index.family.kind=flat"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(
    family: Family, nlist: int, message: str, documents: np.ndarray
) -> None:
    with pytest.raises(ConfigError, match=message):
        families.train(documents[:20], family, nlist=nlist, seed=0)


def test_sub_quantizers_divide_the_dimension() -> None:
    assert [families.sub_quantizers(IVFPQ(), dim) for dim in (1, 6, 30, 128, 768)] == [1, 1, 6, 32, 192]
    assert [families.sub_quantizers(FastScan(), dim) for dim in (1, 6, 30, 128)] == [1, 3, 15, 64]


@pytest.mark.parametrize("count", [64, 100, 777])
def test_two_levels_give_all_lists_and_similar_clusters(count: int) -> None:
    documents = vectors(3000, DIM)
    two_levels, one_level = (
        fit(documents, count, seed=0) for fit in (families._two_levels, families._kmeans)
    )
    assert two_levels.shape == (count, DIM)
    energy = [
        float((1 - (documents @ centroids.T).max(axis=1)).mean()) for centroids in (two_levels, one_level)
    ]
    assert energy[0] < 1.1 * energy[1]


def test_each_cluster_has_centroids_in_proportion_to_its_size() -> None:
    shares = families._shares(np.array([100, 1, 0, 2, 50]), 40)
    assert shares.sum() == 40
    assert shares[[1, 2]].tolist() == [1, 0]
    assert 0 < shares[3] <= 2
    assert shares[0] > shares[4] > shares[3]
    assert families._shares(np.array([3, 3, 90]), 3).tolist() == [1, 1, 1]


def test_a_graph_finds_few_lists_and_a_comparison_finds_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = vectors(2000, DIM)
    flat = families.train(documents, FastScan(), nlist=128, seed=0)
    monkeypatch.setattr(families, "GRAPH_LISTS", 100)
    graph = families.train(documents, FastScan(), nlist=128, seed=0)
    np.testing.assert_array_equal(graph.centroids, flat.centroids)
    query_vectors = queries(documents, 40)
    coarse = families.parse(flat.coarse), families.parse(graph.coarse)
    assert isinstance(coarse[1], faiss.IndexHNSW)
    few, all_lists = (
        [ivf.choose_lists(query_vectors, each, nprobe=n)[1] for each in coarse] for n in (8, 128)
    )
    assert (few[0] == few[1]).mean() > 0.95
    np.testing.assert_array_equal(*all_lists)
    lists = [ivf.empty(each) for each in (flat, graph)]
    for each in lists:
        ivf.add(each, documents)
    results = [_search(each, query_vectors, k=10, nprobe=128, factor=8) for each in lists]
    assert (results[0][1] == results[1][1]).mean() > 0.99


def test_the_training_sample_grows_with_the_lists_to_a_limit() -> None:
    config = IndexConfig(train_documents=1_000_000)
    assert families.sample_size(config, 50_000, nlist=100) == 50_000
    assert families.sample_size(config, 10**7, nlist=100) == 200_000
    assert families.sample_size(config, 10**7, nlist=10_000) == 390_000
    assert families.sample_size(config, 10**8, nlist=40_000) == 1_000_000
    for documents, trained, nlist in [
        (1, 1, 1),
        (390, 390, 10),
        (10_000, 10_000, 256),
        (10**6, 39_000, 1000),
    ]:
        assert families.default_nlist(documents, train_documents=trained) == nlist
    assert families.default_nlist(10**14, train_documents=10**9) == 1 << 20
