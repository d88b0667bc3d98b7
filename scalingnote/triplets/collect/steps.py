"""The steps of collect, each over one slice or one bucket, and the files between them.

    queries ─────► select_queries ─by query─► one_hop ──► bucket: queries, one_hop, known
    log, scores ─► take_evidence ──by query─────┤
    documents ─► ranking.py ───────by query─────┘
    bucket ─► own_keys, candidates ─by key─► associate ─by pair─► mutual ─by associate─► triplet_parts.py

A step is a function of a numbered item and the context, or a class if it loads a model for a GPU. Steps do
not use Ray or each other. A step scatters rows to buckets by query_id, doc_id or key, in files with names
that depend only on its input: if it is repeated after a crash, it writes the same files. A query is numbered
by its bucket and its row in it, so that association works only on integers.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.core.words import Language
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact, open_artifact, write_table
from scalingnote.storage.schema import SCORES
from scalingnote.storage.shuffle import NumberedSlice
from scalingnote.triplets.collect import association
from scalingnote.triplets.collect.decontamination import CLEAN, EXACT, NEAR, find_repeats
from scalingnote.triplets.collect.triplets import (
    CLICK_COLUMNS,
    EVIDENCE,
    click_evidence,
    condense,
    one_hop_triplets,
    ranking_evidence,
)
from scalingnote.triplets.config import (
    MAX_EVIDENCE,
    AssociationConfig,
    CollectConfig,
    QueryGenerationConfig,
)
from scalingnote.triplets.planner.planner import Planner, TermScores
from scalingnote.triplets.planner.planner import load as load_planner
from scalingnote.triplets.work_folder import WorkFolder, read_slice

ROW_BITS = 40  # of a query's number, for its row; the bits above them are its bucket
QUERY_SCHEMA = pa.schema({"query_id": pa.string(), "query": pa.string()})
Bucket = tuple[int, int]  # its number, twice: the number of the work item is that of the bucket
Counts = dict[str, int]


@dataclass(frozen=True)
class CollectContext(WorkFolder):
    """Input that all steps share; it is small. The parts of the artifact are the buckets."""

    config: CollectConfig
    dataset: Artifact
    planner: Artifact
    held_out: pa.Array  # doc_ids excluded from training
    test_queries: pa.Array  # their texts
    output: str
    language: Language = "none"  # of the words that documents are ranked by


def in_bucket(number: int, table: str) -> str:
    """Return the name of a table of one bucket."""
    return f"bucket/{number:05d}/{table}"


def read_queries(bucket: int, context: CollectContext) -> pa.Table:
    """Read the queries of a bucket, sorted by query_id: a query's row in it is part of its number."""
    return context.gather("queries", bucket, QUERY_SCHEMA).sort_by("query_id")


def scatter_evidence(evidence: pa.Table, name: str, context: CollectContext) -> Counts:
    """Write evidence, condensed, to buckets by query, without documents excluded from training."""
    allowed = evidence.filter(pc.invert(pc.is_in(evidence["doc_id"], value_set=context.held_out)))
    condensed = condense(allowed, most=MAX_EVIDENCE, seed=context.config.seed)
    context.scatter(condensed, "query_id", "evidence", name)
    return {"held_out_rows": len(evidence) - len(allowed)}


def query_numbers(bucket: int, rows: int) -> UInt64[ndarray, " rows"]:
    """Compute the numbers of the first `rows` queries of a bucket."""
    return np.arange(rows, dtype=np.uint64) | np.uint64(bucket << ROW_BITS)


def rows_of_numbers(numbers: pa.ChunkedArray) -> Int64[ndarray, " queries"]:
    """Extract the rows, within their buckets, of numbered queries."""
    values: UInt64[ndarray, " queries"] = numbers.to_numpy()
    return (values & np.uint64((1 << ROW_BITS) - 1)).astype(np.int64)


def buckets_of_numbers(numbers: pa.ChunkedArray) -> Int64[ndarray, " queries"]:
    """Extract the buckets of numbered queries."""
    values: UInt64[ndarray, " queries"] = numbers.to_numpy()
    return (values >> np.uint64(ROW_BITS)).astype(np.int64)


# --- queries and evidence ------------------------------------------------------------------------------


def select_queries(item: NumberedSlice, *, context: CollectContext) -> Counts:
    """Scatter the training queries of one slice by query_id, without those that repeat a test query."""
    table = read_slice(context.dataset, item[1], [*QUERY_SCHEMA.names, "split"])
    table = table.filter(pc.equal(table["split"], "train")).select(QUERY_SCHEMA.names)
    counts = {"query_rows": len(table)}
    if context.config.decontamination:
        verdict = find_repeats(table["query"], context.test_queries)
        counts["exact_duplicates"] = int((verdict == EXACT).sum())
        counts["near_duplicates"] = int((verdict == NEAR).sum())
        table = table.filter(pa.array(verdict == CLEAN))
    context.scatter(table, "query_id", "queries", f"{item[0]:05d}")
    return counts | {"queries": len(table)}


def take_evidence(item: tuple[int, tuple[str, list[str]]], *, context: CollectContext) -> Counts:
    """Scatter the evidence of one slice of a table, the click log or the scores."""
    number, (name, parts) = item
    if name == "impressions":
        table = read_slice(context.dataset, parts, CLICK_COLUMNS)
        evidence = click_evidence(table, min_dwell_s=context.config.min_dwell_s)
    else:
        table = read_slice(context.dataset, parts, SCORES.names)
        evidence = ranking_evidence(table)
    return scatter_evidence(evidence, f"{name}-{number:05d}", context) | {"evidence_rows": len(table)}


# --- one hop -------------------------------------------------------------------------------------------


def one_hop(item: Bucket, *, context: CollectContext) -> Counts:
    """Write one bucket's queries, their one-hop triplets and the documents that their evidence judges."""
    bucket = item[1]
    queries = read_queries(bucket, context)
    evidence = context.gather("evidence", bucket, EVIDENCE)
    query_ids = queries["query_id"].combine_chunks()
    triplets, known, counts = one_hop_triplets(evidence, query_ids, config=context.config)
    for name, table in (("queries", queries), ("one_hop", triplets), ("known", known)):
        context.write(in_bucket(bucket, name), table)
    return counts


# --- association ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _planner(uri: str, digest: str) -> Planner:
    """Load a planner once in each process; `digest` identifies its contents in the cache."""
    return load_planner(open_artifact(uri, kind="planner"))


def own_keys(item: Bucket, *, context: CollectContext, config: AssociationConfig) -> Counts:
    """Score the terms of one bucket's queries with the planner and scatter the keys that they own."""
    bucket = item[1]
    queries = context.read(in_bucket(bucket, "queries"))
    planner = _planner(context.planner.uri, context.planner.digest)
    scores = planner.term_scores(queries["query"].to_pylist())
    context.write(in_bucket(bucket, "terms"), scores.to_arrow())
    own, counts = association.own_keys(scores, query_numbers(bucket, len(queries)), config=config)
    context.scatter(own, "key", "own", f"{bucket:05d}")
    context.write(in_bucket(bucket, "own"), own)  # also as one file per bucket, for the filter
    return counts | {"own_keys": len(own)}


def own_filter(item: tuple[int, int], *, context: CollectContext) -> Counts:
    """Write a filter of all own keys, so that other keys are not shuffled; the item is their number."""
    tables = (context.read(in_bucket(bucket, "own")) for bucket in range(context.buckets))
    key_bits = association.key_filter(tables, keys=item[1])
    fs.write_bytes(context.path("own.bits"), key_bits.tobytes())
    return {}


def candidates(item: Bucket, *, context: CollectContext, config: AssociationConfig) -> Counts:
    """Scatter the candidate keys of one bucket's queries."""
    bucket = item[1]
    with fs.open_input(context.path("own.bits")) as bits:
        key_bits = np.frombuffer(bits.read_buffer(), np.uint8)
    scores = TermScores.from_arrow(context.read(in_bucket(bucket, "terms")))
    numbers = query_numbers(bucket, len(scores.offsets) - 1)
    # Numbers depend on the number of buckets; ties must not.
    ties = shuffle.hash_of(context.read(in_bucket(bucket, "queries"))["query_id"])
    keys, counts = association.candidate_keys(scores, numbers, config=config, ties=ties, owned=key_bits)
    # A query without click triplets has none to transfer by clicks. For relevance all queries must emit their
    # keys, because such an association needs both directions.
    one_hop = context.read(in_bucket(bucket, "one_hop"))
    clicked_rows = pc.unique(one_hop.filter(pc.equal(one_hop["source"], "click"))["row"]).to_numpy()
    useless = (keys["kind"].to_numpy() == association.CLICK) & ~np.isin(
        rows_of_numbers(keys["query"]), clicked_rows
    )
    context.scatter(keys.filter(pa.array(~useless)), "key", "candidates", f"{bucket:05d}")
    return counts


def associate(item: Bucket, *, context: CollectContext, config: AssociationConfig) -> Counts:
    """Join one bucket of keys: settled pairs are scattered by associate, the others by pair.

    All queries of a key are in this one task, for any number of buckets. It holds 17 bytes for each query
    that owns the key, 29 for each that emits it, and up to `max_associates` pairs of 21 bytes for each that
    owns it: a key that a million queries own takes 1 to 2 GB with the default of 32.
    """
    bucket = item[1]
    own = context.gather("own", bucket, association.OWN_KEYS)
    candidate_keys = context.gather("candidates", bucket, association.CANDIDATES)
    settled, one_way, counts = association.join(own, candidate_keys, config=config)
    by_pair = shuffle.bucket_of(pa.array(association.pair_keys(one_way)), context.buckets)
    context.scatter(one_way, by_pair, "pairs", f"{bucket:05d}")
    return counts | _scatter_pairs(settled, f"settled-{bucket:05d}", context)


def mutual(item: Bucket, *, context: CollectContext) -> Counts:
    """Find the pairs of one bucket that exist in both directions."""
    bucket = item[1]
    pairs = context.gather("pairs", bucket, association.ASSOCIATIONS)
    return _scatter_pairs(association.mutual_pairs(pairs), f"mutual-{bucket:05d}", context)


def _scatter_pairs(pairs: pa.Table, name: str, context: CollectContext) -> Counts:
    """Write pairs to the buckets of their associates; return counts by kind."""
    context.scatter(pairs, buckets_of_numbers(pairs["associate"]), "lenders", name)
    kinds = pairs["kind"].to_numpy()
    return {
        f"{source}_associations": int((kinds == kind).sum()) for kind, source in association.KINDS.items()
    }


# --- generated queries ---------------------------------------------------------------------------------


class QueryWriting:
    """Worker that writes generated queries as separate parts, without those that repeat a test query."""

    def __init__(self, context: CollectContext, config: QueryGenerationConfig) -> None:
        from scalingnote.triplets.collect.transformer_models import QueryGenerator

        self._context, self._generate = context, QueryGenerator(config)

    def __call__(self, item: Bucket) -> Counts:
        """Generate queries from all queries of one bucket, with triplets or without."""
        context, bucket = self._context, item[1]
        generated, counts = self._generate(read_queries(bucket, context))
        if context.config.decontamination:
            clean = find_repeats(generated["query"], context.test_queries) == CLEAN
            counts["generated_duplicates"] = int((~clean).sum())
            generated = generated.filter(pa.array(clean))
        write_table(fs.join(context.output, f"generated/part-{bucket:05d}.parquet"), generated)
        return counts
