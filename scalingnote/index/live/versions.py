"""Versions of a live index: the built one and those that compaction wrote; one of them is current.

folder/versions.json    the register: which versions are kept, and which is current
folder/versions/00001   an index artifact whose live.json says what it includes
folder/shard-00000      the log of a shard, as far back as the oldest version kept needs it

The log defines the documents, a version only stores them up to some record. With the log after that record,
every version kept gives the same documents, so any of them may become current at any time. The register is
replaced as a whole: after a kill there is the old one or the new one. Files that it no longer names are
removed only after it is durable.

Of a large index that searchers only read, writes lie beside it, in a *delta*:

    large index    versions of the register, searched by groups of searchers      ┐ one ranking
    delta          one shard with one log, empty at first, trained as the index   ┘

A document of the large index that was written or deleted since is *overridden*: its rows there are hidden,
whatever the delta has of it. So the state as of a log record is the large index without the documents that
records up to it name, and the delta as of this record. Every process that reads the log finds the same.

The shard of a delta starts from an index without documents, which has quantizer, settings and columns of the
large one: scores of both compare as those of two shards do.
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
EMPTY = "empty"  # folder of the index without documents, beside the register of a delta


@dataclass(frozen=True)
class LiveVersion:
    """An index version; `origin` is the digest of the index that was built, the same for all of them."""

    number: int
    uri: str
    origin: str
    documents: int
    created: str  # in UTC
    included: tuple[int, ...]  # of each shard's log, the record up to which its writes are in

    def open(self) -> Artifact:
        """The artifact."""
        return open_artifact(self.uri, kind="index")


@dataclass(frozen=True)
class Register:
    """Versions, ordered by when they were last made current; the last one is current."""

    kept: tuple[LiveVersion, ...]
    last: int  # the highest number that a version ever had
    delta: bool = False  # whether writes lie beside the versions, see above

    @property
    def current(self) -> LiveVersion:
        """The version to open."""
        return self.kept[-1]

    @property
    def unneeded_until(self) -> list[int]:
        """Last record of each log that no version kept needs."""
        return [min(records) for records in zip(*(each.included for each in self.kept), strict=True)]

    def activate(self, version: LiveVersion) -> "Register":
        """Make this version, which may be new, the current one."""
        others = tuple(each for each in self.kept if each.number != version.number)
        return replace(self, kept=(*others, version), last=max(self.last, version.number))


@dataclass(frozen=True)
class ListedVersion(LiveVersion):
    """A version as :func:`listing` describes it."""

    current: bool
    log_kept: bool  # whether the log since is complete, so that it can be activated


def current(folder: str | Path, index: str | None = None, *, delta: bool | None = None) -> LiveVersion:
    """The version to open.

    Args:
        folder: of the live index.
        index: artifact that was built; needed the first time, later only checked.
        delta: whether writes lie beside the versions; later only checked. None: as the folder says, else not.

    Raises:
        ArtifactError: the folder holds writes to another index.
        ConfigError: `delta` is not what the folder was made with.
    """
    built = None if index is None else open_artifact(index, kind="index")
    if built is not None and not register_exists(folder):
        make_folder(Path(folder))
        with (Path(folder) / f"{REGISTER_FILE}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of processes that try at once, one writes; released by closing
            if not register_exists(folder):
                first = version_of(0, built, delta=bool(delta))
                write_register(folder, Register((first,), 0, bool(delta)))
    register = read_register(folder)
    if delta is not None and delta != register.delta:
        has, lacks = ("a delta", "no delta") if register.delta else ("no delta", "a delta")
        raise ConfigError(
            f"{folder} was made with {has} beside its index, and is opened with {lacks}: set "
            f"serve.live.delta to {str(register.delta).lower()}, or name a new folder"
        )
    found = register.current
    origin = found.origin if built is None else version_of(0, built, delta=register.delta).origin
    if origin != found.origin:
        raise ArtifactError(
            f"{folder} holds writes to index {found.origin[:12]}, {index} is {origin[:12]}: "
            "name the folder of this index, or a new one"
        )
    return found


def listing(folder: str | Path) -> list[ListedVersion]:
    """All versions kept, by number."""
    found = read_register(folder)
    return [
        ListedVersion(**vars(each), current=each == found.current, log_kept=_log_kept(folder, each))
        for each in sorted(found.kept, key=lambda each: each.number)
    ]


def activate(folder: str | Path, number: int, *, checked: bool = False) -> LiveVersion:
    """Make a kept version the current one, durably, after reading and checking its files.

    Open indexes switch to it by `adopt`. `checked`: its files were read, by the searchers that opened them.

    Raises:
        ConfigError: the version is not kept, or another process compacts the index.
        ArtifactError: a file is damaged, or a record written since the version is gone.
    """
    with register_lock(folder):
        found, version = read_register(folder), kept_version(folder, number)
        if not _log_kept(folder, version):
            raise ArtifactError(
                f"version {number} of {folder} cannot be activated: records that were written since are gone"
            )
        if not checked:
            check(version.open())
        # A killed compaction's draft, based on another version.
        fs.delete(default_path(folder, found.last + 1))
        write_register(folder, found.activate(version))
    get_logger("index").info("version %d of %s is current", number, folder)
    return version


def kept_version(folder: str | Path, number: int) -> LiveVersion:
    """The version with this number; ConfigError where the folder keeps none."""
    kept = {each.number: each for each in read_register(folder).kept}
    if number not in kept:
        raise ConfigError(f"{folder} keeps no version {number}: it keeps {', '.join(map(str, sorted(kept)))}")
    return kept[number]


def check(index: Artifact) -> None:
    """Read every file of a version; ArtifactError where one differs from its manifest."""
    for name in index.names():
        index.file(name)


def make_current(folder: str | Path, version: LiveVersion, *, keep: int) -> None:
    """Make a new version the current one, durably; then remove all but the `keep` that were current last."""
    register = read_register(folder).activate(version)
    write_register(folder, replace(register, kept=register.kept[-keep:]))
    delete_unlisted(folder)


def delete_unlisted(folder: str | Path) -> None:
    """Remove the folders of versions that are no longer kept; what processes have mapped stays readable."""
    found = read_register(folder)
    kept = {each.number for each in found.kept}
    for path in Path(folder).glob("versions/[0-9][0-9][0-9][0-9][0-9]"):
        if 0 < int(path.name) <= found.last and int(path.name) not in kept:
            shutil.rmtree(path)


def version_of(number: int, index: Artifact, *, delta: bool = False) -> LiveVersion:
    """The entry of an index artifact in the register; that of a delta has one log, whatever the shards."""
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
    """Folder of a shard's log."""
    return Path(folder) / f"shard-{number:05d}"


def live_content(index: Artifact, *, delta: bool) -> dict[str, Any]:
    """What compaction states of a version, in the form of `live.json`.

    Of an index that was built, which has none, and of a version of the other kind, whose logs are others.
    """
    if LIVE in index.manifest.parts:
        found: dict[str, Any] = index.read_json(LIVE)
        if found.get("delta", False) == delta:
            return found
    logs = 1 if delta else shard.open_layout(index).shards
    return {"origin": index.digest, "included": [0] * logs, "written": 0}


def open_empty(folder: str | Path) -> Artifact:
    """The index without documents that a delta starts from; the first process that asks writes it."""
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
    """A version whose shards are opened one by one.

    Args:
        version: of a register.
        index: whose shards are opened; None: those of the version, of a delta those of its empty index.
    """

    def __init__(self, version: LiveVersion, index: Artifact | None = None) -> None:
        self.index = version.open() if index is None else index
        self.config = IndexConfig.model_validate(self.index.manifest.config)
        self.included = list(version.included)
        self.layout = shard.open_layout(self.index)
        # Of a delta the log alone says which passages of a document are there, see LiveState.
        self.whole_documents = index is not None and self.layout.passages
        self._coarse = shard.open_coarse(self.index)

    @cached_property
    def quantizer(self) -> families.Quantizer:
        """What the shards share, from the smallest shard, emptied."""
        rows = self.index.rows_of(map(shard.documents_file, range(self.layout.shards)))
        smallest = min(range(self.layout.shards), key=[*rows.values()].__getitem__)
        lists = self.shard(smallest).lists
        for stored in (lists.index, lists.kept):
            if stored is not None:
                stored.reset()
        return families.Quantizer(
            self.index.read_bytes(shard.COARSE),
            None if lists.index is None else families.dump_lists(lists.index),
            None if lists.kept is None else families.dump(lists.kept),
        )

    def shard(self, number: int) -> Shard:
        """Shard `number`, open."""
        return shard.open_shard(self.index, number, layout=self.layout, coarse=self._coarse)


def _log_kept(folder: str | Path, version: LiveVersion) -> bool:
    logs = enumerate(version.included)
    return all(wal.holds(log_folder(folder, number), after=record) for number, record in logs)


def default_path(folder: str | Path, number: int) -> str:
    """Where compaction writes a version."""
    return fs.absolute(fs.join(str(folder), "versions", f"{number:05d}"))


def register_exists(folder: str | Path) -> bool:
    """Whether an index was ever opened there for writing."""
    return (Path(folder) / REGISTER_FILE).exists()


def read_register(folder: str | Path) -> Register:
    """The register of a folder; ArtifactError where there is none."""
    if not register_exists(folder):
        raise ArtifactError(f"{folder} has no {REGISTER_FILE}: no index was opened there for writing")
    path = Path(folder) / REGISTER_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kept = (LiveVersion(**each | {"included": tuple(each["included"])}) for each in values["kept"])
        return Register(tuple(kept), values["last"], values.get("delta", False))
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): restore it") from None


def write_register(folder: str | Path, register: Register) -> None:
    """Replace the register, durably."""
    fs.replace_durably(Path(folder) / REGISTER_FILE, json.dumps(asdict(register), indent=1))


@contextmanager
def register_lock(folder: str | Path) -> Iterator[None]:
    """Exclusive right to change the register; ConfigError while another process has it."""
    read_register(folder)
    taken = (
        f"{folder} is being compacted, or set to another version, by another process ({{owner}}): wait for it"
    )
    lock = lock_file(Path(folder) / "compaction.lock", taken=taken)
    try:
        yield
    finally:
        os.close(lock)
