import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from live_shards import DIM, brute_force, index, search_index, table
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.index.config import LiveConfig
from scalingnote.index.live import compaction, versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.live_shard import owners
from scalingnote.index.live.wal import Log
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

MATRIX, NEW, ASKED = vectors(40, DIM), vectors(300, DIM, seed=7), vectors(3, DIM, seed=9)
SHARDS = [{f"d{i}": MATRIX[i] for i in range(25)}, {f"d{i}": MATRIX[i] for i in range(25, 40)}]
TRUTH = SHARDS[0] | SHARDS[1]
Truth = dict[str, np.ndarray]


def _write(live: LiveIndex, truth: Truth, step: int) -> None:
    """Some that replace, some that are new, some that go."""
    names = [f"d{(step * 7 + i) % 40}" for i in range(5)] + [f"n{step}-{i}" for i in range(5)]
    matrix = NEW[10 * step : 10 * step + 10]
    live.upsert(table(names, step), matrix)
    truth |= dict(zip(names, matrix, strict=True))
    gone = [f"d{(step * 11 + i) % 40}" for i in range(3)] + [f"n{step}-0"]
    live.delete(gone)
    for name in gone:
        truth.pop(name, None)


def _equal(live: LiveIndex, truth: Truth) -> bool:
    """Every document once, and in the right order; a document twice would be found twice."""
    return search_index(live, ASKED, k=500) == brute_force(truth, ASKED, k=500)


def _numbers(folder: Path) -> list[int]:
    return [each.number for each in versions.listing(folder)]


STEP = st.one_of(
    st.tuples(st.sampled_from(["upsert", "delete"]), st.lists(st.integers(0, 50), min_size=1, max_size=6)),
    st.tuples(st.just("activate"), st.lists(st.integers(0, 9), min_size=1, max_size=1)),
    st.tuples(st.sampled_from(["compact", "merge", "reopen"]), st.just([])),
)


@settings(max_examples=15)
@given(st.integers(1, 3), st.lists(STEP, max_size=12))
def test_any_history_with_rollbacks_equals_brute_force(
    built: Artifact, tmp_path_factory: pytest.TempPathFactory, keep: int, history: list
) -> None:
    folder, truth, drawn = tmp_path_factory.mktemp("live"), dict(TRUTH), iter(NEW)
    small = LiveConfig(keep_versions=keep)
    live, follower = LiveIndex(folder, built.uri, config=small), LiveIndex(folder, follow=True)
    for step, (kind, numbers) in enumerate(history):
        names = [f"d{number}" for number in dict.fromkeys(numbers)]
        match kind:
            case "upsert":
                matrix = np.stack([next(drawn) for _ in names])
                live.upsert(table(names, step), matrix)
                truth |= dict(zip(names, matrix, strict=True))
            case "delete":
                live.delete(names)
                truth = {name: vector for name, vector in truth.items() if name not in names}
            case "compact":
                live.compact()
                assert len(_numbers(folder)) <= keep
                assert sum(each.snapshot.rows for each in live.shards) == len(truth)
            case "merge":
                live.shards[0].merge()
            case "activate":
                kept = _numbers(folder)
                versions.activate(folder, kept[numbers[0] % len(kept)])
                live.adopt()
            case "reopen":
                live.close()
                live = LiveIndex(folder, config=small)
        assert all(each.log_kept for each in versions.listing(folder))
        follower.refresh()
        assert _equal(live, truth)
        assert _equal(follower, truth)
    live.close()


def test_a_document_that_moved_to_another_shard_stays_there(live: LiveIndex, tmp_path: Path) -> None:
    """Forgotten by a version, it was written to the shard of its hash; the older version has its old row."""
    folder, truth = tmp_path / "live", dict(TRUTH)
    moved = [name for name in SHARDS[0] if owners([name], [], shards=2) == [1]][:3]
    live.delete(moved)
    live.compact()
    live.upsert(table(moved[:2], 1), NEW[:2])
    truth = {name: vector for name, vector in truth.items() if name not in moved}
    truth |= dict(zip(moved[:2], NEW, strict=False))
    versions.activate(folder, 0)
    live.adopt()
    for reopened in (False, True):
        if reopened:
            live.close()
            live = LiveIndex(folder)
        assert [each.knows(moved) for each in live.shards] == [[False] * 3, [True, True, False]]
        assert _equal(live, truth)
    live.upsert(table(moved[1:], 2), NEW[2:4])
    live.delete(moved[:1])
    truth |= dict(zip(moved[1:], NEW[2:], strict=False))
    del truth[moved[0]]
    assert _equal(live, truth)
    assert live.get(moved[0]) is None
    versions.activate(folder, 1)
    live.adopt()
    assert _equal(live, truth)


def test_of_processes_that_open_a_folder_first_one_makes_the_register(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ready, make_folder = tmp_path / "live", threading.Barrier(4), versions.make_folder

    def together(made: Path) -> None:
        ready.wait(10)  # none has seen a register
        make_folder(made)

    monkeypatch.setattr(versions, "make_folder", together)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(versions.current, folder, built.uri) for _ in range(4)]
    assert {each.result().number for each in found} == {0}
    assert {each.result() for each in found} == {versions.current(folder)}


def test_versions_are_listed_and_old_ones_removed(live: LiveIndex, built: Artifact, tmp_path: Path) -> None:
    folder, truth = tmp_path / "live", dict(TRUTH)
    for step in range(3):
        _write(live, truth, step)
        live.compact()
        if step == 0:
            late, held = LiveIndex(folder, follow=True), live.snapshots()
            found = search_index(late, ASKED, k=9)
    assert sorted(path.name for path in (folder / "versions").iterdir()) == ["00002", "00003"]
    assert Path(built.uri, "manifest.json").exists()
    last = versions.listing(folder)[-1]
    assert (last.number, last.uri, last.documents, last.current, last.log_kept) == (
        *(3, f"{folder}/versions/00003", len(truth)),
        *(True, True),
    )
    assert last.created == last_manifest(last.uri)
    assert [each.current for each in versions.listing(folder)] == [False, True]
    # Who has not gone over still reads what was removed, and then goes over to what is current.
    assert search_index(late, ASKED, k=9) == found
    assert held[0].documents([0]).num_rows == 1
    late.refresh()
    assert (late.version, _equal(late, truth)) == (3, True)


def last_manifest(uri: str) -> str:
    created: str = versions.open_artifact(uri, kind="index").manifest.info["created"]
    return created


def test_what_cannot_be_current_is_refused_and_nothing_changes(live: LiveIndex, tmp_path: Path) -> None:
    folder, truth = tmp_path / "live", dict(TRUTH)
    with pytest.raises(ArtifactError, match=r"has no versions\.json"):
        versions.activate(tmp_path / "nothing", 0)
    for step in range(2):
        _write(live, truth, step)
        live.compact()
    with pytest.raises(ConfigError, match="keeps no version 0: it keeps 1, 2"):
        versions.activate(folder, 0)
    with (
        versions.register_lock(folder),
        pytest.raises(ConfigError, match=r"another process \(pid \d+\) compacts .*, or changes its version"),
    ):
        versions.activate(folder, 1)
    part = folder / "versions/00001/shard-00001/kept.faiss"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"shard-00001/kept.faiss is damaged"):
        versions.activate(folder, 1)
    part.write_bytes(whole)
    segments = sorted(versions.log_folder(folder, 1).glob("*.log"))
    kept = segments[0].rename(tmp_path / "aside")
    assert [each.log_kept for each in versions.listing(folder)] == [False, True]
    with pytest.raises(ArtifactError, match="later records of the log were dropped"):
        versions.activate(folder, 1)
    assert versions.current(folder).number == 2
    kept.rename(segments[0])
    versions.activate(folder, 1)
    live.adopt()
    assert _equal(live, truth)


def test_a_kill_between_any_steps_leaves_every_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction, rollback, compaction again: each step is the last one in its turn."""
    built = index(f"{tmp_path}/index", [TRUTH])
    steps = (
        (versions, "write_register"),
        (versions, "delete_unlisted"),
        (versions.fs, "delete"),
        (Log, "drop"),
        (Log, "rotate"),
    )
    for last in range(100):
        folder, truth = tmp_path / str(last), dict(TRUTH)
        live = LiveIndex(folder, built.uri)
        _write(live, truth, 0)
        left = [last]

        def killed_in_time(step: Callable, left: list[int] = left) -> Callable:
            def taken(*args: object, **knobs: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                return step(*args, **knobs)

            return taken

        killed = False
        with monkeypatch.context() as patch:
            for place, name in steps:
                patch.setattr(place, name, killed_in_time(getattr(place, name)))
            try:
                live.compact()
                _write(live, truth, 1)
                versions.activate(folder, 0)
                live.adopt()
                live.compact()
            except KeyboardInterrupt:
                killed = True
        live.close()
        again = LiveIndex(folder)
        assert _equal(again, truth)
        _write(again, truth, 2)
        for number in _numbers(folder):
            versions.activate(folder, number)
            again.adopt()
            assert _equal(again, truth)
        again.close()
        if not killed:
            break
    assert last > 15


def test_what_a_killed_compaction_left_is_no_version_of_another_base(
    live: LiveIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, truth = tmp_path / "live", dict(TRUTH)
    _write(live, truth, 0)
    live.compact()
    _write(live, truth, 1)
    with monkeypatch.context() as patch:

        def dies(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(versions, "make_current", dies)
        with pytest.raises(KeyboardInterrupt):
            compaction.compact(folder)
    assert (folder / "versions/00002/manifest.json").exists()  # whole, but never current
    versions.activate(folder, 0)
    live.adopt()
    _write(live, truth, 2)
    live.compact()
    assert live.version == 2
    assert sum(each.snapshot.rows for each in live.shards) == len(truth)
    assert _equal(live, truth)
