import os
from pathlib import Path

import pytest

from scalingnote.storage import filesystem as fs


def test_files_are_made_durable_before_the_folders_that_lead_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    root = tmp_path / "versions/1"
    fs.write_bytes(f"{root}/a/b/part", b"data")
    fs.write_bytes(f"{root}/manifest", b"data")
    fs.make_durable(str(root), ["a/b/part", "manifest"])
    expected = ["1/a/b/part", "1/manifest", "1/a/b", "1/a", "1", ""]
    assert synced == [str(tmp_path / "versions" / name) for name in expected]
    fs.make_durable("memory://elsewhere", ["part"])
    assert len(synced) == len(expected)


def test_a_download_that_breaks_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(uri: str) -> list[bytes]:
        raise OSError(f"{uri} is gone")

    monkeypatch.setattr(fs.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(fs, "_blocks", broken)
    with pytest.raises(OSError, match="memory://elsewhere/part is gone"):
        fs.download("memory://elsewhere", ["part"], version="1")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
