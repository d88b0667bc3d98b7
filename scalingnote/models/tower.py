"""A tower: token rows -> backbone -> states at the pooled positions -> projection -> embeddings.

    ids        [rows, tokens]
    hidden     [rows, tokens, hidden]     backbone
    pooled     [rows, views, hidden]      states at each row's positions
    embeddings [rows, views, dim]         W, no bias (ScalingNote, Eq. 3, 4, 14); not normalised
    terms      [rows, vocabulary]         of a document tower with a sparse head: from the states of title,
                                          topic and content (sparse_head.SparseHead)

A saved tower is a folder with the Hugging Face model and tokenizer, ``projection.safetensors`` and
``tower.json`` (role, prompt, lengths). Nothing else is needed to encode with it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.models import backbone as backbones
from scalingnote.models import library_export
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, attention_arguments, choose_attention
from scalingnote.models.config import Pretrained, TokenWiseConfig, TowerConfig
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, without_limits
from scalingnote.models.published_model import Role, write_json
from scalingnote.models.sparse_head import SparseHead
from scalingnote.models.weights import merged_state, save_adapter

log = get_logger("models")


class Projection(nn.Linear):
    """The linear map W without bias from pooled states to embeddings (ScalingNote, Eq. 3, 4, 14).

    The result is float32 for any format of the weight, because losses compare small differences. The
    weight is cast in this forward pass and not by the caller: ZeRO-3 gathers it for this pass only.
    """

    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__(hidden, dim, bias=False)

    def forward(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... dim"]:
        """Return float32 embeddings; autocast would round them to half precision."""
        with torch.autocast(states.device.type, enabled=False):
            return F.linear(states.float(), self.weight.float())


def start_projection(layer: Projection, config: TowerConfig | TokenWiseConfig, *, seed: int) -> None:
    """Set the weight that training starts from, in place.

    The states of a pretrained backbone have a meaning, which a random square matrix would lose: they start as
    they are. "none" is the identity, which learns nothing: states are embeddings, as LightRetriever's are.

    Raises:
        ConfigError: the projection is "none", and embeddings are not as wide as states.
    """
    start, pretrained = config.projection, isinstance(config.backbone, Pretrained)
    square = layer.in_features == layer.out_features
    if start == "none" and not square:
        raise ConfigError(
            f"projection=none needs embeddings as wide as the backbone's states: set train.dim to "
            f"{layer.in_features}, found {layer.out_features}"
        )
    if start == "none" or (start == "auto" and pretrained and square):
        nn.init.eye_(layer.weight)
        layer.requires_grad_(start != "none")
    else:
        draw_weights(layer, seed)


def draw_weights(layer: nn.Linear, seed: int) -> None:
    """Draw the weight from N(0, 1 / in_features) with `seed` alone, so that other layers have no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.normal_(0.0, layer.in_features**-0.5, generator=generator)


class Tower(nn.Module):
    """One side of the dual encoder."""

    def __init__(
        self,
        backbone: Backbone,
        config: TowerConfig,
        *,
        role: Role,
        dim: int,
        sparse: SparseHead | None = None,
        adapter: str | None = None,
    ) -> None:
        """Build a tower on `backbone`; ConfigError if it reads fewer tokens than `config.max_length`.

        `sparse` computes term weights of documents; `adapter` is the name of the tower's LoRA weights in the
        backbone, None the role.
        """
        super().__init__()
        self._set_backbone(backbone, config, role=role, adapter=adapter)
        self.projection, self.sparse, self.dim = Projection(backbone.hidden, dim), sparse, dim
        self.special, self.pad = backbone.special, backbone.special.pad
        tokens = without_limits(backbone.raw_tokenizer)
        library_export.split_at_boundary(tokens)
        self.prompt: QueryPrompt | DocumentPrompt
        if role == "query":
            self.prompt = QueryPrompt(
                tokens, backbone.special, max_length=config.max_length, causal=backbone.causal
            )
        else:
            self.prompt = DocumentPrompt(
                tokens,
                backbone.special,
                template=config.prompt,
                max_length=config.max_length,
                causal=backbone.causal,
                max_positions=self._max_positions,
                spans=sparse is not None,
            )

    def _set_backbone(
        self, backbone: Backbone, config: TowerConfig, *, role: Role, adapter: str | None
    ) -> None:
        positions = backbone.max_positions
        if positions is not None and config.max_length > positions:
            raise ConfigError(
                f"the {role} tower has max_length={config.max_length}, but its backbone reads {positions} "
                "tokens: lower it"
            )
        self.backbone, self.tokenizer, self.causal = backbone.model, backbone.tokenizer, backbone.causal
        self.config, self.role = config, role
        self._adapter, self._max_positions = adapter or role, positions
        self.packs = choose_attention(backbone.model, config.attention)

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the embeddings of a row, in order."""
        return self.prompt.views

    @property
    def token_embeddings(self) -> nn.Embedding:
        """The backbone's input table, one row per token. Not available in a tower with adapters."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(table, nn.Embedding)
        return table

    def forward(self, batch: Batch) -> Float[Tensor, "rows views dim"]:
        """Return float32 embeddings, not normalised, of padded or packed rows."""
        return self._read(batch, terms=False)[0]

    def read(self, batch: Batch) -> tuple[Float[Tensor, "rows views dim"], Float[Tensor, "rows vocabulary"]]:
        """Return embeddings and the sparse head's term weights from one forward pass."""
        embeddings, terms = self._read(batch, terms=True)
        assert terms is not None
        return embeddings, terms

    def _read(self, batch: Batch, *, terms: bool) -> tuple[Tensor, Tensor | None]:
        batch, order = batch.for_model(pad=self.pad, packed=self.packs)
        hidden = self._hidden_states(batch, causal=self.causal).flatten(0, 1)
        first = _row_starts(batch)[:, None]
        embeddings = self.projection(hidden[first + batch.positions[:, : len(self.views)]][order])
        if not terms:
            return embeddings, None
        assert self.sparse is not None, "this tower has no sparse head"
        return embeddings, self.sparse(hidden, self._field_tokens(batch), self.input_table)[order]

    def _hidden_states(self, batch: Batch, *, causal: bool) -> Float[Tensor, "lines tokens hidden"]:
        """Return the last hidden states; `causal` leaves out the mask that padded rows do not need then."""
        kwargs = attention_arguments(self.backbone, batch, causal=causal)
        if self.causal:
            kwargs["use_cache"] = False
        return self.backbone(input_ids=batch.ids, **kwargs).last_hidden_state  # type: ignore[no-any-return]

    def _field_tokens(self, batch: Batch) -> Int[Tensor, "rows longest"]:
        """Return the flat indices of the tokens of title, topic and content of each row; -1 elsewhere."""
        longest = batch.packing.longest if batch.packing else batch.ids.shape[1]
        place = torch.arange(longest, device=batch.ids.device)
        spans = batch.positions[:, len(self.views) :].unflatten(1, (-1, 2))[:, :, :, None]
        inside = ((place >= spans[:, :, 0]) & (place < spans[:, :, 1])).any(1)
        return torch.where(inside, _row_starts(batch)[:, None] + place, -1)

    @property
    def input_table(self) -> nn.Parameter:
        """Weights of the backbone's token embeddings, without an adapted tower's rows for new tokens."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        return getattr(table, "table", table).weight  # type: ignore[no-any-return]

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the tower's folder, readable by :func:`load`.

        Without `merge_adapters` it holds the adapter and the path of its backbone, but not with a backbone
        from scratch, whose weights are stored nowhere else.
        """
        base_config = self._save_backbone(folder, merge_adapters=merge_adapters)
        self._save_tokenizer(folder, whole=base_config is None)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")
        head = {} if self.sparse is None else self.sparse.tensors()
        if head:
            save_file(head, folder / "sparse_head.safetensors")
        facts = {
            **self._facts,
            "prompt": self.config.prompt,
            "special": asdict(self.special),
            "max_positions": self._max_positions,
            "layers": None if base_config is None else base_config.layers,
            "sparse": None if self.sparse is None else ("own" if head else "tied"),
            "sparse_transform": None if self.sparse is None else self.sparse.facts,
        }
        write_json(folder / "tower.json", facts)

    @property
    def _facts(self) -> dict[str, Any]:
        """What tower.json says of every tower that this package runs."""
        return {
            "role": self.role,
            "dim": self.dim,
            "causal": self.causal,
            "views": list(self.views),
            "max_length": self.config.max_length,
        }

    def _save_backbone(
        self, folder: Path, *, merge_adapters: bool, base: str | None = None
    ) -> Pretrained | None:
        """Write the backbone, or its adapter alone; returns the config of the base model in that case.

        `base` is the base model's path in the adapter's config; None: the path of the tower's config.
        """
        folder.mkdir(parents=True, exist_ok=True)
        source, adapted = self.config.backbone, self.config.lora is not None
        if adapted and not merge_adapters and isinstance(source, Pretrained):
            save_adapter(self.backbone, folder, name=self._adapter, base=base or source.path)
            return source
        state = merged_state(self.backbone) if adapted else None
        self.backbone.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        return None

    def _save_tokenizer(self, folder: Path, *, whole: bool) -> None:
        """Write the tokenizer and, beside a whole model, the files of sentence-transformers."""
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
                "its tokenizer joins pieces that the prompt keeps apart: no files for sentence-transformers"
            )
        elif whole:
            library_export.write_trained(
                folder, tokenizer, self.projection.weight, template=template, causal=causal
            )


def load(folder: Path, facts: Mapping[str, Any], *, dtype: torch.dtype = torch.float32) -> Tower:
    """Read a folder written by :meth:`Tower.save`, the backbone in `dtype`; `facts` is its tower.json."""
    weight = load_file(folder / "projection.safetensors")["weight"]
    config = TowerConfig(max_length=facts["max_length"], prompt=facts["prompt"])
    backbone = backbones.load(folder, layers=facts.get("layers"), dtype=dtype)
    backbone.causal = facts["causal"]
    sparse = None
    if facts.get("sparse"):
        head = load_file(folder / "sparse_head.safetensors") if facts["sparse"] == "own" else {}
        sparse = SparseHead.restore(head, facts.get("sparse_transform"))
    tower = Tower(backbone, config, role=facts["role"], dim=facts["dim"], sparse=sparse)
    with torch.no_grad():
        tower.projection.weight.copy_(weight)
    return tower.eval()


def _row_starts(batch: Batch) -> Int[Tensor, " rows"]:
    """Return the flat index of each row's first token: lines of the batch, pads included, end to end."""
    if batch.packing is not None:
        return batch.packing.offsets[:-1].long()
    lines, longest = batch.ids.shape
    return torch.arange(lines, device=batch.ids.device) * longest
