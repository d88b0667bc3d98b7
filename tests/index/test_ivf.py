from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote import topk
from scalingnote.errors import ConfigError
from scalingnote.index import ivf
from scalingnote.index.config import IVFPQ, Family, FastScan, Flat, RaBitQ, ScalarQuantized
from synthetic_corpus import queries, vectors

DIM, LISTS = 24, 12
SETTINGS = {"nlist": LISTS, "iterations": 5, "seed": 0}
FAMILIES = [FastScan(), IVFPQ(m=6, nbits=6), ScalarQuantized(), RaBitQ(), Flat()]
EXACT = FastScan(refine="flat")
by_kind = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)


@pytest.fixture(scope="module")
def documents() -> np.ndarray:
    return vectors(1200, DIM)


@pytest.fixture(scope="module")
def asked(documents: np.ndarray) -> np.ndarray:
    return queries(documents, 40)


def _train(documents: np.ndarray, family: Family) -> ivf.Quantizer:
    return ivf.train(documents, family, **SETTINGS)


def _filled(quantizer: ivf.Quantizer, *pieces: np.ndarray) -> ivf.Lists:
    lists = ivf.empty(quantizer)
    for piece in pieces:
        ivf.add(lists, piece)
    return lists


def _search(
    lists: ivf.Lists,
    asked: np.ndarray,
    *,
    k: int,
    nprobe: int,
    factor: int = 4,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    chosen = ivf.choose_lists(asked, lists.coarse, nprobe=nprobe)
    return ivf.search(lists, asked, chosen=chosen, k=k, refine_factor=factor, allowed=allowed)


def _recall(found: np.ndarray, exact: np.ndarray) -> float:
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))


@pytest.mark.parametrize("family", [EXACT, IVFPQ(m=6, nbits=6, refine="flat"), RaBitQ(refine="flat"), Flat()])
def test_all_lists_and_kept_floats_equal_exact_search(
    family: Family, documents: np.ndarray, asked: np.ndarray
) -> None:
    quantizer = _train(documents, family)
    lists = _filled(quantizer, documents)
    # Every document is a candidate: nothing is left to the codes.
    scores, rows = _search(lists, asked, k=10, nprobe=LISTS, factor=120)
    exact_scores, exact_rows = topk.search(asked, documents, k=10)
    np.testing.assert_array_equal(rows, exact_rows)
    np.testing.assert_allclose(scores, exact_scores, atol=1e-6)


@by_kind
def test_recall_rises_with_nprobe(family: Family, documents: np.ndarray, asked: np.ndarray) -> None:
    exact = topk.search(asked, documents, k=10)[1]
    quantizer = _train(documents, family)
    lists = _filled(quantizer, documents)
    recalls = [_recall(_search(lists, asked, k=10, nprobe=n)[1], exact) for n in (1, 3, LISTS)]
    assert recalls == sorted(recalls)
    assert recalls[-1] > 0.9


@pytest.mark.parametrize("codes", [FastScan, IVFPQ, RaBitQ])
def test_kept_vectors_find_what_codes_alone_miss(
    codes: type[Family], documents: np.ndarray, asked: np.ndarray
) -> None:
    exact = topk.search(asked, documents, k=10)[1]
    recalls = []
    for refine in ("none", "sq8", "flat"):
        quantizer = _train(documents, codes(refine=refine))
        lists = _filled(quantizer, documents)
        recalls.append(_recall(_search(lists, asked, k=10, nprobe=LISTS)[1], exact))
    assert recalls[0] + 0.05 < recalls[1] <= recalls[2] + 0.02


@pytest.mark.parametrize("family", [*FAMILIES, FastScan(refine="none")], ids=str)
def test_merged_shards_equal_one_index(family: Family, documents: np.ndarray, asked: np.ndarray) -> None:
    quantizer = _train(documents, family)
    whole = _search(_filled(quantizer, documents), asked, k=15, nprobe=4, factor=80)
    bounds = [0, 500, 500, 1200]  # the second shard is empty
    scores, rows = [], []
    for start, stop in pairwise(bounds):
        shard = _filled(quantizer, documents[start:stop])
        found = _search(shard, asked, k=15, nprobe=4, factor=80)
        scores.append(found[0])
        rows.append(np.where(found[1] < 0, -1, found[1] + start))
    merged = topk.merge(np.concatenate(scores, axis=1), np.concatenate(rows, axis=1), k=15)
    np.testing.assert_allclose(merged[0], whole[0], atol=1e-6)
    if ivf.refine_of(family) != "none":  # codes alone tie, and a tie at the last place is anyone's
        np.testing.assert_array_equal(merged[1], whole[1])


@by_kind
def test_shards_merged_in_memory_are_one_index(
    family: Family, documents: np.ndarray, asked: np.ndarray
) -> None:
    quantizer = _train(documents, family)
    whole = _search(_filled(quantizer, documents), asked, k=15, nprobe=4)
    pieces = (documents[:500], documents[:0], documents[500:900], documents[900:])
    merged = ivf.merge([_filled(quantizer, piece) for piece in pieces])
    assert len(merged) == len(documents)
    found = _search(merged, asked, k=15, nprobe=4)
    np.testing.assert_array_equal(found[0], whole[0])
    if ivf.refine_of(family) != "none":
        np.testing.assert_array_equal(found[1], whole[1])


@by_kind
def test_only_allowed_rows_are_found(family: Family, documents: np.ndarray, asked: np.ndarray) -> None:
    quantizer = _train(documents, family)
    mask = np.random.default_rng(0).random(len(documents)) < 0.2
    lists = _filled(quantizer, documents)
    found = _search(lists, asked, k=10, nprobe=LISTS, allowed=ivf.bitmap(mask))
    left = np.flatnonzero(mask)
    assert mask[found[1]].all()
    assert _recall(found[1], left[topk.search(asked, documents[left], k=10)[1]]) > 0.9


@given(st.lists(st.integers(0, 1199), max_size=60, unique=True), st.integers(1, 12))
def test_scoring_all_rows_equals_exact_search_of_them(rows: list[int], k: int) -> None:
    asked = queries(_DOCUMENTS, 3)
    chosen = np.array(sorted(rows), np.int64)
    scores, found = ivf.score_all(_FLAT, asked, chosen, k=k)
    exact_scores, exact = topk.search(asked, _DOCUMENTS[chosen], k=k)
    np.testing.assert_array_equal(found, chosen[exact])
    np.testing.assert_allclose(scores, exact_scores, atol=1e-6)


_DOCUMENTS = vectors(1200, DIM)
_FLAT = _filled(ivf.train(_DOCUMENTS, Flat(), nlist=1, iterations=1, seed=0), _DOCUMENTS)


@by_kind
def test_files_give_back_the_shard_without_the_shared_centroids(
    family: Family, documents: np.ndarray, asked: np.ndarray
) -> None:
    quantizer = _train(documents, family)
    lists = _filled(quantizer, documents[:700], documents[700:])
    files = ivf.dump_files(lists)
    again = ivf.load(
        ivf.parse(ivf.dump(ivf.coarse_of(quantizer.centroids))),
        None if lists.index is None else files[0],
        None if lists.kept is None else files[-1],
    )
    for a, b in zip(
        _search(again, asked, k=9, nprobe=5),
        _search(lists, asked, k=9, nprobe=5),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_a_shards_lists_do_not_hold_the_centroids(documents: np.ndarray) -> None:
    quantizer = _train(documents, IVFPQ(m=6, nbits=6))
    codes = ivf.dump_files(_filled(quantizer, documents))[0]
    stored = len(documents) * (5 + 8)  # 6 codes of 6 bits fill 5 bytes; a row number takes 8
    codebooks = (1 << 6) * DIM * 4
    assert len(codes) < stored + codebooks + LISTS * 8 + 400


@by_kind
def test_training_and_filling_are_deterministic(family: Family, documents: np.ndarray) -> None:
    one, two = (_train(documents, family) for _ in range(2))
    assert ivf.dump_files(_filled(one, documents)) == ivf.dump_files(_filled(two, documents))
    pieces = _filled(one, documents[:100], documents[100:])
    assert ivf.dump_files(pieces) == ivf.dump_files(_filled(one, documents))


@by_kind
def test_fewer_documents_than_k_leave_the_rest_empty(
    family: Family, documents: np.ndarray, asked: np.ndarray
) -> None:
    quantizer = _train(documents, family)
    scores, rows = _search(_filled(quantizer, documents[:3]), asked, k=10, nprobe=LISTS)
    assert (np.sort(rows[:, :3], axis=1) == [0, 1, 2]).all()
    assert (rows[:, 3:] == -1).all()
    assert np.isneginf(scores[:, 3:]).all()
    none = _search(ivf.empty(quantizer), asked, k=10, nprobe=LISTS)
    assert (none[1] == -1).all()


@pytest.mark.parametrize(
    ("family", "nlist", "message"),
    [
        (IVFPQ(m=7), 12, r"index.family.m=7 does not divide .* dim 24: set index.family.m=6"),
        (FastScan(m=7), 12, r"index.family.m=7 does not divide .* dim 24: set index.family.m=12"),
        (FastScan(), 21, r"index.nlist=21 needs as many training documents, found 20"),
        (IVFPQ(), 12, r"codes of 8 bits need 256 training documents, found 20: set index.family.kind=flat"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(
    family: Family, nlist: int, message: str, documents: np.ndarray
) -> None:
    with pytest.raises(ConfigError, match=message):
        ivf.train(documents[:20], family, nlist=nlist, iterations=1, seed=0)


@pytest.mark.parametrize(
    ("documents", "trained", "nlist"),
    [(1, 1, 1), (390, 390, 10), (10_000, 10_000, 256), (10**6, 39_000, 1000)],
)
def test_default_nlist_is_four_roots_bounded_by_the_sample(documents: int, trained: int, nlist: int) -> None:
    assert ivf.default_nlist(documents, train_documents=trained) == nlist


def test_sub_quantizers_divide_the_dimension() -> None:
    assert [ivf.sub_quantizers(IVFPQ(), dim) for dim in (1, 6, 30, 128, 768)] == [1, 1, 6, 32, 192]
    assert [ivf.sub_quantizers(FastScan(), dim) for dim in (1, 6, 30, 128)] == [1, 3, 15, 64]
