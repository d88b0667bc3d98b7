"""The gateway's service, for HTTP and gRPC alike: it answers a checked request within a deadline.

    query ─► encoder of the arm ─► every group of shards, one version ─► merged ─► cross-encoder, if asked
                  └── teacher ◄── where the best scores are close together ◄─┘

Every request is answered by one arm (a query tower, an index version, personal or not) and from one version
of the index, chosen when it arrives. No request waits longer than its deadline: a slow or dead group of
shards is left out of the answer, and the answer says so. A request fails only if the encoder or all searchers
do not answer.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import SearchError
from scalingnote.evaluate.experiment.config import arm_of, unit_of
from scalingnote.index import filters
from scalingnote.index.hybrid import Joining
from scalingnote.index.shard import IndexLayout
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.live_searcher import Delta
from scalingnote.search.query_path import COMPARED, Query
from scalingnote.search.searcher import (
    DEFAULT_JOINING,
    Candidates,
    Results,
    as_document,
    best_per_document,
    first_depth,
    next_depth,
    rank,
)
from scalingnote.serve import messages
from scalingnote.serve.access import RefusedError, invalid, not_found, unavailable
from scalingnote.serve.concurrency import RequestTimer, at, gather_in_time
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.embeddings import EmbeddingService
from scalingnote.serve.escalation import Teacher
from scalingnote.serve.fan_out import FanOut, Find
from scalingnote.serve.messages import SearchRequest, SimilarRequest
from scalingnote.serve.telemetry import RequestRecord, get_logger, secret
from scalingnote.serve.towers import Refused
from scalingnote.serve.versions import Versions
from scalingnote.serve.writes import DocumentWrites
from scalingnote.storage.schema import passage_id

CANARY_DEADLINE_S = 30.0  # an exact search is slow
MAX_FACET_VALUES = 50  # of a field in /info
T = TypeVar("T")
log = get_logger()


class Service:
    """Answers requests by the handles of the deployments.

    Args:
        deployed: handles; each group of shards has a searcher.
        config: limits, deadline and traffic split.
        on_recall: called with the recall of each canary, the share of the exact best that was found.
    """

    def __init__(
        self, deployed: Deployed, config: ServeConfig, *, on_recall: Callable[[float], None] | None = None
    ) -> None:
        assert deployed.catalog is not None
        self._deployed, self._config, self._on_recall = deployed, config, on_recall
        self._arms = {arm.name: arm for arm in deployed.arms}
        self.versions = Versions(deployed.catalog, deployed.searchers, deployed.towers())
        self._find: Find = FanOut.of(deployed.searchers, deployed.aggregators, config).search
        if self.versions.deltas is not None:
            self._find = partial(self.versions.deltas.search, groups=self._find)
        self._teacher: Teacher | None = None
        if deployed.teacher and config.escalation:
            self._teacher = Teacher(deployed.teacher, config.escalation, in_flight=config.limits.in_flight)
        self.embeddings = EmbeddingService(deployed, config, self.versions)
        self.writes = DocumentWrites(deployed, self.versions)
        self._canary: asyncio.Task[None] | None = None  # the latest
        self._secret, self._refused_settings = secret(), ""

    def take_settings(self, config: ServeConfig, *, refused: str) -> None:
        """Answer by other limits, deadline and canaries; `refused` says why the latest were not taken."""
        self._config, self._refused_settings = config, refused
        self.embeddings.take_settings(config, refused=refused)
        if self._teacher is not None:
            self._teacher.limit(config.limits.in_flight)

    # --- searching ------------------------------------------------------------------------------------

    async def search(self, request: SearchRequest, record: RequestRecord) -> dict[str, Any]:
        """Answer ``POST /search`` by a :class:`~scalingnote.serve.messages.SearchResponse`.

        Args:
            request: a text or a vector, and how to search.
            record: gets the request, its arm and its answer.

        Raises:
            RefusedError: 422 for a request beyond the limits, 503 when no encoder or no searcher answers.
        """
        timer = self._timer(request.deadline_ms)
        arm = self._arm(request.arm or self._draw_arm(request, record))
        record.search, record.arm = request, arm.name
        version, layout, where = self._index(request, arm)
        joining = messages.joining(request.dense_weight, sparse=layout.sparse)
        depth = messages.rerank_depth(request, served=self._deployed.reranker is not None)
        text = "" if request.query is None else messages.query_text(request.query, self._config.limits)
        encoded = await self._encode(request, text, arm, version, timer)
        # The teacher encodes texts, of no user, for the documents that it encoded.
        taught = arm.version is None and self.versions.has_teacher(version)
        teacher = self._teacher if text and not encoded.personalised and taught else None
        wanted = max(request.k, depth, COMPARED if teacher else 0)
        student = Query(
            encoded.embedding,
            encoded.terms if layout.sparse else None,
            encoded.personalised,
            k=first_depth(wanted, layout),
            nprobe=request.nprobe,
            where=where,
            version=version,
        )
        timer.end("encode")
        candidates = await self._candidates(student, timer)
        timer.end("search")
        query, late = student, ""
        if teacher is not None:
            query, candidates, late = await teacher.search(text, student, candidates, self._find, timer)
            timer.end("escalate")
        self._start_canary(query, candidates, layout)
        results, readable = await self._documents(query, candidates, wanted, joining, layout, timer)
        timer.end("search")
        reranked: list[float] = []
        if depth and readable:
            results, reranked = await self._rerank(request, results, timer)
            timer.end("rerank")
        lacks = {
            late: bool(late),
            "documents_unreadable": not readable,
            "not_reranked": depth and len(results) and not reranked,
        }
        hits = _hits(results, request.k, explain=request.explain, reranked=reranked)
        record.answer = answer = _answer(record, arm, layout, results, hits, timer) | {
            "personalised": query.personalised,
            "escalated": query is not student,
            "degraded": [reason for reason, applies in lacks.items() if applies],
        }
        return answer

    def _index(
        self, request: SearchRequest | SimilarRequest, arm: ServedArm
    ) -> tuple[str, IndexLayout, filters.Filter | None]:
        """The index version that answers a request, its layout, and the filter of the request.

        422 for more results than the server gives, and for a filter that does not fit the index's fields.
        """
        if request.k > (most := self._config.limits.max_k):
            raise invalid(f"k is {request.k}, this server gives up to {most} results", "k")
        version, where = arm.version or self.versions.active.name, messages.index_filter(request.filter)
        content = self.versions.content(version)
        if where:
            try:
                filters.check(where, content.fields)
            except SearchError as error:
                raise invalid(str(error), "filter") from None
        return version, content.layout, where

    async def _encode(
        self, request: SearchRequest, text: str, arm: ServedArm, version: str, timer: RequestTimer
    ) -> Query:
        """The query of a request, encoded for an index version; `text` is empty if it has a vector."""
        if request.vector is not None:
            return Query(messages.unit_vector(request.vector, self.versions.content(version).layout.dim))
        user_id = request.user_id if arm.personalised else None
        return await _in_time(at(arm.encoder, version).encode.remote(text, user_id), timer)

    async def similar(self, request: SimilarRequest, record: RequestRecord) -> dict[str, Any]:
        """Answer ``POST /similar``: the documents nearest to one of the index, without that one.

        Of a document of passages, the first one is compared.
        """
        arm, timer = self._arm(request.arm), self._timer(request.deadline_ms)
        version, layout, where = self._index(request, arm)
        vector, wanted = await self._vector(version, layout, request.doc_id, timer), request.k + 1
        timer.end("encode")
        query = Query(vector, k=first_depth(wanted, layout), where=where, version=version)
        candidates = await self._candidates(query, timer)
        results, readable = await self._documents(query, candidates, wanted, DEFAULT_JOINING, layout, timer)
        others = [hit for hit in _hits(results, wanted) if hit["doc_id"] != request.doc_id]
        timer.end("search")
        answer = _answer(record, arm, layout, results, others[: request.k], timer)
        return answer if readable else answer | {"degraded": ["documents_unreadable"]}

    async def encode(self, request: messages.EncodeRequest) -> dict[str, Any]:
        """Answer ``POST /encode``: unit embeddings of queries."""
        arm, timer = self._arm(request.arm), self._timer(None)
        messages.check_batch(request.queries, "queries")
        queries = [messages.query_text(query, self._config.limits) for query in request.queries]
        user_id = request.user_id if arm.personalised else None
        encoder = at(arm.encoder, arm.version or self.versions.active.name)
        encoded = await _in_time(encoder.encode_many.remote(queries, user_id), timer)
        embeddings = [query.embedding[0].tolist() for query in encoded]
        return {"embeddings": embeddings, "dim": len(embeddings[0]), "arm": arm.name}

    async def _candidates(self, query: Query, timer: RequestTimer) -> Candidates:
        """The candidates of the groups that are in time.

        503 when no group is in time, 422 when one refuses the query.
        """
        found = await self._find(query, timer.left_s())
        if isinstance(found, Refused):
            raise _refusal(found)
        if not found.searched:
            engine = self._config.search.backend
            if engine == "own":
                raise unavailable("no shard of the index answers: try again")
            raise unavailable(f"{engine} does not answer in time: try again")
        return found

    async def _documents(
        self,
        query: Query,
        candidates: Candidates,
        k: int,
        joining: Joining,
        layout: IndexLayout,
        timer: RequestTimer,
    ) -> tuple[Results, bool]:
        """The k best documents of a query with what is stored of them, and whether that could be read.

        Of passages, more are searched until they are of k documents, see :mod:`scalingnote.search.searcher`.
        """
        while True:
            best = rank(candidates, k=query.k, joining=joining, layout=layout)
            results, readable = await self.versions.documents.read(best, timer.left_s())
            if not layout.passages:
                return results, readable
            found = best_per_document(results)
            depth = next_depth(found, len(best), k=k, depth=query.k)
            more: Candidates | Refused | None = None
            if depth is not None and timer.left_s() > 0:
                query = replace(query, k=depth)
                more = await self._find(query, timer.left_s())
            if not isinstance(more, Candidates) or not more.searched:  # in time: the documents found so far
                return found.take(range(min(k, len(found)))), readable
            candidates = more

    async def _rerank(
        self, request: SearchRequest, results: Results, timer: RequestTimer
    ) -> tuple[Results, list[float]]:
        """Results with the best ones in the cross-encoder's order, and its scores of them.

        Results as they are, and no scores, when the cross-encoder does not answer.
        """
        assert self._deployed.reranker is not None  # or rerank_depth would have refused the request
        best = results.documents[: request.rerank]
        texts = [" ".join(filter(None, (document["title"], document["snippet"]))) for document in best]
        call = self._deployed.reranker.score.remote(request.query, texts)
        (scores,) = await gather_in_time([call], deadline_s=timer.left_s())
        if scores is None:
            return results, []
        order = np.argsort(-np.asarray(scores), kind="stable").tolist()
        places = [*order, *range(len(best), len(results))]
        return results.take(places), [float(scores[place]) for place in order]

    # --- canaries -------------------------------------------------------------------------------------

    def _start_canary(self, query: Query, found: Candidates, layout: IndexLayout) -> None:
        """Measure the recall of some answers by an exact search, while the answer is sent."""
        if self._on_recall is None or query.terms is not None or random.random() >= self._config.canary:
            return
        if self._canary is None or self._canary.done():  # exact searches take processor time from the others
            self._canary = asyncio.create_task(self._run_canary(query, found, layout, self._on_recall))

    async def _run_canary(
        self, query: Query, found: Candidates, layout: IndexLayout, on_recall: Callable[[float], None]
    ) -> None:
        try:
            exact = await self._candidates(replace(query, exact=True), RequestTimer(CANARY_DEADLINE_S))
        except Exception as error:
            log.warning("a canary search failed: %s", error)
            return
        wanted, given = (
            rank(each, k=query.k, joining=DEFAULT_JOINING, layout=layout).best for each in (exact, found)
        )
        if wanted.version == given.version and len(wanted):
            on_recall(float(np.isin(wanted.ids, given.ids).mean()))

    # --- single documents -----------------------------------------------------------------------------

    async def document(self, doc_id: str) -> dict[str, Any]:
        """A document as the index shows it; 404 when it has none of this id."""
        version = self.versions.active.name
        layout = self.versions.content(version).layout
        row = _row_of(doc_id, layout)
        if (delta := self._delta_with(doc_id, version)) is not None:
            stored = delta.get(row)
        elif (store := self.versions.documents.store(version)) is not None:
            stored = await asyncio.to_thread(store.get, row)
        else:
            calls = [searcher.document.remote(version, row) for searcher in self._deployed.searchers]
            (stored,) = await _from_one(calls, doc_id, self._timer(None))
        if stored is None:
            raise _missing(doc_id)
        return as_document(stored) if layout.passages else dict(stored)

    async def _vector(
        self, version: str, layout: IndexLayout, doc_id: str, timer: RequestTimer
    ) -> Float[ndarray, "one dim"]:
        """The vector of a document, of passages that of the first one; 404 where there is none."""
        row, delta = _row_of(doc_id, layout), self._delta_with(doc_id, version)
        if delta is None:
            calls = [each.vector.remote(version, row) for each in self._deployed.searchers]
            found: ndarray = await _from_one(calls, doc_id, timer)
            return found
        try:
            vector = delta.vector(row)
        except SearchError as error:
            raise invalid(str(error)) from None
        if vector is None:
            raise _missing(doc_id)
        return vector[np.newaxis]

    def _delta_with(self, doc_id: str, version: str) -> Delta | None:
        """The delta of a version, where the document was written or deleted since."""
        deltas = self.versions.deltas
        delta = None if deltas is None else deltas.of(version)
        return delta if delta is not None and delta.overrides(doc_id) else None

    # --- state ----------------------------------------------------------------------------------------

    def info(self) -> messages.Info:
        """Answer ``GET /info``."""
        active = self.versions.active
        arms = [
            messages.ArmInfo(
                name=arm.name,
                tower=self.versions.form(f"encoder:{arm.name}") or arm.tower,
                personalised=arm.personalised,
            )
            for arm in self._arms.values()
        ]
        content = self.versions.content(active.name)
        return messages.Info(
            **self.embeddings.info(active.dim).model_dump(),
            documents=content.documents,
            index_version=active.name,
            shards=content.layout.shards,
            arms=arms,
            fields={field.name: _field_kind(field.type) for field in content.fields},
            facets={
                name: [
                    messages.Facet(value=value, count=count)
                    for value, count in sorted(values.items(), key=lambda item: (-item[1], item[0]))
                ][:MAX_FACET_VALUES]
                for name, values in content.facets.items()
            },
            sparse=content.layout.sparse,
            live=self._config.live is not None,
            max_k=self._config.limits.max_k,
            max_query_chars=self._config.limits.max_query_chars,
        )

    async def health(self) -> messages.Health:
        """Answer ``GET /healthz``: whether encoders and searchers answer."""
        active = self.versions.active.name
        shards = self.versions.content(active).layout.shards
        calls: dict[str, Awaitable[Any]] = {
            **{f"encoder:{name}": arm.encoder.ping.remote() for name, arm in self._arms.items()},
            **{f"group:{n}": each.ping.remote(active) for n, each in enumerate(self._deployed.searchers)},
            **{f"aggregator:{n}": each.ping.remote() for n, each in enumerate(self._deployed.aggregators)},
        }
        if self._teacher is not None:
            calls["teacher"] = self._teacher.handle.ping.remote()
        pinged = await gather_in_time([*calls.values()], deadline_s=self._config.deadline_s)
        answered = dict(zip(calls, pinged, strict=True))
        silent = [name for name, answer in answered.items() if not answer]
        if self.versions.documents.unreadable(active):
            silent.append("documents")
        if self._refused_settings:
            silent.append("user_config")
        if self.versions.deltas is not None and not self.versions.deltas.is_readable:
            silent.append("delta")
        with_traffic = [arm.name for arm in self._config.split.arms if arm.share > 0]
        can_encode = any(answered[f"encoder:{name}"] for name in with_traffic)
        shards_answered = sum(answered[f"group:{n}"] or 0 for n in range(len(self._deployed.searchers)))
        status = "ok" if not silent and shards_answered == shards else "degraded"
        return messages.Health(
            status=status if can_encode and shards_answered else "down",
            encoder_answers=all(answered[f"encoder:{name}"] for name in self._arms),
            shards=shards,
            shards_answered=shards_answered,
            silent=silent,
        )

    # --- arms and deadlines -------------------------------------------------------

    def _draw_arm(self, request: SearchRequest, record: RequestRecord) -> str:
        """The arm that the traffic split gives to a request."""
        split = self._config.split
        if len(split.arms) == 1:
            return split.arms[0].name
        return arm_of(unit_of(request.user_id, record.request_id, secret=self._secret), split).name

    def _arm(self, name: str | None) -> ServedArm:
        if name is None:
            return self._deployed.arms[0]
        if name not in self._arms:
            raise invalid(f"no arm {name!r}, there are {', '.join(self._arms)}", "arm")
        return self._arms[name]

    def _timer(self, deadline_ms: int | None) -> RequestTimer:
        """A request may shorten the server's deadline, not extend it."""
        limit_s = self._config.deadline_s
        return RequestTimer(limit_s if deadline_ms is None else min(limit_s, deadline_ms / 1000))


async def _in_time(call: Awaitable[T], timer: RequestTimer) -> T:
    """An encoder's answer; 503 when there is none in time."""
    (encoded,) = await gather_in_time([call], deadline_s=timer.left_s())
    if encoded is None:
        raise unavailable("the query encoder does not answer: try again")
    return encoded


def _refusal(refused: Refused) -> RefusedError:
    """503 where a later attempt may succeed, else 422."""
    return unavailable(f"{refused.reason}: try again") if refused.temporary else invalid(refused.reason)


async def _from_one(calls: Sequence[Awaitable[Any]], doc_id: str, timer: RequestTimer) -> Any:
    """The answer of the searcher with a document; 503 if one that did not answer may have it, else 404."""
    answers = await gather_in_time(calls, deadline_s=timer.left_s())
    for answer in answers:
        if isinstance(answer, Refused):
            raise _refusal(answer)
        if answer is not None and len(answer):
            return answer
    if any(answer is None for answer in answers):
        raise unavailable(f"the shard that may have document {doc_id!r} does not answer: try again")
    raise _missing(doc_id)


def _missing(doc_id: str) -> RefusedError:
    return not_found(f"no document {doc_id!r}")


def _hits(
    results: Results, k: int, *, explain: bool = False, reranked: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """The k best results as an answer shows them.

    Args:
        results: with their documents.
        k: number of hits.
        explain: whether each hit has the parts of its score.
        reranked: the cross-encoder's scores of the first results.
    """
    best = results.best
    pairs = zip(results.documents[:k], results.scores, strict=False)
    hits = [{**document, "score": score} for document, score in pairs]
    for place, hit in enumerate(hits if explain else ()):
        hit["explain"] = {
            "dense": float(best.dense[place]),
            "sparse": None if best.sparse is None else float(best.sparse[place]),
            "rerank": reranked[place] if place < len(reranked) else None,
            "shard": int(best.shards[place]),
        }
    return hits


def _answer(
    record: RequestRecord,
    arm: ServedArm,
    layout: IndexLayout,
    results: Results,
    hits: list[dict[str, Any]],
    timer: RequestTimer,
) -> dict[str, Any]:
    """A SearchResponse, not personal or degraded. A dict: pydantic would validate every hit of a model."""
    return {
        "request_id": record.request_id,
        "results": hits,
        "arm": arm.name,
        "index_version": results.best.version,
        "shards": layout.shards,
        "shards_answered": results.best.searched,
        "missing_groups": list(results.best.missing),
        "personalised": False,
        "escalated": False,
        "degraded": [],
        "timings_ms": timer.timings_ms(),
    }


def _row_of(doc_id: str, layout: IndexLayout) -> str:
    """The id of a document's row, of the first one where it has several."""
    return passage_id(doc_id, 1) if layout.passages else doc_id


def _field_kind(dtype: pa.DataType) -> Any:
    if pa.types.is_boolean(dtype):
        return "boolean"
    return "number" if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) else "text"
