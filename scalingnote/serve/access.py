"""Access control of the gateway, for HTTP and gRPC alike: API keys, rate limits, limits of load and size.

    request id ─► API key ─► rate of this client ─► requests in flight ─► size and type of the body ─► API

A gateway replica has one :class:`Admission`, so the limits count requests of both protocols together.
:class:`AccessMiddleware` applies it to HTTP and reports every request when it is answered. It is plain ASGI
because it runs for every request.
"""

import asyncio
import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scalingnote.core.errors import ConfigError
from scalingnote.run.service_config import LOOPBACK, Limits
from scalingnote.serve.telemetry import RequestRecord, get_logger

RequestCallback = Callable[[str, RequestRecord, int, float], None]  # path, record, status, seconds

MAX_CLIENTS = 10_000  # clients whose rates are remembered
MIN_KEY_CHARS = 16
HEALTH_PATHS = ("/healthz", "/health")
PUBLIC_PATHS = ("/", *HEALTH_PATHS, "/openapi.json")  # without a key: nothing in them is secret
PAGE_PREFIX = "/page/"
ADMIN_PREFIX = "/admin/"
OPENAI_PREFIX = "/v1/"
# Code, and what OpenAPI says, of a status; gRPC has a code for each too (scalingnote.serve.grpc.servicer).
REFUSALS = {
    400: ("invalid", "the body ended early; below /v1 also an invalid request"),
    401: ("unauthorized", "no API key, or an unknown one"),
    403: (
        "forbidden",
        "/admin without a key: from another machine, on an open service, or from a page of another site",
    ),
    404: ("not_found", "there is no such document, model or path"),
    405: ("method_not_allowed", "the path has other methods"),
    409: ("conflict", "this server is not configured for it"),
    413: (
        "too_large",
        "the body exceeds limits.max_body_bytes, or a text is longer than the model reads",
    ),
    415: ("unsupported_media_type", "the body is not application/json"),
    422: ("invalid", "an invalid request: `field` names the place"),
    429: ("rate_limited", "the rate of this client is used up: Retry-After says until when"),
    500: ("internal", "a fault of the server, in its log under the request id"),
    503: ("unavailable", "too many requests, or no answer in time: Retry-After says when to try again"),
}
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
SCHEME = re.compile(rb"^\s*bearer\s+", re.IGNORECASE)  # in any case, RFC 9110
CLIENT_CLOSED_REQUEST = 499  # status of nginx and Ray Serve for a request whose client went away
log = get_logger()


# --- refusals ---------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A request that is not answered; the client gets a :class:`~scalingnote.serve.messages.Refusal`.

    Args:
        status: of HTTP, one of REFUSALS.
        message: for people.
        field: of the request, where one field is the reason.
        retry_after_s: seconds after which the same request may succeed.
        code: for programs, one word; by default that of the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        *,
        retry_after_s: int | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.code = code or REFUSALS.get(status, ("refused", ""))[0]
        self.field, self.retry_after_s = field, retry_after_s


def invalid(message: str, field: str | None = None) -> RefusedError:
    """422: the request is invalid on any server."""
    return RefusedError(422, message, field)


def not_found(message: str) -> RefusedError:
    """404."""
    return RefusedError(404, message)


def conflict(message: str) -> RefusedError:
    """409: this server is not configured for the request."""
    return RefusedError(409, message)


def unavailable(message: str) -> RefusedError:
    """503: a later attempt may succeed."""
    return RefusedError(503, message, retry_after_s=1)


def validation_refusal(problems: Sequence[Mapping[str, Any]]) -> RefusedError:
    """422 with the first of pydantic's `problems`; without the input, because JSON cannot represent NaN."""
    first, *more = problems
    field = ".".join(str(step) for step in first["loc"]) or None
    return invalid(first["msg"] + (f" (and {len(more)} more)" if more else ""), field)


def as_refused(error: Exception, request_id: str) -> RefusedError:
    """A refusal as it is; any other error as a fault of the server, which is logged."""
    if isinstance(error, RefusedError):
        return error
    log.error("request %s failed", request_id, exc_info=error)
    return RefusedError(500, "this is a fault of the server: see its log")


def refusal_response(refused: RefusedError, scope: Scope) -> Response:
    """The HTTP response of a refusal, with its code in the request's record.

    Below ``/v1`` status and body are those of OpenAI, where a wrong request gets 400.
    """
    record: RequestRecord = scope["state"]["record"]
    record.refused = refused.code
    status, content = refused.status, {"code": refused.code, "message": refused.message}
    if scope["path"].startswith(OPENAI_PREFIX):
        status = 400 if status == 422 else status
        kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        body: dict[str, Any] = {"error": {**content, "type": kind, "param": refused.field}}
    else:
        body = {"error": {**content, "field": refused.field}, "request_id": record.request_id}
    response = Response(to_json(body), status, media_type="application/json")
    if refused.retry_after_s is not None:
        response.headers["retry-after"] = str(refused.retry_after_s)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


# --- admission --------------------------------------------------------------------------------------------


class Admission:
    """Counts the requests in flight, and the rate of each client by a token bucket.

    Args:
        limits: of load, rate and size.
        keys: SHA-256 digests of the API keys, see :func:`read_keys`; None: no key is needed.
        is_open: without keys, clients on other machines are allowed (``serve.allow_unauthenticated``).

    Attributes:
        limits: may be set while requests are answered; a client's bucket keeps its tokens.
    """

    def __init__(
        self, limits: Limits, keys: frozenset[bytes] | None = None, *, is_open: bool = False
    ) -> None:
        self.limits, self._keys, self._is_open = limits, keys, is_open
        self.in_flight = 0
        # By address or digest of the key: tokens left, and the time at which they were counted.
        self._buckets: OrderedDict[str | bytes, tuple[float, float]] = OrderedDict()

    @contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def admit(self, authorization: bytes, address: str, *, size: int = 0, public: bool = False) -> None:
        """Raise RefusedError unless a request is allowed.

        Args:
            authorization: the header of that name, empty without one.
            address: of the client, without its port.
            size: bytes of the body, as far as they are known.
            public: no key is needed, and no rate is counted: a page loads many files, and all clients
                behind a proxy may share one address.
        """
        wait_s = 0.0 if public else self._take_token(self._client(authorization, address))
        if wait_s > 0:
            rate = f"{self.limits.rate:g} requests a second"
            raise RefusedError(429, f"more than {rate} of one client", retry_after_s=int(wait_s) + 1)
        if self.in_flight > self.limits.in_flight:
            raise RefusedError(503, "too many requests at once: try again", retry_after_s=1)
        self.check_size(size)

    def check_size(self, size: int) -> None:
        """Raise RefusedError when a body is larger than ``limits.max_body_bytes``."""
        limit = self.limits.max_body_bytes
        if size > limit:
            message = f"the body is larger than {limit:,} bytes: send less at once"
            raise RefusedError(413, message)

    def admit_admin(self, address: str, host: bytes, origin: bytes) -> None:
        """Raise RefusedError unless a request for ``/admin`` is allowed; called after :meth:`admit`.

        A key is enough. Without keys only this machine may administer. In a browser on this machine any
        page could send such a request: a page of another site has another `origin`, and a name that was
        pointed to this address (DNS rebinding) is another `host`.
        """
        if self._keys is not None:
            return
        if self._is_open:
            raise RefusedError(403, "this service is open to others: set serve.api_keys for /admin")
        host_name = _host_name(host)
        if address not in LOOPBACK or host_name not in LOOPBACK:
            source = f"from {address} for {host_name or 'no host'}"
            message = f"without serve.api_keys /admin is for this machine alone, not {source}"
            raise RefusedError(403, message)
        if origin and origin.rpartition(b"//")[2] != host:
            raise RefusedError(403, "/admin is not for pages of other sites")

    def _client(self, authorization: bytes, address: str) -> str | bytes:
        """The key of the client's rate: its API key's digest, or its address where no key is needed."""
        if self._keys is None:
            return address
        digest = hashlib.sha256(SCHEME.sub(b"", authorization).strip()).digest()
        if digest not in self._keys:
            raise RefusedError(401, "send an API key: Authorization: Bearer KEY")
        return digest

    def _take_token(self, client: str | bytes) -> float:
        """Take a token from the client's bucket: 0 if there was one, else the seconds until there is one."""
        rate, burst = self.limits.rate, float(self.limits.burst)
        if rate is None:
            return 0.0
        now = time.monotonic()
        tokens, counted_at = self._buckets.pop(client, (burst, now))
        tokens = min(burst, tokens + (now - counted_at) * rate)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)  # the client idle for longest most likely has a full bucket
        return 0.0 if allowed else (1 - tokens) / rate


def read_keys(path: str | None) -> frozenset[bytes] | None:
    """Digests of the API keys in a file, one a line; ConfigError when it has none or a short one."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split()  # some editors put a mark in front
    except OSError as error:
        raise ConfigError(f"serve.api_keys {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"serve.api_keys {path} is no UTF-8 ({error}): save it as UTF-8") from None
    if not lines or min(map(len, lines)) < MIN_KEY_CHARS:
        raise ConfigError(
            f"serve.api_keys {path}: write one key a line, each of {MIN_KEY_CHARS} characters or more"
        )
    return frozenset(hashlib.sha256(line.encode()).digest() for line in lines)


def request_id(header: bytes) -> str:
    """The id that a client sent, if it is short and printable; else a new one."""
    if 0 < len(header) <= 64 and header.isascii() and header.decode().isprintable() and b" " not in header:
        return header.decode()
    return secrets.token_hex(16)


def _host_name(host: bytes) -> str:
    """The name in a Host header, without its port and without the brackets of an IPv6 address."""
    name = host.decode("latin-1")
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


# --- HTTP -------------------------------------------------------------------------------------------------


class AccessMiddleware:
    """ASGI middleware that admits requests, and gives each a record, ``scope["state"]["record"]``.

    A HEAD is answered as a GET, and the body is not sent.

    Args:
        app: the ASGI application behind it.
        admission: shared with the gRPC side.
        on_done: called for each request after its answer, with the route's path and the record.
        in_serve: Ray Serve writes the header ``x-request-id`` itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: Admission,
        on_done: RequestCallback | None = None,
        in_serve: bool = False,
    ) -> None:
        self._app, self._admission, self._on_done, self._in_serve = app, admission, on_done, in_serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None  # until an answer begins
        headers = dict(scope["headers"])
        record = RequestRecord(request_id(headers.get(b"x-request-id", b"")))
        scope.setdefault("state", {})["record"] = record
        id_header = () if self._in_serve else ((b"x-request-id", record.request_id.encode()),)
        asked, received_bytes = scope, 0
        if scope["method"] == "HEAD":
            asked, send = {**scope, "method": "GET"}, _without_body(send)

        async def receive_limited() -> Message:  # a chunked body does not announce its length
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            self._admission.check_size(received_bytes)
            return message

        async def send_answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *id_header]
            await send(message)

        with self._admission.count_request():
            try:
                self._admit(scope, headers)
                await self._app(asked, receive_limited, send_answer)
            except RefusedError as refused:
                await refusal_response(refused, scope)(scope, receive, send_answer)
            except asyncio.CancelledError:
                status = status or CLIENT_CLOSED_REQUEST
                raise
            finally:
                if self._on_done is not None:
                    # The route's pattern: paths with ids in them would be a metric label each.
                    path = getattr(asked.get("route"), "path", "other")
                    self._on_done(path, record, status or 500, time.perf_counter() - started)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if path in HEALTH_PATHS:
            return  # health checks must pass on an overloaded server, too
        length = headers.get(b"content-length", b"")
        address = (scope.get("client") or ("",))[0]
        self._admission.admit(
            headers.get(b"authorization", b""),
            address,
            size=int(length) if length.isdigit() else 0,
            public=path in PUBLIC_PATHS or path.startswith(PAGE_PREFIX),
        )
        if path.startswith(ADMIN_PREFIX):
            self._admission.admit_admin(address, headers.get(b"host", b""), headers.get(b"origin", b""))
        has_body = length not in {b"", b"0"} or b"transfer-encoding" in headers
        content_type = headers.get(b"content-type", b"of no content-type")
        if has_body and not _is_json(content_type):
            shown = content_type[:100].decode("latin-1")
            message = f"the body is {shown}: send content-type: application/json"
            raise RefusedError(415, message)


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _without_body(send: Send) -> Send:
    """The same, for the answer of a HEAD."""

    async def send_message(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_message
