"""A published embedding model that only sentence-transformers can run, as a tower.

Its tokens are made here, as for :mod:`scalingnote.models.native_tower`; all that follows is that library's
own forward pass, on padded rows. It encodes and is not trained.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.models import native
from scalingnote.models.batch import Batch
from scalingnote.models.config import Pretrained, TowerConfig
from scalingnote.models.module_list import Role
from scalingnote.models.native import NativeModel
from scalingnote.models.native_tower import make_prompt, prefix_length, tokenizer_of
from scalingnote.models.prompt import TextDocuments, TextQueries
from scalingnote.models.tower import Tower

log = get_logger("models")


class LibraryTower(Tower):
    """One side of a dual encoder, run by sentence-transformers."""

    prompt: TextQueries | TextDocuments

    def __init__(self, model: NativeModel, *, role: Role, max_length: int) -> None:
        """`max_length` is the number of tokens read; ConfigError when the library cannot load the model."""
        nn.Module.__init__(self)
        self.library: Any = _library(model)
        first = self.library[0]
        self.backbone = (first.sub_modules[role] if hasattr(first, "sub_modules") else self.library)[0].model
        self.tokenizer, self.native, self.role = tokenizer_of(model), model, role
        self.config = TowerConfig(
            backbone=Pretrained(path=str(model.source)), pooling="auto", max_length=max_length
        )
        self.sparse, self.packs, self.causal = None, False, False
        pad = self.tokenizer.pad_token_id
        self.pad = 0 if pad is None else int(pad)
        self.prompt = make_prompt(self.tokenizer, model, role, max_length=max_length)
        self._skip = prefix_length(self.tokenizer, model.prefix)
        with torch.inference_mode():
            row = torch.tensor([self.prompt.row([]).ids or [self.pad]])
            self.dim = int(self._embed(row, torch.ones_like(row)).shape[1])

    def _read(self, batch: Batch, *, terms: bool) -> tuple[Tensor, Tensor | None]:
        assert not terms, "a published model has no sparse head"
        batch = batch.padded(self.pad)
        assert batch.mask is not None
        return self._embed(batch.ids, batch.mask)[:, None].float(), None

    def _embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        features: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "modality": "text"}
        if self._skip:
            features["prompt_length"] = self._skip
        found: Tensor = self.library(features, task=self.role)["sentence_embedding"]
        return found if self.native.truncate_dim is None else found[:, : self.native.truncate_dim]

    def save(self, folder: Path, *, merge_adapters: bool = True) -> None:
        """Write the model by its library, with this role's prompt under both roles' names."""
        folder.mkdir(parents=True, exist_ok=True)
        self.library.prompts = {"query": self.native.prefix, "document": self.native.prefix}
        self.library.default_prompt_name = self.role if self.native.prefix else None
        self.library.save(str(folder), create_model_card=False)
        facts = {
            "kind": "sentence_transformers",
            "role": self.role,
            "dim": self.dim,
            "views": list(self.views),
            "max_length": self.config.max_length,
            "prompt": self.native.prefix,
            "unknown": self.native.unknown,
            "text": self.prompt.facts,
            "sparse": None,
        }
        (folder / "tower.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
        if not (folder / "tokenizer.json").exists():
            self.tokenizer.save_pretrained(folder)  # a Router's modules keep theirs below them

    @classmethod
    def load(cls, folder: Path) -> "LibraryTower":
        """Read a folder written by :meth:`save`."""
        facts = json.loads((folder / "tower.json").read_text())
        model = native.read(folder, facts["role"])
        return cls(model, role=facts["role"], max_length=facts["max_length"]).eval()


def _library(model: NativeModel) -> Any:
    from sentence_transformers import SentenceTransformer  # late: seconds, and few models need it

    log.warning(
        "%s of %s is not known to scalingnote; sentence-transformers encodes it, without packing",
        model.unknown,
        model.source,
    )
    try:
        return SentenceTransformer(
            str(model.source),
            device="cpu",
            trust_remote_code=False,
            model_kwargs={"dtype": torch.float32, "use_safetensors": True},
        ).eval()
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"sentence-transformers cannot load {str(model.source)!r}: {error}") from None
