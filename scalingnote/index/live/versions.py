"""Versions of a live index: the one that was built, then those that compaction wrote; one of them is current.

folder/versions.json    which are kept, and which is current
folder/versions/00001   an index artifact whose live.json says what it includes
folder/shard-00000      the log of a shard, as far back as the oldest version kept needs it

A version is a way to hold the documents, the log says what they are: with the log behind it, every version
kept gives the same documents, so any of them may become the current one at any time.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.index import ivf, shard
from scalingnote.index.live import registry, wal
from scalingnote.index.live.registry import Register, Version
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact

LIVE = "live.json"  # a part of the index artifacts that compaction writes


@dataclass(frozen=True)
class Listed:
    """A version kept, as `listing` tells of it."""

    number: int
    uri: str
    documents: int
    created: str  # in UTC
    current: bool
    log_kept: bool  # whether all that was written since is there, so that it can be activated


def current(folder: str | Path, index: str | None = None) -> Version:
    """The version to open. `index` names the one that was built: needed once, then checked if it is given.

    ArtifactError when the folder holds the writes to another index.
    """
    built = None if index is None else described(0, open_artifact(index, kind="index"))
    if built is not None and not registry.exists(folder):
        registry.begin(folder, Register((built,), 0))
    found = registry.read(folder).current
    if built is not None and built.origin != found.origin:
        raise ArtifactError(
            f"{folder} holds writes to index {found.origin[:12]}, {index} is {built.origin[:12]}: "
            "name the folder of this index, or a new one"
        )
    return found


def listing(folder: str | Path) -> list[Listed]:
    """The versions kept, by number."""
    found = registry.read(folder)
    return [
        Listed(
            *(each.number, each.uri, each.documents, each.created),
            current=each == found.current,
            log_kept=_log_kept(folder, each),
        )
        for each in sorted(found.kept, key=lambda each: each.number)
    ]


def activate(folder: str | Path, number: int) -> Version:
    """Make a version that is kept the current one, durably; open indexes go over to it by `adopt`.

    Every file of it is read and checked before. ConfigError when it is not kept, or another process compacts
    the index; ArtifactError when a file of it is damaged, or a record that was written since is gone.
    """
    with registry.changing(folder):
        found = registry.read(folder)
        version = next((each for each in found.kept if each.number == number), None)
        if version is None:
            kept = ", ".join(str(each.number) for each in listing(folder))
            raise ConfigError(f"{folder} keeps no version {number}: it keeps {kept}")
        if not _log_kept(folder, version):
            raise ArtifactError(
                f"version {number} of {folder} cannot be activated: records that were written since are gone"
            )
        check(version.open())
        fs.delete(_place(folder, found.last + 1))  # what a killed compaction left: it began at another one
        registry.write(folder, found.activated(version))
    get_logger("index").info("version %d of %s is current", number, folder)
    return version


def check(index: Artifact) -> None:
    """Read every file of a version; ArtifactError at one that is not as its manifest says."""
    for name in index.names():
        index.file(name)


def following(folder: str | Path) -> tuple[int, str]:
    """Number of the next version, which none ever had, and where it goes by default."""
    number = registry.read(folder).last + 1
    return number, _place(folder, number)


def advance(folder: str | Path, version: Version, *, keep: int) -> None:
    """Make a new version the current one, durably; then remove all but the `keep` that were current last."""
    registry.write(folder, registry.read(folder).activated(version).limited(keep))
    sweep(folder)


def sweep(folder: str | Path) -> None:
    """Remove the folders of versions that are no longer kept; what processes have mapped stays readable."""
    found = registry.read(folder)
    kept = {each.number for each in found.kept}
    for path in Path(folder).glob("versions/[0-9][0-9][0-9][0-9][0-9]"):
        if 0 < int(path.name) <= found.last and int(path.name) not in kept:
            shutil.rmtree(path)


def needed(folder: str | Path) -> list[int]:
    """The record of each log above which all is needed, to open any version kept."""
    return registry.read(folder).needed


def described(number: int, index: Artifact) -> Version:
    """What the register says of an index artifact."""
    live = index.read_json(LIVE) if LIVE in index.manifest.parts else {}
    return Version(
        number,
        fs.absolute(index.uri),
        live.get("origin", index.digest),
        index.counts["documents"],
        index.manifest.info["created"],
        tuple(included(index)),
    )


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


def _log_kept(folder: str | Path, version: Version) -> bool:
    logs = enumerate(version.included)
    return all(wal.holds(log_folder(folder, number), after=record) for number, record in logs)


def _place(folder: str | Path, number: int) -> str:
    return fs.absolute(fs.join(str(folder), "versions", f"{number:05d}"))
