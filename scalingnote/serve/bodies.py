"""Checks of requests against the server's limits and its index, and the bodies of answers.

A check refuses a request by 422 and names the field. Answers are dicts of the forms that
:mod:`scalingnote.serve.messages` describes: pydantic would validate every hit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.hybrid import Joining
from scalingnote.index import filters
from scalingnote.search.searcher import DEFAULT_JOINING, Candidates
from scalingnote.serve import messages
from scalingnote.serve.access import invalid
from scalingnote.serve.versions import Version, VersionContent
from scalingnote.serve_config import Limits, Rerank, ServeConfig

MAX_FACET_VALUES = 50  # of a field in /info

# --- requests ---------------------------------------------------------------------------------------


def check_search(k: int, where: filters.Filter | None, fields: pa.Schema, limits: Limits) -> None:
    """Refuse more results than the server gives, and a filter that does not fit the index's fields."""
    if k > limits.max_k:
        raise invalid(f"k is {k}, this server gives up to {limits.max_k} results", "k")
    try:
        if where:
            filters.check(where, fields)
    except SearchError as error:
        raise invalid(str(error), "filter") from None


def rerank_depth(request: messages.SearchRequest, rerank: Rerank | None) -> int:
    """The number of results to re-rank; 0: none. With `rerank` None, the server does not re-rank."""
    if request.rerank is None:
        return 0
    if rerank is None:
        raise invalid("this server does not re-rank: set serve.rerank", "rerank")
    if request.query is None:
        raise invalid("only results of a text can be re-ranked: send query", "rerank")
    if request.rerank > rerank.max_candidates:
        raise invalid(f"rerank is {request.rerank}, up to {rerank.max_candidates} are done", "rerank")
    return request.rerank


def text(given: str, limits: Limits) -> str:
    """A query without the spaces around it."""
    query = given.strip()
    if not query:
        raise invalid("query is empty: send some text", "query")
    try:
        query.encode()
    except UnicodeEncodeError:  # JSON can spell a lone surrogate, which tokenizers cannot read
        raise invalid("query is not valid Unicode", "query") from None
    if len(query) > limits.max_query_chars:
        raise invalid(
            f"query has {len(query)} characters, this server takes up to {limits.max_query_chars}", "query"
        )
    return query


def joining(dense_weight: float | None, *, sparse: bool) -> Joining:
    """How scores by embeddings and by terms are joined; `sparse`: whether the index has terms."""
    if dense_weight is None:
        return DEFAULT_JOINING
    if not sparse:
        raise invalid("dense_weight is given, but the documents of this index have no terms", "dense_weight")
    return Joining(dense_weight=dense_weight)


def unit_vector(values: Sequence[float], dim: int) -> Float[ndarray, "1 dim"]:
    """A client's vector as a unit embedding."""
    if len(values) != dim:
        raise invalid(f"vector has {len(values)} numbers, the index has embeddings of dim {dim}", "vector")
    row = np.asarray([values], np.float64)
    largest = np.abs(row).max()
    if not largest:
        raise invalid("vector is all zero: it has no direction", "vector")
    scaled = row / largest  # or the square of a large number would be infinite
    return np.asarray(scaled / np.linalg.norm(scaled), np.float32)


# --- answers ----------------------------------------------------------------------------------------


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
    """The answer of a search or of ``/similar``, a ``messages.SearchResponse``."""
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


def info(
    tower: messages.TowerInfo,
    arms: list[messages.ArmInfo],
    active: Version,
    content: VersionContent,
    config: ServeConfig,
) -> messages.Info:
    """The answer of ``GET /info``: the arms' towers, the active version of the index and its fields."""
    return messages.Info(
        **tower.model_dump(),
        documents=active.documents,
        index_version=active.name,
        shards=content.layout.shards,
        arms=arms,
        fields={field.name: _field_kind(field.type) for field in content.fields},
        facets={
            name: [messages.Facet(value=value, count=count) for value, count in _most_frequent(values)]
            for name, values in content.facets.items()
        },
        sparse=content.layout.sparse,
        live=config.live is not None,
        max_k=config.limits.max_k,
        max_query_chars=config.limits.max_query_chars,
    )


def _most_frequent(values: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(values.items(), key=lambda item: (-item[1], item[0]))[:MAX_FACET_VALUES]


def _field_kind(dtype: pa.DataType) -> Any:
    if pa.types.is_boolean(dtype):
        return "boolean"
    return "number" if pa.types.is_integer(dtype) or pa.types.is_floating(dtype) else "text"
