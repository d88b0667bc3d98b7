"""Escalation: a cheap student encodes every query; uncertain queries are reranked by the teacher.

    query -> student -> search -> best 100 -> scores close together? -> teacher encodes the query -> reranked
                                           -> otherwise: unchanged

A student of the teacher's space finds nearly the same 100 documents, but orders them worse. The standard
deviation of its ten best scores shows where, without training: the order of candidates with similar scores is
uncertain. Document embeddings are the teacher's already, so escalation costs one more encoding, and no second
search.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.errors import ConfigError, SearchError

COMPARED = 10  # best scores whose standard deviation is taken
DEPTH = 100  # candidates of a query that the teacher scores
SHARES = tuple(step / 10 for step in range(11))

Encode = Callable[[Sequence[str]], Float[ndarray, "queries dim"]]
Search = Callable[
    [Float[ndarray, "queries dim"], int], tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]
]
Lookup = Callable[[Int[ndarray, " docs"]], Float[ndarray, "docs dim"]]


def doubt(scores: Float[ndarray, "queries k"]) -> Float[ndarray, " queries"]:
    """How uncertain the student's order is: minus the standard deviation of a query's ten best scores.

    Args:
        scores: best first; -inf where a query has no further candidate.

    Returns:
        At most 0, which is most doubt; -inf where there are fewer than two candidates to order.
    """
    best = scores[:, :COMPARED].astype(np.float64)
    found = np.isfinite(best)
    count = np.maximum(found.sum(axis=1), 1)
    mean = np.where(found, best, 0.0).sum(axis=1) / count
    squares = np.where(found, np.where(found, best, 0.0) - mean[:, None], 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=1) / count)
    return np.where(found.sum(axis=1) > 1, -deviation, -np.inf)


def threshold(doubts: Float[ndarray, " queries"], share: float) -> float:
    """The doubt above which a query escalates, such that at most `share` of these queries do.

    Args:
        doubts: of held-out queries, from :func:`doubt`.
        share: in [0, 1]. 0 gives inf (no query escalates), 1 gives -inf (every query with two candidates).

    Raises:
        ConfigError: `share` is outside [0, 1], or there are no queries to tune on.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of queries that escalate is {share:g}: give a number from 0 to 1")
    if share in (0, 1):
        return float("-inf" if share else "inf")
    if not len(doubts):
        raise ConfigError("no held-out queries to tune the threshold of escalation on: give some")
    most = int(share * len(doubts) + 1e-9)  # 0.29 * 100 is 28.999999999999996
    return float(np.sort(doubts)[::-1][most])


def rerank(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "queries candidates dim"],
    ids: Int[ndarray, "queries candidates"],
) -> tuple[Float[ndarray, "queries candidates"], Int[ndarray, "queries candidates"]]:
    """Candidates in the order of the teacher's inner products; of equal ones the lower id first.

    Args:
        queries: the teacher's embeddings; unit vectors make the scores cosines.
        documents: embeddings of each query's candidates; where the id is -1, anything.
        ids: the candidates, -1 for "none".

    Returns:
        Scores, best first, -inf for "none", and the columns of `ids` that they belong to.
    """
    scores = np.matmul(documents, queries[:, :, None])[:, :, 0]
    scores = np.where(ids < 0, -np.inf, scores)
    order = np.lexsort((ids, -scores))
    return np.take_along_axis(scores, order, axis=1), order


@dataclass(frozen=True)
class EscalationPoint:
    """One share of queries that escalate, and what it gives."""

    share: float
    """Asked for."""
    escalated: float
    """Reached: less than `share` where doubts are equal, more or less where tuned on other queries."""
    value: float
    """Mean of the metric."""
    cost: float
    """Mean per query, in the unit of the costs given."""


def curve(
    doubts: Float[ndarray, " queries"],
    student: Int[ndarray, "queries k"],
    teacher: Int[ndarray, "queries k"],
    metric: Callable[[Int[ndarray, "queries k"]], Float[ndarray, " queries"]],
    *,
    student_cost: float,
    teacher_cost: float,
    shares: Sequence[float] = SHARES,
    held_out: Float[ndarray, " queries2"] | None = None,
) -> list[EscalationPoint]:
    """Quality against cost, from no query escalated to all of them.

    Args:
        doubts: of the queries that are measured.
        student: each query's ranking as the student has it.
        teacher: the ranking once the teacher has re-ordered it.
        metric: a ranking of every query in, each query's value out, e.g. nDCG@10.
        student_cost: of encoding and searching one query; every query costs it.
        teacher_cost: of encoding one query, in the same unit; escalated queries cost it on top.
        shares: points of the curve.
        held_out: doubts of other queries to tune each threshold on; None tunes on `doubts`.

    Raises:
        ConfigError: as :func:`threshold`.
    """
    before, after = metric(student), metric(teacher)
    points = []
    for share in shares:
        chosen = doubts > threshold(doubts if held_out is None else held_out, share)
        escalated = float(chosen.mean())
        value = float(np.where(chosen, after, before).mean())
        points.append(EscalationPoint(share, escalated, value, student_cost + escalated * teacher_cost))
    return points


@dataclass(frozen=True)
class EscalatedAnswer:
    """What was found, and which queries the teacher encoded."""

    scores: Float[ndarray, "queries k"]
    """Best first: the teacher's where a query escalated, else the student's; -inf for "none"."""
    ids: Int[ndarray, "queries k"]
    """Documents' positions, -1 for "none"."""
    escalated: Bool[ndarray, " queries"]


@dataclass(frozen=True)
class Escalation:
    """Search with a student, and with its teacher where the student is in doubt."""

    student: Encode
    """Texts in, embeddings out; any length, they are normalised here."""
    teacher: Encode
    """The same, in the same space."""
    search: Search
    """Unit embeddings and k in; scores and documents' positions out, best first, -inf and -1 for "none"."""
    embeddings: Lookup
    """Positions in, those documents' unit vectors out."""
    threshold: float = float("inf")
    """Doubt above which a query escalates; see :meth:`tuned`."""
    depth: int = DEPTH
    """Candidates that the teacher scores; never fewer than are asked for."""

    def tuned(self, queries: Sequence[str], share: float) -> "Escalation":
        """The same with the threshold at which `share` of these queries escalate.

        Args:
            queries: held-out ones, like those that will be asked. Texts of another kind, such as those drawn
                from documents, are in more or less doubt, and then another share escalates.
            share: in [0, 1].

        Raises:
            ConfigError: `share` is outside [0, 1], or there are no queries where it needs some.
        """
        doubts = np.empty(0)
        if len(queries) and 0 < share < 1:
            doubts = doubt(self.search(_unit(self.student(queries)), self.depth)[0])
        return dataclasses.replace(self, threshold=threshold(doubts, share))

    def answer(self, queries: Sequence[str], *, k: int) -> EscalatedAnswer:
        """The k best documents of each query; fewer columns where the search gives fewer.

        Raises:
            SearchError: `k` is below 1, or the teacher's embeddings are of another width than the documents'.
        """
        if k < 1:
            raise SearchError(f"k is {k}: ask for at least 1 result")
        scores, ids = self.search(_unit(self.student(queries)), max(k, self.depth))
        escalated = doubt(scores) > self.threshold
        if escalated.any():
            chosen = [query for query, asked in zip(queries, escalated, strict=True) if asked]
            found = ids[escalated]
            encoded, documents = _unit(self.teacher(chosen)), self._documents(found)
            if encoded.shape[1] != documents.shape[2]:
                raise SearchError(
                    f"the teacher's embeddings have {encoded.shape[1]} dimensions, the documents' "
                    f"{documents.shape[2]}: escalate to the model that encoded the documents"
                )
            new, order = rerank(encoded, documents, found)
            scores, ids = scores.astype(np.result_type(scores, new)), ids.copy()
            scores[escalated], ids[escalated] = new, np.take_along_axis(found, order, axis=1)
        return EscalatedAnswer(scores[:, :k], ids[:, :k], escalated)

    def _documents(self, ids: Int[ndarray, "queries candidates"]) -> Float[ndarray, "queries candidates dim"]:
        """Each distinct document is looked up once; "none" takes the vector of any other one."""
        some = ids.max()  # a query that escalates has candidates
        distinct, places = np.unique(np.where(ids < 0, some, ids), return_inverse=True)
        return self.embeddings(distinct)[places.reshape(ids.shape)]


def _unit(vectors: Float[ndarray, "queries dim"]) -> Float[ndarray, "queries dim"]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return unit
