"""The stage I loss of one rank: contrastive both ways plus margin, on every view and prefix (Eq. 5-12)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from scalingnote.errors import ConfigError, TrainingError
from scalingnote.losses import masking, teacher_scores
from scalingnote.losses.contrastive import info_nce
from scalingnote.losses.margin import margin_loss
from scalingnote.losses.matryoshka import prefixes
from scalingnote.losses.temperature import Temperature
from scalingnote.models.batch import Batch
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.train.config import Losses
from scalingnote.train.distributed import Shares, gather, shares


@dataclass(frozen=True)
class Triplets:
    """One rank's share of a step. Ids are 63-bit hashes, so that ranks can compare them as integers."""

    queries: Batch
    documents: Batch  # the positives of all queries, then all first negatives, then all second ones...
    query_ids: Int[Tensor, " queries"]
    document_ids: Int[Tensor, " docs"]
    known_positives: Int[Tensor, "queries known"]  # padded with -1; equally wide on all ranks
    weights: Float[Tensor, " queries"]  # of each row in every loss
    # A teacher's score of the positive, then of each negative; NaN rows were never scored. None: no row was.
    scores: Float[Tensor, "queries group"] | None = None

    def to(self, device: torch.device) -> "Triplets":
        """The same triplets on a device."""
        parts = (getattr(self, field.name) for field in fields(self))
        moved: list[Any] = [None if part is None else part.to(device) for part in parts]
        return Triplets(*moved)


class StageOne(nn.Module):
    """Dual encoder and loss as one module; what a step trains, plainly or through GradCache."""

    def __init__(self, towers: DualEncoder, losses: Losses, *, uneven: bool = False) -> None:
        """`uneven`: ranks may bring different numbers of rows, and tell each other at every step."""
        super().__init__()
        self.towers, self._losses, self._uneven = towers, losses, uneven
        self.temperature = Temperature(losses.temperature) if losses.learn_temperature else None
        self._view_weights = _view_weights(towers.document.views, losses.view_weights)

    def forward(self, triplets: Triplets) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of this rank (its mean over ranks is the global loss) and its parts, for the log."""
        inputs = self.inputs(triplets)
        return self.loss({name: self.encode(name, rows) for name, rows in inputs.items()}, triplets)

    def inputs(self, triplets: Triplets) -> dict[str, Batch | None]:
        """Rows of both towers; a temperature that is learnt comes from no row."""
        rows: dict[str, Batch | None] = {"query": triplets.queries, "document": triplets.documents}
        return rows if self.temperature is None else rows | {"temperature": None}

    def encode(self, name: str, rows: Batch | None) -> Float[Tensor, "rows views dim"]:
        """Embeddings of some rows of a tower, in float32; or the temperature as the only number of one."""
        if rows is None:
            assert self.temperature is not None
            return self.temperature().float().view(1, 1, 1)  # type: ignore[no-any-return]
        return self.towers.encode(name, rows).float()

    def loss(
        self, embeddings: dict[str, Tensor], triplets: Triplets
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """This rank's loss and its parts, and the temperature if it is learnt. Parts are of this rank alone:
        like the loss, their means over ranks are those of the global batch.
        """
        queries, documents = embeddings["query"][:, 0], embeddings["document"]
        learnt = embeddings.get("temperature")
        # bfloat16 would round cosines to 1/256, twenty times that when divided by the temperature.
        with torch.autocast(queries.device.type, enabled=False):
            parts = stage_one_loss(
                queries,
                documents,
                triplets,
                self._losses,
                temperature=self._losses.temperature if learnt is None else learnt.squeeze(),
                view_weights=self._view_weights,
                uneven=self._uneven,
            )
        loss = parts["contrastive"] + self._losses.alpha * parts["margin"]
        if self._losses.teacher:
            loss = loss + self._losses.teacher.weight * parts["teacher"]
        if learnt is not None:
            parts["temperature"] = learnt.squeeze()
        return loss, {name: part.detach() for name, part in parts.items()}


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
    size, share = len(queries), shares(queries, uneven=uneven)
    groups = documents.unflatten(0, (-1, size)).transpose(0, 1)  # [queries, group, views, dim]
    columns = 1 if losses.denominator == "positives_only" else groups.shape[1]
    # Column by column: positives of all ranks first, then each column of negatives, or labels would shift.
    candidates = gather(groups[:, :columns], share).transpose(0, 1).flatten(0, 1)
    everybody = gather(queries, share) if losses.bidirectional else queries
    not_negatives, not_queries = _masks(triplets, share, columns) if losses.mask_known else (None, None)
    rows: dict[str, Any] = {"weights": triplets.weights * share.weight}
    softmax: dict[str, Any] = {
        "positives": torch.arange(size, device=queries.device) + share.start,
        "temperature": temperature,
        **rows,
    }
    zero = torch.zeros((), device=queries.device)
    contrastive = margin = teacher = zero
    for prefix_weight, (q, all_q, d, all_d) in prefixes(
        queries, everybody, groups, candidates, dims=losses.matryoshka, weights=losses.matryoshka_weights
    ):
        for view, view_weight in enumerate(view_weights):
            if not view_weight:
                continue
            weight = prefix_weight * view_weight
            loss = info_nce(q, all_d[:, view], ignore=not_negatives, **softmax)
            if losses.bidirectional:
                back = info_nce(d[:, 0, view], all_q, ignore=not_queries, **softmax)
                loss = (loss + back) / 2
            contrastive = contrastive + weight * loss
            cosines = torch.einsum("qd,qgd->qg", q, d[:, :, view])
            if losses.alpha and cosines.shape[1] > 1:
                margin = margin + weight * margin_loss(cosines, margin=losses.margin, **rows)
            if losses.teacher:
                teacher = teacher + weight * _teacher_loss(cosines / temperature, triplets, losses, rows)
    parts = {"contrastive": contrastive, "margin": margin}
    return parts | {"teacher": teacher} if losses.teacher else parts


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


def _masks(
    triplets: Triplets, share: Shares, columns: int
) -> tuple[Bool[Tensor, "queries docs"], Bool[Tensor, "queries all"]]:
    """Candidates that are no negatives of this rank's queries, and queries that are none of its positives."""
    ids = triplets.document_ids.unflatten(0, (-1, len(triplets.query_ids))).T
    query_ids, known = triplets.query_ids, triplets.known_positives
    # One exchange for all ids.
    everybody = gather(torch.cat([query_ids[:, None], ids[:, :columns], known], dim=1), share)
    all_query_ids, all_ids, all_known = everybody.split([1, columns, known.shape[1]], dim=1)
    not_negatives = masking.answers(
        query_ids, ids[:, 0], known, all_query_ids=all_query_ids[:, 0], candidate_ids=all_ids.T.flatten()
    )
    not_queries = masking.answered(
        query_ids,
        ids[:, 0],
        all_query_ids=all_query_ids[:, 0],
        all_positive_ids=all_ids[:, 0],
        all_known=all_known,
    )
    return not_negatives, not_queries


def _view_weights(views: Sequence[str], weights: Mapping[Any, float]) -> tuple[float, ...]:
    if unknown := sorted(set(weights) - set(views)):
        raise ConfigError(
            f"losses.view_weights names {', '.join(unknown)}, but the document prompt gives "
            f"{', '.join(views)}: add the placeholder to the prompt or leave the weight out"
        )
    found = tuple(weights.get(view, 1.0) for view in views)
    if not any(found):
        raise ConfigError("losses.view_weights leaves no view to learn from: give one a weight above 0")
    return found
