import hashlib
import json
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from scalingnote.core.config import Config, Resources
from scalingnote.core.errors import ArtifactError
from scalingnote.storage import artifact, manifest
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact


class Settings(Config):
    knob: int = 1
    resources: Resources = Resources()


TABLE = pa.table({"id": ["a", "b", "c"], "n": [1, 2, 3]})


def build(uri: str, *, knob: int = 1, workers: int = 2, rows: pa.Table = TABLE) -> Artifact:
    draft = Draft(
        uri, kind="thing", config=Settings(knob=knob, resources=Resources(workers=workers)), parents={}
    )
    draft.write_table("rows/part-00000.parquet", rows)
    draft.write_table("rows.arrow", rows)
    draft.write_json("facts.json", {"b": 1, "a": [2]})
    return draft.commit(counts={"rows": len(rows)})


@pytest.fixture(params=["local", "fsspec"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The contract holds on a local path and on a filesystem that only fsspec knows."""
    return str(tmp_path / "art") if request.param == "local" else f"memory://{tmp_path}/art"


def test_what_is_committed_is_read_back(uri: str):
    build(uri)
    artifact = open_artifact(uri, kind="thing")
    assert artifact.table("rows").equals(TABLE)
    assert artifact.table("rows.arrow").equals(TABLE)
    assert artifact.read_json("facts.json") == {"a": [2], "b": 1}
    assert pa.Table.from_batches(artifact.batches("rows", rows=2)).equals(TABLE)
    assert artifact.counts == {"rows": 3}
    assert artifact.manifest.parts["rows/part-00000.parquet"].rows == 3


def test_what_is_not_the_whole_artifact_asked_for_is_refused(uri: str):
    Draft(uri, kind="thing", config=Settings(), parents={}).write_table("rows/part-00000.parquet", TABLE)
    with pytest.raises(ArtifactError, match="no finished 'thing' artifact"):
        open_artifact(uri, kind="thing")
    build(uri)
    with pytest.raises(ArtifactError, match="holds 'thing', expected 'index'"):
        open_artifact(uri, kind="index")
    fs.delete(fs.join(uri, "facts.json"))
    with pytest.raises(ArtifactError, match=r"facts\.json is missing"):
        open_artifact(uri, kind="thing").read_json("facts.json")
    fs.write_bytes(fs.join(uri, "manifest.json"), b'{"kind": "thing"}')
    with pytest.raises(ArtifactError, match="is not a manifest"):
        open_artifact(uri, kind="thing")


@pytest.mark.parametrize("name", ["rows/part-00000.parquet", "rows.arrow", "facts.json"])
def test_a_flipped_byte_in_any_part_is_refused_by_name(uri: str, name: str):
    build(uri)
    data = bytearray(fs.read_bytes(fs.join(uri, name)))
    data[len(data) // 2] ^= 1
    fs.write_bytes(fs.join(uri, name), bytes(data))
    with pytest.raises(ArtifactError, match=f"{name} is damaged"):
        open_artifact(uri, kind="thing").file(name)


def test_the_same_settings_and_rows_give_the_same_digest_wherever_they_ran(tmp_path: Path):
    first = build(str(tmp_path / "first"))
    assert build(str(tmp_path / "second"), workers=7).digest == first.digest
    assert build(str(tmp_path / "third"), knob=2).digest != first.digest
    assert build(str(tmp_path / "fourth"), rows=TABLE.slice(1)).digest != first.digest


def test_a_finished_artifact_is_not_built_again_nor_overwritten(uri: str):
    built = build(uri)
    assert not [name for name in fs.list_files(uri) if name.startswith("_work")]
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    assert draft.finished
    assert draft.existing().digest == built.digest
    with pytest.raises(ArtifactError, match="already holds another 'thing' artifact"):
        Draft(uri, kind="thing", config=Settings(knob=2), parents={})


def test_unfinished_work_is_resumed_only_by_the_same_settings(uri: str):
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    fs.write_bytes(draft.work("checkpoint"), b"state")
    assert fs.exists(Draft(uri, kind="thing", config=Settings(), parents={}).work("checkpoint"))
    other = Draft(uri, kind="thing", config=Settings(knob=2), parents={})
    assert not fs.exists(other.work("checkpoint"))


@pytest.mark.parametrize("name", ["notes.txt", "data/part-0.parquet"])
def test_a_folder_with_files_of_others_is_refused_and_left_as_it_is(uri: str, name: str):
    fs.write_bytes(fs.join(uri, name), b"mine")
    with pytest.raises(ArtifactError, match=f"has files that are not .*such as {name.split('/')[0]}: choose"):
        Draft(uri, kind="thing", config=Settings(), parents={})
    assert fs.read_bytes(fs.join(uri, name)) == b"mine"
    assert list(fs.list_files(uri)) == [name]


def test_a_file_is_no_place_for_an_artifact(tmp_path: Path):
    (tmp_path / "thesis").write_text("mine")
    with pytest.raises(ArtifactError, match="thesis is a file: choose another output"):
        build(str(tmp_path / "thesis"))
    assert (tmp_path / "thesis").read_text() == "mine"


def test_an_empty_folder_may_be_filled(tmp_path: Path):
    Path(tmp_path, "art/empty").mkdir(parents=True)
    assert build(str(tmp_path / "art")).counts == {"rows": 3}


def test_wherever_clearing_is_killed_nothing_is_resumed_or_refused(uri: str, monkeypatch: pytest.MonkeyPatch):
    """Each write and each deletion is the last one in its turn."""
    digest = build(f"{uri}-whole").digest
    for last in range(20):
        other = Draft(uri, kind="thing", config=Settings(knob=2), parents={})
        other.write_json("facts.json", {})
        other.write_json("stale/part.json", {})
        fs.write_bytes(other.work("done"), b"by the other")
        left = [last]

        def killed_in_time(step: Callable[..., None], left: list[int] = left) -> Callable[..., None]:
            def taken(*args: object) -> None:
                if threading.current_thread() is threading.main_thread():  # others renew leases meanwhile
                    left[0] -= 1
                    if left[0] < 0:
                        raise KeyboardInterrupt
                step(*args)

            return taken

        with monkeypatch.context() as patch:
            for name in ("write_bytes", "delete"):
                patch.setattr(fs, name, killed_in_time(getattr(fs, name)))
            with suppress(KeyboardInterrupt):
                Draft(uri, kind="thing", config=Settings(), parents={})
        for knob in (2, 1) if last % 2 else (1,):  # the other may come first
            again = Draft(uri, kind="thing", config=Settings(knob=knob), parents={})
            assert fs.exists(again.work("done")) == fs.exists(again.path("stale/part.json"))
        if left[0] >= 0:
            break
    assert last > 3
    assert build(uri).digest == digest


def test_a_claim_that_was_being_written_is_no_file_of_others(uri: str):
    fs.write_bytes(fs.join(uri, "_work/fingerprint.pending"), b"half")
    assert build(uri).counts == {"rows": 3}


def test_a_long_manifest_is_read_shard_by_shard_and_not_sent(uri: str, monkeypatch: pytest.MonkeyPatch):
    whole = build(f"{uri}-whole")
    assert list(whole.manifest.parts) == ["facts.json", "rows.arrow", "rows/part-00000.parquet"]
    monkeypatch.setattr(manifest, "PARTS_PER_SHARD", 1)
    monkeypatch.setattr(artifact, "PARTS_PER_SHARD", 1)
    build(uri)
    made = open_artifact(uri, kind="thing")
    assert len(made.manifest.parts) == 3
    assert made.digest == whole.digest
    assert len(pickle.dumps(made)) < 3000
    read: list[str] = []
    reader = fs.read_bytes
    monkeypatch.setattr(fs, "read_bytes", lambda uri: (read.append(uri), reader(uri))[1])
    again = pickle.loads(pickle.dumps(made))
    assert not read
    assert again.names("rows/") == ["rows/part-00000.parquet"]
    assert again.names("rows") == ["rows.arrow", "rows/part-00000.parquet"]
    assert len([name for name in read if "/_manifest/" in name]) == 2
    assert again.table("rows") == TABLE
    assert dict(again.manifest.parts) == dict(whole.manifest.parts)
    assert again.names() == whole.names()
    assert "absent" not in again.manifest.parts
    assert "zzz" not in again.manifest.parts
    assert again.manifest == made.manifest
    fs.delete(uri)
    build(uri, knob=2, rows=TABLE.slice(1))
    manifest._read_shard.cache_clear()
    with pytest.raises(ArtifactError, match="deleted or rebuilt"):
        made.names()


def test_the_digest_is_that_of_the_whole_as_json(tmp_path: Path):
    made = build(str(tmp_path / "a")).manifest
    parts = {name: part.sha256 for name, part in made.parts.items()}
    for given in (parts, {}, {'"é': "1"} | parts):
        whole = json.dumps([made.kind, made.config, {"of": "0"}, given], sort_keys=True).encode()
        found = {name: manifest.Part(sha256, 1) for name, sha256 in given.items()}
        digest = manifest.digest_of(made.kind, made.config, {"of": "0"}, found)
        assert digest == hashlib.sha256(whole).hexdigest()


def test_of_two_that_commit_one_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch):
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    draft.write_json("facts.json", {})
    fs.write_bytes(draft.path("manifest.json"), b"of another process")
    with pytest.raises(ArtifactError, match=f"another process has committed {uri} while"):
        draft.commit(counts={})
    assert fs.read_bytes(draft.path("manifest.json")) == b"of another process"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The files that were read in blocks, in a cache of this test's own."""
    blocks, found = fs._blocks, []

    def counted(uri: str):
        if not uri.endswith("manifest.json"):
            found.append(uri)
        return blocks(uri)

    monkeypatch.setattr(fs, "_blocks", counted)
    monkeypatch.setattr(fs.tempfile, "gettempdir", lambda: str(tmp_path))
    return found


def test_a_remote_file_is_read_once_and_its_copy_is_what_was_verified(reads: list[str], tmp_path: Path):
    uri = f"memory://{tmp_path}/once"
    built = build(uri)
    reads.clear()
    name = "rows.arrow"
    copy = open_artifact(uri, kind="thing").local_file(name)
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == built.manifest.parts[name].sha256
    assert reads == [f"{uri}/{name}"]
    assert open_artifact(uri, kind="thing").local_file(name) == copy  # as by another process of the node
    assert open_artifact(uri, kind="thing").directory("rows").name == "rows"
    assert reads == [f"{uri}/{name}", f"{uri}/rows/part-00000.parquet"]


def test_a_large_remote_part_is_copied_and_not_read_twice(
    reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uri = f"memory://{tmp_path}/large"
    build(uri)
    reads.clear()
    monkeypatch.setattr(artifact, "MAX_MEMORY_PART_BYTES", 1)
    assert open_artifact(uri, kind="thing").table("rows").equals(TABLE)
    assert reads == [f"{uri}/rows/part-00000.parquet"]


def test_a_damaged_remote_file_leaves_no_copy(reads: list[str], tmp_path: Path):
    uri = f"memory://{tmp_path}/harmed"
    build(uri)
    fs.write_bytes(f"{uri}/facts.json", b"{}")
    for _ in range(2):
        with pytest.raises(ArtifactError, match=r"facts\.json is damaged"):
            open_artifact(uri, kind="thing").local_file("facts.json")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(ArtifactError, match="has no part 'other'"):
        open_artifact(uri, kind="thing").local_file("other")


def test_the_processes_of_a_node_share_the_checksum_of_a_large_file(
    reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(artifact, "MIN_SHARED_CHECK_BYTES", 1)
    uri = str(tmp_path / "art")
    build(uri)
    reads.clear()
    for _ in range(3):  # each knows nothing of the others
        open_artifact(uri, kind="thing").file("rows.arrow")
    assert reads == [f"{uri}/rows.arrow"]
    Path(uri, "rows.arrow").write_bytes(bytes(Path(uri, "rows.arrow").stat().st_size))
    with pytest.raises(ArtifactError, match=r"rows\.arrow is damaged"):
        open_artifact(uri, kind="thing").file("rows.arrow")
