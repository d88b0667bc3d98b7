"""The steps of collecting, each over one slice or one bucket; every table between them is a file.

    queries ─────► TakeQueries ───by query──► one_hop ──► a bucket: its queries, triplets, what is known
    log, scores ─► take_evidence ─by query──────┘
    bucket ─► OwnKeys, candidates ─by key─► associate ─by pair─► mutual ─by lender─► lend_bucket ─┐
    bucket ─────────────────────────────────────────────► finish ◄───────────────by borrower──────┘ ─► a part

A query is numbered by its bucket and its row in it, so that associating handles nothing but integers.
Steps know neither Ray nor each other; a step that is done again writes the same files again.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Bool, Int64, UInt64
from numpy import ndarray

from scalingnote.collect import association
from scalingnote.collect.assemble import assemble
from scalingnote.collect.config import CollectConfig
from scalingnote.collect.evidence import EVIDENCE, exposures, rankings
from scalingnote.collect.mixing import mix
from scalingnote.collect.multi_hop import LOANS, borrow, lend
from scalingnote.collect.statistics import describe, sample
from scalingnote.collect.term_keys import (
    CANDIDATES,
    CLICK,
    KINDS,
    OWN,
    KeyFilter,
    candidate_keys,
    key_filter,
)
from scalingnote.collect.triplet import share
from scalingnote.planner.terms import TermScores
from scalingnote.storage import exchange
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, write_table
from scalingnote.storage.schema import ANSWERS, TRIPLETS

ROW_BITS = 40
LENT_PER_BORROWED = 4  # a lender offers so many times what one borrower takes: some of it will be refused
QUERY = pa.schema({"query_id": pa.string(), "query": pa.string()})
Item = dict[str, Any]
Counts = dict[str, int]


@dataclass(frozen=True)
class Context:
    """What every step may read; small, and equal for all of them."""

    config: CollectConfig
    dataset: Artifact
    planner: Artifact
    held_out: pa.Array  # doc_ids that training may not see
    test_queries: pa.Array  # their texts
    work: str
    output: str

    def folder(self, name: str) -> str:
        """Where an exchange between two steps lies."""
        return fs.join(self.work, name)

    def bucket(self, number: int, table: str) -> str:
        """A table of one finished bucket."""
        return fs.join(self.work, "bucket", f"{number:05d}", f"{table}.parquet")


# --- from the dataset into buckets ---------------------------------------------------------------------


def take_evidence(item: Item, context: Context) -> Counts:
    """One row group of the click log or of the scores, less held-out documents."""
    table = row_group(item)
    if item["table"] == "impressions":
        table = exposures(table, min_dwell_s=context.config.min_dwell_s)
    else:
        table = rankings(table)
    return keep_evidence(table, item["slice"], context) | {"evidence_rows": item["rows"]}


def keep_evidence(evidence: pa.Table, name: str, context: Context) -> Counts:
    """Scatter evidence on documents that training may see."""
    allowed = evidence.filter(pc.invert(pc.is_in(evidence["doc_id"], value_set=context.held_out)))
    scatter_by(allowed, "query_id", context.folder("evidence"), name, context)
    return {"held_out_rows": len(evidence) - len(allowed)}


def queries_of(bucket: int, context: Context) -> pa.Table:
    """The queries of a bucket by query_id: a query's row in it is its number."""
    return exchange.gather(context.folder("queries"), bucket, schema=QUERY).sort_by("query_id")


# --- one hop -------------------------------------------------------------------------------------------


def one_hop(item: Item, context: Context) -> Counts:
    """One bucket's own triplets, and what its queries know of documents."""
    bucket = item["bucket"]
    queries = queries_of(bucket, context)
    evidence = exchange.gather(context.folder("evidence"), bucket, schema=EVIDENCE)
    query_ids = queries["query_id"].combine_chunks()
    triplets, known, counts = assemble(evidence, query_ids, config=context.config)
    for name, table in (("queries", queries), ("one_hop", triplets), ("known", known)):
        write_table(context.bucket(bucket, name), table)
    return counts


# --- association ---------------------------------------------------------------------------------------


def own_filter(item: Item, context: Context) -> Counts:
    """All own keys as a bit table: a key that nobody asks for need not be shuffled."""
    tables = [context.bucket(bucket, "own") for bucket in range(context.config.parts)]
    keys = sum(pq.read_metadata(fs.open_input(uri)).num_rows for uri in tables)
    found = key_filter((read(uri) for uri in tables), keys=keys)
    fs.write_bytes(context.folder("own.bits"), found.bits.tobytes())
    return {"own_keys": keys}


def candidates(item: Item, context: Context) -> Counts:
    """The keys that one bucket's queries answer for, of those somebody asks for."""
    config, bucket = context.config.association, item["bucket"]
    assert config is not None
    with fs.open_input(context.folder("own.bits")) as bits:
        owned = KeyFilter(np.frombuffer(bits.read_buffer(), np.uint8))
    scores = TermScores.from_arrow(read(context.bucket(bucket, "terms")))
    ids = ids_of(bucket, len(scores.offsets) - 1)
    # A query is numbered by the bucket it lies in; which of two queries is taken must not hang on that.
    ties = exchange.hash_of(read(context.bucket(bucket, "queries"))["query_id"])
    found, counts = candidate_keys(scores, ids, config=config, ties=ties, owned=owned)
    # Who has no click triplet has none to lend; that an association by relevance is mutual, all must say.
    own = read(context.bucket(bucket, "one_hop"))
    clicked = pc.unique(own.filter(pc.equal(own["source"], "click"))["row"]).to_numpy()
    silent = (found["kind"].to_numpy() == CLICK) & ~np.isin(row_of(found["query"]), clicked)
    found = found.filter(pa.array(~silent))
    scatter_by(found, "key", context.folder("candidates"), f"{bucket:05d}", context)
    return counts


def associate(item: Item, context: Context) -> Counts:
    """One bucket of keys: the pairs that are settled go to their lenders, the others meet by pair."""
    config, bucket = context.config.association, item["bucket"]
    assert config is not None
    own = exchange.gather(context.folder("own"), bucket, schema=OWN)
    answers = exchange.gather(context.folder("candidates"), bucket, schema=CANDIDATES)
    settled, one_way, counts = association.join(own, answers, config=config)
    _scatter_pairs(settled, f"settled-{bucket:05d}", context)
    keys = pa.array(association.pair_keys(one_way))
    exchange.scatter(
        one_way,
        exchange.bucket_of(keys, context.config.parts),
        target=context.folder("pairs"),
        name=f"{bucket:05d}",
    )
    return counts | _by_kind(settled)


def mutual(item: Item, context: Context) -> Counts:
    """One bucket of pairs that held one way: those that hold both ways."""
    bucket = item["bucket"]
    pairs = exchange.gather(context.folder("pairs"), bucket, schema=association.ASSOCIATIONS)
    both = association.mutual(pairs)
    _scatter_pairs(both, f"mutual-{bucket:05d}", context)
    return _by_kind(both)


def _by_kind(pairs: pa.Table) -> Counts:
    kinds = pairs["kind"].to_numpy()
    return {f"{name}_associations": int((kinds == kind).sum()) for kind, name in KINDS.items()}


# --- multi-hop and the end -----------------------------------------------------------------------------


def lend_bucket(item: Item, context: Context) -> Counts:
    """What one bucket's queries lend to the queries associated with them."""
    bucket = item["bucket"]
    pairs = exchange.gather(context.folder("lenders"), bucket, schema=association.ASSOCIATIONS)
    triplets = read(context.bucket(bucket, "one_hop"))
    query_ids = read(context.bucket(bucket, "queries"))["query_id"].combine_chunks()
    counts = Counter(loans=0, lent_over_cap=0)
    for kind, source in KINDS.items():
        mine = pairs.filter(pc.equal(pairs["kind"], kind))
        borrower = mine["query"].to_numpy()
        loans, over = lend(
            triplets,
            query_ids,
            source=source,
            lender=row_of(mine["associate"]),
            borrower=borrower.astype(np.int64),
            strength=mine["strength"].to_numpy(),
            most=LENT_PER_BORROWED * context.config.max_multi_hop,
            seed=context.config.seed,
        )
        to = (loans["row"].to_numpy() >> ROW_BITS).astype(np.int64)
        at = loans.schema.get_field_index("row")
        rows = loans["row"].to_numpy() & ((1 << ROW_BITS) - 1)
        loans = loans.set_column(at, "row", pa.array(rows))
        exchange.scatter(loans, to, target=context.folder("loans"), name=f"{source}-{bucket:05d}")
        counts.update(loans=len(loans), lent_over_cap=over)
    return dict(counts)


def finish(item: Item, context: Context) -> tuple[str, Part, Counts]:
    """One part of the artifact: a bucket's own triplets and those it borrowed, mixed and split."""
    config, bucket = context.config, item["bucket"]
    queries = read(context.bucket(bucket, "queries"))
    own = read(context.bucket(bucket, "one_hop"))
    counts: Counter[str] = Counter()
    held = _in_validation(queries["query_id"], config)
    tables = [_triplets(own, queries, held, hop="one")]
    known = read(context.bucket(bucket, "known"))
    if config.association:
        loans = exchange.gather(context.folder("loans"), bucket, schema=LOANS)
        # Either way a loan across the split would put what is trained on among what is measured.
        across = held[loans["row"].to_numpy()] != _in_validation(loans["via"], config)
        loans = loans.filter(pa.array(~across))
        counts["multi_across_split"] = int(across.sum())
        borrowed, refused = borrow(loans, known, most=config.max_multi_hop, seed=config.seed)
        counts.update(refused)
        tables.append(_triplets(borrowed, queries, held, hop="multi"))
    answers = known.filter(known["positive"])
    write_table(fs.join(context.output, f"answers/part-{bucket:05d}.parquet"), _answers(answers, queries))
    table, mixed = mix(pa.concat_tables(tables), config.mixing, seed=config.seed)
    order = [(name, "ascending") for name in ("query_id", "source", "hop", "positive")]
    table = table.take(pc.sort_indices(table, order)).combine_chunks()
    counts.update(mixed)
    counts.update({found["values"]: found["counts"] for found in pc.value_counts(table["split"]).to_pylist()})
    counts["triplets"] = len(table)
    counts.update(describe(table))
    write_table(context.bucket(bucket, "sample"), sample(table, seed=config.seed))
    documents = pc.unique(
        pa.concat_arrays([*table["positive"].chunks, *pc.list_flatten(table["negatives"]).chunks])
    )
    scatter_by(
        pa.table({"doc_id": documents}), "doc_id", context.folder("documents"), f"{bucket:05d}", context
    )
    name = f"triplets/part-{bucket:05d}.parquet"
    return name, write_table(fs.join(context.output, name), table), dict(counts)


def _answers(known: pa.Table, queries: pa.Table) -> pa.Table:
    """What answers a query, also where no triplet says so (too short a click, no negative): never mine it."""
    columns = [queries["query_id"].take(known["row"]), known["doc_id"]]
    return pa.table(columns, schema=ANSWERS)


def _triplets(rows: pa.Table, queries: pa.Table, held: Bool[ndarray, " queries"], *, hop: str) -> pa.Table:
    split = np.where(held[rows["row"].to_numpy()], "validation", "train")
    via = rows["via"] if hop == "multi" else pa.nulls(len(rows), pa.string())
    # What a ranking model said of a lent document, it said for the lender's query.
    scores = rows["scores"] if hop == "one" else pa.nulls(len(rows), TRIPLETS.field("scores").type)
    columns = {
        "query_id": queries["query_id"].take(rows["row"]),
        "query": queries["query"].take(rows["row"]),
        "positive": rows["positive"],
        "negatives": rows["negatives"],
        "source": rows["source"],
        "hop": pa.array([hop] * len(rows), pa.string()),
        "via": via,
        "weight": pa.array(np.ones(len(rows), dtype=np.float32)),
        "scores": scores,
        "split": pa.array(split.tolist(), pa.string()),
    }
    return pa.table([columns[field.name] for field in TRIPLETS], schema=TRIPLETS)


def _in_validation(query_ids: pa.ChunkedArray, config: CollectConfig) -> Bool[ndarray, " rows"]:
    """Whether a row's query is one of those that are measured and not trained on."""
    coded = pc.dictionary_encode(query_ids.combine_chunks())
    held_out = [share(q, seed=config.seed) < config.validation_fraction for q in coded.dictionary.to_pylist()]
    found: ndarray = np.array(held_out, dtype=bool)[coded.indices.to_numpy(zero_copy_only=False)]
    return found


# --- files ---------------------------------------------------------------------------------------------


def row_group(item: Item, columns: list[str] | None = None) -> pa.Table:
    """The row group of a dataset's file that an item names."""
    with fs.open_input(item["uri"]) as file:
        return pq.ParquetFile(file).read_row_group(item["group"], columns=columns)


def read(uri: str) -> pa.Table:
    """A whole Parquet file."""
    with fs.open_input(uri) as file:
        return pq.read_table(file)


def scatter_by(table: pa.Table, key: str, target: str, name: str, context: Context) -> None:
    """Deal rows out to buckets by a column."""
    exchange.scatter(table, exchange.bucket_of(table[key], context.config.parts), target=target, name=name)


def _scatter_pairs(pairs: pa.Table, name: str, context: Context) -> None:
    """To the buckets of those who lend."""
    to = (pairs["associate"].to_numpy() >> np.uint64(ROW_BITS)).astype(np.int64)
    exchange.scatter(pairs, to, target=context.folder("lenders"), name=name)


def ids_of(bucket: int, rows: int) -> UInt64[ndarray, " rows"]:
    """The numbers of a bucket's queries."""
    return np.arange(rows, dtype=np.uint64) | np.uint64(bucket << ROW_BITS)


def row_of(numbers: pa.ChunkedArray) -> Int64[ndarray, " rows"]:
    """The rows, in their buckets, of numbered queries."""
    values: UInt64[ndarray, " rows"] = numbers.to_numpy()
    return (values & np.uint64((1 << ROW_BITS) - 1)).astype(np.int64)
