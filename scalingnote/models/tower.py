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

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.models import backbone as backbones
from scalingnote.models import library_export
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, attention_arguments, choose_attention
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.heads import Projection, start_projection
from scalingnote.models.prompt import PLACEHOLDERS, DocumentPrompt, QueryPrompt
from scalingnote.models.published_model import Role
from scalingnote.models.sparse_head import HeadTransform, SparseHead
from scalingnote.models.weights import add_adapter, merged_state, save_adapter

log = get_logger("models")


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
        """Build a tower on `backbone`.

        Args:
            backbone: transformer and tokenizer; the tower takes them over.
            config: prompt, lengths and attention of the tower.
            role: which texts the tower reads.
            dim: width of the embeddings.
            sparse: computes term weights of documents; None: the tower has none.
            adapter: name of the tower's LoRA weights in the backbone; None: the role.

        Raises:
            ConfigError: `config.max_length` exceeds what the backbone reads.
        """
        super().__init__()
        self._set_backbone(backbone, config, role=role, adapter=adapter)
        self.projection, self.sparse, self.dim = Projection(backbone.hidden, dim), sparse, dim
        self.special, self.pad = backbone.special, backbone.special.pad
        tokens = backbone.raw_tokenizer
        tokens.no_padding()
        tokens.no_truncation()
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
        embeddings = self._project(hidden[first + batch.positions[:, : len(self.views)]][order])
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

    def _project(self, pooled: Float[Tensor, "rows views hidden"]) -> Float[Tensor, "rows views dim"]:
        # Autocast would round the embeddings, and losses compare small differences.
        with torch.autocast(pooled.device.type, enabled=False):
            return self.projection(pooled)  # type: ignore[no-any-return]

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the tower's folder, readable by :func:`load`.

        Args:
            folder: created if missing.
            merge_adapters: whether LoRA updates are merged into the weights. If not, the folder holds the
                adapter and the path of its backbone. Adapters of a backbone from scratch are always merged,
                since its weights are stored nowhere else.
        """
        base_config = self._save_backbone(folder, merge_adapters=merge_adapters)
        self._save_tokenizer(folder, whole=base_config is None)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")
        head = {} if self.sparse is None else self.sparse.tensors()
        if head:
            save_file(head, folder / "sparse_head.safetensors")
        facts = {
            "role": self.role,
            "dim": self.dim,
            "causal": self.causal,
            "views": list(self.views),
            "max_length": self.config.max_length,
            "prompt": self.config.prompt,
            "special": asdict(self.special),
            "max_positions": self._max_positions,
            "layers": None if base_config is None else base_config.layers,
            "sparse": None if self.sparse is None else ("own" if head else "tied"),
            "sparse_transform": None if self.sparse is None else self.sparse.facts,
        }
        (folder / "tower.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")

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


def load(folder: Path, facts: Mapping[str, Any]) -> Tower:
    """Read a folder written by :meth:`Tower.save`; `facts` is its tower.json."""
    weight = load_file(folder / "projection.safetensors")["weight"]
    config = TowerConfig(max_length=facts["max_length"], prompt=facts["prompt"])
    backbone = backbones.load(folder, layers=facts.get("layers"))
    backbone.causal = facts["causal"]
    sparse = None
    if facts.get("sparse"):
        head = load_file(folder / "sparse_head.safetensors") if facts["sparse"] == "own" else {}
        sparse = SparseHead.restore(head, facts.get("sparse_transform"))
    tower = Tower(backbone, config, role=facts["role"], dim=facts["dim"], sparse=sparse)
    with torch.no_grad():
        tower.projection.weight.copy_(weight)
    return tower.eval()


def build(
    config: TowerConfig,
    *,
    role: Role,
    dim: int,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None = None,
    sparse: bool = False,
    adapter: str | None = None,
) -> Tower:
    """Build a tower that pools at placeholders, ready to train.

    Arguments as of :func:`scalingnote.models.dual_encoder.build_tower`, which builds the other kinds too.
    """
    backbone = start_backbone(
        config, role=role, tokenizer_json=tokenizer_json, seed=seed, backbone=backbone, adapter=adapter
    )
    head = _sparse_head(config) if sparse else None
    tower = Tower(backbone, config, role=role, dim=dim, sparse=head, adapter=adapter)
    pretrained = isinstance(config.backbone, Pretrained)
    start_projection(tower.projection, config.projection, pretrained=pretrained, seed=seed)
    return tower


def start_backbone(
    config: TowerConfig,
    *,
    role: Role,
    tokenizer_json: str | None,
    seed: int,
    backbone: Backbone | None,
    adapter: str | None,
) -> Backbone:
    """Return `backbone`, else the config's, with the adapter that the config asks for.

    A `backbone` that already has `adapter` gets no other.
    """
    if "pooling" not in config.model_fields_set and _is_embedding_model(config):
        log.warning(
            "%s is an embedding model with its own pooling and prompts, which placeholders replace: set "
            "train.%s.pooling to auto to start from what it learnt, or to placeholders if that is meant",
            config.backbone.path,  # type: ignore[union-attr]
            role,
        )
    backbone = backbone or backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=seed)
    if config.lora is not None and adapter is None:
        # Queries contain no placeholders, so their new rows would have nothing to learn from.
        ids = backbone.raw_tokenizer.get_vocab() if role == "document" else {}
        tokens = [ids[token] for token in PLACEHOLDERS if token in ids]
        add_adapter(backbone.model, config.lora, name=role, tokens=tokens, seed=seed)
    return backbone


def _is_embedding_model(config: TowerConfig) -> bool:
    """Whether the backbone's folder has files of sentence-transformers."""
    source = config.backbone
    return isinstance(source, Pretrained) and (Path(source.path) / "modules.json").exists()


def _sparse_head(config: TowerConfig) -> SparseHead:
    source = config.backbone
    if not isinstance(source, Pretrained):
        return SparseHead(None)
    found = backbones.output_head(source.path)
    transform = None
    if found.transform is not None:
        transform = HeadTransform(found.transform, activation=found.activation, eps=found.eps)
    head = SparseHead(found.weight, transform=transform, bias=found.bias)
    head.requires_grad_(config.lora is None)  # LoRA trains no head
    return head


def _row_starts(batch: Batch) -> Int[Tensor, " rows"]:
    """Return the flat index of each row's first token: lines of the batch, pads included, end to end."""
    if batch.packing is not None:
        return batch.packing.offsets[:-1].long()
    lines, longest = batch.ids.shape
    return torch.arange(lines, device=batch.ids.device) * longest
