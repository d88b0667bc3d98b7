"""Encoder of texts by a transformer tower, for offline jobs, evaluation and serving."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.core.words import checked_texts
from scalingnote.encode.engines import Cost, RowEncoding, TopTerms
from scalingnote.models import flops
from scalingnote.models.batch import Batch, collate
from scalingnote.models.dual_encoder import load_tower
from scalingnote.models.flops import model_shape
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, TokenRow, document_fields
from scalingnote.models.published_model import Role
from scalingnote.models.published_tower import with_prefix
from scalingnote.models.sparse_head import strongest
from scalingnote.models.tower import Tower
from scalingnote.models.weights import Precision, cast_parameters, compute_dtype, default_device, matmul_peak
from scalingnote.storage import usage

# More tokens at once exceed a CPU's cache: with 8,192, all-MiniLM-L6-v2 encodes 10 to 20 % fewer documents a
# second (one thread, texts of 8 and of 60 words at the median); 256 to 2,048 are equal.
MAX_CPU_TOKENS = 1024
log = get_logger("encode")


class Encoder:
    """A trained tower, ready to encode.

    Weights are converted to the precision once: autocast would convert them in every call.
    """

    def __init__(
        self,
        tower: Tower,
        *,
        token_budget: int = 8192,
        precision: Precision = "auto",
        device: torch.device | None = None,
    ) -> None:
        """Move a tower to its device and precision.

        Args:
            tower: the tower; changed in place.
            token_budget: maximum tokens of a forward pass; at most MAX_CPU_TOKENS on a CPU.
            precision: of weights and matrix products; auto is the fastest that the device supports.
            device: by default a GPU if there is one.
        """
        device = device or default_device()
        self._device = device
        self._budget = min(token_budget, MAX_CPU_TOKENS) if device.type == "cpu" else token_budget
        self.tower = tower.eval()
        cast_parameters(self.tower.backbone, compute_dtype(precision, device))
        self.tower.to(device)  # after the cast: before it, the device would hold both versions
        self.tower.requires_grad_(False)
        self.dim, self.views = tower.dim, tower.views
        self._shape = model_shape(tower.backbone)

    @classmethod
    def load(
        cls,
        folder: Path,
        role: Role | None = None,
        *,
        token_budget: int = 8192,
        precision: Precision = "auto",
    ) -> "Encoder":
        """Load the encoder of a tower's folder, or, with `role`, of a published model's folder.

        A tower's folder is ``query/`` or ``document/`` of an artifact. Weights are read in the precision of
        the computation.
        """
        dtype = compute_dtype(precision, default_device())
        return cls(load_tower(folder, role, dtype=dtype), token_budget=token_budget, precision=precision)

    def with_prefix(self, prefix: str) -> "Encoder":
        """Copy the encoder with another prefix of every text; the copy shares the weights.

        Raises:
            ConfigError: the tower is not that of a published model, or the prefix fills its length by itself.
        """
        encoder = copy.copy(self)
        encoder.tower = with_prefix(self.tower, prefix)
        return encoder

    def query_rows(self, queries: Sequence[str]) -> list[TokenRow]:
        """Tokenise queries. The row of an empty query has only the end token.

        Raises:
            ConfigError: this is a document tower.
            DataError: a query is not a text.
        """
        return self._query_prompt().rows(checked_texts(queries, name="query"))

    def encode_queries(self, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
        """Encode queries, without normalisation; raise ConfigError for a document tower."""
        return self.encode(self.query_rows(queries))[:, 0]

    def encode_tokens(self) -> Float[ndarray, "vocabulary dim"]:
        """Encode each token of the vocabulary as a query of one token, without normalisation."""
        prompt = self._query_prompt()
        return self.encode([prompt.row([token]) for token in range(prompt.tokenizer.get_vocab_size())])[:, 0]

    def encode_documents(self, documents: pa.Table) -> dict[str, Float[ndarray, "docs dim"]]:
        """Encode documents, without normalisation; return embeddings by view.

        Args:
            documents: a table with title, topic and content; null is an empty text.

        Raises:
            ConfigError: this is a query tower.
            DataError: a document cannot be encoded; :meth:`encode_rows` leaves such documents out instead.
        """
        views, problems = self.encode_rows(documents)
        if problems:
            row, reason = next(iter(problems.items()))
            raise DataError(f"document row {row}: {reason}")
        return views

    def encode_token_ids(self, texts: Sequence[Sequence[int]]) -> Float[ndarray, "texts views dim"]:
        """Encode queries, or contents of documents, from token ids, without normalisation.

        Args:
            texts: ids of the tower's tokenizer without special tokens; long texts are truncated.

        Raises:
            DataError: a text is longer than the model's positions.
        """
        rows = []
        for ids in texts:
            row = self.tower.prompt.row(self.tower.prompt.cut(ids))
            if isinstance(row, DataError):
                raise row
            rows.append(row)
        return self.encode(rows)

    def encode_rows(
        self, documents: pa.Table
    ) -> tuple[dict[str, Float[ndarray, "docs dim"]], dict[int, str]]:
        """Encode the valid documents: view -> embeddings, in order; and row -> reason for the others."""
        rows = self.document_rows(documents)
        problems = {i: str(row) for i, row in enumerate(rows) if not isinstance(row, TokenRow)}
        encoded = self.encode([row for row in rows if isinstance(row, TokenRow)])
        return {view: encoded[:, i] for i, view in enumerate(self.views)}, problems

    def document_rows(self, documents: pa.Table) -> list[TokenRow | DataError]:
        """Tokenise documents; errors are in the places of those that cannot be encoded."""
        if not isinstance(self.tower.prompt, DocumentPrompt):
            raise ConfigError("this is a query tower: it cannot encode documents")
        return self.tower.prompt.rows(*document_fields(documents))

    def encode(self, rows: Sequence[TokenRow]) -> Float[ndarray, "rows views dim"]:
        """Encode token rows, without normalisation."""
        return self._forward(rows, None)[0]

    def encode_with_cost(self, rows: Sequence[TokenRow], *, top_k: int = 256) -> RowEncoding:
        """Encode token rows, with a sparse head also to `top_k` terms of largest weight; measure the cost."""
        terms = TopTerms.empty(len(rows), top_k) if self.tower.sparse else None
        embeddings, padded = self._forward(rows, terms, count=usage.count_rows)
        lengths = [len(row.ids) for row in rows]
        return RowEncoding(embeddings, terms, Cost(sum(lengths), padded, flops.of_rows(self._shape, lengths)))

    @torch.inference_mode()
    def _forward(
        self, rows: Sequence[TokenRow], terms: TopTerms | None, *, count: Callable[[int], None] | None = None
    ) -> tuple[Float[ndarray, "rows views dim"], int]:
        """Compute embeddings; return also the number of computed tokens, with padding.

        `terms` is filled unless it is None; `count` is called with the number of rows after each batch.

        Batches are not synchronised: a GPU computes while the CPU prepares the next batch. Batches that need
        more memory than the GPU has are halved.
        """
        out = torch.empty(len(rows), len(self.views), self.dim, device=self._device, dtype=torch.float32)
        packed, padded = self.tower.packs, 0
        lengths = [len(row.ids) for row in rows]
        waiting = deque(by_tokens(lengths, budget=self._budget, packed=packed))
        while waiting:
            chosen = waiting.popleft()
            several = len(chosen) > 1  # a single row, for example an online query, has no pads to save
            batch = collate([rows[i] for i in chosen], pad=self.tower.pad, packed=packed and several)
            try:
                self._read_batch(batch, chosen, out, terms)
            except torch.OutOfMemoryError:
                if not several:
                    raise
                # Handled below, because the exception keeps the tensors that filled the memory.
            else:
                padded += batch.ids.numel()
                if count is not None:
                    count(len(chosen))
                continue
            torch.cuda.empty_cache()
            # The next batches have as many tokens: all are halved, but only for these rows.
            waiting = deque(
                half for each in (chosen, *waiting) for half in np.array_split(each, 2) if len(half)
            )
            log.warning("the GPU has too little memory for %d tokens at once: halved", batch.ids.numel())
        return out.cpu().numpy(), padded

    def _read_batch(
        self, batch: Batch, chosen: Int[ndarray, " batch"], out: torch.Tensor, terms: TopTerms | None
    ) -> None:
        """Write the embeddings of a batch to the chosen rows of `out`, and its terms to `terms` if passed."""
        batch = batch.to(self._device)
        at = torch.from_numpy(chosen).to(self._device, non_blocking=True)
        if terms is None:
            out[at] = self.tower(batch)
        else:
            out[at], weights = self.tower.read(batch)
            terms.put(chosen, *(part.cpu().numpy() for part in strongest(weights, terms.terms.shape[1])))

    def peak(self) -> float:
        """Measure FLOPs per second of large matrix products on this device, in this precision."""
        return matmul_peak(self._device, next(self.tower.backbone.parameters()).dtype)

    def _query_prompt(self) -> QueryPrompt:
        if not isinstance(self.tower.prompt, QueryPrompt):
            raise ConfigError("this is a document tower: it cannot encode queries")
        return self.tower.prompt


def by_tokens(
    lengths: Sequence[int], *, budget: int, packed: bool = False
) -> Iterator[Int[ndarray, " rows"]]:
    """Divide rows into batches of similar length within a token budget, so that there is little padding.

    Args:
        lengths: tokens of each row.
        budget: maximum tokens of a batch: rows times the longest, or, if `packed`, the sum of lengths. A
            longer row is a separate batch.
        packed: whether the batches have no padding.

    Yields:
        Row numbers of a batch, longest first; every row occurs once.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64)[order], 1)
    until = np.cumsum(sizes)
    start = 0
    while start < len(order):
        if packed:
            before = until[start - 1] if start else 0
            size = int(np.searchsorted(until, before + budget, side="right")) - start
        else:
            size = budget // int(sizes[start])
        size = max(size, 1)
        yield order[start : start + size]
        start += size
