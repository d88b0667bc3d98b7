"""Queries as sparse vectors without a model: which tokens occur, and how often (LightRetriever, Eq. 7).

    text ─► tokens of the document tower's vocabulary ─► one row of a sparse matrix per query

Saved, it is a folder: ``sparse_query.json`` and ``tokenizer.json``. No weights, and no torch to read it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32, Int64
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.errors import ArtifactError
from scalingnote.models.prompt import tokenize

SETTINGS = "sparse_query.json"
Weighting = Literal["counts", "binary"]


@dataclass(frozen=True)
class SparseRows:
    """Rows of a sparse matrix: row i holds entries offsets[i] to offsets[i + 1], by ascending term."""

    offsets: Int64[ndarray, " bounds"]
    terms: Int32[ndarray, " entries"]
    values: Float32[ndarray, " entries"]


class SparseQuery:
    """What turns a query into terms and their weights."""

    def __init__(
        self, tokenizer: Tokenizer, *, max_length: int, weighting: Weighting, lowercase: bool = False
    ) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer, self._max_length = tokenizer, max_length
        self._weighting, self._lowercase = weighting, lowercase

    @property
    def vocabulary(self) -> int:
        """How many terms there are."""
        return self._tokenizer.get_vocab_size()

    def tokens(self, queries: Sequence[str]) -> list[list[int]]:
        """Terms of each query in their order, with repetition; those behind `max_length` are not read."""
        texts = [query.lower() for query in queries] if self._lowercase else queries
        return [ids[: self._max_length] for ids in tokenize(self._tokenizer, texts, self._max_length)]

    def encode(self, queries: Sequence[str]) -> SparseRows:
        """One row per query; that of an empty query has no entry."""
        found = [np.unique(np.array(ids, np.int32), return_counts=True) for ids in self.tokens(queries)]
        terms = np.concatenate([np.empty(0, np.int32), *(terms for terms, _ in found)])
        counts = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in found)])
        values = counts if self._weighting == "counts" else np.ones_like(counts)
        offsets = np.array([0, *accumulate(len(terms) for terms, _ in found)], dtype=np.int64)
        return SparseRows(offsets, terms, values.astype(np.float32))

    def save(self, folder: Path) -> None:
        """Write the folder; equal settings give equal bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = {
            "max_length": self._max_length,
            "weighting": self._weighting,
            "lowercase": self._lowercase,
        }
        (folder / SETTINGS).write_text(json.dumps(facts, indent=1) + "\n")
        (folder / "tokenizer.json").write_text(self._tokenizer.to_str(), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "SparseQuery":
        """Read a folder written by :meth:`save`; ArtifactError when it is not one."""
        try:
            facts = json.loads((folder / SETTINGS).read_text())
            tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} holds no sparse query: {error.filename} is missing") from None
        return cls(Tokenizer.from_str(tokenizer), **facts)
