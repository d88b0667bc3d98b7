"""Simulated click logs: judged pairs become impressions of a simulated engine and its users.

    qrels, documents -> result lists in rank order -> clicks and dwell times of users -> IMPRESSIONS

A query's relevant documents are shown among others of their topic and some random ones, ranked by a
Plackett-Luce draw, so that a relevant one is often, but not always, near the top. Users follow the
position-based model (Craswell et al. 2008): a result is clicked if its position is examined and it is
attractive. A click satisfies with a separate probability.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.datasets.config import PositionClicks
from scalingnote.storage.schema import IMPRESSIONS

# Bounds the memory of the (sessions, candidates) matrices: 300 MB for lists of ten. Random numbers are drawn
# chunk by chunk, so a log longer than one chunk changes with this number (its distribution does not).
_SESSIONS_PER_CHUNK = 65_536
SESSIONS_PER_QUERY = 3
RESULTS_PER_SESSION = 10
_RELEVANT_PER_SESSION = 3  # at most
_SAME_TOPIC_SHARE = 0.7  # of the non-relevant exposures, which are drawn from the relevant document's topic
# P(click | examined) and P(satisfied | clicked) of the highest grade, with lower grades in proportion; and
# P(satisfied | clicked) of a non-relevant document.
ATTRACTIVENESS, SATISFACTION, SATISFACTION_NOISE = 0.9, 0.8, 0.05
CLICK_NOISE = 0.05  # P(click | examined) of a non-relevant document
# Median seconds on a document, and the spread: standard deviation of their natural logarithm. So 81 % of the
# satisfied clicks and 8 % of the others last the customary 30 s (Fox et al. 2005).
_SATISFIED_DWELL_S, _UNSATISFIED_DWELL_S, _DWELL_SIGMA = 60.0, 10.0, 0.8
_START = np.datetime64("2024-01-01T00:00:00", "s")  # of the first session, UTC
_SECONDS_BETWEEN_SESSIONS = 30


def browse(
    attraction: Float[ndarray, "sessions k"],
    satisfaction: Float[ndarray, "sessions k"],
    *,
    eta: float,
    rng: np.random.Generator,
    satisfaction_rng: np.random.Generator,
) -> tuple[Bool[ndarray, "sessions k"], Bool[ndarray, "sessions k"]]:
    """Simulate one user per list; return which places are clicked, and which clicks satisfy.

    Args:
        attraction: P(click | examined) of each place.
        satisfaction: P(satisfied | clicked) of each place.
        eta: position bias: P(examined) of positions 1, 2, ... is 1 / position ** eta.
        rng: of clicks.
        satisfaction_rng: of satisfaction.
    """
    examination = np.arange(1, attraction.shape[1] + 1, dtype=np.float64) ** -eta
    clicked = rng.random(attraction.shape) < examination * attraction
    return clicked, clicked & (satisfaction_rng.random(attraction.shape) < satisfaction)


def probability_by_grade(
    grades: Float[ndarray, "*shape"], *, best: float, other: float
) -> Float[ndarray, "*shape"]:
    """Map each grade in [0, 1] to a probability: `best` for grade 1, proportional below, at least `other`."""
    return np.where(grades > 0, np.maximum(best * grades, other), other)


def draw_dwell_times(
    satisfied: Bool[ndarray, " clicks"], *, rng: np.random.Generator
) -> Float[ndarray, " clicks"]:
    """Draw the seconds spent on each clicked document: lognormal, with the median of its kind of click."""
    median = np.where(satisfied, _SATISFIED_DWELL_S, _UNSATISFIED_DWELL_S)
    return median * np.exp(_DWELL_SIGMA * rng.standard_normal(satisfied.shape))


@dataclass(frozen=True)
class JudgedPairs:
    """Relevant pairs sorted by query, then grade (best first): a query has pairs [start, start + count)."""

    query_ids: pa.Array
    doc: Int[ndarray, " pairs"]
    grade: Float[ndarray, " pairs"]  # divided by the highest grade: in (0, 1]
    start: Int[ndarray, " queries"]
    count: Int[ndarray, " queries"]
    keys: Int[ndarray, " pairs"]  # query * number of documents + doc, sorted for binary search


class ResultLists(NamedTuple):
    """Ranked lists of `k` places, best first. Filled places come before empty ones."""

    docs: Int[ndarray, "sessions k"]
    filled: Bool[ndarray, "sessions k"]
    grades: Float[ndarray, "sessions k"]  # 0 if not relevant


def judged_pairs(qrels: pa.Table, doc_ids: pa.Array) -> JudgedPairs:
    """Select the relevant pairs of `qrels` with a document in `doc_ids`; a document is its index there."""
    doc = pc.index_in(qrels["doc_id"], value_set=doc_ids)
    usable = pc.and_(pc.is_valid(doc), pc.greater(qrels["relevance"], 0))
    relevant = qrels.append_column("doc", doc).filter(usable).combine_chunks()
    query_ids = relevant["query_id"].unique()
    query = pc.index_in(relevant["query_id"], value_set=query_ids).to_numpy().astype(np.int64)
    docs = relevant["doc"].to_numpy().astype(np.int64)
    grade = relevant["relevance"].to_numpy().astype(np.float64)
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


def draw_result_lists(
    queries: Int[ndarray, " sessions"],
    judged: JudgedPairs,
    topics: Int[ndarray, " docs"],
    by_topic: Int[ndarray, " docs"],
    *,
    config: PositionClicks,
    rng: np.random.Generator,
) -> ResultLists:
    """Draw a list for each of `queries` (indices into `judged`).

    `topics` has the number of each document's topic; `by_topic` has the documents sorted by topic. No list
    repeats a document. A list is shorter than RESULTS_PER_SESSION if there are few documents.
    """
    length = RESULTS_PER_SESSION
    relevant = min(_RELEVANT_PER_SESSION, length)
    count, start = judged.count[queries, None], judged.start[queries, None]
    # A cyclic window of the query's relevant documents, starting at a random one.
    offsets = rng.integers(count) + np.arange(relevant)
    pairs = start + offsets % count
    relevant_docs, grade = judged.doc[pairs], judged.grade[pairs]
    relevant_valid = np.broadcast_to(np.arange(relevant), pairs.shape) < count

    # Twice as many candidates as places, because relevant and repeated ones are dropped.
    shape = (len(queries), 2 * length)
    topic, size = topics[relevant_docs[:, 0]][:, None], np.bincount(topics)
    begin = (np.cumsum(size) - size)[topic]  # in `by_topic`
    same_topic = by_topic[begin + (rng.random(shape) * size[topic]).astype(np.int64)]
    others = np.where(
        rng.random(shape) < _SAME_TOPIC_SHARE, same_topic, rng.integers(len(topics), size=shape)
    )
    keys = queries[:, None] * len(topics) + others
    places = np.minimum(np.searchsorted(judged.keys, keys), len(judged.keys) - 1)
    others_valid = (judged.keys[places] != keys) & ~_repeats(others)

    docs = np.concatenate([relevant_docs, others], axis=1)
    valid = np.concatenate([relevant_valid, others_valid], axis=1)
    grades = np.concatenate([grade, np.zeros(shape)], axis=1)
    valid &= np.cumsum(valid, axis=1) <= length

    # Sorting by utility + Gumbel noise is a Plackett-Luce draw.
    utility = config.ranker_skill * grades + rng.gumbel(size=docs.shape)
    order = np.argsort(np.where(valid, -utility, np.inf), axis=1, kind="stable")[:, :length]
    docs, valid, grades = (np.take_along_axis(matrix, order, axis=1) for matrix in (docs, valid, grades))
    return ResultLists(docs, valid, grades)


def _repeats(docs: Int[ndarray, "sessions k"]) -> Bool[ndarray, "sessions k"]:
    """Return whether the same row has this document further left."""
    order = np.argsort(docs, axis=1, kind="stable")
    ordered = np.take_along_axis(docs, order, axis=1)
    again = np.zeros(docs.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.empty_like(again)
    np.put_along_axis(repeated, order, again, axis=1)
    return repeated


def simulate(
    qrels: pa.Table, *, doc_ids: Sequence[str], topics: Sequence[str], config: PositionClicks
) -> Iterator[pa.Table]:
    """Simulate a click log and yield IMPRESSIONS in chunks, by time. Equal inputs give equal rows.

    Args:
        qrels: judgements of the training queries (QRELS). A query without a relevant document in `doc_ids` is
            never issued.
        doc_ids: the documents that training may see; no other document is shown.
        topics: the topic of each document of `doc_ids`.
        config: the parameters of the click model.
    """
    names = pa.array(doc_ids, pa.string())
    judged = judged_pairs(qrels, names)
    if not len(judged.doc):
        yield IMPRESSIONS.empty_table()
        return
    rng = np.random.default_rng(config.seed)
    (behavior_rng,) = rng.spawn(1)  # separate, so that lists and clicks do not depend on satisfaction
    topic_numbers = pa.array(topics, pa.string()).dictionary_encode().indices.to_numpy().astype(np.int64)
    by_topic = np.argsort(topic_numbers, kind="stable")
    sessions = rng.permutation(np.repeat(np.arange(len(judged.query_ids)), SESSIONS_PER_QUERY))
    for first in range(0, len(sessions), _SESSIONS_PER_CHUNK):
        queries = sessions[first : first + _SESSIONS_PER_CHUNK]
        lists = draw_result_lists(queries, judged, topic_numbers, by_topic, config=config, rng=rng)
        attraction = probability_by_grade(lists.grades, best=ATTRACTIVENESS, other=CLICK_NOISE)
        clicked, satisfied = browse(
            np.where(lists.filled, attraction, 0.0),
            probability_by_grade(lists.grades, best=SATISFACTION, other=SATISFACTION_NOISE),
            eta=config.eta,
            rng=rng,
            satisfaction_rng=behavior_rng,
        )
        users = rng.integers(config.users, size=len(queries))
        dwell_s = np.zeros(clicked.shape, np.float32)
        dwell_s[clicked] = draw_dwell_times(satisfied[clicked], rng=behavior_rng)
        session, place = np.nonzero(lists.filled)
        number = first + session
        columns = {
            "session_id": _numbered_ids("s-", number),
            "user_id": _numbered_ids("u-", users[session]),
            "query_id": judged.query_ids.take(pa.array(queries[session])),
            "doc_id": names.take(pa.array(lists.docs[lists.filled])),
            "position": pa.array(place + 1, pa.int32()),
            "clicked": pa.array(clicked[lists.filled]),
            "timestamp": pa.array(_START + number * _SECONDS_BETWEEN_SESSIONS, pa.timestamp("ms")),
            "dwell_s": pa.array(dwell_s[lists.filled], pa.float32(), mask=~clicked[lists.filled]),
        }
        yield pa.table(columns, schema=IMPRESSIONS)


def _numbered_ids(prefix: str, numbers: Int[ndarray, " rows"]) -> pa.Array:
    """Format zero-padded ids, which sort in the order of their numbers."""
    text = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 8, "0")
    return pc.binary_join_element_wise(prefix, text, "")
