"""The document side: embedding, semantic ID, hashed id and declared features merged into the final embedding.

:class:`DocumentFusion` is what bulk jobs and the flow of single documents call; the network inside is trained
by the stage.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Float32, Int, Integer, UInt64
from numpy import ndarray
from pydantic import TypeAdapter
from safetensors import torch as safetensors
from torch import Tensor, nn

from scalingnote.config import Config, dump, validate
from scalingnote.errors import ArtifactError
from scalingnote.fuse.config import DocumentSide, Feature
from scalingnote.fuse.feature_encoding import Encoding, encode
from scalingnote.fuse.network import Fusion, Slot
from scalingnote.fuse.slots import Columns, HashTable, SemanticIds
from scalingnote.storage.exchange import hash_of

WEIGHTS, FACTS = "network.safetensors", "fusion.json"
_ROWS = 4096


@dataclass(frozen=True)
class Documents:
    """What the network reads of some documents."""

    embeddings: Float[Tensor, "docs dim"]  # of unit length
    codes: Int[Tensor, "docs levels"]  # -1 throughout: no semantic ID
    buckets: Int[Tensor, " docs"]  # of the hashed doc_id
    indices: Int[Tensor, "docs indices"]
    numbers: Float[Tensor, "docs numbers"]

    def to(self, device: torch.device) -> "Documents":
        """The same on a device."""
        return Documents(**{name: part.to(device) for name, part in vars(self).items()})


class DocumentNetwork(nn.Module):
    """Documents in, final embeddings of unit length out."""

    seen: Bool[Tensor, " buckets"]

    def __init__(
        self,
        config: DocumentSide,
        encodings: Sequence[Encoding],
        *,
        dim: int,
        semantic_ids: SemanticIds | None,
        seen: Bool[Tensor, " buckets"] | None = None,
        hide: float = 0.0,
    ) -> None:
        """`seen` are the buckets of ids that training met: an id in another one is missing, not random."""
        super().__init__()
        self.semantic_ids = semantic_ids if config.semantic_ids else None
        self.dim, widths = dim, [dim] * config.semantic_ids
        self.ids = None
        if config.ids:
            self.ids = HashTable(config.ids.buckets, config.ids.width)
            seen = torch.ones(config.ids.buckets, dtype=torch.bool) if seen is None else seen
            widths.append(config.ids.width)
        self.register_buffer("seen", seen if config.ids else None)
        self.columns = Columns(encodings)
        self.fusion = Fusion(config.network, dim=dim, widths=[*widths, *self.columns.widths], hide=hide)

    def forward(self, documents: Documents) -> Float[Tensor, "docs dim"]:
        """Rows of which every feature is missing come out as their embeddings went in."""
        slots: list[Slot] = []
        if self.semantic_ids is not None:
            slots.append((self.semantic_ids(documents.codes), (documents.codes >= 0).all(dim=1)))
        if self.ids is not None:
            slots.append((self.ids(documents.buckets), self.seen[documents.buckets]))
        slots += self.columns(documents.indices, documents.numbers)
        fused: Tensor = self.fusion(documents.embeddings, slots)
        return fused


class DocumentFusion:
    """A trained document side, ready for bulk and for single documents."""

    def __init__(self, network: DocumentNetwork, config: DocumentSide, encodings: Sequence[Encoding]) -> None:
        self._network, self._config, self._encodings = network.eval(), config, list(encodings)

    @property
    def columns(self) -> list[str]:
        """Columns of the documents table that are read, each once."""
        return list(dict.fromkeys(encoding.feature.column for encoding in self._encodings))

    def fuse(
        self,
        documents: pa.Table,
        embeddings: Float[ndarray, "docs dim"],
        codes: Integer[ndarray, "docs levels"] | None = None,
    ) -> Float32[ndarray, "docs dim"]:
        """Final embeddings of unit length, in order.

        `documents` has a column doc_id and the features that are known; `embeddings` are the `summary` ones,
        of unit length; `codes` of -1, or none, are documents without a semantic ID.
        """
        if not len(embeddings):
            return np.asarray(embeddings, np.float32)
        inputs = read(documents, embeddings, codes, config=self._config, encodings=self._encodings)
        if self._network.semantic_ids is not None:
            levels = self._network.semantic_ids.levels
            if codes is None:
                inputs = _without_codes(inputs, levels)
            elif codes.shape[1] != levels:
                raise ArtifactError(
                    f"codes have {codes.shape[1]} levels, these networks were trained with {levels}: "
                    "re-run fuse on the semantic IDs in use"
                )
        found = []
        with torch.no_grad():
            for start in range(0, len(embeddings), _ROWS):
                rows = {name: part[start : start + _ROWS] for name, part in vars(inputs).items()}
                found.append(self._network(Documents(**rows)))
        return torch.cat(found).numpy()

    def save(self, folder: Path) -> None:
        """Write weights and facts; :meth:`load` reads them."""
        write(folder, self._network, self._config, {"features": self._encodings})

    @classmethod
    def load(cls, folder: Path) -> "DocumentFusion":
        """The document side of a folder. ArtifactError when there is none."""
        weights, facts = load(folder)
        config = validate(DocumentSide, facts["config"], source=str(folder / FACTS))
        encodings = facts["features"]
        network = DocumentNetwork(config, encodings, dim=facts["dim"], semantic_ids=tables(facts))
        network.load_state_dict(weights)
        return cls(network, config, encodings)


def read(
    documents: pa.Table,
    embeddings: Float[ndarray, "docs dim"],
    codes: Integer[ndarray, "docs levels"] | None,
    *,
    config: DocumentSide,
    encodings: Sequence[Encoding],
) -> Documents:
    """A table's rows as the network reads them."""
    encoded = encode(encodings, documents)
    chosen = np.zeros((len(embeddings), 0), np.int64) if codes is None else codes
    return Documents(
        embeddings=torch.from_numpy(np.array(embeddings, np.float32)),
        codes=torch.from_numpy(chosen.astype(np.int64)),
        buckets=torch.from_numpy(buckets(hash_of(documents["doc_id"]), config)),
        indices=torch.from_numpy(encoded.indices),
        numbers=torch.from_numpy(encoded.numbers),
    )


def buckets(hashes: UInt64[ndarray, " docs"], config: DocumentSide) -> Int[ndarray, " docs"]:
    """The row of each document's id among the hashed ones; 0 where there is no table of them."""
    size = config.ids.buckets if config.ids else 1
    return np.asarray(hashes % np.uint64(size), dtype=np.int64)


def write(folder: Path, network: Any, config: Config, encodings: dict[str, Sequence[Encoding]]) -> None:
    """One side's weights, config, what was fitted of its features, and the shape of its semantic IDs."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    (folder / WEIGHTS).write_bytes(safetensors.save(weights))
    fitted: dict[str, Any] = {
        name: [{"feature": dump(e.feature), "facts": e.facts} for e in found]
        for name, found in encodings.items()
    }
    ids = network.semantic_ids
    facts = {
        "config": dump(config),
        "dim": network.dim,
        "semantic_ids": None if ids is None else [ids.levels, ids.codes, ids.dim],
    }
    (folder / FACTS).write_text(json.dumps(facts | fitted, indent=1, sort_keys=True), encoding="utf-8")


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write` wrote; ArtifactError when it is not there."""
    if not (folder / FACTS).exists():
        raise ArtifactError(f"{folder} holds no trained fusion: {FACTS} is missing; run the stage fuse")
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    adapter: TypeAdapter[Any] = TypeAdapter(Feature)
    for name in {"features", "profile"} & facts.keys():
        facts[name] = [Encoding(adapter.validate_python(e["feature"]), e["facts"]) for e in facts[name]]
    return safetensors.load((folder / WEIGHTS).read_bytes()), facts


def tables(facts: dict[str, Any]) -> SemanticIds | None:
    """Tables of the right shape, to be filled with weights; None where a side has none."""
    return None if facts["semantic_ids"] is None else SemanticIds(torch.zeros(facts["semantic_ids"]))


def _without_codes(documents: Documents, levels: int) -> Documents:
    rows = len(documents.embeddings)
    return Documents(**{**vars(documents), "codes": torch.full((rows, levels), -1)})
