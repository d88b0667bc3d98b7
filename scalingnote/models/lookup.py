"""Query towers that end as a table of token vectors: the table, and LightRetriever's token-wise encoder.

A lookup tower: the embedding of a query is the mean of its tokens' rows in one table, without a model.

    ids        token ids without special tokens, then row numbers of features (LookupFeatures), if any
    rows       [tokens, dim]      looked up; with one head of attention over them, if configured
    embedding  [queries, 1, dim]  sum(weight x row) / sum(weight)

Every option starts without effect: attention adds 0, rows of features are 0, and weights are 1 unless start
weights are given. A query without tokens gets the mean of the token rows. On disk it is a :class:`Table`.

A token-wise tower: each token is encoded alone after an instruction, then averaged.

    line        [instruction | token end | token end | ...]   the instruction once, then blocks
    mask        a block sees the instruction and itself       (appendix A.5); positions restart in each block
    vectors     [tokens, dim]     states at the end tokens, projected (Eq. 3)
    embedding   [queries, 1, dim] their mean over a query's tokens (Eq. 4)

The vector of a token does not depend on the rest of its query. So a batch encodes each distinct token once,
many per line, and encoding the whole vocabulary gives the table that is saved: a lookup tower (Eq. 6).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64
from numpy import ndarray
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.errors import ConfigError
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, attention_arguments, choose_attention, first_position
from scalingnote.models.config import LookupConfig, TokenWiseConfig
from scalingnote.models.heads import Projection, RowAttention, draw_weights
from scalingnote.models.lookup_table import LookupFeatures, Storage, Table, is_bigram, quantize_rows
from scalingnote.models.prompt import Row, tokenize
from scalingnote.models.weights import add_adapter

# Learning rates under RowAdam relative to token rows (docs/guides/distil.md); pairs are many and rare.
BIGRAM_RATE = 0.25
END_RATE = 0.5
WEIGHT_RATE = 2.5
BLOCKS = 32  # per line: 64 tokens, about twice an instruction, so that the instruction costs little
_TABLE_LINES = 64  # per forward pass, when the table is computed
_INSTRUCTION = -1  # the block number of the instruction's tokens


@dataclass(frozen=True)
class LookupStart:
    """Statistics of the training texts that a table starts from."""

    feature_keys: Int64[ndarray, " features"]
    weights: Float32[ndarray, " rows"] | None = None  # of tokens, then of features


class LookupPrompt:
    """Queries as token rows without special tokens."""

    views = ("query",)

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, features: LookupFeatures | None = None
    ) -> None:
        self.tokenizer, self._max_length, self._features = tokenizer, max_length, features

    def rows(self, queries: Sequence[str]) -> list[Row]:
        """Return a row per query: at most `max_length` tokens, then features. Its position is not used."""
        rows = [ids[: self._max_length] for ids in tokenize(self.tokenizer, queries, self._max_length)]
        if self._features is not None:
            rows = [self._features.extend(ids) for ids in rows]
        return [Row(ids, [0]) for ids in rows]


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
        """Make a tower of a table.

        Args:
            table: a row for each token, then for each feature.
            tokenizer: splits queries; its ids are row numbers.
            max_length: tokens read of a query.
            weighting: "learned" adds a weight per row.
            attention: whether a head of attention runs over the rows of a query.
            storage: number format of the saved table.
            seed: of the attention.
            features: token pairs and end tokens that have rows.
            made_from: digests of what the rows were computed from.

        Raises:
            ConfigError: the tokenizer has more tokens than the table has rows.
        """
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
        # Logarithms, so that weights stay positive and their sum is a valid divisor.
        learned = weighting == "learned"
        self.log_weights = nn.Parameter(torch.zeros(len(table))) if learned else None
        if features is not None:  # read by train/strategies/row_adam.py
            pairs = torch.from_numpy(is_bigram(features.keys, tokens=self.tokens))
            rates = torch.cat([torch.ones(self.tokens), torch.where(pairs, BIGRAM_RATE, END_RATE)])
            self.table.row_rates = rates  # type: ignore[attr-defined]
        if self.log_weights is not None:
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
            values = self._attended(ids, lengths, self.attention)
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

    def _attended(
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
    """Build a tower that is ready to train; rows of tokens are random, those of features 0.

    Args:
        config: options of the tower.
        dim: width of the rows.
        tokenizer_json: its tokenizer; ConfigError if there is none.
        seed: of the rows and of attention.
        start: features and start weights; None: no features, equal weights.
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


class TokenWise(nn.Module):
    """The query tower during training; :meth:`save` writes a lookup table without the model."""

    role, views, packs = "query", ("query",), True

    def __init__(self, backbone: Backbone, config: TokenWiseConfig, *, dim: int) -> None:
        super().__init__()
        self.backbone, self.tokenizer, self.causal = backbone.model, backbone.tokenizer, backbone.causal
        self.projection = Projection(backbone.hidden, dim)
        self.config, self.dim, self.pad = config, dim, backbone.special.pad
        choose_attention(backbone.model, config.attention)
        tokens = backbone.raw_tokenizer
        tokens.no_padding()
        tokens.no_truncation()
        self.prompt = LookupPrompt(tokens, max_length=config.max_length)
        special = backbone.special
        if not backbone.causal or special.end is None:
            raise ConfigError(
                "a token_wise query tower needs a causal backbone with an end-of-sequence token"
            )
        first = [] if special.first is None else [special.first]
        instruction = [*first, *tokens.encode(config.instruction, add_special_tokens=False).ids]
        _check_room(len(instruction) + 2, backbone)
        self.end = special.end
        self.instruction: Int[Tensor, " instruction"]
        self.register_buffer("instruction", torch.tensor(instruction, dtype=torch.long), persistent=False)

    def forward(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return float32 embeddings, not normalised, of padded or packed rows; 0 for a row without tokens."""
        ids, lengths = batch.flat()
        # More than half of a batch's tokens are repeated: each distinct one is encoded once.
        distinct, place = ids.unique(return_inverse=True)
        if not len(distinct):  # every rank needs a forward pass: gathering sharded weights is collective
            distinct = self.instruction.new_tensor([self.end])
        vectors = self.token_vectors(distinct)
        return F.embedding_bag(place, vectors, lengths.cumsum(0) - lengths, mode="mean")[:, None]

    def contextual(self, batch: Batch) -> Float[Tensor, "rows 1 dim"]:
        """Return embeddings of whole queries by the same backbone, read as ``instruction query end``.

        This is the symmetric retriever that the token-wise query is aligned with (Eq. 5).
        """
        padded = batch.padded(self.pad)
        assert padded.mask is not None
        lengths, rows = padded.mask.sum(1), len(padded.ids)
        start = len(self.instruction)
        room = padded.ids.new_full((rows, 1), self.pad)
        ids = torch.cat([self.instruction.expand(rows, -1), padded.ids, room], dim=1)
        ends = (start + lengths)[:, None]
        ids = ids.scatter(1, ends, self.end)
        whole = Batch(ids, (torch.arange(ids.shape[1], device=ids.device) <= ends).long(), ends)
        states = self._states(ids, **attention_arguments(self.backbone, whole, causal=True))
        return self._project(states[torch.arange(rows, device=ids.device)[:, None], ends])

    def token_vectors(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens dim"]:
        """Return the vector of each token from one forward pass over as many lines as needed."""
        lines = -(-len(ids) // BLOCKS)
        blocks, start = -(-len(ids) // lines), len(self.instruction)
        # The last line is filled with repeated tokens, so that no line has pads and one mask serves all.
        filled = torch.cat([ids, ids[-1:].expand(lines * blocks - len(ids))]).view(lines, blocks)
        pairs = torch.stack([filled, torch.full_like(filled, self.end)], dim=2).flatten(1)
        device = ids.device
        within = torch.arange(start, start + 2, device=device).repeat(blocks)
        positions = torch.cat([torch.arange(start, device=device), within])[None]
        states = self._states(
            torch.cat([self.instruction.expand(lines, -1), pairs], dim=1),
            attention_mask=self._mask(blocks),
            position_ids=positions + first_position(self.backbone),
        )
        return self._project(states[:, start + 1 :: 2].flatten(0, 1)[: len(ids)])

    def _mask(self, blocks: int) -> Tensor:
        """Return the block mask in the form of the backbone's attention: boolean, or added to the scores."""
        sees = block_mask(len(self.instruction), blocks, self.instruction.device)[None, None]
        if self.backbone.config._attn_implementation != "eager":  # type: ignore[union-attr]
            return sees
        dtype: torch.dtype = self.backbone.dtype  # type: ignore[assignment]
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(
            ~sees, torch.finfo(dtype).min
        )

    def _states(
        self, ids: Int[Tensor, "lines tokens"], **kwargs: Any
    ) -> Float[Tensor, "lines tokens hidden"]:
        return self.backbone(input_ids=ids, use_cache=False, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    def _project(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... dim"]:
        # Autocast would round the embeddings, and losses compare small differences.
        with torch.autocast(states.device.type, enabled=False):
            return self.projection(states)  # type: ignore[no-any-return]

    @torch.inference_mode()
    def table(self) -> Float32[ndarray, "vocabulary dim"]:
        """Return the vector of every token of the vocabulary."""
        tokens = torch.arange(
            self.tokenizer.backend_tokenizer.get_vocab_size(), device=self.instruction.device
        )
        pieces = [self.token_vectors(ids).cpu().numpy() for ids in tokens.split(BLOCKS * _TABLE_LINES)]
        return np.concatenate(pieces)

    def lookup(self) -> LookupTower:
        """Return the lookup tower with the same embeddings, but an empty query gets the table's mean."""
        return from_table(
            self.table(),
            self.tokenizer.backend_tokenizer,
            max_length=self.config.max_length,
            storage=self.config.storage,
            made_from=self._digests(),
        )

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the folder of :meth:`lookup`; its rows contain the adapter in any case."""
        del merge_adapters
        self.lookup().save(folder)

    def _digests(self) -> dict[str, str]:
        """Return digests of everything that a row depends on but the tokenizer, which the table adds."""
        state = self.state_dict()
        adapter = {name for name in state if "lora_" in name}
        return {
            "weights": _digest({name: state[name] for name in state.keys() - adapter}),
            "adapter": _digest({name: state[name] for name in adapter}) if adapter else "none",
            "instruction": hashlib.sha256(self.config.instruction.encode()).hexdigest(),
        }


def block_mask(
    instruction: int, blocks: int, device: torch.device | None = None
) -> Bool[Tensor, "tokens tokens"]:
    """Return which token (row) sees which (column) in a line (appendix A.5).

    A token sees itself and the earlier tokens of the instruction and of its own block of two tokens.
    """
    block = torch.arange(blocks, device=device).repeat_interleave(2)
    block = torch.cat([block.new_full((instruction,), _INSTRUCTION), block])
    place = torch.arange(len(block), device=device)
    related = (block == _INSTRUCTION) | (block[:, None] == block)
    return related & (place[:, None] >= place)


def build_token_wise(
    config: TokenWiseConfig,
    *,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None = None,
    adapter: str | None = None,
) -> TokenWise:
    """Build a tower that is ready to train, on `backbone` if given, else on the config's.

    A `backbone` that already has `adapter` gets no other.
    """
    if backbone is None:
        assert config.backbone is not None, (
            "a token_wise tower without a backbone of its own needs the document tower's"
        )
        backbone = backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=seed)
    if config.lora is not None and adapter is None:
        add_adapter(backbone.model, config.lora, name="query", tokens=[], seed=seed)
    tower = TokenWise(backbone, config, dim=dim)
    draw_weights(tower.projection, seed)
    return tower


def _check_room(tokens: int, backbone: Backbone) -> None:
    """Raise ConfigError if the instruction and a block exceed the backbone's positions or window."""
    if backbone.max_positions is not None and tokens > backbone.max_positions:
        raise ConfigError(
            f"the instruction takes {tokens - 2} tokens, the backbone reads {backbone.max_positions}: "
            "shorten it"
        )
    settings: Any = backbone.model.config
    window = getattr(settings, "sliding_window", None)
    if window is not None and getattr(settings, "use_sliding_window", True) and tokens > window:
        raise ConfigError(
            f"the instruction takes {tokens - 2} tokens, layers of the backbone see {window}: shorten it"
        )


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
