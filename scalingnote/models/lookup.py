"""A query tower without a model: one table of token vectors.

The embedding of a query is the mean of its tokens' rows.

    ids        token ids without special tokens, then row numbers of features (LookupFeatures), if any
    rows       [tokens, dim]      looked up; with one head of attention over them, if configured
    embedding  [queries, 1, dim]  sum(weight x row) / sum(weight)

*New words* are tokens that replace several others, such as "blood pressure". In training, a new word is read
as its pieces followed by itself, and its row learns the difference to its pieces: a rare word changes little,
and its pieces learn from it too. On disk (:class:`Table`) its row is the weighted mean of all these rows and
its weight is their sum, so that a query has one row per token and the same embedding.

*The prior* is a row that every text has in training and that is dropped afterwards. It learns the component
that all texts have in common, so that the other rows need not contain it; it has most weight in short texts.
The embeddings of a table that was trained without it are near the mean of all texts, and too often find the
documents near that mean.

Every option starts without effect: attention adds 0, rows of features and new words are 0, and weights are 1
unless start weights are passed. A query without tokens gets the mean of the rows of all tokens, as on disk.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Int64
from numpy import ndarray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.core.errors import ConfigError
from scalingnote.models.batch import Batch, collate
from scalingnote.models.config import LookupConfig
from scalingnote.models.lookup_table import LookupFeatures, Storage, Table, quantize_rows
from scalingnote.models.prompt import TokenRow, tokenize, without_limits

# Learning rates of RowAdam relative to token rows (docs/guides/distil.md); pairs and new words are rare.
PAIR_RATE = 0.25
END_RATE = 0.5
WEIGHT_RATE = 2.5
Pieces = Mapping[int, Sequence[int]]  # id of a new word -> ids of its pieces


@dataclass(frozen=True)
class LookupStart:
    """Statistics of the training texts that a table starts from."""

    feature_keys: Int64[ndarray, " features"]
    weights: Float32[ndarray, " rows"] | None = None  # of tokens, then of features
    rows: Float32[ndarray, "tokens dim"] | None = None  # None: random, or a teacher's
    prior: Float32[ndarray, " dim"] | None = None  # the teacher's mean embedding, if the table is centred


class LookupPrompt:
    """Queries as token rows without special tokens."""

    views = ("query",)

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        features: LookupFeatures | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        self.tokenizer, self._max_length, self._features = tokenizer, max_length, features
        self.pieces = pieces or {}

    def rows(self, queries: Sequence[str]) -> list[TokenRow]:
        """Return a row per query: at most `max_length` tokens, new words after their pieces, then features.

        Its position is not used.
        """
        rows = [ids[: self._max_length] for ids in tokenize(self.tokenizer, queries, self._max_length)]
        if self.pieces:
            rows = [[part for token in ids for part in (*self.pieces.get(token, ()), token)] for ids in rows]
        if self._features is not None:
            rows = [self._features.extend(ids) for ids in rows]
        return [TokenRow(ids, [0]) for ids in rows]


class RowAttention(nn.Module):
    """One head of attention over rows: rows + softmax(rows A rows^T / sqrt(dim)) rows B.

    A is the product of the query and key matrices, B that of the value and output matrices; B starts at 0.
    The result depends on which tokens occur together, not on their order.
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
        """Return A and B; rows are multiplied by them from the right."""
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
        weights: Float[Tensor, " rows"] | None = None,
        attention: RowAttention | None = None,
        storage: Storage = "float16",
        features: LookupFeatures | None = None,
        pieces: Pieces | None = None,
        prior: Float[Tensor, " dim"] | None = None,
        made_from: Mapping[str, str] | None = None,
    ) -> None:
        """Make a tower from a table; raise ConfigError if `tokenizer` has more tokens than `table` has rows.

        Args:
            table: a row for each token, then for each feature.
            tokenizer: splits queries; its ids are row numbers.
            max_length: tokens read of a query.
            weights: of the rows in the mean, which are trained; None: all are 1.
            attention: runs over the rows of a query.
            storage: number format of the saved table.
            features: token pairs and end tokens that have rows.
            pieces: pieces of new words; the row of a new word is added to those of its pieces.
            prior: row of every text, with weight 1, until :meth:`centre` drops it; it is not saved.
            made_from: as of :class:`Table`.
        """
        super().__init__()
        self.tokenizer, self.max_length, self.dim = without_limits(tokenizer), max_length, table.shape[1]
        self.prompt = LookupPrompt(tokenizer, max_length=max_length, features=features, pieces=pieces)
        self._features = features
        self.tokens = len(table) - (0 if features is None else len(features))
        if tokenizer.get_vocab_size() > self.tokens:
            raise ConfigError(
                f"the table has rows for {self.tokens:,} tokens, the tokenizer has "
                f"{tokenizer.get_vocab_size():,}: pass the tokenizer that the table was made for"
            )
        self._storage, self.made_from = storage, dict(made_from or {})
        self.table = nn.Parameter(table.detach().float().clone())
        rates = torch.ones(len(table))
        rates[list(self.prompt.pieces)] = PAIR_RATE
        if features is not None:
            rates[self.tokens :] = torch.where(torch.from_numpy(features.are_bigrams), PAIR_RATE, END_RATE)
        self.table.row_rates = rates  # type: ignore[attr-defined]  # read by train/engine.py
        self.prior = None if prior is None else nn.Parameter(prior.detach().float().clone()[None])
        self.log_weights: nn.Parameter | None = None
        if weights is not None:
            # Logarithms, so that weights stay positive and their sum is a valid divisor.
            self.log_weights = nn.Parameter(weights.log())
            self.log_weights.row_rates = torch.full((len(table),), WEIGHT_RATE)  # type: ignore[attr-defined]
        self.attention = attention

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
        if self.prior is not None:
            total, weight_sums = total + self.prior, weight_sums + 1
        embeddings: Tensor = total / weight_sums.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        empty = lengths == 0
        if empty.any():
            mean = self._saved_rows()[0][: self.tokens].mean(0)
            embeddings = torch.where(empty[:, None], mean, embeddings)
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

    def _saved_rows(self) -> tuple[Float[Tensor, "rows dim"], Float[Tensor, " rows"] | None]:
        """Return the row and the weight of each token, with its pieces; weights are None if all are 1."""
        weights = None if self.log_weights is None else self.log_weights.exp()
        if not (pieces := self.prompt.pieces):
            return self.table, weights
        weights = torch.ones_like(self.table[:, 0]) if weights is None else weights
        new_words = torch.tensor([*pieces], device=self.table.device)
        parts = [[*ids_of_word, word] for word, ids_of_word in pieces.items()]
        lengths = torch.tensor([len(ids_of_word) for ids_of_word in parts], device=new_words.device)
        ids = torch.tensor([part for ids_of_word in parts for part in ids_of_word], device=new_words.device)
        sums = F.embedding_bag(
            ids, self.table, lengths.cumsum(0) - lengths, mode="sum", per_sample_weights=weights[ids]
        )
        word_index = torch.repeat_interleave(torch.arange(len(new_words), device=new_words.device), lengths)
        totals = torch.zeros_like(weights[new_words]).index_add(0, word_index, weights[ids])
        rows = self.table.index_copy(0, new_words, sums / totals[:, None])
        return rows, weights.index_copy(0, new_words, totals)

    def centre(self, texts: Sequence[TokenRow], *, share: float) -> None:
        """Drop the prior, and subtract `share` of the mean embedding of some texts from every embedding.

        An embedding is a weighted mean of rows, so it is subtracted from every row. This does not hold with
        attention.
        """
        self.prior = None
        with torch.no_grad():
            mean = self(collate(texts, pad=self.pad, packed=True)).mean((0, 1))
            self.table.sub_(share * mean)

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the tower's folder; a table has no adapters to merge."""
        del merge_adapters
        rows, weights = self._saved_rows()
        values, scales = quantize_rows(rows.detach().cpu().numpy(), self._storage)
        Table(
            values,
            self.tokenizer.to_str(),
            self.max_length,
            scales=scales,
            token_weights=None if weights is None else weights.detach().cpu().numpy(),
            attention=None if self.attention is None else self.attention.matrices(),
            feature_keys=None if self._features is None else self._features.keys,
            made_from=self.made_from,
        ).write(folder)

    @classmethod
    def load(cls, folder: Path) -> "LookupTower":
        """Read a folder written by :meth:`save`; raise ArtifactError if it is not one."""
        table = Table.read(folder)
        weights, attention = table.token_weights, None
        if table.attention is not None:
            attention = RowAttention(table.values.shape[1], seed=0)
            attention.copy(table.attention)
        return cls(
            torch.from_numpy(np.array(table.rows())),
            Tokenizer.from_str(table.tokenizer_json),
            max_length=table.max_length,
            weights=None if weights is None else torch.from_numpy(weights),
            attention=attention,
            storage=str(table.values.dtype),  # type: ignore[arg-type]
            features=table.features,
            made_from=table.made_from,
        ).eval()


def build(
    config: LookupConfig,
    *,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    start: LookupStart | None = None,
    pieces: Pieces | None = None,
) -> LookupTower:
    """Build a tower that is ready to train; rows of tokens are those of `start` or random, others are 0.

    `pieces` are the new words. Without `start` it has no features, equal weights and no prior. Raise
    ConfigError if there is no tokenizer.
    """
    if tokenizer_json is None:
        raise ConfigError("a lookup tower needs a tokenizer trained on the corpus, or its teacher's")
    tokenizer = Tokenizer.from_str(tokenizer_json)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokenizer.get_vocab_size(), dim, generator=generator) * dim**-0.5
    start = LookupStart(np.empty(0, np.int64)) if start is None else start
    rows[list(pieces or {})] = 0
    if start.rows is not None:
        rows[: len(start.rows)] = torch.from_numpy(start.rows)
    features = None
    if len(start.feature_keys):
        features = LookupFeatures(start.feature_keys, tokens=len(rows))
        rows = torch.cat([rows, torch.zeros(len(features), dim)])
    weights = None
    if config.weighting == "learned":
        weights = torch.ones(len(rows)) if start.weights is None else torch.from_numpy(start.weights)
    return LookupTower(
        rows,
        tokenizer,
        max_length=config.max_length,
        weights=weights,
        attention=RowAttention(dim, seed=seed) if config.attention else None,
        storage=config.storage,
        features=features,
        pieces=pieces,
        prior=None if start.prior is None else torch.from_numpy(start.prior),
    )
