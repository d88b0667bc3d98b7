"""Files at local paths and URIs: reads of complete files, atomic and conditional writes, local copies.

:mod:`scalingnote.storage.object_store` serves ``s3://`` and ``gs://``; pyarrow serves local paths and
``hdfs://``; fsspec serves any other scheme. :mod:`scalingnote.storage.usage` counts requests and bytes.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from scalingnote.core.errors import DataError
from scalingnote.storage import object_store, usage

T = TypeVar("T")
R = TypeVar("R")
BLOCK_BYTES = 16 << 20
PENDING = ".pending"  # ends the name of a file that is being written
MAX_PARALLEL_FILES = 8  # of a tree or a bucket


def join(base: str, *names: str) -> str:
    """Join `base` and `names` with single slashes between them, for paths and URIs."""
    return "/".join([base.rstrip("/"), *(name.strip("/") for name in names)])


def absolute(uri: str) -> str:
    """Make `uri` independent of the working directory, which differs between driver and workers."""
    return uri if "://" in uri else str(Path(uri).absolute())


def resolve(uri: str) -> tuple[pafs.FileSystem, str]:
    """Return the filesystem of `uri` and the path inside it."""
    if "://" not in uri:
        return pafs.LocalFileSystem(), absolute(uri)
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
    """Return the filesystem of a bucket or host: buckets may differ in region, and hosts in cluster."""
    if scheme == "s3":  # for readers and writers of Ray, which use pyarrow's filesystems
        return pafs.S3FileSystem(
            region=object_store.region(authority),
            endpoint_override=os.environ.get("AWS_ENDPOINT_URL"),
            allow_delayed_open=True,  # a file of one part is then one PUT instead of three requests
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=object_store.MAX_RETRIES),
        )
    if scheme in {"gs", "hdfs", "file"}:
        return pafs.FileSystem.from_uri(f"{scheme}://{authority}/")[0]
    import fsspec

    return pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem(scheme)))


def exists(uri: str) -> bool:
    """Return whether a file or a local directory exists."""
    if object_store.holds(uri):
        return object_store.exists(uri)
    filesystem, path = resolve(uri)
    usage.count()
    return bool(filesystem.get_file_info(path).type != pafs.FileType.NotFound)


def read_bytes(uri: str) -> bytes:
    """Read a file; DataError if it is missing."""
    try:
        return b"".join(_blocks(uri))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"no file at {uri}") from None


def read_if_exists(uri: str) -> bytes | None:
    """Read a file; None if it is missing."""
    try:
        return read_bytes(uri)
    except DataError:
        return None


def write_bytes(uri: str, data: Any) -> None:
    """Write any buffer atomically: a reader sees the old file or the complete new one."""
    if object_store.holds(uri):
        object_store.write(uri, data)
        return
    filesystem, path = resolve(uri)
    filesystem.create_dir(path.rsplit("/", 1)[0], recursive=True)
    pending = path + PENDING
    with filesystem.open_output_stream(pending) as stream:
        stream.write(data)
    filesystem.move(pending, path)
    usage.count(written=memoryview(data).nbytes)


def swap(uri: str, old: bytes | None, new: bytes) -> bool:
    """Write `new` if the content of the file is `old` (None: there is no file); return whether it did.

    An object store compares and writes in one step; other storage needs two steps.
    """
    if object_store.holds(uri):
        return object_store.swap(uri, old, new)
    if read_if_exists(uri) != old:
        return False
    write_bytes(uri, new)
    return True


def map_files(work: Callable[[T], R], files: Sequence[T]) -> list[R]:
    """Return the results of `work` for each file, in order, from threads: most of the time is I/O."""
    if len(files) <= 1:
        return list(map(work, files))
    with ThreadPoolExecutor(MAX_PARALLEL_FILES) as pool:
        return list(pool.map(work, files))


def is_local(uri: str) -> bool:
    """Return whether a file is on this machine, so that it is mapped instead of read."""
    return "://" not in uri or uri.startswith("file://")


def make_durable(uri: str, names: Iterable[str]) -> None:
    """Sync files below `uri` and their folders to disk; remote files are durable once they are written."""
    filesystem, path = resolve(uri)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        return
    root = Path(path)
    files = [root / name for name in names]
    folders = {above for each in files for above in each.parents if above.is_relative_to(root.parent)}
    for each in [*files, *sorted(folders, reverse=True)]:  # a file before the folder that lists it
        sync(each)


def replace_durably(path: Path, text: str) -> None:
    """Replace a local file atomically; the new one survives a crash of the machine after this call."""
    pending = path.with_name(path.name + PENDING)
    with pending.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    pending.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a local file, or the entries of a folder, to disk, so that they survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_files(uri: str) -> dict[str, int]:
    """List all files below `uri`: relative path -> size in bytes, sorted; empty if there are none."""
    if object_store.holds(uri):
        return dict(sorted(object_store.files(uri).items()))
    filesystem, path = resolve(uri)
    selector = pafs.FileSelector(path, recursive=True, allow_not_found=True)
    usage.count()
    sizes = {
        info.path[len(path) :].strip("/"): info.size
        for info in filesystem.get_file_info(selector)
        if info.type == pafs.FileType.File
    }
    return dict(sorted(sizes.items()))


def delete(uri: str) -> None:
    """Delete a file or a directory tree, if it exists."""
    if object_store.holds(uri) and not object_store.delete(uri):
        return
    filesystem, path = resolve(uri)
    usage.count()
    kind = filesystem.get_file_info(path).type
    if kind == pafs.FileType.Directory:
        filesystem.delete_dir(path)
    elif kind == pafs.FileType.File:
        with contextlib.suppress(FileNotFoundError):  # deleted or renamed by another thread or process
            filesystem.delete_file(path)


def checksum(uri: str) -> str:
    """Compute the sha256 of a file."""
    digest = hashlib.sha256()
    for block in _blocks(uri):
        digest.update(block)
    return digest.hexdigest()


def _blocks(uri: str) -> Iterator[Any]:
    if object_store.holds(uri):
        yield from object_store.blocks(uri)
        return
    filesystem, path = resolve(uri)
    with filesystem.open_input_file(path) as file:
        usage.count(read=file.size())
        while block := file.read(BLOCK_BYTES):
            yield block


def open_input(uri: str) -> pa.NativeFile:
    """Open a file for random access; memory-mapped if it is local."""
    if object_store.holds(uri):
        return object_store.open_input(uri)
    filesystem, path = resolve(uri)
    local = isinstance(filesystem, pafs.LocalFileSystem)
    file = pa.memory_map(path) if local else filesystem.open_input_file(path)
    usage.count(read=file.size())
    return file


def read_range(uri: str, start: int, size: int) -> bytes:
    """Read the bytes [start, start + size) of a file."""
    if object_store.holds(uri):
        return object_store.read_range(uri, start, size)
    with open_input(uri) as file:
        data: bytes = file.read_at(size, start)
    return data


def upload(local: str | Path, uri: str) -> dict[str, tuple[str, int]]:
    """Copy a local file or directory tree to `uri`, and return relative path -> sha256 and size."""
    local = Path(local)
    files = [path for path in sorted(local.rglob("*")) if path.is_file()] if local.is_dir() else [local]

    def copy(file: Path) -> tuple[str, tuple[str, int]]:
        size, name = file.stat().st_size, file.relative_to(local).as_posix()
        data = pa.memory_map(str(file)).read_buffer() if size else b""  # an empty file cannot be mapped
        write_bytes(join(uri, name) if local.is_dir() else uri, data)
        return name, (hashlib.sha256(data).hexdigest(), size)

    return dict(map_files(copy, files))


def download(
    uri: str, files: list[str], *, version: str, check: Callable[[str, str], None] | None = None
) -> Path:
    """Return a local directory with `files` of `uri`: `uri` itself if local, else a cached copy of the node.

    Args:
        uri: of the folder. The content of a remote one may change.
        files: below it.
        version: identifies the content, so that no stale copy is used.
        check: receives a file and the sha256 of its bytes, and raises an error if they do not match, before
            any process can see the copy. So the bytes are read once, and hashed once for a node.
    """
    filesystem, path = resolve(uri)
    if isinstance(filesystem, pafs.LocalFileSystem):
        return Path(path)
    key = hashlib.sha256(f"{uri} {version}".encode()).hexdigest()[:24]
    target = _cache() / key
    if missing := [name for name in files if not (target / name).exists()]:
        # Workers of a node start at the same time: one downloads, the others wait.
        with _lock(target):
            for name in missing:
                if not (target / name).exists():
                    _copy_to(target / name, join(uri, name), partial(check, name) if check else None)
    return target


def checksum_on_node(uri: str) -> str:
    """Compute the sha256 of a local file once for all processes of this node, until the file changes."""
    path = Path(resolve(uri)[1])
    info = path.stat()
    facts = f"{path.resolve()} {info.st_ino} {info.st_size} {info.st_mtime_ns}"
    cached = _cache() / "checksums" / hashlib.sha256(facts.encode()).hexdigest()[:24]
    with _lock(cached):
        digest = cached / "sha256"
        if not digest.exists():
            new = cached / "new"
            new.write_text(checksum(str(path)), encoding="ascii")
            new.rename(digest)
        return digest.read_text(encoding="ascii")


def _cache() -> Path:
    """Return the folder of copies that the processes of a node share; TMPDIR moves it to another disk."""
    return Path(tempfile.gettempdir()) / "scalingnote-cache"


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Create a folder if necessary and lock it: one process of the node works in it at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _copy_to(copy: Path, uri: str, check: Callable[[str], None] | None) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=copy.parent, delete=False) as stream:
        try:
            for block in _blocks(uri):
                stream.write(block)
                if check is not None:
                    digest.update(block)
            if check is not None:
                check(digest.hexdigest())
        except BaseException:
            os.unlink(stream.name)  # otherwise the partial copy would remain on a full disk
            raise
    os.replace(stream.name, copy)
