"""A query tower without a model: one table of token vectors.

The embedding of a query is the mean of its tokens' rows.

    ids        token ids without special tokens, then row numbers of features (LookupFeatures), if any
    rows       [tokens, dim]      looked up; with one head of attention over them, if configured
    embedding  [queries, 1, dim]  sum(weight x row) / sum(weight)

Every option starts without effect: attention adds 0, rows of features are 0, and weights are 1 unless start
weights are given. A query without tokens gets the mean of the token rows. On disk it is a :class:`Table`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64
from numpy import ndarray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.core.errors import ConfigError
from scalingnote.models.batch import Batch
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup_table import LookupFeatures, Storage, Table, quantize_rows
from scalingnote.models.prompt import TokenRow, tokenize, without_limits

# Learning rates under RowAdam relative to token rows (docs/guides/distil.md); pairs are many and rare.
BIGRAM_RATE = 0.25
END_RATE = 0.5
WEIGHT_RATE = 2.5


@dataclass(frozen=True)
class LookupStart:
    """Statistics of the training texts that a table starts from."""

    feature_keys: Int64[ndarray, " features"]
    weights: Float32[ndarray, " rows"] | None = None  # of tokens, then of features
    rows: Float32[ndarray, "tokens dim"] | None = None  # None: random, or a teacher's


class LookupPrompt:
    """Queries as token rows without special tokens."""

    views = ("query",)

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, features: LookupFeatures | None = None
    ) -> None:
        self.tokenizer, self._max_length, self._features = tokenizer, max_length, features

    def rows(self, queries: Sequence[str]) -> list[TokenRow]:
        """Return a row per query: at most `max_length` tokens, then features. Its position is not used."""
        rows = [ids[: self._max_length] for ids in tokenize(self.tokenizer, queries, self._max_length)]
        if self._features is not None:
            rows = [self._features.extend(ids) for ids in rows]
        return [TokenRow(ids, [0]) for ids in rows]


class RowAttention(nn.Module):
    """One head of attention over rows: rows + softmax(rows A rows^T / sqrt(dim)) rows B.

    A is the product of the query and key matrices, B of the value and output matrices; B starts at 0. The
    result depends on which tokens occur together, not on their order.
    """

    def __init__(self, dim: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.score, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        nn.init.zeros_(self.out.weight)

    def forward(
        self, rows: Float[Tensor, "lines tokens dim"], mask: Tensor
    ) -> Float[Tensor, "lines tokens dim"]:
        """Return the rows with attention added; `mask` is false at pads, which no token attends to."""
        scores = self.score(rows) @ rows.transpose(1, 2) / math.sqrt(rows.shape[-1])
        shares = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return rows + self.out(shares @ rows)  # type: ignore[no-any-return]

    def matrices(self) -> Float32[ndarray, "2 dim dim"]:
        """Return A and B, which rows are multiplied by from the right."""
        return np.stack([layer.weight.detach().cpu().numpy().T for layer in (self.score, self.out)])

    def copy(self, matrices: Float32[ndarray, "2 dim dim"]) -> None:
        """Copy the result of :meth:`matrices` of another head."""
        for layer, matrix in zip((self.score, self.out), matrices, strict=True):
            layer.weight.data.copy_(torch.from_numpy(matrix.T.copy()))


class LookupTower(nn.Module):
    """A query tower whose only weights are a table of rows."""

    role, views, packs, pad = "query", ("query",), True, 0

    def __init__(
        self,
        table: Float[Tensor, "tokens dim"],
        tokenizer: Tokenizer,
        *,
        max_length: int,
        weighting: Literal["mean", "learned"] = "mean",
        attention: bool = False,
        storage: Storage = "float16",
        seed: int = 0,
        features: LookupFeatures | None = None,
        made_from: Mapping[str, str] | None = None,
    ) -> None:
        """Make a tower of a table; ConfigError if `tokenizer` has more tokens than it has rows.

        Args:
            table: a row for each token, then for each feature.
            tokenizer: splits queries; its ids are row numbers.
            max_length: tokens read of a query.
            weighting: "learned" adds a weight per row.
            attention: whether a head of attention runs over the rows of a query.
            storage: number format of the saved table.
            seed: of the attention.
            features: token pairs and end tokens that have rows.
            made_from: as of :class:`Table`.
        """
        super().__init__()
        self.tokenizer, self.max_length, self.dim = without_limits(tokenizer), max_length, table.shape[1]
        self.prompt = LookupPrompt(tokenizer, max_length=max_length, features=features)
        self._features = features
        self.tokens = len(table) - (0 if features is None else len(features))
        if tokenizer.get_vocab_size() > self.tokens:
            raise ConfigError(
                f"the table has rows for {self.tokens:,} tokens, the tokenizer has "
                f"{tokenizer.get_vocab_size():,}: it was made for another one"
            )
        self._storage, self.made_from = storage, dict(made_from or {})
        self.table = nn.Parameter(table.detach().float().clone())
        if features is not None:  # read by train/engine.py
            pairs = torch.from_numpy(features.are_bigrams)
            rates = torch.cat([torch.ones(self.tokens), torch.where(pairs, BIGRAM_RATE, END_RATE)])
            self.table.row_rates = rates  # type: ignore[attr-defined]
        self.log_weights: nn.Parameter | None = None
        if weighting == "learned":
            # Logarithms, so that weights stay positive and their sum is a valid divisor.
            self.log_weights = nn.Parameter(torch.zeros(len(table)))
            self.log_weights.row_rates = torch.full((len(table),), WEIGHT_RATE)  # type: ignore[attr-defined]
        self.attention = RowAttention(self.dim, seed=seed) if attention else None

    def forward(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return float32 embeddings, not normalised, of padded or packed rows."""
        with torch.autocast(batch.ids.device.type, enabled=False):
            return self._embeddings(batch)[:, None]

    def _embeddings(self, batch: Batch) -> Float[Tensor, "rows dim"]:
        ids, lengths = batch.flat()
        ids = ids.long()  # a batch without any token has ids of type float
        row = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
        weights = None if self.log_weights is None else self.log_weights[ids].exp()
        if self.attention is None:
            total = F.embedding_bag(
                ids, self.table, lengths.cumsum(0) - lengths, mode="sum", per_sample_weights=weights
            )
        else:
            values = self._attend(ids, lengths, self.attention)
            values = values if weights is None else values * weights[:, None]
            total = values.new_zeros(len(lengths), self.dim).index_add(0, row, values)
        weight_sums = lengths.float()
        if weights is not None:
            weight_sums = torch.zeros_like(weight_sums).index_add(0, row, weights)
        embeddings: Tensor = total / weight_sums.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        empty = lengths == 0
        if empty.any():
            embeddings = torch.where(empty[:, None], self.table[: self.tokens].mean(0), embeddings)
        return embeddings

    def _attend(
        self, ids: Int[Tensor, " tokens"], lengths: Int[Tensor, " rows"], attention: nn.Module
    ) -> Tensor:
        """Return the rows of all tokens after attention, end to end."""
        mask = torch.arange(max(int(lengths.max()), 1), device=ids.device) < lengths[:, None]
        lines = torch.zeros(mask.shape, dtype=ids.dtype, device=ids.device).masked_scatter(mask, ids)
        looked_up = F.embedding(lines, self.table) * mask[..., None]
        attended: Tensor = attention(looked_up, mask)
        return attended[mask]

    def save(
        self, folder: Path, *, storage: Storage | None = None, merge_adapters: bool | None = None
    ) -> None:
        """Write the tower's folder, in `storage` or the tower's own; a table has no adapters to merge."""
        del merge_adapters
        values, scales = quantize_rows(self.table.detach().cpu().numpy(), storage or self._storage)
        weights = None if self.log_weights is None else self.log_weights.detach().exp().cpu().numpy()
        Table(
            values,
            self.tokenizer.to_str(),
            self.max_length,
            scales=scales,
            token_weights=weights,
            attention=None if self.attention is None else self.attention.matrices(),
            feature_keys=None if self._features is None else self._features.keys,
            made_from=self.made_from,
        ).write(folder)

    @classmethod
    def load(cls, folder: Path) -> "LookupTower":
        """Read a folder written by :meth:`save`; ArtifactError if it is none."""
        table = Table.read(folder)
        tower = cls(
            torch.from_numpy(np.array(table.rows())),
            Tokenizer.from_str(table.tokenizer_json),
            max_length=table.max_length,
            weighting="mean" if table.token_weights is None else "learned",
            attention=table.attention is not None,
            storage=str(table.values.dtype),  # type: ignore[arg-type]
            features=table.features,
            made_from=table.made_from,
        )
        if tower.log_weights is not None:
            tower.log_weights.data.copy_(torch.from_numpy(table.token_weights).log())
        if tower.attention is not None and table.attention is not None:
            tower.attention.copy(table.attention)
        return tower.eval()


def from_table(
    table: Float32[ndarray, "tokens dim"],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    storage: Storage = "float16",
    made_from: Mapping[str, str] | None = None,
) -> LookupTower:
    """Return the tower of a computed table with one row per token; for `made_from` see :class:`Table`."""
    return LookupTower(
        torch.from_numpy(table), tokenizer, max_length=max_length, storage=storage, made_from=made_from
    ).eval()


def build(
    config: LookupConfig,
    *,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    start: LookupStart | None = None,
) -> LookupTower:
    """Build a tower that is ready to train; rows of tokens are the start's or random, those of features 0.

    Without `start` it has no features and equal weights. ConfigError without a tokenizer.
    """
    if tokenizer_json is None:
        raise ConfigError("a lookup tower needs a tokenizer trained on the corpus, or its teacher's")
    tokenizer = Tokenizer.from_str(tokenizer_json)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokenizer.get_vocab_size(), dim, generator=generator) * dim**-0.5
    if start is not None and start.rows is not None:
        rows = torch.from_numpy(start.rows)
    features = None
    if start is not None and len(start.feature_keys):
        features = LookupFeatures(start.feature_keys, tokens=len(rows))
        rows = torch.cat([rows, torch.zeros(len(features), dim)])
    tower = LookupTower(
        rows,
        tokenizer,
        max_length=config.max_length,
        weighting=config.weighting,
        attention=config.attention,
        storage=config.storage,
        seed=seed,
        features=features,
    )
    if start is not None and start.weights is not None and tower.log_weights is not None:
        tower.log_weights.data.copy_(torch.from_numpy(start.weights).log())
    return tower
