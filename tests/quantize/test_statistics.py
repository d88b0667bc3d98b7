import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.quantize import code_statistics, semantic_id
from scalingnote.quantize.code_statistics import CodeTally, PrefixCounts


def report(codes: np.ndarray, energy: np.ndarray, *, size: int) -> dict:
    """Of documents that are sorted by code."""
    return code_statistics.report(CodeTally.of(codes, energy, size=size), PrefixCounts.of(codes))


def test_statistics_of_a_corpus_counted_by_hand() -> None:
    codes = np.array([[0, 0], [0, 1], [1, 1], [1, 1]], np.uint16)
    energy = np.array([[1.0, 0.25], [0.5, 0.25], [0.25, 0.5], [0.25, 0.0]], np.float32)
    found = report(codes, energy, size=4)
    assert (found["documents"], found["distinct_codes"], found["collisions"]) == (4, 3, 1)
    assert (found["uniqueness"], found["largest_collision"]) == (0.5, 2)
    assert [level["usage"] for level in found["levels"]] == [0.5, 0.5]
    np.testing.assert_allclose([level["entropy_bits"] for level in found["levels"]], [1.0, 0.8112781])
    assert [level["residual_energy"] for level in found["levels"]] == [0.5, 0.25]
    assert [level["distinct_prefixes"] for level in found["levels"]] == [2, 3]


@given(st.integers(1, 80), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_ranges_add_up_to_the_whole(documents: int, levels: int, ranges: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, (documents, levels)).astype(np.uint16)
    codes = codes[np.lexsort(codes.T[::-1])]
    energy = rng.random((documents, levels)).astype(np.float32)
    # Two documents in a part: equal codes are divided between parts, too.
    keys = semantic_id.sortable(codes, np.arange(documents) // 2)
    ends = np.sort(rng.choice(keys, ranges - 1))
    bucket = np.searchsorted(ends, keys, "right")
    pieces = [np.flatnonzero(bucket == number) for number in range(ranges)]
    pieces = [piece for piece in pieces if len(piece)]
    tally = CodeTally(0, np.zeros(levels), np.zeros((levels, 4), np.int64))
    for piece in pieces:
        tally += CodeTally.of(codes[piece], energy[piece], size=4)
    tally = code_statistics.load_tally(code_statistics.dump_tally(tally))
    spread = PrefixCounts.merge(PrefixCounts.of(codes[piece]) for piece in pieces)
    found = code_statistics.report(tally, spread)
    whole = report(codes, energy, size=4)
    for level, expected in zip(found.pop("levels"), whole.pop("levels"), strict=True):
        assert level == pytest.approx(expected)
    assert found == whole
    prefixes = [len({tuple(row) for row in codes[:, : n + 1].tolist()}) for n in range(levels)]
    assert spread.distinct == prefixes


def test_drift_of_documents_like_the_fitted_and_unlike_them() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 8, (4000, 3))
    energy = np.outer(rng.random(4000) + 0.5, [0.6, 0.4, 0.3]).astype(np.float32)
    fitted, alike = (
        CodeTally.of(codes[half], energy[half], size=8) for half in (slice(2000), slice(2000, 4000))
    )
    found = code_statistics.drift(alike, fitted, refit_above=1.1)
    assert (found["documents"], found["refit"]) == (2000, False)
    for level in found["levels"]:
        assert level["residual_energy_ratio"] == pytest.approx(1, abs=0.05)
        assert level["usage_divergence_bits"] < 0.01
    # A third of the codes, and a fifth more left over after the last level.
    unlike = CodeTally.of(codes[:500] // 3, energy[:500] * [1, 1, 1.2], size=8)
    found = code_statistics.drift(unlike, fitted, refit_above=1.1)
    assert found["refit"]
    assert found["levels"][2]["residual_energy_ratio"] == pytest.approx(1.2, abs=0.05)
    assert found["levels"][0]["usage_divergence_bits"] > 0.3
    assert not code_statistics.drift(unlike, fitted, refit_above=1.3)["refit"]
    few = CodeTally.of(codes[:50], 2 * energy[:50], size=8)
    assert not code_statistics.drift(few, fitted, refit_above=1.1)["refit"]  # too few to tell
    apart = CodeTally(1, np.ones(1), np.array([[1, 0]])), CodeTally(1, np.ones(1), np.array([[0, 5]]))
    assert code_statistics.drift(*apart, refit_above=2.0)["levels"][0]["usage_divergence_bits"] == 1
    assert not code_statistics.drift(unlike, few, refit_above=0.5)["refit"]
    nothing = CodeTally(0, np.zeros(1), np.zeros((1, 2), np.int64))
    assert code_statistics.drift(nothing, apart[1], refit_above=2.0) == {
        "documents": 0,
        "levels": [],
        "refit": False,
    }
