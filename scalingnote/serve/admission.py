"""Who may come in, over HTTP and gRPC alike: API keys, the rate of each client, room for one more.

A gateway replica has one of it, so limits count what comes in by either way.
"""

import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scalingnote.errors import ConfigError
from scalingnote.serve.refusals import RefusedError
from scalingnote.serve_config import LOOPBACK, Limits

_CLIENTS = 10_000  # whose rates are remembered
Client = str | bytes  # an address, or the digest of a key


class Admission:
    """Counts those who are in, and remembers how often each client came."""

    def __init__(
        self, limits: Limits, keys: frozenset[bytes] | None = None, *, is_open: bool = False
    ) -> None:
        """`keys` are digests, see :func:`read_keys`; None: nobody is asked for one.

        `is_open`: without keys, others than this machine may ask (``serve.open``).
        """
        self._limits, self._keys, self._is_open = limits, keys, is_open
        self.in_flight = 0  # requests that are here
        self._buckets: OrderedDict[Client, tuple[float, float]] = OrderedDict()  # tokens left, as of when

    @contextmanager
    def visit(self) -> Iterator[None]:
        """As long as a request is here."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def admit(self, authorization: bytes, address: str, *, size: int = 0, public: bool = False) -> None:
        """RefusedError unless a request with this header, from this address, may come in.

        What is `public` needs no key and counts for no client: a page is many files, and behind a proxy all
        who load it may have one address.
        """
        wait = 0.0 if public else self._wait_of(self._client(authorization, address))
        if wait > 0:
            rate = f"{self._limits.rate:g} requests a second"
            raise RefusedError(429, "rate_limited", f"more than {rate} of one client", None, int(wait) + 1)
        if self.in_flight > self._limits.in_flight:
            raise RefusedError(503, "unavailable", "too many requests at once: try again", None, 1)
        self.measure(size)

    def measure(self, size: int) -> None:
        """RefusedError when a body has more bytes than are taken."""
        most = self._limits.max_body_bytes
        if size > most:
            message = f"the body is larger than {most:,} bytes: send less at once"
            raise RefusedError(413, "too_large", message)

    def administer(self, address: str, host: bytes, origin: bytes) -> None:
        """RefusedError unless a request for ``/admin`` may come in; to be called beside :meth:`admit`.

        A key is enough. Without keys only this machine may administer, and of a browser only pages of this
        service: another page, or another name for this address (DNS rebinding), tells itself by its headers.
        """
        if self._keys is not None:
            return
        if self._is_open:
            raise RefusedError(
                403, "forbidden", "this service is open to others: set serve.api_keys for /admin"
            )
        asked = _host_name(host)
        if address not in LOOPBACK or asked not in LOOPBACK:
            where = f"from {address} for {asked or 'no host'}"
            message = f"without serve.api_keys /admin is for this machine alone, not {where}"
            raise RefusedError(403, "forbidden", message)
        if origin and origin.rpartition(b"//")[2] != host:
            raise RefusedError(403, "forbidden", "/admin is not for pages of other sites")

    def _client(self, authorization: bytes, address: str) -> Client:
        """Whose rate it is: that of a key which is known, or where nobody is asked for one of an address."""
        if self._keys is None:
            return address
        digest = hashlib.sha256(authorization.removeprefix(b"Bearer ").strip()).digest()
        if digest not in self._keys:
            raise RefusedError(401, "unauthorized", "send an API key: Authorization: Bearer KEY")
        return digest

    def _wait_of(self, client: Client) -> float:
        """Seconds until this client may ask again; takes a token where that is now."""
        rate, burst = self._limits.rate, float(self._limits.burst)
        if rate is None:
            return 0.0
        now = time.monotonic()
        tokens, then = self._buckets.pop(client, (burst, now))
        tokens = min(burst, tokens + (now - then) * rate)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > _CLIENTS:
            self._buckets.popitem(last=False)  # whoever was quiet longest has a full bucket, most likely
        return 0.0 if allowed else (1 - tokens) / rate


def read_keys(path: str | None) -> frozenset[bytes] | None:
    """Digests of the keys in a file, one a line; ConfigError when there is no key in it."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except OSError as error:
        raise ConfigError(f"serve.api_keys {path} cannot be read: {error.strerror}") from None
    if not lines or min(map(len, lines)) < 16:
        raise ConfigError(f"serve.api_keys {path}: write one key a line, each of 16 characters or more")
    return frozenset(hashlib.sha256(line.encode()).digest() for line in lines)


def _host_name(host: bytes) -> str:
    """The name in a Host header: its port and the brackets of an IPv6 address are left out."""
    name = host.decode("latin-1")
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def request_id(given: bytes) -> str:
    """The client's own, if it is short and printable."""
    if 0 < len(given) <= 64 and given.isascii() and given.decode().isprintable() and b" " not in given:
        return given.decode()
    return uuid.uuid4().hex
