"""The files of an artifact, and its manifest: its kind, its inputs and the checksum of each part.

Up to :data:`PARTS_PER_SHARD` parts are listed in ``manifest.json`` itself. More parts are listed in shards
next to it, sorted by name, and ``manifest.json`` lists the shards: a task reads only those of its own parts.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from scalingnote.core.errors import ArtifactError
from scalingnote.storage import filesystem as fs

MANIFEST = "manifest.json"
SHARDS = "_manifest"  # folder
SCHEMA_VERSION = 1
PARTS_PER_SHARD = 10_000  # about 1 MB
MAX_SHARDS_IN_MEMORY = 16


@dataclass(frozen=True)
class Part:
    """One file of an artifact; `rows` is None if the file is not a table."""

    sha256: str
    bytes: int
    rows: int | None = None


@dataclass(frozen=True)
class ManifestShard:
    """A file that lists `parts` parts, the first of which has the name `first`."""

    name: str
    sha256: str
    first: str
    parts: int


@dataclass(frozen=True)
class ShardedParts(Mapping[str, Part]):
    """Parts by name, sorted, read shard by shard when they are needed."""

    uri: str
    shards: tuple[ManifestShard, ...]

    def __getitem__(self, name: str) -> Part:
        place = bisect_right([shard.first for shard in self.shards], name) - 1
        if place < 0:
            raise KeyError(name)
        return _read_shard(self.uri, self.shards[place])[name]

    def __iter__(self) -> Iterator[str]:
        for shard in self.shards:
            yield from _read_shard(self.uri, shard)

    def __len__(self) -> int:
        return sum(shard.parts for shard in self.shards)

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names that start with `prefix`; only the shards with such names are read."""
        nexts = [shard.first for shard in self.shards[1:]]
        for shard, following in zip(self.shards, [*nexts, None], strict=True):
            before = following is not None and following <= prefix
            if not before and (shard.first <= prefix or shard.first.startswith(prefix)):
                yield from (name for name in _read_shard(self.uri, shard) if name.startswith(prefix))


@dataclass(frozen=True)
class Manifest:
    """Description of an artifact. `info` (times, versions, notes) is not part of the digest."""

    kind: str
    config: dict[str, Any]
    parents: dict[str, dict[str, str]]
    parts: Mapping[str, Part]
    counts: dict[str, int]
    info: dict[str, Any]
    digest: str
    schema_version: int = SCHEMA_VERSION


def read_manifest(uri: str) -> Manifest | None:
    """Read the manifest of the artifact at `uri`; None if there is none."""
    path = fs.join(uri, MANIFEST)
    if (text := fs.read_if_exists(path)) is None:
        return None
    try:
        values = json.loads(text)
        if shards := values.pop("shards", None):
            values["parts"] = ShardedParts(uri, tuple(ManifestShard(**shard) for shard in shards))
        else:
            values["parts"] = {name: Part(**part) for name, part in values["parts"].items()}
        manifest = Manifest(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path} is not a manifest: {error}; delete {uri} and re-run") from None
    if manifest.schema_version != SCHEMA_VERSION:
        raise ArtifactError(
            f"{uri} has schema version {manifest.schema_version}, this release reads {SCHEMA_VERSION}: "
            "re-run the stage that built it"
        )
    return manifest


def write_manifest(uri: str, manifest: Manifest) -> bool:
    """Write a manifest, its shards first; return False if another process has written one."""
    values = {**vars(manifest), "parts": {}}
    if len(manifest.parts) > PARTS_PER_SHARD:
        values["shards"] = [asdict(shard) for shard in _write_shards(uri, manifest.parts)]
    else:
        values["parts"] = {name: asdict(part) for name, part in manifest.parts.items()}
    return fs.swap(fs.join(uri, MANIFEST), None, json.dumps(values, indent=1).encode())


def _write_shards(uri: str, parts: Mapping[str, Part]) -> Iterator[ManifestShard]:
    names = iter(sorted(parts))
    for start in range(0, len(parts), PARTS_PER_SHARD):
        shard_names = list(islice(names, PARTS_PER_SHARD))
        data = json.dumps({name: asdict(parts[name]) for name in shard_names}).encode()
        sha256 = hashlib.sha256(data).hexdigest()
        # Named by its content: if two processes commit, each writes separate shards.
        shard = ManifestShard(
            f"{SHARDS}/{start:08d}-{sha256[:12]}.json", sha256, shard_names[0], len(shard_names)
        )
        fs.write_bytes(fs.join(uri, shard.name), data)
        yield shard


def digest_of(
    kind: str, config: dict[str, Any], parents: Mapping[str, str], parts: Mapping[str, Part]
) -> str:
    """Compute the sha256 of the JSON of these values, with the checksum of each part, part by part."""
    digest = hashlib.sha256(json.dumps([kind, config, parents], sort_keys=True)[:-1].encode())
    for number, name in enumerate(sorted(parts)):
        digest.update(f'{", " if number else ", {"}{json.dumps(name)}: "{parts[name].sha256}"'.encode())
    digest.update(b"}]" if parts else b", {}]")
    return digest.hexdigest()


@lru_cache(maxsize=MAX_SHARDS_IN_MEMORY)
def _read_shard(uri: str, shard: ManifestShard) -> dict[str, Part]:
    path = fs.join(uri, shard.name)
    if (data := fs.read_if_exists(path)) is None:
        raise ArtifactError(f"{path} is missing: {uri} was deleted or rebuilt; run this again")
    if hashlib.sha256(data).hexdigest() != shard.sha256:
        raise ArtifactError(f"{path} is damaged: restore it or delete {uri} and re-run its stage")
    return {name: Part(**part) for name, part in json.loads(data).items()}


# --- files ---------------------------------------------------------------------------------------------


def write_table(uri: str, table: pa.Table, *, use_dictionary: list[str] | None = None) -> Part:
    """Write one table file and return its Part; equal tables give equal bytes.

    `use_dictionary` lists the Parquet columns to encode by a dictionary, by default all except vectors: with
    a dictionary, vectors take twice as long to write and six times as long to read.
    """
    sink = pa.BufferOutputStream()
    if uri.endswith(".arrow"):
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        repeats = _leaves(table.schema) if use_dictionary is None else use_dictionary
        pq.write_table(table, sink, compression="zstd", row_group_size=65_536, use_dictionary=repeats)
    return replace(write_file(uri, memoryview(sink.getvalue())), rows=table.num_rows)


def read_table(uri: str, columns: list[str] | None = None) -> pa.Table:
    """Read a table file that :func:`write_table` wrote; a local `.arrow` file is memory-mapped."""
    with fs.open_input(uri) as source:
        if not uri.endswith(".arrow"):
            return pq.read_table(source, columns=columns)
        table = pa.ipc.open_file(source).read_all()
    return table if columns is None else table.select(columns)


def write_file(uri: str, data: bytes | memoryview) -> Part:
    """Write any other file and return its Part."""
    fs.write_bytes(uri, data)
    return Part(hashlib.sha256(data).hexdigest(), len(data))


def _leaves(layout: pa.Schema) -> list[str]:
    """Return Parquet's names of the columns of a table, except vectors."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return [
        f"{field.name}.list.element" if any(kind(field.type) for kind in lists) else field.name
        for field in layout
        if not (pa.types.is_fixed_size_list(field.type) and pa.types.is_floating(field.type.value_type))
    ]
