"""Batches of stage I, drawn by step number alone: a resumed run, or a restarted worker, sees the same rows.

    step ─Order─► global batch ─► one rank's share ─Store─► token rows ─► tensors

Nothing is remembered between steps, so the only state of the data order is the step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray
from torch import Tensor

from scalingnote.models.tower import collate
from scalingnote.train.objective import Triplets
from scalingnote.train.order import Order
from scalingnote.train.stream import Store


class TripletBatches:
    """Triplets of any step, for one rank, from a store that :func:`scalingnote.train.prepare.prepare` wrote.

    `pads` are the pad tokens of the query and the document tower; `packed` lays rows one after the other.
    `steps` of the whole run tell how much of it is done.
    """

    def __init__(
        self,
        store: Store,
        order: Order,
        *,
        pads: tuple[int, int],
        packed: bool,
        rank: int,
        world: int,
        steps: int | None = None,
    ) -> None:
        self._rows, self._documents = store["train"], store["documents"]
        self._known, self._scored = max(store.facts["known"], 1), store.facts["scored"]
        self._order, self._pads, self._packed = order, pads, packed
        self._rank, self._world, self._steps = rank, world, steps
        self._terms: int | None = store.facts.get("terms")

    def __call__(self, step: int) -> Triplets:
        """This rank's share of a step."""
        chosen = self._order.batch(step, length_of=self._lengths)[self._rank :: self._world]
        # Positives first, then each column of negatives: the layout the objective gathers by.
        documents = self._rows.values("documents", chosen).T.reshape(-1)
        query_pad, document_pad = self._pads
        scores = torch.from_numpy(self._rows.values("scores", chosen)) if self._scored else None
        return Triplets(
            queries=collate(self._rows.tokens(chosen), pad=query_pad, packed=self._packed),
            documents=collate(self._documents.tokens(documents), pad=document_pad, packed=self._packed),
            query_ids=torch.from_numpy(self._rows.values("query", chosen)),
            document_ids=torch.from_numpy(documents),
            known_positives=torch.from_numpy(padded(self._rows.lists("known", chosen), width=self._known)),
            weights=torch.from_numpy(self._rows.values("weight", chosen)),
            scores=scores,
            terms=self._sparse_queries(chosen),
            progress=torch.tensor(step / self._steps) if self._steps else None,
        )

    def _sparse_queries(self, chosen: Int64[ndarray, " rows"]) -> Tensor | None:
        if self._terms is None:
            return None
        return torch.from_numpy(padded(self._rows.lists("terms", chosen), width=max(self._terms, 1)))

    def _lengths(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, " rows"]:
        """Tokens of each row's longest document: what a padded batch is as wide as."""
        documents = self._rows.values("documents", rows)
        lengths = self._documents.lengths(documents.reshape(-1)).reshape(documents.shape)
        longest: ndarray = lengths.max(axis=1)
        return longest


def padded(lists: Sequence[ndarray], *, width: int) -> Int64[ndarray, "rows width"]:
    """Lists of at most `width` numbers as a table, filled up with -1; equally wide on every rank."""
    out: ndarray = np.full((len(lists), width), -1, dtype=np.int64)
    for row, values in enumerate(lists):
        out[row, : len(values)] = values
    return out
