"""The steps of collect, each over one slice or one bucket, and the files between them.

    queries ─────► QuerySelection ─by query─► one_hop ──► bucket: queries, one_hop, known
    log, scores ─► take_evidence ──by query─────┤
    documents ─► ranking ──────────by query─────┘
    bucket ─► OwnKeys, candidates ─by key─► associate ─by pair─► mutual ─by associate─► triplet_parts

The ranking of the training documents, by BM25 or by a cross-encoder after it:

    documents ─► word frequencies ─► shards ┐
    queries ─────────────────────► groups ──┴► search ─► hits of some shards ─► merge ─► evidence
                          with a cross-encoder: merge ─► texts of the best ─► PairScoring ─► evidence

There a task holds a shard of documents, a group of queries with their best documents, or, for a
cross-encoder, the texts of a smaller group: memory is bounded at any corpus size.

A step is a function of an item and the context, or a class where it loads something once and uses it for many
items: a planner, a model. Steps know neither Ray nor each other. A step scatters rows to buckets by query_id,
doc_id or key, in files whose names depend on its input alone: repeated after a crash, it writes them again. A
query is numbered by its bucket and its row in it, so that association works on integers alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.core import topk
from scalingnote.core.bm25 import document_texts, terms
from scalingnote.core.languages import Language
from scalingnote.encode.config import BM25Config
from scalingnote.encode.lexical.frequencies import Frequencies
from scalingnote.encode.lexical.weights import BM25Weights, build_shard, search
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.arrow import to_arrow, to_matrix
from scalingnote.storage.artifact import Artifact, read_table, write_table
from scalingnote.storage.schema import DOCUMENTS, SCORES, TEXT_COLUMNS
from scalingnote.triplets.collect import association
from scalingnote.triplets.collect.config import (
    MAX_EVIDENCE,
    AssociationConfig,
    CollectConfig,
    CrossEncoderConfig,
    QueryGenerationConfig,
)
from scalingnote.triplets.collect.decontamination import CLEAN, EXACT, NEAR, Decontaminator
from scalingnote.triplets.collect.triplets import (
    CLICK_COLUMNS,
    EVIDENCE,
    click_evidence,
    condense,
    one_hop_triplets,
    ranking_evidence,
)
from scalingnote.triplets.planner.planner import TermScores
from scalingnote.triplets.planner.planner import load as load_planner

ROW_BITS = 40  # of a query's number; the bits above are its bucket
MAX_VOCABULARY_WORDS = 1 << 22  # the most frequent ones: 400 MB of a task that builds a shard
SHARDS_PER_SEARCH = 8  # two million documents: 0.2 to 1 ms per query and shard
GROUP_QUERIES = 1 << 16  # 40 MB of hits where 50 documents are kept
PAIR_GROUP_QUERIES = 1 << 12  # with a cross-encoder: the texts of 100 documents for each are some 400 MB
SCORED_QUERIES = 512  # between two records of a cross-encoder
DOCUMENT_BITS = 32  # of a document's number; the bits above are its shard
QUERY_SCHEMA = pa.schema({"query_id": pa.string(), "query": pa.string()})
Item = dict[str, Any]  # one slice or bucket, as JSON values
Counts = dict[str, int]


@dataclass(frozen=True)
class CollectContext:
    """Input of all steps; equal for all of them, and small."""

    config: CollectConfig
    parts: int  # of the artifact, and buckets of every step
    dataset: Artifact
    planner: Artifact
    held_out: pa.Array  # doc_ids excluded from training
    test_queries: pa.Array  # their texts
    work: str
    output: str
    language: Language = "none"  # of the words by which documents are ranked

    def path(self, name: str) -> str:
        """A file or folder of the work directory."""
        return fs.join(self.work, name)

    def bucket(self, number: int, table: str) -> str:
        """The file of a table of one bucket."""
        return fs.join(self.work, "bucket", f"{number:05d}", f"{table}.parquet")


def dataset_slices(dataset: Artifact, *tables: str) -> list[Item]:
    """Items of about ROWS_PER_SLICE rows of the tables: some parts, or a share of the row groups of one."""
    items: list[Item] = []
    for table in tables:
        for parts in shuffle.slices(dataset, table):
            rows = sum(dataset.rows_of(parts).values())
            shares = max(-(-rows // shuffle.ROWS_PER_SLICE), 1) if len(parts) == 1 else 1
            items += [{"table": table, "parts": parts, "share": (n, shares)} for n in range(shares)]
    return [item | {"slice": f"{item['table']}-{number:07d}"} for number, item in enumerate(items)]


def read_slice(item: Item, columns: list[str], context: CollectContext) -> pa.Table:
    """Columns of the rows of an item of :func:`dataset_slices`."""
    share, shares = item["share"]
    if shares == 1:
        return pa.concat_tables(context.dataset.table(part, columns) for part in item["parts"])
    (part,) = item["parts"]
    if share == 0:
        context.dataset.file(part)  # compares the checksum, once for all shares
    with fs.open_input(fs.join(context.dataset.uri, part)) as source:
        file = pq.ParquetFile(source)
        first, stop = (number * file.num_row_groups // shares for number in (share, share + 1))
        return file.read_row_groups(range(first, stop), columns=columns)


def read_queries(bucket: int, context: CollectContext) -> pa.Table:
    """The queries of a bucket, sorted by query_id: a query's row in it is part of its number."""
    return shuffle.gather(context.path("queries"), bucket, schema=QUERY_SCHEMA).sort_by("query_id")


def scatter_by(table: pa.Table, key: str, target: str, name: str, context: CollectContext) -> None:
    """Write rows to buckets by the hash of a column; `name` is unique among the tables of `target`."""
    bucket = shuffle.bucket_of(table[key], context.parts)
    shuffle.scatter(table, bucket, target=context.path(target), name=name)


def scatter_evidence(evidence: pa.Table, name: str, context: CollectContext) -> Counts:
    """Write evidence, condensed, to buckets by query, without documents excluded from training."""
    allowed = evidence.filter(pc.invert(pc.is_in(evidence["doc_id"], value_set=context.held_out)))
    config = context.config
    scatter_by(condense(allowed, most=MAX_EVIDENCE, seed=config.seed), "query_id", "evidence", name, context)
    return {"held_out_rows": len(evidence) - len(allowed)}


def query_numbers(bucket: int, rows: int) -> UInt64[ndarray, " rows"]:
    """The numbers of the first `rows` queries of a bucket."""
    return np.arange(rows, dtype=np.uint64) | np.uint64(bucket << ROW_BITS)


def rows_of_numbers(numbers: pa.ChunkedArray) -> Int64[ndarray, " queries"]:
    """The rows, within their buckets, of numbered queries."""
    values: UInt64[ndarray, " queries"] = numbers.to_numpy()
    return (values & np.uint64((1 << ROW_BITS) - 1)).astype(np.int64)


def buckets_of_numbers(numbers: pa.ChunkedArray) -> Int64[ndarray, " queries"]:
    """The buckets of numbered queries."""
    values: UInt64[ndarray, " queries"] = numbers.to_numpy()
    return (values >> np.uint64(ROW_BITS)).astype(np.int64)


# --- queries and evidence ------------------------------------------------------------------------------


class QuerySelection:
    """Selects training queries and drops those that repeat a test query."""

    def __init__(self, context: CollectContext) -> None:
        self._context = context
        self._decontaminate = _decontaminator(context)

    def __call__(self, item: Item) -> Counts:
        """Scatter one slice of queries by query_id."""
        table = read_slice(item, [*QUERY_SCHEMA.names, "split"], self._context)
        table = table.filter(pc.equal(table["split"], "train")).select(QUERY_SCHEMA.names)
        counts = {"query_rows": len(table)}
        if self._decontaminate:
            verdict = self._decontaminate(table["query"])
            counts["exact_duplicates"] = int((verdict == EXACT).sum())
            counts["near_duplicates"] = int((verdict == NEAR).sum())
            table = table.filter(pa.array(verdict == CLEAN))
        scatter_by(table, "query_id", "queries", item["slice"], self._context)
        return counts | {"queries": len(table)}


def take_evidence(item: Item, context: CollectContext) -> Counts:
    """Scatter the evidence of one slice of the click log or of the scores."""
    if item["table"] == "impressions":
        table = read_slice(item, CLICK_COLUMNS, context)
        evidence = click_evidence(table, min_dwell_s=context.config.min_dwell_s)
    else:
        table = read_slice(item, SCORES.names, context)
        evidence = ranking_evidence(table)
    return scatter_evidence(evidence, item["slice"], context) | {"evidence_rows": len(table)}


# --- ranking -------------------------------------------------------------------------------------------


def read_training_words(parts: Sequence[str], context: CollectContext) -> Iterator[list[str]]:
    """The words of each document that training may see."""
    for text in document_texts(_documents(parts, TEXT_COLUMNS, context)):
        yield terms(text, context.language)


def write_shard(item: Item, context: CollectContext, corpus: Frequencies) -> Counts:
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
    texts = document_texts(_documents(item["parts"], TEXT_COLUMNS, context))
    write_table(_shard(item["shard"], context), build_shard(texts, weights))
    return {}


def write_groups(item: Item, context: CollectContext, size: int) -> int:
    """Write one bucket's queries in groups of `size`; returns their number."""
    queries = read_queries(item["bucket"], context)
    for start in range(0, len(queries), size):
        write_table(_file("groups", item["bucket"], start, context), queries.slice(start, size))
    return len(queries)


def groups(queries: Sequence[int], size: int) -> list[Item]:
    """One item per group, from the number of queries in each bucket."""
    return [
        {"bucket": bucket, "start": start}
        for bucket, number in enumerate(queries)
        for start in range(0, number, size)
    ]


def search_shards(item: Item, context: CollectContext, depth: int) -> Counts:
    """Write the best documents of some shards for each query of a group."""
    queries = read_table(_file("groups", item["bucket"], item["start"], context))["query"].to_pylist()
    shards = ((shard << DOCUMENT_BITS, read_table(_shard(shard, context))) for shard in item["shards"])
    rows, scores = search(shards, queries, depth, language=context.language)
    hits = pa.table({"row": to_arrow(rows, dtype="int64"), "score": to_arrow(scores)})
    write_table(_hits(item, item["shards"][0], context), hits)
    return {}


def merge_hits(item: Item, context: CollectContext, depth: int, shards: list[list[str]]) -> Counts:
    """Scatter the best documents of all shards for the queries of a group as evidence."""
    queries, number, documents = _merge(item, context, depth, shards, [])
    evidence = documents.append_column("query_id", queries["query_id"].take(pa.array(number)))
    return _scatter(evidence, item, context) | {"ranked": len(queries)}


def merge_pairs(item: Item, context: CollectContext, depth: int, shards: list[list[str]]) -> Counts:
    """Write the queries of a group with the texts of their best documents, in slices for a cross-encoder."""
    queries, number, documents = _merge(item, context, depth, shards, TEXT_COLUMNS)
    for name in ("query_id", "query"):
        documents = documents.append_column(name, queries[name].take(pa.array(number)))
    for start in range(0, len(queries), SCORED_QUERIES):
        chosen = documents.filter(pa.array((number >= start) & (number < start + SCORED_QUERIES)))
        write_table(_file("pairs", item["bucket"], item["start"] + start, context), chosen)
    return {"ranked": len(queries)}


class PairScoring:
    """Scores pairs of queries and documents with a cross-encoder."""

    def __init__(self, context: CollectContext, config: CrossEncoderConfig) -> None:
        from scalingnote.triplets.collect.transformer_models import PairScorer

        self._context, self._scorer = context, PairScorer(config)

    def __call__(self, item: Item) -> Counts:
        """Scatter the scores of one slice as evidence."""
        pairs = read_table(_file("pairs", item["bucket"], item["start"], self._context))
        scores = self._scorer.score(pairs["query"].to_pylist(), document_texts(pairs))
        at = pairs.schema.get_field_index("score")
        return _scatter(pairs.set_column(at, "score", pa.array(scores)), item, self._context)


def _merge(
    item: Item, context: CollectContext, depth: int, shards: list[list[str]], fields: list[str]
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
        start, stop = np.searchsorted(found, [shard << DOCUMENT_BITS, shard + 1 << DOCUMENT_BITS])
        if start < stop:
            local = pa.array(found[start:stop] - (shard << DOCUMENT_BITS))
            documents.append(_documents(parts, ["doc_id", *fields], context).take(local))
    return queries, query, pa.concat_tables(documents).append_column("score", pa.array(scores[query, place]))


def _documents(parts: Sequence[str], columns: list[str], context: CollectContext) -> pa.Table:
    """Columns of the documents that training may see."""
    table = pa.concat_tables(context.dataset.table(part, [*{"doc_id", *columns}]) for part in parts)
    seen = pc.invert(pc.is_in(table["doc_id"], value_set=context.held_out))
    return table.filter(seen).select(columns)


def _scatter(ranked: pa.Table, item: Item, context: CollectContext) -> Counts:
    name = f"ranked-{item['bucket']:05d}-{item['start']:09d}"
    return scatter_evidence(ranking_evidence(ranked), name, context)


def _shard(number: int, context: CollectContext) -> str:
    return context.path(f"rank/shards/{number:05d}.arrow")


def _hits(item: Item, first: int, context: CollectContext) -> str:
    return context.path(f"rank/hits/{item['bucket']:05d}-{item['start']:09d}/{first:05d}.parquet")


def _file(kind: str, bucket: int, start: int, context: CollectContext) -> str:
    return context.path(f"rank/{kind}/{bucket:05d}-{start:09d}.parquet")


# --- one hop -------------------------------------------------------------------------------------------


def one_hop(item: Item, context: CollectContext) -> Counts:
    """Write one bucket's queries, their one-hop triplets and the documents that their evidence judges."""
    bucket = item["bucket"]
    queries = read_queries(bucket, context)
    evidence = shuffle.gather(context.path("evidence"), bucket, schema=EVIDENCE)
    query_ids = queries["query_id"].combine_chunks()
    triplets, known, counts = one_hop_triplets(evidence, query_ids, config=context.config)
    for name, table in (("queries", queries), ("one_hop", triplets), ("known", known)):
        write_table(context.bucket(bucket, name), table)
    return counts


# --- association ---------------------------------------------------------------------------------------


class OwnKeys:
    """Scores the terms of a bucket's queries with the planner and scatters the keys that they own."""

    def __init__(self, context: CollectContext, config: AssociationConfig) -> None:
        self._context, self._config = context, config
        self._planner = load_planner(context.planner)

    def __call__(self, item: Item) -> Counts:
        """One bucket."""
        context, bucket = self._context, item["bucket"]
        queries = read_table(context.bucket(bucket, "queries"))
        scores = self._planner.term_scores(queries["query"].to_pylist())
        write_table(context.bucket(bucket, "terms"), scores.to_arrow(), use_dictionary=[])
        own, counts = association.own_keys(scores, query_numbers(bucket, len(queries)), config=self._config)
        del counts["queries"]  # QuerySelection counted them
        scatter_by(own, "key", "own", f"{bucket:05d}", context)
        write_table(context.bucket(bucket, "own"), own)  # also whole, for the filter: one file a bucket
        return counts | {"own_keys": len(own)}


def own_filter(item: Item, context: CollectContext) -> Counts:
    """Write a filter of all own keys, so that candidate keys that no query owns are not shuffled."""
    tables = (read_table(context.bucket(bucket, "own")) for bucket in range(context.parts))
    owned = association.key_filter(tables, keys=item["keys"])
    fs.write_bytes(context.path("own.bits"), owned.tobytes())
    return {}


def candidates(item: Item, context: CollectContext, config: AssociationConfig) -> Counts:
    """Scatter the candidate keys of one bucket's queries."""
    bucket = item["bucket"]
    with fs.open_input(context.path("own.bits")) as bits:
        owned = np.frombuffer(bits.read_buffer(), np.uint8)
    scores = TermScores.from_arrow(read_table(context.bucket(bucket, "terms")))
    numbers = query_numbers(bucket, len(scores.offsets) - 1)
    # Numbers depend on the number of buckets; ties must not.
    ties = shuffle.hash_of(read_table(context.bucket(bucket, "queries"))["query_id"])
    keys, counts = association.candidate_keys(scores, numbers, config=config, ties=ties, owned=owned)
    # A query without click triplets has none to transfer by clicks. By relevance all queries must emit
    # their keys, because an association there needs both directions.
    one_hop = read_table(context.bucket(bucket, "one_hop"))
    with_clicks = pc.unique(one_hop.filter(pc.equal(one_hop["source"], "click"))["row"]).to_numpy()
    useless = (keys["kind"].to_numpy() == association.CLICK) & ~np.isin(
        rows_of_numbers(keys["query"]), with_clicks
    )
    scatter_by(keys.filter(pa.array(~useless)), "key", "candidates", f"{bucket:05d}", context)
    return counts


def associate(item: Item, context: CollectContext, config: AssociationConfig) -> Counts:
    """Join one bucket of keys: settled pairs are scattered by associate, the others by pair.

    All queries of a key meet in this one task, whatever the number of buckets. It holds 17 bytes of each that
    owns the key, 29 of each that emits it, and up to `max_associates` pairs of 21 bytes of each that owns it:
    a key that a million queries own takes 1 to 2 GB with the default of 32.
    """
    bucket = item["bucket"]
    own = shuffle.gather(context.path("own"), bucket, schema=association.OWN_KEYS)
    emitted = shuffle.gather(context.path("candidates"), bucket, schema=association.CANDIDATES)
    settled, one_way, counts = association.join(own, emitted, config=config)
    by_pair = shuffle.bucket_of(pa.array(association.pair_keys(one_way)), context.parts)
    shuffle.scatter(one_way, by_pair, target=context.path("pairs"), name=f"{bucket:05d}")
    return counts | _scatter_pairs(settled, f"settled-{bucket:05d}", context)


def mutual(item: Item, context: CollectContext) -> Counts:
    """Find the pairs of one bucket that exist in both directions."""
    bucket = item["bucket"]
    pairs = shuffle.gather(context.path("pairs"), bucket, schema=association.ASSOCIATIONS)
    return _scatter_pairs(association.mutual_pairs(pairs), f"mutual-{bucket:05d}", context)


def _scatter_pairs(pairs: pa.Table, name: str, context: CollectContext) -> Counts:
    """Write pairs to the buckets of their associates; counts by kind."""
    to = buckets_of_numbers(pairs["associate"])
    shuffle.scatter(pairs, to, target=context.path("lenders"), name=name)
    kinds = pairs["kind"].to_numpy()
    return {
        f"{source}_associations": int((kinds == kind).sum()) for kind, source in association.KINDS.items()
    }


# --- generated queries ---------------------------------------------------------------------------------


class QueryWriting:
    """Writes generated queries as parts of their own, without those that repeat a test query."""

    def __init__(self, context: CollectContext, config: QueryGenerationConfig) -> None:
        from scalingnote.triplets.collect.transformer_models import QueryGenerator

        self._context, self._generate = context, QueryGenerator(config)
        self._decontaminate = _decontaminator(context)

    def __call__(self, item: Item) -> Counts:
        """All queries of one bucket, with triplets or without."""
        context, bucket = self._context, item["bucket"]
        generated, counts = self._generate(read_queries(bucket, context))
        if self._decontaminate:
            clean = self._decontaminate(generated["query"]) == CLEAN
            counts["generated_duplicates"] = int((~clean).sum())
            generated = generated.filter(pa.array(clean))
        write_table(fs.join(context.output, f"generated/part-{bucket:05d}.parquet"), generated)
        return counts


def _decontaminator(context: CollectContext) -> Decontaminator | None:
    if not context.config.decontamination or not len(context.test_queries):
        return None
    return Decontaminator(context.test_queries)
