"""Versions of a live index: the built one and those that compaction wrote. One of them is current.

folder/versions.json    the register: the versions that are kept, and the current one
folder/versions/00001   an index artifact; its live.json states the records that it includes
folder/shard-00000      the log of a shard, from the first record that a kept version needs

The log defines the documents, and a version only stores them up to some record. With the log after that
record, every kept version gives the same documents, so any of them may become current at any time. The
register is replaced atomically: after a kill the folder has the old one or the new one. Files of versions
that are no longer listed are deleted only after the new register is durable.

If searchers only read a large index, its writes are in a *delta*:

    large index    versions of the register, searched by groups of searchers        ┐ one ranking
    delta          one shard with one log, at first empty, with the same quantizer  ┘

A document of the large index that was written or deleted since is *overridden*: its rows there are hidden,
also if the delta does not have it. So the state as of a log record is the large index without the documents
that records up to this one name, and the delta as of this record. It is the same in every process that reads
the log.

The shard of a delta starts from an index without documents, which has the quantizer, settings and columns of
the large index. Therefore their scores are comparable, like the scores of two shards.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import get_logger
from scalingnote.index import families, ivf, postings, shard
from scalingnote.index.config import IndexConfig
from scalingnote.index.live import wal
from scalingnote.index.live.wal import lock_file, make_folder
from scalingnote.index.shard import Shard
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.manifest import read_manifest

LIVE = "live.json"  # a part of the index artifacts that compaction writes
REGISTER_FILE = "versions.json"
EMPTY = "empty"  # folder of the index without documents, next to the register of a delta


@dataclass(frozen=True)
class LiveVersion:
    """An index version; `origin` is the digest of the built index, which all versions share."""

    number: int
    uri: str
    origin: str
    documents: int
    created: str  # in UTC
    included: tuple[int, ...]  # last record of each log that this version includes

    def open(self) -> Artifact:
        """Open the artifact."""
        return open_artifact(self.uri, kind="index")


@dataclass(frozen=True)
class Register:
    """Versions in the order in which they last became current; the last one is current."""

    kept: tuple[LiveVersion, ...]
    last: int  # the highest number that a version ever had
    delta: bool = False  # whether writes are in a delta, see above

    @property
    def current(self) -> LiveVersion:
        """Version to open."""
        return self.kept[-1]

    @property
    def unneeded_until(self) -> list[int]:
        """Last record of each log that no kept version needs."""
        return [min(records) for records in zip(*(each.included for each in self.kept), strict=True)]

    def activate(self, version: LiveVersion) -> "Register":
        """Return a register in which this version, which may be new, is current."""
        others = tuple(each for each in self.kept if each.number != version.number)
        return replace(self, kept=(*others, version), last=max(self.last, version.number))


@dataclass(frozen=True)
class ListedVersion(LiveVersion):
    """A version with its status, from :func:`listing`."""

    current: bool
    log_kept: bool  # whether the log after it is complete, so that it can be activated


def current(folder: str | Path, index: str | None = None, *, delta: bool | None = None) -> LiveVersion:
    """Return the version to open; the first call creates the register.

    Args:
        folder: of the live index.
        index: artifact that was built; required the first time, later only checked.
        delta: whether writes are in a delta; later only checked. None: like the folder, and no delta in a new
            folder.

    Raises:
        ArtifactError: the folder has writes to another index.
        ConfigError: `delta` differs from the folder.
    """
    built = None if index is None else open_artifact(index, kind="index")
    if built is not None and not register_exists(folder):
        make_folder(Path(folder))
        with (Path(folder) / f"{REGISTER_FILE}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several processes writes; closing releases it
            if not register_exists(folder):
                first = version_of(0, built, delta=bool(delta))
                write_register(folder, Register((first,), 0, bool(delta)))
    register = read_register(folder)
    if delta is not None and delta != register.delta:
        has, lacks = ("a delta", "no delta") if register.delta else ("no delta", "a delta")
        raise ConfigError(
            f"{folder} was created with {has}, and is opened with {lacks}: set serve.live.delta to "
            f"{str(register.delta).lower()}, or name a new folder"
        )
    version = register.current
    origin = version.origin if built is None else version_of(0, built, delta=register.delta).origin
    if origin != version.origin:
        raise ArtifactError(
            f"{folder} has writes to index {version.origin[:12]}, {index} is {origin[:12]}: "
            "name the folder of this index, or a new one"
        )
    return version


def listing(folder: str | Path) -> list[ListedVersion]:
    """Return all kept versions, sorted by number."""
    register = read_register(folder)
    return [
        ListedVersion(**vars(each), current=each == register.current, log_kept=_log_kept(folder, each))
        for each in sorted(register.kept, key=lambda each: each.number)
    ]


def activate(folder: str | Path, number: int, *, checked: bool = False) -> LiveVersion:
    """Read and check the files of a kept version, and make it durably the current one.

    Open indexes switch to it by `adopt`.

    Args:
        folder: of the live index.
        number: of the version.
        checked: whether its files were checked already, by the searchers that opened them.

    Raises:
        ConfigError: the version is not kept, or another process compacts the index.
        ArtifactError: a file is damaged, or a record after the version was dropped.
    """
    with register_lock(folder):
        register, version = read_register(folder), kept_version(folder, number)
        if not _log_kept(folder, version):
            raise ArtifactError(
                f"version {number} of {folder} cannot be activated: later records of the log were dropped"
            )
        if not checked:
            check(version.open())
        # The draft of a killed compaction was based on another version.
        fs.delete(default_path(folder, register.last + 1))
        write_register(folder, register.activate(version))
    get_logger("index").info("version %d of %s is current", number, folder)
    return version


def kept_version(folder: str | Path, number: int) -> LiveVersion:
    """Return the version with this number; raise a ConfigError if the folder does not keep it."""
    by_number = {each.number: each for each in read_register(folder).kept}
    if number not in by_number:
        raise ConfigError(
            f"{folder} keeps no version {number}: it keeps {', '.join(map(str, sorted(by_number)))}"
        )
    return by_number[number]


def check(index: Artifact) -> None:
    """Read every file of a version; raise an ArtifactError if one differs from the manifest."""
    for name in index.names():
        index.file(name)


def make_current(folder: str | Path, version: LiveVersion, *, keep: int) -> None:
    """Make a new version durably the current one, then delete all but the last `keep` current versions."""
    register = read_register(folder).activate(version)
    write_register(folder, replace(register, kept=register.kept[-keep:]))
    delete_unlisted(folder)


def delete_unlisted(folder: str | Path) -> None:
    """Delete the folders of versions that are no longer kept; files that are mapped remain readable."""
    register = read_register(folder)
    kept_numbers = {each.number for each in register.kept}
    for path in Path(folder).glob("versions/[0-9][0-9][0-9][0-9][0-9]"):
        if 0 < int(path.name) <= register.last and int(path.name) not in kept_numbers:
            shutil.rmtree(path)


def version_of(number: int, index: Artifact, *, delta: bool = False) -> LiveVersion:
    """Build the entry of an index artifact in the register; with a delta it has only one log."""
    live = live_content(index, delta=delta)
    return LiveVersion(
        number=number,
        uri=fs.absolute(index.uri),
        origin=live["origin"],
        documents=index.counts["documents"],
        created=index.manifest.info["created"],
        included=tuple(live["included"]),
    )


def log_folder(folder: str | Path, number: int) -> Path:
    """Return the folder of a shard's log."""
    return Path(folder) / f"shard-{number:05d}"


def live_content(index: Artifact, *, delta: bool) -> dict[str, Any]:
    """Return the contents of `live.json` of a version.

    For a built index, which has no such file, and for a version with other logs (with a delta instead of
    without, or the reverse), the contents are those of a version that includes no records.
    """
    if LIVE in index.manifest.parts:
        content: dict[str, Any] = index.read_json(LIVE)
        if content.get("delta", False) == delta:
            return content
    logs = 1 if delta else shard.open_layout(index).shards
    return {"origin": index.digest, "included": [0] * logs, "written": 0}


def open_empty(folder: str | Path) -> Artifact:
    """Open the index without documents from which a delta starts; the first process writes it."""
    uri = fs.absolute(fs.join(str(folder), EMPTY))
    if read_manifest(uri) is not None:
        return open_artifact(uri, kind="index")
    large = OpenVersion(read_register(folder).current)
    draft = Draft(uri, kind="index", config=large.config, parents={"index": large.index})
    if draft.finished:  # by another process, meanwhile
        return draft.existing()
    columns = pa.ipc.open_file(large.index.open(shard.documents_file(0))).schema
    layout = replace(large.layout, shards=1, documents=0)
    files = shard.write_shard(
        draft.uri,
        0,
        layout=layout,
        lists=ivf.empty(large.quantizer),
        documents=columns.empty_table(),
        terms=postings.merge([]),
    )
    for name, part in files.items():
        draft.register(name, part)
    draft.write_bytes(shard.COARSE, large.quantizer.coarse)
    draft.write_json(shard.LAYOUT_FILE, vars(layout))
    return draft.commit(counts={"documents": 0})


class OpenVersion:
    """A version with shards that are opened one by one.

    Args:
        version: of a register.
        index: artifact that has the shards, for a delta its empty index; None: that of the version.
    """

    def __init__(self, version: LiveVersion, index: Artifact | None = None) -> None:
        self.index = version.open() if index is None else index
        self.config = IndexConfig.model_validate(self.index.manifest.config)
        self.included = list(version.included)
        self.layout = shard.open_layout(self.index)
        # Only the log of a delta defines the passages of a document, see LiveState.
        self.whole_documents = index is not None and self.layout.passages
        self._coarse = shard.open_coarse(self.index)

    @cached_property
    def quantizer(self) -> families.Quantizer:
        """Quantizer that the shards share, made from the smallest shard by removing its rows."""
        rows = self.index.rows_of(map(shard.documents_file, range(self.layout.shards)))
        smallest = min(range(self.layout.shards), key=[*rows.values()].__getitem__)
        lists = self.shard(smallest).lists
        for index in (lists.index, lists.kept):
            if index is not None:
                index.reset()
        return families.Quantizer(
            self.index.read_bytes(shard.COARSE),
            None if lists.index is None else families.dump_lists(lists.index),
            None if lists.kept is None else families.dump(lists.kept),
        )

    def shard(self, number: int) -> Shard:
        """Open shard `number`."""
        return shard.open_shard(self.index, number, layout=self.layout, coarse=self._coarse)


def _log_kept(folder: str | Path, version: LiveVersion) -> bool:
    logs = enumerate(version.included)
    return all(wal.holds(log_folder(folder, number), after=record) for number, record in logs)


def default_path(folder: str | Path, number: int) -> str:
    """Return the path of a version that compaction writes."""
    return fs.absolute(fs.join(str(folder), "versions", f"{number:05d}"))


def register_exists(folder: str | Path) -> bool:
    """Return whether an index was ever opened for writing in this folder."""
    return (Path(folder) / REGISTER_FILE).exists()


def read_register(folder: str | Path) -> Register:
    """Read the register of a folder; raise an ArtifactError if there is none."""
    if not register_exists(folder):
        raise ArtifactError(
            f"{folder} has no {REGISTER_FILE}: no index was opened for writing in this folder"
        )
    path = Path(folder) / REGISTER_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        entries = (LiveVersion(**each | {"included": tuple(each["included"])}) for each in values["kept"])
        return Register(tuple(entries), values["last"], values.get("delta", False))
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): restore it") from None


def write_register(folder: str | Path, register: Register) -> None:
    """Replace the register durably."""
    fs.replace_durably(Path(folder) / REGISTER_FILE, json.dumps(asdict(register), indent=1))


@contextmanager
def register_lock(folder: str | Path) -> Iterator[None]:
    """Lock the register for changes; raise a ConfigError if another process has the lock."""
    read_register(folder)
    message = (
        f"another process ({{owner}}) compacts {folder}, or changes its version: wait until it has finished"
    )
    lock = lock_file(Path(folder) / "compaction.lock", taken=message)
    try:
        yield
    finally:
        os.close(lock)
