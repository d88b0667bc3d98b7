"""Simulated click logs: judged pairs become impressions of a simulated engine and its users.

    qrels, documents -> result lists in rank order -> clicks and dwell times of users -> IMPRESSIONS

A query's relevant documents are shown among others of their topic and some random ones, ranked by a
Plackett-Luce draw, so that a relevant one is often, but not always, near the top. The users follow one of
three models (`config.kind`): position-based, cascade or dynamic Bayesian. In all of them a result is clicked
if it is examined and attractive, and a click satisfies with its own probability; the models differ in which
places are examined. With the same seed all three see the same lists at the same times, so that their logs
differ only by the behavior of the users.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.datasets import config as configs
from scalingnote.datasets.config import AnyClickModel, ClickModelConfig, Taste
from scalingnote.errors import ConfigError
from scalingnote.storage.schema import IMPRESSIONS

# Bounds the memory of the (sessions, candidates) matrices: 300 MB for lists of ten. Random numbers are drawn
# chunk by chunk, so a log longer than one chunk changes with this number (its distribution does not).
_SESSIONS_PER_CHUNK = 65_536
BANDS = ("low", "middle", "high")


@dataclass(frozen=True)
class UserResponse:
    """Clicks at each place of each list."""

    clicked: Bool[ndarray, "sessions k"]
    satisfied: Bool[ndarray, "sessions k"]  # only where clicked


def browse(
    attraction: Float[ndarray, "sessions k"],
    satisfaction: Float[ndarray, "sessions k"],
    *,
    config: AnyClickModel,
    rng: np.random.Generator,
    second: np.random.Generator,
) -> UserResponse:
    """Simulate the clicks of one user per list.

    Args:
        attraction: P(click | examined) of each place.
        satisfaction: P(satisfied | clicked) of each place.
        config: selects the click model by its class.
        rng: every model takes the same number of draws from it, so that later draws (lists, users) do not
            depend on the model.
        second: generator for the draws that only some models make.
    """
    uniform = rng.random(attraction.shape)
    satisfying = second.random(attraction.shape) < satisfaction
    match config:
        case configs.PositionClicks():
            clicked = uniform < examination_probabilities(attraction.shape[1], eta=config.eta) * attraction
        case configs.CascadeClicks():
            attractive = uniform < attraction
            clicked = attractive & _reached(~attractive)
        case configs.DynamicBayesianClicks():
            attractive = uniform < attraction
            persevering = second.random(attraction.shape) < config.perseverance
            clicked = attractive & _reached(~(attractive & satisfying) & persevering)
    return UserResponse(clicked, clicked & satisfying)


def examination_probabilities(positions: int, *, eta: float) -> Float[ndarray, " positions"]:
    """P(examined) of positions 1, 2, ... in the position-based model: 1 / position ** eta."""
    return np.arange(1, positions + 1, dtype=np.float64) ** -eta


def probability_by_grade(
    grades: Float[ndarray, "*shape"], *, best: float, other: float
) -> Float[ndarray, "*shape"]:
    """A probability for each grade in [0, 1]: `best` for grade 1, proportional below, at least `other`."""
    return np.where(grades > 0, np.maximum(best * grades, other), other)


def draw_dwell_times(
    satisfied: Bool[ndarray, " clicks"], *, config: ClickModelConfig, rng: np.random.Generator
) -> Float[ndarray, " clicks"]:
    """Seconds spent on each clicked document: lognormal, with the median of its kind of click."""
    median = np.where(satisfied, config.satisfied_dwell_s, config.unsatisfied_dwell_s)
    return median * np.exp(config.dwell_sigma * rng.standard_normal(satisfied.shape))


def _reached(continues: Bool[ndarray, "sessions k"]) -> Bool[ndarray, "sessions k"]:
    """Whether a user who reads from the top reaches each place; `continues` says where they would read on."""
    reached = np.ones_like(continues)
    np.logical_and.accumulate(continues[:, :-1], axis=1, out=reached[:, 1:])
    return reached


@dataclass(frozen=True)
class Tastes:
    """Preferences of all users for the documents whose features were given to :meth:`draw`.

    A user likes some values of a text column (brands, drawn by frequency) and a range of a number column
    (a price band). A document without a value is neither liked nor disliked.
    """

    config: Taste
    likes: tuple["_LikedValues | _LikedRange", ...]
    profile_columns: tuple[tuple[str, pa.Array], ...]
    rows: Int[ndarray, " docs"]  # of each document among those given to `draw`

    @classmethod
    def draw(cls, config: Taste, documents: pa.Table, *, users: int, seed: int) -> "Tastes":
        """Draw the tastes of `users` users; equal inputs give equal tastes.

        Raises:
            ConfigError: a column of `config` has no value in any document.
        """
        likes: list[_LikedValues | _LikedRange] = []
        profiles: list[tuple[str, pa.Array]] = []
        rng = np.random.default_rng([seed, 0x7A57E])
        for name in config.columns:
            column = documents[name].combine_chunks()
            kind = _LikedValues if pa.types.is_string(column.type) else _LikedRange
            like = kind.draw(column, config, users, rng)
            if not like.any_value():
                raise ConfigError(f"click_model.taste names {name!r}, which has no value in any document")
            # As in real profiles, some users do not say what they like.
            undisclosed = rng.random(users) >= config.told
            likes.append(like)
            profiles.append((f"liked_{name}", pa.array(like.favorites(), pa.string(), mask=undisclosed)))
        return cls(config, tuple(likes), tuple(profiles), np.arange(len(documents)))

    def factor(
        self, users: Int[ndarray, "*#rows"], documents: Int[ndarray, "*#rows"]
    ) -> Float[ndarray, "..."]:
        """Multiplier of a document's attraction to a user: 1 if nothing about it is disliked."""
        out = np.ones(np.broadcast_shapes(users.shape, documents.shape))
        for like in self.likes:
            out = np.where(like.disliked(users, self.rows[documents]), out * (1 - self.config.strength), out)
        return out

    def of_documents(self, rows: Sequence[int] | Int[ndarray, " rows"]) -> "Tastes":
        """The same tastes for a subset of the documents, which are renumbered."""
        return replace(self, rows=self.rows[np.asarray(rows, np.int64)])

    def profiles(self) -> pa.Table:
        """USERS with a column ``liked_{column}``: a value, or one of BANDS; null if the user does not say."""
        users = len(self.profile_columns[0][1])
        return pa.table({"user_id": numbered_ids("u-", np.arange(users)), **dict(self.profile_columns)})


def numbered_ids(prefix: str, numbers: Int[ndarray, " rows"]) -> pa.Array:
    """Zero-padded ids, which sort in the order of their numbers."""
    text = pc.utf8_lpad(pa.array(numbers).cast(pa.string()), 8, "0")
    return pc.binary_join_element_wise(prefix, text, "")


@dataclass(frozen=True)
class _LikedValues:
    names: list[str]
    liked: Int[ndarray, "users liked"]  # indices into `names`, favorite first
    value: Int[ndarray, " docs"]  # index into `names`; -1 for a document without a value

    @classmethod
    def draw(cls, column: pa.Array, config: Taste, users: int, rng: np.random.Generator) -> "_LikedValues":
        coded = pc.dictionary_encode(pc.if_else(pc.equal(column, ""), None, column))
        value = pc.fill_null(coded.indices, -1).to_numpy().astype(np.int64)
        share = np.bincount(value[value >= 0], minlength=len(coded.dictionary)).astype(np.float64)
        # The largest of log share + Gumbel noise are a draw without replacement, proportional to share.
        keys = np.log(share) + rng.gumbel(size=(users, len(share)))
        liked = np.argsort(-keys, axis=1, kind="stable")[:, : config.values]
        return cls(coded.dictionary.to_pylist(), liked, value)

    def any_value(self) -> bool:
        return bool((self.value >= 0).any())

    def favorites(self) -> list[str]:
        return [self.names[row[0]] for row in self.liked]

    def disliked(self, users: ndarray, documents: ndarray) -> ndarray:
        liked = np.zeros((len(self.liked), len(self.names)), bool)
        np.put_along_axis(liked, self.liked, True, axis=1)
        value = self.value[documents]
        return np.asarray((value >= 0) & ~liked[users, value])


@dataclass(frozen=True)
class _LikedRange:
    low: Float[ndarray, " users"]  # ranks in [0, 1]
    high: Float[ndarray, " users"]
    rank: Float[ndarray, " docs"]  # NaN for a document without a number

    @classmethod
    def draw(cls, column: pa.Array, config: Taste, users: int, rng: np.random.Generator) -> "_LikedRange":
        numbers = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
        finite = np.isfinite(numbers)
        rank = np.full(len(numbers), np.nan)
        order = np.sort(numbers[finite])
        rank[finite] = np.searchsorted(order, numbers[finite], side="right") / max(len(order), 1)
        low = rng.random(users) * (1 - config.band)
        return cls(low, low + config.band, rank)

    def any_value(self) -> bool:
        return bool(np.isfinite(self.rank).any())

    def favorites(self) -> list[str]:
        span = np.maximum(1 - (self.high - self.low), 1e-9)
        return [BANDS[min(int(3 * place), 2)] for place in (self.low / span).tolist()]

    def disliked(self, users: ndarray, documents: ndarray) -> ndarray:
        rank = self.rank[documents]
        return np.asarray((rank < self.low[users]) | (rank > self.high[users]))


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
) -> Iterator[pa.Table]:
    """Simulate a click log: IMPRESSIONS in chunks, in the order of time. Equal inputs give equal rows.

    Args:
        qrels: judgements of the training queries (QRELS). A query without a relevant document in `doc_ids` is
            never issued.
        doc_ids: the documents that training may see; no other document is shown.
        topics: the topic of each document of `doc_ids`.
        config: the click model and its parameters.
        tastes: user preferences for the documents of `doc_ids`; None if all users are alike.
    """
    names = pa.array(doc_ids, pa.string())
    judged = judged_pairs(qrels, names)
    if not len(judged.doc):
        yield IMPRESSIONS.empty_table()
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
        dwell_s = np.zeros(shown.filled.shape, np.float32)
        clicked = shown.filled & response.clicked
        dwell_s[clicked] = draw_dwell_times(response.satisfied[clicked], config=config, rng=behavior_rng)
        yield _impressions(
            np.arange(first, first + len(queries)),
            judged.query_ids.take(pa.array(queries)),
            numbered_ids("u-", users),
            names,
            shown,
            clicked,
            dwell_s,
            config=config,
        )


def _impressions(
    numbers: Int[ndarray, " sessions"],
    query_ids: pa.Array,
    user_ids: pa.Array,
    doc_ids: pa.Array,
    shown: ResultLists,
    clicked: Bool[ndarray, "sessions k"],
    dwell_s: Float[ndarray, "sessions k"],
    *,
    config: ClickModelConfig,
) -> pa.Table:
    """One row per filled place."""
    session, column = np.nonzero(shown.filled)
    row = pa.array(session)
    number = numbers[session]
    epoch = np.datetime64(config.start, "s")
    columns = {
        "session_id": numbered_ids("s-", number),
        "user_id": user_ids.take(row),
        "query_id": query_ids.take(row),
        "doc_id": doc_ids.take(pa.array(shown.docs[session, column])),
        "position": pa.array(column + 1, pa.int32()),
        "clicked": pa.array(clicked[shown.filled]),
        "timestamp": pa.array(epoch + number * config.seconds_between_sessions, pa.timestamp("ms")),
        "dwell_s": pa.array(dwell_s[shown.filled], pa.float32(), mask=~clicked[shown.filled]),
    }
    return pa.table(columns, schema=IMPRESSIONS)
