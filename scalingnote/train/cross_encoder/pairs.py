"""Pairs of a query and a document: batches and loss of training, and the encoder that reads pairs offline.

A query's candidates are its positive, its hard negatives, and positives of the rows that follow it in the
global batch. They do not depend on the division of rows among ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor
from torch.nn import functional as F

from scalingnote.core.errors import TrainingError
from scalingnote.encode.encoder import by_tokens
from scalingnote.encode.engines import Cost, RowEncoding
from scalingnote.models import cross_encoder, flops
from scalingnote.models.batch import Batch, collate
from scalingnote.models.cross_encoder import CrossEncoder, pair
from scalingnote.models.flops import model_shape
from scalingnote.models.prompt import TokenRow
from scalingnote.models.weights import Precision, cast_parameters, compute_dtype, default_device, matmul_peak
from scalingnote.storage import usage
from scalingnote.train.config import CrossEncoderLosses
from scalingnote.train.data import ABSENT, Order, Store, stand_ins
from scalingnote.train.engine import Encode, Objective, WeightedLosses
from scalingnote.train.losses import cross_entropy, mean_of_present, teacher_kl
from scalingnote.train.objective import TensorRecord, pad_lists


@dataclass(frozen=True)
class PairBatch(TensorRecord):
    """One rank's share of a step: every query with its positive, hard negatives, and positives of others."""

    pairs: Batch  # all queries with their positives, then with their first negatives, and so on
    weights: Float[Tensor, " queries"]
    answers: Bool[Tensor, "queries group"]  # false negatives, without the positive itself
    present: Bool[Tensor, "queries group"]  # false if a row has fewer negatives than others
    scores: Float[Tensor, "queries scored"] | None = None  # of a ranking model, of the first candidates


@dataclass(frozen=True)
class PairBatches:
    """Pairs for one rank from a store that :func:`scalingnote.train.prepare.prepare` wrote."""

    store: Store
    order: Order
    pad: int
    in_batch: int  # number of positives of other rows that a query is paired with
    rank: int
    world: int

    def __call__(self, step: int) -> PairBatch:
        """Build this rank's share of a step."""
        rows, global_batch = self.store["train"], self.order.batch(step)
        share = slice(self.rank, None, self.world)
        chosen = global_batch[share]
        documents, answers = self._candidates(global_batch)
        read_documents = stand_ins(documents[share])
        queries = rows.tokens(chosen)
        distinct = np.unique(read_documents)
        texts = dict(zip(distinct.tolist(), self.store["documents"].tokens(distinct), strict=True))
        pairs = [
            pair(query, texts[row])
            for column in read_documents.T.tolist()
            for query, row in zip(queries, column, strict=True)
        ]
        return PairBatch(
            pairs=collate(pairs, pad=self.pad, packed=True),
            weights=torch.from_numpy(rows.values("weight", chosen)),
            answers=torch.from_numpy(answers[share]),
            present=torch.from_numpy((documents != ABSENT)[share]),
            scores=torch.from_numpy(rows.values("scores", chosen)) if self.store.facts["scored"] else None,
        )

    def _candidates(
        self, chosen: Int64[ndarray, " rows"]
    ) -> tuple[Int64[ndarray, "rows group"], Bool[ndarray, "rows group"]]:
        """Select each row's documents, the positive first; mask the others that answer its query too."""
        rows = self.store["train"]
        row_documents, queries = rows.values("documents", chosen), rows.values("query", chosen)
        known = pad_lists(rows.lists("known", chosen), width=max(self.store.facts["known"], 1))
        shifts = range(1, min(self.in_batch, len(chosen) - 1) + 1)
        others = [np.roll(row_documents[:, 0], -shift) for shift in shifts]
        documents = np.column_stack([row_documents, *others])
        answers = (documents[:, :, None] == known[:, None, :]).any(axis=2) | (
            documents == row_documents[:, :1]
        )
        for at, shift in enumerate(shifts, row_documents.shape[1]):
            answers[:, at] |= np.roll(queries, -shift) == queries
        answers[:, 0] = False
        return documents, answers


class PairStage(Objective):
    """Cross-encoder and losses as one module."""

    def __init__(
        self, model: CrossEncoder, losses: CrossEncoderLosses, *, temperature: float | None = None
    ) -> None:
        """Combine model and losses. `temperature` divides the cosines, if scores are cosines."""
        super().__init__()
        self.model, self._losses, self._temperature = model, losses, temperature

    def losses(self, batch: PairBatch, encode: Encode) -> WeightedLosses:
        """Compute the weighted losses of this rank, and their parts; means of both over ranks are global."""
        pairs, dim, losses = encode("pair", batch.pairs)["pair"][:, 0], self.model.dim, self._losses
        queries = len(batch.weights)
        with torch.autocast(pairs.device.type, enabled=False):
            logits = relevance(pairs[:, :dim], pairs[:, dim : 2 * dim], self._temperature)
            logits = logits.unflatten(0, (-1, queries)).T
            parts: dict[str, Tensor] = {}
            if losses.one_hot:
                parts["one_hot"] = cross_entropy(
                    logits,
                    positives=torch.zeros(queries, dtype=torch.long, device=logits.device),
                    ignore=batch.answers | ~batch.present,
                    weights=batch.weights,
                )
            if losses.teacher:
                parts["teacher"] = _teacher_loss(logits, batch)
            if losses.reconstruction:
                of_pairs = pairs[:, 2 * dim].unflatten(0, (-1, queries)).T
                parts["reconstruction"] = mean_of_present(of_pairs, batch.present).mean()
        return {name: getattr(losses, name) * part for name, part in parts.items()}, parts

    def encode(self, name: str, rows: Batch) -> dict[str, Tensor]:
        """Encode ``pair`` [pairs, 1, 2 dim + 1], in float32.

        It holds both proxies of a pair and its reconstruction loss.
        """
        return {name: self.model(rows).float()}


def relevance(
    queries: Float[Tensor, "pairs dim"], documents: Float[Tensor, "pairs dim"], temperature: float | None
) -> Float[Tensor, " pairs"]:
    """Compute the relevance of each pair as a logit: a cosine over the temperature; without one, a product.

    A product (EmbedDistill, section 4.2) grows with the length of a document, and the index holds unit
    vectors: only cosines rank in the same way as search by a student that inherits the documents.
    """
    if temperature is None:
        return cross_encoder.scores(queries, documents)
    return F.cosine_similarity(queries, documents, dim=-1) / temperature


def _teacher_loss(logits: Tensor, batch: PairBatch) -> Tensor:
    if batch.scores is None:
        raise TrainingError(
            "cross_encoder.losses.teacher is set, but the triplets have no scores: collect them with a "
            "ranking model, or set it to 0"
        )
    scored_columns = batch.scores.shape[1]
    return teacher_kl(
        logits[:, :scored_columns],
        batch.scores,
        present=batch.present[:, :scored_columns],
        weights=batch.weights,
    )


class PairEncoder:
    """A trained cross-encoder that converts pairs to proxies and scores."""

    views = ("summary",)

    def __init__(
        self,
        model: CrossEncoder,
        *,
        token_budget: int = 8192,
        precision: Precision = "auto",
        device: torch.device | None = None,
        temperature: float | None = None,
    ) -> None:
        """Prepare `model` for inference. Scores are cosines over `temperature`, or products if it is None."""
        device = device or default_device()
        self._device, self._budget, self._temperature = device, token_budget, temperature
        self.model = model.eval()
        cast_parameters(self.model.backbone, compute_dtype(precision, device))
        self.model.to(device)
        self.model.requires_grad_(False)
        self.dim = model.dim
        self._shape = model_shape(self.model.backbone)
        self.cost = Cost()  # of the last call
        (self.no_query,) = model.query_prompt.rows([""])
        (no_document,) = model.document_prompt.rows([""], [""], [""])
        assert isinstance(no_document, TokenRow)
        self.no_document = no_document

    @classmethod
    def load(cls, folder: Path, **options: Any) -> "PairEncoder":
        """Load the encoder from a folder of :meth:`CrossEncoder.save`, with options of the constructor.

        Weights are read in the format of the computation.
        """
        dtype = compute_dtype(options.get("precision", "auto"), options.get("device") or default_device())
        return cls(CrossEncoder.load(folder, dtype=dtype), **options)

    def queries(
        self, queries: Sequence[TokenRow], documents: Sequence[TokenRow | None]
    ) -> Float[ndarray, "queries dim"]:
        """Compute each query's proxy, read with a document or without one."""
        rows = [pair(q, d or self.no_document) for q, d in zip(queries, documents, strict=True)]
        return self._proxies(rows)[0]

    def documents(self, documents: Sequence[TokenRow]) -> Float[ndarray, "docs dim"]:
        """Compute each document's proxy with an empty query: its embedding for any query (section 5.3)."""
        return self._proxies([pair(self.no_query, document) for document in documents])[1]

    def encode_with_cost(self, documents: Sequence[TokenRow], *, top_k: int = 0) -> RowEncoding:
        """Compute each document's proxy as its only view, without terms; interface of :class:`Encoder`."""
        return RowEncoding(self.documents(documents)[:, None], None, self.cost)

    def scores(self, queries: Sequence[TokenRow], documents: Sequence[TokenRow]) -> Float[ndarray, " pairs"]:
        """Compute the relevance of each pair, a logit."""
        proxies = self._proxies([pair(q, d) for q, d in zip(queries, documents, strict=True)])
        of_queries, of_documents = map(torch.from_numpy, proxies)
        logits: ndarray = relevance(of_queries, of_documents, self._temperature).numpy()
        return logits

    @torch.inference_mode()
    def _proxies(
        self, rows: Sequence[TokenRow]
    ) -> tuple[Float[ndarray, "pairs dim"], Float[ndarray, "pairs dim"]]:
        out = np.empty((2, len(rows), self.dim), dtype=np.float32)
        lengths = [len(row.ids) for row in rows]
        packed, padded = self.model.packs, 0
        for chosen in by_tokens(lengths, budget=self._budget, packed=packed):
            batch = collate([rows[i] for i in chosen], pad=self.model.pad, packed=packed)
            padded += batch.ids.numel()
            for side, proxies in enumerate(self.model.proxies(batch.to(self._device))):
                out[side, chosen] = proxies.cpu().numpy()
            usage.count_rows(len(chosen))
        self.cost = Cost(sum(lengths), padded, flops.of_rows(self._shape, lengths))
        return out[0], out[1]

    def peak(self) -> float:
        """Measure the FLOP/s of large matrix products on this device, in this precision."""
        return matmul_peak(self._device, next(self.model.backbone.parameters()).dtype)
