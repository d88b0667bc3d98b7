"""What the gateway does, without HTTP: requests and a deadline in, answers out.

Every request is answered by one arm (a query tower, an index version, personal or not) and from one version
of the index, chosen when it comes in.
"""

import asyncio
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from scalingnote import __version__
from scalingnote.errors import SearchError
from scalingnote.experiment.assignment import arm_of, unit_of
from scalingnote.index import filters
from scalingnote.search.config import Joining
from scalingnote.search.found import Hit
from scalingnote.serve import flow, messages, traces
from scalingnote.serve.clock import Clock
from scalingnote.serve.fan_out import in_time
from scalingnote.serve.flow import Answer, Called, Question
from scalingnote.serve.here import Here
from scalingnote.serve.log import get_logger
from scalingnote.serve.messages import SearchRequest, SimilarRequest
from scalingnote.serve.observer import Note
from scalingnote.serve.refusals import conflict, invalid, unavailable
from scalingnote.serve.versions import Versions
from scalingnote.serve_config import ServeConfig

FACETS = 50  # values of a field that /info tells
SECRET = "SCALINGNOTE_SECRET"  # environment variable: what user ids are hashed with, for logs
CANARY_S = 30.0  # for the slow search of a canary
log = get_logger()


@dataclass(frozen=True)
class Arm:
    """A way to answer queries."""

    name: str
    encoder: Called
    tower: str
    personalised: bool
    version: str | None = None  # None: the active one


@dataclass(frozen=True)
class Writing:
    """Who takes documents."""

    encoder: Called
    writer: Called
    deadline_s: float


class Service:
    """Holds handles of the parts."""

    def __init__(
        self,
        arms: Sequence[Arm],
        searchers: Sequence[Called],  # one for each group of shards
        versions: Versions,
        config: ServeConfig,
        *,
        reranker: Called | None = None,
        writing: Writing | None = None,
        recall: Callable[[float], None] | None = None,
    ) -> None:
        """`recall` is told what the canary finds: which share of the exact best a search has found."""
        self._writing, self._recall = writing, recall
        self._canaries: set[asyncio.Task[None]] = set()
        self._arms, self._searchers = {arm.name: arm for arm in arms}, list(searchers)
        self._first = arms[0].name
        self.versions, self._config, self._reranker = versions, config, reranker
        self._secret = os.environ.get(SECRET, "")

    # --- searching ------------------------------------------------------------------------------------

    def note(self, request: SearchRequest, request_id: str) -> Note:
        """Who asks what, and which arm answers: that which is named, else that of the traffic split."""
        unit = unit_of(request.user_id, request_id, secret=self._secret)
        name = request.arm or arm_of(unit, self._config.split).name
        where = messages.plain(request.filter)
        # Who names an arm is in no group, not even where the split would have given the same arm.
        logged = None if request.arm else unit
        return Note(request.query, request.k, where, logged, self._arm(name).name)

    async def search(self, request: SearchRequest, request_id: str, note: Note) -> dict[str, Any]:
        """The answer of ``POST /search``, a :class:`~scalingnote.serve.messages.SearchResponse`."""
        arm = self._arm(note.arm)
        clock = self._clock(request.deadline_ms)
        question = self._question(request, arm)
        most = self._reranked(request)
        if request.vector is not None:
            embedding, terms, personalised = _direction(request.vector, question.layout.dim), None, False
        else:
            user = request.user_id if arm.personalised else None
            query = self._text(request.query or "")
            asked = await flow.encode(arm.encoder, query, user, clock)
            embedding, personalised = asked.embeddings, bool(asked.personalised[0])
            terms = asked.terms if self.versions.known(question.version).layout.sparse else None
        encode = clock.lap()
        answer = await flow.search(self._searchers, embedding, terms, question, clock)
        answer.personalised, searched = personalised, clock.lap()
        if self._recall is not None and terms is None and random.random() < self._config.canary:
            self._search_again(embedding, question, answer)
        if most and self._reranker is not None and request.query is not None:
            await flow.rerank(self._reranker, request.query, answer, most=most, clock=clock)
            answer.hits = answer.hits[: request.k]
        answer.timings_ms = {"encode": encode, "search": searched, "rerank": clock.lap() if most else 0.0}
        note.answer = self._response(answer, arm, request_id, clock, explain=request.explain)
        traces.searched(note.answer)
        return dict(note.answer)

    def _search_again(self, embedding: Any, question: Question, answer: Answer) -> None:
        """The canary: the same search, compared with every document, beside the answer that goes out."""
        found = {hit.document["doc_id"] for hit in answer.hits}

        async def again() -> None:
            clock = Clock(CANARY_S)
            exact = await flow.search(self._searchers, embedding, None, replace(question, exact=True), clock)
            best = [hit.document["doc_id"] for hit in exact.hits]
            if self._recall is not None and exact.version == answer.version and best:
                self._recall(sum(doc_id in found for doc_id in best) / len(best))

        if not self._canaries:  # one at a time: it is slow, and not what the machine is for
            task = asyncio.create_task(again())
            self._canaries.add(task)
            task.add_done_callback(self._end_canary)

    def _end_canary(self, task: asyncio.Task[None]) -> None:
        self._canaries.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("a canary search failed: %s", task.exception())

    async def similar(self, request: SimilarRequest, request_id: str) -> dict[str, Any]:
        """Documents like one of the index, which is left out."""
        arm = self._arm(request.arm)
        clock = self._clock(request.deadline_ms)
        plain = SearchRequest(vector=[0.0], k=request.k, filter=request.filter)
        question = self._question(plain, arm, one_more=True)
        embedding = await flow.vector(self._searchers, question.version, request.doc_id, clock)
        encode = clock.lap()
        answer = await flow.search(self._searchers, embedding, None, question, clock)
        others = [hit for hit in answer.hits if hit.document["doc_id"] != request.doc_id]
        answer.hits = others[: request.k]
        answer.timings_ms = {"encode": encode, "search": clock.lap(), "rerank": 0.0}
        return self._response(answer, arm, request_id, clock, explain=False)

    async def encode(self, request: messages.EncodeRequest) -> dict[str, Any]:
        """Unit embeddings of queries."""
        arm, clock = self._arm(request.arm), self._clock(None)
        if len(request.queries) > self._config.limits.max_batch:
            raise invalid(
                f"{len(request.queries)} queries: send up to {self._config.limits.max_batch}", "queries"
            )
        queries = [self._text(query) for query in request.queries]
        user = request.user_id if arm.personalised else None
        (asked,) = await in_time([arm.encoder.encode_many.remote(queries, user)], deadline_s=clock.left())
        if asked is None:
            raise unavailable("the query encoder does not answer: try again")
        return {"embeddings": asked.embeddings.tolist(), "dim": asked.embeddings.shape[1], "arm": arm.name}

    async def document(self, doc_id: str) -> dict[str, Any]:
        """A document as the index shows it."""
        return await flow.document(self._searchers, self.versions.active.name, doc_id, self._clock(None))

    # --- writing --------------------------------------------------------------------------------------

    async def upsert(self, request: messages.UpsertRequest) -> messages.Written:
        """Write documents, each in place of the one with its id; durable when it returns."""
        writing, clock = self._writable(len(request.documents), "documents")
        documents, set_aside = _documents(request.documents)
        encoded = [writing.encoder.encode.remote(documents)]
        (rows,) = await in_time(encoded, deadline_s=clock.left())
        if rows is None:
            raise unavailable("the documents were not encoded, nothing was written: try again")
        (answer,) = await in_time([writing.writer.upsert.remote(rows)], deadline_s=clock.left())
        written, rejected = await self._acknowledged(answer)
        set_aside += [messages.Rejected(doc_id=row["row"], reason=row["reason"]) for row in rejected]
        return messages.Written(written=written, rejected=set_aside)

    async def delete(self, doc_ids: Sequence[str]) -> messages.Deleted:
        """Delete documents; those that are not there are no error. Durable when it returns."""
        writing, clock = self._writable(len(doc_ids), "doc_ids")
        (answer,) = await in_time([writing.writer.delete.remote(doc_ids)], deadline_s=clock.left())
        return messages.Deleted(deleted=await self._acknowledged(answer))

    async def compact(self) -> None:
        """Write the next version of a live index now, and go over to it."""
        writing, _ = self._writable(0, "")

        async def go_on() -> None:
            await writing.writer.compact.remote()
            await self.versions.follow()

        await asyncio.shield(asyncio.create_task(go_on()))

    def _writable(self, rows: int, field: str) -> tuple[Writing, Clock]:
        if self._writing is None:
            raise conflict("this index is read only: set serve.live to a folder for its writes")
        if rows > (most := self._config.limits.max_batch):
            raise invalid(f"{rows} at once: send up to {most}", field)
        return self._writing, Clock(self._writing.deadline_s)

    async def _acknowledged(self, answer: Any) -> Any:
        """What the writer says; what it has written is seen by the searchers of this process from here on."""
        if answer is None:
            raise unavailable("not acknowledged: the write may be there or not, send it again")
        for searcher in self._searchers:
            if isinstance(searcher, Here):
                await searcher.refresh.remote()
        return answer

    # --- what there is --------------------------------------------------------------------------------

    def info(self) -> messages.Info:
        """What can be asked here."""
        active, config = self.versions.active, self._config
        known = self.versions.known(active.name)
        return messages.Info(
            name="ScalingNote",
            version=__version__,
            documents=active.documents,
            dim=active.dim,
            index_version=active.name,
            shards=known.layout.shards,
            arms=[
                messages.ArmInfo(name=arm.name, tower=arm.tower, personalised=arm.personalised)
                for arm in self._arms.values()
            ],
            fields={field.name: _kind(field.type) for field in known.fields},
            facets={
                name: [messages.Facet(value=value, count=count) for value, count in _frequent(values)]
                for name, values in known.facets.items()
            },
            sparse=known.layout.sparse,
            rerank=self._reranker is not None,
            live=config.live is not None,
            max_k=config.limits.max_k,
            max_query_chars=config.limits.max_query_chars,
        )

    async def health(self) -> messages.Health:
        """Whether encoders and searchers answer."""
        active = self.versions.active.name
        shards = self.versions.known(active).layout.shards
        encoders = [arm.encoder.ping.remote() for arm in self._arms.values()]
        pings = [*encoders, *(searcher.ping.remote(active) for searcher in self._searchers)]
        answers = await in_time(pings, deadline_s=self._config.deadline_s)
        answering = dict(zip(self._arms, answers[: len(encoders)], strict=True))
        traffic = any(answering[arm.name] for arm in self._config.split.arms if arm.share > 0)
        answered = sum(held or 0 for held in answers[len(encoders) :])
        status = "ok" if all(answering.values()) and answered == shards else "degraded"
        return messages.Health(
            status=status if traffic and answered else "down",
            encoder_answers=all(answering.values()),
            shards=shards,
            shards_answered=answered,
        )

    # --- from requests to what is asked ---------------------------------------------------------------

    def _arm(self, name: str | None) -> Arm:
        if name is None:
            return self._arms[self._first]
        if name not in self._arms:
            raise invalid(f"no arm {name!r}, there are {', '.join(self._arms)}", "arm")
        return self._arms[name]

    def _clock(self, deadline_ms: int | None) -> Clock:
        """A client may be in more of a hurry than the server, not in less."""
        own = self._config.deadline_s
        return Clock(own if deadline_ms is None else min(own, deadline_ms / 1000))

    def _question(self, request: SearchRequest, arm: Arm, *, one_more: bool = False) -> Question:
        limits, version = self._config.limits, arm.version or self.versions.active.name
        known = self.versions.known(version)
        if request.k > limits.max_k:
            raise invalid(f"k is {request.k}, this server gives up to {limits.max_k} results", "k")
        where = messages.plain(request.filter)
        try:
            filters.check(where or {}, known.fields)
        except SearchError as error:
            raise invalid(str(error), "filter") from None
        if request.dense_weight is not None and not known.layout.sparse:
            raise invalid(
                "dense_weight is given, but the documents of this index have no terms", "dense_weight"
            )
        return Question(
            version=version,
            layout=known.layout,
            k=max(request.k + one_more, request.rerank or 0),
            where=where,
            nprobe=request.nprobe,
            joining=Joining(dense_weight=request.dense_weight),
        )

    def _reranked(self, request: SearchRequest) -> int:
        """How many results a request wants re-ranked."""
        if request.rerank is None:
            return 0
        if self._reranker is None or self._config.rerank is None:
            raise invalid("this server does not re-rank: set serve.rerank", "rerank")
        if request.query is None:
            raise invalid("only results of a text can be re-ranked: send query", "rerank")
        if request.rerank > self._config.rerank.most:
            raise invalid(f"rerank is {request.rerank}, up to {self._config.rerank.most} are done", "rerank")
        return request.rerank

    def _text(self, text: str) -> str:
        query, most = text.strip(), self._config.limits.max_query_chars
        if not query:
            raise invalid("query is empty: send some text", "query")
        try:
            query.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: JSON can spell it, tokenizers cannot read it
            raise invalid("query is not valid Unicode", "query") from None
        if len(query) > most:
            raise invalid(f"query has {len(query)} characters, this server takes up to {most}", "query")
        return query

    def _response(
        self, answer: Answer, arm: Arm, request_id: str, clock: Clock, *, explain: bool
    ) -> dict[str, Any]:
        return {
            "request_id": request_id,
            "results": [_hit(answer, rank, hit, explain=explain) for rank, hit in enumerate(answer.hits)],
            "arm": arm.name,
            "index_version": answer.version,
            "personalised": answer.personalised,
            "shards": answer.shards,
            "shards_answered": answer.shards_answered,
            "timings_ms": {**answer.timings_ms, "total": clock.total()},
        }


def _direction(values: Sequence[float], dim: int) -> Any:
    """A client's vector as a unit embedding."""
    if len(values) != dim:
        raise invalid(f"vector has {len(values)} numbers, the index has embeddings of dim {dim}", "vector")
    row = np.asarray([values], np.float64)
    largest = np.abs(row).max()
    if not largest:
        raise invalid("vector is all zero: it has no direction", "vector")
    scaled = row / largest  # the square of a finite number need not be one
    return (scaled / np.linalg.norm(scaled)).astype(np.float32)


def _hit(answer: Answer, rank: int, hit: Hit, *, explain: bool) -> dict[str, Any]:
    found = {**hit.document, "score": hit.score}
    if explain:
        scored = answer.rerank is not None and rank < len(answer.rerank)
        found["explain"] = {
            "dense": hit.dense,
            "sparse": hit.sparse,
            "rerank": answer.rerank[rank] if scored and answer.rerank is not None else None,
            "shard": hit.shard,
        }
    return found


def _frequent(values: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(values.items(), key=lambda item: (-item[1], item[0]))[:FACETS]


def _documents(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[messages.Rejected]]:
    """Those that are documents, and why the others are not."""
    documents, set_aside = [], []
    for number, row in enumerate(rows):
        try:
            documents.append(messages.Document.model_validate(row).model_dump())
        except ValidationError as error:
            (first, *_) = error.errors()
            where = ".".join(map(str, first["loc"]))
            given = row.get("doc_id")
            named = isinstance(given, str) and 0 < len(given) <= 512 and given.isprintable()
            doc_id = given if named else f"document {number}"
            set_aside.append(messages.Rejected(doc_id=doc_id, reason=f"{where}: {first['msg']}"))
    return documents, set_aside


def _kind(of: pa.DataType) -> Any:
    if pa.types.is_boolean(of):
        return "boolean"
    return "number" if pa.types.is_integer(of) or pa.types.is_floating(of) else "text"
