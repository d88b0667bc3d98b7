"""BM25 over a corpus in shards: each is searched alone, by the word frequencies of the whole corpus.

    texts ─► shard: of each word the rows and impacts of its documents ─search─► its best documents

Impacts are added in float32 and in the order of a query's words, so a score depends neither on the shards nor
on other documents: they are those of bm25s over all texts (:mod:`scalingnote.bm25`), bit for bit. The loop is
compiled by numba: numpy takes ten times as long, and the hybrid index's own (index/sparse.py) has float16.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import no_type_check

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, Int64
from numpy import ndarray
from scipy.sparse import csr_array, vstack

from scalingnote.bm25 import terms
from scalingnote.jit import compiled
from scalingnote.lexical.weights import BM25Weights, Occurrences

SHARD = pa.schema(
    {
        "word": pa.string(),
        "rows": pa.large_list(pa.int32()),  # of the documents that have it, ascending
        "impacts": pa.large_list(pa.float32()),
    }
)


def build_shard(texts: Sequence[str], weights: BM25Weights, words: pa.ChunkedArray) -> pa.Table:
    """The inverted lists of texts, in the schema SHARD.

    Args:
        texts: row i of every answer is ``texts[i]``; some 100,000, whose scores fit a core's cache.
        weights: of the whole corpus.
        words: the vocabulary of `weights`.
    """
    pieces = [_matrix(found, weights) for found in weights.occurrences(texts)]
    empty = csr_array((0, len(words)), dtype=np.float32)
    by_word = vstack([empty, *pieces], format="csr").tocsc()
    present = np.flatnonzero(np.diff(by_word.indptr))
    offsets = np.append(by_word.indptr[present], by_word.indptr[-1]).astype(np.int64)
    values = (pa.array(by_word.indices.astype(np.int32)), pa.array(by_word.data))
    lists = [pa.LargeListArray.from_arrays(offsets, column) for column in values]
    return pa.table([words.take(pa.array(present)), *lists], schema=SHARD)


def search(
    shards: Iterable[tuple[int, pa.Table]], queries: Sequence[str], k: int
) -> tuple[Int64[ndarray, "queries k"], Float32[ndarray, "queries k"]]:
    """Rows and scores of each query's `k` best texts, best first, equal ones by row; -1 and -inf for none.

    Args:
        shards: tables SHARD, each with the number of its first row, ascending. One is held at a time, and its
            lists are read where they are needed, which may be a memory map.
        queries: texts.
        k: rows per query.
    """
    split = [terms(query) for query in queries]
    flat = pa.array([term for words in split for term in words], pa.string())
    bounds = np.array([*accumulate(map(len, split), initial=0)], np.int64)
    rows, scores = np.full((len(queries), k), -1), np.full((len(queries), k), -np.inf, np.float32)
    for first, shard in shards:
        documents, impacts = (shard[name].combine_chunks() for name in ("rows", "impacts"))
        offsets = documents.offsets.to_numpy()
        # A word that the shard lacks gets the empty list behind the last one.
        lists = pc.fill_null(pc.index_in(flat, shard["word"].combine_chunks()), len(shard)).to_numpy()
        values = documents.values.to_numpy()
        totals = np.zeros(int(values.max(initial=-1)) + 1, np.float32)
        bounds_of_lists = np.append(offsets, offsets[-1:])
        _search(
            bounds, lists, bounds_of_lists, values, impacts.values.to_numpy(), totals, first, rows, scores
        )
    return rows, scores


def _matrix(found: Occurrences, weights: BM25Weights) -> csr_array:
    # As bm25s computes it: the inverse document frequency is rounded before, the product after.
    impacts = (weights.idf.astype(np.float32)[found.words] * found.saturation).astype(np.float32)
    offsets = np.concatenate([[0], np.bincount(found.rows, minlength=found.texts).cumsum()])
    return csr_array((impacts, found.words, offsets), shape=(found.texts, len(weights.idf)))


@compiled
@no_type_check
def _search(bounds, lists, offsets, documents, impacts, totals, first, rows, scores):
    k = rows.shape[1]
    for q in range(len(rows)):
        words = lists[bounds[q] : bounds[q + 1]]
        for word in words:
            for entry in range(offsets[word], offsets[word + 1]):
                totals[documents[entry]] += impacts[entry]
        kept = 0
        while kept < k and rows[q, kept] >= 0:
            kept += 1
        for word in words:
            for entry in range(offsets[word], offsets[word + 1]):
                score, row = totals[documents[entry]], first + documents[entry]
                totals[documents[entry]] = 0  # for the next query; further words of this one skip the row
                if score == 0 or (kept == k and _behind(score, row, scores[q, k - 1], rows[q, k - 1])):
                    continue
                place = min(kept, k - 1)
                kept = place + 1
                while place > 0 and _behind(scores[q, place - 1], rows[q, place - 1], score, row):
                    scores[q, place], rows[q, place] = scores[q, place - 1], rows[q, place - 1]
                    place -= 1
                scores[q, place], rows[q, place] = score, row


@compiled
@no_type_check
def _behind(score, row, other_score, other_row):
    return score < other_score or (score == other_score and row > other_row)
