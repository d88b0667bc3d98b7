"""Rankings of the training documents for the training queries, by BM25 or by a cross-encoder after it.

    documents ─► word frequencies ─► shards ┐
    queries ─────────────────────► groups ──┴► search ─► hits of some shards ─► merge ─► evidence
                          with a cross-encoder: merge ─► texts of the best ─► PairScoring ─► evidence

A task holds a shard of documents, a group of queries with their best documents, or, for a cross-encoder, the
texts of a smaller group: memory is bounded at any corpus size.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64
from numpy import ndarray

from scalingnote import topk
from scalingnote.bm25 import document_texts, terms
from scalingnote.collect.config import BM25Ranker, CrossEncoderConfig
from scalingnote.collect.one_hop import ranking_evidence
from scalingnote.collect.steps import Context, Counts, Item, read_queries, scatter_evidence
from scalingnote.lexical.frequencies import Frequencies
from scalingnote.lexical.weights import BM25Weights, build_shard, search
from scalingnote.storage import shuffle
from scalingnote.storage.arrow import to_arrow, to_matrix
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import DOCUMENTS

MAX_WORDS = 1 << 22  # in the vocabulary, the most frequent ones: 400 MB of a task that builds a shard
SHARDS_PER_SEARCH = 8  # two million documents: 0.2 to 1 ms per query and shard
GROUP_QUERIES = 1 << 16  # 40 MB of hits where 50 documents are kept
PAIR_GROUP_QUERIES = 1 << 12  # with a cross-encoder: the texts of 100 documents for each are some 400 MB
SCORED_QUERIES = 512  # between two records of a cross-encoder
_ROW_BITS = 32  # of a document's number; the bits above are its shard
_FIELDS = ["title", "topic", "content"]


def read_training_words(parts: Sequence[str], context: Context) -> Iterator[list[str]]:
    """The words of each document that training may see."""
    yield from map(terms, document_texts(_documents(parts, _FIELDS, context)))


def write_shard(item: Item, context: Context, ranker: BM25Ranker, corpus: Frequencies) -> Counts:
    """Write the inverted lists of one slice of the documents."""
    words = read_table(corpus.words)
    totals = {"documents": corpus.texts, "length": corpus.length}
    weights = BM25Weights(words, **totals, k1=ranker.k1, b=ranker.b)
    texts = document_texts(_documents(item["parts"], _FIELDS, context))
    write_table(_shard(item["shard"], context), build_shard(texts, weights, words["word"]))
    return {}


def write_groups(item: Item, context: Context, size: int) -> Counts:
    """Write one bucket's queries in groups of `size`."""
    queries = read_queries(item["bucket"], context)
    for start in range(0, len(queries), size):
        write_table(_file("groups", item["bucket"], start, context), queries.slice(start, size))
    return {}


def groups(context: Context, size: int) -> list[Item]:
    """One item per group."""
    return [
        {"bucket": bucket, "start": start}
        for bucket in range(context.config.parts)
        for start in range(0, shuffle.count_rows(context.folder("queries"), bucket), size)
    ]


def search_shards(item: Item, context: Context, depth: int) -> Counts:
    """Write the best documents of some shards for each query of a group."""
    queries = read_table(_file("groups", item["bucket"], item["start"], context))["query"].to_pylist()
    shards = ((shard << _ROW_BITS, _read_shard(shard, context)) for shard in item["shards"])
    rows, scores = search(shards, queries, depth)
    hits = pa.table({"row": to_arrow(rows, dtype="int64"), "score": to_arrow(scores)})
    write_table(_hits(item, item["shards"][0], context), hits)
    return {}


def merge_hits(item: Item, context: Context, depth: int, shards: list[list[str]]) -> Counts:
    """Scatter the best documents of all shards for the queries of a group as evidence."""
    queries, number, documents = _merged(item, context, depth, shards, [])
    evidence = documents.append_column("query_id", queries["query_id"].take(pa.array(number)))
    return _scatter(evidence, item, context) | {"ranked": len(queries)}


def merge_pairs(item: Item, context: Context, depth: int, shards: list[list[str]]) -> Counts:
    """Write the queries of a group with the texts of their best documents, in slices for a cross-encoder."""
    queries, number, documents = _merged(item, context, depth, shards, _FIELDS)
    for name in ("query_id", "query"):
        documents = documents.append_column(name, queries[name].take(pa.array(number)))
    for start in range(0, len(queries), SCORED_QUERIES):
        chosen = documents.filter(pa.array((number >= start) & (number < start + SCORED_QUERIES)))
        write_table(_file("pairs", item["bucket"], item["start"] + start, context), chosen)
    return {"ranked": len(queries)}


class PairScoring:
    """Scores pairs of queries and documents with a cross-encoder."""

    def __init__(self, context: Context, config: CrossEncoderConfig) -> None:
        from scalingnote.collect.transformer_models import PairScorer

        self._context, self._scorer = context, PairScorer(config)

    def __call__(self, item: Item) -> Counts:
        """Scatter the scores of one slice as evidence."""
        pairs = read_table(_file("pairs", item["bucket"], item["start"], self._context))
        scores = self._scorer.score(pairs["query"].to_pylist(), document_texts(pairs))
        at = pairs.schema.get_field_index("score")
        return _scatter(pairs.set_column(at, "score", pa.array(scores)), item, self._context)


def _merged(
    item: Item, context: Context, depth: int, shards: list[list[str]], fields: list[str]
) -> tuple[pa.Table, Int64[ndarray, " hits"], pa.Table]:
    """Queries of a group, and for each hit the row of its query, and its document's id, fields and score."""
    queries = read_table(_file("groups", item["bucket"], item["start"], context))
    best = topk.Best(len(queries), depth)
    for first in range(0, len(shards), SHARDS_PER_SEARCH):
        hits = read_table(_hits(item, first, context))
        best.add(slice(None), to_matrix(hits["score"]), to_matrix(hits["row"]))
    rows, scores = best.ids, best.scores
    query, place = np.nonzero(rows >= 0)
    order = np.argsort(rows[query, place], kind="stable")
    query, place = query[order], place[order]
    found = rows[query, place]
    documents = [DOCUMENTS.empty_table().select(["doc_id", *fields])]
    for shard, parts in enumerate(shards):
        start, stop = np.searchsorted(found, [shard << _ROW_BITS, shard + 1 << _ROW_BITS])
        if start < stop:
            local = pa.array(found[start:stop] - (shard << _ROW_BITS))
            documents.append(_documents(parts, ["doc_id", *fields], context).take(local))
    return queries, query, pa.concat_tables(documents).append_column("score", pa.array(scores[query, place]))


def _documents(parts: Sequence[str], columns: list[str], context: Context) -> pa.Table:
    """Columns of the documents that training may see."""
    table = pa.concat_tables(context.dataset.table(part, [*{"doc_id", *columns}]) for part in parts)
    seen = pc.invert(pc.is_in(table["doc_id"], value_set=context.held_out))
    return table.filter(seen).select(columns)


def _scatter(ranked: pa.Table, item: Item, context: Context) -> Counts:
    name = f"ranked-{item['bucket']:05d}-{item['start']:09d}"
    return scatter_evidence(ranking_evidence(ranked), name, context)


def _shard(number: int, context: Context) -> str:
    return context.folder(f"rank/shards/{number:05d}.arrow")


def _read_shard(number: int, context: Context) -> pa.Table:
    return read_table(_shard(number, context))


def _hits(item: Item, first: int, context: Context) -> str:
    return context.folder(f"rank/hits/{item['bucket']:05d}-{item['start']:09d}/{first:05d}.parquet")


def _file(kind: str, bucket: int, start: int, context: Context) -> str:
    return context.folder(f"rank/{kind}/{bucket:05d}-{start:09d}.parquet")
