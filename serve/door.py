"""The door: every request passes it before anything is spent on it, and on its way out it is counted.

    request id ─► API key ─► rate of this client ─► room for one more ─► size of the body ─► the API

Plain ASGI, as it runs for every request.
"""

import hashlib
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from scalingnote.errors import ConfigError
from scalingnote.serving.config import Limits
from serve.refusals import RefusedError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Done = Callable[[Message, int, float], None]  # scope, status, seconds

OPEN = ("/", "/healthz", "/page/")  # asked without a key: the page itself holds nothing
_CLIENTS = 10_000  # whose rates are remembered


class Door:
    """ASGI middleware; `scope["state"]` has `request_id` and whatever the API puts beside it."""

    def __init__(
        self, app: App, *, limits: Limits, keys: frozenset[bytes] | None = None, done: Done | None = None
    ) -> None:
        """`keys` are digests, see :func:`read_keys`; `done` is told of each request when it is answered."""
        self._app, self._limits, self._keys, self._done = app, limits, keys, done
        self._in_flight = 0
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, as of when

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = _request_id(headers.get(b"x-request-id", b""))

        too_large, told, taken = False, False, 0

        async def bounded() -> Message:  # a body may come without its length
            nonlocal too_large, taken
            message = await receive()
            taken += len(message.get("body", b""))
            too_large = taken > self._limits.max_body_bytes
            return {"type": "http.disconnect"} if too_large else message

        async def answer(message: Message) -> None:
            nonlocal status
            if too_large and not told:  # whatever the API made of half a body
                await refuse(self._too_large())
            elif not too_large:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    named = (b"x-request-id", state["request_id"].encode())
                    message["headers"] = [*message.get("headers", ()), named]
                await send(message)

        async def refuse(refused: RefusedError) -> None:
            nonlocal status, told
            told, status, state["refused"] = True, refused.status, refused.code
            await _refuse(refused, state["request_id"], send)

        self._in_flight += 1
        try:
            self._admit(scope, headers)
            await self._app(scope, bounded, answer)
        except RefusedError as refused:
            await refuse(refused)
        finally:
            self._in_flight -= 1
            if self._done is not None:
                self._done(scope, status, time.perf_counter() - started)

    def _admit(self, scope: Message, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        key = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        if self._keys is not None and not (path in OPEN or path.startswith("/page/")):
            digest = hashlib.sha256(key).digest()
            if digest not in self._keys:
                raise RefusedError(401, "unauthorized", "send an API key: Authorization: Bearer KEY")
        if path == "/healthz":
            return  # whoever watches must see a crowded server, too
        client = key.decode("latin-1") if self._keys else (scope.get("client") or ("",))[0]
        wait = self._wait_of(client)
        if wait > 0:
            rate = f"{self._limits.rate:g} requests a second"
            raise RefusedError(429, "rate_limited", f"more than {rate} of one client", None, int(wait) + 1)
        if self._in_flight > self._limits.in_flight:
            raise RefusedError(503, "unavailable", "too many requests at once: try again", None, 1)
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise self._too_large()

    def _wait_of(self, client: str) -> float:
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

    def _too_large(self) -> RefusedError:
        return RefusedError(
            413,
            "too_large",
            f"the body is larger than {self._limits.max_body_bytes:,} bytes: send less at once",
        )


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


def _request_id(given: bytes) -> str:
    """The client's own, if it is short and printable."""
    if 0 < len(given) <= 64 and given.isascii() and given.decode().isprintable() and b" " not in given:
        return given.decode()
    return uuid.uuid4().hex


async def _refuse(refused: RefusedError, request_id: str, send: Send) -> None:
    body = json.dumps(body_of(refused, request_id)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    if refused.retry_after_s is not None:
        headers.append((b"retry-after", str(refused.retry_after_s).encode()))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def body_of(refused: RefusedError, request_id: str) -> dict[str, Any]:
    """The one form of every refusal."""
    problem = {"code": refused.code, "message": refused.message, "field": refused.field}
    return {"error": problem, "request_id": request_id}
