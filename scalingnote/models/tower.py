"""A tower: token rows -> backbone -> states at the pooled positions -> projection -> embeddings.

    ids        [rows, tokens]
    hidden     [rows, tokens, hidden]     backbone
    pooled     [rows, views, hidden]      states at each row's positions
    embeddings [rows, views, dim]         heads.Projection; not normalised
    terms      [rows, vocabulary]         of a document tower with a sparse head: from the states of title,
                                          topic and content (sparse_head.SparseHead)

A saved tower is a folder with the Hugging Face model and tokenizer, ``projection.safetensors`` and
``tower.json`` (role, prompt, lengths). No other file is needed to encode with it.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn

from scalingnote.core.log import get_logger
from scalingnote.core.model_files import write_json
from scalingnote.models import library_export
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, attention_arguments, choose_attention
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.heads import Head, Projection
from scalingnote.models.prompt import (
    DocumentPrompt,
    QueryPrompt,
    TokenDocuments,
    split_at_boundary,
    without_limits,
)
from scalingnote.models.published_model import Role
from scalingnote.models.sparse_head import SparseHead
from scalingnote.models.weights import merged_state, save_adapter

log = get_logger("models")


def tower_prompt(
    backbone: Backbone, config: TowerConfig, *, role: Role, spans: bool = False
) -> QueryPrompt | DocumentPrompt:
    """Return the prompt of a tower whose config has placeholders or reads every token by itself.

    With `spans`, its rows contain the spans of the fields, which a sparse head needs. Raise ConfigError if
    the backbone reads fewer tokens than `config.max_length` or lacks special tokens, or if the document
    prompt does not fit.
    """
    backbone.check_length(config.max_length, role=role)
    tokens, length, special = without_limits(backbone.raw_tokenizer), config.max_length, backbone.special
    if config.reads == "tokens":
        backbone.token_end()  # raises ConfigError if there is none
        return TokenDocuments(tokens, max_length=length)
    split_at_boundary(tokens)
    if role == "query":
        return QueryPrompt(tokens, special, max_length=length, causal=backbone.causal)
    return DocumentPrompt(
        tokens,
        special,
        template=config.prompt,
        max_length=length,
        causal=backbone.causal,
        max_positions=backbone.max_positions,
        spans=spans,
    )


class Tower(nn.Module):
    """One side of the dual encoder."""

    projection: Projection
    kind: str | None = None  # in tower.json
    base_path: str | None = None  # of the base model of saved adapters; None: that of the config's backbone

    def __init__(
        self,
        backbone: Backbone,
        config: TowerConfig,
        prompt: QueryPrompt | DocumentPrompt,
        projection: Projection | Head,
        *,
        role: Role,
        sparse: SparseHead | None = None,
    ) -> None:
        """Make a tower from its parts; `sparse` computes term weights of documents.

        The role names the tower's LoRA weights in the backbone.
        """
        super().__init__()
        self.backbone, self.tokenizer, self.causal = backbone.model, backbone.tokenizer, backbone.causal
        self.special, self.pad = backbone.special, backbone.special.pad
        self._max_positions = backbone.max_positions
        self.config, self.role, self.prompt = config, role, prompt
        self.projection = projection  # type: ignore[assignment]  # a Head is that of a subclass
        self.sparse, self.dim = sparse, projection.dim
        self.packs = choose_attention(backbone.model, config.attention)

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the embeddings of a row, in order."""
        return self.prompt.views

    @property
    def token_embeddings(self) -> nn.Embedding:
        """The backbone's input table, one row per token; not available in a tower with adapters."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(table, nn.Embedding)
        return table

    @property
    def input_table(self) -> nn.Parameter:
        """Weights of the backbone's token embeddings; with adapters, without the rows of new tokens."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        return getattr(table, "table", table).weight  # type: ignore[no-any-return]

    def forward(self, batch: Batch) -> Float[Tensor, "rows views dim"]:
        """Return float32 embeddings, not normalised, of padded or packed rows."""
        batch, order = batch.for_model(pad=self.pad, packed=self.packs)
        return self._project(self._hidden_states(batch).flatten(0, 1), batch, order)

    def read(self, batch: Batch) -> tuple[Float[Tensor, "rows views dim"], Float[Tensor, "rows vocabulary"]]:
        """Return embeddings and the sparse head's term weights from one forward pass."""
        assert self.sparse is not None, "this tower has no sparse head"
        batch, order = batch.for_model(pad=self.pad, packed=self.packs)
        hidden = self._hidden_states(batch).flatten(0, 1)
        terms = self.sparse(hidden, self._field_tokens(batch), self.input_table)[order]
        return self._project(hidden, batch, order), terms

    def _hidden_states(self, batch: Batch, *, masked: bool = False) -> Float[Tensor, "lines tokens hidden"]:
        """Return the last hidden states; padded rows of a causal tower get no mask unless `masked`."""
        kwargs = attention_arguments(self.backbone, batch, causal=self.causal and not masked)
        if self.causal:
            kwargs["use_cache"] = False
        return self.backbone(input_ids=batch.ids, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    def _project(self, hidden: Tensor, batch: Batch, order: Tensor | slice) -> Tensor:
        first = _row_starts(batch)[:, None]
        return self.projection(hidden[first + batch.positions[:, : len(self.views)]][order])  # type: ignore[no-any-return]

    def _field_tokens(self, batch: Batch) -> Int[Tensor, "rows longest"]:
        """Return the flat indices of the tokens of title, topic and content of each row; -1 elsewhere."""
        longest = batch.packing.longest if batch.packing else batch.ids.shape[1]
        place = torch.arange(longest, device=batch.ids.device)
        spans = batch.positions[:, len(self.views) :].unflatten(1, (-1, 2))[:, :, :, None]
        inside = ((place >= spans[:, :, 0]) & (place < spans[:, :, 1])).any(1)
        return torch.where(inside, _row_starts(batch)[:, None] + place, -1)

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the tower's folder, which :func:`scalingnote.models.dual_encoder.load_tower` reads.

        Without `merge_adapters` it holds the adapter and the path of the backbone. Adapters on a backbone
        from scratch are always merged, because its weights are not stored elsewhere.
        """
        folder.mkdir(parents=True, exist_ok=True)
        source, adapted = self.config.backbone, self.config.lora is not None
        base = source if adapted and not merge_adapters and isinstance(source, Pretrained) else None
        if base is not None:
            save_adapter(self.backbone, folder, name=self.role, base=self.base_path or base.path)
        else:
            state = merged_state(self.backbone) if adapted else None
            self.backbone.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        self._save_files(folder, whole=base is None)
        facts = {
            **({} if self.kind is None else {"kind": self.kind}),
            "role": self.role,
            "dim": self.dim,
            "causal": self.causal,
            "views": list(self.views),
            "max_length": self.config.max_length,
            **self._facts(layers=None if base is None else base.layers),
        }
        write_json(folder / "tower.json", facts)

    def _facts(self, *, layers: int | None) -> dict[str, Any]:
        """Return the facts of tower.json that not every kind of tower has.

        `layers` is the number of layers to keep of the base model, if the folder holds only an adapter.
        """
        head = None if self.sparse is None else ("own" if self.sparse.tensors() else "tied")
        return {
            "prompt": self.config.prompt,
            "special": asdict(self.special),
            "max_positions": self._max_positions,
            "layers": layers,
            "sparse": head,
            "sparse_transform": None if self.sparse is None else self.sparse.facts,
        }

    def _save_files(self, folder: Path, *, whole: bool) -> None:
        """Write all files but the backbone's; next to a `whole` model also those of sentence-transformers."""
        self._save_tokenizer(folder, whole=whole)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")
        if self.sparse is not None and (head := self.sparse.tensors()):
            save_file(head, folder / "sparse_head.safetensors")

    def _save_tokenizer(self, folder: Path, *, whole: bool) -> None:
        causal, length = self.causal, self.config.max_length
        document = self.prompt if isinstance(self.prompt, DocumentPrompt) else None
        template = self.config.prompt if document else None
        if document and causal:
            length -= library_export.unread_tokens(document)
        tokenizer = library_export.export_tokenizer(
            template, self.tokenizer, self.special, causal=causal, max_length=length
        )
        tokenizer.save_pretrained(folder)
        if document and not library_export.layout_agrees(
            tokenizer, document, self.config.prompt, causal=causal
        ):
            log.warning(
                "the tokenizer joins pieces that the prompt separates: no files for sentence-transformers "
                "are written"
            )
        elif whole:
            library_export.write_trained(
                folder, tokenizer, self.projection.weight, template=template, causal=causal
            )


def _row_starts(batch: Batch) -> Int[Tensor, " rows"]:
    """Return the index of each row's first token in the batch's lines, pads included, end to end."""
    if batch.packing is not None:
        return batch.packing.offsets[:-1].long()
    lines, longest = batch.ids.shape
    return torch.arange(lines, device=batch.ids.device) * longest
