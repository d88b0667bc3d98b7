"""A click log nobody clicked: judged pairs in, impressions of a simulated engine and its users out.

    qrels, documents -> exposure (lists in rank order) -> user_model (clicks, dwell) -> IMPRESSIONS

The users follow one of three models (`config.kind`): position-based, cascade or dynamic Bayesian. With the
same seed all three see the same lists at the same times, so that logs differ by the users' ways alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from jaxtyping import Int
from numpy import ndarray

from scalingnote.datasets.config import AnyClickModel
from scalingnote.datasets.exposure import Exposure, Judgements, by_topic, expose, judgements
from scalingnote.datasets.taste import Tastes, numbered, user_ids
from scalingnote.datasets.user_model import Response, browse, by_grade, dwell
from scalingnote.storage.schema import IMPRESSIONS

# Bounds the memory of the (sessions, candidates) matrices: 300 MB for lists of ten. Draws are taken matrix
# by matrix, so that for longer logs another number here makes another log (of the same distribution).
_SESSIONS_AT_A_TIME = 65_536


def simulate(
    qrels: pa.Table,
    *,
    doc_ids: Sequence[str],
    topics: Sequence[str],
    config: AnyClickModel,
    tastes: Tastes | None = None,
) -> pa.Table:
    """IMPRESSIONS of the queries in `qrels`, drawn from the documents of `doc_ids` (with their topics).

    Give it the training queries' qrels and the documents that training may see: nothing else is exposed.
    A query without a relevant document among them is never issued. Equal inputs give equal rows. `tastes` of
    these documents, row by row, make users differ.
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
    """The log of `simulate` in the order of time, piece by piece: for one that does not fit in memory."""
    names = pa.array(doc_ids, pa.string())
    judged = judgements(qrels, names)
    if not len(judged.doc):
        return
    rng = np.random.default_rng(config.seed)
    second, third = rng.spawn(2)
    pool = by_topic(topics)
    sessions = rng.permutation(np.repeat(np.arange(len(judged.query_ids)), config.sessions_per_query))
    for first in range(0, len(sessions), _SESSIONS_AT_A_TIME):
        queries = sessions[first : first + _SESSIONS_AT_A_TIME]
        shown = expose(queries, judged, pool, config=config, rng=rng)
        attraction = by_grade(shown.grades, best=config.attractiveness, other=config.noise)
        # Of a generator of its own: without tastes a log is the same whether or not there could be any.
        picky = third.integers(config.users, size=len(queries)) if tastes else None
        if tastes and picky is not None:
            attraction = attraction * tastes.factor(picky[:, None], shown.docs)
        response = browse(
            np.where(shown.filled, attraction, 0.0),
            by_grade(shown.grades, best=config.satisfaction, other=config.satisfaction_noise),
            config=config,
            rng=rng,
            second=second,
        )
        users = rng.integers(config.users, size=len(queries)) if picky is None else picky
        yield _table(
            queries,
            shown,
            response,
            users,
            judged=judged,
            doc_ids=names,
            first=first,
            config=config,
            rng=second,
        )


def _table(
    queries: Int[ndarray, " sessions"],
    shown: Exposure,
    response: Response,
    users: Int[ndarray, " sessions"],
    *,
    judged: Judgements,
    doc_ids: pa.Array,
    first: int,
    config: AnyClickModel,
    rng: np.random.Generator,
) -> pa.Table:
    """One row per filled place; the chunk's sessions are number `first` and the following ones."""
    session, column = np.nonzero(shown.filled)
    number = first + session
    clicked = response.clicked[shown.filled]
    seconds = np.zeros(len(clicked), np.float32)
    seconds[clicked] = dwell(response.satisfied[response.clicked], config=config, rng=rng)
    epoch = np.datetime64(config.start, "s")
    columns = {
        "session_id": numbered("s-", number),
        "user_id": user_ids(users[session]),
        "query_id": judged.query_ids.take(pa.array(queries[session])),
        "doc_id": doc_ids.take(pa.array(shown.docs[session, column])),
        "position": pa.array(column + 1, pa.int32()),
        "clicked": pa.array(clicked),
        "timestamp": pa.array(epoch + number * config.seconds_between_sessions, pa.timestamp("ms")),
        "dwell_s": pa.array(seconds, pa.float32(), mask=~clicked),
    }
    return pa.table(columns, schema=IMPRESSIONS)
