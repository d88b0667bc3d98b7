"""The training objective of fusion: batches of clicks, and the losses on them.

Documents of other rows are negatives because some user clicked them: popular ones more often than their share
of the corpus. The softmax over them is corrected for that, so that it estimates the softmax over all
documents. The documents that the same user saw in the same session and skipped are scored beside the click
alone: they were shown, so neither popularity nor exposure biases them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from numpy import ndarray
from torch import Tensor, nn

from scalingnote.fuse.config import FuseConfig, FusionLosses
from scalingnote.fuse.feature_encoding import EncodedFeatures, Encoding, no_values
from scalingnote.fuse.fusion import ImportantWords, id_buckets, last_codes, query_inputs
from scalingnote.fuse.networks import DocumentNetwork, Documents, Queries, QueryNetwork
from scalingnote.fuse.prepare import DOCUMENTS, QUERIES, ROWS, USERS
from scalingnote.losses import cross_entropy, prefixes
from scalingnote.train.collectives import gather, shares
from scalingnote.train.data import Order, Rows, Store


@dataclass(frozen=True)
class Clicks:
    """One rank's rows of a step: each query's clicked document, and those skipped in the same session."""

    queries: Queries
    documents: Documents  # row by row of `group`
    group: Int[Tensor, "queries group"]  # row numbers of the corpus, the clicked first; -1 is no document
    log_q: Float[Tensor, " queries"]  # log of the share of clicks that the clicked document has

    def to(self, device: torch.device) -> "Clicks":
        """A copy on a device."""
        return Clicks(*(part.to(device) for part in vars(self).values()))


class FusionStage(nn.Module):
    """Both sides and the losses as the one module that training steps."""

    def __init__(self, documents: DocumentNetwork, queries: QueryNetwork, losses: FusionLosses) -> None:
        super().__init__()
        self.documents, self.queries, self._losses = documents, queries, losses

    def forward(self, clicks: Clicks) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The loss of this rank, whose mean over ranks is the global loss, and its parts for the log."""
        queries = self.queries(clicks.queries).float()
        documents = self.documents(clicks.documents).float().unflatten(0, clicks.group.shape)
        # bfloat16 would round cosines to 1/256, twenty times that when divided by the temperature.
        with torch.autocast(queries.device.type, enabled=False):
            loss, parts = fusion_loss(queries, documents, clicks, self._losses)
        return loss, {name: part.detach() for name, part in parts.items()}


def fusion_loss(
    queries: Float[Tensor, "queries dim"],
    documents: Float[Tensor, "queries group dim"],
    clicks: Clicks,
    losses: FusionLosses,
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
    """Both losses, summed over Matryoshka prefixes; the batch is that of all ranks."""
    share = shares(queries)
    all_clicked_rows = gather(clicks.group[:, 0], share)
    log_q = (
        gather(clicks.log_q, share)
        if losses.log_q
        else torch.zeros_like(all_clicked_rows, dtype=torch.float32)
    )
    clicked = gather(documents[:, 0], share)
    positives = torch.arange(len(queries), device=queries.device) + share.start
    parts = {"batch": queries.new_zeros(()), "skipped": queries.new_zeros(())}
    for _, (query, all_clicked, own) in prefixes(queries, clicked, documents, dims=losses.matryoshka):
        parts["batch"] += corrected_softmax(
            query @ all_clicked.T / losses.temperature,
            log_q=log_q,
            positives=positives,
            same=clicks.group[:, :1] == all_clicked_rows,
        )
        if losses.group > 1:
            scores = torch.einsum("qd,qgd->qg", query, own) / losses.temperature
            first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
            parts["skipped"] += cross_entropy(scores, positives=first, ignore=clicks.group < 0)
    return parts["batch"] + losses.skipped_weight * parts["skipped"], parts


def corrected_softmax(
    scores: Float[Tensor, "queries docs"],
    *,
    log_q: Float[Tensor, " docs"],
    positives: Int[Tensor, " queries"],
    same: Bool[Tensor, "queries docs"],
) -> Float[Tensor, ""]:
    """Mean cross entropy of a query's clicked document against those of the batch, corrected for popularity.

        s_c(x_i, y_j) = s(x_i, y_j) - log p_j
        loss = -mean_i log( exp s_c(x_i, y_i) / sum_j exp s_c(x_i, y_j) )

    (Yi et al. 2019, "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations",
    section 3: s^c, and the batch softmax of it). p_j is the probability that a row of a batch has document j:
    its share of all clicks in training, counted rather than estimated from a stream. A factor common to all
    p, such as the batch size, cancels.

    Args:
        scores: cosines over the temperature.
        log_q: log p_j of each document of the batch.
        positives: column of each query's clicked document.
        same: marks a query's own document where other rows clicked it too; it is ignored, except for the
            positive itself.
    """
    return cross_entropy(scores - log_q, positives=positives, ignore=same)


# --- batches ----------------------------------------------------------------------------------------------


class ClickBatches:
    """Reads one rank's clicks of any step from a store that :mod:`scalingnote.fuse.prepare` wrote.

    A step's rows follow from its number alone, as those of stage I do, so training resumes at any step.

    Args:
        store: of clicks, queries, documents and users.
        order: in which rows are trained on.
        config: of the two sides.
        documents: encodings of the documents' features.
        users: encodings of the users' profiles.
        rank: of this process.
        world: number of ranks.
    """

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
        self._rows, self._documents, self._queries = store[ROWS], store[DOCUMENTS], store[QUERIES]
        self._users = store.tables.get(USERS)
        self._order, self._config, self._rank, self._world = order, config, rank, world
        self._document_encodings, self._user_encodings = documents, users

    def __call__(self, step: int) -> Clicks:
        """This rank's rows of a step."""
        rows = self._order.batch(step)[self._rank :: self._world]
        group = self._rows.values("group", rows)
        return Clicks(
            queries=self._query_rows(rows),
            documents=self._document_rows(np.maximum(group, 0).reshape(-1)),
            group=torch.from_numpy(group),
            log_q=torch.from_numpy(self._rows.values("log_q", rows)),
        )

    def _query_rows(self, rows: Int64[ndarray, " rows"]) -> Queries:
        queries, users = self._rows.values("query", rows), self._rows.values("user", rows)
        side = self._config.query
        words = ImportantWords(np.zeros((len(rows), 0), np.uint64), np.zeros((len(rows), 0), np.float32))
        if side.planner:
            words = ImportantWords(
                *(self._queries.values(name, queries) for name in ("words", "importances"))
            )
        return query_inputs(
            self._queries.values("embedding", queries),
            words,
            self._profiles(users),
            self._histories(rows),
            config=side,
            encodings=self._user_encodings,
        )

    def _document_rows(self, documents: Int64[ndarray, " docs"]) -> Documents:
        encoded = _features(self._documents, documents, self._document_encodings)
        buckets = id_buckets(self._documents.values("hash", documents), self._config.document)
        return Documents(
            embeddings=torch.from_numpy(self._documents.values("embedding", documents)),
            codes=torch.from_numpy(self._documents.values("codes", documents).astype(np.int64)),
            buckets=torch.from_numpy(buckets),
            indices=torch.from_numpy(encoded.indices),
            numbers=torch.from_numpy(encoded.numbers),
        )

    def _profiles(self, users: Int64[ndarray, " rows"]) -> EncodedFeatures:
        profiles = no_values(self._user_encodings, len(users))
        known = users >= 0
        if self._users is not None and known.any():
            read = _features(self._users, users[known], self._user_encodings)
            profiles.indices[known], profiles.numbers[known] = read.indices, read.numbers
        return profiles

    def _histories(self, rows: Int64[ndarray, " rows"]) -> Int64[ndarray, "rows last levels"]:
        history = self._config.query.history
        if history is None:
            return np.zeros((len(rows), 0, 0), np.int64)
        histories = self._rows.lists("history", rows)
        documents = np.concatenate([np.empty(0, np.int64), *histories])
        levels = self._documents.values("codes", np.zeros(1, np.int64)).shape[1]
        codes = self._documents.values("codes", documents).reshape(-1, levels)
        ends = np.cumsum([len(history) for history in histories])
        return last_codes(np.split(codes, ends[:-1]), last=history.last, levels=levels)


def _features(table: Rows, rows: Int64[ndarray, " rows"], encodings: Sequence[Encoding]) -> EncodedFeatures:
    """The encoded features of some rows; a table lacks a column of width 0."""
    empty = no_values(encodings, len(rows))
    return EncodedFeatures(
        table.values("indices", rows) if empty.indices.shape[1] else empty.indices,
        table.values("numbers", rows) if empty.numbers.shape[1] else empty.numbers,
    )
