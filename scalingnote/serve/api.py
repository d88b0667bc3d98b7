"""The HTTP side of the gateway: paths, bodies and errors; requests are answered by the service.

Responses of the service are written as they are: :mod:`scalingnote.serve.messages` describes them to OpenAPI,
and validating every response against it would take as long as a search.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles

from scalingnote.errors import ScalingNoteError
from scalingnote.serve import embedding_messages as forms
from scalingnote.serve import messages
from scalingnote.serve.access import Admission, RequestCallback, conflict, invalid
from scalingnote.serve.concurrency import run_periodically
from scalingnote.serve.embeddings import Embeddings
from scalingnote.serve.http import Api, guard, json_response, post
from scalingnote.serve.messages import Refusal, SearchResponse
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.versions import Version, Versions, named
from scalingnote.serve_config import ServeConfig
from scalingnote.version import __version__

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
    service: Service | Embeddings,
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
        service: answers the requests; without an index there are the paths of embeddings alone.
        config: limits and CORS.
        admission: shared with the gRPC side; None: one of `config`, without API keys.
        scrape: the text of ``/metrics``.
        on_done: called for each request after its answer.
        on_poll: called every half second.
        in_serve: Ray Serve adds the request id to answers.
    """
    api = Api(
        title="ScalingNote search" if isinstance(service, Service) else "ScalingNote embeddings",
        version=__version__,
        lifespan=partial(_lifespan, service, on_poll),
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        responses={"4XX": {"model": Refusal}, "5XX": {"model": Refusal}},
    )
    if isinstance(service, Service):
        _add_search(api, service)
        _add_writes(api, service)
        _add_administration(api, service)
        _add_page(api)
    embeddings = service if isinstance(service, Embeddings) else service.embeddings
    _add_openai(api, embeddings)
    _add_tei(api, embeddings)
    _add_monitoring(api, service, scrape)
    guard(api, config, admission=admission, on_done=on_done, in_serve=in_serve)
    return api


@asynccontextmanager
async def _lifespan(
    service: Service | Embeddings, on_poll: Callable[[], None] | None, _: FastAPI
) -> AsyncIterator[None]:
    """Open what is served at the start, and follow the active version until the end."""

    async def poll() -> None:
        if on_poll is not None:
            on_poll()
        if isinstance(service, Service):
            await service.versions.follow()

    await (service.versions.start() if isinstance(service, Service) else service.start())
    polling = asyncio.create_task(
        run_periodically(poll, interval_s=POLL_INTERVAL_S, name="following the active index version")
    )
    yield
    polling.cancel()


# --- routes -----------------------------------------------------------------------------------------------


def _add_search(api: FastAPI, service: Service) -> None:
    @post(api, "/search", response=SearchResponse)
    async def search(body: messages.SearchRequest, request: Request) -> Response:
        """The best documents for a text or a vector, best first."""
        return json_response(await service.search(body, request.scope["state"]))

    @post(api, "/similar", response=SearchResponse)
    async def similar(body: messages.SimilarRequest, request: Request) -> Response:
        """Documents similar to one of the index."""
        return json_response(await service.similar(body, request.scope["state"]))

    @post(api, "/encode", response=messages.EncodeResponse)
    async def encode(body: messages.EncodeRequest) -> Response:
        """Unit embeddings of queries, as `/search` takes them for `vector`."""
        return json_response(await service.encode(body))

    @api.get("/documents/{doc_id:path}", response_model=dict[str, Any])
    async def document(doc_id: messages.DocId) -> Response:
        """A document in the form of a search result."""
        return json_response(await service.document(doc_id))


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


def _add_openai(api: FastAPI, embeddings: Embeddings) -> None:
    refused: dict[int | str, dict[str, Any]] = {
        status: {"model": forms.OpenAIRefusal} for status in ("4XX", "5XX")
    }

    @post(api, "/v1/embeddings", response=forms.EmbeddingList, responses=refused)
    async def openai_embeddings(body: forms.EmbeddingRequest) -> Response:
        """Embeddings of texts or of token ids, in the form of OpenAI."""
        answer = await embeddings.openai(body)
        return await asyncio.to_thread(json_response, answer)

    @api.get("/v1/models", responses=refused)
    async def models() -> forms.ModelList:
        """The names that `/v1/embeddings` takes for `model`."""
        return embeddings.models()

    @api.get("/v1/models/{name}", responses=refused)
    async def model(name: messages.Name) -> forms.Model:
        """One of the names that `/v1/embeddings` takes."""
        return embeddings.model(name)


def _add_tei(api: FastAPI, embeddings: Embeddings) -> None:
    @post(api, "/embed", response=list[list[float]])
    async def embed(body: forms.TeiEmbedRequest) -> Response:
        """Embeddings of texts, in the form of TEI."""
        answer = await embeddings.embed(body)
        return await asyncio.to_thread(json_response, answer)

    @post(api, "/embed_sparse", response=list[list[forms.SparseValue]])
    async def embed_sparse(body: forms.TeiRequest) -> Response:
        """Terms of queries and their weights."""
        return json_response(await embeddings.embed_sparse(body))

    @post(api, "/rerank", response=list[forms.Rank])
    async def rerank(body: forms.TeiRerankRequest) -> Response:
        """Scores of texts for a query by the cross-encoder, best first."""
        return json_response(await embeddings.rerank(body))

    @post(api, "/similarity", response=list[float])
    async def similarity(body: forms.TeiSimilarityRequest) -> Response:
        """Cosines of one text and others."""
        return json_response(await embeddings.similarity(body))

    @post(api, "/tokenize", response=list[list[forms.Token]])
    async def tokenize(body: forms.TeiTokenizeRequest) -> Response:
        """The tokens of texts."""
        return json_response(await embeddings.tokenize(body))


def _add_monitoring(api: FastAPI, service: Service | Embeddings, scrape: Callable[[], str]) -> None:
    @api.get("/info", response_model=messages.Info if isinstance(service, Service) else messages.TowerInfo)
    async def info() -> Response:
        """Arms, fields and limits of the service."""
        return json_response(service.info().model_dump())

    @api.get("/health", response_model=messages.Health, responses={503: {"model": messages.Health}})
    @api.get("/healthz", response_model=messages.Health, responses={503: {"model": messages.Health}})
    async def health() -> Response:
        """Whether encoders and searchers answer; 503 when no query could be answered."""
        state = await service.health()
        return json_response(state.model_dump(), 503 if state.status == "down" else 200)

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
