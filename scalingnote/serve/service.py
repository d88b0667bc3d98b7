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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from scalingnote.errors import SearchError
from scalingnote.experiment.config import arm_of, unit_of
from scalingnote.index import filters
from scalingnote.index.shard import Layout
from scalingnote.models.published_model import Similarity
from scalingnote.search.query_path import COMPARED, Query
from scalingnote.search.searcher import DEFAULT_JOINING, Candidates, rank
from scalingnote.serve import messages
from scalingnote.serve.access import RefusedError, invalid, not_found, unavailable
from scalingnote.serve.concurrency import Handle, RequestTimer, gather_in_time
from scalingnote.serve.embeddings import Embeddings
from scalingnote.serve.escalation import Teacher
from scalingnote.serve.fan_out import FanOut, GroupCandidates, hedged, sizes
from scalingnote.serve.messages import SearchRequest, SimilarRequest
from scalingnote.serve.telemetry import get_logger, secret
from scalingnote.serve.towers import Refused
from scalingnote.serve.versions import Versions
from scalingnote.serve.writer import DocumentWrites, WriteHandles
from scalingnote.serve_config import ServeConfig

CANARY_DEADLINE_S = 30.0  # an exact search is slow
MAX_FACET_VALUES = 50  # of a field in /info
State = dict[str, Any]  # of a request: its `request_id`, and what telemetry.RequestObserver reads
T = TypeVar("T")
log = get_logger()


@dataclass(frozen=True)
class ServedArm:
    """A way to answer queries, which a request may name."""

    name: str
    encoder: Any  # a Handle; in the arguments of a gateway that encodes queries itself, QueryPathParts
    tower: str  # its form, for /info
    personalised: bool
    version: str | None = None  # name of the index version; None: the active one


class Service:
    """Answers requests by the handles of the deployments.

    Args:
        arms: the first one answers requests outside the traffic split.
        searchers: one for each group of shards.
        aggregators: of the groups of :func:`scalingnote.serve.fan_out.sizes`; none: the gateway calls the
            searchers itself.
        versions: the open versions of the index.
        config: limits, deadline and traffic split.
        reranker: None: requests for re-ranking are refused.
        writing: None: writes are refused.
        on_recall: called with the recall of each canary, the share of the exact best that was found.
        name: of the model, for clients of embeddings.
        documents: the document tower, for the same; None: it is not served.
        teacher: encodes the queries that `config.escalation` chooses; None: no query.
        similarity: that embeddings are compared by.
    """

    def __init__(
        self,
        arms: Sequence[ServedArm],
        searchers: Sequence[Handle],
        versions: Versions,
        config: ServeConfig,
        *,
        reranker: Handle | None = None,
        writing: WriteHandles | None = None,
        on_recall: Callable[[float], None] | None = None,
        name: str = "scalingnote",
        documents: Handle | None = None,
        aggregators: Sequence[Handle] = (),
        teacher: Handle | None = None,
        similarity: Similarity = "cosine",
    ) -> None:
        self._teacher = Teacher(teacher, config.escalation) if teacher and config.escalation else None
        self._arms, self._searchers = {arm.name: arm for arm in arms}, list(searchers)
        self._first_arm, self._aggregators = arms[0], list(aggregators)
        groups = sizes(len(searchers), config.fanout) if aggregators else [[n] for n in range(len(searchers))]
        self._fan_out = FanOut(aggregators or searchers, groups, hedge_after=hedged(config))
        encoders = {arm.name: arm.encoder for arm in arms}
        self.embeddings = Embeddings(
            name, encoders, documents, config, reranker=reranker, similarity=similarity
        )
        self.versions, self._config, self._reranker = versions, config, reranker
        self.writes = DocumentWrites(
            writing, searchers=searchers, versions=versions, max_batch=config.limits.max_batch
        )
        self._on_recall = on_recall
        self._canaries: set[asyncio.Task[None]] = set()
        self._secret = secret()

    # --- searching ------------------------------------------------------------------------------------

    async def search(self, request: SearchRequest, state: State) -> dict[str, Any]:
        """Answer ``POST /search`` by a :class:`~scalingnote.serve.messages.SearchResponse`.

        Args:
            request: a text or a vector, and how to search.
            state: of the request, with its `request_id`; gets the `search`, its `arm` and its `answer`.

        Raises:
            RefusedError: 422 for a request beyond the limits, 503 when no encoder or no searcher answers.
        """
        arm, timer = self._arm(request.arm or self._drawn(request, state)), self._timer(request.deadline_ms)
        state |= {"search": request, "arm": arm.name}
        version, layout, where = self._index(request, arm)
        joining = messages.joining(request.dense_weight, sparse=layout.sparse)
        reranked = messages.rerank_depth(request, self._config.rerank if self._reranker else None)
        text, encoded = await self._encoded(request, arm, layout.dim, timer)
        # The teacher encodes texts, of nobody in particular, in the space of its own documents.
        teacher = self._teacher if text and not encoded.personalised and arm.version is None else None
        query = student = replace(
            encoded,
            terms=encoded.terms if layout.sparse else None,
            k=max(request.k, reranked, COMPARED if teacher else 0),
            nprobe=request.nprobe,
            where=where,
            version=version,
        )
        timings_ms = {"encode": timer.step_ms()}
        candidates, reason = await self._candidates(query, timer), ""
        timings_ms["search"] = timer.step_ms()
        if teacher is not None:
            query, candidates, reason = await teacher.search(text, query, candidates, self._fan_out, timer)
        timings_ms["escalate"] = timer.step_ms() if teacher else 0.0
        best = rank(candidates.candidates, k=query.k, joining=joining, layout=layout)
        found, readable = await self.versions.documents.shown(best, timer.left_s())
        timings_ms["search"] = round(timings_ms["search"] + timer.step_ms(), 3)
        self._start_canary(query, found)
        scores: list[float] = []
        if reranked and readable:
            found, scores = await self._rerank(request, found, timer)
        timings_ms["rerank"] = timer.step_ms() if reranked else 0.0
        results = _results(found, request.k, explain=request.explain, reranked=scores)
        timings_ms["total"] = timer.total_ms()
        unranked = reranked and len(found) and not scores
        lacks = {reason: reason, "documents_unreadable": not readable, "not_reranked": unranked}
        state["answer"] = answer = {
            **_response(state, arm, layout, found, candidates, results, timings_ms),
            "personalised": query.personalised,
            "escalated": query is not student,
            "degraded": [name for name, applies in lacks.items() if applies],
        }
        return answer

    def _index(
        self, request: SearchRequest | SimilarRequest, arm: ServedArm
    ) -> tuple[str, Layout, filters.Filter | None]:
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

    async def _encoded(
        self, request: SearchRequest, arm: ServedArm, dim: int, timer: RequestTimer
    ) -> tuple[str, Query]:
        """The text of a request, empty where it has a vector, and the encoded query."""
        if request.vector is not None:
            return "", Query(messages.unit_vector(request.vector, dim))
        text = messages.query_text(request.query or "", self._config.limits)
        user_id = request.user_id if arm.personalised else None
        return text, await _in_time(arm.encoder.encode.remote(text, user_id), timer)

    def _drawn(self, request: SearchRequest, state: State) -> str:
        """The arm that the traffic split gives to a request."""
        split = self._config.split
        if len(split.arms) == 1:
            return split.arms[0].name
        return arm_of(unit_of(request.user_id, state["request_id"], secret=self._secret), split).name

    async def similar(self, request: SimilarRequest, state: State) -> dict[str, Any]:
        """Answer ``POST /similar``: the documents nearest to one of the index, without that one."""
        arm, timer = self._arm(request.arm), self._timer(request.deadline_ms)
        version, layout, where = self._index(request, arm)
        calls = [searcher.vector.remote(version, request.doc_id) for searcher in self._searchers]
        vector = await _from_one(calls, request.doc_id, timer)
        timings_ms = {"encode": timer.step_ms()}
        query = Query(vector, k=request.k + 1, where=where, version=version)
        candidates = await self._candidates(query, timer)
        best = rank(candidates.candidates, k=query.k, joining=DEFAULT_JOINING, layout=layout)
        found, readable = await self.versions.documents.shown(best, timer.left_s())
        others = [result for result in _results(found, query.k) if result["doc_id"] != request.doc_id]
        timings_ms |= {"search": timer.step_ms(), "escalate": 0.0, "rerank": 0.0, "total": timer.total_ms()}
        return {
            **_response(state, arm, layout, found, candidates, others[: request.k], timings_ms),
            "personalised": False,
            "escalated": False,
            "degraded": [] if readable else ["documents_unreadable"],
        }

    async def encode(self, request: messages.EncodeRequest) -> dict[str, Any]:
        """Answer ``POST /encode``: unit embeddings of queries."""
        arm, timer = self._arm(request.arm), self._timer(None)
        if len(request.queries) > (most := self._config.limits.max_batch):
            raise invalid(f"{len(request.queries)} queries: send up to {most}", "queries")
        queries = [messages.query_text(query, self._config.limits) for query in request.queries]
        user_id = request.user_id if arm.personalised else None
        encoded = await _in_time(arm.encoder.encode_many.remote(queries, user_id), timer)
        embeddings = [query.embedding[0].tolist() for query in encoded]
        return {"embeddings": embeddings, "dim": len(embeddings[0]), "arm": arm.name}

    async def document(self, doc_id: str) -> dict[str, Any]:
        """A document as the index shows it; 404 when it has none of this id."""
        version = self.versions.active.name
        if (store := self.versions.documents.store(version)) is not None:
            stored = await asyncio.to_thread(store.get, doc_id)
            if stored is None:
                raise not_found(f"no document {doc_id!r}")
            return stored
        calls = [searcher.document.remote(version, doc_id) for searcher in self._searchers]
        (document,) = await _from_one(calls, doc_id, self._timer(None))
        return dict(document)

    async def _candidates(self, query: Query, timer: RequestTimer) -> GroupCandidates:
        """The candidates of the groups that are in time, and the others' numbers.

        503 when no group is in time, 422 when one refuses the query.
        """
        found = await self._fan_out.search(query, timer.left_s())
        if isinstance(found, Refused):
            raise _refusal(found)
        if not found.candidates:
            engine = self._config.search.backend
            if engine == "own":
                raise unavailable("no shard of the index answers: try again")
            raise unavailable(f"{engine} does not answer in time: try again")
        return found

    async def _rerank(
        self, request: SearchRequest, found: Candidates, timer: RequestTimer
    ) -> tuple[Candidates, list[float]]:
        """Candidates with the best ones in the cross-encoder's order, and its scores of them.

        Candidates as they are, and no scores, when the cross-encoder does not answer.
        """
        assert self._reranker is not None  # or rerank_depth would have refused the request
        best = found.documents[: request.rerank]
        texts = [" ".join(filter(None, (document["title"], document["snippet"]))) for document in best]
        call = self._reranker.score.remote(request.query, texts)
        (scores,) = await gather_in_time([call], deadline_s=timer.left_s())
        if scores is None:
            return found, []
        order = np.argsort(-np.asarray(scores), kind="stable").tolist()
        places = [*order, *range(len(best), len(found))]
        ordered = found.take(places, [found.scores[place] for place in places])
        return ordered, [float(scores[place]) for place in order]

    # --- canaries -------------------------------------------------------------------------------------

    def _start_canary(self, query: Query, found: Candidates) -> None:
        """Measure the recall of some answers by an exact search, while the answer is sent."""
        if self._on_recall is None or query.terms is not None or random.random() >= self._config.canary:
            return
        if self._canaries:  # one at a time: exact searches take processor time from the others
            return
        task = asyncio.create_task(self._run_canary(query, found, self._on_recall))
        self._canaries.add(task)
        task.add_done_callback(self._end_canary)

    async def _run_canary(self, query: Query, found: Candidates, on_recall: Callable[[float], None]) -> None:
        exact = await self._candidates(replace(query, exact=True), RequestTimer(CANARY_DEADLINE_S))
        layout = self.versions.content(query.version).layout
        best = rank(exact.candidates, k=query.k, joining=DEFAULT_JOINING, layout=layout)
        if best.version == found.version and len(best):
            on_recall(float(np.isin(best.ids, found.ids).mean()))

    def _end_canary(self, task: asyncio.Task[None]) -> None:
        self._canaries.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("a canary search failed: %s", task.exception())

    # --- state ----------------------------------------------------------------------------------------

    def info(self) -> messages.Info:
        """Answer ``GET /info``."""
        active = self.versions.active
        arms = [
            messages.ArmInfo(name=arm.name, tower=arm.tower, personalised=arm.personalised)
            for arm in self._arms.values()
        ]
        content = self.versions.content(active.name)
        return messages.Info(
            **self.embeddings.info(active.dim).model_dump(),
            documents=active.documents,
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
            **{f"group:{n}": each.ping.remote(active) for n, each in enumerate(self._searchers)},
            **{f"aggregator:{n}": each.ping.remote() for n, each in enumerate(self._aggregators)},
        }
        if self._teacher is not None:
            calls["teacher"] = self._teacher.handle.ping.remote()
        pinged = await gather_in_time([*calls.values()], deadline_s=self._config.deadline_s)
        answered = dict(zip(calls, pinged, strict=True))
        silent = [name for name, answer in answered.items() if not answer]
        if self.versions.documents.unreadable(active):
            silent.append("documents")
        with_traffic = [arm.name for arm in self._config.split.arms if arm.share > 0]
        can_encode = any(answered[f"encoder:{name}"] for name in with_traffic)
        shards_answered = sum(answered[f"group:{n}"] or 0 for n in range(len(self._searchers)))
        status = "ok" if not silent and shards_answered == shards else "degraded"
        return messages.Health(
            status=status if can_encode and shards_answered else "down",
            encoder_answers=all(answered[f"encoder:{name}"] for name in self._arms),
            shards=shards,
            shards_answered=shards_answered,
            silent=silent,
        )

    # --- arms and deadlines -------------------------------------------------------

    def _arm(self, name: str | None) -> ServedArm:
        if name is None:
            return self._first_arm
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
    raise not_found(f"no document {doc_id!r}")


def _results(
    found: Candidates, k: int, *, explain: bool = False, reranked: Sequence[float] = ()
) -> list[dict[str, Any]]:
    """The k best candidates as a response shows them.

    Args:
        found: ranked, with their documents.
        k: number of results.
        explain: whether each result has the parts of its score.
        reranked: the cross-encoder's scores of the first candidates.
    """
    pairs = zip(found.documents[:k], found.scores, strict=False)
    results = [{**document, "score": score} for document, score in pairs]
    for place, result in enumerate(results if explain else ()):
        result["explain"] = {
            "dense": float(found.dense[place]),
            "sparse": None if found.sparse is None else float(found.sparse[place]),
            "rerank": reranked[place] if place < len(reranked) else None,
            "shard": int(found.shards[place]),
        }
    return results


def _response(
    state: State,
    arm: ServedArm,
    layout: Layout,
    found: Candidates,
    candidates: GroupCandidates,
    results: list[dict[str, Any]],
    timings_ms: Mapping[str, float],
) -> dict[str, Any]:
    """The fields that an answer has of any search: pydantic would validate every hit of a model."""
    return {
        "request_id": state["request_id"],
        "results": results,
        "arm": arm.name,
        "index_version": found.version,
        "shards": layout.shards,
        "shards_answered": found.searched,
        "missing_groups": list(candidates.missing),
        "timings_ms": timings_ms,
    }


def _field_kind(dtype: pa.DataType) -> Any:
    if pa.types.is_boolean(dtype):
        return "boolean"
    return "number" if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) else "text"
