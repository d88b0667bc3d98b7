"""A lookup tower at work: strings in, embeddings out, a tokenizer and a memory-mapped table between.

    one query     numpy takes its rows and adds them up: 5 us, where a torch call alone costs 20
    a batch       torch's EmbeddingBag: 0.4 to 2 us a query

Tokenising costs 30 us, so the raw tokenizer is called and texts are cut before it reads them. Rows attend to
each other in numpy, query by query.
"""

import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.models.prompt import tokenize
from scalingnote.models.table import Table, restored

BATCH = 16  # queries from which on torch is faster


class LookupEncoder:
    """The table of a folder, ready to encode. torch is imported by the first batch only."""

    def __init__(self, folder: Path) -> None:
        """ArtifactError when the folder holds no table."""
        self._table = table = Table.read(folder)
        self._tokenizer = Tokenizer.from_str(table.tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.dim = table.values.shape[1]
        # The plain array behind the memory map: np.memmap makes an object of itself for every slice.
        self._values, self._scales = np.asarray(table.values), table.scales
        self._weights = table.token_weights
        self._tensor: Any = None
        self._equal = [np.full(n, 1 / max(n, 1), np.float32) for n in range(table.max_length + 1)]
        self._empty: ndarray | None = None
        self._attention: tuple[ndarray, ndarray] | None = None
        if table.attention is not None:
            self._attention = (table.attention[0] / np.sqrt(np.float32(self.dim)), table.attention[1])

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Embeddings, not normalised."""
        room = self._table.max_length
        rows = [ids[:room] for ids in tokenize(self._tokenizer, queries, room)]
        if len(rows) == 1:
            return self._one(rows[0])[np.newaxis]
        if len(rows) < BATCH or self._attention is not None:
            return np.stack([self._one(ids) for ids in rows])
        return self._many(rows)

    def _one(self, ids: list[int]) -> Float32[ndarray, " dim"]:
        if not ids:
            return self._mean_row()
        numbers = np.array(ids)
        # One product of a row of shares and the rows: faster than their sum.
        shares = self._shares(numbers)
        values = self._values.take(numbers, axis=0).astype(np.float32, copy=False)
        scales = None if self._scales is None else self._scales[numbers]
        mean: ndarray = (shares if scales is None else shares * scales) @ values
        if self._attention is not None:
            mean += _heard(restored(values, scales), shares, *self._attention)
        return mean

    def _shares(self, numbers: Int64[ndarray, " tokens"]) -> Float32[ndarray, " tokens"]:
        """What each token counts in the mean."""
        if self._weights is None:
            return self._equal[len(numbers)]
        weights = self._weights[numbers]
        shares: ndarray = weights / weights.sum()
        return shares

    def _many(self, rows: Sequence[list[int]]) -> Float32[ndarray, "queries dim"]:
        import torch
        from torch.nn.functional import embedding_bag

        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        numbers = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
        starts = torch.from_numpy(lengths.cumsum() - lengths)
        weights = None if self._weights is None else self._weights[numbers]
        factors = _product(weights, None if self._scales is None else self._scales[numbers])
        shares, part = lengths, None
        with torch.inference_mode():
            ids, table = torch.from_numpy(numbers), self._as_tensor()
            if factors is None:
                if self._values.dtype == np.float16:
                    # The sum of float16 rows is rounded to float16, which ends at 65504 (torch's mean is the
                    # sum, divided): the power of two below 1 / tokens keeps it within, and costs no digit.
                    parts = np.ldexp(np.float16(1), -np.frexp(lengths)[1])
                    shares, part = lengths * parts.astype(np.float32), torch.from_numpy(parts.repeat(lengths))
                total = embedding_bag(ids, table, starts, mode="sum", per_sample_weights=part).float().numpy()
            else:
                looked_up = table.index_select(0, ids).float()
                each, scale = torch.arange(len(numbers)), torch.from_numpy(factors)
                total = embedding_bag(each, looked_up, starts, mode="sum", per_sample_weights=scale).numpy()
        if weights is not None:
            within = np.repeat(np.arange(len(rows)), lengths)
            shares = np.bincount(within, weights, minlength=len(rows))
        total /= np.maximum(shares, np.finfo(np.float32).tiny)[:, None].astype(np.float32)
        if not lengths.all():
            total[lengths == 0] = self._mean_row()
        return total

    def _mean_row(self) -> Float32[ndarray, " dim"]:
        """The embedding of a query without tokens; it reads the whole table, so it waits for one."""
        if self._empty is None:
            self._empty = self._table.rows().mean(axis=0)
        return self._empty

    def _as_tensor(self) -> Any:
        if self._tensor is None:
            import torch

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nobody may write to it is what we want
                self._tensor = torch.from_numpy(self._values)
        return self._tensor


def _heard(
    rows: Float32[ndarray, "tokens dim"],
    shares: Float32[ndarray, " tokens"],
    score: Float32[ndarray, "dim dim"],
    out: Float32[ndarray, "dim dim"],
) -> Float32[ndarray, " dim"]:
    """What one query's tokens hear of each other, in the mean: only the mean goes through `out`."""
    scores = rows @ score @ rows.T
    attended = np.exp(scores - scores.max(axis=1, keepdims=True))
    attended /= attended.sum(axis=1, keepdims=True)
    heard: ndarray = shares @ attended @ rows @ out
    return heard


def _product(first: ndarray | None, second: ndarray | None) -> ndarray | None:
    return first if second is None else (second if first is None else first * second)
