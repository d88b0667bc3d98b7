"""Batches of clicks, drawn by step number alone, as stage I's triplets are."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray

from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.document_fusion import Documents, buckets
from scalingnote.fuse.feature_encoding import Encoded, Encoding, no_values
from scalingnote.fuse.objective import Clicks
from scalingnote.fuse.prepare import DOCUMENTS, QUERIES, ROWS, USERS
from scalingnote.fuse.query_fusion import Queries, Words, assemble, latest
from scalingnote.train.order import Order
from scalingnote.train.stream import Rows, Store


class ClickBatches:
    """Clicks of any step, for one rank, from a store that :mod:`scalingnote.fuse.prepare` wrote."""

    def __init__(
        self,
        store: Store,
        order: Order,
        config: FuseConfig,
        *,
        documents: Sequence[Encoding],
        users: Sequence[Encoding],
        rank: int,
        world: int,
    ) -> None:
        """`documents` and `users` say how their features were read."""
        self._rows, self._documents, self._queries = store[ROWS], store[DOCUMENTS], store[QUERIES]
        self._users = store.tables.get(USERS)
        self._order, self._config, self._rank, self._world = order, config, rank, world
        self._of_documents, self._of_users = documents, users

    def __call__(self, step: int) -> Clicks:
        """This rank's share of a step."""
        rows = self._order.batch(step)[self._rank :: self._world]
        group = self._rows.values("group", rows)
        return Clicks(
            queries=self._asked(rows),
            documents=self._shown(np.maximum(group, 0).reshape(-1)),
            group=torch.from_numpy(group),
            log_q=torch.from_numpy(self._rows.values("log_q", rows)),
        )

    def _asked(self, rows: Int64[ndarray, " rows"]) -> Queries:
        queries, users = self._rows.values("query", rows), self._rows.values("user", rows)
        side = self._config.query
        words = Words(np.zeros((len(rows), 0), np.uint64), np.zeros((len(rows), 0), np.float32))
        if side.planner:
            words = Words(*(self._queries.values(name, queries) for name in ("words", "importances")))
        return assemble(
            self._queries.values("embedding", queries),
            words,
            self._profiles(users),
            self._histories(rows),
            config=side,
            encodings=self._of_users,
        )

    def _shown(self, documents: Int64[ndarray, " docs"]) -> Documents:
        encoded = _features(self._documents, documents, self._of_documents)
        hashed = buckets(self._documents.values("hash", documents), self._config.document)
        return Documents(
            embeddings=torch.from_numpy(self._documents.values("embedding", documents)),
            codes=torch.from_numpy(self._documents.values("codes", documents).astype(np.int64)),
            buckets=torch.from_numpy(hashed),
            indices=torch.from_numpy(encoded.indices),
            numbers=torch.from_numpy(encoded.numbers),
        )

    def _profiles(self, users: Int64[ndarray, " rows"]) -> Encoded:
        found = no_values(self._of_users, len(users))
        there = users >= 0
        if self._users is not None and there.any():
            known = _features(self._users, users[there], self._of_users)
            found.indices[there], found.numbers[there] = known.indices, known.numbers
        return found

    def _histories(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, "rows last levels"]:
        history = self._config.query.history
        if history is None:
            return np.zeros((len(rows), 0, 0), np.int64)
        found = self._rows.lists("history", rows)
        documents = np.concatenate([np.empty(0, np.int64), *found])
        levels = self._documents.values("codes", np.zeros(1, np.int64)).shape[1]
        codes = self._documents.values("codes", documents).reshape(-1, levels)
        ends = np.cumsum([len(one) for one in found])
        return latest(np.split(codes, ends[:-1]), last=history.last, levels=levels)


def _features(table: Rows, rows: Int64[ndarray, " rows"], encodings: Sequence[Encoding]) -> Encoded:
    """What :func:`~scalingnote.fuse.feature_encoding.encode` gave for some rows of a table."""
    empty = no_values(encodings, len(rows))
    return Encoded(
        table.values("indices", rows) if empty.indices.shape[1] else empty.indices,
        table.values("numbers", rows) if empty.numbers.shape[1] else empty.numbers,
    )
