"""Modules that sentence-transformers loads by their dotted path: what its own modules cannot do.

    LookupTable       a lookup table with attention, or with rows for pairs and end tokens
    ReferencedModel   a published model by its name, in place of a copy of its weights

sentence-transformers imports a class from outside of its own package only with `trust_remote_code=True`, for
folders and for the hub alike. The code that runs is this file, as it is installed: none comes with the model.
Only folders that name these classes import this file, so sentence-transformers stays an optional dependency.
"""

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules.input_module import InputModule

from scalingnote.models.batch import Batch, Packing
from scalingnote.models.lookup import LookupTower


class LookupTable(InputModule):
    """A :class:`LookupTower` as a module. Its folder is the tower's own."""

    save_in_root = False

    def __init__(self, tower: LookupTower) -> None:
        super().__init__()
        self.tower, self.tokenizer = tower, tower.tokenizer

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Row numbers of all texts end to end (`input_ids`), and how many each text has (`lengths`)."""
        texts = [f"{prompt or ''}{text}" for text in inputs]
        rows = [row.ids for row in self.tower.prompt.rows(texts)]
        return {
            "input_ids": torch.tensor([number for row in rows for number in row], dtype=torch.long),
            "lengths": torch.tensor([len(row) for row in rows]),
        }

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding`, [texts, dim]; not normalised."""
        ids, lengths = features["input_ids"], features["lengths"]
        packing = Packing.of(lengths.tolist(), ids.device)
        batch = Batch(ids[None], None, torch.zeros_like(lengths)[:, None], packing)
        return features | {"sentence_embedding": self.tower(batch)[:, 0]}

    def get_embedding_dimension(self) -> int:
        """Width of an embedding."""
        return self.tower.dim

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the table's folder, in the storage that it was read in."""
        self.tower.save(Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "LookupTable":
        """Read what :meth:`save` wrote, from a folder or from the hub."""
        found = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **_hub(kwargs))
        return cls(LookupTower.load(Path(found)))


class ReferencedModel(InputModule):
    """A published model that is loaded by its name: all its modules, documents' where it tells roles apart.

    Code of the named model's own is never run.
    """

    save_in_root = False
    config_keys = ("model", "revision", "max_seq_length")

    def __init__(self, model: str, revision: str | None, library: SentenceTransformer) -> None:
        """`library` is the model that `model`, a hub id or a folder, and `revision` name."""
        super().__init__()
        self.model, self.revision, self.library = model, revision, library

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, **kwargs: Any
    ) -> MutableMapping[str, Any]:
        """Features as the named model makes them of documents."""
        found: MutableMapping[str, Any] = self.library.preprocess(
            inputs, prompt=prompt, **kwargs | {"task": "document"}
        )
        return found

    def forward(self, features: MutableMapping[str, Any], **kwargs: Any) -> MutableMapping[str, Any]:
        """Features behind all modules of the named model; `sentence_embedding` is [texts, dim]."""
        found: MutableMapping[str, Any] = self.library(features, task="document")
        return found

    @property
    def max_seq_length(self) -> int | None:
        """Tokens read of a document."""
        found: int | None = self.library.max_seq_length
        return found

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        self.library.max_seq_length = tokens

    def get_embedding_dimension(self) -> int | None:
        """Width of an embedding, before the outer model truncates it."""
        found: int | None = self.library.get_embedding_dimension()
        return found

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the name and the revision, no weights."""
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "ReferencedModel":
        """Load the model that the folder's config.json names."""
        named = cls.load_config(model_name_or_path, subfolder=subfolder, **_hub(kwargs))
        revision = named.get("revision")
        library = SentenceTransformer(
            named["model"],
            device="cpu",  # the outer model moves it
            trust_remote_code=False,
            model_kwargs={**(kwargs.get("model_kwargs") or {}), "use_safetensors": True},
            processor_kwargs=kwargs.get("processor_kwargs"),
            config_kwargs=kwargs.get("config_kwargs"),
            **_hub(kwargs) | {"revision": revision},
        )
        if named.get("max_seq_length") is not None:
            library.max_seq_length = named["max_seq_length"]
        return cls(named["model"], revision, library)


def _hub(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that say how files are fetched."""
    names = ("token", "cache_folder", "revision", "local_files_only")
    return {name: kwargs[name] for name in names if name in kwargs}
