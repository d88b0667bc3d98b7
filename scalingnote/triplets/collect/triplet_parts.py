"""The parts of the triplets artifact.

bucket (one hop), pairs of associates ─► transfer ─by query─► multi-hop candidates
bucket (one hop, known), multi-hop candidates ─► write_part ─► triplets/, answers/, counts
"""

from collections import Counter
from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table
from scalingnote.storage.schema import ANSWERS, TRIPLETS
from scalingnote.storage.shuffle import JsonRecord
from scalingnote.triplets.collect.association import ASSOCIATIONS, KINDS
from scalingnote.triplets.collect.statistics import part_statistics
from scalingnote.triplets.collect.steps import (
    Bucket,
    CollectContext,
    Counts,
    buckets_of_numbers,
    in_bucket,
    rows_of_numbers,
)
from scalingnote.triplets.collect.triplets import (
    MULTI_HOP,
    hash_fraction,
    multi_hop_candidates,
    select_multi_hop,
)
from scalingnote.triplets.config import CollectConfig, Mixing, SourceSampling

MAX_MULTI_HOP = 4  # triplets per query and source, strongest association first
OFFERED_PER_ACCEPTED = 4  # candidates of an associate per triplet that a query accepts, as some are rejected


def transfer(item: Bucket, *, context: CollectContext) -> Counts:
    """Scatter the triplets of one bucket's queries to the queries that are associated with them."""
    bucket = item[1]
    pairs = context.gather("lenders", bucket, ASSOCIATIONS)
    triplets = context.read(in_bucket(bucket, "one_hop"))
    query_ids = context.read(in_bucket(bucket, "queries"))["query_id"].combine_chunks()
    counts = Counter(loans=0, lent_over_cap=0)
    for kind, source in KINDS.items():
        kind_pairs = pairs.filter(pc.equal(pairs["kind"], kind))
        rows, left_out = multi_hop_candidates(
            triplets,
            query_ids,
            source=source,
            associates=rows_of_numbers(kind_pairs["associate"]),
            queries=kind_pairs["query"].to_numpy().astype(np.int64),
            strength=kind_pairs["strength"].to_numpy(),
            limit=OFFERED_PER_ACCEPTED * MAX_MULTI_HOP,
            seed=context.config.seed,
        )
        numbers, at = rows["row"].cast(pa.uint64()), rows.schema.get_field_index("row")
        to = buckets_of_numbers(numbers)
        rows = rows.set_column(at, "row", pa.array(rows_of_numbers(numbers)))
        context.scatter(rows, to, "loans", f"{source}-{bucket:05d}")
        counts.update(loans=len(rows), lent_over_cap=left_out)
    return dict(counts)


def write_part(item: Bucket, *, context: CollectContext) -> JsonRecord:
    """Write one part of the artifact: a bucket's one-hop and multi-hop triplets, sampled and split.

    Returns:
        Its `files`, for the manifest, and `counts`.
    """
    config, bucket = context.config, item[1]
    queries = context.read(in_bucket(bucket, "queries"))
    one_hop = context.read(in_bucket(bucket, "one_hop"))
    counts: Counter[str] = Counter()
    in_validation = _in_validation(queries["query_id"], config)
    triplets = [_triplets(one_hop, queries, in_validation, hop="one")]
    known = context.read(in_bucket(bucket, "known"))
    if config.association:
        candidates = context.gather("loans", bucket, MULTI_HOP)
        # A triplet of a query in the other split would mix training and validation data.
        across = in_validation[candidates["row"].to_numpy()] != _in_validation(candidates["via"], config)
        candidates = candidates.filter(pa.array(~across))
        counts["multi_across_split"] = int(across.sum())
        multi_hop, left_out = select_multi_hop(candidates, known, limit=MAX_MULTI_HOP, seed=config.seed)
        counts.update(left_out)
        triplets.append(_triplets(multi_hop, queries, in_validation, hop="multi"))
    # All answers, also those without a triplet (for example short clicks): `mine` must not draw them.
    answers = known.filter(known["positive"])
    answers = pa.table([queries["query_id"].take(answers["row"]), answers["doc_id"]], schema=ANSWERS)
    write_table(fs.join(context.output, f"answers/part-{bucket:05d}.parquet"), answers)
    table, source_counts = sample_sources(pa.concat_tables(triplets), config.mixing, seed=config.seed)
    order = [(name, "ascending") for name in ("query_id", "source", "hop", "positive")]
    table = table.take(pc.sort_indices(table, order)).combine_chunks()
    counts.update(source_counts)
    counts.update({split["values"]: split["counts"] for split in pc.value_counts(table["split"]).to_pylist()})
    counts["triplets"] = len(table)
    counts.update(part_statistics(table))
    context.scatter(pa.table({"doc_id": _documents(table)}), "doc_id", "documents", f"{bucket:05d}")
    name = f"triplets/part-{bucket:05d}.parquet"
    part = write_table(fs.join(context.output, name), table)
    return {"files": [(name, vars(part))], "counts": dict(counts)}


def sample_sources(triplets: pa.Table, mixing: Mixing, *, seed: int) -> tuple[pa.Table, dict[str, int]]:
    """Sample and weight each of the four sources (click or relevance, one hop or multi-hop).

    A row is kept by the hash of its query, positive and source, so a larger share keeps every row that a
    smaller one keeps. Counts are the rows of each source before (``{source}_offered``) and after.
    """
    sources = pc.binary_join_element_wise(triplets["source"], triplets["hop"], "_").to_pylist()
    shares: dict[str, SourceSampling] = {name: getattr(mixing, name) for name in sorted(set(sources))}
    weights = np.array([shares[name].weight for name in sources], dtype=np.float32)
    is_kept = np.ones(len(sources), dtype=bool)
    if any(share.sample < 1 for share in shares.values()):
        rows = zip(triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), sources, strict=True)
        is_kept = np.array(
            [hash_fraction("\x1f".join(row), seed=seed) < shares[row[2]].sample for row in rows]
        )
    counts = {f"{name}_offered": sources.count(name) for name in shares}
    counts |= dict.fromkeys(shares, 0) | Counter(compress(sources, is_kept))
    at = TRIPLETS.get_field_index("weight")
    table = triplets.set_column(at, TRIPLETS.field(at), pa.array(weights))
    return table.filter(pa.array(is_kept)), counts


def _triplets(
    rows: pa.Table, queries: pa.Table, in_validation: Bool[ndarray, " queries"], *, hop: str
) -> pa.Table:
    """Convert ONE_HOP or MULTI_HOP rows to the schema TRIPLETS."""
    number = rows["row"]
    split = np.where(in_validation[number.to_numpy()], "validation", "train")
    columns = {
        "query_id": queries["query_id"].take(number),
        "query": queries["query"].take(number),
        "positive": rows["positive"],
        "negatives": rows["negatives"],
        "source": rows["source"],
        "hop": pa.array([hop] * len(rows), pa.string()),
        "weight": pa.array(np.ones(len(rows), dtype=np.float32)),
        "split": pa.array(split.tolist(), pa.string()),
    }
    # Multi-hop triplets have no scores, because theirs are for the associate's query.
    columns |= {"scores": rows["scores"]} if hop == "one" else {"via": rows["via"]}
    return pa.table(
        [columns.get(field.name, pa.nulls(len(rows), field.type)) for field in TRIPLETS], schema=TRIPLETS
    )


def _in_validation(query_ids: pa.ChunkedArray, config: CollectConfig) -> Bool[ndarray, " rows"]:
    """Return whether each row's query is in the validation split."""
    coded = pc.dictionary_encode(query_ids.combine_chunks())
    fractions = [hash_fraction(query_id, seed=config.seed) for query_id in coded.dictionary.to_pylist()]
    mask: ndarray = (
        np.array(fractions)[coded.indices.to_numpy(zero_copy_only=False)] < config.validation_fraction
    )
    return mask


def _documents(triplets: pa.Table) -> pa.Array:
    """Find the distinct doc_ids of positives and negatives."""
    negatives = pc.list_flatten(triplets["negatives"])
    return pc.unique(pa.chunked_array([*triplets["positive"].chunks, *negatives.chunks], pa.string()))
