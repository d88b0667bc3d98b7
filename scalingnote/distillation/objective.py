"""The stage II loss of one rank: the student against what its teacher left behind, and against labels.

    queries     ||q - q'||^2 - lambda cos (ScalingNote, Eq. 15) · ||q - q'|| (EmbedDistill, Eq. 7)
    documents   ||d - d'|| of a student that reads them, too (Eq. 8)
    candidates  the softmax of labels (Eq. 9) · the teacher's scores (Eq. 11-13)

Candidates are the documents of all ranks, positives and negatives; the student's are its own embeddings, or
those it inherits from the teacher, which learn nothing. A score is a cosine over the temperature, as search
compares cosines; a cross-encoder's scores are logits already, and known for a query's own documents only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from scalingnote.distillation.batching import Lesson
from scalingnote.distillation.config import DistillLosses
from scalingnote.distillation.documents import VIEW, Candidates
from scalingnote.errors import TrainingError
from scalingnote.losses import distillation, masking
from scalingnote.losses.contrastive import info_nce
from scalingnote.models.batch import Batch
from scalingnote.models.lookup import LookupTower
from scalingnote.models.tower import Tower
from scalingnote.train.distributed import Shares, gather, shares


class StageTwo(nn.Module):
    """Student towers and losses as one module; what a step trains, plainly or through GradCache."""

    def __init__(
        self,
        student: Tower | LookupTower,
        losses: DistillLosses,
        document: Tower | None = None,
        *,
        uneven: bool = False,
    ) -> None:
        """`document` is a student for documents, too; `uneven`: ranks may bring different numbers of rows."""
        super().__init__()
        self.student: Tower | LookupTower = student
        self.document, self._losses, self._uneven = document, losses, uneven
        self._view = None if document is None else document.views.index(VIEW)

    def forward(self, lesson: Lesson) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of this rank (its mean over ranks is the global loss) and its parts, for the log."""
        inputs = self.inputs(lesson)
        return self.loss({name: self.encode(name, rows) for name, rows in inputs.items()}, lesson)

    def inputs(self, lesson: Lesson) -> dict[str, Batch | None]:
        """Rows of the query student, and of the documents' where there is one."""
        rows: dict[str, Batch | None] = {"query": lesson.queries}
        if self.document is None:
            return rows
        assert lesson.candidates is not None
        return rows | {"document": lesson.candidates.texts}

    def encode(self, name: str, rows: Batch | None) -> Float[Tensor, "rows views dim"]:
        """The students' embeddings of some rows, in float32; of a document the one that is searched."""
        if name == "query":
            return self.student(rows).float()  # type: ignore[no-any-return]
        assert self.document is not None
        return self.document(rows)[:, self._view].unsqueeze(1).float()  # type: ignore[no-any-return]

    def embeddings(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """The same, by the name under which validation asks for it."""
        return self.encode(name, rows)

    def loss(
        self, embeddings: dict[str, Tensor], lesson: Lesson
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """This rank's loss and its parts, unweighted; like the loss, their means over ranks are global."""
        queries, losses = embeddings["query"][:, 0], self._losses
        share = shares(queries, uneven=self._uneven)
        with torch.autocast(queries.device.type, enabled=False):
            parts = query_losses(queries, lesson, losses, share)
            if losses.reads_documents:
                own = embeddings["document"][:, 0] if "document" in embeddings else None
                parts |= candidate_losses(queries, own, lesson, losses, share)
            weights = {name: getattr(losses, name) for name in parts}
            loss = sum((weights[name] * part for name, part in parts.items()), start=queries.new_zeros(()))
            distance = (lesson.teacher - queries.detach()).pow(2).sum(-1)
            parts["squared_distance"] = share.weight * distance.mean()
        return loss, {name: part.detach() for name, part in parts.items()}


def query_losses(
    queries: Float[Tensor, "queries dim"], lesson: Lesson, losses: DistillLosses, share: Shares
) -> dict[str, Tensor]:
    """Each loss over queries alone that has a weight."""
    weights = queries.new_ones(len(queries)) if lesson.weights is None else lesson.weights
    weights = weights * share.weight
    parts = {}
    if losses.qkd:
        parts["qkd"] = distillation.qkd(
            lesson.teacher, queries, cosine_weight=losses.cosine_weight, weights=weights
        )
    if losses.cosine:
        parts["cosine"] = distillation.cosine(lesson.teacher, queries, weights=weights)
    if losses.query_matching:
        parts["query_matching"] = distillation.matching(lesson.teacher, queries, weights=weights)
    return parts


def candidate_losses(
    queries: Float[Tensor, "queries dim"],
    documents: Float[Tensor, "docs dim"] | None,
    lesson: Lesson,
    losses: DistillLosses,
    share: Shares,
) -> dict[str, Float[Tensor, ""]]:
    """Each loss over candidates that has a weight; `documents` of None are inherited from the teacher."""
    if lesson.candidates is None:
        raise TrainingError("losses over documents are asked for, but the lessons hold none: prepare them")
    candidates = lesson.candidates
    own = candidates.embeddings if documents is None else documents
    rows = {"weights": candidates.weights * share.weight}
    parts = {}
    if losses.document_matching:
        parts["document_matching"] = _document_matching(own, candidates, **rows)
    if losses.one_hot or (losses.scores and candidates.scores is None):
        pool = _Pool.of(candidates, share)
    scaled = F.normalize(queries, dim=-1) / losses.temperature
    if losses.one_hot:
        parts["one_hot"] = info_nce(
            scaled,
            _gathered(own, candidates, share),
            positives=torch.arange(len(queries), device=queries.device) + share.start,
            temperature=1.0,
            ignore=pool.answers | ~pool.real,
            **rows,
        )
    if losses.scores and candidates.scores is None:
        teacher = F.normalize(lesson.teacher, dim=-1) / losses.temperature
        student = scaled @ _gathered(own, candidates, share).T
        given = teacher @ _gathered(candidates.embeddings, candidates, share).T
        parts["scores"] = distillation.SCORES[losses.scores_kind](
            student, given, scored=pool.real.expand_as(given), **rows
        )
    elif losses.scores:
        assert candidates.scores is not None
        student = torch.einsum("qd,qgd->qg", scaled, F.normalize(own, dim=-1)[candidates.index])
        parts["scores"] = distillation.SCORES[losses.scores_kind](
            student, candidates.scores, scored=candidates.scores.isfinite(), **rows
        )
    return parts


@dataclass(frozen=True)
class _Pool:
    """The candidates of all ranks: positives of all queries, then all first negatives, and so on."""

    real: Bool[Tensor, "1 pool"]  # not the stand-ins of queries without documents
    answers: Bool[Tensor, "queries pool"]  # no negatives: they are known to answer the query

    @classmethod
    def of(cls, candidates: Candidates, share: Shares) -> "_Pool":
        """Gathered from all ranks in one exchange."""
        ids, query_ids = candidates.document_ids, candidates.query_ids
        everybody = gather(torch.cat([query_ids[:, None], ids], dim=1), share)
        all_ids = everybody[:, 1:].T.flatten()
        answers = masking.answers(
            query_ids, ids[:, 0], candidates.known, all_query_ids=everybody[:, 0], candidate_ids=all_ids
        )
        return cls((all_ids >= 0)[None], answers)


def _gathered(
    documents: Float[Tensor, "docs dim"], candidates: Candidates, share: Shares
) -> Float[Tensor, "pool dim"]:
    """Unit embeddings of all ranks' candidates, with gradients where they have any."""
    groups = F.normalize(documents, dim=-1)[candidates.index]
    return gather(groups, share).transpose(0, 1).flatten(0, 1)


def _document_matching(
    documents: Float[Tensor, "docs dim"], candidates: Candidates, *, weights: Float[Tensor, " queries"]
) -> Float[Tensor, ""]:
    """The mean over each row's documents, and over rows."""
    index = candidates.index
    each = weights[:, None].expand(index.shape).flatten()
    return distillation.matching(
        candidates.embeddings[index.flatten()], documents[index.flatten()], weights=each
    )
