"""Exact sparse search by the number of documents: with compiled lists, numpy, and SciPy.

    python -m benchmarks.sparse_index --json docs/results/sparse_index.json

Documents are synthetic: WORDS words of a Zipf vocabulary without its most frequent words, like those of a
learned sparse head or BM25 weights; impacts are log(1 + tf) idf. A query has QUERY_WORDS words of one
document. The figures are processor microseconds of one thread for the 100 best of each query, one query at a
time: medians over rounds in which the forms take turns.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray
from scipy.sparse import csr_array

from benchmarks.report import arguments, run_isolated, show, take_turns, write
from scalingnote.core import topk
from scalingnote.index import postings, sparse
from scalingnote.models.sparse_query import SparseRows

Row = dict[str, Any]
WORDS, QUERY_WORDS, K = 64, 8, 100
VOCABULARY, MOST_FREQUENT = 30_000, 50
QUERIES = {"numba": 200, "numpy": 40, "SciPy": 40}  # of a round
CHUNK_DOCUMENTS = 20_000


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--documents", type=int, nargs="+", default=[10_000, 100_000, 300_000])
    options = parser.parse_args()
    rows = [run_isolated(measure, documents, options.rounds) for documents in options.documents]
    show("Microseconds per query, one at a time", rows)
    last = rows[-1]
    metrics = {f"{name.lower()}_over_numba": last[name] / last["numba"] for name in ("numpy", "SciPy")}
    write(options.json, metrics=metrics | {"numba_us": last["numba"]}, search=rows)


def measure(documents: int, rounds: int) -> Row:
    """Measure the time of a query in each form; AssertionError if their scores differ."""
    by_document = corpus(documents)
    offsets = by_document.indptr.astype(np.int32)
    columns = (by_document.indices, by_document.data.astype(np.float16))
    lists = postings.build(*(pa.ListArray.from_arrays(offsets, pa.array(column)) for column in columns))
    by_term = by_document.T.tocsr()
    sparse.warm()

    def compiled(query: SparseRows) -> ndarray:
        return np.asarray(sparse.search([lists], query, k=K)[1][0])

    def by_numpy(query: SparseRows) -> ndarray:
        scores = np.zeros(documents, np.float32)
        for term, value in zip(query.terms, query.values, strict=True):
            entries = slice(by_term.indptr[term], by_term.indptr[term + 1])
            scores[by_term.indices[entries]] += value * by_term.data[entries]
        matches = np.flatnonzero(scores)
        return np.asarray(matches[topk.select(scores[None, matches], k=K)[0]])

    def by_scipy(query: SparseRows) -> ndarray:
        row = csr_array((query.values, query.terms, query.offsets), shape=(1, VOCABULARY))
        scores = row @ by_term
        return np.asarray(scores.indices[topk.select(scores.data[None], k=K)[0]])

    forms = {"numba": compiled, "numpy": by_numpy, "SciPy": by_scipy}
    queries = queries_of(by_document, max(QUERIES.values()))
    for query in queries[:20]:
        best = sparse.search([lists], query, k=K)[0][0]
        for form in forms.values():  # a rounding may order two equal scores differently
            scores = sparse.scores_of([lists], query, form(query)[None])[0]
            np.testing.assert_allclose(scores[scores > 0], best[best > 0], rtol=1e-2)
    entries = [int(np.diff(by_term.indptr)[query.terms].sum()) for query in queries]
    sides = {name: partial(_each, form, queries[: QUERIES[name]]) for name, form in forms.items()}
    seconds = take_turns(sides, rounds=rounds)
    times = {name: 1e6 * statistics.median(spent) / QUERIES[name] for name, spent in seconds.items()}
    return {"documents": documents, "entries per query": statistics.mean(entries), **times}


def _each(form: Callable[[SparseRows], ndarray], queries: Sequence[SparseRows]) -> None:
    for query in queries:
        form(query)


def corpus(documents: int) -> csr_array:
    """Return impacts by document and term."""
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1 + MOST_FREQUENT, 1 + MOST_FREQUENT + VOCABULARY)
    bounds = (shares / shares.sum()).cumsum()[:-1]
    rows, terms, counts = [], [], []
    for first in range(0, documents, CHUNK_DOCUMENTS):
        size = min(CHUNK_DOCUMENTS, documents - first)
        words = np.searchsorted(bounds, rng.random((size, WORDS))) + np.arange(size)[:, None] * VOCABULARY
        keys, frequencies = np.unique(words, return_counts=True)
        rows.append(keys // VOCABULARY + first)
        terms.append((keys % VOCABULARY).astype(np.int32))
        counts.append(frequencies)
    row, term = np.concatenate(rows), np.concatenate(terms)
    idf = np.log(documents / np.maximum(np.bincount(term, minlength=VOCABULARY), 1))
    impacts = (np.log1p(np.concatenate(counts)) * idf[term]).astype(np.float32)
    offsets = np.concatenate([[0], np.bincount(row, minlength=documents).cumsum()])
    return csr_array((impacts, term, offsets), shape=(documents, VOCABULARY))


def queries_of(by_document: csr_array, count: int) -> list[SparseRows]:
    """Return queries of words of random documents."""
    rng = np.random.default_rng(1)
    queries = []
    for row in rng.choice(by_document.shape[0], count, replace=False):
        words = by_document.indices[by_document.indptr[row] : by_document.indptr[row + 1]]
        terms = np.sort(rng.choice(words, QUERY_WORDS, replace=False)).astype(np.int32)
        queries.append(SparseRows(np.array([0, QUERY_WORDS]), terms, np.ones(QUERY_WORDS, np.float32)))
    return queries


if __name__ == "__main__":
    main()
