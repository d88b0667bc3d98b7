"""The triplets of a step, and the candidates of all ranks that their queries are compared with.

    TripletBatches   step number ─► this rank's share of the rows ─► Triplets, as tensors
    gather_candidates   Triplets of all ranks ─► positives and negatives, with masks of false negatives
    sparse_scores       the same for term weights, which stay on their rank

groups       [queries, group, views, dim]   documents of this rank's queries: the positive, its negatives
candidates   [docs, views, dim]             of all ranks: all positives, then all first negatives, and so on

A row with fewer negatives than others has places whose document id is ABSENT. The row's positive is read in
their stead, so that every batch has one shape, and every loss leaves them out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray
from torch import Tensor

from scalingnote.losses import false_negative_documents, false_negative_queries
from scalingnote.models.batch import Batch, collate
from scalingnote.train.collectives import gather, rank
from scalingnote.train.config import Losses
from scalingnote.train.data import ABSENT, Share

R = TypeVar("R", bound="TensorRecord")


@dataclass(frozen=True)
class TensorRecord:
    """A batch whose fields are tensors, records of tensors, or None; it moves to a device as a whole."""

    def to(self: R, device: torch.device) -> R:
        """The same record on a device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return type(self)(**{n: None if part is None else part.to(device) for n, part in parts.items()})


@dataclass(frozen=True)
class Triplets(TensorRecord):
    """One rank's share of a step. Ids are 63-bit hashes, so that ranks can compare them as integers."""

    queries: Batch
    documents: Batch  # the positives of all queries, then all first negatives, then all second ones...
    query_ids: Int[Tensor, " queries"]
    document_ids: Int[Tensor, " docs"]  # in the order of `documents`; ABSENT where a row has no negative
    known_positives: Int[Tensor, "queries known"]  # padded with -1; equally wide on all ranks
    weights: Float[Tensor, " queries"]  # of each row in every loss
    # A teacher's score of the positive, then of each negative; NaN in unscored rows. None: no row was scored.
    scores: Float[Tensor, "queries group"] | None = None
    # Terms of the sparse queries, padded with -1, equally wide on all ranks; None without a sparse head.
    terms: Int[Tensor, "queries terms"] | None = None
    step: Float[Tensor, ""] | None = None  # from 0, of `steps`; None: weights that grow are whole
    steps: Float[Tensor, ""] | None = None  # of the whole run


class TripletBatches:
    """Triplets of any step, for one rank: a function of the step number alone.

    `share_of` gives this rank's rows of a step, from a mapped store or a stream; `facts` are those of the
    store, `pads` the pad tokens of the query and the document tower, `steps` those of the whole run.
    `instructions` are numbers of those of each set of a mixture; every batch draws one, by `seed`.
    """

    def __init__(
        self,
        share_of: Callable[[int], Share],
        facts: Mapping[str, Any],
        *,
        pads: tuple[int, int],
        packed: bool,
        steps: int | None = None,
        instructions: Sequence[Sequence[int]] | None = None,
        seed: int = 0,
    ) -> None:
        self._share_of, self._pads, self._packed, self._steps = share_of, pads, packed, steps
        self._instructions, self._seed = instructions, seed % 2**64
        self._known, self._scored = max(facts["known"], 1), facts["scored"]
        self._terms: int | None = facts.get("terms")

    def __call__(self, step: int) -> Triplets:
        """This rank's share of a step."""
        rows, chosen, documents, places = self._share_of(step)
        query_pad, document_pad = self._pads
        terms = None
        if self._terms is not None:
            terms = torch.from_numpy(padded(rows.lists("terms", chosen), width=max(self._terms, 1)))
        # Positives first, then each column of negatives: the layout that gather_candidates relies on.
        tokens = documents.tokens(places.T.reshape(-1))
        queries = collate(rows.tokens(chosen), pad=query_pad, packed=self._packed)
        if self._instructions:
            own = self._instructions[int(rows.values("set", chosen[:1])[0])]
            drawn = int(np.random.default_rng([self._seed, step]).integers(len(own)))
            queries = replace(queries, instruction=own[drawn])
        return Triplets(
            queries=queries,
            documents=collate(tokens, pad=document_pad, packed=self._packed),
            query_ids=torch.from_numpy(rows.values("query", chosen)),
            document_ids=torch.from_numpy(rows.values("documents", chosen).T.reshape(-1)),
            known_positives=torch.from_numpy(padded(rows.lists("known", chosen), width=self._known)),
            weights=torch.from_numpy(rows.values("weight", chosen)),
            scores=torch.from_numpy(rows.values("scores", chosen)) if self._scored else None,
            terms=terms,
            step=torch.tensor(float(step)) if self._steps else None,
            steps=torch.tensor(float(self._steps)) if self._steps else None,
        )


def padded(lists: Sequence[ndarray], *, width: int) -> Int64[ndarray, "rows width"]:
    """Lists of at most `width` numbers as a table, padded with -1; equally wide on every rank."""
    out: ndarray = np.full((len(lists), width), -1, dtype=np.int64)
    for row, values in enumerate(lists):
        out[row, : len(values)] = values
    return out


@dataclass(frozen=True)
class GatheredCandidates:
    """This rank's triplets, and the candidates of all ranks that its queries are compared with."""

    triplets: Triplets
    groups: Float[Tensor, "queries group views dim"]  # of this rank's queries
    candidates: Float[Tensor, "docs views dim"]  # of all ranks
    columns: int  # of a group that are candidates
    positives: Int[Tensor, " queries"]  # column of each query's positive among the candidates
    present: Bool[Tensor, "queries group"]  # of the groups, those that are documents of their row
    absent: Bool[Tensor, " docs"] | None  # of the candidates, those that are none; None: all are some
    ignored_documents: Bool[Tensor, "queries docs"] | None  # absent, or false negatives
    false_negative_queries: Bool[Tensor, "queries all"] | None


def gather_candidates(
    triplets: Triplets, documents: Float[Tensor, "docs views dim"], losses: Losses
) -> GatheredCandidates:
    """Gather positives and negatives of all ranks, with masks of the absent ones and of false negatives.

    `documents` are the embeddings of this rank's documents, in the order of `triplets.documents`; `losses`
    say whether negatives are gathered too, and whether false negatives are masked.
    """
    size = len(triplets.query_ids)
    groups = documents.unflatten(0, (-1, size)).transpose(0, 1)
    ids = triplets.document_ids.unflatten(0, (-1, size)).T
    columns = 1 if losses.denominator == "positives_only" else groups.shape[1]
    return GatheredCandidates(
        triplets,
        groups,
        # Positives of all ranks first, then each column of negatives, or labels would shift.
        gather(groups[:, :columns]).transpose(0, 1).flatten(0, 1),
        columns,
        torch.arange(size, device=documents.device) + rank() * size,
        ids != ABSENT,
        *_masks(triplets, ids[:, :columns], false_negatives=losses.mask_known),
    )


def _masks(
    triplets: Triplets, ids: Int[Tensor, "queries columns"], *, false_negatives: bool
) -> tuple[
    Bool[Tensor, " docs"] | None, Bool[Tensor, "queries docs"] | None, Bool[Tensor, "queries all"] | None
]:
    """Masks of absent candidates, of those to ignore, and of queries that this rank's positives answer."""
    columns = ids.shape[1]
    if columns == 1 and not false_negatives:  # positives are never absent
        return None, None, None
    query_ids, known = triplets.query_ids, triplets.known_positives
    # One exchange for all ids.
    gathered = gather(torch.cat([query_ids[:, None], ids, known], dim=1))
    all_query_ids, all_ids, all_known = gathered.split([1, columns, known.shape[1]], dim=1)
    candidate_ids = all_ids.T.flatten()
    absent = None if columns == 1 else candidate_ids == ABSENT
    if not false_negatives:
        assert absent is not None
        return absent, absent.expand(len(query_ids), -1), None
    documents = false_negative_documents(
        query_ids, ids[:, 0], known, all_query_ids=all_query_ids[:, 0], candidate_ids=candidate_ids
    )
    if absent is not None:
        documents |= absent
    queries = false_negative_queries(
        query_ids,
        ids[:, 0],
        all_query_ids=all_query_ids[:, 0],
        all_positive_ids=all_ids[:, 0],
        all_known=all_known,
    )
    return absent, documents, queries


def sparse_scores(
    documents: Float[Tensor, "docs vocabulary"],
    queries: Int[Tensor, "queries terms"],
    *,
    columns: int,
    binary: bool,
) -> Float[Tensor, "queries candidates"]:
    """Inner products of this rank's sparse queries with the candidates of all ranks, with gradients.

    Each rank scores its own documents for the queries of all ranks, and the scores are gathered: gathering
    term weights would move a vocabulary's worth of numbers for each document.

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
    own = documents[: columns * size, distinct] @ values.T
    groups = own.unflatten(0, (columns, size)).transpose(0, 1)  # [queries, columns, queries of all ranks]
    scores = gather(groups)[:, :, rank() * size : (rank() + 1) * size]
    return scores.transpose(0, 1).flatten(0, 1).T


def mean_term_weights(
    documents: Float[Tensor, "docs vocabulary"], present: Bool[Tensor, "queries group"]
) -> Float[Tensor, " vocabulary"]:
    """Mean term weights over the documents of all ranks that are `present`, with gradients.

    The same on each rank. `documents` are all positives, all first negatives, and so on.
    """
    own = present.T.flatten()[:, None]
    total = gather((documents * own).sum(0, keepdim=True)).sum(0)
    return total / gather(own.sum().view(1, 1)).sum()
