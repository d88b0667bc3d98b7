"""Objects of ``s3://`` and ``gs://``: one request where one is enough, bounded retries, conditional writes.

A store has a price and a latency per request. So a small object is one PUT or one GET; a large one is parts
or ranges in parallel. Server errors, throttling and timeouts are retried with a random exponential back-off.
A request that still fails raises an OSError, and Ray retries its part on another worker.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from io import RawIOBase
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.fs as pafs
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from scalingnote.core.errors import DataError
from scalingnote.storage import usage

SCHEMES = ("s3", "gs")
MULTIPART_BYTES = 64 << 20  # a larger object is written in parts
RANGE_BYTES = 16 << 20  # of one GET or part
SMALL_BYTES = 4 << 20  # with a latency of 30 ms, their transfer takes as long as the request itself
MAX_PARALLEL_REQUESTS = 8  # of one object
MAX_UNANSWERED_ATTEMPTS = 5  # of a conditional write or a POST: obstore does not retry these after a timeout
MAX_RETRIES = 10
REQUEST_TIMEOUT = timedelta(seconds=60)
RETRY: Any = {
    "max_retries": MAX_RETRIES,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=15), "base": 2},
}


def holds(uri: str) -> bool:
    """Return whether `uri` is in an object store."""
    return uri.partition("://")[0] in SCHEMES


def exists(uri: str) -> bool:
    """Return whether there is an object at `uri`."""
    store, key = _place(uri)
    usage.count()
    try:
        with _os_errors(uri):
            obstore.head(store, key)
    except FileNotFoundError:
        return False
    return True


def blocks(uri: str) -> Iterator[memoryview]:
    """Yield the content of an object in order; a large one in MAX_PARALLEL_REQUESTS ranges at a time."""
    size, first = _start(uri, RANGE_BYTES)
    yield first
    window = RANGE_BYTES * MAX_PARALLEL_REQUESTS
    for start in range(first.nbytes, size, window):
        yield from _ranges(uri, start, min(window, size - start))


def open_input(uri: str) -> pa.NativeFile:
    """Open an object for random access: a small one is read at once, a large one by the requested ranges."""
    size, first = _start(uri, SMALL_BYTES)
    return pa.BufferReader(first) if first.nbytes == size else pa.PythonFile(_Ranges(uri, size), mode="r")


def read_range(uri: str, start: int, size: int) -> bytes:
    """Read the bytes [start, start + size) of an object."""
    return b"".join(_ranges(uri, start, size))


def write(uri: str, data: Any) -> None:
    """Write an object, or replace an existing one; `data` is any buffer."""
    store, key = _place(uri)
    content = memoryview(data).cast("B")  # obstore accepts unsigned bytes, pyarrow's buffers are signed
    size = content.nbytes
    many = size > MULTIPART_BYTES
    usage.count(requests=-(-size // RANGE_BYTES) + 2 if many else 1, written=size)
    with _os_errors(uri):
        obstore.put(
            store,
            key,
            content,
            use_multipart=many,
            chunk_size=RANGE_BYTES,
            max_concurrency=MAX_PARALLEL_REQUESTS,
        )


def swap(uri: str, old: bytes | None, new: bytes) -> bool:
    """Write `new` if the content is `old` (None: there is no object); return whether it was written.

    The store compares and writes in one step. A write that succeeded without a response is recognized by the
    content of the object.
    """
    store, key = _place(uri)
    mode: Any = "create" if old is None else None
    for attempt in range(MAX_UNANSWERED_ATTEMPTS):
        if attempt or old is not None:
            content, tag = _read_tagged(uri)
            if content == new or content != old:
                return content == new
            mode = tag or "create"
        usage.count(written=len(new))
        try:
            with _os_errors(uri):
                obstore.put(store, key, new, mode=mode, use_multipart=False)
            return True
        except OSError as error:
            lost_race = isinstance(error.__cause__, AlreadyExistsError | PreconditionError)
            if not lost_race and attempt == MAX_UNANSWERED_ATTEMPTS - 1:
                raise
    return False


def files(uri: str) -> dict[str, int]:
    """List the objects below `uri`: relative path -> size in bytes; without empty ones that mark a folder."""
    sizes = _list(uri)
    folders = {name[:end] for name in sizes for end, letter in enumerate(name) if letter == "/"} | {""}
    return {name: size for name, size in sizes.items() if size or name not in folders}


def delete(uri: str) -> bool:
    """Delete an object and all below it; return whether an empty object that marks a folder remains.

    pyarrow writes such objects. Their key ends with a slash, which obstore cannot express.
    """
    store, key = _place(uri)
    sizes = _list(uri)
    keys = [key, *(f"{key}/{name}" for name in sizes if name)]
    usage.count(requests=-(-len(keys) // 1000))
    for attempt in range(MAX_UNANSWERED_ATTEMPTS):
        try:
            with _os_errors(uri):
                obstore.delete(store, keys)
            break
        except FileNotFoundError:  # of the object itself; those below it are deleted all the same
            keys = keys[1:]
            if not keys:
                break
        except OSError:
            if attempt == MAX_UNANSWERED_ATTEMPTS - 1:
                raise
    return 0 in sizes.values() and bool(_list(uri))


def _list(uri: str) -> dict[str, int]:
    store, prefix = _place(uri)
    with _os_errors(uri):
        objects = obstore.list(store, prefix).collect()
    usage.count(requests=max(1, -(-len(objects) // 1000)))
    return {each["path"][len(prefix) :].strip("/"): each["size"] for each in objects}


def region(bucket: str) -> str | None:
    """Return the region of a bucket; requested only without a region or an endpoint in the environment."""
    configured = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if configured or "AWS_ENDPOINT_URL" in os.environ:
        return configured or "us-east-1"
    return str(pafs.resolve_s3_region(bucket))


@lru_cache(maxsize=16)
def _connect(scheme: str, bucket: str) -> Any:
    options: Any = {"timeout": REQUEST_TIMEOUT, "allow_http": True}
    if scheme == "gs":
        return GCSStore(bucket, client_options=options, retry_config=RETRY)
    return S3Store(
        bucket,
        region=region(bucket),
        client_options=options,
        retry_config=RETRY,
        credential_provider=_profile(),
    )


def _profile() -> Any:
    """Return the credentials of a profile in ~/.aws; None if those of the environment or role are used."""
    if "AWS_ACCESS_KEY_ID" in os.environ:
        return None
    if "AWS_PROFILE" not in os.environ and not Path("~/.aws/credentials").expanduser().exists():
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise DataError(
            "a profile in ~/.aws is read by boto3: install it, or set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        ) from None
    return Boto3CredentialProvider()


def _place(uri: str) -> tuple[Any, str]:
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    return _connect(scheme, bucket), key.strip("/")


@contextmanager
def _os_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"no object at {uri}") from None
    except BaseError as error:
        raise OSError(f"{uri}: {error}") from error


def _start(uri: str, length: int) -> tuple[int, memoryview]:
    """Read the size of an object and its first bytes, at most `length`."""
    store, key = _place(uri)
    usage.count()
    with _os_errors(uri):
        try:
            response = obstore.get(store, key, options={"range": (0, length)})
            size, first = response.meta["size"], memoryview(response.bytes())
        except BaseError:
            usage.count()
            if obstore.head(store, key)["size"]:
                raise
            return 0, memoryview(b"")  # an empty object has no ranges
        usage.count(requests=0, read=first.nbytes)
        return size, first


def _read_tagged(uri: str) -> tuple[bytes | None, Any]:
    """Read a small object and its tags for a conditional write; None for both if there is no object."""
    store, key = _place(uri)
    usage.count()
    try:
        with _os_errors(uri):
            response = obstore.get(store, key)
            tags = {name: response.meta[name] for name in ("e_tag", "version") if response.meta.get(name)}
            return bytes(response.bytes()), tags
    except FileNotFoundError:
        return None, None


def _ranges(uri: str, start: int, length: int) -> Sequence[memoryview]:
    """Read a part of an object, by ranges in parallel."""
    store, key = _place(uri)
    starts = range(start, start + length, RANGE_BYTES)

    def one(first: int) -> memoryview:
        size = min(RANGE_BYTES, start + length - first)
        usage.count(read=size)
        with _os_errors(uri):
            return memoryview(obstore.get_range(store, key, start=first, length=size))

    if len(starts) == 1:
        return [one(start)]
    with ThreadPoolExecutor(MAX_PARALLEL_REQUESTS) as pool:
        return list(pool.map(one, starts))


class _Ranges(RawIOBase):
    """A large object as a file: each read is one range, or several in parallel."""

    def __init__(self, uri: str, size: int) -> None:
        self._uri, self._size, self._at = uri, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        remaining = max(self._size - self._at, 0)
        length = remaining if size is None or size < 0 else min(size, remaining)
        if not length:
            return b""
        data = b"".join(_ranges(self._uri, self._at, length))
        self._at += length
        return data
