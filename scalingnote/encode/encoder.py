"""The encoder: text in, embeddings out; one class for the offline jobs, evaluation and serving."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch
from jaxtyping import Float
from numpy import ndarray

from scalingnote.encode.batching import by_tokens
from scalingnote.encode.tally import Cost
from scalingnote.encode.terms import Terms
from scalingnote.errors import ConfigError, DataError
from scalingnote.models import flops
from scalingnote.models.precision import Precision, compute_dtype, lower, matmul_peak
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, Row
from scalingnote.models.shape import of_model
from scalingnote.models.sparse_head import strongest
from scalingnote.models.tower import Tower, collate

# More tokens at once leave a CPU's cache: all-MiniLM-L6-v2 encodes 10 to 20 % fewer documents a second with
# 8,192 (one thread, texts of 8 and of 60 words at the median); 256 to 2,048 are alike.
CPU_TOKENS = 1024


class Encoder:
    """A trained tower, ready to encode. Weights are converted once: autocast would recast them per call."""

    def __init__(
        self,
        tower: Tower,
        *,
        token_budget: int = 8192,
        precision: Precision = "auto",
        device: torch.device | None = None,
    ) -> None:
        """`token_budget` is the most tokens of a forward pass; a CPU takes :data:`CPU_TOKENS` at most."""
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._device = device
        self._budget = min(token_budget, CPU_TOKENS) if device.type == "cpu" else token_budget
        self.tower = tower.eval().to(device)
        lower(self.tower.backbone, compute_dtype(precision, device))
        self.tower.requires_grad_(False)
        self.dim, self.views = tower.dim, tower.views
        self._shape = of_model(tower.backbone)
        self.cost = Cost()  # of the last call
        # Of the last call's documents, `top_k` terms each, where the tower has a sparse head.
        self.terms: Terms | None = None
        self.top_k = 256

    @classmethod
    def load(cls, folder: Path, *, token_budget: int = 8192, precision: Precision = "auto") -> "Encoder":
        """The encoder of a tower's folder (``query/`` or ``document/`` of an artifact)."""
        return cls(Tower.load(folder), token_budget=token_budget, precision=precision)

    def encode_queries(self, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
        """Query embeddings, not normalised. An empty query is a query of its end token alone."""
        if not isinstance(self.tower.prompt, QueryPrompt):
            raise ConfigError("this is a document tower: it cannot encode queries")
        return self.encode(self.tower.prompt.rows(queries))[:, 0]

    def encode_tokens(self) -> Float[ndarray, "vocabulary dim"]:
        """The embedding of every token of the vocabulary asked as a query of its own, not normalised."""
        if not isinstance(self.tower.prompt, QueryPrompt):
            raise ConfigError("this is a document tower: it cannot encode queries")
        size = self.tower.prompt.tokenizer.get_vocab_size()
        return self.encode([self.tower.prompt.row([token]) for token in range(size)])[:, 0]

    def encode_documents(self, documents: pa.Table) -> dict[str, Float[ndarray, "docs dim"]]:
        """View -> embeddings, not normalised, of rows with title, topic and content.

        DataError when a row cannot be encoded; :meth:`encode_rows` sets such rows aside instead.
        """
        views, problems = self.encode_rows(documents)
        if problems:
            row, reason = next(iter(problems.items()))
            raise DataError(f"document row {row}: {reason}")
        return views

    def encode_rows(
        self, documents: pa.Table
    ) -> tuple[dict[str, Float[ndarray, "docs dim"]], dict[int, str]]:
        """Embeddings of the rows that can be encoded, in order, and row -> reason for those that cannot."""
        if not isinstance(self.tower.prompt, DocumentPrompt):
            raise ConfigError("this is a query tower: it cannot encode documents")
        fields = [documents[name].to_pylist() for name in ("title", "topic", "content")]
        rows = self.tower.prompt.rows(*fields)
        problems = {i: str(row) for i, row in enumerate(rows) if not isinstance(row, Row)}
        encoded = self.encode([row for row in rows if isinstance(row, Row)])
        return {view: encoded[:, i] for i, view in enumerate(self.views)}, problems

    @torch.inference_mode()
    def encode(self, rows: Sequence[Row]) -> Float[ndarray, "rows views dim"]:
        """Embeddings of token rows, not normalised.

        Nothing is waited for in between: a GPU computes while the next micro-batch is put together.
        """
        out = torch.empty(len(rows), len(self.views), self.dim, device=self._device)
        self.terms = Terms.empty(len(rows), self.top_k) if self.tower.sparse else None
        lengths = [len(row.ids) for row in rows]
        packed, padded = self.tower.packs, 0
        for chosen in by_tokens(lengths, budget=self._budget, packed=packed):
            batch = collate([rows[i] for i in chosen], pad=self.tower.pad, packed=packed)
            padded += batch.ids.numel()
            batch = batch.to(self._device)
            at = torch.from_numpy(chosen).to(self._device, non_blocking=True)
            if self.terms is None:
                out[at] = self.tower(batch)
                continue
            out[at], weights = self.tower.read(batch)
            self.terms.put(chosen, *(found.cpu().numpy() for found in strongest(weights, self.top_k)))
        self.cost = Cost(sum(lengths), padded, flops.of_rows(self._shape, lengths))
        return out.cpu().numpy()

    def peak(self) -> float:
        """Floating-point operations a second of large matrix products on this device, in this precision."""
        return matmul_peak(self._device, next(self.tower.backbone.parameters()).dtype)
