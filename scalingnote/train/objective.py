"""Stage I: towers read the triplets of a step, all ranks' documents are candidates, and the losses are added.

    TripletBatches      step number ─► this rank's rows ─► Triplets, as tensors
    StageOne.losses     encode queries and documents ─► gather candidates ─► similarities ─► losses
    L = L_con + alpha L_hard                     ScalingNote, Eq. 12, over views and Matryoshka prefixes
      + weight L_teacher                         a ranking model's scores of each row's documents
      + the same for the uncut query             LightRetriever, for a token_wise query tower
      + L_sparse + flops L_flops                 LightRetriever's term weights, Eq. 9; both weights grow
      + KL(uncut || cheap), of each half         LightRetriever, Eq. 5; that of the sparse half grows

    groups      [queries, group, views, dim]  documents of this rank's queries: the positive, its negatives
    candidates  [docs, views, dim]            of all ranks: all positives, then all first negatives, and so on

A row with fewer negatives than others has places with the document id ABSENT. The row's positive is read in
their place, so that every batch has one shape, and every loss leaves them out. The equations are in
:mod:`scalingnote.train.losses`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray
from torch import Tensor

from scalingnote.core.errors import TrainingError
from scalingnote.models.batch import Batch, collate
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.token_wise import TokenWise
from scalingnote.train.config import Losses, Sparse
from scalingnote.train.data import ABSENT, RankShare
from scalingnote.train.engine import Encode, Objective, WeightedLosses, gather, rank, total
from scalingnote.train.losses import (
    align,
    align_scores,
    cross_entropy,
    false_negative_documents,
    false_negative_queries,
    flops,
    info_nce,
    margin_loss,
    prefixes,
    ramp,
    teacher_kl,
)

R = TypeVar("R", bound="TensorRecord")


@dataclass(frozen=True)
class TensorRecord:
    """A batch with tensors, records of tensors, or None as fields; all fields move to a device together."""

    def to(self: R, device: torch.device) -> R:
        """Copy the record to a device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{n: None if part is None else part.to(device) for n, part in parts.items()})


@dataclass(frozen=True)
class Triplets(TensorRecord):
    """One rank's share of a step. Ids are 63-bit hashes, so that ranks can compare them as integers."""

    queries: Batch
    documents: Batch  # the positives of all queries, then all first negatives, then all second ones...
    query_ids: Int[Tensor, " queries"]
    document_ids: Int[Tensor, " docs"]  # in the order of `documents`; ABSENT if a row has no negative
    known_positives: Int[Tensor, "queries known"]  # padded with -1; equally wide on all ranks
    weights: Float[Tensor, " queries"]  # weight of each row in every loss
    # A teacher's score of the positive, then of each negative; NaN in unscored rows. None: no row has scores.
    scores: Float[Tensor, "queries group"] | None = None
    # Terms of the sparse queries, padded with -1, equally wide on all ranks; None without a sparse head.
    terms: Int[Tensor, "queries terms"] | None = None
    step: Float[Tensor, ""] | None = None  # from 0, of `steps`; None: weights that grow are at their end
    steps: Float[Tensor, ""] | None = None  # of the entire run

    def grow(self, over: float) -> float | Float[Tensor, ""]:
        """Compute the factor at this step of a weight that grows over `over` steps, or this share of all."""
        return 1.0 if self.step is None or self.steps is None else ramp(self.step, self.steps, over=over)


@dataclass(frozen=True)
class GatheredCandidates:
    """This rank's triplets, and the candidates of all ranks that its queries are compared with."""

    triplets: Triplets
    groups: Float[Tensor, "queries group views dim"]  # of this rank's queries
    embeddings: Float[Tensor, "docs views dim"]  # of all ranks
    columns: int  # number of columns of a group that are candidates
    positives: Int[Tensor, " queries"]  # column of each query's positive among the candidates
    present: Bool[Tensor, "queries group"]  # which places of the groups hold a document
    absent: Bool[Tensor, " docs"] | None  # which candidates are ABSENT; None: none of them
    ignored_documents: Bool[Tensor, "queries docs"]  # absent, or false negatives
    false_negative_queries: Bool[Tensor, "queries all"]


class StageOne(Objective):
    """Dual encoder and losses as one module."""

    def __init__(
        self, towers: DualEncoder, losses: Losses, *, sparse: Sparse | None = None, align: bool = False
    ) -> None:
        super().__init__()
        self.towers, self._losses, self._sparse, self._align = towers, losses, sparse, align

    def losses(self, batch: Triplets, encode: Encode) -> WeightedLosses:
        """Compute the weighted losses of this rank, and their parts; means of both over ranks are global."""
        config = self._losses
        embedded = encode("query", batch.queries) | encode("document", batch.documents)
        # bfloat16 would round cosines to 1/256, or 20 times that after division by the temperature.
        with torch.autocast(embedded["query"].device.type, enabled=False):
            queries = whole = embedded["query"][:, 0]
            candidates = gather_candidates(batch, embedded["document"], config)
            parts = dense_losses(queries, candidates, config)
            weighted = _weigh(parts, config)
            if "whole_query" in embedded:
                whole = embedded["whole_query"][:, 0]
                weighted["whole"] = total(_weigh(dense_losses(whole, candidates, config), config))
                weighted["align"] = dense_alignment(queries, whole, candidates, config)
                parts |= {name: weighted[name] for name in ("whole", "align")}
            if self._sparse:
                sparse = self._sparse_losses(embedded["terms"], whole, candidates, self._sparse)
                weighted, parts = weighted | sparse[0], parts | sparse[1]
        return weighted, parts

    def encode(self, name: str, rows: Batch) -> dict[str, Tensor]:
        """Encode ``query`` [rows, 1, dim] or ``document`` [rows, views, dim], in float32.

        With ``query`` also ``whole_query`` of its shape, if the backbone of a token_wise tower also reads the
        uncut text; with ``document`` also ``terms`` [rows, vocabulary], from a sparse head.
        """
        if name == "document" and self._sparse:
            embeddings, terms = self.towers.document.read(rows)
            return {"document": embeddings.float(), "terms": terms.float()}
        encoded = {name: self.embeddings(name, rows)}
        query = self.towers.query
        if name == "query" and self._align and isinstance(query, TokenWise):
            encoded["whole_query"] = query.contextual(rows).float()
        return encoded

    def embeddings(self, name: str, rows: Batch) -> Float[Tensor, "rows views dim"]:
        """Encode rows by one tower, in float32; for validation."""
        return self.towers.encode(name, rows).float()

    def _sparse_losses(
        self,
        terms: Float[Tensor, "docs vocabulary"],
        whole: Float[Tensor, "queries dim"],
        candidates: GatheredCandidates,
        config: Sparse,
    ) -> WeightedLosses:
        """Compute loss and regulariser of term weights, and their alignment with dense scores."""
        triplets = candidates.triplets
        assert triplets.terms is not None, "the config has a sparse head, but the batch has no sparse queries"
        scores = sparse_scores(
            terms, triplets.terms, columns=candidates.columns, binary=config.query == "binary"
        )
        parts = {
            "sparse": cross_entropy(
                scores,
                positives=candidates.positives,
                ignore=candidates.ignored_documents,
                weights=triplets.weights,
            ),
            "flops": flops(mean_term_weights(terms, candidates.present)),
        }
        factor, penalty = (triplets.grow(over) for over in (config.ramp, config.flops_ramp))
        weighted = {"sparse": factor * parts["sparse"], "flops": penalty**2 * config.flops * parts["flops"]}
        if self._align:
            view = candidates.groups.shape[2] - 1  # the last view is behind all others in the text
            teacher = candidate_log_probabilities(whole, candidates, view, self._losses)
            parts["sparse_align"] = align_scores(
                scores, teacher=teacher, weights=triplets.weights, absent=candidates.absent
            )
            weighted["sparse_align"] = factor * parts["sparse_align"]
        is_document = candidates.present.T.flatten()
        parts["terms"] = ((terms > 0).sum(1) * is_document).sum() / is_document.sum()
        return weighted, parts


def dense_losses(
    queries: Float[Tensor, "queries dim"], candidates: GatheredCandidates, losses: Losses
) -> dict[str, Float[Tensor, ""]]:
    """Compute L_con (Eq. 8), L_hard (Eq. 11) and the teacher's loss of this rank's queries, not yet weighted.

    Returns:
        ``contrastive``, ``margin`` and, if it has a weight, ``teacher``: sums over prefixes and views.
    """
    scores = candidates.triplets.scores
    if losses.teacher and scores is None:
        raise TrainingError(
            "losses.teacher has a weight, but the triplets have no scores: collect them with a ranking "
            "model, or set it to 0"
        )
    all_queries = gather(queries) if losses.bidirectional else queries
    rows: dict[str, Any] = {"weights": candidates.triplets.weights}
    softmax: dict[str, Any] = {
        "positives": candidates.positives,
        "temperature": losses.temperature,
        **rows,
    }
    contrastive = margin = teacher = torch.zeros((), device=queries.device)
    for q, all_q, groups, documents in prefixes(
        queries, all_queries, candidates.groups, candidates.embeddings, dims=losses.matryoshka
    ):
        for view in range(groups.shape[2]):
            loss = info_nce(q, documents[:, view], ignore=candidates.ignored_documents, **softmax)
            if losses.bidirectional:
                positives = groups[:, 0, view]
                back = info_nce(positives, all_q, ignore=candidates.false_negative_queries, **softmax)
                loss = (loss + back) / 2
            contrastive = contrastive + loss
            cosines = torch.einsum("qd,qgd->qg", q, groups[:, :, view])
            if losses.alpha and cosines.shape[1] > 1:
                hard = margin_loss(cosines, margin=losses.margin, present=candidates.present, **rows)
                margin = margin + hard
            if losses.teacher and scores is not None:
                # The student's logits are those of its own softmax: cosines divided by the temperature.
                logits = cosines / losses.temperature
                teacher = teacher + teacher_kl(logits, scores, present=candidates.present, **rows)
    parts = {"contrastive": contrastive, "margin": margin}
    return parts | {"teacher": teacher} if losses.teacher else parts


def _weigh(parts: Mapping[str, Tensor], losses: Losses) -> dict[str, Tensor]:
    weights = {"contrastive": 1.0, "margin": losses.alpha, "teacher": losses.teacher}
    return {name: weights[name] * part for name, part in parts.items()}


def dense_alignment(
    queries: Float[Tensor, "queries dim"],
    whole: Float[Tensor, "queries dim"],
    candidates: GatheredCandidates,
    losses: Losses,
) -> Float[Tensor, ""]:
    """Compute the KL of cheap `queries` to `whole` ones (LightRetriever, Eq. 5), over prefixes and views.

    The teacher's scores are those of its widest prefix.
    """
    total = torch.zeros((), device=queries.device)
    for view in range(candidates.embeddings.shape[1]):
        teacher = candidate_log_probabilities(whole, candidates, view, losses)
        for q, documents in prefixes(queries, candidates.embeddings[:, view], dims=losses.matryoshka):
            total = total + align(
                q,
                documents,
                teacher=teacher,
                temperature=losses.temperature,
                weights=candidates.triplets.weights,
                absent=candidates.absent,
            )
    return total


@torch.no_grad()
def candidate_log_probabilities(
    queries: Float[Tensor, "queries dim"], candidates: GatheredCandidates, view: int, losses: Losses
) -> Float[Tensor, "queries docs"]:
    """Compute the log softmax of `queries` over the candidates of one view.

    Scores are cosines of the widest prefix, divided by the temperature.
    """
    ((q, documents),) = prefixes(queries, candidates.embeddings[:, view], dims=[max(losses.matryoshka)])
    scores = q / losses.temperature @ documents.T
    if candidates.absent is not None:
        scores = scores.masked_fill(candidates.absent, -torch.inf)
    return scores.log_softmax(1)


# --- candidates of all ranks -------------------------------------------------------------------------------


def gather_candidates(
    triplets: Triplets, documents: Float[Tensor, "docs views dim"], losses: Losses
) -> GatheredCandidates:
    """Gather positives and negatives of all ranks, with masks of the absent ones and of false negatives.

    `documents` are the embeddings of this rank's documents, in the order of `triplets.documents`; `losses`
    determine whether negatives are gathered too.
    """
    query_ids, known = triplets.query_ids, triplets.known_positives
    size = len(query_ids)
    groups = documents.unflatten(0, (-1, size)).transpose(0, 1)
    ids = triplets.document_ids.unflatten(0, (-1, size)).T
    columns = 1 if losses.denominator == "positives_only" else groups.shape[1]
    # One exchange for all ids.
    gathered = gather(torch.cat([query_ids[:, None], ids[:, :columns], known], dim=1))
    all_query_ids, all_ids, all_known = gathered.split([1, columns, known.shape[1]], dim=1)
    candidate_ids = all_ids.T.flatten()
    absent = None if columns == 1 else candidate_ids == ABSENT  # positives are never absent
    answers = false_negative_documents(
        query_ids, ids[:, 0], known, all_query_ids=all_query_ids[:, 0], candidate_ids=candidate_ids
    )
    return GatheredCandidates(
        triplets,
        groups,
        # Positives of all ranks first, then each column of negatives, or labels would shift.
        gather(groups[:, :columns]).transpose(0, 1).flatten(0, 1),
        columns,
        torch.arange(size, device=documents.device) + rank() * size,
        ids != ABSENT,
        absent,
        answers if absent is None else answers | absent,
        false_negative_queries(
            query_ids,
            ids[:, 0],
            all_query_ids=all_query_ids[:, 0],
            all_positive_ids=all_ids[:, 0],
            all_known=all_known,
        ),
    )


def sparse_scores(
    documents: Float[Tensor, "docs vocabulary"],
    queries: Int[Tensor, "queries terms"],
    *,
    columns: int,
    binary: bool,
) -> Float[Tensor, "queries candidates"]:
    """Compute inner products of this rank's sparse queries with the candidates of all ranks, with gradients.

    Each rank scores its own documents for the queries of all ranks, and the scores are gathered: gathering
    term weights would move one number per term of the vocabulary for each document.

    `documents` are all positives, all first negatives, and so on; the first `columns` of these are
    candidates. `queries` are terms with repetition, padded with -1, equally wide on all ranks. If `binary`, a
    term counts once, however often it occurs in the query.
    """
    size = len(queries)
    all_queries = gather(queries)
    distinct, place = all_queries.clamp(min=0).unique(return_inverse=True)
    values = torch.zeros(len(all_queries), len(distinct), dtype=documents.dtype, device=documents.device)
    values.scatter_add_(1, place, (all_queries >= 0).to(values.dtype))
    if binary:
        values.clamp_(max=1)
    scores_by_document = documents[: columns * size, distinct] @ values.T
    groups = scores_by_document.unflatten(0, (columns, size)).transpose(
        0, 1
    )  # [queries, columns, queries of all ranks]
    scores = gather(groups)[:, :, rank() * size : (rank() + 1) * size]
    return scores.transpose(0, 1).flatten(0, 1).T


def mean_term_weights(
    documents: Float[Tensor, "docs vocabulary"], present: Bool[Tensor, "queries group"]
) -> Float[Tensor, " vocabulary"]:
    """Compute mean term weights over the documents of all ranks that are `present`, with gradients.

    The result is equal on all ranks. `documents` are all positives, all first negatives, and so on.
    """
    is_document = present.T.flatten()[:, None]
    total = gather((documents * is_document).sum(0, keepdim=True)).sum(0)
    return total / gather(is_document.sum().view(1, 1)).sum()


# --- batches ---------------------------------------------------------------------------------------------


class TripletBatches:
    """Triplets of any step, for one rank: a function only of the step number.

    `share_of` returns this rank's rows of a step, from a mapped store or a stream; `facts` are those of the
    store, `pads` the pad tokens of the query and the document tower, `steps` those of the entire run.
    `instructions` are, for each set of a mixture, the numbers of its instructions; every batch draws one, by
    `seed`.
    """

    def __init__(
        self,
        share_of: Callable[[int], RankShare],
        facts: Mapping[str, Any],
        *,
        pads: tuple[int, int],
        steps: int | None = None,
        instructions: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
    ) -> None:
        self._share_of, self._pads, self._steps = share_of, pads, steps
        self._instructions, self._seed = instructions, seed % 2**64
        self._known, self._scored = max(facts["known"], 1), facts["scored"]
        self._terms: int | None = facts.get("terms")

    def __call__(self, step: int) -> Triplets:
        """Build this rank's share of a step."""
        rows, chosen, documents, places = self._share_of(step)
        query_pad, document_pad = self._pads
        terms = None
        if self._terms is not None:
            terms = torch.from_numpy(pad_lists(rows.lists("terms", chosen), width=max(self._terms, 1)))
        # Positives first, then each column of negatives: gather_candidates expects this layout.
        tokens = documents.tokens(places.T.reshape(-1))
        queries = collate(rows.tokens(chosen), pad=query_pad, packed=True)
        if self._instructions:
            choices = self._instructions[int(rows.values("set", chosen[:1])[0])]
            number = int(np.random.default_rng([self._seed, step]).integers(len(choices)))
            queries = replace(queries, instruction=choices[number])
        return Triplets(
            queries=queries,
            documents=collate(tokens, pad=document_pad, packed=True),
            query_ids=torch.from_numpy(rows.values("query", chosen)),
            document_ids=torch.from_numpy(rows.values("documents", chosen).T.reshape(-1)),
            known_positives=torch.from_numpy(pad_lists(rows.lists("known", chosen), width=self._known)),
            weights=torch.from_numpy(rows.values("weight", chosen)),
            scores=torch.from_numpy(rows.values("scores", chosen)) if self._scored else None,
            terms=terms,
            step=torch.tensor(float(step)) if self._steps else None,
            steps=torch.tensor(float(self._steps)) if self._steps else None,
        )


def pad_lists(lists: Sequence[ndarray], *, width: int) -> Int64[ndarray, "rows width"]:
    """Convert lists of at most `width` numbers to a table, padded with -1; equally wide on every rank."""
    out: ndarray = np.full((len(lists), width), -1, dtype=np.int64)
    for row, values in enumerate(lists):
        out[row, : len(values)] = values
    return out
