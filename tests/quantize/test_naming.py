"""Names given range by range, without Ray: the same as with all codes in one process."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.quantize import naming, semantic_id
from scalingnote.storage.artifact import Artifact, Draft, write_table
from scalingnote.storage.schema import semantic_ids
from synthetic_corpus import Settings, suffixes

LEVELS, SIZE = 3, 6
SIZES = [70, 0, 130, 40, 160, 5, 95]


def corpus(seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, codes that collide often, and energies."""
    rng = np.random.default_rng(seed)
    codes = np.minimum(rng.geometric(0.4, (sum(SIZES), LEVELS)) - 1, SIZE - 1)
    return [f"d{i}" for i in range(sum(SIZES))], codes, rng.random(codes.shape).astype(np.float32)


def name(
    folder: Path, doc_ids: list[str], codes: np.ndarray, energy: np.ndarray, given: Artifact | None = None
) -> tuple[naming.NamedCorpus, Artifact]:
    draft = Draft(str(folder), kind="semantic_ids", config=Settings(), parents={})
    parts = [f"codes/part-{i:05d}.parquet" for i in range(len(SIZES))]
    ends = np.cumsum(SIZES)
    for part, end, rows in zip(parts, ends, SIZES, strict=True):
        ours = slice(end - rows, end)
        names = pa.chunked_array([doc_ids[ours]], pa.string())
        sampled = np.arange(rows) % 3 == 0
        table = naming.coded_table(names, codes[ours], energy[ours], sampled & (given is None))
        write_table(draft.work(part), table)
    where = naming.CodedCorpus(draft.uri, draft.work(), LEVELS, SIZE, given)
    named = naming.name(where, parts, SIZES, each=map)
    draft.write_json(semantic_id.BY_CODE_SUMMARY, named.ranges)
    for file, part in named.parts.items():
        draft.register(file, part)
    return named, draft.commit(counts={})


@pytest.mark.parametrize("rows", [50, 200, 10_000])
def test_ranges_give_the_ids_and_statistics_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(naming, "ROWS", rows)
    doc_ids, codes, energy = corpus(0)
    named, artifact = name(tmp_path, doc_ids, codes, energy)
    table = artifact.table("codes")
    suffix = suffixes(codes)
    assert table.schema.equals(semantic_ids(LEVELS))
    assert table.equals(semantic_id.to_table(pa.chunked_array([doc_ids]), codes, suffix).cast(table.schema))
    whole = naming.CodeTally.of(codes, energy, size=SIZE)
    found = naming.report(named.tally, named.spread, collisions=named.collisions)
    expected = naming.report(
        whole, naming.PrefixCounts.of(codes.astype(np.uint16)), collisions=int((suffix > 0).sum())
    )
    for level, other in zip(found.pop("levels"), expected.pop("levels"), strict=True):
        assert level == pytest.approx(other)
    assert found == expected
    unseen = np.concatenate([np.arange(size) % 3 > 0 for size in SIZES])
    assert named.unseen.documents == unseen.sum()
    assert (
        named.unseen.usage.tolist()
        == naming.CodeTally.of(codes[unseen], energy[unseen], size=SIZE).usage.tolist()
    )

    assert len(named.ranges) > 2 or rows == 10_000
    ordered = pa.concat_tables([artifact.table(found["name"]) for found in named.ranges])
    order = np.lexsort((suffix, *codes.T[::-1]))
    assert ordered["doc_id"].to_pylist() == [doc_ids[i] for i in order]
    assert ordered["suffix"].to_pylist() == suffix[order].tolist()
    for level in range(LEVELS):
        assert ordered[f"code_{level}"].to_pylist() == codes[order, level].tolist()


@pytest.mark.parametrize("rows", [60, 10_000])
def test_ids_that_were_given_stay_whatever_the_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    doc_ids, codes, energy = corpus(1)
    monkeypatch.setattr(naming, "ROWS", 90)
    _, before = name(tmp_path / "before", doc_ids, codes, energy)
    rng = np.random.default_rng(2)
    order = rng.permutation(len(doc_ids))
    names, kept = np.array(doc_ids)[order], rng.random(len(order)) < 0.7
    names[~kept] = [f"new{i}" for i in range((~kept).sum())]
    monkeypatch.setattr(naming, "ROWS", rows)
    named, after = name(tmp_path / "after", names.tolist(), codes[order], energy[order], before)

    old = dict(zip(*(before.table("codes")[c].to_pylist() for c in ("doc_id", "semantic_id")), strict=True))
    new = dict(zip(*(after.table("codes")[c].to_pylist() for c in ("doc_id", "semantic_id")), strict=True))
    assert {doc_id: new[doc_id] for doc_id in names[kept]} == {doc_id: old[doc_id] for doc_id in names[kept]}
    assert len(set(new.values())) == len(new)
    assert not {new[doc_id] for doc_id in names[~kept]} & set(old.values())
    assert named.unseen.documents == (~kept).sum()
    np.testing.assert_allclose(named.unseen.energy, energy[order][~kept].sum(axis=0), rtol=1e-5)
    assert named.tally.documents == len(names)


def test_a_killed_run_repeats_only_what_was_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(naming, "ROWS", 100)
    doc_ids, codes, energy = corpus(3)
    _, whole = name(tmp_path / "whole", doc_ids, codes, energy)
    settled = []
    assign = semantic_id.assign_suffixes

    def dying(*arguments: object) -> object:
        settled.append(1)
        if len(settled) == 3:
            raise KeyboardInterrupt
        return assign(*arguments)

    monkeypatch.setattr(semantic_id, "assign_suffixes", dying)
    with pytest.raises(KeyboardInterrupt):
        name(tmp_path / "again", doc_ids, codes, energy)
    _, again = name(tmp_path / "again", doc_ids, codes, energy)
    assert len(settled) == len(whole.names("by_code/")) + 1  # the third was done twice
    assert again.digest == whole.digest


@pytest.mark.parametrize(("size", "levels"), [(256, 6), (65_536, 5), (2, 16)])
def test_keys_are_ordered_as_codes_and_parts_are(size: int, levels: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, size, (300, levels)).astype(np.uint16)
    codes[:100] = rng.integers(0, 2, (100, levels)) * (size - 1)
    parts = rng.integers(0, 1 << 20, 300)
    keys = semantic_id.sortable(codes, parts)
    assert np.argsort(keys, kind="stable").tolist() == np.lexsort((parts, *codes.T[::-1])).tolist()


def crowded(seed: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """A corpus in which a third of the documents has the same codes, and a tenth others."""
    doc_ids, codes, energy = corpus(seed)
    drawn = np.random.default_rng(seed).random(len(codes))
    codes[drawn < 0.3] = [2, 1, 0]
    codes[(drawn > 0.3) & (drawn < 0.4)] = [2, 1, 1]
    return doc_ids, codes, energy


def test_documents_with_the_same_codes_are_divided_and_numbered_as_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc_ids, codes, energy = crowded(4)
    one, whole = name(tmp_path / "whole", doc_ids, codes, energy)
    monkeypatch.setattr(naming, "ROWS", 40)
    many, cut = name(tmp_path / "cut", doc_ids, codes, energy)
    assert max(found["rows"] for found in many.ranges) < 100 < (codes == [2, 1, 0]).all(axis=1).sum()
    assert sum(found["first"] == found["last"] == [2, 1, 0] for found in many.ranges) > 1
    assert cut.table("codes").equals(whole.table("codes"))
    assert many.spread == one.spread
    assert many.collisions == one.collisions
    assert many.tally.usage.tolist() == one.tally.usage.tolist()
    ordered = pa.concat_tables([cut.table(found["name"]) for found in many.ranges])
    assert ordered.equals(pa.concat_tables([whole.table(found["name"]) for found in one.ranges]))
    reader = semantic_id.ByCode(cut)
    pieces = list(reader.pieces([2, 1, 0]))
    assert sum(len(piece.suffix) for piece in pieces) == (codes == [2, 1, 0]).all(axis=1).sum()


def test_newcomers_to_crowded_codes_count_on_in_corpus_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc_ids, codes, energy = crowded(5)
    half = len(doc_ids) // 2
    monkeypatch.setattr(naming, "ROWS", 40)
    old = [doc_id if row < half else f"gone{row}" for row, doc_id in enumerate(doc_ids)]
    _, before = name(tmp_path / "before", old, codes, energy)
    _, cut = name(tmp_path / "cut", doc_ids, codes, energy, before)
    monkeypatch.setattr(naming, "ROWS", 10_000)
    _, whole = name(tmp_path / "whole", doc_ids, codes, energy, before)
    assert cut.table("codes").equals(whole.table("codes"))
    kept = cut.table("codes")["semantic_id"].to_pylist()
    assert kept[:half] == before.table("codes")["semantic_id"].to_pylist()[:half]
    assert not set(kept[half:]) & set(before.table("codes")["semantic_id"].to_pylist())
