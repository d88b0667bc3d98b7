"""The cross-encoder's loss of one rank: ranking a query's candidates, and keeping its tokens apart."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.cross_encoder.config import CrossEncoderLosses
from scalingnote.errors import TrainingError
from scalingnote.losses import teacher_scores
from scalingnote.models import cross_encoder
from scalingnote.models.batch import Batch
from scalingnote.models.cross_encoder import CrossEncoder
from scalingnote.train.distributed import shares


@dataclass(frozen=True)
class Pairs:
    """One rank's share of a step: every query with its positive, its hard negatives, others' positives."""

    pairs: Batch  # all queries with their positives, then all with their first negatives, and so on
    weights: Float[Tensor, " queries"]
    answers: Bool[Tensor, "queries group"]  # candidates that are no negatives, the positive left out
    scores: Float[Tensor, "queries scored"] | None = None  # a ranking model's, of the first candidates

    def to(self, device: torch.device) -> "Pairs":
        """The same pairs on a device."""
        parts = vars(self).items()
        moved: dict[str, Any] = {name: None if part is None else part.to(device) for name, part in parts}
        return Pairs(**moved)


class PairStage(nn.Module):
    """Cross-encoder and losses as one module; what a step trains, plainly or through GradCache."""

    def __init__(self, model: CrossEncoder, losses: CrossEncoderLosses, *, uneven: bool = False) -> None:
        """`uneven`: ranks may bring different numbers of rows, and tell each other at every step."""
        super().__init__()
        self.model, self._losses, self._uneven = model, losses, uneven

    def forward(self, batch: Pairs) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """Loss of this rank (its mean over ranks is the global loss) and its parts, for the log."""
        return self.loss({"pair": self.encode("pair", batch.pairs)}, batch)

    def inputs(self, batch: Pairs) -> dict[str, Batch | None]:
        """The pairs."""
        return {"pair": batch.pairs}

    def encode(self, name: str, rows: Batch | None) -> Float[Tensor, "pairs 1 width"]:
        """Both proxies and the reconstruction loss of some pairs, side by side, in float32."""
        return self.model(rows).float()  # type: ignore[no-any-return]

    def loss(
        self, embeddings: dict[str, Tensor], batch: Pairs
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """This rank's loss and its parts; like the loss, their means over ranks are those of all rows."""
        found, dim, losses = embeddings["pair"][:, 0], self.model.dim, self._losses
        queries = len(batch.weights)
        share = shares(batch.weights, uneven=self._uneven).weight
        with torch.autocast(found.device.type, enabled=False):
            logits = (
                cross_encoder.scores(found[:, :dim], found[:, dim : 2 * dim]).unflatten(0, (-1, queries)).T
            )
            parts: dict[str, Tensor] = {}
            weights = batch.weights * share
            if losses.one_hot:
                parts["one_hot"] = one_hot(logits, batch.answers, weights=weights)
            if losses.teacher:
                parts["teacher"] = _teacher(logits, batch.scores, weights)
            if losses.reconstruction:
                parts["reconstruction"] = share * found[:, 2 * dim].mean()
            loss = sum(
                (getattr(losses, name) * part for name, part in parts.items()), start=logits.new_zeros(())
            )
        return loss, {name: part.detach() for name, part in parts.items()}


def one_hot(
    logits: Float[Tensor, "queries group"],
    answers: Bool[Tensor, "queries group"],
    *,
    weights: Float[Tensor, " queries"],
) -> Float[Tensor, ""]:
    """Mean cross entropy of the positive, which comes first, among candidates that do not answer (Eq. 9)."""
    allowed = logits.masked_fill(answers, torch.finfo(logits.dtype).min)
    first = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return (weights * F.cross_entropy(allowed, first, reduction="none")).mean()


def _teacher(logits: Tensor, scores: Tensor | None, weights: Tensor) -> Tensor:
    if scores is None:
        raise TrainingError(
            "cross_encoder.losses.teacher is set, but the triplets carry no scores: collect them with a "
            "ranking model, or set it to 0"
        )
    return teacher_scores.kl(logits[:, : scores.shape[1]], scores, weights=weights)
