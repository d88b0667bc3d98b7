"""Two processes for the same artifact: one builds it, the other waits, or resumes if the first one ended."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalingnote.core.config import Config
from scalingnote.core.errors import ArtifactError
from scalingnote.storage import artifact, lease
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft

BUILDER = """
import sys
from pathlib import Path
from scalingnote.core.config import Config
from scalingnote.storage.artifact import Draft

class Settings(Config):
    knob: int = 1

draft = Draft(sys.argv[1], kind="thing", config=Settings(), parents={})
draft.write_bytes("part", b"theirs")
print("building", flush=True)
sys.stdin.readline()
draft.commit(counts={"rows": 1})
"""


class Settings(Config):
    knob: int = 1


def build(uri: str) -> Artifact:
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    if draft.finished:
        return draft.existing()
    draft.write_bytes("part", b"ours")
    return draft.commit(counts={"rows": 2})


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "thing")


@pytest.fixture
def other(uri: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that begins to build the artifact, and commits when it reads a line."""
    command = [sys.executable, "-c", BUILDER, uri]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        yield process
        process.kill()


def held_by(uri: str, **holder: object) -> None:
    """Write a lease like a process of another machine."""
    values = {"process": "x", "host": "elsewhere", "pid": 1, "beats": 1, **holder}
    fs.write_bytes(f"{uri}/_work/lease", json.dumps(values).encode())


def test_a_second_process_waits_and_reads_the_artifact(
    uri: str, other: "subprocess.Popen[str]", caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    artifacts: list[Artifact] = []
    second = threading.Thread(target=lambda: artifacts.append(build(uri)))
    second.start()
    time.sleep(3 * lease.POLL_INTERVAL_S)
    assert not artifacts
    other.communicate("commit\n")
    second.join()
    assert artifacts[0].counts == {"rows": 1}
    assert Path(uri, "part").read_bytes() == b"theirs"
    assert not Path(uri, "_work").exists()
    assert f"process {other.pid} of " in caplog.text


def test_an_artifact_committed_meanwhile_is_read(uri: str, monkeypatch: pytest.MonkeyPatch):
    build(uri)
    looks = iter([None])  # at the first read there is no manifest yet
    monkeypatch.setattr(
        artifact, "read_manifest", lambda uri, read=artifact.read_manifest: next(looks, read(uri))
    )
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    assert draft.finished
    assert not Path(uri, "_work").exists()


def test_the_lease_of_a_killed_process_is_free_at_once(uri: str, other: "subprocess.Popen[str]"):
    other.send_signal(signal.SIGKILL)
    other.wait()
    began = time.monotonic()
    assert build(uri).counts == {"rows": 2}
    assert time.monotonic() - began < lease.EXPIRY_S


def test_a_remote_holder_keeps_its_lease_while_it_renews_it(uri: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lease, "EXPIRY_S", 0.4)
    monkeypatch.setattr(lease, "POLL_INTERVAL_S", 0.05)
    held_by(uri)
    artifacts: list[Artifact] = []
    second = threading.Thread(target=lambda: artifacts.append(build(uri)))
    second.start()
    for beats in range(2, 12):
        time.sleep(0.1)
        assert not artifacts
        held_by(uri, beats=beats)
    second.join()
    assert artifacts[0].counts == {"rows": 2}


def test_a_process_that_lost_its_lease_cannot_commit(uri: str):
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    draft.write_bytes("part", b"ours")
    held_by(uri)
    with pytest.raises(ArtifactError, match=f"another process builds {uri}"):
        draft.commit(counts={})
    assert not Path(uri, "manifest.json").exists()


def test_a_lease_is_renewed_until_the_work_ends(uri: str, monkeypatch: pytest.MonkeyPatch):
    def beats() -> int:
        lease.Lease.renew_all()
        return int(json.loads(Path(uri, "_work/lease").read_bytes())["beats"])

    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    assert beats() < beats()
    held_by(uri, beats=7)
    assert beats() == 7  # another process holds it now: it is not renewed
    del draft
    before = Path(uri, "_work/lease").read_bytes()
    again = Draft(uri + "-other", kind="thing", config=Settings(), parents={})
    lease.Lease.renew_all()
    assert Path(uri, "_work/lease").read_bytes() == before
    again.commit(counts={})
    lease.Lease.renew_all()
    assert not Path(uri + "-other", "_work").exists()
