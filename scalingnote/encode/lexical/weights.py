"""BM25 term weights (impacts) of documents, and the ranking by them over a corpus in shards.

    impact(word, document) = idf(word) * saturation(word, document)
    idf(word)              = ln(1 + (documents - df + 0.5) / (df + 0.5))
    saturation             = tf / (tf + k1 * (1 - b + b * length / mean length))

The inner product of impacts and the counts of a query's words is the BM25 score. The factor k1 + 1 of the
original formula is left out, as in Lucene: it changes no ranking.

    texts ─► shard: for each word the rows and impacts of its documents ─search─► its best documents

Each shard is searched separately, with the word frequencies of the entire corpus. Impacts are added in
float32 and in the order of a query's words, so a score does not depend on the shards or on other documents.
Scores equal those of bm25s over all texts (:mod:`scalingnote.core.bm25`), bit for bit. The loop is compiled
by numba: numpy takes ten times as long, and the loop of the hybrid index (index/sparse.py) uses float16.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import no_type_check

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray
from scipy.sparse import csr_array, vstack

from scalingnote.core.bm25 import terms
from scalingnote.core.topk import jit
from scalingnote.core.words import Language
from scalingnote.storage.arrow import take_documents
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import SPARSE

VOCABULARY = "vocabulary.parquet"  # WORDS (words.py) in the order of their numbers
COLLECTION = "collection.json"
_BATCH_TEXTS = 4096


class BM25Weights:
    """Weights of words by the statistics of a collection. Thread-safe."""

    def __init__(
        self,
        words: pa.Table,
        *,
        documents: int,
        length: int,
        k1: float,
        b: float,
        language: Language = "none",
    ) -> None:
        """Compute weights from the statistics of a collection.

        Args:
            words: the vocabulary, of the schema WORDS.
            documents: number of documents.
            length: number of words in all documents.
            k1: term saturation.
            b: length normalisation, 0 to 1.
            language: of the words.
        """
        self.words = words["word"]
        self._number_of = {word: number for number, word in enumerate(self.words.to_pylist())}
        frequency = words["documents"].to_numpy()
        self.idf: Float64[ndarray, " words"] = np.log1p((documents - frequency + 0.5) / (frequency + 0.5))
        self._mean_length, self._k1, self._b = length / documents, k1, b
        self.language: Language = language

    @classmethod
    def of(cls, bm25_terms: Artifact) -> "BM25Weights":
        """Load the weights of an artifact of the bm25 stage, for further documents."""
        constants = {name: bm25_terms.manifest.config[name] for name in ("k1", "b")}
        return cls(bm25_terms.table(VOCABULARY), **bm25_terms.read_json(COLLECTION), **constants)

    def columns(self, texts: Sequence[str]) -> pa.Table:
        """Compute terms and impacts of texts, in the schema SPARSE; terms ascend in each row.

        Words outside the vocabulary, and impacts that float16 rounds to 0, are left out.
        """
        tables = [SPARSE.empty_table()]
        for batch in self.saturations(texts):
            impacts = (self.idf[batch.indices] * batch.data).astype(np.float16)
            positive = impacts > 0
            offsets = np.concatenate([[0], positive.cumsum()])[batch.indptr].astype(np.int32)
            values = (pa.array(batch.indices[positive].astype(np.int32)), pa.array(impacts[positive]))
            lists = [pa.ListArray.from_arrays(offsets, column) for column in values]
            tables.append(pa.table(lists, schema=SPARSE))
        return pa.concat_tables(tables).combine_chunks()

    def saturations(self, texts: Sequence[str]) -> Iterator[csr_array]:
        """Yield the saturation of each word of the vocabulary in each text, by batches of texts."""
        for start in range(0, len(texts), _BATCH_TEXTS):
            yield self._saturations(texts[start : start + _BATCH_TEXTS])

    def _saturations(self, texts: Sequence[str]) -> csr_array:
        number_of, lengths, word_counts = self._number_of.get, [], []
        numbers = array("q")
        for text in texts:
            words = terms(text, self.language)
            before = len(numbers)
            numbers.extend([number for word in words if (number := number_of(word)) is not None])
            lengths.append(len(words))
            word_counts.append(len(numbers) - before)
        rows = np.repeat(np.arange(len(texts), dtype=np.int64), word_counts)
        entries = rows * len(self.idf) + np.frombuffer(numbers, np.int64)
        distinct, counts = np.unique(entries, return_counts=True)
        rows, words_of = np.divmod(distinct, len(self.idf))
        relative = self._b * np.array(lengths, np.float64)[rows] / self._mean_length
        saturation = counts / (self._k1 * (1 - self._b + relative) + counts)
        offsets = np.concatenate([[0], np.bincount(rows, minlength=len(texts)).cumsum()])
        return csr_array((saturation, words_of, offsets), shape=(len(texts), len(self.idf)))


def read_columns(artifact: Artifact, part: str, doc_ids: pa.ChunkedArray) -> pa.Table:
    """Read terms and impacts of documents of one part, in the schema SPARSE and the order of `doc_ids`.

    Args:
        artifact: of kind `bm25_terms`.
        part: name of the part without its folder, the same as the name of the part of documents.
        doc_ids: documents of this part.

    Raises:
        ArtifactError: a document is not in the part: the artifacts were built from different datasets.
    """
    missing = f"terms in {artifact.uri}: it was built from another dataset"
    table = take_documents(artifact.table(f"terms/{part}"), doc_ids, missing=missing)
    return table.select(SPARSE.names)


# --- ranking by shards ------------------------------------------------------------------------------

SHARD = pa.schema(
    {
        "word": pa.string(),
        "rows": pa.large_list(pa.int32()),  # of the documents that have it, ascending
        "impacts": pa.large_list(pa.float32()),
    }
)


def build_shard(texts: Sequence[str], weights: BM25Weights) -> pa.Table:
    """Build the inverted lists of texts, in the schema SHARD.

    Args:
        texts: row i of every answer is ``texts[i]``; about 100,000, so that their scores fit a core's cache.
        weights: of the entire corpus.
    """
    # Rounded like in bm25s: the inverse document frequency before the product, and then the product.
    idf = weights.idf.astype(np.float32)
    pieces = [csr_array((0, len(idf)), dtype=np.float32)]
    for batch in weights.saturations(texts):
        impacts = (idf[batch.indices] * batch.data).astype(np.float32)
        pieces.append(csr_array((impacts, batch.indices, batch.indptr), shape=batch.shape))
    by_word = vstack(pieces, format="csr").tocsc()
    present = np.flatnonzero(np.diff(by_word.indptr))
    offsets = np.append(by_word.indptr[present], by_word.indptr[-1]).astype(np.int64)
    values = (pa.array(by_word.indices.astype(np.int32)), pa.array(by_word.data))
    lists = [pa.LargeListArray.from_arrays(offsets, column) for column in values]
    return pa.table([weights.words.take(pa.array(present)), *lists], schema=SHARD)


def search(
    shards: Iterable[tuple[int, pa.Table]], queries: Sequence[str], k: int, *, language: Language = "none"
) -> tuple[Int64[ndarray, "queries k"], Float32[ndarray, "queries k"]]:
    """Find rows and scores of each query's `k` best texts, best first, ties by row; -1 and -inf for none.

    Args:
        shards: tables SHARD, each with the number of its first row, ascending. One is held at a time, and
            only the necessary lists are read; the table may be a memory map.
        queries: texts.
        k: rows per query.
        language: that of the shards' words.
    """
    split = [terms(query, language) for query in queries]
    flat = pa.array([term for words in split for term in words], pa.string())
    bounds = np.array([*accumulate(map(len, split), initial=0)], np.int64)
    rows, scores = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32)
    for first, shard in shards:
        documents, impacts = (shard[name].combine_chunks() for name in ("rows", "impacts"))
        offsets = documents.offsets.to_numpy()
        # A word that the shard lacks has the empty list after the last one.
        lists = pc.fill_null(pc.index_in(flat, shard["word"].combine_chunks()), len(shard)).to_numpy()
        values = documents.values.to_numpy()
        totals = np.zeros(int(values.max(initial=-1)) + 1, np.float32)
        ends = np.append(offsets, offsets[-1:])
        _search(bounds, lists, ends, values, impacts.values.to_numpy(), totals, first, rows, scores)
    return rows, scores


@jit
@no_type_check
def _search(bounds, lists, offsets, documents, impacts, totals, first, rows, scores):
    k = rows.shape[1]
    for q in range(len(rows)):
        words = lists[bounds[q] : bounds[q + 1]]
        for word in words:
            for entry in range(offsets[word], offsets[word + 1]):
                totals[documents[entry]] += impacts[entry]
        hits = 0
        while hits < k and rows[q, hits] >= 0:
            hits += 1
        for word in words:
            for entry in range(offsets[word], offsets[word + 1]):
                score, row = totals[documents[entry]], first + documents[entry]
                totals[documents[entry]] = 0  # for the next query; further words of this query skip the row
                if score == 0 or (hits == k and _behind(score, row, scores[q, k - 1], rows[q, k - 1])):
                    continue
                place = min(hits, k - 1)
                hits = place + 1
                while place > 0 and _behind(scores[q, place - 1], rows[q, place - 1], score, row):
                    scores[q, place], rows[q, place] = scores[q, place - 1], rows[q, place - 1]
                    place -= 1
                scores[q, place], rows[q, place] = score, row


@jit
@no_type_check
def _behind(score, row, other_score, other_row):
    return score < other_score or (score == other_score and row > other_row)
