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

MATRIX, NEW, ASKED = vectors(70, DIM), vectors(300, DIM, seed=7), vectors(4, DIM, seed=9)
SHARDS = [{f"d{i}": MATRIX[i] for i in range(40)}, {f"d{i}": MATRIX[i] for i in range(40, 70)}]
TRUTH = SHARDS[0] | SHARDS[1]


def _write(live: LiveIndex, truth: dict[str, np.ndarray]) -> None:
    """Some of everything, in both shards."""
    names = [f"d{i}" for i in range(0, 70, 7)] + [f"n{i}" for i in range(20)]
    live.upsert(table(names, 1), NEW[: len(names)])
    truth |= dict(zip(names, NEW, strict=False))
    gone = [f"d{i}" for i in range(0, 70, 3)] + ["n3", "absent"]
    live.delete(gone)
    for name in gone:
        truth.pop(name, None)
    assert _equal(live, truth)


def _equal(live: LiveIndex, truth: dict[str, np.ndarray]) -> bool:
    found = search_index(live, ASKED, k=500)
    return len(live) == len(truth) and found == brute_force(truth, ASKED, k=500)


@pytest.mark.parametrize(
    "family", [FastScan(), ScalarQuantized(), RaBitQ(), Flat()], ids=lambda family: family.kind
)
def test_a_version_is_an_index_like_any_other(tmp_path: Path, family: Family) -> None:
    built = index(f"{tmp_path}/index", SHARDS, family)
    live, truth = LiveIndex(tmp_path / "live", built.uri), dict(TRUTH)
    names = [f"n{i}" for i in range(30)]
    live.upsert(table(names), NEW[:30])
    live.delete([f"d{i}" for i in range(0, 70, 2)] + ["n1"])
    truth |= dict(zip(names, NEW, strict=False))
    truth = {n: v for n, v in truth.items() if n != "n1" and not (n[0] == "d" and int(n[1:]) % 2 == 0)}
    before = Searcher.open(built.uri).search(ASKED, k=70)
    written = live.compact()
    assert written is not None
    assert live.compact() is None  # nothing is new
    searcher = Searcher.open(written.uri)
    assert len(searcher) == len(truth) == written.counts["documents"] == live.layout.documents
    assert written.counts["bytes"] == sum(path.stat().st_size for path in Path(written.uri).rglob("*.faiss"))
    found = searcher.search(ASKED, k=100)
    assert [sorted(result.doc_id for result in results) for results in found] == [sorted(truth)] * 4
    for old, new in zip(before, found, strict=True):  # what stayed was not encoded again
        scores = {result.doc_id: result.score for result in new}
        kept = [result for result in old if result.doc_id in truth]
        assert [scores[result.doc_id] for result in kept] == [result.score for result in kept]
    assert found[0][0].document["title"].endswith(found[0][0].doc_id)
    assert written.manifest.parents["index"]["digest"] == built.digest


def test_a_crash_at_any_write_leaves_a_version_and_its_log(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever write is the last to be done, what is opened next is whole, and compacting goes on."""
    write_bytes, advance = fs.write_bytes, versions.make_current
    for last in itertools.count():
        folder, truth = tmp_path / str(last), dict(TRUTH)
        live = LiveIndex(folder, built.uri)
        _write(live, truth)
        left = itertools.count(last, -1)

        def until_it_is_killed(*args: object, left: itertools.count = left, **knobs: object) -> None:
            # Leases of this process are renewed in another thread meanwhile.
            if threading.current_thread() is threading.main_thread() and next(left) <= 0:
                raise KeyboardInterrupt
            (advance if isinstance(args[1], LiveVersion) else write_bytes)(*args, **knobs)

        killed = False
        with monkeypatch.context() as patch:
            patch.setattr(fs, "write_bytes", until_it_is_killed)
            patch.setattr(versions, "make_current", until_it_is_killed)
            try:
                compaction.compact(folder)
            except KeyboardInterrupt:
                killed = True
        assert versions.current(folder).number == (0 if killed else 1)
        live.upsert(table(["later"]), NEW[-1:])  # the writer never noticed
        truth["later"] = NEW[-1]
        live.close()
        again = LiveIndex(folder)
        assert _equal(again, truth)
        again.compact()
        assert again.version >= 1
        assert _equal(again, truth)
        again.close()
        if not killed:
            break
    assert last > 10


def _killed(folder: Path) -> None:
    """Compact until the version would be made current."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "make_current", killed)
        with pytest.raises(KeyboardInterrupt):
            compaction.compact(folder)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [("shard-00000/lists.faiss", _emptied), ("live.json", Path.unlink), ("manifest.json", _emptied)],
)
def test_a_version_that_a_crash_of_the_machine_damaged_is_written_anew(
    live: LiveIndex, name: str, damage: Callable[[Path], object]
) -> None:
    truth = dict(TRUTH)
    _write(live, truth)
    _killed(live.folder)
    damage(live.folder / "versions/00001" / name)
    assert versions.current(live.folder).number == 0
    written = compaction.compact(live.folder, keep_versions=1)
    assert written is not None
    versions.check(versions.current(live.folder).open())
    live.adopt()
    assert (live.version, _equal(live, truth)) == (1, True)


def test_what_others_rely_on_is_durable_before_they_are_written(
    live: LiveIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes, make_durable = fs.write_bytes, fs.make_durable
    root, durable, reached = f"{live.folder}/versions/00001", set(), []

    def is_durable(uri: str, names: Sequence[str]) -> None:
        make_durable(uri, names)
        durable.update(names)

    def write(uri: str, data: bytes) -> None:
        name = uri.removeprefix(f"{root}/")
        if name == "manifest.json":
            reached.append(name)
            assert {*json.loads(data)["parts"]} <= durable
        durable.discard(name)
        write_bytes(uri, data)

    _write(live, dict(TRUTH))
    monkeypatch.setattr(fs, "write_bytes", write)
    monkeypatch.setattr(fs, "make_durable", is_durable)
    written = compaction.compact(live.folder, retrain_at=0.1)
    assert written is not None
    assert reached == ["manifest.json"]
    assert {*written.manifest.parts, "manifest.json"} <= durable


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


def test_what_every_version_kept_includes_leaves_the_log(live: LiveIndex, tmp_path: Path) -> None:
    _write(live, dict(TRUTH))
    logs = [versions.log_folder(tmp_path / "live", number) for number in range(2)]
    live.compact()
    for log in logs:  # what the version before needs, and a new file
        *earlier, newest = (path.stat().st_size for path in sorted(log.glob("*.log")))
        assert all(earlier)
        assert newest == 0
    live.upsert(table(["d1", "d50"]), NEW[:2])
    live.compact()
    numbers = versions.kept_version(tmp_path / "live", 1).included
    assert [wal.segments(log)[0][0] for log in logs] == [number + 1 for number in numbers]
    numbers = versions.current(tmp_path / "live").included
    assert {n: w.sequence for n, w in live.upsert(table(["d1", "d50"]), NEW[:2]).items()} == {
        0: numbers[0] + 1,
        1: numbers[1] + 1,
    }


def test_searches_go_on_while_versions_change(live: LiveIndex) -> None:
    truth, stop, wrong = dict(TRUTH), threading.Event(), []
    _write(live, truth)
    asked = ASKED[:1]
    expected = brute_force(truth, asked, k=9)

    def read() -> None:
        while not stop.is_set():
            if search_index(live, asked, k=9) != expected:
                wrong.append(live.version)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(4):
        live.delete(["far"])
        live.upsert(table(["far"]), -asked)  # never among the best
        live.compact()
    stop.set()
    reader.join()
    assert wrong == []
    assert live.version == 4


def test_an_index_compacts_itself_when_it_is_due(built: Artifact, tmp_path: Path) -> None:
    live, truth = LiveIndex(tmp_path / "live", built.uri, config=LiveConfig(compact_at=0.2)), dict(TRUTH)
    rows, changed, version = len(truth), 0, 0
    for step in range(10):
        names = [f"d{3 * step + i}" for i in range(3)] + [f"n{step}"]
        live.upsert(table(names, step), NEW[4 * step : 4 * step + 4])
        truth |= dict(zip(names, NEW[4 * step :], strict=False))
        live._background.submit(bool).result()  # waits for what is under way
        changed += 4 + 3  # written, and replaced
        if changed >= 0.2 * rows:
            rows, changed, version = len(truth), 0, version + 1
        assert live.version == version
        assert _equal(live, truth)
    assert version == 3
    live.close()
    config = LiveConfig(keep_versions=1, retrain_at=0.01)
    live = LiveIndex(tmp_path / "live", config=config)
    live.delete([f"d{i}" for i in range(40)])  # nothing is due unless it is asked for
    live.upsert(table(["more"]), NEW[:1])
    written = live.compact()
    assert written.read_json("live.json")["written"] == 0  # trained anew
    assert [each.number for each in versions.listing(live.folder)] == [4]
    live.close()


def test_a_quantizer_that_grew_stale_is_trained_anew(live: LiveIndex) -> None:
    truth = dict(TRUTH)
    before = versions.current(live.folder).open()
    for step, start in enumerate(range(0, 80, 20)):
        names = [f"e{i}" for i in range(start, start + 20)]
        live.upsert(table(names, step), NEW[start : start + 20])
        truth |= dict(zip(names, NEW[start:], strict=False))
        after = live.compact()
        same = before.manifest.parts["coarse.faiss"] == after.manifest.parts["coarse.faiss"]
        assert same == (step != 2)  # 60 written, 110 documents before
        assert after.read_json("live.json")["written"] == [20, 40, 0, 20][step]
        assert _equal(live, truth)
        before = after


def test_one_compacts_at_a_time_and_only_its_own_index(
    live: LiveIndex, built: Artifact, tmp_path: Path
) -> None:
    _write(live, dict(TRUTH))
    lock = lock_file(tmp_path / "live" / "compaction.lock", taken="")
    with pytest.raises(ConfigError, match=f"by another process .pid {os.getpid()}"):
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
    written = live.compact()
    live.close()
    assert written is not None
    read = [name for name in written.names("shard-") if not name.endswith("columns.arrow")]  # searchers' own
    for name in [*read, "index.json"]:
        path = Path(written.uri, name)
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(ArtifactError, match=name):
            LiveIndex(tmp_path / "live")
        path.write_bytes(data)
    LiveIndex(tmp_path / "live").close()
