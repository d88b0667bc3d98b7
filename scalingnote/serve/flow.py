"""One search, from a checked request to its hits: encode, ask the searchers, merge, re-rank.

    query ─► encoder of the arm ─► every group of shards, one version ─► the k best ─► cross-encoder, if asked

Nothing waits longer than the deadline: a group of shards that is slow or gone is left out of the answer, and
the answer says so. Only when the encoder or all searchers are silent is there none.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from ray.serve.handle import DeploymentHandle

from scalingnote.index import filters
from scalingnote.index.shard import Layout
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.config import Joining
from scalingnote.search.found import Hit, merge
from scalingnote.search.query_path import Asked
from scalingnote.serve.clock import Clock
from scalingnote.serve.fan_out import in_time
from scalingnote.serve.here import Here
from scalingnote.serve.refusals import invalid, not_found, unavailable
from scalingnote.serve.searcher import Answered, Refused, Wanted

Called = DeploymentHandle[Any] | Here


@dataclass(frozen=True)
class Question:
    """What is searched for, in which version, and how."""

    version: str
    layout: Layout
    k: int
    joining: Joining
    where: filters.Filter | None = None
    nprobe: int | None = None
    exact: bool = False


@dataclass
class Answer:
    """The best documents, and how they were come by."""

    hits: list[Hit]
    version: str
    shards: int
    shards_answered: int
    personalised: bool = False
    rerank: list[float] | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)


async def encode(encoder: Called, query: str, user_id: str | None, clock: Clock) -> Asked:
    """What a text is searched with; 503 when the encoder does not answer."""
    (asked,) = await in_time([encoder.encode.remote(query, user_id)], deadline_s=clock.left())
    if asked is None:
        raise unavailable("the query encoder does not answer: try again")
    return asked  # type: ignore[no-any-return]


async def search(
    searchers: Sequence[Called],
    embedding: Float[ndarray, "one dim"],
    terms: SparseRows | None,
    question: Question,
    clock: Clock,
) -> Answer:
    """The k best of all searchers that answer; 503 when none does, 422 with the reason that they give."""
    wanted = Wanted(
        question.version, embedding, question.k, terms, question.nprobe, question.where, question.exact
    )
    answers = await in_time(
        [searcher.search.remote(wanted) for searcher in searchers], deadline_s=clock.left()
    )
    answered: list[Answered] = []
    for answer in answers:
        if isinstance(answer, Refused):
            raise invalid(answer.reason)
        if answer is not None:
            answered.append(answer)
    if not answered:
        raise unavailable("no shard of the index answers: try again")
    found = [answer.found for answer in answered]
    hits = merge(found, k=question.k, joining=question.joining, layout=question.layout)
    shards = sum(answer.shards for answer in answered)
    return Answer(hits, answered[-1].version, question.layout.shards, shards)


async def rerank(reranker: Called, query: str, answer: Answer, *, most: int, clock: Clock) -> None:
    """Put the best hits in the order that a cross-encoder gives them; as they are when it is silent."""
    best = answer.hits[:most]
    texts = [" ".join(filter(None, (hit.document["title"], hit.document["snippet"]))) for hit in best]
    (scores,) = await in_time([reranker.score.remote(query, texts)], deadline_s=clock.left())
    if scores is not None:
        order = np.argsort(-np.asarray(scores), kind="stable").tolist()
        answer.hits[: len(best)] = [best[place] for place in order]
        answer.rerank = [float(scores[place]) for place in order]


async def vector(
    searchers: Sequence[Called], version: str, doc_id: str, clock: Clock
) -> Float[ndarray, "one dim"]:
    """The vector of a document; 404 when no searcher has it."""
    calls = [searcher.vector.remote(version, doc_id) for searcher in searchers]
    found: ndarray = await _the_one(calls, doc_id, clock)
    return found


async def document(searchers: Sequence[Called], version: str, doc_id: str, clock: Clock) -> dict[str, Any]:
    """A document; 404 when no searcher has it."""
    calls = [searcher.document.remote(version, doc_id) for searcher in searchers]
    (found,) = await _the_one(calls, doc_id, clock)
    return dict(found)


async def _the_one(calls: Sequence[Awaitable[Any]], doc_id: str, clock: Clock) -> Any:
    """The answer of the searcher that has something; 503 when one that may have it is silent."""
    answers = await in_time(calls, deadline_s=clock.left())
    for answer in answers:
        if isinstance(answer, Refused):
            raise invalid(answer.reason)
        if answer is not None and len(answer):
            return answer
    if any(answer is None for answer in answers):
        raise unavailable(f"the shard that may have document {doc_id!r} does not answer: try again")
    raise not_found(f"no document {doc_id!r}")
