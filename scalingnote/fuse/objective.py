"""What fusion learns from: clicks against the batch, corrected for popularity, and what was passed over.

Documents of other rows are negatives because they were clicked by somebody: popular ones more often than
their share of the corpus. The softmax over them is corrected for that, so that it estimates the one over all
documents. What the same user saw in the same session and passed over is scored beside the click alone: it was
shown, so neither popularity nor exposure speaks against it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from scalingnote.fuse.config import FusionLosses
from scalingnote.fuse.document_fusion import DocumentNetwork, Documents
from scalingnote.fuse.query_fusion import Queries, QueryNetwork
from scalingnote.losses.contrastive import cross_entropy
from scalingnote.losses.matryoshka import prefixes
from scalingnote.train.distributed import gather, shares


@dataclass(frozen=True)
class Clicks:
    """One rank's share of a step: each query's clicked document and those passed over in the same session."""

    queries: Queries
    documents: Documents  # row by row of `group`
    group: Int[Tensor, "queries group"]  # row numbers of the corpus, the clicked first; -1 is no document
    log_q: Float[Tensor, " queries"]  # log of the share of clicks that the clicked document has

    def to(self, device: torch.device) -> "Clicks":
        """The same on a device."""
        return Clicks(*(part.to(device) for part in vars(self).values()))


class Stage(nn.Module):
    """Both sides and the losses as one module: what a step trains."""

    def __init__(self, documents: DocumentNetwork, queries: QueryNetwork, losses: FusionLosses) -> None:
        super().__init__()
        self.documents, self.queries, self._losses = documents, queries, losses

    def forward(self, clicks: Clicks) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of this rank (its mean over ranks is the global loss) and its parts, for the log."""
        queries = self.queries(clicks.queries).float()
        documents = self.documents(clicks.documents).float().unflatten(0, clicks.group.shape)
        # bfloat16 would round cosines to 1/256, twenty times that when divided by the temperature.
        with torch.autocast(queries.device.type, enabled=False):
            loss, parts = fusion_loss(queries, documents, clicks, self._losses)
        return loss, {name: part.detach() for name, part in parts.items()}


def fusion_loss(
    queries: Float[Tensor, "queries dim"],
    documents: Float[Tensor, "queries group dim"],
    clicks: Clicks,
    losses: FusionLosses,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Both losses, added up over Matryoshka prefixes; the batch is that of all ranks."""
    share = shares(queries)
    everybody = gather(clicks.group[:, 0], share)
    log_q = gather(clicks.log_q, share) if losses.log_q else torch.zeros_like(everybody, dtype=torch.float32)
    clicked = gather(documents[:, 0], share)
    positives = torch.arange(len(queries), device=queries.device) + share.start
    parts = {"batch": queries.new_zeros(()), "skipped": queries.new_zeros(())}
    for _, (asked, all_clicked, own) in prefixes(queries, clicked, documents, dims=losses.matryoshka):
        parts["batch"] += corrected_softmax(
            asked @ all_clicked.T / losses.temperature,
            log_q=log_q,
            positives=positives,
            same=clicks.group[:, :1] == everybody,
        )
        if losses.group > 1:
            scores = torch.einsum("qd,qgd->qg", asked, own) / losses.temperature
            first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
            parts["skipped"] += cross_entropy(scores, positives=first, ignore=clicks.group < 0)
    return parts["batch"] + losses.skipped_weight * parts["skipped"], parts


def corrected_softmax(
    scores: Float[Tensor, "queries docs"],
    *,
    log_q: Float[Tensor, " docs"],
    positives: Int[Tensor, " queries"],
    same: Bool[Tensor, "queries docs"],
) -> Float[Tensor, ""]:
    """Mean cross entropy of a query's clicked document against those of the batch, corrected for popularity.

        s_c(x_i, y_j) = s(x_i, y_j) - log p_j
        loss = -mean_i log( exp s_c(x_i, y_i) / sum_j exp s_c(x_i, y_j) )

    (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
    section 3: s^c, and the batch softmax of it). p_j is the chance that a row of a batch has document j: its
    share of all clicks that are trained on, counted rather than estimated from a stream. A factor common to
    all p, such as the batch size, cancels. `same` marks a query's own document where other rows clicked it
    too: it is left out, but for the positive itself. `scores` are over their temperature.
    """
    return cross_entropy(scores - log_q, positives=positives, ignore=same)
