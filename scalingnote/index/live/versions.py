"""Versions of a live index: the one that was built, then those that compaction wrote; one of them is current.

folder/current.json     which; written when all of a version is durable
folder/versions/00001   an index artifact whose live.json says what it includes
folder/shard-00000      the log of a shard: what was written since
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from scalingnote.errors import ArtifactError
from scalingnote.index import ivf, shard
from scalingnote.index.live.wal_segment import make_folder, sync_folder
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact

LIVE = "live.json"  # a part of the index artifacts that compaction writes
_CURRENT = "current.json"


@dataclass(frozen=True)
class Version:
    """An index version; `origin` is the digest of the index that was built, the same for all of them."""

    number: int
    uri: str
    origin: str

    def open(self) -> Artifact:
        """The artifact."""
        return open_artifact(self.uri, kind="index")


def current(folder: str | Path, index: str | None = None) -> Version:
    """The version to open. `index` names the one that was built: needed once, then checked if it is given.

    ArtifactError when the folder holds the writes to another index.
    """
    path = Path(folder) / _CURRENT
    origin = None if index is None else _origin(open_artifact(index, kind="index"))
    if path.exists():
        version = Version(**json.loads(path.read_text(encoding="utf-8")))
        if origin not in (None, version.origin):
            raise ArtifactError(
                f"{folder} holds writes to index {version.origin[:12]}, {index} is {str(origin)[:12]}: "
                "name the folder of this index, or a new one"
            )
        return version
    if index is None or origin is None:
        raise ArtifactError(f"{folder} has no {_CURRENT}: no index was opened there for writing")
    version = Version(0, fs.absolute(index), origin)
    advance(folder, version)
    return version


def advance(folder: str | Path, version: Version) -> None:
    """Make a version the current one, durably: after this its part of the logs may go."""
    folder = Path(folder)
    make_folder(folder)
    pending = folder / f"{_CURRENT}.pending"
    with pending.open("w", encoding="utf-8") as stream:
        json.dump(asdict(version), stream)
        stream.flush()
        os.fsync(stream.fileno())
    pending.replace(folder / _CURRENT)
    sync_folder(folder)


def log_folder(folder: str | Path, number: int) -> Path:
    """Where the log of a shard lies."""
    return Path(folder) / f"shard-{number:05d}"


def included(index: Artifact) -> list[int]:
    """The log record up to which each shard of a version includes what was written."""
    if LIVE not in index.manifest.parts:
        return [0] * shard.open_layout(index).shards
    found: list[int] = index.read_json(LIVE)["included"]
    return found


def written(index: Artifact) -> int:
    """Documents written since the quantizer of a version was trained, as far as the version includes them."""
    if LIVE not in index.manifest.parts:
        return 0
    return int(index.read_json(LIVE)["written"])


def open_quantizer(index: Artifact, layout: shard.Layout) -> ivf.Quantizer:
    """What the shards of an index share, from the smallest of them, emptied."""
    coarse = shard.open_coarse(index)
    rows = {
        number: index.manifest.parts[shard.documents_file(number)].rows for number in range(layout.shards)
    }
    smallest = min(rows, key=lambda number: (rows[number] or 0, number))
    lists = shard.open_shard(index, smallest, layout=layout, coarse=coarse).lists
    for stored in (lists.index, lists.kept):
        if stored is not None:
            stored.reset()
    files = iter(ivf.dump_files(lists))
    return ivf.Quantizer(
        coarse.reconstruct_n(0, coarse.ntotal),
        None if lists.index is None else next(files),
        None if lists.kept is None else next(files),
    )


def _origin(index: Artifact) -> str:
    if LIVE not in index.manifest.parts:
        return index.digest
    origin: str = index.read_json(LIVE)["origin"]
    return origin
