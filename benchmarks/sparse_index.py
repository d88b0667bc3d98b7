"""Sparse search as documents grow: exact by compiled lists, by numpy, by SciPy; and seismic, approximate.

    python -m benchmarks.sparse_index --json docs/results/sparse_index.json [--seismic 10000 100000]

Documents are windows of 200 tokens over medquad's answers (byte-level BPE learnt from some, 30,000 tokens),
evenly spaced, so that they overlap where more are asked for than there is text: their terms are as often as
in text, but neighbours are alike. Queries are medquad's questions, as counts of tokens (LightRetriever).

    counts     impacts log(1 + tf), every term: long lists of common words
    weighted   impacts log(1 + tf) idf, the strongest 64 terms: nearer to what a sparse head learns, which
               leaves common words out

The 100 best of each query, one query at a time, processor time of one thread; medians over rounds that take
turns. Seismic (pip install pyseismic-lsr) is no dependency: without it the others are measured. It is built
with its defaults, and searched in several ways, of which the cheapest is shown that finds 95 of 100 of the
exact best, ties counted as found; if none does, the one that finds most.
"""

import os
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from benchmarks.report import alone, arguments, show, write

Row = dict[str, Any]
WINDOW, STRONGEST, K, WORDS = 200, 64, 100, 30_000
QUERIES = {"numba": 200, "numpy": 40, "SciPy": 40}  # a round asks so many
RECALL = 0.95
SEARCHES = ((4, 0.9), (8, 0.9), (16, 0.9), (16, 0.7), (32, 0.7), (32, 0.4))  # query_cut, heap_factor


@dataclass(frozen=True)
class Corpus:
    """Documents row by row, and queries."""

    offsets: ndarray
    terms: ndarray
    impacts: ndarray
    queries: list[tuple[ndarray, ndarray]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


def main() -> None:
    """Parse arguments, run, print and write."""
    options = parser().parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}  # read by the processes that measure
    made = run(options)
    show("Microseconds per query, one at a time", made["search"])
    show("Around the search, with impacts of `weighted`", made["around"])
    if made["seismic"]:
        show("Seismic", made["seismic"])
    write(options.json, **made)


def parser() -> ArgumentParser:
    """The knobs and their defaults."""
    parser = arguments(__doc__)
    sizes: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "DOCUMENTS"}
    parser.add_argument(
        "--documents", **sizes, default=[10_000, 100_000, 300_000], help="default: %(default)s"
    )
    parser.add_argument(
        "--seismic",
        **sizes,
        default=[10_000, 100_000, 300_000],
        help="sizes it is built for, with `weighted`",
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    return parser


def run(options: Namespace) -> dict[str, Any]:
    """Metrics and tables."""
    with tempfile.TemporaryDirectory() as folder:
        alone(read, folder)
        search = [
            alone(exact, folder, documents, kind, options.rounds)
            for documents in options.documents
            for kind in ("counts", "weighted")
        ]
        around = [alone(beside, folder, documents, options.rounds) for documents in options.documents]
        seismic: list[Row] = []
        if find_spec("seismic"):
            seismic = [alone(approximate, folder, n, options.rounds) for n in options.seismic]
    largest = {row["impacts"]: row for row in search if row["documents"] == max(options.documents)}
    wins = [row["documents"] for row in seismic if row["recall"] >= RECALL and row["µs"] < row["exact µs"]]
    metrics = {
        f"{name.lower()}_over_numba_{kind}": row[name] / row["numba"]
        for kind, row in largest.items()
        for name in ("numpy", "SciPy")
    }
    metrics |= {f"numba_us_{kind}": row["numba"] for kind, row in largest.items()}
    metrics |= {"bytes_per_document_weighted": around[-1]["bytes per document"]}
    metrics |= {"seismic_over_exact": seismic[-1]["µs"] / seismic[-1]["exact µs"]} if seismic else {}
    return {
        "metrics": metrics | {"seismic_from": min(wins)} if wins else metrics,
        "search": search,
        "around": around,
        "seismic": seismic,
    }


def read(folder: str) -> None:
    """Tokens of the answers, end to end, and terms of the questions."""
    from tokenizers import Tokenizer

    from scalingnote.datasets import sources
    from scalingnote.datasets.config import MedQuad
    from scalingnote.datasets.raw_rows import UnreadableRow
    from scalingnote.models import backbone
    from scalingnote.models.sparse_query import SparseQuery

    source = sources.read(MedQuad())
    texts = [str(row["content"]) for row in source.documents if not isinstance(row, UnreadableRow)]
    asked = [str(row["query"]) for row in source.queries if not isinstance(row, UnreadableRow)]
    tokenizer = Tokenizer.from_str(backbone.train_tokenizer(texts[::8], vocabulary=WORDS))
    found = tokenizer.encode_batch_fast([text for text in texts if text], add_special_tokens=False)
    np.save(f"{folder}/tokens.npy", np.concatenate([np.array(one.ids, np.int32) for one in found]))
    some = [asked[i] for i in np.random.default_rng(0).permutation(len(asked))[: max(QUERIES.values())]]
    queries = SparseQuery(tokenizer, max_length=32, weighting="counts").encode(some)
    np.savez(f"{folder}/queries.npz", offsets=queries.offsets, terms=queries.terms, values=queries.values)


def corpus(folder: str, documents: int, kind: str) -> Corpus:
    """So many windows, with impacts of a kind."""
    tokens = np.load(f"{folder}/tokens.npy")
    starts = np.linspace(0, len(tokens) - WINDOW, documents).astype(np.int64)
    rows, terms, impacts = [], [], []
    for first in range(0, documents, 20_000):
        windows = tokens[starts[first : first + 20_000, None] + np.arange(WINDOW)]
        keys, counts = np.unique(np.arange(len(windows))[:, None] * WORDS + windows, return_counts=True)
        rows.append(keys // WORDS + first)
        terms.append((keys % WORDS).astype(np.int32))
        impacts.append(np.log1p(counts))
    row, term, impact = (np.concatenate(pieces) for pieces in (rows, terms, impacts))
    if kind == "weighted":
        impact = impact * np.log(documents / np.bincount(term, minlength=WORDS)[term])
    offsets = np.concatenate([[0], np.bincount(row, minlength=documents).cumsum()])
    held = np.load(f"{folder}/queries.npz")
    bounds = zip(held["offsets"][:-1], held["offsets"][1:], strict=True)
    queries = [(held["terms"][a:b], held["values"][a:b]) for a, b in bounds]
    return Corpus(offsets, term, impact.astype(np.float16), queries)


def lists(made: Corpus, kind: str) -> Any:
    """Postings of a corpus."""
    from scalingnote.index import postings

    sides = (
        pa.ListArray.from_arrays(made.offsets.astype(np.int32), pa.array(x))
        for x in (made.terms, made.impacts)
    )
    return postings.build(*sides, strongest=STRONGEST if kind == "weighted" else None)


def exact(folder: str, documents: int, kind: str, rounds: int) -> Row:
    """All exact forms on one corpus."""
    from scipy.sparse import csr_array

    from scalingnote import topk
    from scalingnote.index import postings, sparse

    sparse.warm()
    made = corpus(folder, documents, kind)
    built = lists(made, kind)
    terms, impacts = (side.combine_chunks() for side in postings.columns([built]))
    flat = (
        np.asarray(impacts.values).astype(np.float32),
        np.asarray(terms.values),
        np.asarray(terms.offsets),
    )
    by_term = csr_array(flat, shape=(documents, WORDS)).T.tocsr()

    def compiled(query: tuple[ndarray, ndarray]) -> ndarray:
        return np.asarray(sparse.search([built], one(query), k=K)[1][0])

    def by_numpy(query: tuple[ndarray, ndarray]) -> ndarray:
        scores = np.zeros(documents, np.float32)
        for term, value in zip(*query, strict=True):
            entries = slice(by_term.indptr[term], by_term.indptr[term + 1])
            scores[by_term.indices[entries]] += value * by_term.data[entries]
        found = np.flatnonzero(scores)
        return np.asarray(found[topk.select(scores[None, found], k=K)[0]])

    def by_scipy(query: tuple[ndarray, ndarray]) -> ndarray:
        scores = csr_array((query[1], query[0], [0, len(query[0])]), shape=(1, WORDS)) @ by_term
        return np.asarray(scores.indices[topk.select(scores.data[None], k=K)[0]])

    forms = {"numba": compiled, "numpy": by_numpy, "SciPy": by_scipy}
    for query in made.queries[:20]:
        truth = sparse.search([built], one(query), k=K)[0][0]
        for form in forms.values():  # they agree, but for which of two equal scores a rounding prefers
            found = sparse.scores_of([built], one(query), form(query)[None])[0]
            np.testing.assert_allclose(found[found > 0], truth[truth > 0], rtol=1e-3)
    visited = [sum(np.diff(by_term.indptr)[query[0]]) for query in made.queries]
    return {
        "impacts": kind,
        "documents": documents,
        "terms per document": len(flat[1]) / documents,
        "entries per query": int(np.mean(visited)),
        **microseconds({name: (form, made.queries[: QUERIES[name]]) for name, form in forms.items()}, rounds),
    }


def beside(folder: str, documents: int, rounds: int) -> Row:
    """What is done besides a plain search."""
    from scalingnote.index import postings, sparse

    sparse.warm()
    made = corpus(folder, documents, "weighted")
    start = time.process_time()
    built = lists(made, "weighted")
    building = time.process_time() - start
    files = postings.dump(built)
    start = time.process_time()
    postings.load(files, documents=documents)
    loading = time.process_time() - start
    few = np.random.default_rng(0).random(documents) < 0.01
    terms, impacts = postings.columns([built])
    live: tuple[Any, ...] = ()
    start = time.process_time()
    for row in range(1000):
        live = postings.appended(live, postings.build(terms[row : row + 1], impacts[row : row + 1]))
    adding = (time.process_time() - start) / 1000
    candidates = np.random.default_rng(0).choice(documents, (1, 2 * K), replace=False)
    forms: dict[str, Callable[[Any], Any]] = {
        "plain": lambda query: sparse.search([built], one(query), k=K),
        "1 % allowed": lambda query: sparse.search([built], one(query), k=K, allowed=few),
        "with 1,000 live": lambda query: sparse.search([built, *live], one(query), k=K),
        "scores of 200 rows": lambda query: sparse.scores_of([built], one(query), candidates),
    }
    return {
        "documents": documents,
        "bytes per document": built.nbytes / documents,
        "documents built per second": documents / building,
        "seconds to load and check": loading,
        "µs to add one": 1e6 * adding,
        **{
            f"{n} µs": v
            for n, v in microseconds({n: (f, made.queries) for n, f in forms.items()}, rounds).items()
        },
    }


def approximate(folder: str, documents: int, rounds: int) -> Row:
    """Seismic beside the exact search of the same lists."""
    import seismic

    from scalingnote.index import postings, sparse

    sparse.warm()
    made = corpus(folder, documents, "weighted")
    built = lists(made, "weighted")
    terms, impacts = (side.combine_chunks() for side in postings.columns([built]))
    start = time.process_time()
    held = seismic.SeismicDataset()
    held.add_documents_by_id(
        [str(row) for row in range(documents)],
        np.asarray(terms.values).astype(np.int64),
        np.asarray(impacts.values).astype(np.float32),
        np.asarray(terms.offsets).astype(np.int64),
    )
    index = seismic.SeismicIndex.build_from_dataset(held, num_threads=1)
    building = time.process_time() - start
    with tempfile.TemporaryDirectory() as place:
        index.save(f"{place}/saved")
        size = sum(entry.stat().st_size for entry in os.scandir(place))
    kind = seismic.get_seismic_string()  # a shorter dtype raises
    asked = [(terms.astype(str).astype(kind), values) for terms, values in made.queries]
    truth = [sparse.search([built], one(query), k=K)[0][0] for query in made.queries]

    def search(cut: int, factor: float) -> Callable[[Any], Any]:
        return lambda query: index.search("", *query, K, cut, factor)

    found: list[Row] = []
    for cut, factor in SEARCHES:
        # Not batch_search: its answers come in another order than the queries.
        answers = [[int(name) for _, _, name in search(cut, factor)(query)] for query in asked]
        shares = [share(built, *both) for both in zip(made.queries, answers, truth, strict=True)]
        took = microseconds(
            {
                "µs": (search(cut, factor), asked),
                "exact µs": (lambda query: sparse.search([built], one(query), k=K), made.queries),
            },
            rounds,
        )
        found.append({"query_cut": cut, "heap_factor": factor, "recall": float(np.mean(shares)), **took})
    good = [row for row in found if row["recall"] >= RECALL]
    best = min(good, key=lambda row: row["µs"]) if good else max(found, key=lambda row: row["recall"])
    facts = {"bytes per document": size / documents, "documents built per second": documents / building}
    return {"documents": documents, **facts, **best}


def share(built: Any, query: tuple[ndarray, ndarray], answer: list[int], truth: ndarray) -> float:
    """Of the best, how many are in the answer; a document as good as the last of them is one of them."""
    from scalingnote.index import sparse

    matches = truth[truth > 0]
    if not len(matches):
        return 1.0
    scores = sparse.scores_of([built], one(query), np.array([answer], np.int64).reshape(1, -1))[0]
    return min(1.0, float((scores >= matches[-1]).sum()) / len(matches))


def one(query: tuple[ndarray, ndarray]) -> Any:
    """A query as the search takes it."""
    from scalingnote.models.sparse_query import SparseRows

    return SparseRows(np.array([0, len(query[0])]), *query)


def microseconds(
    forms: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]], rounds: int
) -> dict[str, float]:
    """Processor time of each form per query; forms take turns, medians over rounds."""
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, (form, queries) in forms.items():
            start = time.process_time()
            for query in queries:
                form(query)
            taken[name].append((time.process_time() - start) / len(queries))
    return {name: 1e6 * statistics.median(values) for name, values in taken.items()}


if __name__ == "__main__":
    main()
