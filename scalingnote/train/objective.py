"""The stage I loss of one rank: contrastive in both directions plus margin, on every view and prefix.

    L = L_con + alpha L_hard                     ScalingNote, Eq. 12, over views and Matryoshka prefixes
      + weight L_teacher                         a ranking model's scores of each row's documents
      + the same for the whole query             LightRetriever, for a token_wise query tower
      + weight L_sparse + flops L_flops          LightRetriever's term weights, Eq. 9; both weights grow
      + weight KL(whole || cheap), of each half  LightRetriever, Eq. 5; that of the sparse half grows

Candidates are the documents of all ranks (:mod:`scalingnote.train.candidates`); the equations themselves
are in :mod:`scalingnote.losses`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from scalingnote.errors import ConfigError, TrainingError
from scalingnote.losses import (
    Temperature,
    align,
    align_scores,
    cross_entropy,
    flops,
    info_nce,
    margin_loss,
    prefixes,
    ramp,
    teacher_kl,
    teacher_margin_mse,
)
from scalingnote.models.batch import Batch
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.token_wise import TokenWise
from scalingnote.train.candidates import (
    GatheredCandidates,
    Triplets,
    gather_candidates,
    mean_term_weights,
    sparse_scores,
)
from scalingnote.train.collectives import gather
from scalingnote.train.config import Align, Losses, Sparse
from scalingnote.train.engine import Cacheable, total


class StageOne(Cacheable):
    """Dual encoder and loss as one module; a step trains it plainly or through GradCache."""

    def __init__(
        self, towers: DualEncoder, losses: Losses, *, sparse: Sparse | None = None, align: Align | None = None
    ) -> None:
        super().__init__()
        self.towers, self._losses, self._sparse, self._align = towers, losses, sparse, align
        self.temperature = Temperature(losses.temperature) if losses.learn_temperature else None
        self._view_weights = _view_weights(towers.document.views, losses.view_weights)

    def inputs(self, batch: Triplets) -> dict[str, Batch | None]:
        """Rows of both towers; a learnt temperature needs no rows."""
        rows: dict[str, Batch | None] = {"query": batch.queries, "document": batch.documents}
        return rows if self.temperature is None else rows | {"temperature": None}

    def encode(self, name: str, rows: Batch | None) -> dict[str, Tensor]:
        """``query`` [rows, 1, dim], ``document`` [rows, views, dim], in float32, or ``temperature`` [1].

        With ``query`` also ``whole_query`` of its shape, where the backbone of a token_wise tower also reads
        the whole text; with ``document`` also ``terms`` [rows, vocabulary], of a sparse head.
        """
        if rows is None:
            assert self.temperature is not None
            return {"temperature": self.temperature().float().view(1)}
        if name == "document" and self._sparse:
            embeddings, terms = self.towers.document.read(rows)
            return {"document": embeddings.float(), "terms": terms.float()}
        encoded = {name: self.embeddings(name, rows)}
        query = self.towers.query
        if name == "query" and self._align and isinstance(query, TokenWise):
            encoded["whole_query"] = query.contextual(rows).float()
        return encoded

    def embeddings(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """Embeddings of some rows by one tower, in float32; for validation."""
        return self.towers.encode(name, rows).float()

    def weighted_losses(
        self, embeddings: dict[str, Tensor], batch: Triplets
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's losses times their weights, their parts, and the temperature if it is learnt.

        Parts are of this rank alone: like the loss, their means over ranks are those of the global batch.
        """
        learnt = embeddings.get("temperature")
        temperature = self._losses.temperature if learnt is None else learnt.squeeze()
        # bfloat16 would round cosines to 1/256, twenty times that when divided by the temperature.
        with torch.autocast(embeddings["query"].device.type, enabled=False):
            weighted, parts = self._losses_of_queries(embeddings, batch, temperature)
        if learnt is not None:
            parts["temperature"] = learnt.squeeze()
        return weighted, parts

    def _losses_of_queries(
        self, embeddings: dict[str, Tensor], triplets: Triplets, temperature: float | Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        gathered = gather_candidates(triplets, embeddings["document"], self._losses)
        queries = embeddings["query"][:, 0]
        knobs: dict[str, Any] = {"temperature": temperature, "view_weights": self._view_weights}
        parts = dense_loss(queries, gathered, self._losses, **knobs)
        weighted = _weighted(parts, self._losses)
        teacher_queries = queries
        if "whole_query" in embeddings:
            assert self._align is not None
            teacher_queries = embeddings["whole_query"][:, 0]
            whole = dense_loss(teacher_queries, gathered, self._losses, **knobs)
            weighted["whole"] = parts["whole"] = total(_weighted(whole, self._losses))
            parts["align"] = dense_alignment(
                queries, teacher_queries, gathered, self._losses, self._align, **knobs
            )
            weighted["align"] = self._align.weight * parts["align"]
        if self._sparse:
            more = self._sparse_losses(embeddings["terms"], teacher_queries, gathered, temperature)
            weighted, parts = weighted | more[0], parts | more[1]
        return weighted, parts

    def _sparse_losses(
        self,
        terms: Float[Tensor, "docs vocabulary"],
        teacher_queries: Float[Tensor, "queries dim"],
        gathered: GatheredCandidates,
        temperature: float | Tensor,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Contrastive loss and regulariser of term weights, and their alignment with dense scores."""
        sparse, triplets = self._sparse, gathered.triplets
        assert sparse is not None
        assert triplets.terms is not None, "the config has a sparse head, the batch no sparse queries"
        scores = sparse_scores(
            terms, triplets.terms, columns=gathered.columns, binary=sparse.query == "binary"
        )
        scores = scores / sparse.temperature
        parts = {
            "sparse": cross_entropy(
                scores,
                positives=gathered.positives,
                ignore=gathered.ignored_documents,
                weights=gathered.triplets.weights,
            ),
            "flops": flops(mean_term_weights(terms, gathered.present)),
        }
        grown = _grown(triplets, sparse.ramp)
        penalty = _grown(triplets, sparse.flops_ramp) ** 2 * sparse.flops
        weighted = {"sparse": grown * sparse.weight * parts["sparse"], "flops": penalty * parts["flops"]}
        if self._align:
            view = len(self._view_weights) - 1  # the last view stands behind all others in the text
            widest = max(self._losses.matryoshka)
            teacher = candidate_log_probabilities(teacher_queries, gathered, widest, view, temperature)
            parts["sparse_align"] = align_scores(
                scores, teacher=teacher, weights=gathered.triplets.weights, absent=gathered.absent
            )
            weighted["sparse_align"] = grown * sparse.align_weight * parts["sparse_align"]
        own = gathered.present.T.flatten()
        parts["terms"] = ((terms > 0).sum(1) * own).sum() / own.sum()
        return weighted, parts


def dense_loss(
    queries: Float[Tensor, "queries dim"],
    gathered: GatheredCandidates,
    losses: Losses,
    *,
    temperature: float | Float[Tensor, ""],
    view_weights: Sequence[float],
) -> dict[str, Float[Tensor, ""]]:
    """L_con (Eq. 8), L_hard (Eq. 11) and the teacher's loss of this rank's queries, not yet weighted.

    Returns ``contrastive``, ``margin`` and, where the config has one, ``teacher``: sums over prefixes and
    over the views of the documents, by `view_weights`. A view of weight 0 costs nothing.
    """
    all_queries = gather(queries) if losses.bidirectional else queries
    rows: dict[str, Any] = {"weights": gathered.triplets.weights}
    softmax: dict[str, Any] = {"positives": gathered.positives, "temperature": temperature, **rows}
    contrastive = margin = teacher = torch.zeros((), device=queries.device)
    for prefix_weight, (q, all_q, groups, candidates) in prefixes(
        queries,
        all_queries,
        gathered.groups,
        gathered.candidates,
        dims=losses.matryoshka,
        weights=losses.matryoshka_weights,
    ):
        for view, view_weight in enumerate(view_weights):
            if not view_weight:
                continue
            weight = prefix_weight * view_weight
            loss = info_nce(q, candidates[:, view], ignore=gathered.ignored_documents, **softmax)
            if losses.bidirectional:
                positives = groups[:, 0, view]
                back = info_nce(positives, all_q, ignore=gathered.false_negative_queries, **softmax)
                loss = (loss + back) / 2
            contrastive = contrastive + weight * loss
            cosines = torch.einsum("qd,qgd->qg", q, groups[:, :, view])
            if losses.alpha and cosines.shape[1] > 1:
                hard = margin_loss(cosines, margin=losses.margin, present=gathered.present, **rows)
                margin = margin + weight * hard
            if losses.teacher:
                # The student's logits are those of its own softmax: cosines over the temperature.
                logits = cosines / temperature
                teacher = teacher + weight * _teacher_loss(logits, gathered, losses, rows)
    parts = {"contrastive": contrastive, "margin": margin}
    return parts | {"teacher": teacher} if losses.teacher else parts


def _teacher_loss(
    student: Float[Tensor, "queries group"],
    gathered: GatheredCandidates,
    losses: Losses,
    rows: dict[str, Any],
) -> Float[Tensor, ""]:
    assert losses.teacher is not None
    scores = gathered.triplets.scores
    if scores is None:
        raise TrainingError(
            "losses.teacher is set, but the triplets carry no scores: collect them with a ranking model, "
            "or leave losses.teacher out"
        )
    rows = rows | {"present": gathered.present}
    if losses.teacher.kind == "kl":
        return teacher_kl(student, scores / losses.teacher.temperature, **rows)
    return teacher_margin_mse(student, scores, **rows)


def dense_alignment(
    queries: Float[Tensor, "queries dim"],
    whole: Float[Tensor, "queries dim"],
    gathered: GatheredCandidates,
    losses: Losses,
    config: Align,
    *,
    temperature: float | Float[Tensor, ""],
    view_weights: Sequence[float],
) -> Float[Tensor, ""]:
    """KL of cheap `queries` to `whole` ones (LightRetriever, Eq. 5), weighted like the contrastive loss."""
    total = torch.zeros((), device=queries.device)
    dims, weights = losses.matryoshka, losses.matryoshka_weights
    for view, view_weight in enumerate(view_weights):
        if not view_weight:
            continue
        teacher_dims = [max(dims)] if config.prefix == "widest" else dims
        teachers = {
            dim: candidate_log_probabilities(whole, gathered, dim, view, temperature) for dim in teacher_dims
        }
        pairs = prefixes(queries, gathered.candidates[:, view], dims=dims, weights=weights)
        for dim, (weight, (q, candidates)) in zip(dims, pairs, strict=True):
            teacher = teachers[max(dims) if config.prefix == "widest" else dim]
            loss = align(
                q,
                candidates,
                teacher=teacher,
                temperature=temperature,
                weights=gathered.triplets.weights,
                absent=gathered.absent,
            )
            total = total + weight * view_weight * loss
    return total


@torch.no_grad()
def candidate_log_probabilities(
    queries: Float[Tensor, "queries dim"],
    gathered: GatheredCandidates,
    prefix: int,
    view: int,
    temperature: float | Float[Tensor, ""],
) -> Float[Tensor, "queries docs"]:
    """Log softmax over the candidates of one view, by the cosines of a prefix of `queries`; no gradient."""
    ((_, (q, candidates)),) = prefixes(queries, gathered.candidates[:, view], dims=[prefix])
    scores = q / temperature @ candidates.T
    if gathered.absent is not None:
        scores = scores.masked_fill(gathered.absent, -torch.inf)
    return scores.log_softmax(1)


def _grown(triplets: Triplets, over: float) -> float | Float[Tensor, ""]:
    """The factor of a weight at the step of these triplets."""
    if triplets.step is None or triplets.steps is None:
        return 1.0
    return ramp(triplets.step, triplets.steps, over=over)


def _weighted(parts: Mapping[str, Tensor], losses: Losses) -> dict[str, Tensor]:
    weighted = {"contrastive": parts["contrastive"], "margin": losses.alpha * parts["margin"]}
    return weighted | {"teacher": losses.teacher.weight * parts["teacher"]} if losses.teacher else weighted


def _view_weights(views: Sequence[str], weights: Mapping[Any, float]) -> tuple[float, ...]:
    if unknown := sorted(set(weights) - set(views)):
        raise ConfigError(
            f"losses.view_weights names {', '.join(unknown)}, but the document prompt gives "
            f"{', '.join(views)}: add the placeholder to the prompt or leave the weight out"
        )
    by_view = tuple(weights.get(view, 1.0) for view in views)
    if not any(by_view):
        raise ConfigError("losses.view_weights leaves no view to learn from: give one a weight above 0")
    return by_view
