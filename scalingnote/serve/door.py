"""The door of HTTP: every request passes it before anything is spent on it, and is counted on its way out.

    request id ─► API key ─► rate of this client ─► room for one more ─► size and kind of the body ─► the API

Plain ASGI, as it runs for every request.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

from scalingnote.serve.admission import Admission, request_id
from scalingnote.serve.refusals import RefusedError, body_of

Message = MutableMapping[str, Any]
Header = tuple[bytes, bytes]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
Done = Callable[[str, Mapping[str, Any], int, float], None]  # path, what is known of it, status, seconds

OPEN = ("/", "/healthz", "/openapi.json")  # asked without a key, as is the page: nothing in them is secret
STATIC = "/page/"
ADMIN = "/admin/"
GAVE_UP = 499  # nginx' and Serve's status of a request that nobody waits for any more


class Door:
    """ASGI middleware; `scope["state"]` has `request_id` and whatever the API puts beside it."""

    def __init__(
        self, app: App, *, admission: Admission, done: Done | None = None, in_serve: bool = False
    ) -> None:
        """`done` is told of each request when it is answered; Serve itself writes the id on answers."""
        self._app, self._admission, self._done, self._in_serve = app, admission, done, in_serve

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None  # until an answer begins
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state["request_id"] = request_id(headers.get(b"x-request-id", b""))
        named = () if self._in_serve else ((b"x-request-id", state["request_id"].encode()),)

        too_large: RefusedError | None = None
        told, taken = False, 0

        async def bounded() -> Message:  # a body may come without its length
            nonlocal too_large, taken
            message = await receive()
            taken += len(message.get("body", b""))
            try:
                self._admission.measure(taken)
            except RefusedError as refused:
                too_large = refused
                return {"type": "http.disconnect"}
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if too_large and not told:  # whatever the API made of half a body
                await refuse(too_large)
            elif not too_large:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    message["headers"] = [*message.get("headers", ()), *named]
                await send(message)

        async def refuse(refused: RefusedError) -> None:
            nonlocal status, told
            told, status, state["refused"] = True, refused.status, refused.code
            await _refuse(refused, state["request_id"], named, send)

        with self._admission.visit():
            try:
                self._admit(scope, headers)
                await self._app(scope, bounded, answer)
            except RefusedError as refused:
                await refuse(refused)
            except asyncio.CancelledError:
                status = status or GAVE_UP
                raise
            finally:
                if self._done is not None:
                    path = getattr(scope.get("route"), "path", "other")  # the pattern: ids are no labels
                    self._done(path, state, status or 500, time.perf_counter() - started)

    def _admit(self, scope: Message, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if path == "/healthz":
            return  # whoever watches must see a crowded server, too
        length = headers.get(b"content-length", b"")
        address = (scope.get("client") or ("",))[0]
        self._admission.admit(
            headers.get(b"authorization", b""),
            address,
            size=int(length) if length.isdigit() else 0,
            public=path in OPEN or path.startswith(STATIC),
        )
        if path.startswith(ADMIN):
            self._admission.administer(address, headers.get(b"host", b""), headers.get(b"origin", b""))
        there = length not in {b"", b"0"} or b"transfer-encoding" in headers
        kind = headers.get(b"content-type", b"of no content-type")
        if there and not _is_json(kind):
            message = f"the body is {kind[:100].decode('latin-1')}: send content-type: application/json"
            raise RefusedError(415, "unsupported_media_type", message)


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


async def _refuse(refused: RefusedError, request_id: str, named: Iterable[Header], send: Send) -> None:
    body = json.dumps(body_of(refused, request_id)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *named,
    ]
    if refused.retry_after_s is not None:
        headers.append((b"retry-after", str(refused.retry_after_s).encode()))
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
