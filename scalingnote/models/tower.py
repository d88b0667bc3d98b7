"""A tower: token rows -> backbone -> states at the pooled positions -> projection -> embeddings.

    ids        [rows, tokens]
    hidden     [rows, tokens, hidden]     backbone
    pooled     [rows, views, hidden]      states at each row's positions
    embeddings [rows, views, dim]         W, no bias (ScalingNote, Eq. 3, 4, 14); not normalised

A saved tower is a folder: the Hugging Face model and tokenizer, ``projection.safetensors`` and
``tower.json`` (role, prompt, lengths), all that is needed to encode with it anywhere.
"""

import json
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalingnote.errors import ArtifactError
from scalingnote.log import get_logger
from scalingnote.models import attention, export, layout
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import Batch, collate
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.prompt import PLACEHOLDERS, DocumentPrompt, QueryPrompt

log = get_logger("models")
__all__ = ["Batch", "Role", "Tower", "build", "collate"]
Role = Literal["query", "document"]


class Tower(nn.Module):
    """One side of the dual encoder."""

    def __init__(self, backbone: Backbone, config: TowerConfig, *, role: Role, dim: int) -> None:
        super().__init__()
        self.backbone = backbone.model
        self.projection = nn.Linear(backbone.hidden, dim, bias=False)
        self.tokenizer, self.causal = backbone.tokenizer, backbone.causal
        self.config, self.role, self.dim = config, role, dim
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
                max_positions=backbone.max_positions,
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
        if batch.packing is None or not self.packs:
            return self._project(self._pooled(batch.padded(self.pad)))
        batch, back = batch.by_length()  # where attention goes by runs of equal length, there are fewer
        return self._project(self._pooled(batch)[back])

    def _pooled(self, batch: Batch) -> Float[Tensor, "rows views hidden"]:
        kwargs = attention.arguments(self.backbone, batch, causal=self.causal)
        if self.causal:
            kwargs["use_cache"] = False
        hidden = self.backbone(input_ids=batch.ids, **kwargs).last_hidden_state
        if batch.packing is not None:
            return hidden[0, batch.packing.offsets[:-1, None] + batch.positions]  # type: ignore[no-any-return]
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        return hidden[rows, batch.positions]  # type: ignore[no-any-return]

    def _project(self, pooled: Float[Tensor, "rows views hidden"]) -> Float[Tensor, "rows views dim"]:
        # Autocast would round the embeddings that all losses compare.
        with torch.autocast(pooled.device.type, enabled=False):
            return self.projection(pooled.to(self.projection.weight.dtype)).float()  # type: ignore[no-any-return]

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
            adapters.save(self.backbone, folder, name=self.role, base=kept.path)
        else:
            state = adapters.merged(self.backbone) if adapted else None
            self.backbone.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
        self._save_tokenizer(folder, whole=kept is None)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")
        facts = {
            "role": self.role,
            "dim": self.dim,
            "causal": self.causal,
            "views": list(self.views),
            "max_length": self.config.max_length,
            "prompt": self.config.prompt,
            "layers": None if kept is None else kept.layers,
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
            weight = load_file(folder / "projection.safetensors")["weight"]
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} is not a tower: {error.filename} is missing") from None
        config = TowerConfig(max_length=facts["max_length"], prompt=facts["prompt"])
        backbone = backbones.load(folder, layers=facts.get("layers"))
        backbone.causal = facts["causal"]
        tower = cls(backbone, config, role=facts["role"], dim=facts["dim"])
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
) -> Tower:
    """A tower ready to train, on `backbone` where one is given, else on what the config says.

    Two towers of one config and seed start from the same backbone weights.
    """
    backbone = backbone or backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=seed)
    if config.lora is not None:
        from scalingnote.models import adapters  # late, as above

        # Queries are read without placeholders: there is nothing for new rows to learn.
        ids = backbone.raw_tokenizer.get_vocab() if role == "document" else {}
        tokens = [ids[token] for token in PLACEHOLDERS if token in ids]
        adapters.add(backbone.model, config.lora, name=role, tokens=tokens, seed=seed)
    tower = Tower(backbone, config, role=role, dim=dim)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tower.projection.weight.normal_(0.0, backbone.hidden**-0.5, generator=generator)
    return tower
