"""Every training loss: pure functions of tensors, each a numbered equation of a paper.

    contrastive    info_nce, cross_entropy                    ScalingNote Eq. 5 and 6, EmbedDistill Eq. 9
    views          prefixes                                   ScalingNote Eq. 7 and 10 (Matryoshka)
    margin         margin_loss                                ScalingNote Eq. 9
    stage II       qkd                                        ScalingNote Eq. 15
                   cosine_distance                            LEAF, arXiv 2509.12539
                   embedding_matching                         EmbedDistill Eq. 7 and 8
                   softmax_scores, bce_scores, mse_scores     EmbedDistill Eq. 11-13
    ranking model  teacher_kl
    LightRetriever align, align_scores, flops                 LightRetriever Eq. 5 and 9

A loss is a mean over rows, in general over queries. `weights` multiply the losses of the rows before the
mean, which is still taken over *all* rows: a row has the same weight in every batch and on every rank. Rows
without a teacher's score hold NaN and contribute 0. A row with fewer documents than others has places that
are not `present`, with any content: its loss is only that of its own documents.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from scalingnote.train.config import steps_of

Loss = Float[Tensor, ""]
Embeddings = Float[Tensor, "queries dim"]
Scores = Float[
    Tensor, "queries docs"
]  # of all candidates, or of those in a row's group with the positive first
Mask = Bool[Tensor, "queries docs"]  # of the same candidates
Weights = Float[Tensor, " queries"] | None  # None: all are 1


# --- contrastive -----------------------------------------------------------------------------------------


def info_nce(
    queries: Embeddings,
    candidates: Float[Tensor, "docs dim"],
    *,
    positives: Int[Tensor, " queries"],
    temperature: float | Float[Tensor, ""],
    ignore: Mask | None = None,
    weights: Weights = None,
) -> Loss:
    """Compute the mean cross entropy of each query's positive against all candidates (ScalingNote, Eq. 5).

    -log( exp(s(q, d+) / tau) / sum over d of exp(s(q, d) / tau) ). Eq. 6 is the same with the sides
    exchanged.

    Args:
        queries: unit vectors, so that a product is a cosine.
        candidates: unit vectors.
        positives: column of each query's positive among the candidates.
        temperature: tau; gradients flow into it if it is a tensor.
        ignore: candidates to leave out of a row's denominator. The positive is never left out.
        weights: factor of each row's loss.

    Returns:
        The loss, a scalar. No [queries, docs] matrix is kept for the backward pass.
    """
    shares = torch.ones_like(queries[:, 0]) if weights is None else weights.to(queries.dtype)
    shares, positive_columns = shares / len(queries), positives[:, None]

    def loss_of(scores: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        if ignore is not None:
            positive_scores = scores.gather(1, positive_columns)
            scores.masked_fill_(ignore, -torch.inf).scatter_(1, positive_columns, positive_scores)
        log_shares = scores.log_softmax(1)
        loss = -(shares @ log_shares.gather(1, positive_columns).squeeze(1))
        minus_one = -torch.ones_like(positive_columns, dtype=scores.dtype)
        # The softmax, less 1 at the positive.
        return (
            loss,
            lambda: log_shares.exp_().scatter_add_(1, positive_columns, minus_one).mul_(shares[:, None]),
        )

    # Divide the small side, before masking: -inf / temperature has no gradient.
    return _loss_of_scores(queries / temperature, candidates, loss_of)


def cross_entropy(
    scores: Scores, *, positives: Int[Tensor, " queries"], ignore: Mask | None = None, weights: Weights = None
) -> Loss:
    """Compute :func:`info_nce` of `scores` that do not come from embeddings, divided by the temperature."""
    positive_columns = positives[:, None]
    if ignore is not None:
        scores = scores.masked_fill(ignore.scatter(1, positive_columns, False), -torch.inf)
    return _mean(-scores.log_softmax(1).gather(1, positive_columns).squeeze(1), weights)


def false_negative_documents(
    query_ids: Int[Tensor, " queries"],
    positive_ids: Int[Tensor, " queries"],
    known: Int[Tensor, "queries known"],
    *,
    all_query_ids: Int[Tensor, " all"],
    candidate_ids: Int[Tensor, " docs"],
) -> Bool[Tensor, "queries docs"]:
    """Mask candidates that answer a row's query, and so must not count as its negatives.

    Such a candidate is the row's positive again, another known positive, or the positive of another row with
    the same query. The row's own positive is masked too; the loss takes it out of the mask.

    `query_ids`, `positive_ids` and `known` positives, padded with -1, are those of this rank's rows,
    `all_query_ids` those of the rows of all ranks. The first candidates are the positives of all rows, in the
    order of `all_query_ids`.
    """
    mask = positive_ids[:, None] == candidate_ids
    # One known positive at a time: all together would take `known` times the memory.
    for column in known.unbind(1):
        mask |= column[:, None] == candidate_ids
    mask[:, : len(all_query_ids)] |= query_ids[:, None] == all_query_ids
    return mask


def false_negative_queries(
    query_ids: Int[Tensor, " queries"],
    positive_ids: Int[Tensor, " queries"],
    *,
    all_query_ids: Int[Tensor, " all"],
    all_positive_ids: Int[Tensor, " all"],
    all_known: Int[Tensor, "all known"],
) -> Bool[Tensor, "queries all"]:
    """Mask queries that a row's positive answers, for the loss from document to query (Eq. 6).

    Such a query is the row's own again, or one that has the document among its positives.
    """
    mask = query_ids[:, None] == all_query_ids
    mask |= positive_ids[:, None] == all_positive_ids
    for column in all_known.unbind(1):
        mask |= positive_ids[:, None] == column
    return mask


# --- Matryoshka prefixes and hard negatives --------------------------------------------------------------


def prefixes(*embeddings: Float[Tensor, "..."], dims: Sequence[int]) -> Iterator[list[Float[Tensor, "..."]]]:
    """Yield the first m dimensions of each tensor at unit length, for each m of `dims` (Eq. 7 and 10).

    The caller adds the losses up.
    """
    # Adding up products of blocks of dimensions, then dividing by norms, takes half the multiplications but
    # more passes over [queries, docs], which cost most: 1.5 times slower.
    for dim in dims:
        yield [F.normalize(embedding[..., :dim], dim=-1) for embedding in embeddings]


def margin_loss(
    cosines: Scores, *, margin: float, present: Mask | None = None, weights: Weights = None
) -> Loss:
    """Compute the mean of max(0, margin - s(q, d+) + s(q, d-)) over queries and their hard negatives (Eq. 9).

    Column 0 of `cosines` is a query's positive, the others are its hard negatives, at least one. The loss of
    a query is the mean over those that are `present`, and 0 if none is.
    """
    losses = torch.relu(margin - cosines[:, :1] + cosines[:, 1:])
    return _mean(mean_of_present(losses, None if present is None else present[:, 1:]), weights)


def mean_of_present(values: Scores, present: Mask | None) -> Float[Tensor, " queries"]:
    """Compute each row's mean over its present columns, 0 if there are none. None: all are present."""
    if present is None:
        return values.mean(-1)
    return _zero_where_not(present, values).sum(-1) / present.sum(-1).clamp(min=1)


# --- distillation of embeddings --------------------------------------------------------------------------


def qkd(teacher: Embeddings, student: Embeddings, *, weights: Weights = None) -> Loss:
    """Compute the query-based knowledge distillation loss: the mean of ||q - q'||^2 - cos(q, q').

    ScalingNote, Eq. 15, lambda 1. Neither side is normalised: the squared distance also carries the
    magnitude.
    """
    distance = (teacher - student).pow(2).sum(-1)
    return _mean(distance - F.cosine_similarity(teacher, student, dim=-1), weights)


def cosine_distance(teacher: Embeddings, student: Embeddings, *, weights: Weights = None) -> Loss:
    """Compute the mean of 1 - cos(t, s): half the squared distance of the unit vectors.

    LEAF, arXiv 2509.12539. Suited to search by cosine, because there the length of a query changes no
    ranking.
    """
    return _mean(1 - F.cosine_similarity(teacher, student, dim=-1), weights)


def embedding_matching(teacher: Embeddings, student: Embeddings, *, weights: Weights = None) -> Loss:
    """Compute the mean of ||t - s||, the norm itself, not its square.

    EmbedDistill, Eq. 7 for queries, 8 for documents. The gradient has length 1 for any distance above 0, so a
    distant query pulls no harder than a near one.
    """
    return _mean(torch.linalg.vector_norm(teacher - student, dim=-1), weights)


# --- distillation of scores ------------------------------------------------------------------------------


def softmax_scores(
    student: Scores, teacher: Scores, *, scored: Mask | None = None, weights: Weights = None
) -> Loss:
    """Compute the cross entropy of the student's softmax over a query's documents from the teacher's.

    EmbedDistill, Eq. 11; mean over queries. `scored` marks the documents that are candidates of a query; a
    query without any contributes 0.
    """
    if scored is None:
        scored = torch.ones_like(student, dtype=torch.bool)
    # Not -inf: a row with only -inf has no softmax, and a query may have no candidates.
    lowest = torch.finfo(student.dtype).min
    target = teacher.masked_fill(~scored, lowest).softmax(-1)
    shares = student.masked_fill(~scored, lowest).log_softmax(-1)
    return _mean(-(target * shares.masked_fill(~scored, 0.0)).sum(-1), weights)


def bce_scores(
    student: Scores, teacher: Scores, *, scored: Mask | None = None, weights: Weights = None
) -> Loss:
    """Compute the binary cross entropy: sum over documents, mean over queries (EmbedDistill, Eq. 12)."""
    target = _zero_where_not(scored, teacher).sigmoid()
    losses = F.binary_cross_entropy_with_logits(student, target, reduction="none")
    return _mean(_zero_where_not(scored, losses).sum(-1), weights)


def mse_scores(
    student: Scores, teacher: Scores, *, scored: Mask | None = None, weights: Weights = None
) -> Loss:
    """Compute the squared difference: sum over documents, mean over queries (EmbedDistill, Eq. 13)."""
    losses = (_zero_where_not(scored, teacher) - student).pow(2)
    return _mean(_zero_where_not(scored, losses).sum(-1), weights)


SCORE_LOSSES: Mapping[Literal["softmax", "bce", "mse"], Callable[..., Float[Tensor, ""]]] = {
    "softmax": softmax_scores,
    "bce": bce_scores,
    "mse": mse_scores,
}


def teacher_kl(
    student: Scores, teacher: Scores, *, present: Mask | None = None, weights: Weights = None
) -> Loss:
    """Compute the mean of KL(softmax(teacher) || softmax(student)) over queries.

    A query with an unscored document contributes 0. Both are logits of a query's positive, then of its hard
    negatives; those not `present` are left out.
    """
    present = torch.ones_like(teacher, dtype=torch.bool) if present is None else present
    scored = (teacher.isfinite() | ~present).all(-1)
    lowest = torch.finfo(student.dtype).min
    target = _zero_where_not(scored[:, None], teacher).masked_fill(~present, lowest).log_softmax(-1)
    log_shares = student.masked_fill(~present, lowest).log_softmax(-1)
    losses = _zero_where_not(present, target.exp() * (target - log_shares)).sum(-1)
    return _mean(losses * scored, weights)


# --- LightRetriever --------------------------------------------------------------------------------------


def align(
    queries: Embeddings,
    candidates: Float[Tensor, "docs dim"],
    *,
    teacher: Scores,
    temperature: float | Float[Tensor, ""],
    weights: Float[Tensor, " queries"],
    absent: Bool[Tensor, " docs"] | None = None,
) -> Loss:
    """Compute the mean of KL(teacher || softmax of the queries' cosines) over queries.

    LightRetriever, Eq. 5. `teacher` holds log probabilities of the candidates, -inf for `absent` ones; it
    gets no gradient.
    """
    shares, target = weights.to(queries.dtype) / len(queries), teacher.detach()

    def loss_of(scores: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        if absent is not None:
            scores.masked_fill_(absent, -torch.inf)
        log_shares, probabilities = scores.log_softmax(1), target.exp()
        loss = shares @ _divergence(target, log_shares, absent)
        return loss, lambda: log_shares.exp_().sub_(probabilities).mul_(shares[:, None])

    return _loss_of_scores(queries / temperature, candidates, loss_of)


def align_scores(
    scores: Scores,
    *,
    teacher: Scores,
    weights: Float[Tensor, " queries"],
    absent: Bool[Tensor, " docs"] | None = None,
) -> Loss:
    """Compute :func:`align` of `scores` that do not come from embeddings, divided by the temperature."""
    if absent is not None:
        scores = scores.masked_fill(absent, -torch.inf)
    return _mean(_divergence(teacher.detach(), scores.log_softmax(1), absent), weights)


def flops(means: Float[Tensor, " vocabulary"]) -> Loss:
    """Compute the regulariser of term weights: the sum of squared mean weights of the terms.

    LightRetriever, Eq. 9. It estimates the multiplications of scoring two documents drawn at random, so terms
    that many documents have contribute most.
    """
    return means.square().sum()


def ramp(step: Float[Tensor, ""], steps: Float[Tensor, ""], *, over: float) -> float | Float[Tensor, ""]:
    """Compute the factor of a weight that grows linearly from 0 to 1 over the first `over` steps.

    Below 1, `over` is a share of all `steps`. LightRetriever's FLOPs regulariser grows as its square: term
    weights must be learnt before they are penalised.
    """
    return (step / steps_of(over, steps)).clamp(max=1.0) if over else 1.0


# --- helpers ---------------------------------------------------------------------------------------------


def _zero_where_not(scored: Tensor | None, values: Tensor) -> Tensor:
    """Replace unscored values by zeros: NaN times 0 is NaN, in gradients too."""
    return values if scored is None else values.masked_fill(~scored, 0.0)


def _divergence(target: Tensor, log_shares: Tensor, absent: Tensor | None) -> Tensor:
    """Compute the KL of each row of log probabilities; both are -inf for absent columns, which count as 0."""
    difference = target - log_shares
    if absent is not None:
        difference = difference.masked_fill(absent, 0.0)
    return (target.exp() * difference).sum(1)


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    return (losses if weights is None else losses * weights).mean()


def _loss_of_scores(
    rows: Tensor, columns: Tensor, loss_of: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]
) -> Loss:
    """Compute a loss of the products of rows and columns.

    `loss_of` returns the loss of the products, and a function that computes its gradient. The gradients of
    the two narrow inputs are kept for the backward pass, never the scores between them: memory does not grow
    with views and prefixes.
    """
    loss: Tensor = _LossOfScores.apply(rows, columns, loss_of)  # type: ignore[no-untyped-call]
    return loss


class _LossOfScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor, loss_of: Callable[..., Any]) -> Tensor:
        loss, gradient = loss_of(rows @ columns.T)
        if any(ctx.needs_input_grad):
            errors = gradient()
            ctx.save_for_backward(errors @ columns, errors.T @ rows)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, of_columns = ctx.saved_tensors
        return grad * of_rows, grad * of_columns, None
