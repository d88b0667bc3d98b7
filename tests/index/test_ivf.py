from itertools import pairwise

import numpy as np
import pytest

from scalingnote import topk
from scalingnote.errors import ConfigError
from scalingnote.index import ivf
from synthetic_corpus import queries, vectors

DIM = 24
SETTINGS = {"nlist": 12, "m": 6, "nbits": 6, "iterations": 5, "seed": 0}


@pytest.fixture(scope="module")
def documents() -> np.ndarray:
    return vectors(1200, DIM)


@pytest.fixture(scope="module")
def asked(documents: np.ndarray) -> np.ndarray:
    return queries(documents, 40)


def _filled(quantizer: ivf.Quantizer, *pieces: np.ndarray) -> ivf.Lists:
    lists = ivf.empty(quantizer)
    for piece in pieces:
        ivf.add(lists, piece)
    return lists


def _search(
    quantizer: ivf.Quantizer, lists: ivf.Lists, asked: np.ndarray, *, k: int, nprobe: int, factor: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    chosen = ivf.choose_lists(asked, quantizer.centroids, nprobe=nprobe)
    return ivf.search(lists, asked, chosen=chosen, k=k, refine_factor=factor)


def _recall(found: np.ndarray, exact: np.ndarray) -> float:
    pairs = zip(found.tolist(), exact.tolist(), strict=True)
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in pairs]))


def test_all_lists_and_kept_floats_equal_exact_search(documents: np.ndarray, asked: np.ndarray) -> None:
    quantizer = ivf.train(documents, **SETTINGS, refine="flat")
    lists = _filled(quantizer, documents)
    # Every document is a candidate: nothing is left to the PQ codes.
    scores, rows = _search(quantizer, lists, asked, k=10, nprobe=12, factor=120)
    exact_scores, exact_rows = topk.search(asked, documents, k=10)
    np.testing.assert_array_equal(rows, exact_rows)
    np.testing.assert_allclose(scores, exact_scores, atol=1e-6)


def test_recall_rises_with_nprobe_and_with_refinement(documents: np.ndarray, asked: np.ndarray) -> None:
    exact = topk.search(asked, documents, k=10)[1]
    by_refine = {}
    for refine in ("none", "sq8", "flat"):
        quantizer = ivf.train(documents, **SETTINGS, refine=refine)
        lists = _filled(quantizer, documents)
        by_nprobe = [_recall(_search(quantizer, lists, asked, k=10, nprobe=n)[1], exact) for n in (1, 3, 12)]
        assert by_nprobe == sorted(by_nprobe)
        by_refine[refine] = by_nprobe[-1]
    assert by_refine["none"] + 0.1 < by_refine["sq8"]
    assert by_refine["sq8"] > 0.9
    assert by_refine["flat"] > 0.9


@pytest.mark.parametrize("refine", ["none", "sq8", "flat"])
def test_merged_shards_equal_one_index(refine: str, documents: np.ndarray, asked: np.ndarray) -> None:
    quantizer = ivf.train(documents, **SETTINGS, refine=refine)
    whole = _search(quantizer, _filled(quantizer, documents), asked, k=15, nprobe=4, factor=80)
    bounds = [0, 500, 500, 1200]  # the second shard is empty
    scores, rows = [], []
    for start, stop in pairwise(bounds):
        shard = _filled(quantizer, documents[start:stop])
        found = _search(quantizer, shard, asked, k=15, nprobe=4, factor=80)
        scores.append(found[0])
        rows.append(np.where(found[1] < 0, -1, found[1] + start))
    merged = topk.merge(np.concatenate(scores, axis=1), np.concatenate(rows, axis=1), k=15)
    np.testing.assert_array_equal(merged[0], whole[0])
    if refine != "none":  # PQ codes alone tie, and a tie at the last place is anyone's
        np.testing.assert_array_equal(merged[1], whole[1])


def test_files_give_back_the_shard_without_the_shared_centroids(
    documents: np.ndarray, asked: np.ndarray
) -> None:
    quantizer = ivf.train(documents, **SETTINGS, refine="sq8")
    lists = _filled(quantizer, documents[:700], documents[700:])
    files = ivf.dump_lists(lists)
    centroids = ivf.load_centroids(ivf.dump_centroids(quantizer.centroids))
    np.testing.assert_array_equal(centroids, quantizer.centroids)
    again = ivf.load(centroids, *files)
    for a, b in zip(
        _search(quantizer, again, asked, k=9, nprobe=5),
        _search(quantizer, lists, asked, k=9, nprobe=5),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    stored = len(documents) * (5 + 8)  # 6 codes of 6 bits fill 5 bytes; a row number takes 8
    codebooks = (1 << SETTINGS["nbits"]) * DIM * 4
    assert len(files[0]) < stored + codebooks + SETTINGS["nlist"] * 8 + 400  # no room for centroids


def test_training_and_filling_are_deterministic(documents: np.ndarray) -> None:
    one, two = (ivf.train(documents, **SETTINGS, refine="sq8") for _ in range(2))
    assert ivf.dump_lists(_filled(one, documents)) == ivf.dump_lists(_filled(two, documents))
    pieces = _filled(one, documents[:100], documents[100:])
    assert ivf.dump_lists(pieces) == ivf.dump_lists(_filled(one, documents))


def test_fewer_documents_than_k_leave_the_rest_empty(documents: np.ndarray, asked: np.ndarray) -> None:
    quantizer = ivf.train(documents, **SETTINGS, refine="sq8")
    scores, rows = _search(quantizer, _filled(quantizer, documents[:3]), asked, k=10, nprobe=12)
    assert (np.sort(rows[:, :3], axis=1) == [0, 1, 2]).all()
    assert (rows[:, 3:] == -1).all()
    assert np.isneginf(scores[:, 3:]).all()
    none = _search(quantizer, ivf.empty(quantizer), asked, k=10, nprobe=12)
    assert (none[1] == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m": 7}, r"index.m=7 does not divide .* dim 24: set index.m=6"),
        ({"nlist": 1201}, r"index.nlist=1201 needs as many training documents, found 1200"),
        ({"nbits": 11}, r"index.nbits=11 needs 2048 training documents, found 1200: set index.nbits=10"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(
    change: dict[str, int], message: str, documents: np.ndarray
) -> None:
    with pytest.raises(ConfigError, match=message):
        ivf.train(documents, **{**SETTINGS, **change}, refine="none")


@pytest.mark.parametrize(
    ("documents", "trained", "nlist"),
    [(1, 1, 1), (390, 390, 10), (10_000, 10_000, 256), (10**6, 39_000, 1000)],
)
def test_default_nlist_is_four_roots_bounded_by_the_sample(documents: int, trained: int, nlist: int) -> None:
    assert ivf.default_nlist(documents, train_documents=trained) == nlist


def test_default_m_divides_the_dimension() -> None:
    assert [ivf.default_m(dim) for dim in (1, 6, 30, 128, 768)] == [1, 1, 6, 32, 192]
