"""The body of a search's answer, as :class:`scalingnote.serve.messages.SearchResponse` describes it."""

from collections.abc import Mapping, Sequence
from typing import Any

from scalingnote.search.searcher import Candidates


def results(found: Candidates, *, k: int) -> list[dict[str, Any]]:
    """The k best candidates as a response shows them."""
    pairs = zip(found.documents[:k], found.scores, strict=False)
    return [{**document, "score": score} for document, score in pairs]


def explain(results: Sequence[dict[str, Any]], found: Candidates, scores: Sequence[float]) -> None:
    """Add the parts of each score; `scores` are the cross-encoder's, of the first results."""
    for place, result in enumerate(results):
        result["explain"] = {
            "dense": float(found.dense[place]),
            "sparse": None if found.sparse is None else float(found.sparse[place]),
            "rerank": scores[place] if place < len(scores) else None,
            "shard": int(found.shards[place]),
        }


def response(
    state: Mapping[str, Any],
    arm: str,
    results: list[dict[str, Any]],
    found: Candidates,
    timings_ms: dict[str, float],
    *,
    shards: int,
    missing: Sequence[int],
    personalised: bool,
    degraded: list[str],
    escalated: bool = False,
) -> dict[str, Any]:
    """A ``messages.SearchResponse`` as a dict: pydantic would validate every hit."""
    return {
        "request_id": state["request_id"],
        "results": results,
        "arm": arm,
        "index_version": found.version,
        "personalised": personalised,
        "shards": shards,
        "shards_answered": found.searched,
        "missing_groups": list(missing),
        "escalated": escalated,
        "degraded": degraded,
        "timings_ms": timings_ms,
    }


def degraded(reason: str, *, unread: bool, unranked: bool) -> list[str]:
    """What an answer had to do without, by the names of :class:`messages.SearchResponse`."""
    lacks = {reason: bool(reason), "documents_unreadable": unread, "not_reranked": unranked}
    return [name for name, applies in lacks.items() if applies]
