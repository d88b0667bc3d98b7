import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from live_shards import DIM, index, opened, quantizer, scored, search, table
from scalingnote.core import topk
from scalingnote.core.errors import ArtifactError, ConfigError, DataError, SearchError
from scalingnote.index import ivf
from scalingnote.index import shard as layouts
from scalingnote.index.config import IVFPQ, Family, FastScan, Flat, RaBitQ, ScalarQuantized
from scalingnote.index.live import live_shard, wal
from scalingnote.index.live.live_shard import LiveShard, owners
from scalingnote.index.live.versions import OpenVersion
from scalingnote.index.shard import DocumentRows
from synthetic_corpus import vectors

BASE = {f"d{i}": vector for i, vector in enumerate(vectors(60, DIM))}
NEW = vectors(400, DIM, seed=7)
QUERIES = vectors(5, DIM, seed=9)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> OpenVersion:
    return opened(index(f"{tmp_path_factory.mktemp('base')}/index", [BASE]))


@pytest.fixture
def live(base: OpenVersion, tmp_path: Path) -> LiveShard:
    return LiveShard(base, 0, tmp_path)


def test_a_snapshot_does_not_change(live: LiveShard) -> None:
    live.upsert(table(["d1", "new"]), NEW[:2])
    snapshot, expected = live.snapshot, search(live.snapshot, QUERIES, k=62)
    live.delete(["new", "d2"])
    live.upsert(table(["d1", "d3"], 2), NEW[2:4])
    live.merge()
    live.upsert(table(["later"]), NEW[4:5])
    assert search(snapshot, QUERIES, k=62) == expected
    assert snapshot.documents([60])["title"].to_pylist() == ["title 0 of d1"]
    assert live.get("d1") == table(["d1"], 2).to_pylist()[0]
    with pytest.raises(SearchError, match="no row 62: this shard has 62 rows"):
        snapshot.documents([62])


def test_a_document_keeps_its_score_when_it_is_merged(live: LiveShard) -> None:
    live.upsert(table([f"n{i}" for i in range(50)]), NEW[:50])
    before = scored(live.snapshot, QUERIES, k=30)
    assert live.merge() == 50
    assert live.merge() == 0
    after = scored(live.snapshot, QUERIES, k=30)
    for scores_or_rows, same in zip(before, after, strict=True):
        np.testing.assert_array_equal(scores_or_rows, same)


def test_searches_during_writes_find_every_document_once(
    base: OpenVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads write one document again and again while others search for it and lists are merged."""
    monkeypatch.setattr(live_shard, "MERGE_ROWS", 16)
    live = LiveShard(base, 0, tmp_path)
    live.upsert(table(["hot"]), QUERIES[:1])
    stop, wrong_answers = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            answer = search(live.snapshot, QUERIES[:1], k=3)[0]
            if answer[0] != "hot" or len(set(answer)) < 3 or live.get("hot") is None:
                wrong_answers.append(answer)

    def write(name: int) -> None:
        for count in range(40):
            live.upsert(table(["hot", f"w{name}-{count}"]), np.stack([QUERIES[0], NEW[40 * name + count]]))

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(name,)) for name in range(3)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert wrong_answers == []
    assert len(live) == 60 + 1 + 120
    live.close()
    reopened = LiveShard(base, 0, tmp_path)
    assert sorted(search(reopened.snapshot, QUERIES[:1], k=300)[0]) == sorted(
        search(live.snapshot, QUERIES[:1], k=300)[0]
    )


def test_waiting_writers_share_a_sync(live: LiveShard, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs, first, go = [], threading.Event(), threading.Event()
    sync = wal.Log.sync

    def slow(log: wal.Log) -> int:
        syncs.append(threading.current_thread().name)
        first.set()
        go.wait()
        return sync(log)

    monkeypatch.setattr(wal.Log, "sync", slow)
    threads = [
        threading.Thread(target=lambda i=i: live.upsert(table([f"n{i}"]), NEW[i : i + 1])) for i in range(8)
    ]
    threads[0].start()
    first.wait()
    for thread in threads[1:]:
        thread.start()
    while len(live._waiting) < 7:
        pass
    go.set()
    for thread in threads:
        thread.join()
    assert len(syncs) == 2
    assert len(live) == 68


def test_invalid_rows_are_rejected_and_the_others_written(live: LiveShard) -> None:
    doc_ids = ["good", None, "nan", "zero", "", "twice", "twice", "huge"]
    matrix = np.tile(np.float32(3) * NEW[0], (8, 1))
    matrix[2, 1], matrix[3], matrix[6] = np.nan, 0, NEW[1]
    documents = table([i or "" for i in doc_ids]).set_column(0, "doc_id", pa.array(doc_ids))
    result = live.upsert(documents.append_column("more", pa.array(range(8))), matrix)
    assert result.rows == 3
    assert [(row["row"], row["reason"]) for row in result.rejected] == [
        ("row 1", "doc_id is missing"),
        ("nan", "vector is not finite"),
        ("zero", "vector is all zero: it has no direction"),
        ("row 4", "doc_id is missing"),
    ]
    snapshot = live.snapshot
    assert snapshot.documents(range(60, 63))["doc_id"].to_pylist() == ["good", "twice", "huge"]
    np.testing.assert_allclose(snapshot.tail, NEW[[0, 1, 0]], atol=1e-6)
    empty_result = live.upsert(table(["bad"]), np.zeros((1, DIM), np.float32))
    assert (empty_result.sequence, empty_result.rows, len(empty_result.rejected)) == (result.sequence, 0, 1)


def test_vectors_keep_their_length_in_an_index_with_dot(tmp_path: Path) -> None:
    base = opened(index(f"{tmp_path}/index", [BASE], similarity="dot"))
    live = LiveShard(base, 0, tmp_path)
    names = [f"n{number}" for number in range(40)]
    new_vectors = NEW[:40] * np.linspace(0.2, 9, 40, dtype=np.float32)[:, None]
    live.upsert(table(names), new_vectors)
    matrix = np.concatenate([np.stack([*BASE.values()]), new_vectors])
    all_ids = np.array([*BASE, *names], object)
    expected = [all_ids[np.argsort(-(matrix @ query))[:10]].tolist() for query in QUERIES]
    assert search(live.snapshot, QUERIES, k=10) == expected
    live.merge()
    assert search(live.snapshot, QUERIES, k=10) == expected
    np.testing.assert_allclose(live.vector("n39"), new_vectors[39], rtol=1e-5)
    follower = LiveShard(base, 0, tmp_path, follow=True)
    assert search(follower.snapshot, QUERIES, k=10) == expected


@pytest.mark.parametrize(
    ("documents", "matrix", "message"),
    [
        (table(["a"]).drop_columns(["topic"]), NEW[:1], "no column 'topic': this index has doc_id, title"),
        (table(["a"]), NEW[:1, :8], r"float32 of shape \(1, 8\): pass floats of shape \(1, 16\)"),
        (table(["a"]), np.ones((1, DIM), np.int64), "vectors are int64"),
        (table(["a"]).set_column(1, "title", pa.array([[1]])), NEW[:1], "not have the types of this index"),
    ],
)
def test_documents_and_vectors_of_wrong_types_are_refused(
    live: LiveShard, documents: pa.Table, matrix: np.ndarray, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        live.upsert(documents, matrix)
    assert live.snapshot.sequence == 0


def test_a_follower_has_acknowledged_writes_after_a_refresh(
    live: LiveShard, base: OpenVersion, tmp_path: Path
) -> None:
    follower = LiveShard(base, 0, tmp_path, follow=True)
    live.upsert(table(["a", "d1"]), NEW[:2])
    live.delete(["d2"])
    assert len(follower) == 60
    assert follower.refresh() == 2
    assert follower.refresh() == 0
    assert search(follower.snapshot, QUERIES, k=70) == search(live.snapshot, QUERIES, k=70)
    with pytest.raises(ConfigError, match="follows"):
        follower.delete(["a"])
    with pytest.raises(ConfigError, match="has one writer"):
        LiveShard(base, 0, tmp_path)


def test_after_a_failed_sync_no_write_is_acknowledged(
    live: LiveShard, base: OpenVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.upsert(table(["a"]), NEW[:1])

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(wal, "_sync", fail)
        with pytest.raises(ArtifactError, match="cannot be made durable"):
            live.upsert(table(["b"]), NEW[1:2])
    with pytest.raises(ArtifactError, match="open it again"):
        live.upsert(table(["c"]), NEW[2:3])
    assert (live.get("a") is not None, live.get("b"), live.get("c")) == (True, None, None)
    live.close()
    reopened = LiveShard(base, 0, tmp_path)
    assert reopened.get("a") is not None
    assert reopened.get("c") is None
    reopened.close()


def test_ids_with_equal_hashes_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(names: list[list[str]], doc_ids: list[str]) -> list[int]:
        return DocumentRows(pa.table({"doc_id": pa.chunked_array(names, pa.string())})).find(doc_ids).tolist()

    names = [f"d{i}" for i in range(50)]
    hash_of = layouts.hash_of
    monkeypatch.setattr(layouts, "hash_of", lambda keys: hash_of(keys) % np.uint64(4))
    assert find([names[:20], names[20:]], ["d7", "absent", "d49", "d7"]) == [7, -1, 49, 7]
    assert find([names], []) == []
    assert find([], ["d1"]) == [-1]
    with pytest.raises(ArtifactError, match="'d3' is in the shard twice"):
        find([[*names, "d3"]], ["d1"])


def test_a_document_is_in_one_shard(tmp_path: Path) -> None:
    other = {f"e{i}": vector for i, vector in enumerate(NEW[:40])}
    base = opened(index(f"{tmp_path}/index", [BASE, other]))
    shards = [LiveShard(base, number, tmp_path) for number in range(2)]

    def owner(doc_id: str) -> int:
        return owners([doc_id], [each.knows([doc_id]) for each in shards], shards=2)[0]

    assert [owner("d1"), owner("e1")] == [0, 1]
    names = [f"n{i}" for i in range(20)]
    shard_of_hash = owners(names, [], shards=2)
    assert set(shard_of_hash) == {0, 1}
    assert owners(names, [each.knows(names) for each in shards], shards=2) == shard_of_hash
    foreign_id = names[shard_of_hash.index(1)]
    with pytest.raises(DataError, match=f"'{foreign_id}' belongs to shard 1, not 0"):
        shards[0].upsert(table([foreign_id]), NEW[:1])
    moved_id = next(f"d{i}" for i in range(60) if owners([f"d{i}"], [], shards=2) == [1])
    shards[0].delete([moved_id])
    assert owner(moved_id) == 0  # the shard where it was, not the one of its hash
    shards[0].upsert(table([moved_id]), NEW[:1])
    assert owner(moved_id) == 0


@pytest.mark.parametrize(
    "family",
    [FastScan(), FastScan(refine="none"), IVFPQ(nbits=4, refine="none"), ScalarQuantized(), RaBitQ(), Flat()],
    ids=lambda family: f"{family.kind}-{getattr(family, 'refine', '')}",
)
def test_lists_after_deletions_and_merges_equal_new_lists(family: Family) -> None:
    trained_quantizer = quantizer(family)
    alive = np.random.default_rng(0).random(250) < 0.6
    lists, new = ivf.empty(trained_quantizer), ivf.empty(trained_quantizer)
    ivf.add(lists, NEW[:250])
    copy, files = ivf.copy_lists(lists), ivf.dump_files(lists)
    more = ivf.empty(trained_quantizer)
    ivf.add(more, NEW[250:])
    ivf.drop_dead_rows(copy, alive)
    copy = ivf.merge([copy, more])
    assert ivf.dump_files(lists) == files  # the original is unchanged
    ivf.add(new, np.concatenate([NEW[:250][alive], NEW[250:]]))
    chosen = ivf.choose_lists(QUERIES, copy.coarse, nprobe=3)
    for k in (5, 1000):
        results, expected = (
            topk.merge(*ivf.candidates(each, QUERIES, chosen=chosen, k=k, refine_factor=2), k=k)
            for each in (copy, new)
        )
        np.testing.assert_array_equal(results[0], expected[0])
        if k == 1000:  # otherwise equal codes may tie at the last place
            np.testing.assert_array_equal(results[1], expected[1])
