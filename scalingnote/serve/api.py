"""The HTTP side of the gateway: paths, bodies and errors. The service answers the requests.

Answers are written as the service returns them. The models only describe them in OpenAPI, because validating
every answer against its model would take as long as a search.
"""

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from scalingnote.core import __version__
from scalingnote.core.errors import ScalingNoteError
from scalingnote.run.service_config import ServeConfig
from scalingnote.serve import messages
from scalingnote.serve.access import (
    OPENAI_PREFIX,
    REFUSALS,
    AccessMiddleware,
    Admission,
    RefusedError,
    RequestCallback,
    as_refused,
    conflict,
    invalid,
    refusal_response,
    validation_refusal,
)
from scalingnote.serve.catalog import Version, version_named
from scalingnote.serve.concurrency import run_periodically
from scalingnote.serve.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingService,
    Model,
    ModelList,
    OpenAIRefusal,
    Rank,
    SparseValue,
    TeiEmbedRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiSparseRequest,
    TeiTokenizeRequest,
    Token,
)
from scalingnote.serve.service import Service
from scalingnote.serve.versions import Versions

PAGE = Path(__file__).parent / "page"
VERSION_POLL_INTERVAL_S = 0.5  # between two reads of the active version, which other gateways may change
SECURITY_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
# The page loads scripts and styles only from this server, calls only this server, does not turn text into
# markup, and cannot be put in a frame.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
EVERYWHERE = (400, 401, 413, 415, 429, 500, 503)
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


def refusals(*statuses: int, model: type[BaseModel] = messages.Refusal) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of these statuses."""
    return {status: {"model": model, "description": REFUSALS[status][1]} for status in statuses}


class _AnyText(PathConvertor):
    """The rest of a path. Ids may have slashes and line ends; the framework's own stops at a line end."""

    regex = r"[\s\S]*"


register_url_convertor("any", _AnyText())


class Api(FastAPI):
    """A FastAPI application with admission and fast routes for JSON bodies in front of FastAPI's layers.

    FastAPI parses a body to Python values and validates these against the model, resolves dependencies and
    enters exit stacks, behind several middlewares. This takes 77 us for a /search with a service that answers
    at once, against 15 us here (33 us with only FastAPI's middlewares). The routes of :meth:`post_json`
    therefore validate the bytes of the body directly. They are still FastAPI routes, so OpenAPI describes
    them like the others.
    """

    def __init__(self, **settings: Any) -> None:
        errors = (RefusedError, RequestValidationError, HTTPException, Exception)
        super().__init__(**settings, exception_handlers=dict.fromkeys(errors, _on_error))
        self.entry: ASGIApp = self.answer  # the outermost layer
        self._json_routes: dict[str, tuple[BaseRoute, Callable[..., Any], type[BaseModel], bool]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await self.entry(scope, receive, send)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an admitted request."""
        route_entry = self._json_routes.get(scope["path"]) if scope.get("method") == "POST" else None
        if route_entry is None:
            await super().__call__(scope, receive, send)
            return
        route, handler, model, takes_request = route_entry
        scope["route"] = route
        request = Request(scope, receive, send)
        try:
            body = _validate(model, await _read_body(receive))
            response = await (handler(body, request) if takes_request else handler(body))
        except Exception as error:
            response = await _on_error(request, error)
        await response(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the description of all paths. It has no 422 below ``/v1``, which answers 400 instead."""
        schema = super().openapi()
        for path, operations in schema["paths"].items():
            for operation in operations.values() if path.startswith(OPENAI_PREFIX) else ():
                operation["responses"].pop("422", None)
        return schema

    def post_json(
        self, path: str, response: Any, *statuses: int, model: type[BaseModel] = messages.Refusal
    ) -> Callable[[Handler], Handler]:
        """Decorate a handler of (body) or (body, request); the body is an instance of its pydantic model.

        Args:
            path: of the request.
            response: model of its answer, for OpenAPI.
            statuses: of refusals, in addition to 422 and those of every path.
            model: of refusals.
        """
        responses = refusals(422, *statuses, model=model)

        def add(handler: Handler) -> Handler:
            self.add_api_route(path, handler, methods=["POST"], response_model=response, responses=responses)
            body, *more = (each.annotation for each in inspect.signature(handler).parameters.values())
            self._json_routes[path] = (self.router.routes[-1], handler, body, bool(more))
            return handler

        return add


async def _read_body(receive: Receive) -> bytes:
    """Read the body without the framework's generator of pieces, which takes 2 % of the time of a search."""
    pieces, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(pieces)


def _validate(model: type[BaseModel], body: bytes) -> BaseModel:
    try:
        valid = model.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        if problems[0]["type"] == "json_invalid":
            raise invalid(f"the body is not JSON: {problems[0]['ctx']['error']}") from None
        raise validation_refusal(problems) from None
    STRICT.decode(body.decode())
    return valid


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a body; 422 if it has a name twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((name, times),) = Counter(name for name, _ in pairs).most_common(1)
        raise invalid(f"{name!r} is {times} times in one object: send it once", name)
    return values


def _no_number(name: str) -> None:
    raise invalid(f"the body is not JSON: {name} is not a number")


# Checks what pydantic accepts: of equal names it takes the last, and it reads NaN and Infinity.
STRICT = json.JSONDecoder(object_pairs_hook=_each_once, parse_constant=_no_number, parse_float=bool)


async def _on_error(request: Request, error: Exception) -> Response:
    """Return the response to a request that raised an error."""
    headers: Mapping[str, str] = {}
    match error:
        case RequestValidationError():  # of a path: bodies are validated above
            error = validation_refusal([{**each, "loc": each["loc"][1:]} for each in error.errors()])
        case HTTPException():
            headers = error.headers or {}
            if error.status_code == 405:
                headers = {**headers, **_allow_header(request)}
            error = RefusedError(error.status_code, str(error.detail))
        case ClientDisconnect():
            error = RefusedError(400, "the body ended early")
    response = refusal_response(as_refused(error, request.scope["state"]["record"].request_id), request.scope)
    response.headers.update(headers)
    return response


def _allow_header(request: Request) -> dict[str, str]:
    """Return the header with all methods of a path: the framework lists only those of one of its routes."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    matching = [each for each in routes if each.matches(request.scope)[0] is not Match.NONE]
    path = min((each.path for each in matching), key=lambda each: "{" in each, default="")
    methods = {method for each in matching if each.path == path for method in each.methods or ()}
    methods |= {"HEAD"} if "GET" in methods else set()
    return {"allow": ", ".join(sorted(methods))} if methods else {}


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with JSON content."""
    return Response(to_json(content), status, headers, media_type="application/json")


def build(
    service: Service | EmbeddingService,
    config: ServeConfig,
    *,
    admission: Admission | None = None,
    scrape: Callable[[], str] = str,
    on_done: RequestCallback | None = None,
    on_poll: Callable[[], None] | None = None,
    in_serve: bool = False,
) -> FastAPI:
    """Build the HTTP application.

    Args:
        service: answers the requests; without an index there are only the paths of embeddings.
        config: limits and CORS.
        admission: shared with the gRPC side; None: a new one with the limits of `config`, without API keys.
        scrape: returns the text of ``/metrics``.
        on_done: called for each request after its answer.
        on_poll: called every half second.
        in_serve: whether Ray Serve adds the request id to answers.
    """
    api = Api(
        title="ScalingNote search" if isinstance(service, Service) else "ScalingNote embeddings",
        version=__version__,
        lifespan=partial(_lifespan, service, on_poll),
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        responses=refusals(*EVERYWHERE),
    )
    if isinstance(service, Service):
        _add_search(api, service)
        _add_writes(api, service)
        _add_administration(api, service)
        _add_page(api)
    embeddings = service if isinstance(service, EmbeddingService) else service.embeddings
    _add_openai(api, embeddings)
    _add_tei(api, embeddings)
    _add_monitoring(api, service, scrape)
    admission = admission or Admission(config.limits, is_open=config.allow_unauthenticated)
    api.entry = AccessMiddleware(api.entry, admission=admission, on_done=on_done, in_serve=in_serve)
    if config.cors_origins:
        api.entry = CORSMiddleware(
            api.entry,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
        )
    return api


@asynccontextmanager
async def _lifespan(
    service: Service | EmbeddingService, on_poll: Callable[[], None] | None, _: FastAPI
) -> AsyncIterator[None]:
    """Open versions and towers at the start, and follow the active version until the end."""

    async def poll() -> None:
        if on_poll is not None:
            on_poll()
        if isinstance(service, Service):
            await service.versions.follow()

    await (service.versions.start() if isinstance(service, Service) else service.start())
    polling = asyncio.create_task(
        run_periodically(poll, interval_s=VERSION_POLL_INTERVAL_S, name="following the active index version")
    )
    yield
    polling.cancel()


# --- routes -----------------------------------------------------------------------------------------------


def _add_search(api: Api, service: Service) -> None:
    @api.post_json("/search", messages.SearchResponse)
    async def search(body: messages.SearchRequest, request: Request) -> Response:
        """Return the best documents for a text or a vector, best first."""
        return json_response(await service.search(body, request.scope["state"]["record"]))

    @api.post_json("/similar", messages.SearchResponse, 404)
    async def similar(body: messages.SimilarRequest, request: Request) -> Response:
        """Return documents similar to one of the index."""
        return json_response(await service.similar(body, request.scope["state"]["record"]))

    @api.post_json("/encode", messages.EncodeResponse)
    async def encode(body: messages.EncodeRequest) -> Response:
        """Return unit embeddings of queries, as `/search` takes them for `vector`."""
        return json_response(await service.encode(body))

    @api.get("/documents/{doc_id:any}", response_model=dict[str, Any], responses=refusals(404, 422))
    async def document(doc_id: messages.DocId) -> Response:
        """Return a document in the form of a search result."""
        return json_response(await service.document(doc_id))


def _add_writes(api: Api, service: Service) -> None:
    @api.post_json("/documents", messages.Written, 409)
    async def upsert(body: messages.UpsertRequest) -> Response:
        """Write documents, each in place of the one with its id. They are durable when this is answered."""
        return json_response(await service.writes.upsert(body))

    @api.post_json("/documents/delete", messages.Deleted, 409)
    async def delete(body: messages.DeleteRequest) -> Response:
        """Delete documents. An id that is not in the index is not an error."""
        return json_response(await service.writes.delete(body.doc_ids))

    @api.delete("/documents/{doc_id:any}", responses=refusals(409, 422))
    async def delete_one(doc_id: messages.DocId) -> messages.Deleted:
        """Delete a document."""
        return await service.writes.delete([doc_id])


def _add_administration(api: Api, service: Service) -> None:
    open_versions = service.versions

    @api.get("/admin/index", responses=refusals(403))
    async def versions() -> messages.IndexVersions:
        """Return the versions of the index that are open."""
        return _open_versions(open_versions)

    @api.post_json("/admin/index/activate", messages.IndexVersions, 403, 409)
    async def activate(body: messages.ActivateRequest) -> Response:
        """Answer from another version, without a failed request. It is opened first, which may take long.

        The towers that its index was built for are opened with it, and encode its queries.
        """
        field = "version" if body.uri is None else "uri"
        try:
            if body.uri is not None:
                version = await asyncio.to_thread(Version.with_towers, body.uri, open_versions.active.towers)
            else:
                version = await asyncio.to_thread(
                    lambda: version_named(open_versions.catalog.read(), body.version or "")
                )
        except (ScalingNoteError, OSError, ValueError) as error:  # the last two: of a malformed URI
            raise invalid(str(error), field) from None
        try:
            await open_versions.activate(version)
        except ScalingNoteError as error:
            raise invalid(str(error), field) from None
        return json_response(_open_versions(open_versions))

    @api.post("/admin/index/compact", responses=refusals(403, 409))
    async def compact() -> messages.IndexVersions:
        """Write the next version of a live index now, and answer from it."""
        await service.writes.compact()
        return _open_versions(open_versions)

    @api.post("/admin/index/roll_back", responses=refusals(403, 409))
    async def roll_back() -> messages.IndexVersions:
        """Answer from the version that was active before this one."""
        try:
            await open_versions.activate(await asyncio.to_thread(open_versions.catalog.previous))
        except ScalingNoteError as error:
            raise conflict(str(error)) from None
        return _open_versions(open_versions)


def _add_openai(api: Api, embeddings: EmbeddingService) -> None:
    @api.post_json("/v1/embeddings", EmbeddingList, *EVERYWHERE, 404, 409, model=OpenAIRefusal)
    async def openai_embeddings(body: EmbeddingRequest) -> Response:
        """Return embeddings of texts or of token ids, in the form of OpenAI."""
        return await asyncio.to_thread(json_response, await embeddings.openai(body))

    @api.get("/v1/models", responses=refusals(*EVERYWHERE, model=OpenAIRefusal))
    async def models() -> ModelList:
        """Return the names that `/v1/embeddings` takes for `model`."""
        return embeddings.models()

    @api.get("/v1/models/{name:any}", responses=refusals(*EVERYWHERE, 404, 409, 422, model=OpenAIRefusal))
    async def model(name: messages.Name) -> Model:
        """Return one of the names that `/v1/embeddings` takes."""
        return embeddings.model(name)


def _add_tei(api: Api, embeddings: EmbeddingService) -> None:
    @api.post_json("/embed", list[list[float]], 409)
    async def embed(body: TeiEmbedRequest) -> Response:
        """Return embeddings of texts, in the form of TEI. Headers have the counts of read and lost tokens."""
        rows, headers = await embeddings.embed(body)
        return await asyncio.to_thread(json_response, rows, headers=headers)

    @api.post_json("/embed_sparse", list[list[SparseValue]], 409)
    async def embed_sparse(body: TeiSparseRequest) -> Response:
        """Return terms of queries and their weights."""
        return json_response(await embeddings.embed_sparse(body))

    @api.post_json("/rerank", list[Rank], 409)
    async def rerank(body: TeiRerankRequest) -> Response:
        """Return the cross-encoder's scores of texts for a query, best first."""
        return json_response(await embeddings.rerank(body))

    @api.post_json("/similarity", list[float], 409)
    async def similarity(body: TeiSimilarityRequest) -> Response:
        """Return the similarities of one text to others: cosines, or inner products of a dot model."""
        return json_response(await embeddings.similarity(body))

    @api.post_json("/tokenize", list[list[Token]], 409)
    async def tokenize(body: TeiTokenizeRequest) -> Response:
        """Return the tokens of texts."""
        return json_response(await embeddings.tokenize(body))


def _add_monitoring(api: Api, service: Service | EmbeddingService, scrape: Callable[[], str]) -> None:
    @api.get("/info", response_model=messages.Info if isinstance(service, Service) else messages.TowerInfo)
    async def info() -> Response:
        """Return arms, fields and limits of the service."""
        return json_response(service.info())

    @api.get("/health", response_model=messages.Health, responses={503: {"model": messages.Health}})
    @api.get("/healthz", response_model=messages.Health, responses={503: {"model": messages.Health}})
    async def health() -> Response:
        """Return whether encoders and searchers answer; 503 if no query can be answered."""
        state = await service.health()
        return json_response(state, 503 if state.status == "down" else 200)

    @api.get("/metrics", response_class=PlainTextResponse)
    async def measured() -> PlainTextResponse:
        """Return the metrics of all replicas on all nodes, in Prometheus' format."""
        text = await asyncio.to_thread(scrape)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _add_page(api: Api) -> None:
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
                query_tower=None if each.towers is None else each.towers.query[0],
            )
            for each in versions.served
        ],
    )
