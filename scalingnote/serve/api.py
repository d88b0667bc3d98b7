"""The HTTP side of the gateway: paths, bodies and errors; requests are answered by the service.

Responses of the service are written as they are: :mod:`scalingnote.serve.messages` describes them to OpenAPI,
and validating every response against it would take as long as a search.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from scalingnote import __version__
from scalingnote.errors import ScalingNoteError
from scalingnote.serve import messages
from scalingnote.serve.access import (
    AccessMiddleware,
    Admission,
    RefusedError,
    RequestCallback,
    conflict,
    invalid,
    refusal_body,
    validation_refusal,
)
from scalingnote.serve.concurrency import run_periodically
from scalingnote.serve.messages import Refusal, SearchResponse
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.versions import Version, Versions, named
from scalingnote.serve_config import ServeConfig

PAGE = Path(__file__).parent / "page"
POLL_INTERVAL_S = 0.5  # between two reads of the version that other gateways may have activated
SECURITY_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
# The page runs its own scripts and styles, calls this server only, makes no markup of text, is in no frame.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
log = get_logger()


def build(
    service: Service,
    config: ServeConfig,
    *,
    admission: Admission | None = None,
    scrape: Callable[[], str] = str,
    on_done: RequestCallback | None = None,
    on_poll: Callable[[], None] | None = None,
    in_serve: bool = False,
) -> FastAPI:
    """The HTTP application.

    Args:
        service: answers the requests.
        config: limits and CORS.
        admission: shared with the gRPC side; None: one of `config`, without API keys.
        scrape: the text of ``/metrics``.
        on_done: called for each request after its answer.
        on_poll: called every half second.
        in_serve: Ray Serve adds the request id to answers.
    """

    api = _Api(
        title="ScalingNote search",
        version=__version__,
        lifespan=partial(_lifespan, service, on_poll),
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        responses={"4XX": {"model": Refusal}, "5XX": {"model": Refusal}},
    )
    _add_search(api, service)
    _add_writes(api, service)
    _add_administration(api, service)
    _add_monitoring(api, service, scrape)
    _add_page(api)
    api.exception_handler(RefusedError)(_on_refused)
    api.exception_handler(RequestValidationError)(_on_validation_error)
    api.exception_handler(HTTPException)(_on_http_exception)
    api.exception_handler(Exception)(_on_exception)
    admission = admission or Admission(config.limits, is_open=config.open)
    api.entry = AccessMiddleware(
        _BodyRouter(api.entry, api=api), admission=admission, on_done=on_done, in_serve=in_serve
    )
    if config.cors_origins:
        api.entry = CORSMiddleware(
            api.entry,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
        )
    return api


@asynccontextmanager
async def _lifespan(service: Service, on_poll: Callable[[], None] | None, _: FastAPI) -> AsyncIterator[None]:
    """Open the served versions at the start, and follow the active one until the end."""

    async def poll() -> None:
        if on_poll is not None:
            on_poll()
        await service.versions.follow()

    await service.versions.start()
    polling = asyncio.create_task(
        run_periodically(poll, interval_s=POLL_INTERVAL_S, name="following the active index version")
    )
    yield
    polling.cancel()


# --- body routes ------------------------------------------------------------------------------------------


# FastAPI parses a body to Python values and those to the model, resolves dependencies and enters exit stacks,
# behind several middlewares: 77 us for a /search whose service answers at once, against 15 us by a body route
# (33 us with FastAPI's middlewares alone).
# The routes of searches therefore validate the bytes of the body directly, in front of FastAPI. They are
# FastAPI routes nevertheless, so OpenAPI describes them like the others.


class _Api(FastAPI):
    """A FastAPI application with layers of its own in front of FastAPI's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.entry: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self.entry(scope, receive, send)


class _BodyRoute(APIRoute):
    """A route whose handler takes (body) or (body, request), with the body as its pydantic model."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's hook, called once: the function that answers a request."""
        parameters = list(inspect.signature(self.endpoint).parameters.values())
        self._model, self._takes_request = parameters[0].annotation, len(parameters) > 1
        return self.answer

    async def answer(self, request: Request) -> Any:
        """The handler's response; RefusedError when the body is not valid."""
        try:
            body = self._model.model_validate_json(await request.body())
        except ValidationError as error:
            problems = error.errors(include_url=False, include_input=False)
            if problems[0]["type"] == "json_invalid":
                raise invalid(f"the body is no JSON: {problems[0]['ctx']['error']}") from None
            raise validation_refusal(problems) from None
        except ClientDisconnect:
            raise RefusedError(400, "invalid", "the body ended early") from None
        return await (self.endpoint(body, request) if self._takes_request else self.endpoint(body))


class _BodyRouter:
    """ASGI middleware: body routes are answered here, all other requests by `app`.

    `api` must have all its routes and exception handlers already.
    """

    def __init__(self, app: ASGIApp, *, api: FastAPI) -> None:
        self._app, self._exception_handlers = app, api.exception_handlers
        self._routes = {route.path: route for route in api.routes if isinstance(route, _BodyRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        route = self._routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            response = await route.answer(request)
        except Exception as error:
            handlers = self._exception_handlers
            handle: Any = next(handlers[kind] for kind in type(error).__mro__ if kind in handlers)
            response = await handle(request, error)
        await response(scope, receive, send)


def _post(api: FastAPI, path: str, *, response: type[BaseModel]) -> Callable[[Handler], Handler]:
    """Decorator of the handler of a body route ``POST path``; `response` is its model for OpenAPI."""

    def add(handler: Handler) -> Handler:
        api.router.add_api_route(
            path, handler, methods=["POST"], response_model=response, route_class_override=_BodyRoute
        )
        return handler

    return add


# --- routes -----------------------------------------------------------------------------------------------


def _add_search(api: FastAPI, service: Service) -> None:
    @_post(api, "/search", response=SearchResponse)
    async def search(body: messages.SearchRequest, request: Request) -> Response:
        """The best documents for a text or a vector, best first."""
        return _json(await service.search(body, request.scope["state"]))

    @_post(api, "/similar", response=SearchResponse)
    async def similar(body: messages.SimilarRequest, request: Request) -> Response:
        """Documents like one of the index."""
        return _json(await service.similar(body, request.scope["state"]))

    @_post(api, "/encode", response=messages.EncodeResponse)
    async def encode(body: messages.EncodeRequest) -> Response:
        """Unit embeddings of queries, as `/search` takes them for `vector`."""
        return _json(await service.encode(body))

    @api.get("/documents/{doc_id:path}", response_model=dict[str, Any])
    async def document(doc_id: messages.DocId) -> Response:
        """A document as the index shows it."""
        return _json(await service.document(doc_id))


def _add_writes(api: FastAPI, service: Service) -> None:
    @api.post("/documents")
    async def upsert(body: messages.UpsertRequest) -> messages.Written:
        """Write documents, each in place of the one with its id; durable when it is answered."""
        return await service.writes.upsert(body)

    @api.post("/documents/delete")
    async def delete(body: messages.DeleteRequest) -> messages.Deleted:
        """Delete documents; ids that are not in the index are no error."""
        return await service.writes.delete(body.doc_ids)

    @api.delete("/documents/{doc_id:path}")
    async def delete_one(doc_id: messages.DocId) -> messages.Deleted:
        """Delete a document."""
        return await service.writes.delete([doc_id])


def _add_administration(api: FastAPI, service: Service) -> None:
    kept = service.versions

    @api.get("/admin/index")
    async def versions() -> messages.IndexVersions:
        """The versions of the index that are open."""
        return _open_versions(kept)

    @api.post("/admin/index/activate")
    async def activate(body: messages.ActivateRequest) -> messages.IndexVersions:
        """Answer from another version, without a failed request; it is opened first, which may take long."""
        field = "version" if body.uri is None else "uri"
        try:
            if body.uri is not None:
                version = await asyncio.to_thread(Version.of, body.uri)
            else:
                version = await asyncio.to_thread(lambda: named(kept.catalog.read(), body.version or ""))
        except (ScalingNoteError, OSError, ValueError) as error:  # the last two: of a malformed URI
            raise invalid(str(error), field) from None
        try:
            await kept.activate(version)
        except ScalingNoteError as error:
            raise invalid(str(error), field) from None
        return _open_versions(kept)

    @api.post("/admin/index/compact")
    async def compact() -> messages.IndexVersions:
        """Write the next version of a live index now, and answer from it."""
        await service.writes.compact()
        return _open_versions(kept)

    @api.post("/admin/index/roll_back")
    async def roll_back() -> messages.IndexVersions:
        """Answer from the version that was active before this one."""
        try:
            await kept.activate(await asyncio.to_thread(kept.catalog.previous))
        except ScalingNoteError as error:
            raise conflict(str(error)) from None
        return _open_versions(kept)


def _add_monitoring(api: FastAPI, service: Service, scrape: Callable[[], str]) -> None:
    @api.get("/info")
    async def info() -> messages.Info:
        """Arms, fields and limits of the service."""
        return service.info()

    @api.get("/healthz", response_model=messages.Health, responses={503: {"model": messages.Health}})
    async def health() -> Response:
        """Whether encoders and searchers answer; 503 when no query could be answered."""
        state = await service.health()
        return _json(state.model_dump(), 503 if state.status == "down" else 200)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> PlainTextResponse:
        """Metrics of all replicas on all nodes, in Prometheus' format."""
        text = await asyncio.to_thread(scrape)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _add_page(api: FastAPI) -> None:
    @api.get("/", response_class=FileResponse, include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(
            PAGE / "index.html",
            headers={**SECURITY_HEADERS, "content-security-policy": CONTENT_SECURITY_POLICY},
        )

    api.mount("/page", _Static(directory=PAGE))


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(SECURITY_HEADERS)
        return response


def _open_versions(versions: Versions) -> messages.IndexVersions:
    active = versions.active.name
    return messages.IndexVersions(
        active=active,
        versions=[
            messages.IndexVersion(
                version=each.name,
                uri=each.uri,
                documents=each.documents,
                created=each.created,
                active=each.name == active,
            )
            for each in versions.served
        ],
    )


# --- responses and errors ---------------------------------------------------------------------------------


def _json(content: Any, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def _refusal(request: Request, refused: RefusedError) -> Response:
    request.state.refused = refused.code
    response = _json(refusal_body(refused, request.state.request_id), refused.status)
    if refused.retry_after_s is not None:
        response.headers["retry-after"] = str(refused.retry_after_s)
    return response


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _refusal(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # without "body"
    if problems[0]["type"] == "json_invalid":
        (position,), reason = problems[0]["loc"], problems[0]["ctx"]["error"]
        return _refusal(request, invalid(f"the body is no JSON: {reason} (character {position})"))
    return _refusal(request, validation_refusal(problems))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid", 404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "refused")
    response = _refusal(request, RefusedError(error.status_code, code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _on_exception(request: Request, error: Exception) -> Response:
    log.error("request %s failed", request.state.request_id, exc_info=error)
    return _refusal(request, RefusedError(500, "internal", "this is a fault of the server: see its log"))
