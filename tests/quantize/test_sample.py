import numpy as np
import pytest

from scalingnote.quantize.kmeans import draw, shares


def chosen(rows: list[int], *, size: int, seed: int) -> list[np.ndarray]:
    takes = shares(rows, size=size, seed=seed)
    return [draw(count, take=takes[n], seed=seed, part=n) for n, count in enumerate(rows)]


@pytest.mark.parametrize("size", [0, 1, 17, 60, 1000])
@pytest.mark.parametrize("rows", [[10, 0, 25, 25], [1] * 60])
def test_the_sample_is_sorted_and_of_the_size_asked_for(rows: list[int], size: int) -> None:
    found = chosen(rows, size=size, seed=3)
    assert sum(map(len, found)) == min(size, 60)
    for count, part in zip(rows, found, strict=True):
        assert part.tolist() == sorted(set(part.tolist()))
        assert all(0 <= row < count for row in part)
        assert abs(len(part) - min(size, 60) * count / 60) < 1


def test_every_document_is_as_likely_to_be_sampled() -> None:
    hits = np.zeros(30)
    for seed in range(600):
        first, second = chosen([11, 19], size=6, seed=seed)
        hits[first] += 1
        hits[11 + second] += 1
    # 600 draws of 6 of 30: mean 120, standard deviation 9.8.
    assert hits.min() > 120 - 4.5 * 9.8
    assert hits.max() < 120 + 4.5 * 9.8


def test_a_corpus_of_billions_is_sampled_without_listing_it() -> None:
    takes = shares([100_000_001] * 40, size=123_456_789, seed=0)
    assert sum(takes) == 123_456_789
    assert set(takes) == {3_086_419, 3_086_420}
    assert takes == shares([100_000_001] * 40, size=123_456_789, seed=0)
    assert takes != shares([100_000_001] * 40, size=123_456_789, seed=5)
