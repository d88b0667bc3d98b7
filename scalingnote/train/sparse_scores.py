"""Scores of this rank's queries with the documents of all ranks, from term weights that stay where they are.

    query terms    gathered: a few numbers a query
    term weights   [docs, vocabulary]: each rank scores its own documents for everybody's queries
    scores         gathered, with gradients: one number for a document and a query

Gathering term weights would move a vocabulary's worth of numbers for each document.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from scalingnote.train.distributed import Shares, gather


def sparse_scores(
    documents: Float[Tensor, "docs vocabulary"],
    queries: Int[Tensor, "queries terms"],
    *,
    share: Shares,
    columns: int,
    binary: bool,
) -> Float[Tensor, "queries candidates"]:
    """Inner products of queries with the first `columns` documents of every query, of all ranks.

    `documents` are the positives of this rank's queries, then all first negatives, and so on; candidates
    the same of all ranks. `queries` are terms with repetition, filled up with -1, equally wide on all ranks.
    """
    size = len(queries)
    everybody = gather(queries, share)
    distinct, place = everybody.clamp(min=0).unique(return_inverse=True)
    values = torch.zeros(len(everybody), len(distinct), dtype=documents.dtype, device=documents.device)
    values.scatter_add_(1, place, (everybody >= 0).to(values.dtype))
    if binary:
        values.clamp_(max=1)
    own = documents[: columns * size, distinct] @ values.T
    groups = own.unflatten(0, (columns, size)).transpose(0, 1)  # [queries, columns, queries of all ranks]
    met = gather(groups, share)[:, :, share.start : share.start + size]
    return met.transpose(0, 1).flatten(0, 1).T


def mean_terms(documents: Float[Tensor, "docs vocabulary"], *, share: Shares) -> Float[Tensor, " vocabulary"]:
    """Mean term weights over the documents of all ranks; the same on each of them, with gradients."""
    ranks = len(share.rows)
    total = gather(documents.sum(0, keepdim=True), Shares((1,) * ranks)).sum(0)
    group = len(documents) // share.own
    return total / (group * sum(share.rows))
