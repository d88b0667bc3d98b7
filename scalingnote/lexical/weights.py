"""BM25 impacts: texts of documents go in, their words as terms and weights come out.

    impact(word, document) = idf(word) * tf / (tf + k1 * (1 - b + b * length / mean length))
    idf(word)              = ln(1 + (documents - df + 0.5) / (df + 0.5))

An inner product of impacts with the counts of a query's words is its BM25 score. The factor k1 + 1 of the
original formula is left out, as in Lucene: it changes no ranking.
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float64
from numpy import ndarray

from scalingnote.analyzer import terms
from scalingnote.errors import ArtifactError
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import SPARSE

VOCABULARY = "vocabulary.parquet"  # words in the order of their numbers, and in how many documents each is
COLLECTION = "collection.json"
WORDS = pa.schema({"word": pa.string(), "documents": pa.int64()})
TEXTS_AT_ONCE = 4096


class Weights:
    """Statistics of a collection, and what BM25 makes of a text by them. Threads may share one."""

    def __init__(
        self,
        vocabulary: Mapping[str, int],
        idf: Float64[ndarray, " words"],
        *,
        mean_length: float,
        k1: float,
        b: float,
    ) -> None:
        """Take the statistics.

        Args:
            vocabulary: word -> its number.
            idf: inverse document frequency of each word, by number.
            mean_length: mean number of words of a document; above 0.
            k1: term saturation.
            b: length normalisation, 0 to 1.
        """
        self._vocabulary, self._idf = vocabulary, idf
        self._mean_length, self._k1, self._b = mean_length, k1, b

    @classmethod
    def of(cls, words: pa.Table, *, documents: int, length: int, k1: float, b: float) -> "Weights":
        """The weights by a vocabulary as WORDS has it.

        Args:
            words: each word and in how many documents it is.
            documents: number of documents.
            length: number of words in all of them together.
            k1: term saturation.
            b: length normalisation, 0 to 1.
        """
        vocabulary = {word: number for number, word in enumerate(words["word"].to_pylist())}
        found = words["documents"].to_numpy()
        idf = np.log1p((documents - found + 0.5) / (found + 0.5))
        return cls(vocabulary, idf, mean_length=length / documents, k1=k1, b=b)

    @classmethod
    def load(cls, artifact: Artifact) -> "Weights":
        """Those of an artifact `bm25_terms`; later documents are weighted by its statistics, too."""
        config = artifact.manifest.config
        words, collection = artifact.table(VOCABULARY), artifact.read_json(COLLECTION)
        return cls.of(words, **collection, k1=config["k1"], b=config["b"])

    def columns(self, texts: Sequence[str]) -> pa.Table:
        """A row for each text with the columns of ``storage.schema.SPARSE``: words ascending by number.

        Words outside of the vocabulary, and impacts that float16 rounds to 0, are left out.
        """
        pieces = [
            self._columns(texts[start : start + TEXTS_AT_ONCE])
            for start in range(0, len(texts), TEXTS_AT_ONCE)
        ]
        return pa.concat_tables([SPARSE.empty_table(), *pieces]).combine_chunks()

    def _columns(self, texts: Sequence[str]) -> pa.Table:
        known, lengths, found = self._vocabulary.get, [], []
        numbers = array("q")
        for text in texts:
            words = terms(text)
            before = len(numbers)
            numbers.extend([number for word in words if (number := known(word)) is not None])
            lengths.append(len(words))
            found.append(len(numbers) - before)
        rows = np.repeat(np.arange(len(texts), dtype=np.int64), found)
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


def columns_of(artifact: Artifact, part: str, doc_ids: pa.ChunkedArray) -> pa.Table:
    """The columns of ``storage.schema.SPARSE`` for documents of one part, in the order of `doc_ids`.

    Args:
        artifact: of kind `bm25_terms`.
        part: name of the part without its folder, as that of the documents.
        doc_ids: documents of this part.

    Raises:
        ArtifactError: a document is not in the part, so the artifacts are of different datasets.
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
