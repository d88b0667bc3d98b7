"""Trained fusion, ready to use: bulk jobs and ingestion fuse documents, serving fuses queries.

    DocumentFusion    embedding, semantic ID, hashed id and declared features ─► final embedding
    QueryFusion       embedding, planner's words, profile and history of the user ─► final embedding

The functions between them turn tables and users into the inputs of the networks, for training and for use.
What is not known of a document, query or user is missing, as it is now and then in training: an anonymous
query without a planner keeps its embedding, bit for bit.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
from scalingnote.fuse.feature_encoding import (
    MISSING_INDEX,
    EncodedFeatures,
    Encoding,
    columns_of,
    encode,
    encode_mappings,
)
from scalingnote.fuse.feature_store import User
from scalingnote.fuse.networks import (
    CROSS_BUCKETS,
    NO_WORD,
    WORD_BUCKETS,
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
QUERY_WORDS = 8  # most important words that are read of a query
F = TypeVar("F", bound="_Fusion")


class _Fusion:
    """A trained side, with its settings and fitted features."""

    _network_type: ClassVar[Any]
    _config_type: ClassVar[type[Config]]

    def __init__(self, network: Any, config: Any, encodings: Sequence[Encoding]) -> None:
        self._network, self._config, self._encodings = network.eval(), config, list(encodings)

    @classmethod
    def load(cls: type[F], folder: Path) -> F:
        """The side that was saved in a folder; ArtifactError when there is none."""
        file = folder / FACTS_FILE
        if not file.exists():
            raise ArtifactError(
                f"{folder} holds no trained fusion: {FACTS_FILE} is missing; run the stage fuse"
            )
        facts = json.loads(file.read_text(encoding="utf-8"))
        config = validate(cls._config_type, facts["config"], source=str(file))
        encodings = [Encoding.model_validate(values) for values in facts["features"]]
        shape = facts["semantic_ids"]
        ids = None if shape is None else SemanticIdEmbedding(torch.zeros(shape))
        network = cls._network_type(config, encodings, dim=facts["dim"], semantic_ids=ids)
        network.load_state_dict(safetensors.load((folder / WEIGHTS_FILE).read_bytes()))
        return cls(network, config, encodings)

    def save(self, folder: Path) -> None:
        """Write weights and facts for :meth:`load`."""
        folder.mkdir(parents=True, exist_ok=True)
        state = self._network.state_dict().items()
        weights = {name: value.detach().cpu().contiguous() for name, value in state}
        (folder / WEIGHTS_FILE).write_bytes(safetensors.save(weights))
        ids = self._network.semantic_ids
        facts = {
            "config": dump(self._config),
            "dim": self._network.dim,
            "semantic_ids": None if ids is None else [ids.levels, ids.codes, ids.dim],
            "features": [dump(encoding) for encoding in self._encodings],
        }
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1, sort_keys=True), encoding="utf-8")


# --- documents --------------------------------------------------------------------------------------------


class DocumentFusion(_Fusion):
    """A trained document side."""

    _network_type = DocumentNetwork
    _config_type = DocumentSide

    @property
    def columns(self) -> list[str]:
        """Columns of the documents table that are read, each once."""
        return columns_of(self._encodings)

    def fuse(
        self,
        documents: pa.Table,
        embeddings: Float[ndarray, "docs dim"],
        codes: Integer[ndarray, "docs levels"] | None = None,
    ) -> Float32[ndarray, "docs dim"]:
        """Final embeddings of documents, of unit length and in order.

        Args:
            documents: has a column doc_id, and the features that are known.
            embeddings: the `summary` embeddings, of unit length.
            codes: of the semantic IDs; -1 in a row, or None, for documents without one.

        Raises:
            ArtifactError: `codes` have another number of levels than in training.
        """
        if not len(embeddings):
            return np.asarray(embeddings, np.float32)
        tables = self._network.semantic_ids
        levels = 0 if tables is None else tables.levels
        if codes is None:
            codes = np.full((len(embeddings), levels), -1)
        elif levels and codes.shape[1] != levels:
            raise ArtifactError(
                f"codes have {codes.shape[1]} levels, these networks were trained with {levels}: "
                "re-run fuse on the semantic IDs in use"
            )
        inputs = document_inputs(
            np.array(embeddings, np.float32),
            codes,
            hash_of(documents["doc_id"]),
            encode(self._encodings, documents),
            config=self._config,
        )
        fused = []
        with torch.no_grad():
            for start in range(0, len(embeddings), DOCUMENTS_PER_PASS):
                rows = slice(start, start + DOCUMENTS_PER_PASS)
                fused.append(
                    self._network(DocumentInputs(**{n: part[rows] for n, part in vars(inputs).items()}))
                )
        return torch.cat(fused).numpy()


def document_inputs(
    embeddings: Float32[ndarray, "docs dim"],
    codes: Integer[ndarray, "docs levels"],
    hashes: UInt64[ndarray, " docs"],
    features: EncodedFeatures,
    *,
    config: DocumentSide,
) -> DocumentInputs:
    """Inputs of the network, in training and in use; `hashes` are those of the documents' ids."""
    return DocumentInputs(
        embeddings=torch.from_numpy(embeddings),
        codes=torch.from_numpy(codes.astype(np.int64)),
        buckets=torch.from_numpy(id_buckets(hashes, config)),
        indices=torch.from_numpy(features.indices),
        numbers=torch.from_numpy(features.numbers),
    )


def id_buckets(hashes: UInt64[ndarray, " docs"], config: DocumentSide) -> Int[ndarray, " docs"]:
    """The row of each document in the table of hashed ids; 0 where the side has no such table."""
    return np.asarray(hashes % np.uint64(config.id_buckets or 1), dtype=np.int64)


# --- queries ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportantWords:
    """The most important words of each query, the most important first."""

    hashes: UInt64[ndarray, "queries words"]
    importances: Float32[ndarray, "queries words"]  # NO_WORD where there is none


class QueryFusion(_Fusion):
    """A trained query side."""

    _network_type = QueryNetwork
    _config_type = QuerySide

    def fuse(
        self,
        embeddings: Float[ndarray, "queries dim"],
        *,
        terms: TermScores | None = None,
        users: Sequence[User | None] | None = None,
    ) -> Float32[ndarray, "queries dim"]:
        """Final embeddings of queries, of unit length and in order.

        Args:
            embeddings: of the query tower, of unit length.
            terms: the planner's, of the same queries; None: words are missing.
            users: the user of each query, None for an unknown one.
        """
        rows = len(embeddings)
        known = [user or User() for user in (users or [None] * rows)]
        queries = query_inputs(
            np.array(embeddings, np.float32),
            important_words(terms if self._config.planner else None, rows),
            encode_mappings(self._encodings, [user.profile for user in known]),
            self._histories([user.history for user in known]),
            config=self._config,
            encodings=self._encodings,
        )
        with torch.no_grad():
            fused: ndarray = self._network(queries).numpy()
        return fused

    def _histories(self, histories: Sequence[Sequence[str]]) -> Int64[ndarray, "queries last levels"]:
        if not self._config.history:
            return np.zeros((len(histories), 0, 0), np.int64)
        tables = self._network.semantic_ids
        parsed = [[codes_of(name, tables.levels, tables.codes) for name in history] for history in histories]
        known = [[codes for codes in history if codes is not None] for history in parsed]
        return last_codes(known, last=self._config.history, levels=tables.levels)


def important_words(terms: TermScores | None, rows: int) -> ImportantWords:
    """The QUERY_WORDS most important words of each query; of equal ones the first of the query."""
    hashes, importances = (
        np.zeros((rows, QUERY_WORDS), np.uint64),
        np.full((rows, QUERY_WORDS), NO_WORD, np.float32),
    )
    if terms is not None:
        query = np.repeat(np.arange(rows), np.diff(terms.offsets))
        order = np.lexsort((-terms.scores, query))
        place = np.arange(len(query)) - terms.offsets[query]
        first = place < QUERY_WORDS
        hashes[query[first], place[first]] = terms.terms[order][first]
        importances[query[first], place[first]] = terms.scores[order][first]
    return ImportantWords(hashes, importances)


def query_inputs(
    embeddings: Float32[ndarray, "queries dim"],
    words: ImportantWords,
    profile: EncodedFeatures,
    history: Int64[ndarray, "queries last levels"],
    *,
    config: QuerySide,
    encodings: Sequence[Encoding],
) -> QueryInputs:
    """Inputs of the network, in training and in serving."""
    discrete = [encoding.feature.column for encoding in encodings if encoding.size]
    places = [discrete.index(column) for column in config.crosses]
    return QueryInputs(
        embeddings=torch.from_numpy(embeddings),
        words=torch.from_numpy((words.hashes % np.uint64(WORD_BUCKETS)).astype(np.int64)),
        importances=torch.from_numpy(words.importances),
        indices=torch.from_numpy(profile.indices),
        numbers=torch.from_numpy(profile.numbers),
        crosses=torch.from_numpy(_cross_buckets(words, profile.indices[:, places])),
        history=torch.from_numpy(history),
    )


def last_codes(
    histories: Sequence[Sequence[ndarray] | ndarray], *, last: int, levels: int
) -> Int64[ndarray, "queries last levels"]:
    """The codes of the `last` documents of each history, the latest in the last place; -1 fills the front."""
    out = np.full((len(histories), last, levels), -1, np.int64)
    for row, history in enumerate(histories):
        for place, codes in enumerate(reversed(history[-last:]), 1):
            out[row, -place] = codes
    return out


def codes_of(semantic_id: str, levels: int, size: int) -> Int64[ndarray, " levels"] | None:
    """The codes of a semantic ID "c0-c1-...-suffix"; None when it is not of these codebooks."""
    parts = semantic_id.split("-")
    if len(parts) != levels + 1 or not all(part.isdecimal() for part in parts):
        return None
    codes = np.array(parts[:levels], np.int64)
    return codes if (codes < size).all() else None


def _cross_buckets(words: ImportantWords, indices: ndarray) -> Int64[ndarray, "queries crosses"]:
    """A bucket for each pair of a query's most important word and a profile value; -1: one is missing."""
    if not indices.shape[1]:
        return np.zeros(indices.shape, np.int64)
    # The multipliers are those of splitmix64.
    mixed = words.hashes[:, :1] ^ (
        (indices.astype(np.uint64) + np.arange(1, 1 + indices.shape[1], dtype=np.uint64) * np.uint64(1 << 32))
        * np.uint64(0x9E3779B97F4A7C15)
    )
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    valid = (words.importances[:, :1] != NO_WORD) & (indices != MISSING_INDEX)
    return np.where(valid, (mixed >> np.uint64(20)) % np.uint64(CROSS_BUCKETS), -1).astype(np.int64)
