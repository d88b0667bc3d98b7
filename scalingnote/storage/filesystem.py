"""Files at local paths and URIs: one pyarrow filesystem for each, atomic writes, local copies.

``s3://``, ``gs://`` and ``hdfs://`` are pyarrow's own; any other scheme is looked up in fsspec.

An object store charges and waits per request, so a small file is one PUT, and a read is one GET or several
large ranges at a time. pyarrow's own streams read an object in a row of GETs of 256 KiB.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from scalingnote.errors import DataError

RANGE_BYTES = 16 << 20  # of one GET; on a store 30 ms away, 4 MB take as long as the request itself
MAX_PARALLEL_READS = 8  # GETs of one file at a time
OBJECT_STORES = ("s3", "gcs", "abfs")  # a PUT is atomic, and there are no directories


def join(base: str, *names: str) -> str:
    """`base` and `names` with single slashes between them, for paths and URIs."""
    return "/".join([base.rstrip("/"), *(name.strip("/") for name in names)])


def absolute(uri: str) -> str:
    """`uri` independent of the working directory, which differs between driver and workers."""
    return uri if "://" in uri else str(Path(uri).absolute())


def resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    """The filesystem of `uri` and the path inside it."""
    if "://" not in uri:
        return pafs.LocalFileSystem(), str(Path(uri).absolute())
    scheme, rest = uri.split("://", 1)
    authority, _, path = rest.partition("/")
    try:
        filesystem = _connect(scheme, authority)
    except (ValueError, ImportError) as error:
        raise DataError(f"no filesystem for {uri!r}: {error}; install its fsspec package") from None
    # A bucket belongs to the path, a host does not.
    return filesystem, f"/{path}" if scheme in {"hdfs", "file"} else rest


@lru_cache(maxsize=16)
def _connect(scheme: str, authority: str) -> pafs.FileSystem:
    """One connection per bucket or host, since buckets may differ in region and hosts in cluster."""
    if scheme in {"s3", "gs", "hdfs", "file"}:
        # Delayed open: a file of one part is then one PUT instead of three requests.
        options = "?allow_delayed_open=true" if scheme == "s3" else ""
        return pafs.FileSystem.from_uri(f"{scheme}://{authority}/{options}")[0]
    import fsspec

    return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem(scheme)))


def exists(uri: str) -> bool:
    """Whether a file or directory exists."""
    filesystem, path = resolve(uri)
    return bool(filesystem.get_file_info(path).type != pafs.FileType.NotFound)


def is_file(uri: str) -> bool:
    """Whether `uri` is an existing file."""
    filesystem, path = resolve(uri)
    return bool(filesystem.get_file_info(path).is_file)


def read_bytes(uri: str) -> bytes:
    """The content of a file; DataError if it is missing."""
    try:
        return b"".join(_blocks(uri))
    except FileNotFoundError:
        raise DataError(f"no file at {uri}") from None


def write_bytes(uri: str, data: bytes) -> None:
    """Write atomically: a reader sees the old file or the complete new one."""
    filesystem, path = resolve(uri)
    if filesystem.type_name in OBJECT_STORES:  # an upload that is cut short leaves no object
        with filesystem.open_output_stream(path) as stream:
            stream.write(data)
        return
    filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
    pending = f"{path}.pending"
    with filesystem.open_output_stream(pending) as stream:
        stream.write(data)
    filesystem.move(pending, path)


def is_local(uri: str) -> bool:
    """Whether a file is on this machine, where it is mapped instead of read."""
    return isinstance(resolve(uri)[0], pafs.LocalFileSystem)


def make_durable(uri: str, names: Iterable[str]) -> None:
    """Sync files below `uri` and their folders to disk; files that are not local are durable once written."""
    filesystem, path = resolve(uri)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        return
    root = Path(path)
    files = [root / name for name in names]
    folders = {above for each in files for above in each.parents if above.is_relative_to(root.parent)}
    for each in [*files, *sorted(folders, reverse=True)]:  # a file before the folder that names it
        sync(each)


def sync(path: Path) -> None:
    """Sync a local file, or the entries of a folder, to disk, so that they survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_files(uri: str) -> dict[str, int]:
    """All files below `uri`: relative path -> size in bytes, sorted; empty if there are none."""
    filesystem, path = resolve(uri)
    selector = pafs.FileSelector(path, recursive=True, allow_not_found=True)
    sizes = {
        info.path[len(path) :].strip("/"): info.size
        for info in filesystem.get_file_info(selector)
        if info.type == pafs.FileType.File
    }
    return dict(sorted(sizes.items()))


def delete(uri: str) -> None:
    """Delete a file or a directory tree, if it exists."""
    filesystem, path = resolve(uri)
    kind = filesystem.get_file_info(path).type
    if kind == pafs.FileType.Directory:
        filesystem.delete_dir(path)
    elif kind == pafs.FileType.File:
        filesystem.delete_file(path)


def checksum(uri: str) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    for block in _blocks(uri):
        digest.update(block)
    return digest.hexdigest()


def _blocks(uri: str) -> Iterator[bytes]:
    """The content of a file in order; of a remote one at most :data:`MAX_PARALLEL_READS` ranges at a time."""
    filesystem, path = resolve(uri)
    with filesystem.open_input_file(path) as file:
        size = file.size()
        starts = range(0, size, RANGE_BYTES)

        def read(start: int) -> bytes:
            return bytes(file.read_at(min(RANGE_BYTES, size - start), start))

        if len(starts) <= 1 or isinstance(filesystem, pafs.LocalFileSystem):
            yield from map(read, starts)
            return
        with ThreadPoolExecutor(MAX_PARALLEL_READS) as pool:
            for first in range(0, len(starts), MAX_PARALLEL_READS):
                yield from pool.map(read, starts[first : first + MAX_PARALLEL_READS])


def open_input(uri: str) -> pa.NativeFile:
    """Random-access reader; memory-mapped when the file is local."""
    filesystem, path = resolve(uri)
    if isinstance(filesystem, pafs.LocalFileSystem):
        return pa.memory_map(path)
    return filesystem.open_input_file(path)


def upload(local: str | Path, uri: str) -> None:
    """Copy a local file or directory tree to `uri`."""
    local = Path(local)
    filesystem, path = resolve(uri)
    if filesystem.type_name not in OBJECT_STORES:
        filesystem.create_dir(path if local.is_dir() else path.rsplit("/", 1)[0], recursive=True)
    pafs.copy_files(str(local), path, destination_filesystem=filesystem)


def download(uri: str, files: list[str], *, version: str) -> Path:
    """A local directory with `files` of `uri`: `uri` itself if local, else a cached copy.

    The content of a remote URI may change: `version` identifies it, so that no stale copy is used.
    """
    filesystem, path = resolve(uri)
    if isinstance(filesystem, pafs.LocalFileSystem):
        return Path(path)
    key = hashlib.sha256(f"{uri} {version}".encode()).hexdigest()[:24]
    target = Path(tempfile.gettempdir()) / "scalingnote-cache" / key
    for name in files:
        copy = target / name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as stream:
                try:
                    for block in _blocks(join(uri, name)):
                        stream.write(block)
                except BaseException:
                    os.unlink(stream.name)  # or the partial copy would stay on a full disk
                    raise
            shutil.move(stream.name, copy)
    return target
