"""BM25 over a pool, without an index: documents are weighed in the tasks that search them.

    texts ─► document frequencies of the queries' words ─► idf
      └────► counts of the queries' words ─► impacts, in the search itself

Texts are split into words twice, so that nothing is stored between both passes, and only words of queries are
counted: the caller holds their frequencies alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray
from scipy.sparse import csr_array

from scalingnote.bm25 import terms
from scalingnote.errors import DataError
from scalingnote.evaluate.pool import Pool, PoolPart
from scalingnote.evaluate.scores import TermScores
from scalingnote.log import Progress
from scalingnote.storage.shuffle import TaskRunner


@dataclass(frozen=True)
class Bm25Pool:
    """Statistics of a pool for the words of given queries (Lucene's variant of BM25)."""

    vocabulary: Mapping[str, int]
    idf: Float64[ndarray, " words"]
    mean_length: float
    k1: float
    b: float

    @classmethod
    def count(
        cls, pool: Pool, queries: Sequence[str], *, k1: float = 1.2, b: float = 0.75, each: TaskRunner = map
    ) -> "Bm25Pool":
        """Count the words of queries in a pool.

        Args:
            pool: documents, without those that have no embedding.
            queries: all that will be searched or scored.
            k1: term saturation.
            b: length normalisation.
            each: runs the tasks.

        Raises:
            DataError: no document has a word.
        """
        words = dict.fromkeys(word for query in queries for word in terms(query))
        vocabulary = {word: number for number, word in enumerate(words)}
        documents = length = 0
        frequency = np.zeros(len(vocabulary), np.int64)
        total = pool.embeddings.counts["documents"]
        with Progress("evaluate", total=total, unit="documents counted for BM25") as progress:
            for read, number, size, found in each(
                partial(_count_group, pool=pool, vocabulary=vocabulary), pool.groups()
            ):
                documents, length, frequency = documents + number, length + size, frequency + found
                progress.advance(read)
        if not length:
            raise DataError(
                f"none of {documents:,} documents of {pool.embeddings.uri} has a word for BM25: check title, "
                "topic and content, or set evaluate.bm25=false"
            )
        idf = np.log1p((documents - frequency + 0.5) / (frequency + 0.5))
        return cls(vocabulary, idf, length / documents, k1, b)

    def scores(self, queries: Sequence[str]) -> TermScores:
        """Scores by BM25; words outside of the counted queries are ignored."""
        counts, _ = word_counts(queries, self.vocabulary)
        return TermScores(counts.astype(np.float32), self._impacts, ("doc_id",))

    def _impacts(self, part: PoolPart) -> Any:
        counts, lengths = word_counts(part.texts(), self.vocabulary)
        rows = np.repeat(np.arange(len(lengths)), np.diff(counts.indptr))
        relative = lengths[rows] / self.mean_length
        saturated = counts.data / (counts.data + self.k1 * (1 - self.b + self.b * relative))
        impacts = (self.idf[counts.indices] * saturated).astype(np.float32)
        return csr_array((impacts, counts.indices, counts.indptr), shape=counts.shape)


def word_counts(texts: Sequence[str], vocabulary: Mapping[str, int]) -> tuple[Any, Int64[ndarray, " texts"]]:
    """How often each text has each word, as a csr_array [texts, words], and the lengths of texts in words."""
    numbers: list[int] = []
    offsets, lengths = [0], []
    for text in texts:
        words = terms(text)
        numbers += [number for word in words if (number := vocabulary.get(word)) is not None]
        offsets.append(len(numbers))
        lengths.append(len(words))
    shape = (len(texts), len(vocabulary))
    counts = csr_array((np.ones(len(numbers)), np.array(numbers, np.int64), np.array(offsets)), shape=shape)
    counts.sum_duplicates()
    return counts, np.array(lengths, np.int64)


def _count_group(
    group: list[str], *, pool: Pool, vocabulary: Mapping[str, int]
) -> tuple[int, int, int, Int64[ndarray, " words"]]:
    """Documents read and counted, their length in words, and the document frequency of each word."""
    documents = length = 0
    frequency = np.zeros(len(vocabulary), np.int64)
    for part in pool.read(group, ["doc_id"]):
        counts, lengths = word_counts(part.texts(), vocabulary)
        documents, length = documents + len(part), length + int(lengths.sum())
        frequency += np.bincount(counts.indices, minlength=len(vocabulary))
    return sum(pool.embeddings.rows_of(group).values()), documents, length, frequency
