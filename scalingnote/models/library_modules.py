"""Modules for sentence-transformers, which loads them by their dotted path.

    LookupTable       a lookup table with attention, or with rows for token pairs and end tokens
    ReferencedModel   a published model by its name, without a copy of its weights

Published folders contain the dotted paths of these classes: neither this file nor the classes can be renamed.
sentence-transformers imports a class of another package only with `trust_remote_code=True`. The code that
runs is this installed file; no code comes with a model. This file is imported only when such a folder is
loaded, so sentence-transformers is an optional dependency.
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
    """A :class:`LookupTower` as a module; its folder has the format of the tower's folder."""

    save_in_root = False

    def __init__(self, tower: LookupTower) -> None:
        super().__init__()
        self.tower, self.tokenizer = tower, tower.tokenizer

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the concatenated row numbers of all texts (`input_ids`) and their count per text."""
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
        """Return the width of an embedding."""
        return self.tower.dim

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the table's folder in the number format in which it was read."""
        self.tower.save(Path(output_path))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "LookupTable":
        """Read a module written by :meth:`save`, from a folder or from the hub."""
        folder = cls.load_dir_path(model_name_or_path, subfolder=subfolder, **_hub_arguments(kwargs))
        return cls(LookupTower.load(Path(folder)))


class ReferencedModel(InputModule):
    """A published model that is loaded by its name; if it is a Router, the modules of documents are used.

    Code in that model's folder is never run.
    """

    save_in_root = False
    config_keys = ("model", "revision", "max_seq_length")

    def __init__(self, model: str, revision: str | None, library: SentenceTransformer) -> None:
        """Make a module; `library` is the loaded model of `model`, a hub id or folder, and `revision`."""
        super().__init__()
        self.model, self.revision, self.library = model, revision, library

    def preprocess(
        self, inputs: Sequence[str], prompt: str | None = None, **kwargs: Any
    ) -> MutableMapping[str, Any]:
        """Return the features of documents by the referenced model."""
        features: MutableMapping[str, Any] = self.library.preprocess(
            inputs, prompt=prompt, **kwargs | {"task": "document"}
        )
        return features

    def forward(self, features: MutableMapping[str, Any], **kwargs: Any) -> MutableMapping[str, Any]:
        """Return the output of the referenced model; `sentence_embedding` is [texts, dim]."""
        output: MutableMapping[str, Any] = self.library(features, task="document")
        return output

    @property
    def max_seq_length(self) -> int | None:
        """Maximum tokens of a document."""
        tokens: int | None = self.library.max_seq_length
        return tokens

    @max_seq_length.setter
    def max_seq_length(self, tokens: int) -> None:
        self.library.max_seq_length = tokens

    def get_embedding_dimension(self) -> int | None:
        """Return the width of an embedding before the outer model truncates it."""
        dim: int | None = self.library.get_embedding_dimension()
        return dim

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the name and the revision, but no weights."""
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "ReferencedModel":
        """Load the model that the folder's config.json names."""
        settings = cls.load_config(model_name_or_path, subfolder=subfolder, **_hub_arguments(kwargs))
        revision = settings.get("revision")
        library = SentenceTransformer(
            settings["model"],
            device="cpu",  # the outer model moves it to its device
            trust_remote_code=False,
            model_kwargs={**(kwargs.get("model_kwargs") or {}), "use_safetensors": True},
            processor_kwargs=kwargs.get("processor_kwargs"),
            config_kwargs=kwargs.get("config_kwargs"),
            **_hub_arguments(kwargs) | {"revision": revision},
        )
        if settings.get("max_seq_length") is not None:
            library.max_seq_length = settings["max_seq_length"]
        return cls(settings["model"], revision, library)


def _hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that control downloads."""
    names = ("token", "cache_folder", "revision", "local_files_only")
    return {name: kwargs[name] for name in names if name in kwargs}
