"""The service of the gateway, for HTTP and gRPC: it answers a checked request within a deadline.

    query ─► encoder of the arm ─► every group of shards, one version ─► merge ─► cross-encoder, if requested
                  └── teacher ◄── if the best scores are close together ◄────┘

One arm (a query tower, an index version, personal or not) and one version of the index answer a request. Both
are chosen when it arrives. No request waits longer than its deadline: a slow or dead group of shards is left
out of the answer, and the answer lists it. A request fails only if its encoder or all searchers do not
answer.
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
from scalingnote.index.shard import IndexLayout
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.live_searcher import Delta
from scalingnote.search.query_path import COMPARED, Query
from scalingnote.search.searcher import (
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
    """The answers to requests, computed by calls of the deployments.

    Args:
        deployed: handles; each group of shards has a searcher.
        config: limits, deadline and traffic split.
        on_recall: called with the recall of each canary: the share of the exact best results that the search
            found.
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
        """Apply other limits, deadline and canaries; `refused`: why the latest settings are not valid."""
        self._config, self._refused_settings = config, refused
        self.embeddings.take_settings(config, refused=refused)
        if self._teacher is not None:
            self._teacher.limit(config.limits.in_flight)

    # --- searching ------------------------------------------------------------------------------------

    async def search(self, request: SearchRequest, record: RequestRecord) -> dict[str, Any]:
        """Answer ``POST /search`` by a :class:`~scalingnote.serve.messages.SearchResponse`.

        Args:
            request: a text or a vector, and how to search.
            record: receives the request, its arm and its answer.

        Raises:
            RefusedError: 422 for a request beyond the limits, 503 if no encoder or no searcher answers.
        """
        timer = self._timer(request.deadline_ms)
        arm = self._arm(request.arm or self._draw_arm(request, record))
        record.search, record.arm = request, arm.name
        version, layout, where = self._index(request, arm)
        messages.check_dense_weight(request.dense_weight, sparse=layout.sparse)
        depth = messages.rerank_depth(request, served=self._deployed.reranker is not None)
        text = "" if request.query is None else messages.query_text(request.query, self._config.limits)
        encoded_query = await self._encode(request, text, arm, version, timer)
        # The teacher encodes only texts, without features of a user, for the documents that it encoded.
        has_teacher = arm.version is None and self.versions.has_teacher(version)
        teacher = self._teacher if text and not encoded_query.personalised and has_teacher else None
        candidate_count = max(request.k, depth, COMPARED if teacher else 0)
        student = Query(
            encoded_query.embedding,
            encoded_query.terms if layout.sparse else None,
            encoded_query.personalised,
            k=first_depth(candidate_count, layout),
            nprobe=request.nprobe,
            where=where,
            version=version,
        )
        timer.end("encode")
        candidates = await self._candidates(student, timer)
        timer.end("search")
        query, problem = student, ""
        if teacher is not None:
            query, candidates, problem = await teacher.search(text, student, candidates, self._find, timer)
            timer.end("escalate")
        self._start_canary(query, candidates, layout)
        results, readable = await self._documents(
            query, candidates, candidate_count, layout, timer, dense_weight=request.dense_weight
        )
        timer.end("search")
        reranked: list[float] = []
        if depth and readable:
            results, reranked = await self._rerank(request, results, timer)
            timer.end("rerank")
        missing_parts = {
            problem: bool(problem),
            "documents_unreadable": not readable,
            "not_reranked": depth and len(results) and not reranked,
        }
        hits = _hits(results, request.k, explain=request.explain, reranked=reranked)
        record.answer = answer = _answer(record, arm, layout, results, hits, timer) | {
            "personalised": query.personalised,
            "escalated": query is not student,
            "degraded": [reason for reason, applies in missing_parts.items() if applies],
        }
        return answer

    def _index(
        self, request: SearchRequest | SimilarRequest, arm: ServedArm
    ) -> tuple[str, IndexLayout, filters.Filter | None]:
        """Return the index version that answers a request, its layout, and the filter of the request.

        RefusedError (422) for more results than the server returns, and for a filter that does not fit the
        fields of the index.
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
        """Encode the query of a request for an index version; `text` is empty if it has a vector."""
        if request.vector is not None:
            return Query(messages.unit_vector(request.vector, self.versions.content(version).layout.dim))
        user_id = request.user_id if arm.personalised else None
        return await _in_time(at(arm.encoder, version).encode.remote(text, user_id), timer)

    async def similar(self, request: SimilarRequest, record: RequestRecord) -> dict[str, Any]:
        """Answer ``POST /similar``: the documents nearest to one document of the index, without this one.

        If documents have passages, the first passage of the document is compared.
        """
        arm, timer = self._arm(request.arm), self._timer(request.deadline_ms)
        version, layout, where = self._index(request, arm)
        vector, count = await self._vector(version, layout, request.doc_id, timer), request.k + 1
        timer.end("encode")
        query = Query(vector, k=first_depth(count, layout), where=where, version=version)
        candidates = await self._candidates(query, timer)
        results, readable = await self._documents(query, candidates, count, layout, timer)
        others = [hit for hit in _hits(results, count) if hit["doc_id"] != request.doc_id]
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
        encoded_queries = await _in_time(encoder.encode_many.remote(queries, user_id), timer)
        embeddings = [query.embedding[0].tolist() for query in encoded_queries]
        return {"embeddings": embeddings, "dim": len(embeddings[0]), "arm": arm.name}

    async def _candidates(self, query: Query, timer: RequestTimer) -> Candidates:
        """Return the candidates of the groups that answer in time.

        RefusedError: 503 if no group answers in time, 422 if one refuses the query.
        """
        candidates = await self._find(query, timer.left_s())
        if isinstance(candidates, Refused):
            raise _refusal(candidates)
        if not candidates.searched:
            engine = self._config.search.backend
            if engine == "own":
                raise unavailable("no shard of the index answers: try again")
            raise unavailable(f"{engine} does not answer in time: try again")
        return candidates

    async def _documents(
        self,
        query: Query,
        candidates: Candidates,
        k: int,
        layout: IndexLayout,
        timer: RequestTimer,
        *,
        dense_weight: float | None = None,
    ) -> tuple[Results, bool]:
        """Return the k best documents of a query with their stored fields, and whether these could be read.

        In an index of passages the search is repeated with more of them until they belong to k documents, see
        :mod:`scalingnote.search.searcher`.
        """
        while True:
            best = rank(candidates, k=query.k, layout=layout, dense_weight=dense_weight)
            results, readable = await self.versions.documents.read(best, timer.left_s())
            if not layout.passages:
                return results, readable
            documents = best_per_document(results)
            depth = next_depth(documents, len(best), k=k, depth=query.k)
            more: Candidates | Refused | None = None
            if depth is not None and timer.left_s() > 0:
                query = replace(query, k=depth)
                more = await self._find(query, timer.left_s())
            if not isinstance(more, Candidates) or not more.searched:  # none are needed, or none came in time
                return documents.take(range(min(k, len(documents)))), readable
            candidates = more

    async def _rerank(
        self, request: SearchRequest, results: Results, timer: RequestTimer
    ) -> tuple[Results, list[float]]:
        """Sort the best results by the cross-encoder; return all results, and its scores of the best ones.

        The results are unchanged, and there are no scores, if the cross-encoder does not answer.
        """
        assert self._deployed.reranker is not None  # else rerank_depth refuses the request
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

    def _start_canary(self, query: Query, candidates: Candidates, layout: IndexLayout) -> None:
        """Measure the recall of a sample of answers by an exact search, while the answer is sent."""
        if self._on_recall is None or query.terms is not None or random.random() >= self._config.canary:
            return
        if self._canary is None or self._canary.done():  # an exact search takes processor time from others
            self._canary = asyncio.create_task(self._run_canary(query, candidates, layout, self._on_recall))

    async def _run_canary(
        self, query: Query, candidates: Candidates, layout: IndexLayout, on_recall: Callable[[float], None]
    ) -> None:
        try:
            exact = await self._candidates(replace(query, exact=True), RequestTimer(CANARY_DEADLINE_S))
        except Exception as error:
            log.warning("a canary search failed: %s", error)
            return
        expected, actual = (rank(each, k=query.k, layout=layout).best for each in (exact, candidates))
        if expected.version == actual.version and len(expected):
            on_recall(float(np.isin(expected.ids, actual.ids).mean()))

    # --- single documents -----------------------------------------------------------------------------

    async def document(self, doc_id: str) -> dict[str, Any]:
        """Return a document as the index shows it; RefusedError (404) if there is none with this id."""
        version = self.versions.active.name
        layout = self.versions.content(version).layout
        row = _row_of(doc_id, layout)
        if (delta := self._delta_with(doc_id, version)) is not None:
            fields = delta.get(row)
        elif (store := self.versions.documents.store(version)) is not None:
            fields = await asyncio.to_thread(store.get, row)
        else:
            calls = [searcher.document.remote(version, row) for searcher in self._deployed.searchers]
            (fields,) = await _from_one(calls, doc_id, self._timer(None))
        if fields is None:
            raise _missing(doc_id)
        return as_document(fields) if layout.passages else dict(fields)

    async def _vector(
        self, version: str, layout: IndexLayout, doc_id: str, timer: RequestTimer
    ) -> Float[ndarray, "one dim"]:
        """Return the vector of a document, or of its first passage; RefusedError (404) if there is none."""
        row, delta = _row_of(doc_id, layout), self._delta_with(doc_id, version)
        if delta is None:
            calls = [each.vector.remote(version, row) for each in self._deployed.searchers]
            row_vector: ndarray = await _from_one(calls, doc_id, timer)
            return row_vector
        try:
            vector = delta.vector(row)
        except SearchError as error:
            raise invalid(str(error)) from None
        if vector is None:
            raise _missing(doc_id)
        return vector[np.newaxis]

    def _delta_with(self, doc_id: str, version: str) -> Delta | None:
        """Return the delta of a version if the document was written or deleted since, else None."""
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
        results = await gather_in_time([*calls.values()], deadline_s=self._config.deadline_s)
        answers = dict(zip(calls, results, strict=True))
        silent = [name for name, answer in answers.items() if not answer]
        if self.versions.documents.unreadable(active):
            silent.append("documents")
        if self._refused_settings:
            silent.append("user_config")
        if self.versions.deltas is not None and not self.versions.deltas.is_readable:
            silent.append("delta")
        with_traffic = [arm.name for arm in self._config.split.arms if arm.share > 0]
        can_encode = any(answers[f"encoder:{name}"] for name in with_traffic)
        shards_answered = sum(answers[f"group:{n}"] or 0 for n in range(len(self._deployed.searchers)))
        status = "ok" if not silent and shards_answered == shards else "degraded"
        return messages.Health(
            status=status if can_encode and shards_answered else "down",
            encoder_answers=all(answers[f"encoder:{name}"] for name in self._arms),
            shards=shards,
            shards_answered=shards_answered,
            silent=silent,
        )

    # --- arms and deadlines -------------------------------------------------------

    def _draw_arm(self, request: SearchRequest, record: RequestRecord) -> str:
        """Return the name of the arm that the traffic split chooses for a request."""
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
        """Start the timer of a request. It may shorten the server's deadline, not extend it."""
        limit_s = self._config.deadline_s
        return RequestTimer(limit_s if deadline_ms is None else min(limit_s, deadline_ms / 1000))


async def _in_time(call: Awaitable[T], timer: RequestTimer) -> T:
    """Return an encoder's answer; RefusedError (503) if there is none in time."""
    (answer,) = await gather_in_time([call], deadline_s=timer.left_s())
    if answer is None:
        raise unavailable("the query encoder does not answer: try again")
    return answer


def _refusal(refused: Refused) -> RefusedError:
    """Return an error with status 503 if a later attempt may succeed, else with 422."""
    return unavailable(f"{refused.reason}: try again") if refused.temporary else invalid(refused.reason)


async def _from_one(calls: Sequence[Awaitable[Any]], doc_id: str, timer: RequestTimer) -> Any:
    """Return the answer of the searcher that has a document.

    RefusedError: 503 if a searcher that did not answer may have it, else 404.
    """
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
    """Return the k best results as an answer shows them.

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
    """Build a SearchResponse, not personal and not degraded.

    It is a dict, because pydantic would validate every hit of a model.
    """
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
    """Return the id of a document's row, or of its first row if it has several."""
    return passage_id(doc_id, 1) if layout.passages else doc_id


def _field_kind(dtype: pa.DataType) -> Any:
    if pa.types.is_boolean(dtype):
        return "boolean"
    return "number" if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) else "text"
