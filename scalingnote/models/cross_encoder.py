"""A cross-encoder with two pooled states, the proxies of a query's and a document's embedding.

    [CLS] query [SEP] document [SEP]       one row, read both ways
    special    query: the state at [CLS]; document: at the [SEP] between them       (EmbedDistill, Eq. 14)
    segments   sum of the states of a segment's tokens, by 1 / sqrt(how many)       (Eq. 15)
    score      <query, document> / sqrt(dim)

The root keeps scores of wide models where a softmax can move, and changes no ranking. A row may lack its
query or its document: a document's proxy beside an empty query is its embedding, whatever it is asked. An
empty segment's proxy is zero under `segments`, and means nothing.
"""

import json
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

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.models import attention
from scalingnote.models import backbone as backbones
from scalingnote.models.attention import Attention
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch
from scalingnote.models.projection import Projection
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, Row

FACTS = "cross_encoder.json"
_TOKENS_AT_ONCE = 2048  # rows of [tokens, vocabulary] that exist at a time
Pooling = Literal["special", "segments"]


class CrossEncoder(nn.Module):
    """One bidirectional transformer over pairs."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        pooling: Pooling,
        dim: int | None,
        query_length: int,
        document_length: int,
        template: str,
        attend: Attention = "auto",
        reconstruct: bool = False,
        seed: int = 0,
    ) -> None:
        """`dim` of None leaves states as they are; `reconstruct` adds what predicts tokens from states."""
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
        self.packs = attention.choose(backbone.model, attend)
        self._lengths, self._template = (query_length, document_length), template
        self._special = backbone.special
        self._typed = getattr(backbone.model.config, "type_vocab_size", 0) > 1
        self.query, self.document = (_projection(backbone.hidden, dim, seed=seed + i) for i in range(2))
        self.decoder = _decoder(backbone.model) if reconstruct else None
        tokens = backbone.raw_tokenizer
        tokens.no_padding()
        tokens.no_truncation()
        self.query_prompt = QueryPrompt(tokens, backbone.special, max_length=query_length, causal=False)
        self.document_prompt = DocumentPrompt(
            tokens, backbone.special, template=laid_out(template), max_length=document_length, causal=False
        )

    @property
    def token_embeddings(self) -> nn.Embedding:
        """The backbone's input table, a row per token of the vocabulary."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(table, nn.Embedding)
        return table

    def forward(self, batch: Batch) -> Float[Tensor, "pairs 1 width"]:
        """Query proxy, document proxy and, where tokens are predicted, their mean loss: side by side."""
        batch, back = self._readable(batch)
        states = self._states(batch)
        found = [*self._pooled(states, batch)]
        if self.decoder is not None:
            found.append(self._reconstruction(states, batch)[:, None])
        return torch.cat(found, dim=1)[back, None]

    def proxies(self, batch: Batch) -> tuple[Float[Tensor, "pairs dim"], Float[Tensor, "pairs dim"]]:
        """Query and document proxies in float32, not normalised."""
        batch, back = self._readable(batch)
        query, document = self._pooled(self._states(batch), batch)
        return query[back], document[back]

    def _readable(self, batch: Batch) -> tuple[Batch, Tensor | slice]:
        """The batch in the form that is read fastest, and how its rows come back into their order."""
        if batch.packing is None or not self.packs:
            return batch.padded(self.pad), slice(None)
        return batch.by_length()

    def _states(self, batch: Batch) -> Float[Tensor, "tokens hidden"]:
        """The last states of all tokens, row after row."""
        kwargs: dict[str, Any] = attention.arguments(self.backbone, batch, causal=False)
        if self._typed:
            kwargs["token_type_ids"] = _segments(batch)
        hidden: Tensor = self.backbone(input_ids=batch.ids, **kwargs).last_hidden_state
        if batch.packing is not None:
            return hidden[0]
        assert batch.mask is not None
        return hidden[batch.mask.bool()]

    def _pooled(
        self, states: Float[Tensor, "tokens hidden"], batch: Batch
    ) -> tuple[Float[Tensor, "pairs dim"], Float[Tensor, "pairs dim"]]:
        # Autocast would round the proxies, which all losses compare.
        with torch.autocast(states.device.type, enabled=False):
            if self.pooling == "special":
                _, lengths = batch.flat()
                first = lengths.cumsum(0) - lengths
                pooled = [states[first + place].float() for place in batch.positions.unbind(1)]
            else:
                row, inside = _places(batch)
                pooled = [_by_root(states[at], row[at], len(batch)) for at in inside]
            query, document = pooled
            return self.query(query), self.document(document)

    def _reconstruction(
        self, states: Float[Tensor, "tokens hidden"], batch: Batch
    ) -> Float[Tensor, " pairs"]:
        """Each row's mean negative log likelihood of its words, each predicted from its own state."""
        row, inside = _places(batch)
        at = torch.cat([part.nonzero()[:, 0] for part in inside])
        ids = batch.flat()[0][at]
        pieces = range(0, len(at), _TOKENS_AT_ONCE)
        chunks = [
            # Scores of a whole vocabulary are made again in the backward pass rather than kept.
            checkpoint(
                self._unlikelihood,
                states[at[i : i + _TOKENS_AT_ONCE]],
                ids[i : i + _TOKENS_AT_ONCE],
                use_reentrant=False,
            )
            for i in pieces
        ]
        losses = torch.cat([states.new_zeros(0, dtype=torch.float32), *chunks])
        total = losses.new_zeros(len(batch)).index_add(0, row[at], losses)
        return total / torch.bincount(row[at], minlength=len(batch)).clamp(min=1)

    def _unlikelihood(self, states: Tensor, ids: Tensor) -> Tensor:
        assert self.decoder is not None
        return F.cross_entropy(self.decoder(states).float(), ids, reduction="none")

    def save(self, folder: Path) -> None:
        """Write a folder that :meth:`load` reads; what predicts tokens has done its work and is left out."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        weights = {
            name: layer.weight.detach().contiguous()
            for name, layer in (("query", self.query), ("document", self.document))
            if isinstance(layer, nn.Linear)
        }
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
        (folder / FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "CrossEncoder":
        """Read a folder written by :meth:`save`; ArtifactError when it is not one."""
        try:
            facts = json.loads((folder / FACTS).read_text())
        except FileNotFoundError:
            raise ArtifactError(f"{folder} is not a cross-encoder: {FACTS} is missing") from None
        backbone = backbones.load(folder)
        backbone.causal = False
        del facts["special"]
        made = cls(backbone, **facts)
        if facts["dim"] is not None:
            weights = load_file(folder / "projections.safetensors")
            with torch.no_grad():
                for name, layer in (("query", made.query), ("document", made.document)):
                    assert isinstance(layer, nn.Linear)
                    layer.weight.copy_(weights[name])
        return made.eval()


def laid_out(template: str) -> str:
    """A template as a document prompt reads it: with a placeholder, which :func:`pair` drops."""
    return f"{template}[EMB]"


def pair(query: Row, document: Row) -> Row:
    """One row of a query's row and a document's, and where its [CLS] and the [SEP] between them stand."""
    body = [id for at, id in enumerate(document.ids) if at and at not in document.positions]
    return Row([*query.ids, *body], [0, len(query.ids) - 1])


def scores(
    queries: Float[Tensor, "pairs dim"], documents: Float[Tensor, "pairs dim"]
) -> Float[Tensor, " pairs"]:
    """The relevance of each pair, a logit."""
    return (queries * documents).sum(-1) / math.sqrt(queries.shape[-1])


def _places(batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
    """The row of every token, and which tokens are a query's words, and which a document's."""
    _, lengths = batch.flat()
    row = torch.repeat_interleave(torch.arange(len(batch), device=lengths.device), lengths)
    at = torch.arange(len(row), device=lengths.device) - (lengths.cumsum(0) - lengths)[row]
    between = batch.positions[:, 1][row]
    return row, ((at > 0) & (at < between), (at > between) & (at < lengths[row] - 1))


def _segments(batch: Batch) -> Tensor:
    """1 for tokens behind the [SEP] between query and document, as models of two segments are trained."""
    if batch.packing is None:
        return (torch.arange(batch.ids.shape[1], device=batch.ids.device) > batch.positions[:, 1:2]).long()
    row, _ = _places(batch)
    return (batch.packing.position_ids[0] > batch.positions[:, 1][row])[None].long()


def _by_root(states: Tensor, row: Tensor, rows: int) -> Float[Tensor, "rows hidden"]:
    total = torch.zeros(rows, states.shape[1], device=states.device).index_add(0, row, states.float())
    count = torch.bincount(row, minlength=rows).clamp(min=1)
    return total / count.sqrt()[:, None]


def _projection(hidden: int, dim: int | None, *, seed: int) -> nn.Module:
    if dim is None:
        return nn.Identity()
    made = Projection(hidden, dim)
    with torch.no_grad():
        made.weight.normal_(0.0, hidden**-0.5, generator=torch.Generator().manual_seed(seed))
    return made


def _decoder(model: Any) -> nn.Linear:
    """Starts as the input table, but is not tied to it: sharding strategies gather a module's own weights."""
    table = model.get_input_embeddings().weight
    made = nn.Linear(table.shape[1], table.shape[0], bias=False)
    with torch.no_grad():
        made.weight.copy_(table)
    return made
