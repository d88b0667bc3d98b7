"""Documents sorted by code range by range, without Ray: the same as with all codes in one process."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core.errors import DataError
from scalingnote.quantize import naming, semantic_id
from scalingnote.quantize.code_statistics import CodeTally, PrefixCounts, report
from scalingnote.storage.artifact import Artifact, Draft, write_table
from synthetic_corpus import Settings

LEVELS, SIZE = 3, 6
SIZES = [70, 0, 130, 40, 160, 5, 95]
Corpus = tuple[list[str], np.ndarray, np.ndarray]


def corpus(seed: int, *, crowded: bool = False) -> Corpus:
    """Names, codes that collide often, and energies; if crowded, a third of the codes are equal."""
    rng = np.random.default_rng(seed)
    codes = np.minimum(rng.geometric(0.4, (sum(SIZES), LEVELS)) - 1, SIZE - 1)
    if crowded:
        codes[rng.random(len(codes)) < 0.3] = [2, 1, 0]
    return [f"d{i}" for i in range(sum(SIZES))], codes, rng.random(codes.shape).astype(np.float32)


def sort(
    folder: Path, of: Corpus, sizes: list[int] = SIZES, earlier: Artifact | None = None
) -> tuple[naming.SortedCorpus, Artifact]:
    doc_ids, codes, energy = of
    draft = Draft(str(folder), kind="semantic_ids", config=Settings(), parents={})
    parts = [f"codes/part-{i:05d}.parquet" for i in range(len(sizes))]
    for part, end, rows in zip(parts, np.cumsum(sizes), sizes, strict=True):
        ours = slice(end - rows, end)
        names = pa.chunked_array([doc_ids[ours]], pa.string())
        sampled = (np.arange(rows) % 3 == 0) & (earlier is None)
        write_table(draft.work(part), naming.coded_table(names, codes[ours], energy[ours], sampled))
    where = naming.CodedCorpus(draft.uri, draft.work(), LEVELS, SIZE, earlier)
    found = naming.sort(where, parts, sizes, each=map)
    draft.write_json(semantic_id.BY_CODE_SUMMARY, found.ranges)
    for file, part in found.parts.items():
        draft.register(file, part)
    return found, draft.commit(counts={})


def by_code(found: naming.SortedCorpus, artifact: Artifact) -> pa.Table:
    return pa.concat_tables([artifact.table(one["name"]) for one in found.ranges]).combine_chunks()


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("rows", [50, 200, 10_000])
def test_ranges_give_the_files_and_statistics_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, crowded: bool
) -> None:
    monkeypatch.setattr(naming, "ROWS", rows)
    doc_ids, codes, energy = corpus(0, crowded=crowded)
    found, artifact = sort(tmp_path, (doc_ids, codes, energy))
    assert len(found.ranges) > 2 or rows == 10_000
    suffix = semantic_id.suffixes(pa.array(doc_ids))
    order = np.lexsort((suffix, *codes.T[::-1]))
    ordered = by_code(found, artifact)
    assert ordered["doc_id"].to_pylist() == [doc_ids[i] for i in order]
    assert ordered["suffix"].to_pylist() == suffix[order].tolist()
    for level in range(LEVELS):
        assert ordered[f"code_{level}"].to_pylist() == codes[order, level].tolist()

    statistics = report(found.tally, found.spread)
    expected = report(CodeTally.of(codes, energy, size=SIZE), PrefixCounts.of(codes[order].astype(np.uint16)))
    for level, other in zip(statistics.pop("levels"), expected.pop("levels"), strict=True):
        assert level == pytest.approx(other)
    assert statistics == expected
    unseen = np.concatenate([np.arange(size) % 3 > 0 for size in SIZES])
    counted = CodeTally.of(codes[unseen], energy[unseen], size=SIZE)
    assert found.unseen.documents == counted.documents
    assert found.unseen.usage.tolist() == counted.usage.tolist()
    pieces = list(semantic_id.ByCode(artifact).pieces([2, 1, 0]))
    assert sum(len(piece.suffix) for piece in pieces) == (codes == [2, 1, 0]).all(axis=1).sum()
    assert len(pieces) > 1 or rows > 50 or not crowded  # documents with equal codes may fill many ranges


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(5, 200), st.integers(0, 99))
def test_ids_are_unique_whatever_the_number_of_parts_and_ranges(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], rows: int, seed: int
) -> None:
    doc_ids, codes, energy = corpus(seed, crowded=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naming, "ROWS", rows)
        chosen = slice(0, max(sum(sizes), 1))
        sizes = sizes if sum(sizes) else [1]
        found, artifact = sort(
            tmp_path_factory.mktemp("ids"), (doc_ids[chosen], codes[chosen], energy[chosen]), sizes
        )
    table = by_code(found, artifact)
    columns = [table[f"code_{level}"].to_pylist() for level in range(LEVELS)]
    ids = list(zip(*columns, table["suffix"].to_pylist(), strict=True))
    assert len(set(ids)) == len(ids) == sum(sizes)
    assert ids == sorted(ids)


def test_two_documents_with_one_id_are_named(tmp_path: Path) -> None:
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
    names, kept = np.array(doc_ids, object)[order], rng.random(len(order)) < 0.7
    names[~kept] = [f"new{i}" for i in range((~kept).sum())]
    monkeypatch.setattr(naming, "ROWS", rows)
    found, _ = sort(tmp_path / "after", (names.tolist(), codes[order], energy[order]), earlier=before)
    assert found.unseen.documents == (~kept).sum()
    np.testing.assert_allclose(found.unseen.energy, energy[order][~kept].sum(axis=0), rtol=1e-5)
    assert found.tally.documents == len(names)


def test_a_killed_run_repeats_only_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "ROWS", 100)
    _, whole = sort(tmp_path / "whole", corpus(3))
    counted = []
    count = PrefixCounts.of

    def dying(codes: np.ndarray) -> PrefixCounts:
        counted.append(1)
        if len(counted) == 3:
            raise KeyboardInterrupt
        return count(codes)

    monkeypatch.setattr(PrefixCounts, "of", dying)
    with pytest.raises(KeyboardInterrupt):
        sort(tmp_path / "again", corpus(3))
    _, again = sort(tmp_path / "again", corpus(3))
    assert len(counted) == len(whole.names("by_code/")) + 1  # the third was done twice
    assert again.digest == whole.digest


@pytest.mark.parametrize(("size", "levels"), [(256, 6), (65_536, 5), (2, 16)])
def test_keys_are_ordered_as_codes_and_suffixes_are(size: int, levels: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, size, (300, levels)).astype(np.uint16)
    codes[:100] = rng.integers(0, 2, (100, levels)) * (size - 1)
    suffix = rng.integers(0, 1 << 62, 300)
    keys = semantic_id.sortable(codes, suffix)
    assert np.argsort(keys, kind="stable").tolist() == np.lexsort((suffix, *codes.T[::-1])).tolist()
