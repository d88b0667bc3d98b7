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

MATRIX, NEW, QUERIES = vectors(40, DIM), vectors(300, DIM, seed=7), vectors(3, DIM, seed=9)
SHARDS = [{f"d{i}": MATRIX[i] for i in range(25)}, {f"d{i}": MATRIX[i] for i in range(25, 40)}]
TRUTH = SHARDS[0] | SHARDS[1]
Truth = dict[str, np.ndarray]


def _write(live: LiveIndex, truth: Truth, step: int) -> None:
    """Replace, add and delete documents."""
    names = [f"d{(step * 7 + i) % 40}" for i in range(5)] + [f"n{step}-{i}" for i in range(5)]
    matrix = NEW[10 * step : 10 * step + 10]
    live.upsert(table(names, step), matrix)
    truth |= dict(zip(names, matrix, strict=True))
    deleted_ids = [f"d{(step * 11 + i) % 40}" for i in range(3)] + [f"n{step}-0"]
    live.delete(deleted_ids)
    for name in deleted_ids:
        truth.pop(name, None)


def _equal(live: LiveIndex, truth: Truth) -> bool:
    """Compare with brute force: every document once, in the right order."""
    return search_index(live, QUERIES, k=500) == brute_force(truth, QUERIES, k=500)


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
    folder, truth, new_vectors = tmp_path_factory.mktemp("live"), dict(TRUTH), iter(NEW)
    config = LiveConfig(keep_versions=keep)
    live, follower = LiveIndex(folder, built.uri, config=config), LiveIndex(folder, follow=True)
    for step, (kind, numbers) in enumerate(history):
        names = [f"d{number}" for number in dict.fromkeys(numbers)]
        match kind:
            case "upsert":
                matrix = np.stack([next(new_vectors) for _ in names])
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
                numbers_kept = _numbers(folder)
                versions.activate(folder, numbers_kept[numbers[0] % len(numbers_kept)])
                live.adopt()
            case "reopen":
                live.close()
                live = LiveIndex(folder, config=config)
        assert all(each.log_kept for each in versions.listing(folder))
        follower.refresh()
        assert _equal(live, truth)
        assert _equal(follower, truth)
    live.close()


def test_a_document_in_a_new_shard_stays_there_after_rollback(live: LiveIndex, tmp_path: Path) -> None:
    """A version forgot the document, which was then written to another shard; an older version has it."""
    folder, truth = tmp_path / "live", dict(TRUTH)
    moved_ids = [name for name in SHARDS[0] if owners([name], [], shards=2) == [1]][:3]
    live.delete(moved_ids)
    live.compact()
    live.upsert(table(moved_ids[:2], 1), NEW[:2])
    truth = {name: vector for name, vector in truth.items() if name not in moved_ids}
    truth |= dict(zip(moved_ids[:2], NEW, strict=False))
    versions.activate(folder, 0)
    live.adopt()
    for reopen in (False, True):
        if reopen:
            live.close()
            live = LiveIndex(folder)
        assert [each.knows(moved_ids) for each in live.shards] == [[False] * 3, [True, True, False]]
        assert _equal(live, truth)
    live.upsert(table(moved_ids[1:], 2), NEW[2:4])
    live.delete(moved_ids[:1])
    truth |= dict(zip(moved_ids[1:], NEW[2:], strict=False))
    del truth[moved_ids[0]]
    assert _equal(live, truth)
    assert live.get(moved_ids[0]) is None
    versions.activate(folder, 1)
    live.adopt()
    assert _equal(live, truth)


def test_only_one_of_several_processes_writes_the_register(
    built: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ready, make_folder = tmp_path / "live", threading.Barrier(4), versions.make_folder

    def together(path: Path) -> None:
        ready.wait(10)  # no process has found a register
        make_folder(path)

    monkeypatch.setattr(versions, "make_folder", together)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(versions.current, folder, built.uri) for _ in range(4)]
    assert {each.result().number for each in futures} == {0}
    assert {each.result() for each in futures} == {versions.current(folder)}


def test_versions_are_listed_and_old_ones_deleted(live: LiveIndex, built: Artifact, tmp_path: Path) -> None:
    folder, truth = tmp_path / "live", dict(TRUTH)
    for step in range(3):
        _write(live, truth, step)
        live.compact()
        if step == 0:
            follower, snapshots = LiveIndex(folder, follow=True), live.snapshots()
            results = search_index(follower, QUERIES, k=9)
    assert sorted(path.name for path in (folder / "versions").iterdir()) == ["00002", "00003"]
    assert Path(built.uri, "manifest.json").exists()
    last = versions.listing(folder)[-1]
    assert (last.number, last.uri, last.documents, last.current, last.log_kept) == (
        *(3, f"{folder}/versions/00003", len(truth)),
        *(True, True),
    )
    assert last.created == last_manifest(last.uri)
    assert [each.current for each in versions.listing(folder)] == [False, True]
    # A follower of a deleted version still reads it, and then switches to the current version.
    assert search_index(follower, QUERIES, k=9) == results
    assert snapshots[0].documents([0]).num_rows == 1
    follower.refresh()
    assert (follower.version, _equal(follower, truth)) == (3, True)


def last_manifest(uri: str) -> str:
    created: str = versions.open_artifact(uri, kind="index").manifest.info["created"]
    return created


def test_an_unusable_version_is_refused_without_changes(live: LiveIndex, tmp_path: Path) -> None:
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
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=r"shard-00001/kept.faiss is damaged"):
        versions.activate(folder, 1)
    part.write_bytes(content)
    segments = sorted(versions.log_folder(folder, 1).glob("*.log"))
    moved_segment = segments[0].rename(tmp_path / "aside")
    assert [each.log_kept for each in versions.listing(folder)] == [False, True]
    with pytest.raises(ArtifactError, match="later records of the log were dropped"):
        versions.activate(folder, 1)
    assert versions.current(folder).number == 2
    moved_segment.rename(segments[0])
    versions.activate(folder, 1)
    live.adopt()
    assert _equal(live, truth)


def test_every_write_survives_a_kill_between_any_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run compaction, rollback and compaction, and kill the process after each step in turn."""
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
        remaining = [last]

        def kill_at_last(step: Callable, remaining: list[int] = remaining) -> Callable:
            def run_step(*args: object, **knobs: object) -> object:
                remaining[0] -= 1
                if remaining[0] < 0:
                    raise KeyboardInterrupt
                return step(*args, **knobs)

            return run_step

        was_killed = False
        with monkeypatch.context() as patch:
            for owner, name in steps:
                patch.setattr(owner, name, kill_at_last(getattr(owner, name)))
            try:
                live.compact()
                _write(live, truth, 1)
                versions.activate(folder, 0)
                live.adopt()
                live.compact()
            except KeyboardInterrupt:
                was_killed = True
        live.close()
        reopened = LiveIndex(folder)
        assert _equal(reopened, truth)
        _write(reopened, truth, 2)
        for number in _numbers(folder):
            versions.activate(folder, number)
            reopened.adopt()
            assert _equal(reopened, truth)
        reopened.close()
        if not was_killed:
            break
    assert last > 15


def test_a_draft_of_another_base_is_not_made_current(
    live: LiveIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, truth = tmp_path / "live", dict(TRUTH)
    _write(live, truth, 0)
    live.compact()
    _write(live, truth, 1)
    with monkeypatch.context() as patch:

        def die(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(versions, "make_current", die)
        with pytest.raises(KeyboardInterrupt):
            compaction.compact(folder)
    assert (folder / "versions/00002/manifest.json").exists()  # complete, but never current
    versions.activate(folder, 0)
    live.adopt()
    _write(live, truth, 2)
    live.compact()
    assert live.version == 2
    assert sum(each.snapshot.rows for each in live.shards) == len(truth)
    assert _equal(live, truth)
