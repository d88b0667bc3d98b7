"""Trained fusion, ready to use: bulk jobs and ingestion fuse documents, serving fuses queries.

    DocumentFusion    embedding, semantic ID, hashed id and declared features ─► final embedding
    QueryFusion       embedding, planner's words, profile and history of the user ─► final embedding

Unknown features of a document, query or user are treated as missing, which they sometimes are in training,
too. An anonymous query without a planner keeps its embedding, bit for bit.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Float32, Int, Int64, Integer, UInt64
from numpy import ndarray
from safetensors import torch as safetensors

from scalingnote.core.config import Config, dump, validate
from scalingnote.core.errors import ArtifactError
from scalingnote.fuse.config import DocumentSide, QuerySide
from scalingnote.fuse.feature_encoding import Encoding, columns_of, encode, encode_mappings
from scalingnote.fuse.feature_store import User
from scalingnote.fuse.networks import (
    NO_WORD,
    DocumentInputs,
    DocumentNetwork,
    QueryInputs,
    QueryNetwork,
    SemanticIdEmbedding,
)
from scalingnote.storage.shuffle import hash_of
from scalingnote.triplets.planner.planner import TermScores

WEIGHTS_FILE, FACTS_FILE = "network.safetensors", "fusion.json"
DOCUMENTS_PER_PASS = 4096
QUERY_WORDS = 8  # most important words of a query that are read
F = TypeVar("F", bound="_Fusion")


class _Fusion:
    """The trained network of a side."""

    _network_type: ClassVar[Any]
    _config_type: ClassVar[type[Config]]

    def __init__(self, network: Any) -> None:
        self._network = network.eval()

    @classmethod
    def load(cls: type[F], folder: Path) -> F:
        """Load the side that was saved in a folder; raise ArtifactError if there is none."""
        file = folder / FACTS_FILE
        if not file.exists():
            raise ArtifactError(
                f"{folder} has no trained fusion: {FACTS_FILE} is missing; run the stage fuse"
            )
        facts = json.loads(file.read_text(encoding="utf-8"))
        config = validate(cls._config_type, facts["config"], source=str(file))
        encodings = [Encoding.model_validate(values) for values in facts["features"]]
        ids = SemanticIdEmbedding(torch.zeros(facts["semantic_ids"]))
        network = cls._network_type(config, encodings, semantic_ids=ids)
        network.load_state_dict(safetensors.load((folder / WEIGHTS_FILE).read_bytes()))
        return cls(network)

    def save(self, folder: Path) -> None:
        """Write weights and facts for :meth:`load`."""
        folder.mkdir(parents=True, exist_ok=True)
        state = self._network.state_dict().items()
        weights = {name: value.detach().cpu().contiguous() for name, value in state}
        (folder / WEIGHTS_FILE).write_bytes(safetensors.save(weights))
        ids = self._network.semantic_ids
        facts = {
            "config": dump(self._network.config),
            "semantic_ids": [ids.levels, ids.codes, ids.dim],
            "features": [dump(encoding) for encoding in self._network.encodings],
        }
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1, sort_keys=True), encoding="utf-8")


class DocumentFusion(_Fusion):
    """A trained document side."""

    _network_type = DocumentNetwork
    _config_type = DocumentSide

    @property
    def columns(self) -> list[str]:
        """Columns of the documents table that are read, each once."""
        return columns_of(self._network.encodings)

    def fuse(
        self,
        documents: pa.Table,
        embeddings: Float[ndarray, "docs dim"],
        codes: Integer[ndarray, "docs levels"],
    ) -> Float32[ndarray, "docs dim"]:
        """Compute final embeddings of documents, of unit length and in order.

        Args:
            documents: has a column doc_id, and the known features.
            embeddings: the `summary` embeddings, of unit length.
            codes: of the semantic IDs; a row of -1 for a document without one.

        Raises:
            ArtifactError: `codes` have another number of levels than in training.
        """
        levels = self._network.semantic_ids.levels
        if codes.shape[1] != levels:
            raise ArtifactError(
                f"codes have {codes.shape[1]} levels, these networks were trained with {levels}: "
                "re-run fuse on the semantic IDs in use"
            )
        fused = [np.empty((0, embeddings.shape[1]), np.float32)]
        for start in range(0, len(embeddings), DOCUMENTS_PER_PASS):
            rows = slice(start, start + DOCUMENTS_PER_PASS)
            some = documents.slice(start, DOCUMENTS_PER_PASS)
            inputs = DocumentInputs.of(
                embeddings=embeddings[rows].astype(np.float32),
                codes=codes[rows].astype(np.int64),
                buckets=id_buckets(hash_of(some["doc_id"]), self._network.config),
                features=encode(self._network.encodings, some),
            )
            with torch.no_grad():
                fused.append(self._network(inputs).numpy())
        return np.concatenate(fused)


def id_buckets(hashes: UInt64[ndarray, " docs"], config: DocumentSide) -> Int[ndarray, " docs"]:
    """Compute the row of each document in the table of hashed ids; 0 if the side has no such table.

    `hashes` are those of the documents' ids.
    """
    return np.asarray(hashes % np.uint64(config.id_buckets or 1), dtype=np.int64)


class QueryFusion(_Fusion):
    """A trained query side."""

    _network_type = QueryNetwork
    _config_type = QuerySide

    def fuse(
        self,
        embeddings: Float[ndarray, "queries dim"],
        *,
        users: Sequence[User],
        terms: TermScores | None = None,
    ) -> Float32[ndarray, "queries dim"]:
        """Compute final embeddings of queries, of unit length and in order.

        Args:
            embeddings: of the query tower, of unit length.
            users: the user of each query, an empty User for an unknown one.
            terms: the planner's terms of the same queries; None: words are missing.
        """
        words, importances = important_words(terms, len(embeddings))
        queries = QueryInputs.of(
            embeddings=embeddings.astype(np.float32),
            words=words,
            importances=importances,
            features=encode_mappings(self._network.encodings, [user.profile for user in users]),
            history=self._history_codes([user.history for user in users]),
        )
        with torch.no_grad():
            fused: ndarray = self._network(queries).numpy()
        return fused

    def _history_codes(self, histories: Sequence[Sequence[str]]) -> Int64[ndarray, "queries last levels"]:
        """Parse the codes of the last documents with valid IDs of each history; -1 fills the front."""
        ids, last = self._network.semantic_ids, self._network.config.history
        out = np.full((len(histories), last, ids.levels), -1, np.int64)
        for row, history in enumerate(histories):
            parsed = (codes_of(name, ids.levels, ids.codes) for name in history)
            known = [codes for codes in parsed if codes is not None][-last:]
            if known:
                out[row, -len(known) :] = known
        return out


def important_words(
    terms: TermScores | None, queries: int
) -> tuple[Int64[ndarray, "queries words"], Float32[ndarray, "queries words"]]:
    """Find hashes and importances of the QUERY_WORDS most important words of each query, in descending order.

    Equally important words are in the order of the query. The importance is NO_WORD in the places for which a
    query has no further word.
    """
    hashes = np.zeros((queries, QUERY_WORDS), np.int64)
    importances = np.full((queries, QUERY_WORDS), NO_WORD, np.float32)
    if terms is not None:
        query = np.repeat(np.arange(queries), np.diff(terms.offsets))
        order = np.lexsort((-terms.scores, query))
        place = np.arange(len(query)) - terms.offsets[query]
        first = place < QUERY_WORDS
        hashes[query[first], place[first]] = terms.terms[order][first].view(np.int64)
        importances[query[first], place[first]] = terms.scores[order][first]
    return hashes, importances


def codes_of(semantic_id: str, levels: int, size: int) -> list[int] | None:
    """Parse the codes of a semantic ID "c0-c1-...-suffix"; None if it is not from these codebooks."""
    parts = semantic_id.split("-")
    if len(parts) != levels + 1 or not all(part.isdecimal() for part in parts):
        return None
    codes = [int(part) for part in parts[:levels]]
    return codes if max(codes) < size else None
