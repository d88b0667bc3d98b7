"""A tower: token rows -> backbone -> states at the pooled positions -> projection -> embeddings.

    ids        [rows, tokens]
    hidden     [rows, tokens, hidden]     backbone
    pooled     [rows, views, hidden]      states at each row's positions
    embeddings [rows, views, dim]         W, no bias (ScalingNote, Eq. 3, 4, 14); not normalised

A saved tower is a folder: the Hugging Face model and tokenizer, ``projection.safetensors`` and
``tower.json`` (role, prompt, lengths), all that is needed to encode with it anywhere.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scalingnote.errors import ArtifactError
from scalingnote.models import backbone as backbones
from scalingnote.models.backbone import Backbone
from scalingnote.models.config import TowerConfig
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, Row

Role = Literal["query", "document"]


@dataclass(frozen=True)
class Batch:
    """Padded token rows and the positions to pool."""

    ids: Int[Tensor, "rows tokens"]
    mask: Int[Tensor, "rows tokens"]
    positions: Int[Tensor, "rows views"]

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        return Batch(*(t.to(device, non_blocking=True) for t in (self.ids, self.mask, self.positions)))


def collate(rows: Sequence[Row], *, pad: int) -> Batch:
    """Pad rows on the right to the longest one."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        mask[i, : len(row.ids)] = 1
    return Batch(ids, mask, torch.tensor([row.positions for row in rows]))


class Tower(nn.Module):
    """One side of the dual encoder."""

    def __init__(self, backbone: Backbone, config: TowerConfig, *, role: Role, dim: int) -> None:
        super().__init__()
        self.backbone = backbone.model
        self.projection = nn.Linear(backbone.hidden, dim, bias=False)
        self.tokenizer, self.causal = backbone.tokenizer, backbone.causal
        self.config, self.role, self.dim = config, role, dim
        self.pad = backbone.special.pad
        tokens = backbone.raw_tokenizer
        tokens.no_padding()
        tokens.no_truncation()
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
        """The backbone's input table, a row per token of the vocabulary."""
        return self.backbone.get_input_embeddings()  # type: ignore[operator, no-any-return]

    def forward(self, batch: Batch) -> Float[Tensor, "rows views dim"]:
        """Embeddings in float32, not normalised."""
        # Right padding: in a causal model real tokens never see pads, and no mask means the fast kernel.
        mask = None if self.causal else batch.mask
        kwargs = {"use_cache": False} if self.causal else {}
        hidden = self.backbone(input_ids=batch.ids, attention_mask=mask, **kwargs).last_hidden_state
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        return self.projection(hidden[rows, batch.positions].float())  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Write the tower's folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backbone.save_pretrained(folder)  # type: ignore[operator]
        self.tokenizer.save_pretrained(folder)
        save_file({"weight": self.projection.weight.detach().contiguous()}, folder / "projection.safetensors")
        facts = {
            "role": self.role,
            "dim": self.dim,
            "causal": self.causal,
            "views": list(self.views),
            "max_length": self.config.max_length,
            "prompt": self.config.prompt,
        }
        (folder / "tower.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Tower":
        """Read a folder written by :meth:`save`; ArtifactError when it is not one."""
        try:
            facts = json.loads((folder / "tower.json").read_text())
            weight = load_file(folder / "projection.safetensors")["weight"]
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} is not a tower: {error.filename} is missing") from None
        config = TowerConfig(max_length=facts["max_length"], prompt=facts["prompt"])
        backbone = backbones.load(folder)
        backbone.causal = facts["causal"]
        tower = cls(backbone, config, role=facts["role"], dim=facts["dim"])
        with torch.no_grad():
            tower.projection.weight.copy_(weight)
        return tower.eval()


def build(config: TowerConfig, *, role: Role, dim: int, tokenizer_json: str | None, seed: int) -> Tower:
    """A tower ready to train. Two towers of one config and seed start from the same backbone weights."""
    backbone = backbones.build(config.backbone, tokenizer_json=tokenizer_json, seed=seed)
    tower = Tower(backbone, config, role=role, dim=dim)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        tower.projection.weight.normal_(0.0, backbone.hidden**-0.5, generator=generator)
    return tower
