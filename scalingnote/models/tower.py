"""A tower: token rows -> backbone -> states at the pooled positions -> projection -> embeddings.

    ids        [rows, tokens]
    hidden     [rows, tokens, hidden]     backbone
    pooled     [rows, views, hidden]      states at each row's positions
    embeddings [rows, views, dim]         W, no bias (ScalingNote, Eq. 3, 4, 14); not normalised
    terms      [rows, vocabulary]         of a document tower with a sparse head: the same states, of title,
                                          topic and content alone (models/sparse_head.py)

A saved tower is a folder: the Hugging Face model and tokenizer, ``projection.safetensors`` and
``tower.json`` (role, prompt, lengths), all that is needed to encode with it anywhere.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.log import get_logger
from scalingnote.models import attention, export, layout
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, collate
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.projection import Projection
from scalingnote.models.prompt import PLACEHOLDERS, DocumentPrompt, QueryPrompt
from scalingnote.models.sparse_head import SparseHead

log = get_logger("models")
__all__ = ["Batch", "Role", "Tower", "build", "collate"]
Role = Literal["query", "document"]


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
        """`adapter` is the name of the tower's LoRA weights in its backbone: its role, if nothing is said.

        ConfigError when the tower is to read more tokens than its backbone can.
        """
        super().__init__()
        positions = backbone.max_positions
        if positions is not None and config.max_length > positions:
            raise ConfigError(
                f"the {role} tower has max_length={config.max_length}, but its backbone reads {positions} "
                "tokens: lower it"
            )
        self.backbone, self.sparse = backbone.model, sparse
        self.projection = Projection(backbone.hidden, dim)
        self.tokenizer, self.causal = backbone.tokenizer, backbone.causal
        self.config, self.role, self.dim = config, role, dim
        self._adapter, self._max_positions = adapter or role, positions
        self.special, self.pad = backbone.special, backbone.special.pad
        self.packs = attention.choose(backbone.model, config.attention)
        tokens = backbone.raw_tokenizer
        tokens.no_padding()
        tokens.no_truncation()
        layout.separate(tokens)
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

    @property
    def views(self) -> tuple[str, ...]:
        """Names of the embeddings a row gives, in order."""
        return self.prompt.views

    @property
    def token_embeddings(self) -> nn.Embedding:
        """The backbone's input table, a row per token of the vocabulary (not that of an adapted tower)."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        assert isinstance(table, nn.Embedding)
        return table

    def forward(self, batch: Batch) -> Float[Tensor, "rows views dim"]:
        """Embeddings in float32, not normalised; of padded or of packed rows."""
        return self._read(batch, terms=False)[0]

    def read(self, batch: Batch) -> tuple[Float[Tensor, "rows views dim"], Float[Tensor, "rows vocabulary"]]:
        """Embeddings, and term weights by the sparse head, from one forward pass."""
        embeddings, terms = self._read(batch, terms=True)
        assert terms is not None
        return embeddings, terms

    def _read(self, batch: Batch, *, terms: bool) -> tuple[Tensor, Tensor | None]:
        back: Tensor | slice = slice(None)
        if batch.packing is None or not self.packs:
            batch = batch.padded(self.pad)
        else:
            batch, back = batch.by_length()  # where attention goes by runs of equal length, there are fewer
        kwargs = attention.arguments(self.backbone, batch, causal=self.causal)
        if self.causal:
            kwargs["use_cache"] = False
        hidden = self.backbone(input_ids=batch.ids, **kwargs).last_hidden_state.flatten(0, 1)
        first = _first_tokens(batch)[:, None]
        embeddings = self._project(hidden[first + batch.positions[:, : len(self.views)]][back])
        if not terms:
            return embeddings, None
        assert self.sparse is not None, "this tower has no sparse head"
        return embeddings, self.sparse(hidden, self._places(batch), self.input_table)[back]

    def _places(self, batch: Batch) -> Int[Tensor, "rows longest"]:
        """Where in a batch the tokens of title, topic and content stand, row by row; -1 elsewhere."""
        longest = batch.packing.longest if batch.packing else batch.ids.shape[1]
        place = torch.arange(longest, device=batch.ids.device)
        spans = batch.positions[:, len(self.views) :].unflatten(1, (-1, 2))[:, :, :, None]
        inside = ((place >= spans[:, :, 0]) & (place < spans[:, :, 1])).any(1)
        return torch.where(inside, _first_tokens(batch)[:, None] + place, -1)

    @property
    def input_table(self) -> nn.Parameter:
        """The weights of the backbone's token embeddings, those of an adapted tower's new tokens aside."""
        table = self.backbone.get_input_embeddings()  # type: ignore[operator]
        return getattr(table, "table", table).weight  # type: ignore[no-any-return]

    def _project(self, pooled: Float[Tensor, "rows views hidden"]) -> Float[Tensor, "rows views dim"]:
        # Autocast would round the embeddings that all losses compare.
        with torch.autocast(pooled.device.type, enabled=False):
            return self.projection(pooled)  # type: ignore[no-any-return]

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the tower's folder.

        Adapters are worked into the weights, or kept: then the folder holds the adapter alone, and the
        path of its backbone. A backbone from scratch lies nowhere else, so there they are always worked in.
        """
        folder.mkdir(parents=True, exist_ok=True)
        source = self.config.backbone
        adapted = self.config.lora is not None
        kept = source if adapted and not merge_adapters and isinstance(source, Pretrained) else None
        if adapted:
            from scalingnote.models import adapters  # late: peft is slow to import, and few need it
        if kept is not None:
            adapters.save(self.backbone, folder, name=self._adapter, base=kept.path)
        else:
            state = adapters.merged(self.backbone) if adapted else None
            self.backbone.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        self._save_tokenizer(folder, whole=kept is None)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")
        own = None if self.sparse is None else self.sparse.own
        if own is not None:
            save_file({"weight": own.weight.detach().contiguous()}, folder / "sparse_head.safetensors")
        facts = {
            "role": self.role,
            "dim": self.dim,
            "causal": self.causal,
            "views": list(self.views),
            "max_length": self.config.max_length,
            "prompt": self.config.prompt,
            "special": asdict(self.special),
            "max_positions": self._max_positions,
            "layers": None if kept is None else kept.layers,
            "sparse": None if self.sparse is None else ("tied" if own is None else "own"),
        }
        (folder / "tower.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")

    def _save_tokenizer(self, folder: Path, *, whole: bool) -> None:
        """The tokenizer; beside a whole model also the files that sentence-transformers wants."""
        causal, length = self.causal, self.config.max_length
        document = self.prompt if isinstance(self.prompt, DocumentPrompt) else None
        template = self.config.prompt if document else None
        if document and causal:
            length -= layout.unseen(document)
        made = layout.tokenizer_for(template, self.tokenizer, self.special, causal=causal, max_length=length)
        made.save_pretrained(folder)
        if document and not layout.agrees(made, document, self.config.prompt, causal=causal):
            log.warning("its tokenizer joins what the prompt keeps apart: no files for sentence-transformers")
        elif whole:
            export.write(folder, made, self.projection.weight, template=template, causal=causal)

    @classmethod
    def load(cls, folder: Path) -> "Tower":
        """Read a folder written by :meth:`save`; ArtifactError when it is not one."""
        try:
            facts = json.loads((folder / "tower.json").read_text())
            if facts.get("kind") == "native":
                from scalingnote.models import native_tower  # late: it extends this class

                return native_tower.load(folder, facts)
            if facts.get("kind") == "sentence_transformers":
                from scalingnote.models.library_tower import LibraryTower  # late, and a large import

                return LibraryTower.load(folder)
            weight = load_file(folder / "projection.safetensors")["weight"]
            own = None
            if facts.get("sparse") == "own":
                own = load_file(folder / "sparse_head.safetensors")["weight"]
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} is not a tower: {error.filename or error} is missing") from None
        config = TowerConfig(max_length=facts["max_length"], prompt=facts["prompt"])
        backbone = backbones.load(folder, layers=facts.get("layers"))
        backbone.causal = facts["causal"]
        sparse = SparseHead(own) if facts.get("sparse") else None
        tower = cls(backbone, config, role=facts["role"], dim=facts["dim"], sparse=sparse)
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
    """A tower ready to train, on `backbone` where one is given, else on what the config says.

    Two towers of one config and seed start from the same backbone weights. With `sparse` it has a sparse
    head: the checkpoint's own language-model head, or the input table's rows. A `backbone` that
    brings its adapter tells its name. With a pooling other than "placeholders" it is a published model's.
    """
    if config.pooling != "placeholders":
        from scalingnote.models import native_tower  # late: it extends Tower

        if sparse:
            raise ConfigError("term weights need a document prompt: set document.pooling to placeholders")
        return native_tower.build(config, role=role, dim=dim, seed=seed, backbone=backbone, adapter=adapter)
    backbone = backbone or backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=seed)
    head = _sparse_head(config) if sparse else None
    if config.lora is not None and adapter is None:
        from scalingnote.models import adapters  # late, as above

        # Queries are read without placeholders: there is nothing for new rows to learn.
        ids = backbone.raw_tokenizer.get_vocab() if role == "document" else {}
        tokens = [ids[token] for token in PLACEHOLDERS if token in ids]
        adapters.add(backbone.model, config.lora, name=role, tokens=tokens, seed=seed)
    tower = Tower(backbone, config, role=role, dim=dim, sparse=head, adapter=adapter)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tower.projection.weight.normal_(0.0, backbone.hidden**-0.5, generator=generator)
    return tower


def _sparse_head(config: TowerConfig) -> SparseHead:
    source = config.backbone
    head = SparseHead(backbones.output_head(source.path) if isinstance(source, Pretrained) else None)
    head.requires_grad_(config.lora is None)  # adapters leave the head as it is
    return head


def _first_tokens(batch: Batch) -> Int[Tensor, " rows"]:
    """Where each row begins when all lines of a batch are laid end to end."""
    if batch.packing is not None:
        return batch.packing.offsets[:-1].long()
    lines, longest = batch.ids.shape
    return torch.arange(lines, device=batch.ids.device) * longest
