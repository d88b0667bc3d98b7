"""Objects of ``s3://`` and ``gs://``: one request where one is enough, bounded retries, conditional writes.

A store charges and waits per request. So a small object is one PUT or one GET; a large one is parts or ranges
side by side. Server errors, throttling and timeouts are repeated after growing, random pauses. What a store
still refuses is an OSError, which Ray repeats on another worker.
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
SMALL_BYTES = 4 << 20  # on a store 30 ms away, they take as long as the request itself
MAX_PARALLEL_REQUESTS = 8  # of one object
MAX_UNANSWERED_ATTEMPTS = 5  # of a conditional write or a POST: obstore does not repeat these after a timeout
MAX_RETRIES = 10
REQUEST_TIMEOUT = timedelta(seconds=60)
RETRY: Any = {
    "max_retries": MAX_RETRIES,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=15), "base": 2},
}


def holds(uri: str) -> bool:
    """Whether `uri` is in an object store."""
    return uri.partition("://")[0] in SCHEMES


def exists(uri: str) -> bool:
    """Whether there is an object."""
    store, key = _place(uri)
    usage.count()
    try:
        with _os_errors(uri):
            obstore.head(store, key)
    except FileNotFoundError:
        return False
    return True


def blocks(uri: str) -> Iterator[memoryview]:
    """The content of an object in order; of a large one, MAX_PARALLEL_REQUESTS ranges at a time."""
    size, first = _start(uri, RANGE_BYTES)
    yield first
    window = RANGE_BYTES * MAX_PARALLEL_REQUESTS
    for start in range(first.nbytes, size, window):
        yield from _ranges(uri, start, min(window, size - start))


def open_input(uri: str) -> pa.NativeFile:
    """Random-access reader: a small object is read at once, a large one by the ranges that are asked for."""
    size, first = _start(uri, SMALL_BYTES)
    return pa.BufferReader(first) if first.nbytes == size else pa.PythonFile(_Ranges(uri, size), mode="r")


def read_range(uri: str, start: int, size: int) -> bytes:
    """Bytes [start, start + size) of an object."""
    return b"".join(_ranges(uri, start, size))


def write(uri: str, data: Any) -> None:
    """Write an object as a whole, also over another; `data` is any buffer."""
    store, key = _place(uri)
    content = memoryview(data).cast("B")  # obstore takes unsigned bytes, pyarrow's buffers are signed
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
    """Write `new` where the object is `old`, or where there is none; False if it is another one.

    The store compares and writes in one step. A write that came through although its answer did not is found
    by its content.
    """
    store, key = _place(uri)
    mode: Any = "create" if old is None else None
    for attempt in range(MAX_UNANSWERED_ATTEMPTS):
        if attempt or old is not None:
            held, tag = _read_tagged(uri)
            if held == new or held != old:
                return held == new
            mode = tag or "create"
        usage.count(written=len(new))
        try:
            with _os_errors(uri):
                obstore.put(store, key, new, mode=mode, use_multipart=False)
            return True
        except OSError as error:
            raced = isinstance(error.__cause__, AlreadyExistsError | PreconditionError)
            if not raced and attempt == MAX_UNANSWERED_ATTEMPTS - 1:
                raise
    return False


def files(uri: str) -> dict[str, int]:
    """Objects below `uri`: relative path -> size in bytes; without empty ones that stand for a folder."""
    found = _list(uri)
    folders = {name[:at] for name in found for at, letter in enumerate(name) if letter == "/"} | {""}
    return {name: size for name, size in found.items() if size or name not in folders}


def delete(uri: str) -> bool:
    """Delete an object and all below it; whether an empty one remains, as pyarrow writes for a folder.

    Its key ends with a slash, which obstore cannot name.
    """
    store, key = _place(uri)
    found = _list(uri)
    keys = [key, *(f"{key}/{name}" for name in found if name)]
    usage.count(requests=-(-len(keys) // 1000))
    for attempt in range(MAX_UNANSWERED_ATTEMPTS):
        try:
            with _os_errors(uri):
                obstore.delete(store, keys)
            break
        except FileNotFoundError:  # of a single object; the others are deleted all the same
            keys = keys[1:]
            if not keys:
                break
        except OSError:
            if attempt == MAX_UNANSWERED_ATTEMPTS - 1:
                raise
    return 0 in found.values() and bool(_list(uri))


def _list(uri: str) -> dict[str, int]:
    store, prefix = _place(uri)
    with _os_errors(uri):
        found = obstore.list(store, prefix).collect()
    usage.count(requests=max(1, -(-len(found) // 1000)))
    return {each["path"][len(prefix) :].strip("/"): each["size"] for each in found}


def region(bucket: str) -> str | None:
    """The region of a bucket, asked for only where neither the environment nor an own endpoint names one."""
    known = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if known or "AWS_ENDPOINT_URL" in os.environ:
        return known or "us-east-1"
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
    """Credentials of a profile in ~/.aws; None where the environment or the machine's role has them."""
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
    """The size of an object, and its first bytes, at most `length`."""
    store, key = _place(uri)
    usage.count()
    with _os_errors(uri):
        try:
            answer = obstore.get(store, key, options={"range": (0, length)})
            size, first = answer.meta["size"], memoryview(answer.bytes())
        except BaseError:
            usage.count()
            if obstore.head(store, key)["size"]:
                raise
            return 0, memoryview(b"")  # no range of an empty object exists
        usage.count(requests=0, read=first.nbytes)
        return size, first


def _read_tagged(uri: str) -> tuple[bytes | None, Any]:
    """The content of a small object and what a conditional write names it by; None for no object."""
    store, key = _place(uri)
    usage.count()
    try:
        with _os_errors(uri):
            answer = obstore.get(store, key)
            tags = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta.get(name)}
            return bytes(answer.bytes()), tags
    except FileNotFoundError:
        return None, None


def _ranges(uri: str, start: int, length: int) -> Sequence[memoryview]:
    """A stretch of an object, by ranges side by side."""
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
    """A large object as a file: each read is one range, or several side by side."""

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
        left = max(self._size - self._at, 0)
        length = left if size is None or size < 0 else min(size, left)
        if not length:
            return b""
        found = b"".join(_ranges(self._uri, self._at, length))
        self._at += length
        return found
