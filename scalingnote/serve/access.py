"""Access control of the gateway, for HTTP and gRPC: API keys, rate limits, limits of load and size.

    request id ─► API key ─► rate of this client ─► requests in flight ─► size and type of the body ─► API

A gateway replica has one :class:`Admission`, so the limits count the requests of both protocols together.
:class:`AccessMiddleware` applies it to HTTP and reports every request after its answer. It is plain ASGI
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
PUBLIC_PATHS = ("/", *HEALTH_PATHS, "/openapi.json")  # they need no key: nothing in them is secret
PAGE_PREFIX = "/page/"
ADMIN_PREFIX = "/admin/"
OPENAI_PREFIX = "/v1/"
# The code of a status and its description in OpenAPI. gRPC has a code for each, too
# (scalingnote.serve.grpc.servicer).
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
    429: ("rate_limited", "this client exceeds its rate: Retry-After has the seconds to wait"),
    500: ("internal", "a fault of the server: its log has the error under the request id"),
    503: ("unavailable", "too many requests, or no answer in time: Retry-After has the seconds to wait"),
}
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
SCHEME = re.compile(rb"^\s*bearer\s+", re.IGNORECASE)  # in any case, RFC 9110
CLIENT_CLOSED_REQUEST = 499  # status in nginx and Ray Serve of a request if its client closes the connection
log = get_logger()


# --- refusals ---------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A refused request; the client receives a :class:`~scalingnote.serve.messages.Refusal`.

    Args:
        status: of HTTP, one of REFUSALS.
        message: for people.
        field: of the request, if one field is the reason.
        retry_after_s: seconds after which the same request may succeed.
        code: for programs, one word; by default the code of the status.
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
    """Return an error with status 422: the request is invalid."""
    return RefusedError(422, message, field)


def not_found(message: str) -> RefusedError:
    """Return an error with status 404."""
    return RefusedError(404, message)


def conflict(message: str) -> RefusedError:
    """Return an error with status 409: this server is not configured for the request."""
    return RefusedError(409, message)


def unavailable(message: str) -> RefusedError:
    """Return an error with status 503: a later attempt may succeed."""
    return RefusedError(503, message, retry_after_s=1)


def validation_refusal(problems: Sequence[Mapping[str, Any]]) -> RefusedError:
    """Return an error with status 422 and the first of pydantic's `problems`.

    It leaves out the input, because JSON cannot represent NaN.
    """
    first, *more = problems
    field = ".".join(str(step) for step in first["loc"]) or None
    return invalid(first["msg"] + (f" (and {len(more)} more)" if more else ""), field)


def as_refused(error: Exception, request_id: str) -> RefusedError:
    """Return a refusal unchanged; log any other error and return it as a fault of the server."""
    if isinstance(error, RefusedError):
        return error
    log.error("request %s failed", request_id, exc_info=error)
    return RefusedError(500, "this is a fault of the server: see its log")


def refusal_response(refused: RefusedError, scope: Scope) -> Response:
    """Build the HTTP response of a refusal, and store its code in the record of the request.

    Below ``/v1`` status and body are those of OpenAI, which answers an invalid request by 400.
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
    """The number of requests in flight, and a token bucket for the rate of each client.

    Args:
        limits: of load, rate and size.
        keys: SHA-256 digests of the API keys, see :func:`read_keys`; None: no key is needed.
        is_open: whether clients on other machines are allowed without keys
            (``serve.allow_unauthenticated``).

    Attributes:
        limits: may be set while requests are answered; the bucket of a client keeps its tokens.
    """

    def __init__(
        self, limits: Limits, keys: frozenset[bytes] | None = None, *, is_open: bool = False
    ) -> None:
        self.limits, self._keys, self._is_open = limits, keys, is_open
        self.in_flight = 0
        # By address or digest of the key: remaining tokens, and the time when they were counted.
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
            authorization: the header of this name, empty without one.
            address: of the client, without its port.
            size: bytes of the body, as far as they are known.
            public: whether no key is needed and no rate is counted, because a page loads many files, and all
                clients behind a proxy may share one address.
        """
        wait_s = 0.0 if public else self._take_token(self._client(authorization, address))
        if wait_s > 0:
            rate = f"{self.limits.rate:g} requests a second"
            raise RefusedError(429, f"more than {rate} of one client", retry_after_s=int(wait_s) + 1)
        if self.in_flight > self.limits.in_flight:
            raise RefusedError(503, "too many requests at once: try again", retry_after_s=1)
        self.check_size(size)

    def check_size(self, size: int) -> None:
        """Raise RefusedError if a body is larger than ``limits.max_body_bytes``."""
        limit = self.limits.max_body_bytes
        if size > limit:
            message = f"the body is larger than {limit:,} bytes: send less at once"
            raise RefusedError(413, message)

    def admit_admin(self, address: str, host: bytes, origin: bytes) -> None:
        """Raise RefusedError unless a request for ``/admin`` is allowed; called after :meth:`admit`.

        With keys, :meth:`admit` has checked the key. Without keys, only clients on this machine are allowed.
        In a browser on this machine any page could send such a request: a page of another site has another
        `origin`, and a name that was made to resolve to this address (DNS rebinding) is another `host`.
        """
        if self._keys is not None:
            return
        if self._is_open:
            raise RefusedError(403, "this service is open to others: set serve.api_keys for /admin")
        host_name = _host_name(host)
        if address not in LOOPBACK or host_name not in LOOPBACK:
            source = f"from {address} for {host_name or 'no host'}"
            message = f"without serve.api_keys /admin is only for this machine, not {source}"
            raise RefusedError(403, message)
        if origin and origin.rpartition(b"//")[2] != host:
            raise RefusedError(403, "/admin is not for pages of other sites")

    def _client(self, authorization: bytes, address: str) -> str | bytes:
        """Return the client's name in the rates: the digest of its API key, or its address without keys."""
        if self._keys is None:
            return address
        digest = hashlib.sha256(SCHEME.sub(b"", authorization).strip()).digest()
        if digest not in self._keys:
            raise RefusedError(401, "send an API key: Authorization: Bearer KEY")
        return digest

    def _take_token(self, client: str | bytes) -> float:
        """Take a token from the client's bucket; return 0, or the seconds until the bucket has a token."""
        rate, burst = self.limits.rate, float(self.limits.burst)
        if rate is None:
            return 0.0
        now = time.monotonic()
        tokens, counted_at = self._buckets.pop(client, (burst, now))
        tokens = min(burst, tokens + (now - counted_at) * rate)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)  # the bucket of the client that is idle longest is likely full
        return 0.0 if allowed else (1 - tokens) / rate


def read_keys(path: str | None) -> frozenset[bytes] | None:
    """Return digests of the API keys in a file, one per line; ConfigError if it has none or a short one."""
    if path is None:
        return None
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split()  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"serve.api_keys {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"serve.api_keys {path} is not UTF-8 ({error}): save it as UTF-8") from None
    if not lines or min(map(len, lines)) < MIN_KEY_CHARS:
        raise ConfigError(
            f"serve.api_keys {path}: write one key per line, each of {MIN_KEY_CHARS} characters or more"
        )
    return frozenset(hashlib.sha256(line.encode()).digest() for line in lines)


def request_id(header: bytes) -> str:
    """Return the id that a client sent if it is short and printable, else a new one."""
    if 0 < len(header) <= 64 and header.isascii() and header.decode().isprintable() and b" " not in header:
        return header.decode()
    return secrets.token_hex(16)


def _host_name(host: bytes) -> str:
    """Return the name in a Host header, without its port and without the brackets of an IPv6 address."""
    name = host.decode("latin-1")
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


# --- HTTP -------------------------------------------------------------------------------------------------


class AccessMiddleware:
    """ASGI middleware that admits requests and adds a record to each, ``scope["state"]["record"]``.

    A HEAD is answered like a GET, without the body.

    Args:
        app: the ASGI application behind it.
        admission: shared with the gRPC side.
        on_done: called for each request after its answer, with the path of the route and the record.
        in_serve: whether Ray Serve writes the header ``x-request-id`` itself.
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
        """Answer or refuse a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None  # until an answer begins
        headers = dict(scope["headers"])
        record = RequestRecord(request_id(headers.get(b"x-request-id", b"")))
        scope.setdefault("state", {})["record"] = record
        id_header = () if self._in_serve else ((b"x-request-id", record.request_id.encode()),)
        app_scope, received_bytes = scope, 0
        if scope["method"] == "HEAD":
            app_scope, send = {**scope, "method": "GET"}, _without_body(send)

        async def receive_limited() -> Message:  # a chunked body has no content-length
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
                await self._app(app_scope, receive_limited, send_answer)
            except RefusedError as refused:
                await refusal_response(refused, scope)(scope, receive, send_answer)
            except asyncio.CancelledError:
                status = status or CLIENT_CLOSED_REQUEST
                raise
            finally:
                if self._on_done is not None:
                    # The pattern of the route: a path with an id in it would be a metric label for each id.
                    path = getattr(app_scope.get("route"), "path", "other")
                    self._on_done(path, record, status or 500, time.perf_counter() - started)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if path in HEALTH_PATHS:
            return  # health checks must succeed on an overloaded server, too
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
            type_name = content_type[:100].decode("latin-1")
            message = f"the body is {type_name}: send content-type: application/json"
            raise RefusedError(415, message)


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _without_body(send: Send) -> Send:
    """Return a `send` for the answer of a HEAD: it sends headers, and an empty body."""

    async def send_message(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_message
