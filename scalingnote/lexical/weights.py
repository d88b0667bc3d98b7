"""BM25 term weights (impacts) of documents.

    impact(word, document) = idf(word) * tf / (tf + k1 * (1 - b + b * length / mean length))
    idf(word)              = ln(1 + (documents - df + 0.5) / (df + 0.5))

The inner product of impacts and the counts of a query's words is the BM25 score. The factor k1 + 1 of the
original formula is left out, as in Lucene: it changes no ranking.
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64
from numpy import ndarray

from scalingnote.bm25 import terms
from scalingnote.errors import ArtifactError
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import SPARSE

VOCABULARY = "vocabulary.parquet"  # WORDS in the order of their numbers
COLLECTION = "collection.json"
WORDS = pa.schema({"word": pa.string(), "documents": pa.int64()})  # documents: that contain the word
_BATCH_TEXTS = 4096


class BM25Weights:
    """Weights words by the statistics of a collection. Thread-safe."""

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        idf: Float64[ndarray, " words"],
        *,
        mean_length: float,
        k1: float,
        b: float,
    ) -> None:
        self._vocabulary, self._idf = vocabulary, idf
        self._mean_length, self._k1, self._b = mean_length, k1, b

    @classmethod
    def of(cls, words: pa.Table, *, documents: int, length: int, k1: float, b: float) -> "BM25Weights":
        """Compute weights from the statistics of a collection.

        Args:
            words: the vocabulary, of the schema WORDS.
            documents: number of documents.
            length: number of words in all documents.
            k1: term saturation.
            b: length normalisation, 0 to 1.
        """
        vocabulary = {word: number for number, word in enumerate(words["word"].to_pylist())}
        frequency = words["documents"].to_numpy()
        idf = np.log1p((documents - frequency + 0.5) / (frequency + 0.5))
        return cls(vocabulary, idf, mean_length=length / documents, k1=k1, b=b)

    @classmethod
    def load(cls, artifact: Artifact) -> "BM25Weights":
        """The weights of an artifact `bm25_terms`, for documents added later."""
        config = artifact.manifest.config
        words, collection = artifact.table(VOCABULARY), artifact.read_json(COLLECTION)
        return cls.of(words, **collection, k1=config["k1"], b=config["b"])

    def columns(self, texts: Sequence[str]) -> pa.Table:
        """Terms and impacts of texts, in the schema SPARSE; terms ascend in each row.

        Words outside the vocabulary, and impacts that float16 rounds to 0, are left out.
        """
        pieces = [
            self._columns(texts[start : start + _BATCH_TEXTS]) for start in range(0, len(texts), _BATCH_TEXTS)
        ]
        return pa.concat_tables([SPARSE.empty_table(), *pieces]).combine_chunks()

    def _columns(self, texts: Sequence[str]) -> pa.Table:
        number_of, lengths, known = self._vocabulary.get, [], []
        numbers = array("q")
        for text in texts:
            words = terms(text)
            before = len(numbers)
            numbers.extend([number for word in words if (number := number_of(word)) is not None])
            lengths.append(len(words))
            known.append(len(numbers) - before)
        rows = np.repeat(np.arange(len(texts), dtype=np.int64), known)
        entries = rows * len(self._idf) + np.frombuffer(numbers, np.int64)
        distinct, counts = np.unique(entries, return_counts=True)
        rows, words_of = np.divmod(distinct, len(self._idf))
        relative = np.array(lengths, np.float64)[rows] / self._mean_length
        saturated = counts / (counts + self._k1 * (1 - self._b + self._b * relative))
        impacts = (self._idf[words_of] * saturated).astype(np.float16)
        kept = impacts > 0
        offsets = np.concatenate([[0], np.bincount(rows[kept], minlength=len(texts)).cumsum()])
        values = (pa.array(words_of[kept].astype(np.int32)), pa.array(impacts[kept]))
        lists = [pa.ListArray.from_arrays(offsets.astype(np.int32), column) for column in values]
        return pa.table(lists, schema=SPARSE)


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
