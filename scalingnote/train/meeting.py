"""Who meets whom in a step: one rank's triplets come in, and all that its losses compare them with goes out.

groups       [queries, group, views, dim]   documents of this rank's queries: the positive, its negatives
candidates   [docs, views, dim]             of all ranks: all positives, then all first negatives...
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from scalingnote.losses import masking
from scalingnote.models.batch import Batch
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
    # Terms of the sparse queries, filled up with -1, equally wide on all ranks; None without a sparse head.
    terms: Int[Tensor, "queries terms"] | None = None
    progress: Float[Tensor, ""] | None = None  # part of the run that is done

    def to(self, device: torch.device) -> "Triplets":
        """The same triplets on a device."""
        parts = (getattr(self, field.name) for field in fields(self))
        moved: list[Any] = [None if part is None else part.to(device) for part in parts]
        return Triplets(*moved)


@dataclass(frozen=True)
class Meeting:
    """This rank's queries, their documents, and who else's they meet in a step."""

    triplets: Triplets
    groups: Float[Tensor, "queries group views dim"]  # of this rank's queries
    candidates: Float[Tensor, "docs views dim"]  # of all ranks
    columns: int  # of a group that are candidates
    share: Shares
    positives: Int[Tensor, " queries"]  # among the candidates
    weights: Float[Tensor, " queries"]
    not_negatives: Bool[Tensor, "queries docs"] | None
    not_queries: Bool[Tensor, "queries all"] | None


def meet(
    triplets: Triplets, documents: Float[Tensor, "docs views dim"], losses: Losses, *, uneven: bool = False
) -> Meeting:
    """Gather what the losses of a step share."""
    size, share = len(triplets.query_ids), shares(triplets.query_ids, uneven=uneven)
    groups = documents.unflatten(0, (-1, size)).transpose(0, 1)
    columns = 1 if losses.denominator == "positives_only" else groups.shape[1]
    # Column by column: positives of all ranks first, then each column of negatives, or labels would shift.
    candidates = gather(groups[:, :columns], share).transpose(0, 1).flatten(0, 1)
    not_negatives, not_queries = _masks(triplets, share, columns) if losses.mask_known else (None, None)
    return Meeting(
        triplets,
        groups,
        candidates,
        columns,
        share,
        torch.arange(size, device=documents.device) + share.start,
        triplets.weights * share.weight,
        not_negatives,
        not_queries,
    )


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
