import os
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from scalingnote.storage import filesystem as fs


def test_files_are_synced_before_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_failed_download_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(uri: str) -> list[bytes]:
        raise OSError(f"{uri} is lost")

    monkeypatch.setattr(fs.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(fs, "_blocks", broken)
    with pytest.raises(OSError, match="memory://elsewhere/part is lost"):
        fs.download("memory://elsewhere", ["part"], version="1")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_deleted_meanwhile_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(pafs.LocalFileSystem):  # type: ignore[misc]
        """A filesystem in which another process deletes each file after it was listed."""

        def get_file_info(self, path: str) -> pafs.FileInfo:
            info = super().get_file_info(path)
            Path(path).unlink()
            return info

    part = tmp_path / "part"
    part.write_bytes(b"data")
    monkeypatch.setattr(fs, "resolve", lambda uri: (Elsewhere(), uri))
    fs.delete(str(part))
    assert not part.exists()
