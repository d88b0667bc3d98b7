"""A click log nobody clicked: judged pairs in, position-biased impressions out.

The examination hypothesis (Craswell et al. 2008): a result is clicked when it is examined, which depends
on its position alone, and found attractive, which depends on its relevance alone. The simulated engine
exposes a query's relevant documents among others of their topic and some at random, and ranks them by a
Plackett-Luce draw, so that a relevant one is often, not always, near the top.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.datasets.config import ClickModelConfig
from scalingnote.storage.schema import IMPRESSIONS

_SESSIONS_AT_A_TIME = 65_536  # bounds the memory of the (sessions, candidates) matrices


def simulate(
    qrels: pa.Table, *, doc_ids: Sequence[str], topics: Sequence[str], config: ClickModelConfig
) -> pa.Table:
    """IMPRESSIONS of the queries in `qrels`, drawn from the documents of `doc_ids` (with their topics).

    Give it the training queries' qrels and the documents that training may see: nothing else is exposed.
    A query without a relevant document among them is never issued. Equal inputs give equal rows.
    """
    names = pa.array(doc_ids, pa.string())
    judged = _judgements(qrels, names)
    if not len(judged.doc):
        return IMPRESSIONS.empty_table()
    rng = np.random.default_rng(config.seed)
    pool = _by_topic(topics)
    sessions = rng.permutation(np.repeat(np.arange(len(judged.query_ids)), config.sessions_per_query))
    tables = [
        _table(judged, names, *_chunk(chunk, judged, pool, config=config, rng=rng), rng=rng, config=config,
               first=first, queries=chunk)
        for first in range(0, len(sessions), _SESSIONS_AT_A_TIME)
        for chunk in [sessions[first : first + _SESSIONS_AT_A_TIME]]
    ]  # fmt: skip
    return pa.concat_tables(tables).combine_chunks()


def examination(positions: int, *, eta: float) -> Float[ndarray, " positions"]:
    """P(examined) of positions 1, 2, ...: 1 / position ** eta."""
    return np.arange(1, positions + 1, dtype=np.float64) ** -eta


@dataclass(frozen=True)
class _Judgements:
    """Relevant pairs by query, then grade (best first): pairs [start, start + count) are a query's."""

    query_ids: pa.Array
    doc: Int[ndarray, " pairs"]
    grade: Float[ndarray, " pairs"]  # over the highest grade: in (0, 1]
    start: Int[ndarray, " queries"]
    count: Int[ndarray, " queries"]
    keys: Int[ndarray, " pairs"]  # query * docs + doc, sorted: membership by binary search


@dataclass(frozen=True)
class _Pool:
    """Documents sorted by topic: [start, start + count) of `order` are a topic's."""

    topic: Int[ndarray, " docs"]
    order: Int[ndarray, " docs"]
    start: Int[ndarray, " topics"]
    count: Int[ndarray, " topics"]


def _judgements(qrels: pa.Table, doc_ids: pa.Array) -> _Judgements:
    doc = pc.index_in(qrels["doc_id"], value_set=doc_ids)
    usable = pc.and_(pc.is_valid(doc), pc.greater(qrels["relevance"], 0))
    kept = qrels.append_column("doc", doc).filter(usable).combine_chunks()
    query_ids = kept["query_id"].unique()
    query = pc.index_in(kept["query_id"], value_set=query_ids).to_numpy().astype(np.int64)
    docs = kept["doc"].to_numpy().astype(np.int64)
    grade = kept["relevance"].to_numpy().astype(np.float64)
    order = np.lexsort((docs, -grade, query))
    query, docs, grade = query[order], docs[order], grade[order]
    count = np.bincount(query, minlength=len(query_ids))
    return _Judgements(
        query_ids=query_ids,
        doc=docs,
        grade=grade / grade.max(initial=1.0),
        start=np.cumsum(count) - count,
        count=count,
        keys=np.sort(query * len(doc_ids) + docs),
    )


def _by_topic(topics: Sequence[str]) -> _Pool:
    codes = pa.array(topics, pa.string()).dictionary_encode().indices.to_numpy().astype(np.int64)
    count = np.bincount(codes)
    return _Pool(codes, np.argsort(codes, kind="stable"), np.cumsum(count) - count, count)


def _chunk(
    queries: Int[ndarray, " sessions"],
    judged: _Judgements,
    pool: _Pool,
    *,
    config: ClickModelConfig,
    rng: np.random.Generator,
) -> tuple[Int[ndarray, "sessions k"], Bool[ndarray, "sessions k"], Bool[ndarray, "sessions k"]]:
    """Exposed documents in rank order, whether each place is filled, whether it was clicked."""
    length, relevant = (
        config.results_per_session,
        min(config.relevant_per_session, config.results_per_session),
    )
    count, start = judged.count[queries, None], judged.start[queries, None]
    # A window of the query's relevant documents, from a random one on, around the end.
    offsets = rng.integers(count) + np.arange(relevant)
    pairs = start + offsets % count
    chosen, grade = judged.doc[pairs], judged.grade[pairs]
    chosen_valid = np.broadcast_to(np.arange(relevant), pairs.shape) < count

    # Twice as many others as there are places: some fall out as relevant or drawn twice.
    shape = (len(queries), 2 * length)
    topic = pool.topic[chosen[:, 0]][:, None]
    alike = pool.order[pool.start[topic] + (rng.random(shape) * pool.count[topic]).astype(np.int64)]
    others = np.where(
        rng.random(shape) < config.same_topic_share, alike, rng.integers(len(pool.topic), size=shape)
    )
    keys = queries[:, None] * len(pool.topic) + others
    at = np.minimum(np.searchsorted(judged.keys, keys), len(judged.keys) - 1)
    others_valid = (judged.keys[at] != keys) & ~_repeated(others)

    docs = np.concatenate([chosen, others], axis=1)
    valid = np.concatenate([chosen_valid, others_valid], axis=1)
    grades = np.concatenate([grade, np.zeros(shape)], axis=1)
    valid &= np.cumsum(valid, axis=1) <= length

    utility = config.ranker_skill * grades + rng.gumbel(size=docs.shape)
    order = np.argsort(np.where(valid, -utility, np.inf), axis=1, kind="stable")[:, :length]
    docs, valid, grades = (np.take_along_axis(matrix, order, axis=1) for matrix in (docs, valid, grades))
    attraction = np.where(grades > 0, np.maximum(config.attractiveness * grades, config.noise), config.noise)
    clicked = rng.random(docs.shape) < examination(docs.shape[1], eta=config.eta) * attraction
    return docs, valid, clicked & valid


def _repeated(docs: Int[ndarray, "sessions k"]) -> Bool[ndarray, "sessions k"]:
    """Whether the same row holds this document further left."""
    order = np.argsort(docs, axis=1, kind="stable")
    ordered = np.take_along_axis(docs, order, axis=1)
    again = np.zeros(docs.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.empty_like(again)
    np.put_along_axis(repeated, order, again, axis=1)
    return repeated


def _table(
    judged: _Judgements,
    doc_ids: pa.Array,
    docs: Int[ndarray, "sessions k"],
    valid: Bool[ndarray, "sessions k"],
    clicked: Bool[ndarray, "sessions k"],
    *,
    rng: np.random.Generator,
    config: ClickModelConfig,
    first: int,
    queries: Int[ndarray, " sessions"],
) -> pa.Table:
    session, column = np.nonzero(valid)
    number = first + session
    users = rng.integers(config.users, size=len(queries))
    epoch = np.datetime64(config.start, "s")
    columns = {
        "session_id": _numbered("s-", number),
        "user_id": _numbered("u-", users[session]),
        "query_id": judged.query_ids.take(pa.array(queries[session])),
        "doc_id": doc_ids.take(pa.array(docs[session, column])),
        "position": pa.array(column + 1, pa.int32()),
        "clicked": pa.array(clicked[session, column]),
        "timestamp": pa.array(epoch + number * config.seconds_between_sessions, pa.timestamp("ms")),
    }
    return pa.table(columns, schema=IMPRESSIONS)


def _numbered(prefix: str, numbers: Int[ndarray, " rows"]) -> pa.Array:
    text = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 8, "0")
    return pc.binary_join_element_wise(prefix, text, "")
