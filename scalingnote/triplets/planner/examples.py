"""Examples for a learned planner: words that the positives of sampled queries repeat.

    queries ─► a sample ─► their positives, a sample of each ─► texts of these ─► the target of each word

The target is based on DeepCT's query term recall r, the share of a query's positives that have the word: the
words that positives repeat are the subject of the query, unlike "how", "please" or "near me". Stop words are
in all documents. DeepCT removes them by a list; here the recall that chance explains is subtracted:

    recall r   = share of the query's positives that have the word
    chance c   = share of the other queries' positives that have it
    target     = max(0, r - c)

A division by 1 - c (Cohen's kappa) would result in a target of 1 for "the" whenever a query's only positive
has it.

Tasks read slices of the tables. Queries are sampled by a hash. The sample of a query's positives is a part of
the samples of all slices, so these are sampled again; a task holds at most the samples and one slice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, UInt64
from numpy import ndarray

from scalingnote.core.bm25 import document_texts
from scalingnote.core.parts import Executor
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import QUERIES, TEXT_COLUMNS
from scalingnote.storage.shuffle import NumberedSlice, hash_of, run_slices, slices
from scalingnote.triplets.collect.triplets import rank_within_runs
from scalingnote.triplets.config import Learned
from scalingnote.triplets.planner.planner import words
from scalingnote.triplets.work_folder import WorkFolder, read_slice

POSITIVE_SOURCES = {"clicks": ("impressions", "clicked"), "judgements": ("qrels", "relevance")}
MAX_QUERIES = 100_000  # approximate number of queries to train on, drawn evenly
MAX_QUERY_POSITIVES = 20  # positives of a query that are read, drawn evenly
_PAIRS = pa.schema({"query_id": pa.string(), "doc_id": pa.string()})
_ROWS_BEFORE_FOLD = 1 << 20
Examples = tuple[list[list[str]], list[Float32[ndarray, " _"]], int]


@dataclass(frozen=True)
class ExampleContext(WorkFolder):
    """Input that all tasks share; tables are in one bucket."""

    config: Learned
    dataset: Artifact
    held_out: pa.Array  # ids of documents that training must not use

    def is_sampled(self, query_ids: pa.ChunkedArray) -> pa.Array:
        """Return whether each query is in the sample to train on, by a seeded hash of its id."""
        queries = sum(self.dataset.rows_of(self.dataset.table_parts("queries")).values())
        share = min(MAX_QUERIES / max(queries, 1), 1.0)
        return pa.array(_random_keys(query_ids, seed=self.config.seed) <= share * (2.0**64 - 1))


def gather_examples(context: ExampleContext, *, each: Executor) -> None:
    """Write sampled queries and the texts of their positives, for :func:`read_examples`."""
    do = partial(run_slices, folder=context.folder, each=each, section="planner")
    dataset = context.dataset
    do("queries", partial(_take_queries, context=context), slices(dataset, "queries"))
    logs = [
        (kind, parts)
        for kind in context.config.positives
        for parts in slices(dataset, POSITIVE_SOURCES[kind][0])
    ]
    do("positives", partial(_take_positives, context=context), logs)
    do("pairs", partial(_join_positives, context=context), ["pairs"], unit="samples")
    do("texts", partial(_take_texts, context=context), slices(dataset, "documents"))


def read_examples(context: ExampleContext) -> Examples:
    """Read the words of queries in random order, their targets, and the number of positive pairs."""
    queries, pairs = context.gather("queries", 0, QUERIES), context.read("pairs")
    keys = _random_keys(queries["query_id"], seed=context.config.seed)
    queries = queries.append_column("key", pa.array(keys))
    queries = queries.sort_by([("key", "ascending"), ("query_id", "ascending")])
    row_of = {query_id: row for row, query_id in enumerate(queries["query_id"].to_pylist())}
    queries_of: dict[str, list[int]] = {}
    for query_id, doc_id in zip(pairs["query_id"].to_pylist(), pairs["doc_id"].to_pylist(), strict=True):
        queries_of.setdefault(doc_id, []).append(row_of[query_id])
    texts = [words(query) for query in queries["query"].to_pylist()]
    documents = (
        (doc_id, words(text))
        for table in shuffle.stream(context.path("texts"), 0)
        for doc_id, text in zip(table["doc_id"].to_pylist(), table["text"].to_pylist(), strict=True)
    )
    recalls = term_recall(texts, queries_of, documents)
    examples = [(t, r) for t, r in zip(texts, recalls, strict=True) if t and r is not None]
    return [t for t, _ in examples], [r for _, r in examples], len(pairs)


# --- tasks: each returns the number of rows that it wrote --------------------------------------------------


def _take_queries(item: NumberedSlice, *, context: ExampleContext) -> int:
    """Sample the training queries of a slice."""
    table = read_slice(context.dataset, item[1], QUERIES.names)
    table = table.filter(pc.equal(table["split"], "train"))
    sampled = table.filter(context.is_sampled(table["query_id"]))
    context.scatter(sampled, "query_id", "queries", f"{item[0]:05d}")
    return len(sampled)


def _take_positives(item: tuple[int, tuple[str, list[str]]], *, context: ExampleContext) -> int:
    """Sample the training documents that are positives of sampled queries in a slice of a log."""
    number, (kind, parts) = item
    column = POSITIVE_SOURCES[kind][1]
    table = read_slice(context.dataset, parts, [*_PAIRS.names, column])
    table = table.filter(pc.greater(table[column].cast(pa.int32()), 0)).select(_PAIRS.names)
    table = table.filter(pc.invert(pc.is_in(table["doc_id"], value_set=context.held_out)))
    table = table.filter(context.is_sampled(table["query_id"]))
    sampled = sample_positives([table], most=MAX_QUERY_POSITIVES, seed=context.config.seed)
    context.scatter(sampled, "query_id", "positives", f"{number:05d}")
    return len(sampled)


def _join_positives(item: tuple[int, str], *, context: ExampleContext) -> int:
    """Sample all positives of training queries; the item is the name of the output table."""
    query_ids = context.gather("queries", 0, QUERIES)["query_id"].combine_chunks()
    tables = shuffle.stream(context.path("positives"), 0)
    train = (table.filter(pc.is_in(table["query_id"], value_set=query_ids)) for table in tables)
    sampled = sample_positives(train, most=MAX_QUERY_POSITIVES, seed=context.config.seed)
    return context.write(item[1], sampled)


def _take_texts(item: NumberedSlice, *, context: ExampleContext) -> int:
    """Write the texts of the positives in a slice of the documents."""
    doc_ids = context.read("pairs")["doc_id"].combine_chunks()
    tables = []
    for part in item[1]:
        table = context.dataset.table(part, ["doc_id", *TEXT_COLUMNS])
        tables.append(table.filter(pc.is_in(table["doc_id"], value_set=doc_ids)))
    positives = pa.concat_tables(tables)
    texts = pa.table(
        {"doc_id": positives["doc_id"], "text": pa.array(document_texts(positives), pa.string())}
    )
    context.scatter(texts, "doc_id", "texts", f"{item[0]:05d}")
    return len(texts)


# --- samples and targets -----------------------------------------------------------------------------------


def sample_positives(pairs: Iterable[pa.Table], *, most: int, seed: int) -> pa.Table:
    """Draw a uniform sample of at most `most` distinct (query_id, doc_id) pairs per query, sorted by query.

    The memory is bounded by the sampled pairs and one table of `pairs`, for any number of clicks.
    """
    tables: list[pa.Table] = [_PAIRS.empty_table()]
    for table in pairs:
        tables.append(table.select(_PAIRS.names))
        if sum(map(len, tables[1:])) > max(len(tables[0]), _ROWS_BEFORE_FOLD):
            tables = [_sample_per_query(pa.concat_tables(tables), most, seed=seed)]
    return _sample_per_query(pa.concat_tables(tables), most, seed=seed)


def term_recall(
    queries: Sequence[Sequence[str]],
    queries_of: Mapping[str, Sequence[int]],
    documents: Iterable[tuple[str, Sequence[str]]],
) -> list[Float32[ndarray, " _"] | None]:
    """Compute the target of each distinct word of each query (see the docstring of the module).

    Args:
        queries: the words of each query.
        queries_of: doc_id -> indices of the queries that it is a positive of.
        documents: (doc_id, words) of positives; they are streamed.

    Returns:
        An array per query, or None for a query without a positive among the documents.
    """
    distinct = [list(dict.fromkeys(query)) for query in queries]
    vocabulary = {word for query in distinct for word in query}
    hits_of = [np.zeros(len(query)) for query in distinct]  # positives of the query with each word
    positives_of = [0] * len(distinct)
    df: Counter[str] = Counter()
    count = 0
    for doc_id, text in documents:
        present = vocabulary.intersection(text)
        df.update(present)
        count += 1
        for row in queries_of.get(doc_id, ()):
            hits_of[row] += [word in present for word in distinct[row]]
            positives_of[row] += 1
    targets: list[Float32[ndarray, " _"] | None] = []
    for query, hits, positives in zip(distinct, hits_of, positives_of, strict=True):
        recall = hits / max(positives, 1)
        if count > positives:
            chance = (np.array([df[word] for word in query]) - hits) / (count - positives)
            recall = np.maximum(recall - chance, 0)
        targets.append(recall.astype(np.float32) if positives else None)
    return targets


def _sample_per_query(pairs: pa.Table, most: int, *, seed: int) -> pa.Table:
    pairs = pairs.group_by(_PAIRS.names).aggregate([])
    if not pairs.num_rows:
        return pairs
    keys = _random_keys(pc.binary_join_element_wise(pairs["query_id"], pairs["doc_id"], " "), seed=seed)
    pairs = pairs.append_column("key", pa.array(keys))
    pairs = pairs.sort_by([("query_id", "ascending"), ("key", "ascending"), ("doc_id", "ascending")])
    codes = pairs["query_id"].combine_chunks().dictionary_encode().indices.to_numpy()
    return pairs.filter(pa.array(rank_within_runs(codes) < most)).select(_PAIRS.names)


def _random_keys(ids: pa.ChunkedArray, *, seed: int) -> UInt64[ndarray, " ids"]:
    return hash_of(pa.array([f"{seed} {value}" for value in ids.to_pylist()], pa.string()))
