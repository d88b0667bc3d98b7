"""The gateway: a query comes in over HTTP, is encoded and sent to every shard; merged results go out.

Nothing here waits longer than the deadline: a shard that is slow or gone is left out of the answer, and the
answer says so. Only when the encoder or all shards are silent does a client get 503.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from jaxtyping import Float
from numpy import ndarray
from ray import serve
from ray.serve.handle import DeploymentHandle

from scalingnote import __version__
from scalingnote.search.config import ServeConfig
from scalingnote.search.searcher import Candidate, merge_candidates
from serve.clock import Clock
from serve.fan_out import in_time
from serve.messages import Health, Hit, SearchRequest, SearchResponse, Timings

PAGE = Path(__file__).parent / "page" / "index.html"


async def _refuse(_: Request, error: RequestValidationError) -> JSONResponse:
    """422 that says where and why. The input is not repeated: NaN, say, has no place in JSON."""
    detail = [{"loc": item["loc"], "msg": item["msg"]} for item in error.errors()]
    return JSONResponse({"detail": detail}, 422)


@serve.deployment(max_ongoing_requests=256)
@serve.ingress()
class Gateway:
    """Ingress of the application; holds handles only, so replicas are cheap."""

    def __init__(
        self, encoder: DeploymentHandle, shards: Sequence[DeploymentHandle], config: ServeConfig
    ) -> None:
        self._encoder, self._shards, self._config = encoder, list(shards), config
        self._page = PAGE.read_text(encoding="utf-8")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the HTTP side of this replica."""
        api = FastAPI(title="ScalingNote search", version=__version__)
        api.post("/search")(self.search)
        api.get("/healthz")(self.health)
        api.get("/", response_class=HTMLResponse)(self.page)
        api.exception_handler(RequestValidationError)(_refuse)
        return api

    async def search(self, request: SearchRequest) -> SearchResponse:
        """The best documents for a query, best first."""
        query = self._checked(request)
        clock = Clock()
        embedding = await self._encode(query)
        encode = clock.lap()
        results, answered = await self._candidates(embedding, request.k)
        search = clock.lap()
        hits, lost = await self._documents(results)
        documents = clock.lap()
        return SearchResponse(
            results=hits,
            timings_ms=Timings(encode=encode, search=search, documents=documents, total=clock.total()),
            shards=len(self._shards),
            shards_answered=answered - lost,
        )

    async def health(self) -> Health:
        """Whether encoder and shards answer; 503 when no query could be answered."""
        pings = [handle.ping.remote() for handle in (self._encoder, *self._shards)]
        encoder, *shards = await in_time(pings, deadline_s=self._config.deadline_s)
        answered = sum(map(bool, shards))
        health = Health(
            status="ok" if encoder and answered == len(shards) else "degraded",
            encoder_answers=bool(encoder),
            shards=len(shards),
            shards_answered=answered,
        )
        if not encoder or not answered:
            raise HTTPException(503, health.model_copy(update={"status": "down"}).model_dump())
        return health

    async def page(self) -> HTMLResponse:
        """The search page."""
        return HTMLResponse(self._page)

    def _checked(self, request: SearchRequest) -> str:
        query, config = request.query.strip(), self._config
        if not query:
            raise HTTPException(422, "query is empty: send some text")
        try:
            query.encode()
        except (
            UnicodeEncodeError
        ):  # half of a surrogate pair, which JSON can spell and tokenizers cannot read
            raise HTTPException(422, "query is not valid Unicode") from None
        if len(query) > config.max_query_chars:
            raise HTTPException(
                422, f"query has {len(query)} characters, this server takes up to {config.max_query_chars}"
            )
        if request.k > config.max_k:
            raise HTTPException(422, f"k is {request.k}, this server gives up to {config.max_k} results")
        return query

    async def _encode(self, query: str) -> Float[ndarray, " dim"]:
        (embedding,) = await in_time([self._encoder.encode.remote(query)], deadline_s=self._config.deadline_s)
        if embedding is None:
            raise HTTPException(503, "the query encoder does not answer: try again")
        return embedding

    async def _candidates(self, embedding: Float[ndarray, " dim"], k: int) -> tuple[list[Candidate], int]:
        """The k best of all shards that answer, and how many did."""
        calls = [shard.candidates.remote(embedding, k) for shard in self._shards]
        answers = [a for a in await in_time(calls, deadline_s=self._config.deadline_s) if a is not None]
        if not answers:
            raise HTTPException(503, "no shard of the index answers: try again")
        return merge_candidates(answers, k=k)[0], len(answers)

    async def _documents(self, results: Sequence[Candidate]) -> tuple[list[Hit], int]:
        """The results with their documents, in order; and how many shards fell silent since they searched."""
        by_shard: dict[int, list[Candidate]] = defaultdict(list)
        for result in results:
            by_shard[result.shard].append(result)
        calls = [
            self._shards[shard].documents.remote([result.row for result in wanted])
            for shard, wanted in by_shard.items()
        ]
        answers = await in_time(calls, deadline_s=self._config.deadline_s)
        found: dict[tuple[int, int], dict[str, str]] = {}
        for (shard, wanted), documents in zip(by_shard.items(), answers, strict=True):
            if documents is not None:
                found |= {(shard, r.row): document for r, document in zip(wanted, documents, strict=True)}
        hits = [Hit(score=r.score, **found[r.shard, r.row]) for r in results if (r.shard, r.row) in found]
        return hits, sum(documents is None for documents in answers)
