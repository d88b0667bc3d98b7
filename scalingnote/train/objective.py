"""The stage I loss of one rank: contrastive both ways plus margin, on every view and prefix (Eq. 5-12)."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from scalingnote.losses.contrastive import info_nce
from scalingnote.losses.margin import margin_loss
from scalingnote.losses.matryoshka import over_prefixes
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.tower import Batch
from scalingnote.train.config import Losses
from scalingnote.train.distributed import gather, rank


@dataclass(frozen=True)
class Triplets:
    """One rank's share of a step. Ids are 63-bit hashes, so that ranks can compare them as integers."""

    queries: Batch
    documents: Batch  # the positives of all queries, then all first negatives, then all second ones...
    query_ids: Int[Tensor, " queries"]
    document_ids: Int[Tensor, " docs"]
    known_positives: Int[Tensor, "queries known"]  # padded with -1
    weights: Float[Tensor, " queries"]  # of each row in every loss

    def to(self, device: torch.device) -> "Triplets":
        """The same triplets on a device."""
        return Triplets(*(getattr(self, field.name).to(device) for field in fields(self)))


class StageOne(nn.Module):
    """Dual encoder and loss as one module: what a data-parallel wrapper wraps."""

    def __init__(self, towers: DualEncoder, losses: Losses) -> None:
        super().__init__()
        self.towers, self._losses = towers, losses

    def forward(self, triplets: Triplets) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of this rank (its mean over ranks is the global loss) and its parts, for the log."""
        queries, documents = self.towers(triplets.queries, triplets.documents)
        contrastive, margin = stage_one_loss(queries, documents, triplets, self._losses)
        loss = contrastive + self._losses.alpha * margin
        return loss, {"contrastive": contrastive.detach(), "margin": margin.detach()}


def stage_one_loss(
    queries: Float[Tensor, "queries dim"],
    documents: Float[Tensor, "docs views dim"],
    triplets: Triplets,
    losses: Losses,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """L_con (Eq. 8) and L_hard (Eq. 11) of this rank's queries against the candidates of all ranks."""
    size = len(queries)
    columns = len(documents) // size
    if losses.denominator == "positives_only":
        columns = 1
    # Column by column: positives of all ranks first, then each column of negatives, or labels would shift.
    candidates = torch.cat([gather(part) for part in documents.split(size)[:columns]])
    candidate_ids = torch.cat([gather(part) for part in triplets.document_ids.split(size)[:columns]])
    all_queries = gather(queries)
    own = torch.arange(size, device=queries.device) + rank() * size
    not_negatives = _matches(triplets.document_ids[:size], triplets.known_positives, candidate_ids)
    not_queries = _same_need(triplets)

    shared: dict[str, Any] = {
        "positives": own,
        "temperature": losses.temperature,
        "weights": triplets.weights,
    }

    def forward_loss(q: Tensor, d: Tensor) -> Tensor:
        return info_nce(q, d, ignore=not_negatives, **shared)

    def backward_loss(d: Tensor, q: Tensor) -> Tensor:
        return info_nce(d, q, ignore=not_queries, **shared)

    prefixes = {"dims": losses.matryoshka, "weights": losses.matryoshka_weights}
    contrastive = margin = torch.zeros((), device=queries.device)
    for view in range(documents.shape[1]):
        positives = documents[:size, view]
        there = over_prefixes(forward_loss, queries, candidates[:, view], **prefixes)  # type: ignore[arg-type]
        back = over_prefixes(backward_loss, positives, all_queries, **prefixes)  # type: ignore[arg-type]
        contrastive = contrastive + (there + back) / 2
        if len(documents) > size and losses.alpha:
            negatives = documents[size:, view].unflatten(0, (-1, size)).transpose(0, 1)
            hinge = partial(margin_loss, margin=losses.margin, weights=triplets.weights)
            margin = margin + over_prefixes(hinge, queries, positives, negatives, **prefixes)  # type: ignore[arg-type]
    return contrastive, margin


def _matches(
    own: Int[Tensor, " queries"],
    known: Int[Tensor, "queries known"],
    candidates: Int[Tensor, " docs"],
) -> Bool[Tensor, "queries docs"]:
    """Candidates that are the query's own positive again, or another document known to answer it."""
    again = own[:, None] == candidates
    also = (known[:, :, None] == candidates).any(1)
    return again | also


def _same_need(triplets: Triplets) -> Bool[Tensor, "queries all"]:
    """Queries of all ranks that a positive of this rank also answers: the same query, or known for it."""
    size = len(triplets.query_ids)
    same = triplets.query_ids[:, None] == gather(triplets.query_ids)
    known = gather(triplets.known_positives)
    answered = (triplets.document_ids[:size, None, None] == known).any(-1)
    return same | answered
