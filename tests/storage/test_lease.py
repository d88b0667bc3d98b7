"""Two processes that would build the same artifact: one does, the other waits, or goes on where it ended."""

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
    """A process that has begun to build it, and commits when it is told to."""
    command = [sys.executable, "-c", BUILDER, uri]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        yield process
        process.kill()


def held_by(uri: str, **holder: object) -> None:
    """As if by a process of another machine."""
    told = {"process": "x", "host": "elsewhere", "pid": 1, "beats": 1, **holder}
    fs.write_bytes(f"{uri}/_work/lease", json.dumps(told).encode())


def test_who_comes_second_waits_and_takes_what_the_first_has_built(
    uri: str, other: "subprocess.Popen[str]", caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    found: list[Artifact] = []
    second = threading.Thread(target=lambda: found.append(build(uri)))
    second.start()
    time.sleep(3 * lease.POLL_INTERVAL_S)
    assert not found
    other.communicate("commit\n")
    second.join()
    assert found[0].counts == {"rows": 1}
    assert Path(uri, "part").read_bytes() == b"theirs"
    assert not Path(uri, "_work").exists()
    assert f"process {other.pid} of " in caplog.text


def test_what_is_committed_while_another_looks_is_taken(uri: str, monkeypatch: pytest.MonkeyPatch):
    build(uri)
    looks = iter([None])  # at the first it is not there yet
    monkeypatch.setattr(
        artifact, "read_manifest", lambda uri, read=artifact.read_manifest: next(looks, read(uri))
    )
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    assert draft.finished
    assert not Path(uri, "_work").exists()


def test_what_a_killed_process_held_is_free_at_once(uri: str, other: "subprocess.Popen[str]"):
    other.send_signal(signal.SIGKILL)
    other.wait()
    began = time.monotonic()
    assert build(uri).counts == {"rows": 2}
    assert time.monotonic() - began < lease.EXPIRY_S


def test_a_holder_elsewhere_is_waited_for_as_long_as_it_shows_that_it_lives(
    uri: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease, "EXPIRY_S", 0.4)
    monkeypatch.setattr(lease, "POLL_INTERVAL_S", 0.05)
    held_by(uri)
    found: list[Artifact] = []
    second = threading.Thread(target=lambda: found.append(build(uri)))
    second.start()
    for beats in range(2, 12):
        time.sleep(0.1)
        assert not found
        held_by(uri, beats=beats)
    second.join()
    assert found[0].counts == {"rows": 2}


def test_who_was_taken_over_commits_nothing(uri: str):
    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    draft.write_bytes("part", b"ours")
    held_by(uri)
    with pytest.raises(ArtifactError, match=f"another process builds {uri}"):
        draft.commit(counts={})
    assert not Path(uri, "manifest.json").exists()


def test_its_holder_shows_that_it_lives_until_the_work_is_done_or_forgotten(
    uri: str, monkeypatch: pytest.MonkeyPatch
):
    def beats() -> int:
        lease.Lease.renew_all()
        return int(json.loads(Path(uri, "_work/lease").read_bytes())["beats"])

    draft = Draft(uri, kind="thing", config=Settings(), parents={})
    assert beats() < beats()
    held_by(uri, beats=7)
    assert beats() == 7  # of another now: it is left alone
    del draft
    before = Path(uri, "_work/lease").read_bytes()
    again = Draft(uri + "-other", kind="thing", config=Settings(), parents={})
    lease.Lease.renew_all()
    assert Path(uri, "_work/lease").read_bytes() == before
    again.commit(counts={})
    lease.Lease.renew_all()
    assert not Path(uri + "-other", "_work").exists()
