"""The stage I loss of one rank: contrastive both ways plus margin, on every view and prefix (Eq. 5-12).

LightRetriever's parts join it where they are asked for: the same losses for the whole query through the
backbone of a token_wise tower, contrastive loss and FLOPs regulariser of term weights, and the KL that aligns
cheap scores with the whole query's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.losses import sparsity
from scalingnote.losses.alignment import align_scores
from scalingnote.losses.contrastive import cross_entropy
from scalingnote.losses.temperature import Temperature
from scalingnote.models.batch import Batch
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.token_wise import TokenWise
from scalingnote.train.config import Align, Losses, Sparse
from scalingnote.train.dense_loss import dense_alignment, dense_loss, stage_one_loss, whole_scores
from scalingnote.train.meeting import Triplets, meet
from scalingnote.train.sparse_scores import mean_terms, sparse_scores

__all__ = ["StageOne", "Triplets", "stage_one_loss"]


class StageOne(nn.Module):
    """Dual encoder and loss as one module; what a step trains, plainly or through GradCache."""

    def __init__(
        self,
        towers: DualEncoder,
        losses: Losses,
        *,
        sparse: Sparse | None = None,
        align: Align | None = None,
        uneven: bool = False,
    ) -> None:
        """`uneven`: ranks may bring different numbers of rows, and tell each other at every step."""
        super().__init__()
        self.towers, self._losses, self._uneven = towers, losses, uneven
        self._sparse, self._align = sparse, align
        # The whole query is read beside the cheap one, which is what is kept.
        self._twice = align is not None and isinstance(towers.query, TokenWise)
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
        """What the loss reads of some rows, in float32; or the temperature as the only number of one.

        Embeddings, but: an aligned query has a second view, the whole query's; a document with term
        weights has one view, in which they stand behind all its embeddings.
        """
        if rows is None:
            assert self.temperature is not None
            return self.temperature().float().view(1, 1, 1)  # type: ignore[no-any-return]
        if name == "document" and self._sparse:
            embeddings, terms = self.towers.document.read(rows)
            return torch.cat([embeddings.float().flatten(1), terms.float()], dim=1)[:, None]
        embeddings = self.embeddings(name, rows)
        query = self.towers.query
        if name == "query" and self._twice:
            assert isinstance(query, TokenWise)
            embeddings = torch.cat([embeddings, query.contextual(rows).float()], dim=1)
        return embeddings

    def embeddings(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """Embeddings of some rows of a tower, in float32, and nothing else."""
        return self.towers.encode(name, rows).float()

    def loss(
        self, embeddings: dict[str, Tensor], triplets: Triplets
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """This rank's loss and its parts, and the temperature if it is learnt. Parts are of this rank alone:
        like the loss, their means over ranks are those of the global batch.
        """
        queries, documents, terms = embeddings["query"], embeddings["document"], None
        if self._sparse:
            views, dim = len(self._view_weights), self.towers.document.dim
            together, vocabulary = documents[:, 0], documents.shape[2] - views * dim
            documents, terms = together.split([views * dim, vocabulary], dim=1)
            documents = documents.unflatten(1, (views, dim))
        learnt = embeddings.get("temperature")
        temperature = self._losses.temperature if learnt is None else learnt.squeeze()
        # bfloat16 would round cosines to 1/256, twenty times that when divided by the temperature.
        with torch.autocast(queries.device.type, enabled=False):
            loss, parts = self._parts(queries, documents, terms, triplets, temperature)
        if learnt is not None:
            parts["temperature"] = learnt.squeeze()
        return loss, {name: part.detach() for name, part in parts.items()}

    def _parts(
        self,
        queries: Float[Tensor, "queries readings dim"],
        documents: Float[Tensor, "docs views dim"],
        terms: Float[Tensor, "docs vocabulary"] | None,
        triplets: Triplets,
        temperature: float | Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, align, sparse = self._losses, self._align, self._sparse
        met = meet(triplets, documents, losses, uneven=self._uneven)
        knobs: dict[str, Any] = {"temperature": temperature, "view_weights": self._view_weights}
        parts = dense_loss(queries[:, 0], met, losses, **knobs)
        loss = _together(parts, losses)
        if self._twice:
            parts["whole"] = _together(dense_loss(queries[:, 1], met, losses, **knobs), losses)
            loss = loss + parts["whole"]
        if align and self._twice:
            parts["align"] = dense_alignment(queries[:, 0], queries[:, 1], met, losses, align, **knobs)
            loss = loss + align.weight * parts["align"]
        if sparse:
            assert terms is not None
            assert triplets.terms is not None, "a sparse head was asked for, the batch has no sparse queries"
            scores = sparse_scores(
                terms,
                triplets.terms,
                share=met.share,
                columns=met.columns,
                binary=sparse.query == "binary",
            )
            scores = scores / sparse.temperature
            parts["sparse"] = cross_entropy(
                scores, positives=met.positives, ignore=met.not_negatives, weights=met.weights
            )
            parts["flops"] = sparsity.flops(mean_terms(terms, share=met.share))
            growing = 1.0 if triplets.progress is None else sparsity.ramp(triplets.progress, sparse.ramp)
            loss = loss + sparse.weight * parts["sparse"] + sparse.flops * growing * parts["flops"]
            if align:
                view = len(self._view_weights) - 1  # the last one sees what all others do
                teacher = whole_scores(queries[:, -1], met, max(losses.matryoshka), view, temperature)
                parts["sparse_align"] = align_scores(scores, teacher=teacher, weights=met.weights)
                loss = loss + align.weight * parts["sparse_align"]
            parts["terms"] = (terms > 0).sum(1).float().mean()
        return loss, parts


def _together(parts: Mapping[str, Tensor], losses: Losses) -> Tensor:
    loss = parts["contrastive"] + losses.alpha * parts["margin"]
    return loss + losses.teacher.weight * parts["teacher"] if losses.teacher else loss


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
