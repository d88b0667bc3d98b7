"""Pairs of texts to proxies and scores, offline: the cross-encoder as a teacher."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray

from scalingnote.encode.batching import by_tokens
from scalingnote.encode.tally import Cost
from scalingnote.models import flops
from scalingnote.models.batch import collate
from scalingnote.models.cross_encoder import CrossEncoder, pair
from scalingnote.models.precision import Precision, compute_dtype, lower, matmul_peak
from scalingnote.models.prompt import Row
from scalingnote.models.shape import of_model


class PairEncoder:
    """A trained cross-encoder, ready to read pairs."""

    views = ("summary",)
    terms = None
    top_k = 0

    def __init__(
        self,
        model: CrossEncoder,
        *,
        token_budget: int = 8192,
        precision: Precision = "auto",
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._device, self._budget = device, token_budget
        self.model = model.eval().to(device)
        lower(self.model.backbone, compute_dtype(precision, device))
        self.model.requires_grad_(False)
        self.dim = model.dim
        self._shape = of_model(self.model.backbone)
        self.cost = Cost()  # of the last call
        (self.no_query,) = model.query_prompt.rows([""])
        (no_document,) = model.document_prompt.rows([""], [""], [""])
        assert isinstance(no_document, Row)
        self.no_document = no_document

    @classmethod
    def load(cls, folder: Path, *, token_budget: int = 8192, precision: Precision = "auto") -> "PairEncoder":
        """The encoder of a folder that :meth:`CrossEncoder.save` wrote."""
        return cls(CrossEncoder.load(folder), token_budget=token_budget, precision=precision)

    def queries(
        self, queries: Sequence[Row], documents: Sequence[Row | None]
    ) -> Float[ndarray, "queries dim"]:
        """Each query's proxy beside a document, or beside none."""
        rows = [pair(q, d or self.no_document) for q, d in zip(queries, documents, strict=True)]
        return self._proxies(rows)[0]

    def documents(self, documents: Sequence[Row]) -> Float[ndarray, "docs dim"]:
        """Each document's proxy beside an empty query: its embedding, whatever is asked (section 5.3)."""
        return self._proxies([pair(self.no_query, document) for document in documents])[1]

    def encode(self, documents: Sequence[Row]) -> Float[ndarray, "docs views dim"]:
        """The same as the one view that there is, as an encoder of documents gives it."""
        return self.documents(documents)[:, None]

    def scores(self, queries: Sequence[Row], documents: Sequence[Row]) -> Float[ndarray, " pairs"]:
        """The relevance of each pair, a logit."""
        found = self._proxies([pair(q, d) for q, d in zip(queries, documents, strict=True)])
        logits: ndarray = np.einsum("pd,pd->p", *found) / np.sqrt(np.float32(self.dim))
        return logits

    @torch.inference_mode()
    def _proxies(
        self, rows: Sequence[Row]
    ) -> tuple[Float[ndarray, "pairs dim"], Float[ndarray, "pairs dim"]]:
        out = np.empty((2, len(rows), self.dim), dtype=np.float32)
        lengths = [len(row.ids) for row in rows]
        packed, padded = self.model.packs, 0
        for chosen in by_tokens(lengths, budget=self._budget, packed=packed):
            batch = collate([rows[i] for i in chosen], pad=self.model.pad, packed=packed)
            padded += batch.ids.numel()
            for side, found in enumerate(self.model.proxies(batch.to(self._device))):
                out[side, chosen] = found.cpu().numpy()
        self.cost = Cost(sum(lengths), padded, flops.of_rows(self._shape, lengths))
        return out[0], out[1]

    def peak(self) -> float:
        """Floating-point operations a second of large matrix products on this device, in this precision."""
        return matmul_peak(self._device, next(self.model.backbone.parameters()).dtype)
