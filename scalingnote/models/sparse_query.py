"""Queries as sparse vectors of token counts, without a model (LightRetriever, Eq. 7).

    text -> tokens of the document tower's vocabulary -> one row of a sparse matrix per query

For BM25 a term is a word, or its stem in the language of the documents: the analyzer splits the text, and
words outside of the vocabulary are dropped. A saved SparseQuery is a folder with ``sparse_query.json`` and
``tokenizer.json``; no torch is needed to read it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int32, Int64
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.core.bm25 import ANALYZER, terms
from scalingnote.core.errors import ArtifactError
from scalingnote.core.words import Language
from scalingnote.models.prompt import tokenize, without_limits

SETTINGS = "sparse_query.json"
Weighting = Literal["counts", "binary"]
# "tokenizer": the tokenizer splits a text. "words": scalingnote.core.bm25 splits it, and the terms are looked
# up in the tokenizer's vocabulary.
Analysis = Literal["tokenizer", "words"]


@dataclass(frozen=True)
class SparseRows:
    """Rows of a sparse matrix: row i holds entries offsets[i] to offsets[i + 1], by ascending term."""

    offsets: Int64[ndarray, " bounds"]
    terms: Int32[ndarray, " entries"]
    values: Float32[ndarray, " entries"]

    def take(self, rows: Sequence[int]) -> "SparseRows":
        """Return the rows with these numbers."""
        bounds = [slice(*self.offsets[row : row + 2].tolist()) for row in rows]
        lengths = [bound.stop - bound.start for bound in bounds]
        terms = np.concatenate([self.terms[:0], *(self.terms[bound] for bound in bounds)])
        values = np.concatenate([self.values[:0], *(self.values[bound] for bound in bounds)])
        return SparseRows(np.cumsum([0, *lengths]), terms, values)


def needs_leading_space(tokenizer: Tokenizer) -> bool:
    """Return whether a word has another token at the start of a text than inside of it, as in byte-level BPE.

    Without a space before it, the first token of a query hardly ever occurs in a document. LightRetriever's
    authors tokenize " " + query, too.
    """
    splits = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    steps = splits.get("pretokenizers", [splits])
    return any(step.get("type") == "ByteLevel" and not step["add_prefix_space"] for step in steps)


class SparseQuery:
    """Converter of queries to terms and their weights."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        weighting: Weighting,
        leading_space: bool = False,
        analysis: Analysis = "tokenizer",
        language: Language = "none",
    ) -> None:
        """Make a converter.

        Args:
            tokenizer: holds the vocabulary, and splits texts if `analysis` is "tokenizer".
            max_length: terms read of a query; later ones are dropped.
            weighting: the value of a term: its count, or 1.
            leading_space: whether a space is put before a text, see :func:`needs_leading_space`.
            analysis: how a text is split into terms.
            language: language of the words, if `analysis` is "words".
        """
        self._tokenizer, self.max_length = without_limits(tokenizer), max_length
        self._weighting, self._analysis = weighting, analysis
        self.language: Language = language
        self._ahead = " " if leading_space else ""

    @property
    def vocabulary(self) -> int:
        """Number of terms."""
        return self._tokenizer.get_vocab_size()

    def length(self, query: str) -> int:
        """Count the terms of a query, including those beyond `max_length`."""
        if self._analysis == "words":
            return len(terms(query, self.language))
        return len(self._tokenizer.encode(self._read(query), add_special_tokens=False).ids)

    def tokens(self, queries: Sequence[str]) -> list[list[int]]:
        """Return the first `max_length` terms of each query in order, with repetitions."""
        if self._analysis == "words":
            return [self._words(query) for query in queries]
        texts = list(map(self._read, queries))
        return [ids[: self.max_length] for ids in tokenize(self._tokenizer, texts, self.max_length)]

    def encode(self, queries: Sequence[str]) -> SparseRows:
        """Return one row per query; the row of an empty query has no entries."""
        query_counts = [
            np.unique(np.array(ids, np.int32), return_counts=True) for ids in self.tokens(queries)
        ]
        terms = np.concatenate([np.empty(0, np.int32), *(terms for terms, _ in query_counts)])
        counts = np.concatenate([np.empty(0, np.int64), *(counts for _, counts in query_counts)])
        values = counts if self._weighting == "counts" else np.ones_like(counts)
        offsets = np.array([0, *accumulate(len(terms) for terms, _ in query_counts)], dtype=np.int64)
        return SparseRows(offsets, terms, values.astype(np.float32))

    def save(self, folder: Path) -> None:
        """Write the folder; equal settings give equal bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        facts: dict[str, Any] = {
            "max_length": self.max_length,
            "weighting": self._weighting,
            "leading_space": bool(self._ahead),
            "analysis": self._analysis,
        }
        if self._analysis == "words":
            facts |= {"analyzer": ANALYZER, "language": self.language}
        (folder / SETTINGS).write_text(json.dumps(facts, indent=1) + "\n")
        (folder / "tokenizer.json").write_text(self._tokenizer.to_str(), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "SparseQuery":
        """Read a folder written by :meth:`save`.

        Raise ArtifactError if `folder` is not one, or if its documents were split into words by another
        version of the analyzer: queries would then miss terms without an error.
        """
        try:
            facts = json.loads((folder / SETTINGS).read_text())
            tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ArtifactError(f"{folder} holds no sparse query: {error.filename} is missing") from None
        analyzer = facts.pop("analyzer", 1)
        if facts.get("analysis") == "words" and analyzer not in (2, ANALYZER):  # 2: as with language none
            raise ArtifactError(
                f"the documents of {folder} were split into words by version {analyzer} of the analyzer, "
                f"but queries are split by version {ANALYZER}: build bm25 and index again"
            )
        if facts.pop("lowercase", False):
            raise ArtifactError(
                f"{folder} was saved by an earlier version, which lower-cased only queries: train it again "
                "and set lowercase of its backbones"
            )
        return cls(Tokenizer.from_str(tokenizer), **facts)

    def _read(self, query: str) -> str:
        return self._ahead + query if query else query

    def _words(self, query: str) -> list[int]:
        """Return the ids of the query's words that are in the vocabulary."""
        ids = map(self._tokenizer.token_to_id, terms(query, self.language)[: self.max_length])
        return [word for word in ids if word is not None]
