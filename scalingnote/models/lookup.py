"""A lookup tower: a query's embedding is the mean of its tokens' rows in one table. There is no model.

    ids        token numbers, no special tokens; perhaps those of features (lookup_features.py) behind them
    rows       [tokens, dim]      looked up; perhaps each with what it hears of the others by attention
    embedding  [queries, 1, dim]  (sum of weight x row) / sum of weights

What every option adds starts at nothing: attention adds 0, rows of features are 0, and weights are 1 unless
they are given. A query without tokens gets the mean of the tokens' rows. On disk it is a :class:`Table`.
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

from scalingnote.errors import ConfigError
from scalingnote.models.batch import Batch
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup_features import LookupFeatures, is_bigram
from scalingnote.models.prompt import Row, tokenize
from scalingnote.models.table import Storage, Table, stored

# Learning rates under RowAdam, over that of token rows (docs/distillation.md): pairs are many and rare.
BIGRAM_RATE = 0.25
END_RATE = 0.5
WEIGHT_RATE = 2.5


@dataclass(frozen=True)
class LookupStart:
    """What is known of a table before it learns, from the texts it will learn from."""

    feature_keys: Int64[ndarray, " features"]
    weights: Float32[ndarray, " rows"] | None = None  # of tokens, then of features


class LookupPrompt:
    """A query as a lookup tower reads it: its tokens, and nothing around them."""

    views = ("query",)

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, features: LookupFeatures | None = None
    ) -> None:
        self.tokenizer, self._max_length, self._features = tokenizer, max_length, features

    def rows(self, queries: Sequence[str]) -> list[Row]:
        """One row per query, cut at `max_length` tokens, features behind them; its position says nothing."""
        room = self._max_length
        found = [ids[:room] for ids in tokenize(self.tokenizer, queries, room)]
        if self._features is not None:
            found = [self._features.extend(ids) for ids in found]
        return [Row(ids, [0]) for ids in found]


class LookupTower(nn.Module):
    """The query side of a dual encoder as a table that learns."""

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
        """`table` has a row for each token, then for each feature; `storage` is that of the saved table."""
        super().__init__()
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer, self.max_length, self.dim = tokenizer, max_length, table.shape[1]
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
        # Its logarithm, so that a weight stays above 0 and their sum can be divided by.
        learned = weighting == "learned"
        self.log_weights = nn.Parameter(torch.zeros(len(table))) if learned else None
        if features is not None:  # read by train/strategies/row_adam.py
            pairs = torch.from_numpy(is_bigram(features.keys, tokens=self.tokens))
            rates = torch.cat([torch.ones(self.tokens), torch.where(pairs, BIGRAM_RATE, END_RATE)])
            self.table.row_rates = rates  # type: ignore[attr-defined]
        if self.log_weights is not None:
            self.log_weights.row_rates = torch.full((len(table),), WEIGHT_RATE)  # type: ignore[attr-defined]
        self.attention = Attention(self.dim, seed=seed) if attention else None

    def forward(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Embeddings in float32, not normalised; of padded or of packed rows."""
        with torch.autocast(batch.ids.device.type, enabled=False):
            return self._embeddings(batch)[:, None]

    def _embeddings(self, batch: Batch) -> Float[Tensor, "rows dim"]:
        ids, lengths = batch.flat()
        ids = ids.long()  # of a batch without any token, they come as floats
        row = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
        weights = None if self.log_weights is None else self.log_weights[ids].exp()
        if self.attention is None:
            total = F.embedding_bag(
                ids, self.table, lengths.cumsum(0) - lengths, mode="sum", per_sample_weights=weights
            )
        else:
            values = self._attended(ids, lengths, self.attention)
            values = values if weights is None else values * weights[:, None]
            total = values.new_zeros(len(lengths), self.dim).index_add(0, row, values)
        shares = lengths.float()
        if weights is not None:
            shares = torch.zeros_like(shares).index_add(0, row, weights)
        found: Tensor = total / shares.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        empty = lengths == 0
        if empty.any():
            found = torch.where(empty[:, None], self.table[: self.tokens].mean(0), found)
        return found

    def _attended(
        self, ids: Int[Tensor, " tokens"], lengths: Int[Tensor, " rows"], attention: nn.Module
    ) -> Tensor:
        """Rows of all tokens after attention, still laid end to end."""
        mask = torch.arange(max(int(lengths.max()), 1), device=ids.device) < lengths[:, None]
        lines = torch.zeros(mask.shape, dtype=ids.dtype, device=ids.device).masked_scatter(mask, ids)
        looked_up = F.embedding(lines, self.table) * mask[..., None]
        attended: Tensor = attention(looked_up, mask)
        return attended[mask]

    def truncated(self, dim: int) -> "LookupTower":
        """The tower of the first `dim` values of every row (Matryoshka).

        ConfigError where attention, which reads whole rows, would have to be cut too.
        """
        if self.attention is not None:
            raise ConfigError(f"attention over whole rows cannot be cut to {dim} values")
        if not 0 < dim <= self.dim:
            raise ConfigError(f"cannot cut rows of {self.dim} values to {dim}")
        cut = LookupTower(
            self.table[:, :dim],
            self.tokenizer,
            max_length=self.max_length,
            weighting="mean" if self.log_weights is None else "learned",
            storage=self._storage,
            features=self._features,
            made_from=self.made_from,
        )
        if cut.log_weights is not None and self.log_weights is not None:
            cut.log_weights.data.copy_(self.log_weights.detach())
        return cut.train(self.training)

    def save(
        self, folder: Path, *, storage: Storage | None = None, merge_adapters: bool | None = None
    ) -> None:
        """Write the tower's folder, in its own storage unless another is given; a table has no adapters."""
        del merge_adapters
        values, scales = stored(self.table.detach().cpu().numpy(), storage or self._storage)
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
        """Read a folder written by :meth:`save`; ArtifactError when it is not one."""
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
    """The tower of a finished table, a row per token; `made_from` are digests of what the rows depend on."""
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
    """A tower ready to train, its rows of tokens drawn at random from `seed`, those of features 0.

    ConfigError when it lacks a tokenizer.
    """
    if tokenizer_json is None:
        raise ConfigError("a lookup tower needs a tokenizer trained on the corpus, or its teacher's")
    tokenizer = Tokenizer.from_str(tokenizer_json)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokenizer.get_vocab_size(), dim, generator=generator) * dim**-0.5
    features = None
    if start is not None and len(start.feature_keys):
        features = LookupFeatures(start.feature_keys, tokens=len(rows))
        rows = torch.cat([rows, torch.zeros(len(features), dim)])
    made = LookupTower(
        rows,
        tokenizer,
        max_length=config.max_length,
        weighting=config.weighting,
        attention=config.attention,
        storage=config.storage,
        seed=seed,
        features=features,
    )
    if start is not None and start.weights is not None and made.log_weights is not None:
        made.log_weights.data.copy_(torch.from_numpy(start.weights).log())
    return made


class Attention(nn.Module):
    """rows + softmax(rows A rows' / sqrt(dim)) rows B: it hears which tokens stand together, not their order.

    One head: A stands for its query and key matrices multiplied, B, 0 in the beginning, for value and output.
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
        """No token attends to one beyond its line's end (where `mask` is false)."""
        scores = self.score(rows) @ rows.transpose(1, 2) / math.sqrt(rows.shape[-1])
        shares = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return rows + self.out(shares @ rows)  # type: ignore[no-any-return]

    def matrices(self) -> Float32[ndarray, "2 dim dim"]:
        """A and B, as rows are multiplied by them."""
        return np.stack([layer.weight.detach().cpu().numpy().T for layer in (self.score, self.out)])

    def copy(self, matrices: Float32[ndarray, "2 dim dim"]) -> None:
        """Take over what :meth:`matrices` gave."""
        for layer, matrix in zip((self.score, self.out), matrices, strict=True):
            layer.weight.data.copy_(torch.from_numpy(matrix.T.copy()))
