"""Simulated click logs: judged pairs become impressions of a simulated engine and its users.

    qrels, documents -> result lists in rank order -> `user_behavior` (clicks, dwell times) -> IMPRESSIONS

A query's relevant documents are shown among others of their topic and some random ones, ranked by a
Plackett-Luce draw, so that a relevant one is often, but not always, near the top. The users follow one of
three models (`config.kind`): position-based, cascade or dynamic Bayesian. With the same seed all three see
the same lists at the same times, so that their logs differ only by the behavior of the users.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.datasets.config import AnyClickModel, ClickModelConfig
from scalingnote.datasets.user_behavior import (
    Tastes,
    UserResponse,
    browse,
    draw_dwell_times,
    numbered_ids,
    probability_by_grade,
    user_ids,
)
from scalingnote.storage.schema import IMPRESSIONS

# Bounds the memory of the (sessions, candidates) matrices: 300 MB for lists of ten. Random numbers are drawn
# chunk by chunk, so a log longer than one chunk changes with this number (its distribution does not).
_SESSIONS_PER_CHUNK = 65_536


@dataclass(frozen=True)
class JudgedPairs:
    """Relevant pairs sorted by query, then grade (best first): a query owns pairs [start, start + count)."""

    query_ids: pa.Array
    doc: Int[ndarray, " pairs"]
    grade: Float[ndarray, " pairs"]  # divided by the highest grade: in (0, 1]
    start: Int[ndarray, " queries"]
    count: Int[ndarray, " queries"]
    keys: Int[ndarray, " pairs"]  # query * number of documents + doc, sorted for binary search


@dataclass(frozen=True)
class TopicPool:
    """Documents sorted by topic: a topic owns `order[start : start + count]`."""

    topic: Int[ndarray, " docs"]
    order: Int[ndarray, " docs"]
    start: Int[ndarray, " topics"]
    count: Int[ndarray, " topics"]


@dataclass(frozen=True)
class ResultLists:
    """Ranked lists of `k` places, best first. Filled places come before empty ones."""

    docs: Int[ndarray, "sessions k"]
    filled: Bool[ndarray, "sessions k"]
    grades: Float[ndarray, "sessions k"]  # 0 where not relevant


def judged_pairs(qrels: pa.Table, doc_ids: pa.Array) -> JudgedPairs:
    """The relevant pairs of `qrels` whose document is in `doc_ids`; a document is its index there."""
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
    return JudgedPairs(
        query_ids=query_ids,
        doc=docs,
        grade=grade / grade.max(initial=1.0),
        start=np.cumsum(count) - count,
        count=count,
        keys=np.sort(query * len(doc_ids) + docs),
    )


def pool_by_topic(topics: Sequence[str]) -> TopicPool:
    """Group the documents by their topics, one topic per document."""
    codes = pa.array(topics, pa.string()).dictionary_encode().indices.to_numpy().astype(np.int64)
    count = np.bincount(codes)
    return TopicPool(codes, np.argsort(codes, kind="stable"), np.cumsum(count) - count, count)


def draw_result_lists(
    queries: Int[ndarray, " sessions"],
    judged: JudgedPairs,
    pool: TopicPool,
    *,
    config: ClickModelConfig,
    rng: np.random.Generator,
) -> ResultLists:
    """Draw a list for each of `queries` (indices into `judged`).

    No list repeats a document; a list is shorter than `results_per_session` if the pool is small.
    """
    length = config.results_per_session
    relevant = min(config.relevant_per_session, length)
    count, start = judged.count[queries, None], judged.start[queries, None]
    # A cyclic window of the query's relevant documents, starting at a random one.
    offsets = rng.integers(count) + np.arange(relevant)
    pairs = start + offsets % count
    chosen, grade = judged.doc[pairs], judged.grade[pairs]
    chosen_valid = np.broadcast_to(np.arange(relevant), pairs.shape) < count

    # Twice as many candidates as places: those that are relevant or repeated are dropped.
    shape = (len(queries), 2 * length)
    topic = pool.topic[chosen[:, 0]][:, None]
    same_topic = pool.order[pool.start[topic] + (rng.random(shape) * pool.count[topic]).astype(np.int64)]
    others = np.where(
        rng.random(shape) < config.same_topic_share, same_topic, rng.integers(len(pool.topic), size=shape)
    )
    keys = queries[:, None] * len(pool.topic) + others
    at = np.minimum(np.searchsorted(judged.keys, keys), len(judged.keys) - 1)
    others_valid = (judged.keys[at] != keys) & ~_repeats(others)

    docs = np.concatenate([chosen, others], axis=1)
    valid = np.concatenate([chosen_valid, others_valid], axis=1)
    grades = np.concatenate([grade, np.zeros(shape)], axis=1)
    valid &= np.cumsum(valid, axis=1) <= length

    # Sorting by utility + Gumbel noise is a Plackett-Luce draw.
    utility = config.ranker_skill * grades + rng.gumbel(size=docs.shape)
    order = np.argsort(np.where(valid, -utility, np.inf), axis=1, kind="stable")[:, :length]
    docs, valid, grades = (np.take_along_axis(matrix, order, axis=1) for matrix in (docs, valid, grades))
    return ResultLists(docs, valid, grades)


def _repeats(docs: Int[ndarray, "sessions k"]) -> Bool[ndarray, "sessions k"]:
    """Whether the same row has this document further left."""
    order = np.argsort(docs, axis=1, kind="stable")
    ordered = np.take_along_axis(docs, order, axis=1)
    again = np.zeros(docs.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.empty_like(again)
    np.put_along_axis(repeated, order, again, axis=1)
    return repeated


def simulate(
    qrels: pa.Table,
    *,
    doc_ids: Sequence[str],
    topics: Sequence[str],
    config: AnyClickModel,
    tastes: Tastes | None = None,
) -> pa.Table:
    """Simulate a click log. Equal inputs give equal rows.

    Args:
        qrels: judgements of the training queries (QRELS). A query without a relevant document in `doc_ids` is
            never issued.
        doc_ids: the documents that training may see; no other document is shown.
        topics: the topic of each document of `doc_ids`.
        config: the click model and its parameters.
        tastes: user preferences for the documents of `doc_ids`, in the same order; None if all users are
            alike.

    Returns:
        IMPRESSIONS in the order of time.
    """
    chunks = simulate_chunks(qrels, doc_ids=doc_ids, topics=topics, config=config, tastes=tastes)
    return pa.concat_tables([IMPRESSIONS.empty_table(), *chunks]).combine_chunks()


def simulate_chunks(
    qrels: pa.Table,
    *,
    doc_ids: Sequence[str],
    topics: Sequence[str],
    config: AnyClickModel,
    tastes: Tastes | None = None,
) -> Iterator[pa.Table]:
    """The log of `simulate` in chunks, in the order of time: for logs that do not fit in memory."""
    names = pa.array(doc_ids, pa.string())
    judged = judged_pairs(qrels, names)
    if not len(judged.doc):
        return
    rng = np.random.default_rng(config.seed)
    # Generators of their own, so that lists and times depend neither on the click model nor on tastes.
    behavior_rng, taste_rng = rng.spawn(2)
    pool = pool_by_topic(topics)
    sessions = rng.permutation(np.repeat(np.arange(len(judged.query_ids)), config.sessions_per_query))
    for first in range(0, len(sessions), _SESSIONS_PER_CHUNK):
        queries = sessions[first : first + _SESSIONS_PER_CHUNK]
        shown = draw_result_lists(queries, judged, pool, config=config, rng=rng)
        attraction = probability_by_grade(shown.grades, best=config.attractiveness, other=config.noise)
        if tastes:
            users = taste_rng.integers(config.users, size=len(queries))
            attraction = attraction * tastes.factor(users[:, None], shown.docs)
        response = browse(
            np.where(shown.filled, attraction, 0.0),
            probability_by_grade(shown.grades, best=config.satisfaction, other=config.satisfaction_noise),
            config=config,
            rng=rng,
            second=behavior_rng,
        )
        if not tastes:
            users = rng.integers(config.users, size=len(queries))
        yield _impressions(
            queries,
            shown,
            response,
            users,
            judged=judged,
            doc_ids=names,
            first=first,
            config=config,
            rng=behavior_rng,
        )


def _impressions(
    queries: Int[ndarray, " sessions"],
    shown: ResultLists,
    response: UserResponse,
    users: Int[ndarray, " sessions"],
    *,
    judged: JudgedPairs,
    doc_ids: pa.Array,
    first: int,
    config: AnyClickModel,
    rng: np.random.Generator,
) -> pa.Table:
    """One row per filled place; the sessions of the chunk are numbered from `first`."""
    session, column = np.nonzero(shown.filled)
    number = first + session
    clicked = response.clicked[shown.filled]
    seconds = np.zeros(len(clicked), np.float32)
    seconds[clicked] = draw_dwell_times(response.satisfied[response.clicked], config=config, rng=rng)
    epoch = np.datetime64(config.start, "s")
    columns = {
        "session_id": numbered_ids("s-", number),
        "user_id": user_ids(users[session]),
        "query_id": judged.query_ids.take(pa.array(queries[session])),
        "doc_id": doc_ids.take(pa.array(shown.docs[session, column])),
        "position": pa.array(column + 1, pa.int32()),
        "clicked": pa.array(clicked),
        "timestamp": pa.array(epoch + number * config.seconds_between_sessions, pa.timestamp("ms")),
        "dwell_s": pa.array(seconds, pa.float32(), mask=~clicked),
    }
    return pa.table(columns, schema=IMPRESSIONS)
