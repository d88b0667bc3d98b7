"""Paths: a local path or a URI, resolved to one pyarrow filesystem; joins, atomic writes, local copies.

``s3://``, ``gs://`` and ``hdfs://`` are pyarrow's own; any other scheme is looked up in fsspec.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from scalingnote.errors import DataError

S3_COPY_BYTES = 5 << 30


def join(base: str, *names: str) -> str:
    """`base` and `names` with one slash between; works on paths and URIs alike."""
    return "/".join([base.rstrip("/"), *(name.strip("/") for name in names)])


def absolute(uri: str) -> str:
    """`uri` as seen from any working directory; workers have others than the driver."""
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
    # A bucket is part of the path, a host is not.
    return filesystem, f"/{path}" if scheme in {"hdfs", "file"} else rest


@lru_cache(maxsize=16)
def _connect(scheme: str, authority: str) -> pafs.FileSystem:
    """One connection per bucket or host: buckets differ in region, hosts in cluster."""
    if scheme in {"s3", "gs", "hdfs", "file"}:
        return pafs.FileSystem.from_uri(f"{scheme}://{authority}/")[0]
    import fsspec

    return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem(scheme)))


def exists(uri: str) -> bool:
    """Whether a file or directory is there."""
    filesystem, path = resolve(uri)
    return bool(filesystem.get_file_info(path).type != pafs.FileType.NotFound)


def is_file(uri: str) -> bool:
    """Whether a file is there."""
    filesystem, path = resolve(uri)
    return bool(filesystem.get_file_info(path).is_file)


def read_bytes(uri: str) -> bytes:
    """The whole file; DataError when it is missing."""
    filesystem, path = resolve(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            return bytes(stream.read())
    except FileNotFoundError:
        raise DataError(f"no file at {uri}") from None


def write_bytes(uri: str, data: bytes) -> None:
    """Write so that a reader sees the old file or the whole new one, never a part of it."""
    filesystem, path = resolve(uri)
    filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
    pending = f"{path}.pending"
    with filesystem.open_output_stream(pending) as stream:
        stream.write(data)
    _rename(filesystem, pending, path, size=len(data))


def _rename(filesystem: pafs.FileSystem, pending: str, path: str, *, size: int) -> None:
    """Give a finished file its name. S3 has no renames, and copies nothing above 5 GiB at once."""
    if filesystem.type_name != "s3" or size <= S3_COPY_BYTES:
        filesystem.move(pending, path)
        return
    with filesystem.open_input_stream(pending) as stream, filesystem.open_output_stream(path) as copy:
        while block := stream.read(1 << 26):
            copy.write(block)
    filesystem.delete_file(pending)


def make_durable(uri: str, names: Iterable[str]) -> None:
    """Have these files of `uri`, and the folders that lead to them, outlive a crash of the machine.

    What is not on a local disk is durable once it is written.
    """
    filesystem, path = resolve(uri)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        return
    root = Path(path)
    files = [root / name for name in names]
    folders = {above for each in files for above in each.parents if above.is_relative_to(root.parent)}
    for each in [*files, *sorted(folders, reverse=True)]:  # a name is of use once its file is there
        sync(each)


def sync(path: Path) -> None:
    """Have a local file, or the names that a folder has got and lost, outlive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_files(uri: str) -> dict[str, int]:
    """Every file below `uri`: path relative to it -> size in bytes, sorted; empty if there is none."""
    filesystem, path = resolve(uri)
    selector = pafs.FileSelector(path, recursive=True, allow_not_found=True)
    found = {
        info.path[len(path) :].strip("/"): info.size
        for info in filesystem.get_file_info(selector)
        if info.type == pafs.FileType.File
    }
    return dict(sorted(found.items()))


def delete(uri: str) -> None:
    """Remove a file or a directory with all below it; nothing happens if it is not there."""
    filesystem, path = resolve(uri)
    kind = filesystem.get_file_info(path).type
    if kind == pafs.FileType.Directory:
        filesystem.delete_dir(path)
    elif kind == pafs.FileType.File:
        filesystem.delete_file(path)


def checksum(uri: str) -> str:
    """sha256 of a file, read in blocks."""
    digest = hashlib.sha256()
    for block in _blocks(uri):
        digest.update(block)
    return digest.hexdigest()


def _blocks(uri: str, size: int = 1 << 22) -> Iterator[bytes]:
    filesystem, path = resolve(uri)
    with filesystem.open_input_stream(path) as stream:
        while block := stream.read(size):
            yield block


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
    filesystem.create_dir(path if local.is_dir() else path.rsplit("/", 1)[0], recursive=True)
    pafs.copy_files(str(local), path, destination_filesystem=filesystem)


def download(uri: str, files: list[str], *, version: str) -> Path:
    """A local directory with `files` of `uri`: itself when local, else a copy kept per URI and `version`.

    What is at a remote URI may change: `version` names its contents, so that no stale copy is taken for it.
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
                    os.unlink(stream.name)  # a disk that is full stays so otherwise
                    raise
            shutil.move(stream.name, copy)
    return target
