import itertools
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from live_shards import DIM, brute_force, index, search_index, table
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.index.config import Family, FastScan, Flat, LiveConfig, RaBitQ, ScalarQuantized
from scalingnote.index.live import compaction, versions, wal
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.versions import LiveVersion
from scalingnote.index.live.wal import lock_file
from scalingnote.search.searcher import Searcher
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

MATRIX, NEW, QUERIES = vectors(70, DIM), vectors(300, DIM, seed=7), vectors(4, DIM, seed=9)
SHARDS = [{f"d{i}": MATRIX[i] for i in range(40)}, {f"d{i}": MATRIX[i] for i in range(40, 70)}]
TRUTH = SHARDS[0] | SHARDS[1]


def _write(live: LiveIndex, truth: dict[str, np.ndarray]) -> None:
    """Replace, add and delete documents in both shards."""
    names = [f"d{i}" for i in range(0, 70, 7)] + [f"n{i}" for i in range(20)]
    live.upsert(table(names, 1), NEW[: len(names)])
    truth |= dict(zip(names, NEW, strict=False))
    deleted_ids = [f"d{i}" for i in range(0, 70, 3)] + ["n3", "absent"]
    live.delete(deleted_ids)
    for name in deleted_ids:
        truth.pop(name, None)
    assert _equal(live, truth)


def _equal(live: LiveIndex, truth: dict[str, np.ndarray]) -> bool:
    results = search_index(live, QUERIES, k=500)
    return len(live) == len(truth) and results == brute_force(truth, QUERIES, k=500)


@pytest.mark.parametrize(
    "family", [FastScan(), ScalarQuantized(), RaBitQ(), Flat()], ids=lambda family: family.kind
)
def test_a_version_is_searched_like_a_built_index(tmp_path: Path, family: Family) -> None:
    built = index(f"{tmp_path}/index", SHARDS, family)
    live, truth = LiveIndex(tmp_path / "live", built.uri), dict(TRUTH)
    names = [f"n{i}" for i in range(30)]
    live.upsert(table(names), NEW[:30])
    live.delete([f"d{i}" for i in range(0, 70, 2)] + ["n1"])
    truth |= dict(zip(names, NEW, strict=False))
    truth = {n: v for n, v in truth.items() if n != "n1" and not (n[0] == "d" and int(n[1:]) % 2 == 0)}
    before = Searcher.open(built.uri).search(QUERIES, k=70)
    artifact = live.compact()
    assert artifact is not None
    assert live.compact() is None  # there are no new writes
    searcher = Searcher.open(artifact.uri)
    assert len(searcher) == len(truth) == artifact.counts["documents"] == live.layout.documents
    assert artifact.counts["bytes"] == sum(
        path.stat().st_size for path in Path(artifact.uri).rglob("*.faiss")
    )
    answers = searcher.search(QUERIES, k=100)
    assert [sorted(result.doc_id for result in results) for results in answers] == [sorted(truth)] * 4
    for old, new in zip(before, answers, strict=True):  # kept documents were not encoded again
        scores = {result.doc_id: result.score for result in new}
        kept_results = [result for result in old if result.doc_id in truth]
        assert [scores[result.doc_id] for result in kept_results] == [result.score for result in kept_results]
    assert answers[0][0].document["title"].endswith(answers[0][0].doc_id)
    assert artifact.manifest.parents["index"]["digest"] == built.digest


def test_a_version_and_its_log_survive_a_crash_at_any_write(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any last write, the next process opens a complete version, and compaction continues."""
    write_bytes, advance = fs.write_bytes, versions.make_current
    for last in itertools.count():
        folder, truth = tmp_path / str(last), dict(TRUTH)
        live = LiveIndex(folder, built.uri)
        _write(live, truth)
        remaining = itertools.count(last, -1)

        def until_it_is_killed(
            *args: object, remaining: itertools.count = remaining, **knobs: object
        ) -> None:
            # Another thread renews the leases of this process meanwhile.
            if threading.current_thread() is threading.main_thread() and next(remaining) <= 0:
                raise KeyboardInterrupt
            (advance if isinstance(args[1], LiveVersion) else write_bytes)(*args, **knobs)

        was_killed = False
        with monkeypatch.context() as patch:
            patch.setattr(fs, "write_bytes", until_it_is_killed)
            patch.setattr(versions, "make_current", until_it_is_killed)
            try:
                compaction.compact(folder)
            except KeyboardInterrupt:
                was_killed = True
        assert versions.current(folder).number == (0 if was_killed else 1)
        live.upsert(table(["later"]), NEW[-1:])  # the writer continues
        truth["later"] = NEW[-1]
        live.close()
        reopened = LiveIndex(folder)
        assert _equal(reopened, truth)
        reopened.compact()
        assert reopened.version >= 1
        assert _equal(reopened, truth)
        reopened.close()
        if not was_killed:
            break
    assert last > 10


def _killed(folder: Path) -> None:
    """Run a compaction that is killed before the version becomes current."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "make_current", killed)
        with pytest.raises(KeyboardInterrupt):
            compaction.compact(folder)


def _empty_file(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [("shard-00000/lists.faiss", _empty_file), ("live.json", Path.unlink), ("manifest.json", _empty_file)],
)
def test_a_version_that_a_crash_damaged_is_written_again(
    live: LiveIndex, name: str, damage: Callable[[Path], object]
) -> None:
    truth = dict(TRUTH)
    _write(live, truth)
    _killed(live.folder)
    damage(live.folder / "versions/00001" / name)
    assert versions.current(live.folder).number == 0
    artifact = compaction.compact(live.folder, keep_versions=1)
    assert artifact is not None
    versions.check(versions.current(live.folder).open())
    live.adopt()
    assert (live.version, _equal(live, truth)) == (1, True)


def test_files_are_durable_before_a_manifest_lists_them(
    live: LiveIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes, make_durable = fs.write_bytes, fs.make_durable
    root, durable, manifests = f"{live.folder}/versions/00001", set(), []

    def is_durable(uri: str, names: Sequence[str]) -> None:
        make_durable(uri, names)
        durable.update(names)

    def write(uri: str, data: bytes) -> None:
        name = uri.removeprefix(f"{root}/")
        if name == "manifest.json":
            manifests.append(name)
            assert {*json.loads(data)["parts"]} <= durable
        durable.discard(name)
        write_bytes(uri, data)

    _write(live, dict(TRUTH))
    monkeypatch.setattr(fs, "write_bytes", write)
    monkeypatch.setattr(fs, "make_durable", is_durable)
    artifact = compaction.compact(live.folder, retrain_at=0.1)
    assert artifact is not None
    assert manifests == ["manifest.json"]
    assert {*artifact.manifest.parts, "manifest.json"} <= durable


def test_writes_during_a_compaction_are_kept(
    live: LiveIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = dict(TRUTH)
    _write(live, truth)
    write = compaction.shard.write_shard

    def write_and_be_overtaken(*shard: object, **content: object) -> object:
        name = f"late{len(truth)}"
        live.upsert(table([name, "d1"], len(truth)), np.stack([NEW[len(truth)], NEW[-len(truth)]]))
        truth.update({name: NEW[len(truth)], "d1": NEW[-len(truth)]})
        assert _equal(live, truth)
        return write(*shard, **content)

    monkeypatch.setattr(compaction.shard, "write_shard", write_and_be_overtaken)
    assert live.compact() is not None
    assert live.version == 1
    assert _equal(live, truth)
    live.close()
    assert _equal(LiveIndex(tmp_path / "live"), truth)


def test_records_that_all_versions_include_are_dropped(live: LiveIndex, tmp_path: Path) -> None:
    _write(live, dict(TRUTH))
    logs = [versions.log_folder(tmp_path / "live", number) for number in range(2)]
    live.compact()
    for log in logs:  # the records that the version before needs, and a new file
        *earlier, newest = (path.stat().st_size for path in sorted(log.glob("*.log")))
        assert all(earlier)
        assert newest == 0
    live.upsert(table(["d1", "d50"]), NEW[:2])
    live.compact()
    included = versions.kept_version(tmp_path / "live", 1).included
    assert [wal.segments(log)[0][0] for log in logs] == [number + 1 for number in included]
    included = versions.current(tmp_path / "live").included
    assert {n: w.sequence for n, w in live.upsert(table(["d1", "d50"]), NEW[:2]).items()} == {
        0: included[0] + 1,
        1: included[1] + 1,
    }


def test_searches_are_right_while_versions_change(live: LiveIndex) -> None:
    truth, stop, wrong_versions = dict(TRUTH), threading.Event(), []
    _write(live, truth)
    query = QUERIES[:1]
    expected = brute_force(truth, query, k=9)

    def read() -> None:
        while not stop.is_set():
            if search_index(live, query, k=9) != expected:
                wrong_versions.append(live.version)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(4):
        live.delete(["far"])
        live.upsert(table(["far"]), -query)  # never among the best
        live.compact()
    stop.set()
    reader.join()
    assert wrong_versions == []
    assert live.version == 4


def test_compaction_starts_at_the_configured_share(built: Artifact, tmp_path: Path) -> None:
    live, truth = LiveIndex(tmp_path / "live", built.uri, config=LiveConfig(compact_at=0.2)), dict(TRUTH)
    rows, changed_rows, version = len(truth), 0, 0
    for step in range(10):
        names = [f"d{3 * step + i}" for i in range(3)] + [f"n{step}"]
        live.upsert(table(names, step), NEW[4 * step : 4 * step + 4])
        truth |= dict(zip(names, NEW[4 * step :], strict=False))
        live._background.submit(bool).result()  # waits for a running compaction
        changed_rows += 4 + 3  # written and replaced rows
        if changed_rows >= 0.2 * rows:
            rows, changed_rows, version = len(truth), 0, version + 1
        assert live.version == version
        assert _equal(live, truth)
    assert version == 3
    live.close()
    config = LiveConfig(keep_versions=1, retrain_at=0.01)
    live = LiveIndex(tmp_path / "live", config=config)
    live.delete([f"d{i}" for i in range(40)])  # without compact_at, no compaction starts by itself
    live.upsert(table(["more"]), NEW[:1])
    artifact = live.compact()
    assert artifact.read_json("live.json")["written"] == 0  # trained again
    assert [each.number for each in versions.listing(live.folder)] == [4]
    live.close()


def test_an_outdated_quantizer_is_trained_again(live: LiveIndex) -> None:
    truth = dict(TRUTH)
    before = versions.current(live.folder).open()
    for step, start in enumerate(range(0, 80, 20)):
        names = [f"e{i}" for i in range(start, start + 20)]
        live.upsert(table(names, step), NEW[start : start + 20])
        truth |= dict(zip(names, NEW[start:], strict=False))
        after = live.compact()
        has_same_quantizer = before.manifest.parts["coarse.faiss"] == after.manifest.parts["coarse.faiss"]
        assert has_same_quantizer == (step != 2)  # 60 written documents, 110 in the version before
        assert after.read_json("live.json")["written"] == [20, 40, 0, 20][step]
        assert _equal(live, truth)
        before = after


def test_another_compaction_or_another_index_is_refused(
    live: LiveIndex, built: Artifact, tmp_path: Path
) -> None:
    _write(live, dict(TRUTH))
    lock = lock_file(tmp_path / "live" / "compaction.lock", taken="")
    with pytest.raises(ConfigError, match=rf"another process \(pid {os.getpid()}\) compacts"):
        live.compact()
    os.close(lock)
    other = index(f"{tmp_path}/other", SHARDS[:1])
    with pytest.raises(ArtifactError, match="has writes to index"):
        LiveIndex(tmp_path / "live", other.uri)
    with pytest.raises(ArtifactError, match=r"no versions\.json"):
        LiveIndex(tmp_path / "nothing")
    with pytest.raises(DataError, match="2 documents and 1 vectors"):
        live.upsert(table(["a", "b"]), NEW[:1])


def test_a_damaged_version_is_refused(live: LiveIndex, tmp_path: Path) -> None:
    _write(live, dict(TRUTH))
    artifact = live.compact()
    live.close()
    assert artifact is not None
    # Only searchers read the columns.
    names = [name for name in artifact.names("shard-") if not name.endswith("columns.arrow")]
    for name in [*names, "index.json"]:
        path = Path(artifact.uri, name)
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(ArtifactError, match=name):
            LiveIndex(tmp_path / "live")
        path.write_bytes(data)
    LiveIndex(tmp_path / "live").close()
