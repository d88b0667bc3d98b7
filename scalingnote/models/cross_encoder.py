"""A cross-encoder with two pooled states: proxies of the embeddings of query and document.

    [CLS] query [SEP] document [SEP]       one row, bidirectional attention
    special    query: the state at [CLS]; document: at the [SEP] between them       (EmbedDistill, Eq. 14)
    segments   sum of the states of a segment's tokens / sqrt(number of tokens)     (Eq. 15)
    score      <query, document> / sqrt(dim)

The factor 1 / sqrt(dim) keeps the scores of wide models in a range in which a softmax has gradients; it
changes no ranking. The query or the document of a row may be empty: with an empty query, the document's proxy
is a query-independent embedding. The proxy of an empty segment has no meaning; with `segments` it is zero.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.model_files import read_json, write_json
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Attention, Batch, attention_arguments, choose_attention
from scalingnote.models.heads import Projection
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, TokenRow, without_limits

FACTS = "cross_encoder.json"
_CHUNK_TOKENS = 2048  # rows of the logits [tokens, vocabulary] that are in memory at a time
ProxyPooling = Literal["special", "segments"]


class CrossEncoder(nn.Module):
    """A bidirectional transformer over pairs of a query and a document."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        pooling: ProxyPooling,
        dim: int | None,
        query_length: int,
        document_length: int,
        template: str,
        attend: Attention = "auto",
        reconstruct: bool = False,
        seed: int = 0,
    ) -> None:
        """Build a cross-encoder on `backbone`.

        Args:
            backbone: a bidirectional model with [CLS] and [SEP] tokens.
            pooling: pooling of the proxies (see the module's docstring).
            dim: width of the proxies; None: that of the states, without projections.
            query_length: maximum tokens of a query, with [CLS] and [SEP].
            document_length: maximum tokens of a document, with [CLS] and [SEP].
            template: document template of title, topic and content, without placeholders.
            attend: attention implementation.
            reconstruct: whether to add a decoder that predicts each token from its state, for an extra loss.
            seed: seed of the projections.

        Raises:
            ConfigError: the backbone is causal, lacks these tokens, or reads fewer tokens than a pair has.
        """
        super().__init__()
        if backbone.causal or backbone.special.first is None or backbone.special.end is None:
            raise ConfigError("a cross-encoder needs a bidirectional backbone with [CLS] and [SEP] tokens")
        longest = query_length + document_length - 2
        if backbone.max_positions is not None and longest > backbone.max_positions:
            raise ConfigError(
                f"query_length {query_length} and document_length {document_length} make {longest} tokens, "
                f"the backbone reads {backbone.max_positions}: shorten one"
            )
        self.backbone, self.tokenizer, self.pad = backbone.model, backbone.tokenizer, backbone.special.pad
        self.pooling, self.dim = pooling, dim or backbone.hidden
        self.packs = choose_attention(backbone.model, attend)
        self._lengths, self._template = (query_length, document_length), template
        self._special = backbone.special
        self._typed = getattr(backbone.model.config, "type_vocab_size", 0) > 1
        self.query, self.document = (_projection(backbone.hidden, dim, seed=seed + i) for i in range(2))
        self.decoder: nn.Linear | None = None
        if reconstruct:
            # A copy of the input table, not tied to it: sharding gathers weights of one module at a time.
            self.decoder = nn.Linear(backbone.hidden, self.token_embeddings.num_embeddings, bias=False)
            self.decoder.weight.data.copy_(self.token_embeddings.weight)
        tokens = without_limits(backbone.raw_tokenizer)
        self.query_prompt = QueryPrompt(tokens, backbone.special, max_length=query_length, causal=False)
        self.document_prompt = DocumentPrompt(
            tokens,
            backbone.special,
            template=with_placeholder(template),
            max_length=document_length,
            causal=False,
        )

    @property
    def token_embeddings(self) -> nn.Embedding:
        """The backbone's input table, one row per token of the vocabulary."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(table, nn.Embedding)
        return table

    def forward(self, batch: Batch) -> Float[Tensor, "pairs 1 width"]:
        """Return query proxy, document proxy and, with `reconstruct`, token loss, concatenated."""
        batch, order = batch.for_model(pad=self.pad, packed=self.packs)
        states = self._states(batch)
        columns = [*self._proxies(states, batch)]
        if self.decoder is not None:
            columns.append(self._reconstruction_losses(states, batch)[:, None])
        return torch.cat(columns, dim=1)[order, None]

    def proxies(self, batch: Batch) -> tuple[Float[Tensor, "pairs dim"], Float[Tensor, "pairs dim"]]:
        """Return query and document proxies in float32, not normalised."""
        batch, order = batch.for_model(pad=self.pad, packed=self.packs)
        query, document = self._proxies(self._states(batch), batch)
        return query[order], document[order]

    def _states(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """Return the last hidden states of all tokens, row after row, without padding."""
        kwargs: dict[str, Any] = attention_arguments(self.backbone, batch, causal=False)
        if self._typed:
            kwargs["token_type_ids"] = _token_types(batch)
        return batch.flatten(self.backbone(input_ids=batch.ids, **kwargs).last_hidden_state)

    def _proxies(
        self, states: Float[Tensor, "tokens hidden"], batch: Batch
    ) -> tuple[Float[Tensor, "pairs dim"], Float[Tensor, "pairs dim"]]:
        # Autocast would round the proxies, but losses compare small differences.
        with torch.autocast(states.device.type, enabled=False):
            if self.pooling == "special":
                lengths = batch.row_lengths
                first = lengths.cumsum(0) - lengths
                query, document = (states[first + place].float() for place in batch.positions.unbind(1))
            else:
                row, segments = _segment_tokens(batch)
                query, document = (_sqrt_mean(states[at], row[at], len(batch)) for at in segments)
            return self.query(query), self.document(document)

    def _reconstruction_losses(
        self, states: Float[Tensor, "tokens hidden"], batch: Batch
    ) -> Float[Tensor, " pairs"]:
        """Return the mean negative log likelihood of each row's words, predicted from their own states."""
        row, segments = _segment_tokens(batch)
        at = torch.cat([segment.nonzero()[:, 0] for segment in segments])
        ids = batch.flatten(batch.ids)[at]
        chunks = [
            # Logits over the vocabulary are too large to store, so the backward pass recomputes them.
            checkpoint(self._token_losses, states[chunk], chunk_ids, use_reentrant=False)
            for chunk, chunk_ids in zip(at.split(_CHUNK_TOKENS), ids.split(_CHUNK_TOKENS), strict=True)
        ]
        losses = torch.cat([states.new_zeros(0, dtype=torch.float32), *chunks])
        total = losses.new_zeros(len(batch)).index_add(0, row[at], losses)
        return total / torch.bincount(row[at], minlength=len(batch)).clamp(min=1)

    def _token_losses(self, states: Tensor, ids: Tensor) -> Tensor:
        assert self.decoder is not None
        return F.cross_entropy(self.decoder(states).float(), ids, reduction="none")

    def save(self, folder: Path) -> None:
        """Write a folder that :meth:`load` reads, without the decoder, which is only used in training."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        layers = {"query": self.query, "document": self.document}
        weights = {n: x.weight.detach().contiguous() for n, x in layers.items() if isinstance(x, Projection)}
        if weights:
            save_file(weights, folder / "projections.safetensors")
        facts = {
            "pooling": self.pooling,
            "dim": self.dim if weights else None,
            "query_length": self._lengths[0],
            "document_length": self._lengths[1],
            "template": self._template,
            "special": asdict(self._special),
        }
        write_json(folder / FACTS, facts)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype = torch.float32) -> "CrossEncoder":
        """Read a folder of :meth:`save`, the backbone in `dtype`; raise ArtifactError if it is not one."""
        facts = read_json(folder / FACTS)
        if facts is None:
            raise ArtifactError(f"{folder} is not a cross-encoder: {FACTS} is missing")
        backbone = backbones.load(folder, dtype=dtype)
        backbone.causal = False
        del facts["special"]
        model = cls(backbone, **facts)
        if facts["dim"] is not None:
            weights = load_file(folder / "projections.safetensors")
            for name, layer in (("query", model.query), ("document", model.document)):
                layer.load_state_dict({"weight": weights[name]})
        return model.eval()


def with_placeholder(template: str) -> str:
    """Add the placeholder that document prompts need to a template; :func:`pair` drops its token."""
    return f"{template}[EMB]"


def pair(query: TokenRow, document: TokenRow) -> TokenRow:
    """Join the rows of a query and a document; positions are those of [CLS] and the [SEP] between them."""
    body = [id for at, id in enumerate(document.ids) if at and at not in document.positions]
    return TokenRow([*query.ids, *body], [0, len(query.ids) - 1])


def scores(
    queries: Float[Tensor, "pairs dim"], documents: Float[Tensor, "pairs dim"]
) -> Float[Tensor, " pairs"]:
    """Return the relevance of each pair as a logit: <query, document> / sqrt(dim)."""
    return (queries * documents).sum(-1) / math.sqrt(queries.shape[-1])


def _segment_tokens(batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the row of every token, and two masks: words of the query, and words of the document."""
    lengths = batch.row_lengths
    row = torch.repeat_interleave(torch.arange(len(batch), device=lengths.device), lengths)
    at = torch.arange(len(row), device=lengths.device) - (lengths.cumsum(0) - lengths)[row]
    between = batch.positions[:, 1][row]
    return row, ((at > 0) & (at < between), (at > between) & (at < lengths[row] - 1))


def _token_types(batch: Batch) -> Tensor:
    """Return 0 for the query with its [CLS] and [SEP] and 1 for the document, as in BERT's pretraining."""
    if batch.packing is None:
        return (torch.arange(batch.ids.shape[1], device=batch.ids.device) > batch.positions[:, 1:2]).long()
    row, _ = _segment_tokens(batch)
    return (batch.packing.position_ids[0] > batch.positions[:, 1][row])[None].long()


def _sqrt_mean(states: Tensor, row: Tensor, rows: int) -> Float[Tensor, "rows hidden"]:
    total = torch.zeros(rows, states.shape[1], device=states.device).index_add(0, row, states.float())
    count = torch.bincount(row, minlength=rows).clamp(min=1)
    return total / count.sqrt()[:, None]


def _projection(hidden: int, dim: int | None, *, seed: int) -> nn.Module:
    if dim is None:
        return nn.Identity()
    projection = Projection(hidden, dim)
    projection.draw(seed)
    return projection
