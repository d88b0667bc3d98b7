"""Documents sorted by code in ranges have the files and statistics of a sort of all codes in one process."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core.errors import DataError
from scalingnote.quantize import naming, semantic_id
from scalingnote.quantize.naming import PrefixCounts, tally
from scalingnote.storage.artifact import Artifact, Draft, write_table
from synthetic_corpus import Settings

LEVELS, SIZE = 3, 6
SIZES = [70, 0, 130, 40, 160, 5, 95]
Corpus = tuple[list[str], np.ndarray, np.ndarray]


def corpus(seed: int, *, crowded: bool = False) -> Corpus:
    """Draw names, codes that collide often, and energies; if crowded, a third of the codes are equal."""
    rng = np.random.default_rng(seed)
    codes = np.minimum(rng.geometric(0.4, (sum(SIZES), LEVELS)) - 1, SIZE - 1)
    if crowded:
        codes[rng.random(len(codes)) < 0.3] = [2, 1, 0]
    return [f"d{i}" for i in range(sum(SIZES))], codes, rng.random(codes.shape).astype(np.float32)


def sort(
    folder: Path, of: Corpus, sizes: list[int] = SIZES, earlier: Artifact | None = None
) -> tuple[naming.Counted, Artifact]:
    doc_ids, codes, energy = of
    draft = Draft(str(folder), kind="semantic_ids", config=Settings(), parents={})
    parts = [f"codes/part-{i:05d}.parquet" for i in range(len(sizes))]
    for part, end, rows in zip(parts, np.cumsum(sizes), sizes, strict=True):
        ours = slice(end - rows, end)
        names = pa.chunked_array([doc_ids[ours]], pa.string())
        sampled = (np.arange(rows) % 3 == 0) & (earlier is None)
        write_table(draft.work(part), naming.coded_table(names, codes[ours], energy[ours], sampled))
    counted = naming.sort(draft, parts, sizes, levels=LEVELS, size=SIZE, earlier=earlier, each=map)
    return counted, draft.commit(counts={})


def by_code(artifact: Artifact) -> pa.Table:
    names = [one["name"] for one in artifact.read_json(semantic_id.BY_CODE_SUMMARY)]
    return pa.concat_tables(map(artifact.table, names)).combine_chunks()


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("rows", [50, 200, 10_000])
def test_ranges_have_the_files_and_statistics_of_one_sort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, crowded: bool
) -> None:
    monkeypatch.setattr(naming, "ROWS", rows)
    doc_ids, codes, energy = corpus(0, crowded=crowded)
    counted, artifact = sort(tmp_path, (doc_ids, codes, energy))
    assert len(artifact.names("by_code/")) > 2 or rows == 10_000
    suffix = semantic_id.suffixes(pa.array(doc_ids))
    order = np.lexsort((suffix, *codes.T[::-1]))
    ordered = by_code(artifact)
    assert ordered["doc_id"].to_pylist() == [doc_ids[i] for i in order]
    assert ordered["suffix"].to_pylist() == suffix[order].tolist()
    for level in range(LEVELS):
        assert ordered[f"code_{level}"].to_pylist() == codes[order, level].tolist()

    statistics = naming.report(counted.all, counted.spread)
    expected = naming.report(tally(codes, energy, size=SIZE), PrefixCounts.of(codes[order]))
    for level, other in zip(statistics.pop("levels"), expected.pop("levels"), strict=True):
        assert level == pytest.approx(other)
    assert statistics == expected
    unseen = np.concatenate([np.arange(size) % 3 > 0 for size in SIZES])
    expected_unseen = tally(codes[unseen], energy[unseen], size=SIZE)
    assert {name: counted.unseen[name].tolist() for name in ("documents", "usage")} == {
        name: expected_unseen[name].tolist() for name in ("documents", "usage")
    }
    pieces = list(semantic_id.ByCode(artifact).pieces([2, 1, 0]))
    assert sum(len(piece.suffix) for piece in pieces) == (codes == [2, 1, 0]).all(axis=1).sum()
    assert len(pieces) > 1 or rows > 50 or not crowded  # documents with equal codes may fill many ranges


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(5, 200), st.integers(0, 99))
def test_ids_are_unique_whatever_the_number_of_parts_and_ranges(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], rows: int, seed: int
) -> None:
    sizes = sizes if sum(sizes) else [1]
    doc_ids, codes, energy = (values[: sum(sizes)] for values in corpus(seed, crowded=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naming, "ROWS", rows)
        _, artifact = sort(tmp_path_factory.mktemp("ids"), (doc_ids, codes, energy), sizes)
    table = by_code(artifact)
    columns = [table[f"code_{level}"].to_pylist() for level in range(LEVELS)]
    ids = list(zip(*columns, table["suffix"].to_pylist(), strict=True))
    assert len(set(ids)) == len(ids) == sum(sizes)
    assert ids == sorted(ids)


def test_the_error_names_two_documents_with_one_id(tmp_path: Path) -> None:
    doc_ids, codes, energy = corpus(0)
    doc_ids[100], codes[100] = doc_ids[20], codes[20]
    with pytest.raises(DataError, match=r"documents 'd20' and 'd20' have one semantic ID"):
        sort(tmp_path, (doc_ids, codes, energy))


@pytest.mark.parametrize("rows", [60, 10_000])
def test_documents_without_an_earlier_id_are_unseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    doc_ids, codes, energy = corpus(1, crowded=True)
    monkeypatch.setattr(naming, "ROWS", 90)
    _, before = sort(tmp_path / "before", (doc_ids, codes, energy))
    rng = np.random.default_rng(2)
    order = rng.permutation(len(doc_ids))
    names, is_old = np.array(doc_ids, object)[order], rng.random(len(order)) < 0.7
    names[~is_old] = [f"new{i}" for i in range((~is_old).sum())]
    monkeypatch.setattr(naming, "ROWS", rows)
    counted, _ = sort(tmp_path / "after", (names.tolist(), codes[order], energy[order]), earlier=before)
    assert counted.unseen["documents"] == (~is_old).sum()
    np.testing.assert_allclose(counted.unseen["energy"], energy[order][~is_old].sum(axis=0), rtol=1e-5)
    assert counted.all["documents"] == len(names)


def test_a_killed_run_repeats_only_unfinished_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(naming, "ROWS", 100)
    _, uninterrupted = sort(tmp_path / "whole", corpus(3))
    calls = []
    count = PrefixCounts.of

    def dying(codes: np.ndarray) -> PrefixCounts:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return count(codes)

    monkeypatch.setattr(PrefixCounts, "of", dying)
    with pytest.raises(KeyboardInterrupt):
        sort(tmp_path / "again", corpus(3))
    _, resumed = sort(tmp_path / "again", corpus(3))
    assert len(calls) == len(uninterrupted.names("by_code/")) + 1  # the third was done twice
    assert resumed.digest == uninterrupted.digest


@pytest.mark.parametrize(("size", "levels"), [(256, 6), (65_536, 5), (2, 16)])
def test_keys_sort_like_codes_and_suffixes(size: int, levels: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, size, (300, levels)).astype(np.uint16)
    codes[:100] = rng.integers(0, 2, (100, levels)) * (size - 1)
    suffix = rng.integers(0, 1 << 62, 300)
    keys = semantic_id.sortable(codes, suffix)
    assert np.argsort(keys, kind="stable").tolist() == np.lexsort((suffix, *codes.T[::-1])).tolist()


def test_statistics_of_a_corpus_counted_by_hand() -> None:
    codes = np.array([[0, 0], [0, 1], [1, 1], [1, 1]], np.uint16)
    energy = np.array([[1.0, 0.25], [0.5, 0.25], [0.25, 0.5], [0.25, 0.0]], np.float32)
    report = naming.report(tally(codes, energy, size=4), PrefixCounts.of(codes))
    assert (report["documents"], report["distinct_codes"], report["collisions"]) == (4, 3, 1)
    assert (report["uniqueness"], report["largest_collision"]) == (0.5, 2)
    assert [level["usage"] for level in report["levels"]] == [0.5, 0.5]
    np.testing.assert_allclose([level["entropy_bits"] for level in report["levels"]], [1.0, 0.8112781])
    assert [level["residual_energy"] for level in report["levels"]] == [0.5, 0.25]
    assert [level["distinct_prefixes"] for level in report["levels"]] == [2, 3]


@given(st.integers(1, 80), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_prefix_counts_of_ranges_add_up(documents: int, levels: int, ranges: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 4, (documents, levels)).astype(np.uint16)
    codes = codes[np.lexsort(codes.T[::-1])]
    cuts = np.unique([0, *rng.integers(0, documents, ranges - 1), documents])  # within equal codes, too
    spread = PrefixCounts.merge(PrefixCounts.of(piece) for piece in np.split(codes, cuts[1:-1]))
    assert spread == PrefixCounts.of(codes)
    assert spread.distinct == [len({tuple(row[: n + 1]) for row in codes.tolist()}) for n in range(levels)]


def test_drift_of_similar_and_of_different_documents() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 8, (4000, 3))
    energy = np.outer(rng.random(4000) + 0.5, [0.6, 0.4, 0.3]).astype(np.float32)
    fitted, alike = (tally(codes[half], energy[half], size=8) for half in (slice(2000), slice(2000, 4000)))
    drift = naming.drift(alike, fitted, refit_above=1.1)
    assert (drift["documents"], drift["refit"]) == (2000, False)
    for level in drift["levels"]:
        assert level["residual_energy_ratio"] == pytest.approx(1, abs=0.05)
        assert level["usage_divergence_bits"] < 0.01
    # A third of the codes, and a fifth more residual energy after the last level.
    unlike = tally(codes[:500] // 3, energy[:500] * [1, 1, 1.2], size=8)
    drift = naming.drift(unlike, fitted, refit_above=1.1)
    assert drift["refit"]
    assert drift["levels"][2]["residual_energy_ratio"] == pytest.approx(1.2, abs=0.05)
    assert drift["levels"][0]["usage_divergence_bits"] > 0.3
    assert not naming.drift(unlike, fitted, refit_above=1.3)["refit"]
    few = tally(codes[:50], 2 * energy[:50], size=8)
    assert not naming.drift(few, fitted, refit_above=1.1)["refit"]  # too few documents
    assert not naming.drift(unlike, few, refit_above=0.5)["refit"]
    one, other = (tally(np.array([[code]]), np.ones((1, 1)), size=2) for code in (0, 1))
    assert naming.drift(one, other, refit_above=2.0)["levels"][0]["usage_divergence_bits"] == 1
    nothing = tally(codes[:0], energy[:0], size=8)
    assert naming.drift(nothing, fitted, refit_above=2.0) == {"documents": 0, "levels": [], "refit": False}
