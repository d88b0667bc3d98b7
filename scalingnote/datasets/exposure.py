"""What a simulated engine shows: each session's documents in rank order, some of them relevant.

A query's relevant documents are exposed among others of their topic and some at random, and ranked by a
Plackett-Luce draw, so that a relevant one is often, not always, near the top. Which of them are clicked is
the user's business (`user_model`), not this file's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.datasets.config import ClickModelConfig


@dataclass(frozen=True)
class Judgements:
    """Relevant pairs by query, then grade (best first): pairs [start, start + count) are a query's."""

    query_ids: pa.Array
    doc: Int[ndarray, " pairs"]
    grade: Float[ndarray, " pairs"]  # over the highest grade: in (0, 1]
    start: Int[ndarray, " queries"]
    count: Int[ndarray, " queries"]
    keys: Int[ndarray, " pairs"]  # query * docs + doc, sorted: membership by binary search


@dataclass(frozen=True)
class Pool:
    """Documents sorted by topic: [start, start + count) of `order` are a topic's."""

    topic: Int[ndarray, " docs"]
    order: Int[ndarray, " docs"]
    start: Int[ndarray, " topics"]
    count: Int[ndarray, " topics"]


@dataclass(frozen=True)
class Exposure:
    """Lists of `k` places, the first is the top. Filled places come before empty ones."""

    docs: Int[ndarray, "sessions k"]
    filled: Bool[ndarray, "sessions k"]
    grades: Float[ndarray, "sessions k"]  # 0 where not relevant


def judgements(qrels: pa.Table, doc_ids: pa.Array) -> Judgements:
    """The relevant pairs of `qrels` whose document is one of `doc_ids` (numbered by its place there)."""
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
    return Judgements(
        query_ids=query_ids,
        doc=docs,
        grade=grade / grade.max(initial=1.0),
        start=np.cumsum(count) - count,
        count=count,
        keys=np.sort(query * len(doc_ids) + docs),
    )


def by_topic(topics: Sequence[str]) -> Pool:
    """The documents, given by their topics, as a pool to draw from."""
    codes = pa.array(topics, pa.string()).dictionary_encode().indices.to_numpy().astype(np.int64)
    count = np.bincount(codes)
    return Pool(codes, np.argsort(codes, kind="stable"), np.cumsum(count) - count, count)


def expose(
    queries: Int[ndarray, " sessions"],
    judged: Judgements,
    pool: Pool,
    *,
    config: ClickModelConfig,
    rng: np.random.Generator,
) -> Exposure:
    """One list for each of `queries` (numbers of `judged`): no document twice, short if the pool is small."""
    length = config.results_per_session
    relevant = min(config.relevant_per_session, length)
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
    return Exposure(docs, valid, grades)


def _repeated(docs: Int[ndarray, "sessions k"]) -> Bool[ndarray, "sessions k"]:
    """Whether the same row holds this document further left."""
    order = np.argsort(docs, axis=1, kind="stable")
    ordered = np.take_along_axis(docs, order, axis=1)
    again = np.zeros(docs.shape, dtype=bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = np.empty_like(again)
    np.put_along_axis(repeated, order, again, axis=1)
    return repeated
