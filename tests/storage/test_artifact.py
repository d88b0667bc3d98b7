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
    """Return a URI of a local path, and of a filesystem that only fsspec supports."""
    return str(tmp_path / "art") if request.param == "local" else f"memory://{tmp_path}/art"


def test_a_committed_artifact_is_read_back(uri: str):
    build(uri)
    artifact = open_artifact(uri, kind="thing")
    assert artifact.table("rows").equals(TABLE)
    assert artifact.table("rows.arrow").equals(TABLE)
    assert artifact.read_json("facts.json") == {"a": [2], "b": 1}
    assert pa.Table.from_batches(artifact.batches("rows", rows=2)).equals(TABLE)
    assert artifact.counts == {"rows": 3}
    assert artifact.manifest.parts["rows/part-00000.parquet"].rows == 3


def test_an_unfinished_or_other_artifact_is_an_error(uri: str):
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
def test_a_flipped_byte_in_a_part_is_an_error(uri: str, name: str):
    build(uri)
    data = bytearray(fs.read_bytes(fs.join(uri, name)))
    data[len(data) // 2] ^= 1
    fs.write_bytes(fs.join(uri, name), bytes(data))
    with pytest.raises(ArtifactError, match=f"{name} is damaged"):
        open_artifact(uri, kind="thing").file(name)


def test_equal_settings_and_rows_give_equal_digests(tmp_path: Path):
    first = build(str(tmp_path / "first"))
    assert build(str(tmp_path / "second"), workers=7).digest == first.digest
    assert build(str(tmp_path / "third"), knob=2).digest != first.digest
    assert build(str(tmp_path / "fourth"), rows=TABLE.slice(1)).digest != first.digest


def test_a_finished_artifact_is_not_built_again(uri: str):
    built = build(uri)
    assert not [name for name in fs.list_files(uri) if name.startswith("_work")]
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    assert draft.finished
    assert draft.existing().digest == built.digest
    with pytest.raises(ArtifactError, match="already holds another 'thing' artifact"):
        Draft(uri, kind="thing", config=Settings(knob=2), parents={})


def test_only_the_same_settings_resume_unfinished_work(uri: str):
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    fs.write_bytes(draft.work("checkpoint"), b"state")
    assert fs.exists(Draft(uri, kind="thing", config=Settings(), parents={}).work("checkpoint"))
    other = Draft(uri, kind="thing", config=Settings(knob=2), parents={})
    assert not fs.exists(other.work("checkpoint"))


@pytest.mark.parametrize("name", ["notes.txt", "data/part-0.parquet"])
def test_a_folder_with_other_files_is_an_error_and_unchanged(uri: str, name: str):
    fs.write_bytes(fs.join(uri, name), b"mine")
    with pytest.raises(ArtifactError, match=f"has files that are not .*such as {name.split('/')[0]}: choose"):
        Draft(uri, kind="thing", config=Settings(), parents={})
    assert fs.read_bytes(fs.join(uri, name)) == b"mine"
    assert list(fs.list_files(uri)) == [name]


def test_a_file_at_the_output_is_an_error(tmp_path: Path):
    (tmp_path / "thesis").write_text("mine")
    with pytest.raises(ArtifactError, match="thesis is a file: choose another output"):
        build(str(tmp_path / "thesis"))
    assert (tmp_path / "thesis").read_text() == "mine"


def test_an_empty_folder_may_become_an_artifact(tmp_path: Path):
    Path(tmp_path, "art/empty").mkdir(parents=True)
    assert build(str(tmp_path / "art")).counts == {"rows": 3}


def test_a_kill_while_clearing_never_resumes_other_work(uri: str, monkeypatch: pytest.MonkeyPatch):
    """Kill the process after each write and each deletion in turn."""
    digest = build(f"{uri}-whole").digest
    for last in range(20):
        other = Draft(uri, kind="thing", config=Settings(knob=2), parents={})
        other.write_json("facts.json", {})
        other.write_json("stale/part.json", {})
        fs.write_bytes(other.work("done"), b"by the other")
        remaining = [last]

        def killed_in_time(
            step: Callable[..., None], remaining: list[int] = remaining
        ) -> Callable[..., None]:
            def killable_step(*args: object) -> None:
                if threading.current_thread() is threading.main_thread():  # others renew leases meanwhile
                    remaining[0] -= 1
                    if remaining[0] < 0:
                        raise KeyboardInterrupt
                step(*args)

            return killable_step

        with monkeypatch.context() as patch:
            for name in ("write_bytes", "delete"):
                patch.setattr(fs, name, killed_in_time(getattr(fs, name)))
            with suppress(KeyboardInterrupt):
                Draft(uri, kind="thing", config=Settings(), parents={})
        for knob in (2, 1) if last % 2 else (1,):  # the other settings may come first
            again = Draft(uri, kind="thing", config=Settings(knob=knob), parents={})
            assert fs.exists(again.work("done")) == fs.exists(again.path("stale/part.json"))
        if remaining[0] >= 0:
            break
    assert last > 3
    assert build(uri).digest == digest


def test_a_pending_claim_is_not_an_unknown_file(uri: str):
    fs.write_bytes(fs.join(uri, "_work/fingerprint.pending"), b"half")
    assert build(uri).counts == {"rows": 3}


def test_a_long_manifest_is_read_by_shard_and_not_pickled(uri: str, monkeypatch: pytest.MonkeyPatch):
    unsharded = build(f"{uri}-whole")
    assert list(unsharded.manifest.parts) == ["facts.json", "rows.arrow", "rows/part-00000.parquet"]
    monkeypatch.setattr(manifest, "PARTS_PER_SHARD", 1)
    monkeypatch.setattr(artifact, "PARTS_PER_SHARD", 1)
    build(uri)
    sharded = open_artifact(uri, kind="thing")
    assert len(sharded.manifest.parts) == 3
    assert sharded.digest == unsharded.digest
    assert len(pickle.dumps(sharded)) < 3000
    read_uris: list[str] = []
    reader = fs.read_bytes
    monkeypatch.setattr(fs, "read_bytes", lambda uri: (read_uris.append(uri), reader(uri))[1])
    again = pickle.loads(pickle.dumps(sharded))
    assert not read_uris
    assert again.names("rows/") == ["rows/part-00000.parquet"]
    assert again.names("rows") == ["rows.arrow", "rows/part-00000.parquet"]
    assert len([name for name in read_uris if "/_manifest/" in name]) == 2
    assert again.table("rows") == TABLE
    assert dict(again.manifest.parts) == dict(unsharded.manifest.parts)
    assert again.names() == unsharded.names()
    assert "absent" not in again.manifest.parts
    assert "zzz" not in again.manifest.parts
    assert again.manifest == sharded.manifest
    fs.delete(uri)
    build(uri, knob=2, rows=TABLE.slice(1))
    manifest._read_shard.cache_clear()
    with pytest.raises(ArtifactError, match="deleted or rebuilt"):
        sharded.names()


def test_the_digest_is_the_sha256_of_the_json(tmp_path: Path):
    thing = build(str(tmp_path / "a")).manifest
    parts = {name: part.sha256 for name, part in thing.parts.items()}
    for checksums in (parts, {}, {'"é': "1"} | parts):
        serialized = json.dumps([thing.kind, thing.config, {"of": "0"}, checksums], sort_keys=True).encode()
        listed_parts = {name: manifest.Part(sha256, 1) for name, sha256 in checksums.items()}
        digest = manifest.digest_of(thing.kind, thing.config, {"of": "0"}, listed_parts)
        assert digest == hashlib.sha256(serialized).hexdigest()


def test_a_second_commit_is_an_error(uri: str, monkeypatch: pytest.MonkeyPatch):
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    draft.write_json("facts.json", {})
    fs.write_bytes(draft.path("manifest.json"), b"of another process")
    with pytest.raises(ArtifactError, match=f"another process has committed {uri} while"):
        draft.commit(counts={})
    assert fs.read_bytes(draft.path("manifest.json")) == b"of another process"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the files that are read in blocks, with a separate cache for this test."""
    blocks, uris = fs._blocks, []

    def counted(uri: str):
        if not uri.endswith("manifest.json"):
            uris.append(uri)
        return blocks(uri)

    monkeypatch.setattr(fs, "_blocks", counted)
    monkeypatch.setattr(fs.tempfile, "gettempdir", lambda: str(tmp_path))
    return uris


def test_a_remote_file_is_read_once_and_its_copy_is_verified(reads: list[str], tmp_path: Path):
    uri = f"memory://{tmp_path}/once"
    built = build(uri)
    reads.clear()
    name = "rows.arrow"
    copy = open_artifact(uri, kind="thing").local_file(name)
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == built.manifest.parts[name].sha256
    assert reads == [f"{uri}/{name}"]
    assert open_artifact(uri, kind="thing").local_file(name) == copy  # like another process of the node
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


def test_processes_of_a_node_share_checksums_of_large_files(
    reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(artifact, "MIN_SHARED_CHECK_BYTES", 1)
    uri = str(tmp_path / "art")
    build(uri)
    reads.clear()
    for _ in range(3):  # each artifact is a separate object
        open_artifact(uri, kind="thing").file("rows.arrow")
    assert reads == [f"{uri}/rows.arrow"]
    Path(uri, "rows.arrow").write_bytes(bytes(Path(uri, "rows.arrow").stat().st_size))
    with pytest.raises(ArtifactError, match=r"rows\.arrow is damaged"):
        open_artifact(uri, kind="thing").file("rows.arrow")
