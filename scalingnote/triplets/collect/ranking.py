"""The ranking of the training documents for all queries, by BM25, or by BM25 and a cross-encoder.

    documents ─► word frequencies ─► shards ┐
    bucket of queries ──────────────────────┴► search ─► hits of some shards ─► merge ─► evidence
                          with a cross-encoder: merge ─► texts of the best ─► PairScoring ─► evidence

A task holds a shard of documents, a bucket of queries with the numbers of their best documents, or, for a
cross-encoder, the texts of a group of queries: memory is bounded for a corpus of any size.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64
from numpy import ndarray

from scalingnote.core import topk
from scalingnote.core.bm25 import document_texts, terms
from scalingnote.encode.config import BM25Config
from scalingnote.encode.lexical.weights import BM25Weights, build_shard, search
from scalingnote.encode.lexical.words import Frequencies
from scalingnote.storage.arrow import to_arrow, to_matrix
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import DOCUMENTS, TEXT_COLUMNS
from scalingnote.storage.shuffle import NumberedSlice
from scalingnote.triplets.collect.steps import CollectContext, Counts, read_queries, scatter_evidence
from scalingnote.triplets.collect.triplets import ranking_evidence
from scalingnote.triplets.config import CrossEncoderConfig
from scalingnote.triplets.work_folder import read_slice

MAX_VOCABULARY_WORDS = 1 << 22  # the most frequent ones: 400 MB in a task that builds a shard
SHARDS_PER_SEARCH = 8  # two million documents: 0.2 to 1 ms per query and shard
GROUP_QUERIES = 1 << 12  # for a cross-encoder: the texts of 100 documents for each are about 400 MB
SCORED_QUERIES = 512  # per record of a cross-encoder
DOCUMENT_BITS = 32  # of a document's number in its shard; the bits above them are the number of the shard


def read_training_words(parts: Sequence[str], context: CollectContext) -> Iterator[list[str]]:
    """Yield the words of each document that training may use."""
    for text in document_texts(_documents(parts, TEXT_COLUMNS, context)):
        yield terms(text, context.language)


def write_shard(item: NumberedSlice, *, context: CollectContext, corpus: Frequencies) -> Counts:
    """Write the inverted lists of one slice of the documents."""
    bm25 = BM25Config()
    weights = BM25Weights(
        read_table(corpus.words),
        documents=corpus.texts,
        length=corpus.length,
        k1=bm25.k1,
        b=bm25.b,
        language=context.language,
    )
    texts = document_texts(_documents(item[1], TEXT_COLUMNS, context))
    write_table(_shard(item[0], context), build_shard(texts, weights))
    return {}


def search_shards(item: tuple[int, tuple[int, list[int]]], *, context: CollectContext, depth: int) -> Counts:
    """Write the `depth` best documents of some shards for each query of a bucket."""
    bucket, numbers = item[1]
    queries = read_queries(bucket, context)["query"].to_pylist()
    shards = ((number << DOCUMENT_BITS, read_table(_shard(number, context))) for number in numbers)
    rows, scores = search(shards, queries, depth, language=context.language)
    hits = pa.table({"row": to_arrow(rows, dtype="int64"), "score": to_arrow(scores)})
    context.write(_hits(bucket, numbers[0]), hits)
    return {}


def merge_hits(
    item: tuple[int, int], *, context: CollectContext, depth: int, shards: list[list[str]]
) -> Counts:
    """Scatter the best documents of all shards for the queries of a bucket as evidence."""
    queries, best = _merge(item[1], context, depth, len(shards))
    number, documents = _ranked_documents(best, slice(None), context, shards, [])
    scores = documents.append_column("query_id", queries["query_id"].take(pa.array(number)))
    evidence = scatter_evidence(ranking_evidence(scores), f"ranked-{item[1]:05d}", context)
    return evidence | {"ranked": len(queries)}


def merge_pairs(
    item: tuple[int, int], *, context: CollectContext, depth: int, shards: list[list[str]]
) -> Counts:
    """Write the queries of a bucket with the texts of their best documents, in slices for a cross-encoder."""
    queries, best = _merge(item[1], context, depth, len(shards))
    for first in range(0, len(queries), GROUP_QUERIES):
        group = queries.slice(first, GROUP_QUERIES)
        rows = slice(first, first + GROUP_QUERIES)
        number, documents = _ranked_documents(best, rows, context, shards, TEXT_COLUMNS)
        for name in ("query_id", "query"):
            documents = documents.append_column(name, group[name].take(pa.array(number)))
        for start in range(0, len(group), SCORED_QUERIES):
            pairs = documents.filter(pa.array((number >= start) & (number < start + SCORED_QUERIES)))
            context.write(_pairs(item[1], first + start), pairs)
    return {"ranked": len(queries)}


class PairScoring:
    """Worker that scores pairs of queries and documents by a cross-encoder."""

    def __init__(self, context: CollectContext, config: CrossEncoderConfig) -> None:
        from scalingnote.triplets.collect.transformer_models import PairScorer

        self._context, self._scorer = context, PairScorer(config)

    def __call__(self, item: tuple[int, tuple[int, int]]) -> Counts:
        """Score a slice, named by its bucket and its first query; scatter the scores as evidence."""
        pairs = self._context.read(_pairs(*item[1]))
        scores = self._scorer.score(pairs["query"].to_pylist(), document_texts(pairs))
        at = pairs.schema.get_field_index("score")
        evidence = ranking_evidence(pairs.set_column(at, "score", pa.array(scores)))
        return scatter_evidence(evidence, f"ranked-{item[0]:09d}", self._context)


def _merge(bucket: int, context: CollectContext, depth: int, shards: int) -> tuple[pa.Table, topk.Best]:
    """Read the queries of a bucket, and merge the numbers and scores of their best documents."""
    queries = read_queries(bucket, context)
    best = topk.Best(len(queries), depth)
    for first in range(0, shards, SHARDS_PER_SEARCH):
        hits = context.read(_hits(bucket, first))
        best.add(slice(None), to_matrix(hits["score"]), to_matrix(hits["row"]))
    return queries, best


def _ranked_documents(
    best: topk.Best, queries: slice, context: CollectContext, shards: list[list[str]], fields: list[str]
) -> tuple[Int64[ndarray, " hits"], pa.Table]:
    """Read the hits of some queries: the row of each hit's query; its document's id, fields and score."""
    rows, scores = best.ids[queries], best.scores[queries]
    query, place = np.nonzero(rows >= 0)
    order = np.argsort(rows[query, place], kind="stable")
    query, place = query[order], place[order]
    numbers = rows[query, place]
    documents = [DOCUMENTS.empty_table().select(["doc_id", *fields])]
    for shard, parts in enumerate(shards):
        start, stop = np.searchsorted(numbers, [shard << DOCUMENT_BITS, shard + 1 << DOCUMENT_BITS])
        if start < stop:
            local = pa.array(numbers[start:stop] - (shard << DOCUMENT_BITS))
            documents.append(_documents(parts, ["doc_id", *fields], context).take(local))
    return query, pa.concat_tables(documents).append_column("score", pa.array(scores[query, place]))


def _documents(parts: Sequence[str], columns: list[str], context: CollectContext) -> pa.Table:
    """Read columns of the documents that training may use."""
    table = read_slice(context.dataset, parts, [*{"doc_id", *columns}])
    allowed = pc.invert(pc.is_in(table["doc_id"], value_set=context.held_out))
    return table.filter(allowed).select(columns)


def _shard(number: int, context: CollectContext) -> str:
    return context.path(f"rank/shards/{number:05d}.arrow")


def _hits(bucket: int, first_shard: int) -> str:
    return f"rank/hits/{bucket:05d}/{first_shard:05d}"


def _pairs(bucket: int, start: int) -> str:
    return f"rank/pairs/{bucket:05d}-{start:09d}"
