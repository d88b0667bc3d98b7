"""Artifacts: a directory of parts, and a manifest that is written last and atomically.

A stage begins a :class:`Draft`, writes parts and commits it. :func:`open_artifact` raises an error if the
manifest is missing (unfinished) or of another kind; reading a part raises one if its bytes differ from the
manifest's checksum. `_work/` inside an artifact belongs to the stage that builds it (checkpoints, records of
tasks): it survives a kill, so that the next run resumes, and the commit deletes it.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from scalingnote.core.config import Config, identity
from scalingnote.core.errors import ArtifactError
from scalingnote.core.log import environment
from scalingnote.storage import filesystem as fs
from scalingnote.storage import usage
from scalingnote.storage.lease import Lease
from scalingnote.storage.manifest import (
    MANIFEST,
    PARTS_PER_SHARD,
    SCHEMA_VERSION,
    SHARDS,
    Manifest,
    Part,
    ShardedParts,
    digest_of,
    read_manifest,
    read_table,
    write_file,
    write_manifest,
    write_table,
)

WORK = "_work"
CLAIM, LEASE = "fingerprint", "lease"  # in WORK: the fingerprint, and the process that builds
MIN_SHARED_CHECK_BYTES = 64 << 20  # of a file whose checksum the processes of a node share: half a second
MAX_MEMORY_PART_BYTES = 512 << 20  # of a remote part that is read into memory at once
__all__ = [
    "MANIFEST", "WORK", "Artifact", "Draft", "Manifest", "Part", "fingerprint", "open_artifact", "read_table",
    "write_file", "write_table",
]  # fmt: skip


def fingerprint(kind: str, config: Config, parents: Mapping[str, "Artifact"]) -> str:
    """Compute the identity of an artifact before it is built: equal for equal kind, settings and parents."""
    values = [kind, SCHEMA_VERSION, identity(config), {k: a.digest for k, a in sorted(parents.items())}]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass
class Artifact:
    """A finished artifact, open for reading."""

    uri: str
    manifest: Manifest
    _verified: set[str] = field(default_factory=set, repr=False)

    @property
    def digest(self) -> str:
        """Content identity: equal digests mean equal parts, config and parents."""
        return self.manifest.digest

    @property
    def counts(self) -> dict[str, int]:
        """Row counts and other numbers that the stage recorded."""
        return self.manifest.counts

    def names(self, prefix: str = "", suffix: str = "") -> list[str]:
        """Return the parts with a path that starts with `prefix` and ends with `suffix`, sorted."""
        parts = self.manifest.parts
        candidates = parts.names(prefix) if isinstance(parts, ShardedParts) else parts
        return sorted(n for n in candidates if n.startswith(prefix) and n.endswith(suffix))

    def rows_of(self, names: Iterable[str]) -> dict[str, int]:
        """Return the number of rows of each of these parts; 0 for one that is not a table."""
        return {name: self.manifest.parts[name].rows or 0 for name in names}

    def first_rows(self, table: str) -> dict[str, int]:
        """Map each part of a table to the number of its first row, counted over all parts."""
        rows = self.rows_of(self.table_parts(table))
        return dict(zip(rows, accumulate(rows.values(), initial=0), strict=False))

    def file(self, name: str) -> str:
        """Return the URI of a part; its checksum is verified at the first use in this process."""
        self._part(name)
        uri = fs.join(self.uri, name)
        self._verify(name, uri)
        return uri

    def local_file(self, name: str) -> Path:
        """Return a part as a verified file of this machine; a remote one is copied first, once for a node."""
        return self._copy([name]) / name

    def open(self, name: str) -> pa.NativeFile:
        """Open a part for reading: mapped if local; if remote, read and verified in the same request.

        A remote part above :data:`MAX_MEMORY_PART_BYTES` is copied to this machine.
        """
        if fs.is_local(self.uri):
            return fs.open_input(self.file(name))
        if self._part(name).bytes > MAX_MEMORY_PART_BYTES:
            return fs.open_input(str(self.local_file(name)))
        if (data := fs.read_if_exists(fs.join(self.uri, name))) is None:
            raise self._missing(name)
        self._compare(name, hashlib.sha256(data).hexdigest())
        return pa.BufferReader(data)

    def _part(self, name: str) -> Part:
        if (part := self.manifest.parts.get(name)) is None:
            raise ArtifactError(f"{self.uri} has no part {name!r}; it has {self.names()[:8]}")
        return part

    def _copy(self, names: list[str]) -> Path:
        """Return a local directory with these parts, verified: the artifact itself, or a copy of it."""
        verify = self.file if fs.is_local(self.uri) else self._part
        for name in names:
            verify(name)
        try:
            return fs.download(self.uri, names, version=self.digest, check=self._compare)
        except FileNotFoundError as error:
            raise self._missing(error.filename or names[0]) from None

    def _verify(self, name: str, file: str) -> None:
        """Read a part's file and compare its checksum, unless this was done before.

        For a large local file, the checksum may be one that another process of this node has computed.
        """
        if name in self._verified:
            return
        large = self.manifest.parts[name].bytes >= MIN_SHARED_CHECK_BYTES and fs.is_local(file)
        try:
            self._compare(name, (fs.checksum_on_node if large else fs.checksum)(file))
        except FileNotFoundError:
            raise self._missing(name) from None

    def _compare(self, name: str, actual: str) -> None:
        expected = self.manifest.parts[name].sha256
        if actual != expected:
            raise ArtifactError(
                f"{fs.join(self.uri, name)} is damaged: sha256 {actual[:12]}, the manifest says "
                f"{expected[:12]}; restore it or delete {self.uri} and re-run its stage"
            )
        self._verified.add(name)

    def _missing(self, name: str) -> ArtifactError:
        return ArtifactError(
            f"{fs.join(self.uri, name)} is missing: restore it or delete {self.uri} and re-run"
        )

    def directory(self, prefix: str) -> Path:
        """Return a local directory with the verified parts below `prefix`; remote parts are copied."""
        names = self.names(prefix.rstrip("/") + "/")
        if not names:
            raise ArtifactError(f"{self.uri} has no parts below {prefix!r}")
        return self._copy(names) / prefix

    def table_parts(self, name: str) -> list[str]:
        """List the Parquet parts of a table, which is one file or a folder; none if the table is absent."""
        for single in (name, f"{name}.parquet"):
            if single in self.manifest.parts:
                return [single]
        return self.names(f"{name}/", ".parquet")

    def read_bytes(self, name: str) -> bytes:
        """Read a part."""
        data: bytes = self.open(name).read()
        return data

    def read_json(self, name: str) -> Any:
        """Read a JSON part."""
        return json.loads(self.read_bytes(name))

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Read a table: a memory-mapped `.arrow` part, or the Parquet parts of :meth:`table_parts`."""
        if name.endswith(".arrow"):
            return pa.ipc.open_file(self.open(name)).read_all()
        names = self.table_parts(name)
        if not names:
            raise ArtifactError(f"{self.uri} has no table {name!r}; it has {self.names()[:8]}")
        return pa.concat_tables(pq.read_table(self.open(part), columns=columns) for part in names)

    def batches(
        self, name: str, *, rows: int = 8192, columns: list[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a table in batches of at most `rows` rows; only one batch is in memory."""
        for part in self.table_parts(name):
            with self.open(part) as source:
                yield from pq.ParquetFile(source).iter_batches(rows, columns=columns)


def open_artifact(uri: str, *, kind: str) -> Artifact:
    """Open the finished artifact of a kind, such as "dataset", in the directory `uri`.

    ArtifactError if there is no manifest, another kind, or another schema version.
    """
    manifest = read_manifest(uri)
    if manifest is None:
        raise ArtifactError(f"no finished {kind!r} artifact at {uri}: run the stage that builds it")
    if manifest.kind != kind:
        raise ArtifactError(f"{uri} holds {manifest.kind!r}, expected {kind!r}: check the path")
    return Artifact(uri, manifest)


class Draft:
    """An artifact under construction.

    Creating a draft waits while another process builds the same artifact. `finished` is True if an equal
    artifact exists, so that the caller skips the work.

    Args:
        uri: directory of the artifact.
        kind: of the artifact.
        config: settings of the stage.
        parents: the input artifacts by role.

    Raises:
        ArtifactError: `uri` has another artifact or other files.
    """

    def __init__(self, uri: str, *, kind: str, config: Config, parents: Mapping[str, Artifact]) -> None:
        self.uri, self._kind, self._config, self._parents = uri, kind, config, dict(parents)
        self.fingerprint = fingerprint(kind, config, parents)
        self._start, self._usage = time.monotonic(), usage.snapshot()
        self._parts: dict[str, Part] = {}
        self._lease = Lease(self.work(LEASE))
        self.finished = self._is_there() or not self._begin()

    def _begin(self) -> bool:
        """Resume the work of an earlier run, or start; False if another process finished the artifact."""
        self._require_free_place()
        if not self._lease.acquire(of=self.uri, done=lambda: fs.exists(self.path(MANIFEST))):
            return False
        if self._is_there():  # another process committed just before the lease was acquired
            self._end()
            return False
        self._claim()
        return True

    def _end(self) -> None:
        self._lease.release()
        fs.delete(self.work())

    def _is_there(self) -> bool:
        """Return whether the artifact exists; ArtifactError if another one is at its URI."""
        existing = read_manifest(self.uri)
        if existing and existing.info.get("fingerprint") != self.fingerprint:
            raise ArtifactError(
                f"{self.uri} already holds another {existing.kind!r} artifact (other settings or inputs): "
                "choose another output or delete it"
            )
        return existing is not None

    def _require_free_place(self) -> None:
        """Raise ArtifactError if the URI has files that are not an artifact."""
        if fs.is_local(self.uri) and Path(self.uri).is_file():
            raise ArtifactError(f"{self.uri} is a file: choose another output")
        files = fs.list_files(self.uri)
        claimed = f"{WORK}/{CLAIM}" in files
        parts = set() if claimed else {name.split("/")[0] for name in files} - {WORK}
        if parts and MANIFEST not in parts:  # with a manifest, another process has just committed
            raise ArtifactError(
                f"{self.uri} has files that are not an unfinished artifact, such as {min(parts)}: choose "
                "another output or delete it"
            )

    def _claim(self) -> None:
        """Delete unfinished work of other settings or inputs, which would otherwise be resumed.

        The claim marks the files here as deletable: it is written first and deleted last.
        """
        claim = self.work(CLAIM)
        files = fs.list_files(self.uri)
        if f"{WORK}/{CLAIM}" in files:
            if fs.read_bytes(claim).decode() == self.fingerprint:
                return
            fs.write_bytes(
                claim, b""
            )  # if this process is killed after this line, no run resumes the remaining files
        if set(files) - {f"{WORK}/{LEASE}"}:
            self.discard_parts()
            self.discard_work()
        fs.write_bytes(claim, self.fingerprint.encode())

    def discard_parts(self) -> None:
        """Delete the parts of an unfinished run; a stage that does not resume would commit them too."""
        for name in _top(self.uri) - {WORK}:
            fs.delete(self.path(name))

    def discard_work(self) -> None:
        """Delete the work, except its claim and lease, without which another process would start to build."""
        for name in _top(self.work()):
            if name.removesuffix(fs.PENDING) not in (CLAIM, LEASE):  # a thread rewrites the lease meanwhile
                fs.delete(self.work(name))

    def path(self, name: str) -> str:
        """Return the URI of a part."""
        return fs.join(self.uri, name)

    def work(self, name: str = "") -> str:
        """Return a URI inside the work directory, which survives a kill."""
        return fs.join(self.uri, WORK, name) if name else fs.join(self.uri, WORK)

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write a `.parquet` (zstd) or `.arrow` (uncompressed, for memory mapping) part."""
        self._parts[name] = write_table(self.path(name), table)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON part with sorted keys."""
        self.write_bytes(name, json.dumps(value, indent=1, sort_keys=True).encode())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write any part."""
        self._parts[name] = write_file(self.path(name), data)

    def upload(self, folder: str | Path, name: str) -> None:
        """Copy a local folder: each file is a part below `name`."""
        for file, (sha256, size) in fs.upload(folder, self.path(name)).items():
            self._parts[f"{name}/{file}"] = Part(sha256, size)

    def register(self, name: str, part: Part) -> None:
        """Add a part that a worker wrote and hashed."""
        self._parts[name] = part

    def commit(self, *, counts: Mapping[str, int], **info: Any) -> Artifact:
        """Write the manifest, which makes the artifact exist. Unregistered files are hashed and added.

        Args:
            counts: row counts and other numbers of the artifact.
            info: further facts, which are not part of the digest.

        Raises:
            ArtifactError: this process did not renew its lease in time, and another one took over or has
                committed already.
        """
        if self._lease.lost:
            raise ArtifactError(f"another process builds {self.uri} now: run this again when it is finished")
        for name, size in fs.list_files(self.uri).items():
            if not name.startswith((f"{WORK}/", f"{SHARDS}/", MANIFEST)) and name not in self._parts:
                self._parts[name] = Part(fs.checksum(self.path(name)), size)
        parents = {k: {"uri": a.uri, "digest": a.digest} for k, a in sorted(self._parents.items())}
        parts = dict(sorted(self._parts.items()))
        config = identity(self._config)
        manifest = Manifest(
            kind=self._kind,
            config=config,
            parents=parents,
            parts=parts,
            counts=dict(counts),
            info={
                "fingerprint": self.fingerprint,
                "seconds": round(time.monotonic() - self._start, 3),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "environment": environment(),
                "usage": usage.since(self._usage),
                **info,
            },
            digest=digest_of(self._kind, config, {k: p["digest"] for k, p in parents.items()}, parts),
        )
        if not write_manifest(self.uri, manifest):
            raise ArtifactError(
                f"another process has committed {self.uri} while this one built it: run this again to read it"
            )
        self._end()
        return Artifact(self.uri, manifest) if len(parts) <= PARTS_PER_SHARD else self.existing()

    def existing(self) -> Artifact:
        """Open the finished artifact at this draft's URI."""
        return open_artifact(self.uri, kind=self._kind)


def _top(uri: str) -> set[str]:
    """List the files and folders at the top of a folder."""
    return {name.split("/")[0] for name in fs.list_files(uri)}
