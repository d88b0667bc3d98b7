"""BM25 term weights (impacts) of documents.

    impact(word, document) = idf(word) * saturation(word, document)
    idf(word)              = ln(1 + (documents - df + 0.5) / (df + 0.5))
    saturation             = tf / (tf + k1 * (1 - b + b * length / mean length))

The inner product of impacts and the counts of a query's words is the BM25 score. The factor k1 + 1 of the
original formula is left out, as in Lucene: it changes no ranking.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64, Int32, Int64
from numpy import ndarray

from scalingnote.bm25 import terms
from scalingnote.errors import ArtifactError
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import SPARSE

VOCABULARY = "vocabulary.parquet"  # WORDS (frequencies.py) in the order of their numbers
COLLECTION = "collection.json"
_BATCH_TEXTS = 4096


class Occurrences(NamedTuple):
    """The different words of some texts, by text, then by number of the word."""

    texts: int
    rows: Int64[ndarray, " entries"]  # of the texts
    words: Int32[ndarray, " entries"]  # numbers of the words
    saturation: Float64[ndarray, " entries"]


class BM25Weights:
    """Weights words by the statistics of a collection. Thread-safe."""

    def __init__(self, words: pa.Table, *, documents: int, length: int, k1: float, b: float) -> None:
        """Compute weights from the statistics of a collection.

        Args:
            words: the vocabulary, of the schema WORDS.
            documents: number of documents.
            length: number of words in all documents.
            k1: term saturation.
            b: length normalisation, 0 to 1.
        """
        self._number_of = {word: number for number, word in enumerate(words["word"].to_pylist())}
        frequency = words["documents"].to_numpy()
        self.idf: Float64[ndarray, " words"] = np.log1p((documents - frequency + 0.5) / (frequency + 0.5))
        self._mean_length, self._k1, self._b = length / documents, k1, b

    @classmethod
    def load(cls, artifact: Artifact) -> "BM25Weights":
        """The weights of an artifact `bm25_terms`, for documents added later."""
        config = artifact.manifest.config
        words, collection = artifact.table(VOCABULARY), artifact.read_json(COLLECTION)
        return cls(words, **collection, k1=config["k1"], b=config["b"])

    def columns(self, texts: Sequence[str]) -> pa.Table:
        """Terms and impacts of texts, in the schema SPARSE; terms ascend in each row.

        Words outside the vocabulary, and impacts that float16 rounds to 0, are left out.
        """
        return pa.concat_tables(
            [SPARSE.empty_table(), *map(self._columns, self.occurrences(texts))]
        ).combine_chunks()

    def occurrences(self, texts: Sequence[str]) -> Iterator[Occurrences]:
        """The words of texts that are in the vocabulary, for some thousand texts at a time."""
        for start in range(0, len(texts), _BATCH_TEXTS):
            yield self._occurrences(texts[start : start + _BATCH_TEXTS])

    def _columns(self, found: Occurrences) -> pa.Table:
        impacts = (self.idf[found.words] * found.saturation).astype(np.float16)
        kept = impacts > 0
        offsets = np.concatenate([[0], np.bincount(found.rows[kept], minlength=found.texts).cumsum()])
        values = (pa.array(found.words[kept]), pa.array(impacts[kept]))
        lists = [pa.ListArray.from_arrays(offsets.astype(np.int32), column) for column in values]
        return pa.table(lists, schema=SPARSE)

    def _occurrences(self, texts: Sequence[str]) -> Occurrences:
        number_of, lengths, known = self._number_of.get, [], []
        numbers = array("q")
        for text in texts:
            words = terms(text)
            before = len(numbers)
            numbers.extend([number for word in words if (number := number_of(word)) is not None])
            lengths.append(len(words))
            known.append(len(numbers) - before)
        rows = np.repeat(np.arange(len(texts), dtype=np.int64), known)
        entries = rows * len(self.idf) + np.frombuffer(numbers, np.int64)
        distinct, counts = np.unique(entries, return_counts=True)
        rows, words_of = np.divmod(distinct, len(self.idf))
        relative = self._b * np.array(lengths, np.float64)[rows] / self._mean_length
        saturation = counts / (self._k1 * (1 - self._b + relative) + counts)
        return Occurrences(len(texts), rows, words_of.astype(np.int32), saturation)


def read_columns(artifact: Artifact, part: str, doc_ids: pa.ChunkedArray) -> pa.Table:
    """Terms and impacts of documents of one part, in the schema SPARSE and the order of `doc_ids`.

    Args:
        artifact: of kind `bm25_terms`.
        part: name of the part without its folder, the same as that of the documents.
        doc_ids: documents of this part.

    Raises:
        ArtifactError: a document is not in the part, so the artifacts were built from different datasets.
    """
    table = artifact.table(f"terms/{part}")
    rows = pc.index_in(doc_ids, table["doc_id"].combine_chunks())
    if rows.null_count:
        first = doc_ids.filter(rows.is_null())[0].as_py()
        raise ArtifactError(
            f"{artifact.uri} has no terms of {rows.null_count} documents, first {first!r}: it was built from "
            "another dataset"
        )
    return table.select(SPARSE.names).take(rows)
