"""Pairs of any step, from the store of tokens that stage I reads, too.

A query's candidates are its positive, its hard negatives, and positives of the rows that follow it in the
global batch: which they are does not depend on how rows are dealt out to ranks.
"""

import numpy as np
import torch
from jaxtyping import Bool, Int64
from numpy import ndarray

from scalingnote.cross_encoder.objective import Pairs
from scalingnote.models.batch import collate
from scalingnote.models.cross_encoder import pair
from scalingnote.train.batching import padded
from scalingnote.train.order import Order
from scalingnote.train.stream import Store


class PairBatches:
    """Pairs for one rank from a store that :func:`scalingnote.train.prepare.prepare` wrote."""

    def __init__(
        self, store: Store, order: Order, *, pad: int, packed: bool, in_batch: int, rank: int, world: int
    ) -> None:
        self._rows, self._documents, self._order = store["train"], store["documents"], order
        self._known, self._scored = max(store.facts["known"], 1), store.facts["scored"]
        self._pad, self._packed, self._in_batch = pad, packed, in_batch
        self._rank, self._world = rank, world

    def __call__(self, step: int) -> Pairs:
        """This rank's share of a step."""
        together = self._order.batch(step)
        chosen = together[self._rank :: self._world]
        documents, answers = self._candidates(together)
        own = documents[self._rank :: self._world]
        queries = self._rows.tokens(chosen)
        texts = dict(
            zip(distinct := np.unique(own).tolist(), self._documents.tokens(np.array(distinct)), strict=True)
        )
        pairs = [
            pair(query, texts[row])
            for column in own.T.tolist()
            for query, row in zip(queries, column, strict=True)
        ]
        return Pairs(
            pairs=collate(pairs, pad=self._pad, packed=self._packed),
            weights=torch.from_numpy(self._rows.values("weight", chosen)),
            answers=torch.from_numpy(answers[self._rank :: self._world]),
            scores=torch.from_numpy(self._rows.values("scores", chosen)) if self._scored else None,
        )

    def _candidates(
        self, rows: Int64[ndarray, " rows"]
    ) -> tuple[Int64[ndarray, "rows group"], Bool[ndarray, "rows group"]]:
        """Each row's documents, the positive first, and which of the others answer its query all the same."""
        own, queries = self._rows.values("documents", rows), self._rows.values("query", rows)
        known = padded(self._rows.lists("known", rows), width=self._known)
        shifts = range(1, min(self._in_batch, len(rows) - 1) + 1)
        others = [np.roll(own[:, 0], -shift) for shift in shifts]
        documents = np.column_stack([own, *others])
        answers = (documents[:, :, None] == known[:, None, :]).any(axis=2) | (documents == own[:, :1])
        for at, shift in enumerate(shifts, own.shape[1]):
            answers[:, at] |= np.roll(queries, -shift) == queries
        answers[:, 0] = False
        return documents, answers
