"""Stage II: a rank's batch of queries and candidates, and the loss of a student against its teacher.

    queries     ||q - q'||^2 - cos (ScalingNote, Eq. 15) · ||q - q'|| (EmbedDistill, Eq. 7)
    documents   ||d - d'|| of a student that reads them, too (Eq. 8)
    candidates  the softmax of labels (Eq. 9) · the teacher's scores (Eq. 11-13)

Candidates are the documents of all ranks, positives and negatives. The student's embeddings of them are its
own, or the teacher's, which it inherits and which are not trained. A score is a cosine over the temperature
or, if the teacher compares by dot, an inner product, the same as in search. Scores of a cross-encoder are
logits already, and known only for a query's own documents. If a loss reads candidates, a row of a batch is a
triplet, or a query without documents, and names its query by number.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray
from torch import Tensor

from scalingnote.core.errors import TrainingError
from scalingnote.models.batch import Batch, collate
from scalingnote.models.lookup import LookupTower
from scalingnote.models.published_model import Similarity
from scalingnote.models.tower import Tower
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.train.data import ABSENT, Order, Store
from scalingnote.train.distillation.config import DistillLosses
from scalingnote.train.distillation.prepare import LESSONS
from scalingnote.train.engine import Encode, Objective, WeightedLosses, gather, rank
from scalingnote.train.losses import (
    SCORE_LOSSES,
    Embeddings,
    cosine_distance,
    embedding_matching,
    false_negative_documents,
    info_nce,
    qkd,
)
from scalingnote.train.objective import TensorRecord, pad_lists


@dataclass(frozen=True)
class LessonCandidates(TensorRecord):
    """Documents that one rank's queries are scored against: for each query its positive, then its negatives.

    A query without documents has `weights` 0. If a place holds no document, `document_ids` is ABSENT and
    `index` is meaningless.
    """

    embeddings: Float[Tensor, "docs dim"]  # of the teacher, each document once
    index: Int[Tensor, "queries group"]  # rows of `embeddings`
    weights: Float[Tensor, " queries"]  # of each row in the losses over candidates
    query_ids: Int[Tensor, " queries"]
    document_ids: Int[Tensor, "queries group"]
    known: Int[Tensor, "queries known"]  # documents known to answer the query; padded with -1
    scores: Float[Tensor, "queries group"] | None = None  # a cross-encoder's; NaN in unscored rows
    texts: Batch | None = None  # of the documents, in the order of `embeddings`

    @property
    def present(self) -> Bool[Tensor, "queries group"]:
        """Mask of the places that hold a document."""
        return self.document_ids != ABSENT


@dataclass(frozen=True)
class Lesson(TensorRecord):
    """One rank's share of a step: queries for the student, and the teacher's embeddings of them."""

    queries: Batch
    teacher: Float[Tensor, "queries dim"]
    weights: Float[Tensor, " queries"] | None = None  # of each row in the losses over queries; None: all 1
    candidates: LessonCandidates | None = None


class StageTwo(Objective):
    """Student towers and losses as one module."""

    def __init__(
        self,
        student: Tower | LookupTower,
        losses: DistillLosses,
        document: Tower | None = None,
        *,
        similarity: Similarity = "cosine",
    ) -> None:
        """Combine towers and losses. `document` is a student for documents, `similarity` the teacher's."""
        super().__init__()
        self.student: Tower | LookupTower = student
        self._similarity: Similarity = similarity
        self.document, self._losses = document, losses
        self._view = None if document is None else document.views.index(INDEXED_VIEW)

    def losses(self, batch: Lesson, encode: Encode) -> WeightedLosses:
        """Compute the weighted losses of this rank, and their parts; means of both over ranks are global."""
        queries, documents = encode("query", batch.queries)["query"][:, 0], None
        if self.document is not None:
            assert batch.candidates is not None
            assert batch.candidates.texts is not None
            documents = encode("document", batch.candidates.texts)["document"][:, 0]
        losses = self._losses
        with torch.autocast(queries.device.type, enabled=False):
            parts = query_losses(queries, batch, losses, self._similarity)
            if losses.reads_documents:
                parts |= candidate_losses(queries, documents, batch, losses, self._similarity)
            weighted = {name: getattr(losses, name) * part for name, part in parts.items()}
            parts["squared_distance"] = (batch.teacher - queries.detach()).pow(2).sum(-1).mean()
        return weighted, parts

    def encode(self, name: str, rows: Batch) -> dict[str, Tensor]:
        """Encode rows by the student `name`, in float32."""
        return {name: self.embeddings(name, rows)}

    def embeddings(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """Encode rows by a student, in float32; for a document only the view that is searched."""
        if name == "query":
            return self.student(rows).float()  # type: ignore[no-any-return]
        assert self.document is not None
        return self.document(rows)[:, self._view].unsqueeze(1).float()  # type: ignore[no-any-return]


def query_losses(
    queries: Embeddings, lesson: Lesson, losses: DistillLosses, similarity: Similarity
) -> dict[str, Tensor]:
    """Compute the losses that read only queries and have a weight, by name."""
    weights = lesson.weights
    parts = {}
    if losses.qkd:
        parts["qkd"] = qkd(lesson.teacher, queries, weights=weights)
    if losses.cosine:
        parts["cosine"] = cosine_distance(lesson.teacher, queries, weights=weights)
    if losses.query_matching:
        teacher, student = _as_compared(lesson.teacher, similarity), _as_compared(queries, similarity)
        parts["query_matching"] = embedding_matching(teacher, student, weights=weights)
    return parts


def candidate_losses(
    queries: Embeddings,
    documents: Float[Tensor, "docs dim"] | None,
    lesson: Lesson,
    losses: DistillLosses,
    similarity: Similarity,
) -> dict[str, Tensor]:
    """Compute the losses over candidates that have a weight, by name.

    If `documents` is None, the teacher's embeddings are used.
    """
    if lesson.candidates is None:
        raise TrainingError(
            "losses over documents have a weight, but the lessons have no documents: prepare them"
        )
    candidates = lesson.candidates
    inherited = _as_compared(candidates.embeddings, similarity)
    student_documents = inherited if documents is None else _as_compared(documents, similarity)
    temperature = losses.temperature if similarity == "cosine" else 1.0
    rows = {"weights": candidates.weights}
    parts = {}
    if losses.document_matching:
        parts["document_matching"] = _document_matching(inherited, student_documents, candidates, **rows)
    if losses.one_hot or (losses.scores and candidates.scores is None):
        is_document, answers = _pool_masks(candidates)
    scaled = _as_compared(queries, similarity) / temperature
    if losses.one_hot:
        parts["one_hot"] = info_nce(
            scaled,
            _gather(student_documents, candidates),
            positives=torch.arange(len(queries), device=queries.device) + rank() * len(queries),
            temperature=1.0,
            ignore=answers | ~is_document,
            **rows,
        )
    if losses.scores:
        if candidates.scores is None:
            teacher_queries = _as_compared(lesson.teacher, similarity) / temperature
            student = scaled @ _gather(student_documents, candidates).T
            teacher = teacher_queries @ _gather(inherited, candidates).T
            scored = is_document.expand_as(teacher)
        else:
            student = torch.einsum("qd,qgd->qg", scaled, student_documents[candidates.index])
            teacher = candidates.scores
            scored = teacher.isfinite() & candidates.present
        parts["scores"] = SCORE_LOSSES[losses.scores_kind](student, teacher, scored=scored, **rows)
    return parts


def _pool_masks(candidates: LessonCandidates) -> tuple[Bool[Tensor, " pool"], Bool[Tensor, "queries pool"]]:
    """Mask the candidates of all ranks that are documents, and those known to answer each query.

    Candidates are the positives of all queries, then all first negatives, and so on.
    """
    ids, query_ids = candidates.document_ids, candidates.query_ids
    gathered = gather(torch.cat([query_ids[:, None], ids], dim=1))  # one exchange for all ids
    all_ids = gathered[:, 1:].T.flatten()
    answers = false_negative_documents(
        query_ids, ids[:, 0], candidates.known, all_query_ids=gathered[:, 0], candidate_ids=all_ids
    )
    return all_ids != ABSENT, answers


def _gather(documents: Float[Tensor, "docs dim"], candidates: LessonCandidates) -> Float[Tensor, "pool dim"]:
    """Gather the embeddings of all ranks' candidates, with gradients."""
    return gather(documents[candidates.index]).transpose(0, 1).flatten(0, 1)


def _document_matching(
    teacher: Float[Tensor, "docs dim"],
    student: Float[Tensor, "docs dim"],
    candidates: LessonCandidates,
    *,
    weights: Float[Tensor, " queries"],
) -> Float[Tensor, ""]:
    """Compute the mean over each row's documents, and over rows."""
    index, present = candidates.index, candidates.present
    share = index.shape[1] / present.sum(1, keepdim=True).clamp(min=1)
    factors = (weights[:, None] * share * present).flatten()
    return embedding_matching(teacher[index.flatten()], student[index.flatten()], weights=factors)


def _as_compared(vectors: Float[Tensor, "rows dim"], similarity: Similarity) -> Float[Tensor, "rows dim"]:
    """Scale vectors for the teacher's comparison by products: to length 1, or for dot unchanged."""
    return F.normalize(vectors, dim=-1) if similarity == "cosine" else vectors


@dataclass(frozen=True)
class LessonBatches:
    """Lessons of any step, for one rank, from a store of :mod:`scalingnote.train.distillation.prepare`."""

    store: Store
    order: Order
    pad: int  # pad token of the query student
    rank: int
    world: int
    document_pad: int | None = None  # pad token of a student for documents

    def __call__(self, step: int) -> Lesson:
        """Build this rank's share of a step."""
        rows = self.order.batch(step)[self.rank :: self.world]
        lessons, weights, candidates = rows, None, None
        if "rows" in self.store.tables:
            lessons = self.store["rows"].values("lesson", rows)
            weights = torch.from_numpy(self.store["rows"].values("weight", rows))
            candidates = self._candidates(rows, weights)
        queries = collate(self.store[LESSONS].tokens(lessons), pad=self.pad, packed=True)
        teacher = torch.from_numpy(self.store[LESSONS].values("teacher", lessons))
        return Lesson(queries, teacher, weights, candidates)

    def _candidates(
        self, chosen: Int64[ndarray, " rows"], weights: Float[Tensor, " rows"]
    ) -> LessonCandidates:
        rows, table, facts = self.store["rows"], self.store["documents"], self.store.facts
        documents = rows.values("documents", chosen)
        answered = torch.from_numpy(documents[:, 0] != ABSENT)
        # Generated queries have no documents, and the losses over candidates are means only over the
        # triplets: this factor makes them so in expectation, without an exchange between ranks.
        share = sum(facts["sizes"].values()) / facts["sizes"]["triplets"]
        # Document 0 replaces all absent ones; it is masked, and encoded at most once.
        distinct, index = np.unique(np.maximum(documents, 0), return_inverse=True)
        texts = None
        if self.document_pad is not None:
            texts = collate(table.tokens(distinct), pad=self.document_pad, packed=True)
        return LessonCandidates(
            embeddings=torch.from_numpy(table.values("teacher", distinct).astype(np.float32)),
            index=torch.from_numpy(index.reshape(documents.shape)),
            weights=weights * answered * share,
            query_ids=torch.from_numpy(rows.values("query", chosen)),
            document_ids=torch.from_numpy(documents),
            known=torch.from_numpy(pad_lists(rows.lists("known", chosen), width=max(facts["known"], 1))),
            scores=torch.from_numpy(rows.values("scores", chosen)) if facts["scored"] else None,
            texts=texts,
        )
