"""Losses of embeddings over a step's candidates, on every view and Matryoshka prefix (Eq. 5-12).

Also how a cheap query is aligned with the whole one (LightRetriever, Eq. 5).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scalingnote.errors import TrainingError
from scalingnote.losses import teacher_scores
from scalingnote.losses.alignment import align as aligned
from scalingnote.losses.contrastive import info_nce
from scalingnote.losses.margin import margin_loss
from scalingnote.losses.matryoshka import prefixes
from scalingnote.train.config import Align, Losses
from scalingnote.train.distributed import gather
from scalingnote.train.meeting import Meeting, Triplets, meet


def stage_one_loss(
    queries: Float[Tensor, "queries dim"],
    documents: Float[Tensor, "docs views dim"],
    triplets: Triplets,
    losses: Losses,
    *,
    temperature: float | Float[Tensor, ""],
    view_weights: Sequence[float],
    uneven: bool = False,
) -> dict[str, Float[Tensor, ""]]:
    """L_con (Eq. 8), L_hard (Eq. 11) and the teacher's loss of this rank's queries, unweighted by alpha.

    Candidates are the documents of all ranks. A view of weight 0 costs nothing.
    """
    met = meet(triplets, documents, losses, uneven=uneven)
    return dense_loss(queries, met, losses, temperature=temperature, view_weights=view_weights)


def dense_loss(
    queries: Float[Tensor, "queries dim"],
    met: Meeting,
    losses: Losses,
    *,
    temperature: float | Float[Tensor, ""],
    view_weights: Sequence[float],
) -> dict[str, Float[Tensor, ""]]:
    """The same, of queries that have met their candidates."""
    everybody = gather(queries, met.share) if losses.bidirectional else queries
    rows: dict[str, Any] = {"weights": met.weights}
    softmax: dict[str, Any] = {"positives": met.positives, "temperature": temperature, **rows}
    zero = torch.zeros((), device=queries.device)
    contrastive = margin = teacher = zero
    for prefix_weight, (q, all_q, d, all_d) in prefixes(
        queries,
        everybody,
        met.groups,
        met.candidates,
        dims=losses.matryoshka,
        weights=losses.matryoshka_weights,
    ):
        for view, view_weight in enumerate(view_weights):
            if not view_weight:
                continue
            weight = prefix_weight * view_weight
            loss = info_nce(q, all_d[:, view], ignore=met.not_negatives, **softmax)
            if losses.bidirectional:
                back = info_nce(d[:, 0, view], all_q, ignore=met.not_queries, **softmax)
                loss = (loss + back) / 2
            contrastive = contrastive + weight * loss
            cosines = torch.einsum("qd,qgd->qg", q, d[:, :, view])
            if losses.alpha and cosines.shape[1] > 1:
                margin = margin + weight * margin_loss(cosines, margin=losses.margin, **rows)
            if losses.teacher:
                teacher = teacher + weight * _teacher_loss(cosines / temperature, met.triplets, losses, rows)
    parts = {"contrastive": contrastive, "margin": margin}
    return parts | {"teacher": teacher} if losses.teacher else parts


def dense_alignment(
    queries: Float[Tensor, "queries dim"],
    whole: Float[Tensor, "queries dim"],
    met: Meeting,
    losses: Losses,
    align: Align,
    *,
    temperature: float | Float[Tensor, ""],
    view_weights: Sequence[float],
) -> Float[Tensor, ""]:
    """KL of cheap queries to whole ones (LightRetriever, Eq. 5), weighted like the contrastive loss."""
    widest, total = max(losses.matryoshka), torch.zeros((), device=queries.device)
    dims, weights = losses.matryoshka, losses.matryoshka_weights
    for view, view_weight in enumerate(view_weights):
        if not view_weight:
            continue
        taught = {m: whole_scores(whole, met, m, view, temperature) for m in _taught(dims, align, widest)}
        pairs = prefixes(queries, met.candidates[:, view], dims=dims, weights=weights)
        for dim, (weight, (q, docs)) in zip(dims, pairs, strict=True):
            teacher = taught[widest if align.prefix == "widest" else dim]
            loss = aligned(q, docs, teacher=teacher, temperature=temperature, weights=met.weights)
            total = total + weight * view_weight * loss
    return total


@torch.no_grad()
def whole_scores(
    whole: Float[Tensor, "queries dim"],
    met: Meeting,
    prefix: int,
    view: int,
    temperature: float | Float[Tensor, ""],
) -> Float[Tensor, "queries docs"]:
    """Logarithms of what whole queries give each candidate by a prefix of a view."""
    ((_, (q, docs)),) = prefixes(whole, met.candidates[:, view], dims=[prefix])
    return (q / temperature @ docs.T).log_softmax(1)


def _taught(dims: Sequence[int], align: Align, widest: int) -> Sequence[int]:
    return [widest] if align.prefix == "widest" else dims


def _teacher_loss(
    student: Float[Tensor, "queries group"], triplets: Triplets, losses: Losses, rows: dict[str, Any]
) -> Float[Tensor, ""]:
    """Of the student's logits, which are what its own softmax sees: cosines over the temperature."""
    assert losses.teacher is not None
    if triplets.scores is None:
        raise TrainingError(
            "losses.teacher is set, but the triplets carry no scores: collect them with a ranking model, "
            "or leave losses.teacher out"
        )
    if losses.teacher.kind == "kl":
        return teacher_scores.kl(student, triplets.scores / losses.teacher.temperature, **rows)
    return teacher_scores.margin_mse(student, triplets.scores, **rows)
