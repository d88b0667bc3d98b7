"""The HTTP side of the gateway: paths, bodies and errors; what is behind them is the service.

Answers are written by :func:`_json` from what the service gives, and described to OpenAPI by the models of
messages.py: to check every answer again would take as long as a search.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from scalingnote import __version__
from scalingnote.errors import ScalingNoteError
from scalingnote.serve import body_route, messages
from scalingnote.serve.admission import Admission
from scalingnote.serve.catalog import Version
from scalingnote.serve.door import Done, Door
from scalingnote.serve.following import again_and_again
from scalingnote.serve.log import get_logger
from scalingnote.serve.messages import Refusal, SearchResponse
from scalingnote.serve.refusals import RefusedError, body_of, conflict, invalid, not_valid
from scalingnote.serve.service import Service
from scalingnote.serve.versions import Versions
from scalingnote.serve_config import ServeConfig

PAGE = Path(__file__).parent / "page"
FOLLOW_S = 0.5  # between two looks at what other gateways have activated
SECURE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
# The page runs its own scripts and styles, asks this server alone, makes no markup of text; nobody frames it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
log = get_logger()


def build(
    service: Service,
    config: ServeConfig,
    *,
    admission: Admission | None = None,
    metrics: Callable[[], str] = str,
    done: Done | None = None,
    look: Callable[[], None] | None = None,
    in_serve: bool = False,
) -> FastAPI:
    """The application. `metrics` gives the text of ``/metrics``, `done` is told of every request.

    `look` is called now and then, to measure how things stand. `in_serve`: behind what Serve puts before it.

    `admission` is shared with whatever else lets requests in; None: of the config, with no keys.
    """

    async def step() -> None:
        if look is not None:
            look()
        await service.versions.follow()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.versions.start()
        following = asyncio.create_task(
            again_and_again(step, every_s=FOLLOW_S, doing="going over to the active index version")
        )
        yield
        following.cancel()

    api = _Api(
        title="ScalingNote search",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load their scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"model": Refusal}, "5XX": {"model": Refusal}},
    )
    _searching(api, service)
    _writing(api, service)
    _administration(api, service)
    _watching(api, service, metrics)
    _page(api)
    api.exception_handler(RefusedError)(_refused)
    api.exception_handler(RequestValidationError)(_not_understood)
    api.exception_handler(HTTPException)(_of_starlette)
    api.exception_handler(Exception)(_broken)
    admission = admission or Admission(config.limits, is_open=config.open)
    api.entrance = Door(
        body_route.Shortcut(api.entrance, api=api), admission=admission, done=done, in_serve=in_serve
    )
    if config.cors_origins:
        api.entrance = CORSMiddleware(
            api.entrance,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
        )
    return api


class _Api(FastAPI):
    """What is on the way of every request stands before the layers that FastAPI puts around all others.

    A search that comes by the shortcut never meets those: they would take a twentieth of its time.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.entrance: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self.entrance(scope, receive, send)


def _searching(api: FastAPI, service: Service) -> None:
    @body_route.post(api, "/search", answer=SearchResponse)
    async def search(body: messages.SearchRequest, request: Request) -> Response:
        """The best documents for a text or a vector, best first."""
        request.state.note = note = service.note(body, request.state.request_id)
        return _json(await service.search(body, request.state.request_id, note))

    @body_route.post(api, "/similar", answer=SearchResponse)
    async def similar(body: messages.SimilarRequest, request: Request) -> Response:
        """Documents like one of the index."""
        return _json(await service.similar(body, request.state.request_id))

    @body_route.post(api, "/encode", answer=messages.EncodeResponse)
    async def encode(body: messages.EncodeRequest) -> Response:
        """Unit embeddings of queries, as `/search` takes them for `vector`."""
        return _json(await service.encode(body))

    @api.get("/documents/{doc_id:path}", response_model=dict[str, Any])
    async def document(doc_id: messages.DocId) -> Response:
        """A document as the index shows it."""
        return _json(await service.document(doc_id))


def _writing(api: FastAPI, service: Service) -> None:
    @api.post("/documents")
    async def upsert(body: messages.UpsertRequest) -> messages.Written:
        """Write documents, each in place of the one with its id; durable when it is answered."""
        return await service.upsert(body)

    @api.post("/documents/delete")
    async def delete(body: messages.DeleteRequest) -> messages.Deleted:
        """Delete documents; ids that are not there are no error."""
        return await service.delete(body.doc_ids)

    @api.delete("/documents/{doc_id:path}")
    async def delete_one(doc_id: messages.DocId) -> messages.Deleted:
        """Delete a document."""
        return await service.delete([doc_id])


def _administration(api: FastAPI, service: Service) -> None:
    @api.get("/admin/index")
    async def versions() -> messages.IndexVersions:
        """The versions of the index that are open."""
        return _open_versions(service.versions)

    @api.post("/admin/index/activate")
    async def activate(body: messages.ActivateRequest) -> messages.IndexVersions:
        """Answer from another version, without a failed request; it is opened first, which may take long."""
        field = "version" if body.uri is None else "uri"
        try:
            if body.uri is not None:
                version = await asyncio.to_thread(Version.of, body.uri)
            else:
                version = await asyncio.to_thread(service.versions.named, body.version or "")
        except (ScalingNoteError, OSError, ValueError) as error:  # the last two: no place of any filesystem
            raise invalid(str(error), field) from None
        try:
            await service.versions.activate(version)
        except ScalingNoteError as error:
            raise invalid(str(error), field) from None
        return _open_versions(service.versions)

    @api.post("/admin/index/compact")
    async def compact() -> messages.IndexVersions:
        """Write the next version of a live index now, and answer from it."""
        await service.compact()
        return _open_versions(service.versions)

    @api.post("/admin/index/roll_back")
    async def roll_back() -> messages.IndexVersions:
        """Answer from the version that was active before this one."""
        try:
            await service.versions.activate(await asyncio.to_thread(service.versions.previous))
        except ScalingNoteError as error:
            raise conflict(str(error)) from None
        return _open_versions(service.versions)


def _watching(api: FastAPI, service: Service, metrics: Callable[[], str]) -> None:
    @api.get("/info")
    async def info() -> messages.Info:
        """What can be asked here."""
        return service.info()

    @api.get("/healthz", response_model=messages.Health, responses={503: {"model": messages.Health}})
    async def health() -> Response:
        """Whether encoders and searchers answer; 503 when no query could be answered."""
        found = await service.health()
        return _json(found.model_dump(), 503 if found.status == "down" else 200)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> PlainTextResponse:
        """Metrics of all replicas on all nodes, in Prometheus' format."""
        text = await asyncio.to_thread(metrics)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _page(api: FastAPI) -> None:
    @api.get("/", response_class=FileResponse, include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers={**SECURE, "content-security-policy": POLICY})

    api.mount("/page", _Static(directory=PAGE))


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(SECURE)
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
            for each in versions.serving.versions
        ],
    )


# --- answers ----------------------------------------------------------------------------------------------


def _json(content: Any, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def _refusal(request: Request, refused: RefusedError) -> Response:
    request.state.refused = refused.code
    response = _json(body_of(refused, request.state.request_id), refused.status)
    if refused.retry_after_s is not None:
        response.headers["retry-after"] = str(refused.retry_after_s)
    return response


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _refusal(request, error)


async def _not_understood(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [{**each, "loc": each["loc"][1:]} for each in error.errors()]  # less "body"
    if problems[0]["type"] == "json_invalid":
        (where,), why = problems[0]["loc"], problems[0]["ctx"]["error"]
        return _refusal(request, invalid(f"the body is no JSON: {why} (character {where})"))
    return _refusal(request, not_valid(problems))


async def _of_starlette(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {400: "invalid", 404: "not_found", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "refused")
    response = _refusal(request, RefusedError(error.status_code, code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _broken(request: Request, error: Exception) -> Response:
    log.error("request %s failed", request.state.request_id, exc_info=error)
    return _refusal(request, RefusedError(500, "internal", "this is a fault of the server: see its log"))
