"""The parts of the triplets artifact, and its statistics page.

    bucket (one hop), pairs of associates ─► transfer ─by query─► multi-hop candidates
    bucket (one hop, known), multi-hop candidates ─► write_part ─► triplets/, answers/, counts, sample
    counts, sample, documents ─► statistics ─► statistics.json, statistics.md

The page holds the paper's Tables 1 and 2, the sources of rows, and a few rows to read.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import compress, groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.core.reports import ReportPage, ReportSection, ReportTable
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import ANSWERS, DOCUMENT_COLUMNS, TEXT_COLUMNS, TRIPLETS
from scalingnote.storage.shuffle import JsonRecord
from scalingnote.triplets.collect.association import ASSOCIATIONS, KINDS
from scalingnote.triplets.collect.config import CollectConfig, Mixing, SourceSampling
from scalingnote.triplets.collect.steps import (
    CollectContext,
    Counts,
    Item,
    buckets_of_numbers,
    read_slice,
    rows_of_numbers,
    scatter_by,
)
from scalingnote.triplets.collect.triplets import (
    MULTI_HOP,
    hash_fraction,
    multi_hop_candidates,
    select_multi_hop,
)
from scalingnote.triplets.planner.planner import words

MAX_MULTI_HOP = 4  # triplets per query and source, strongest association first
OFFERED_PER_ACCEPTED = 4  # candidates per associate and triplet that a query accepts: some are rejected
SAMPLE_ROWS = 20  # per source
MAX_POSITIVES_SHOWN = 5
_MEASURED_DOCUMENTS = 200  # per slice; enough for mean lengths of a corpus of any size
_SHOWN_CHARS = 100


# --- parts ---------------------------------------------------------------------------------------------


def transfer(item: Item, context: CollectContext) -> Counts:
    """Scatter the triplets of one bucket's queries to the queries associated with them."""
    bucket = item["bucket"]
    pairs = shuffle.gather(context.path("lenders"), bucket, schema=ASSOCIATIONS)
    triplets = read_table(context.bucket(bucket, "one_hop"))
    query_ids = read_table(context.bucket(bucket, "queries"))["query_id"].combine_chunks()
    counts = Counter(loans=0, lent_over_cap=0)
    for kind, source in KINDS.items():
        chosen = pairs.filter(pc.equal(pairs["kind"], kind))
        rows, left_out = multi_hop_candidates(
            triplets,
            query_ids,
            source=source,
            associates=rows_of_numbers(chosen["associate"]),
            queries=chosen["query"].to_numpy().astype(np.int64),
            strength=chosen["strength"].to_numpy(),
            limit=OFFERED_PER_ACCEPTED * MAX_MULTI_HOP,
            seed=context.config.seed,
        )
        numbers, at = rows["row"].cast(pa.uint64()), rows.schema.get_field_index("row")
        to = buckets_of_numbers(numbers)
        rows = rows.set_column(at, "row", pa.array(rows_of_numbers(numbers)))
        shuffle.scatter(rows, to, target=context.path("loans"), name=f"{source}-{bucket:05d}")
        counts.update(loans=len(rows), lent_over_cap=left_out)
    return dict(counts)


def write_part(item: Item, context: CollectContext) -> JsonRecord:
    """Write one part of the artifact: a bucket's one-hop and multi-hop triplets, sampled and split.

    Returns its `files`, for the manifest, and `counts`.
    """
    config, bucket = context.config, item["bucket"]
    queries = read_table(context.bucket(bucket, "queries"))
    one_hop = read_table(context.bucket(bucket, "one_hop"))
    counts: Counter[str] = Counter()
    in_validation = _in_validation(queries["query_id"], config)
    triplets = [_triplets(one_hop, queries, in_validation, hop="one")]
    known = read_table(context.bucket(bucket, "known"))
    if config.association:
        candidates = shuffle.gather(context.path("loans"), bucket, schema=MULTI_HOP)
        # A triplet of a query in the other split would mix training and validation data.
        across = in_validation[candidates["row"].to_numpy()] != _in_validation(candidates["via"], config)
        candidates = candidates.filter(pa.array(~across))
        counts["multi_across_split"] = int(across.sum())
        multi_hop, left_out = select_multi_hop(candidates, known, limit=MAX_MULTI_HOP, seed=config.seed)
        counts.update(left_out)
        triplets.append(_triplets(multi_hop, queries, in_validation, hop="multi"))
    # All answers, also those without a triplet (short clicks, no negative): `mine` must not draw them.
    answers = known.filter(known["positive"])
    answers = pa.table([queries["query_id"].take(answers["row"]), answers["doc_id"]], schema=ANSWERS)
    write_table(fs.join(context.output, f"answers/part-{bucket:05d}.parquet"), answers)
    table, mixed = sample_sources(pa.concat_tables(triplets), config.mixing, seed=config.seed)
    order = [(name, "ascending") for name in ("query_id", "source", "hop", "positive")]
    table = table.take(pc.sort_indices(table, order)).combine_chunks()
    counts.update(mixed)
    counts.update({split["values"]: split["counts"] for split in pc.value_counts(table["split"]).to_pylist()})
    counts["triplets"] = len(table)
    counts.update(part_statistics(table))
    write_table(context.bucket(bucket, "sample"), sample_rows(table, seed=config.seed))
    documents = pa.table({"doc_id": _documents(table)})
    scatter_by(documents, "doc_id", "documents", f"{bucket:05d}", context)
    name = f"triplets/part-{bucket:05d}.parquet"
    part = write_table(fs.join(context.output, name), table)
    return {"files": [(name, vars(part))], "counts": dict(counts)}


def sample_sources(triplets: pa.Table, mixing: Mixing, *, seed: int) -> tuple[pa.Table, dict[str, int]]:
    """Sample and weight each of the four sources (click or relevance, one hop or multi-hop).

    A row is kept by the hash of its query, positive and source, so a larger share keeps every row that a
    smaller one keeps. Counts are of each source before (``{source}_offered``) and after.
    """
    sources = pc.binary_join_element_wise(triplets["source"], triplets["hop"], "_").to_pylist()
    shares: dict[str, SourceSampling] = {name: getattr(mixing, name) for name in sorted(set(sources))}
    weights = np.array([shares[name].weight for name in sources], dtype=np.float32)
    kept = np.ones(len(sources), dtype=bool)
    if any(share.sample < 1 for share in shares.values()):
        rows = zip(triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), sources, strict=True)
        kept = np.array([hash_fraction("\x1f".join(row), seed=seed) < shares[row[2]].sample for row in rows])
    counts = {f"{name}_offered": sources.count(name) for name in shares}
    counts |= dict.fromkeys(shares, 0) | Counter(compress(sources, kept))
    at = TRIPLETS.get_field_index("weight")
    table = triplets.set_column(at, TRIPLETS.field(at), pa.array(weights))
    return table.filter(pa.array(kept)), counts


def _triplets(
    rows: pa.Table, queries: pa.Table, in_validation: Bool[ndarray, " queries"], *, hop: str
) -> pa.Table:
    """ONE_HOP or MULTI_HOP rows in the schema TRIPLETS."""
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
    # Scores of a multi-hop triplet would be those for the associate's query.
    columns |= {"scores": rows["scores"]} if hop == "one" else {"via": rows["via"]}
    return pa.table(
        [columns.get(field.name, pa.nulls(len(rows), field.type)) for field in TRIPLETS], schema=TRIPLETS
    )


def _in_validation(query_ids: pa.ChunkedArray, config: CollectConfig) -> Bool[ndarray, " rows"]:
    """Whether each row's query belongs to the validation split."""
    coded = pc.dictionary_encode(query_ids.combine_chunks())
    fractions = [hash_fraction(query_id, seed=config.seed) for query_id in coded.dictionary.to_pylist()]
    mask: ndarray = (
        np.array(fractions)[coded.indices.to_numpy(zero_copy_only=False)] < config.validation_fraction
    )
    return mask


def _documents(triplets: pa.Table) -> pa.Array:
    """Distinct doc_ids of positives and negatives."""
    negatives = pc.list_flatten(triplets["negatives"])
    return pc.unique(pa.chunked_array([*triplets["positive"].chunks, *negatives.chunks], pa.string()))


# --- statistics ----------------------------------------------------------------------------------------


def part_statistics(triplets: pa.Table) -> Counts:
    """Counts of a part that add up over parts: pairs, queries, query words, positives per query.

    ``pairs_of_both_sources`` counts pairs from clicks and from relevance; ``queries_with_{n}_positives``
    counts queries, where the last n means "or more".
    """
    by_pair = triplets.group_by(["query_id", "positive"]).aggregate([("source", "count_distinct")])
    by_query = triplets.group_by("query_id").aggregate([("positive", "count_distinct"), ("query", "min")])
    positives = (
        min(number, MAX_POSITIVES_SHOWN) for number in by_query["positive_count_distinct"].to_pylist()
    )
    return {
        "pairs": len(by_pair),
        "pairs_of_both_sources": pc.sum(pc.greater(by_pair["source_count_distinct"], 1)).as_py() or 0,
        "queries_with_triplets": len(by_query),
        "query_words": sum(len(words(query)) for query in by_query["query_min"].to_pylist()),
        **Counter(f"queries_with_{number}_positives" for number in positives),
    }


def sample_rows(triplets: pa.Table, *, seed: int) -> pa.Table:
    """Up to SAMPLE_ROWS rows of each source and hop, by smallest hash; samples may be sampled again."""
    names = ("source", "hop", "query_id", "positive")
    keys = zip(*(triplets[name].to_pylist() for name in names), strict=True)
    ranked = sorted(
        (source, hop, hash_fraction(f"{query} {doc}", seed=seed), row)
        for row, (source, hop, query, doc) in enumerate(keys)
    )
    by_source = groupby(ranked, key=itemgetter(0, 1))
    rows = [row for _, group in by_source for *_, row in islice(group, SAMPLE_ROWS)]
    return triplets.take(pa.array(rows, pa.int64()))


def count_documents(item: Item, context: CollectContext) -> Counts:
    """Count the distinct documents of one bucket that occur in triplets."""
    schema = pa.schema({"doc_id": pa.string()})
    documents = shuffle.gather(context.path("documents"), item["bucket"], schema=schema)
    return {"documents": len(pc.unique(documents["doc_id"]))}


def draw_samples(item: Item, context: CollectContext) -> Counts:
    """Draw the rows to read from the samples of all buckets."""
    rows = [read_table(context.bucket(number, "sample")) for number in range(context.parts)]
    drawn = sample_rows(pa.concat_tables([TRIPLETS.empty_table(), *rows]), seed=context.config.seed)
    write_table(context.path("sample.parquet"), drawn)
    return {}


def read_documents(item: Item, context: CollectContext) -> Counts:
    """Keep the texts of sampled rows in one slice of documents, and count words of its first rows."""
    sampled = _documents(read_table(context.path("sample.parquet")))
    table = read_slice(item, DOCUMENT_COLUMNS, context)
    texts = table.filter(pc.is_in(table["doc_id"], value_set=sampled)).select(["doc_id", "title", "content"])
    write_table(fs.join(context.path("texts"), f"{item['slice']}.parquet"), texts)
    measured = table.slice(0, _MEASURED_DOCUMENTS)
    counts = {
        f"{name}_words": sum(len(words(text)) for text in measured[name].to_pylist()) for name in TEXT_COLUMNS
    }
    return counts | {"documents_measured": len(measured)}


def statistics(context: CollectContext, counts: Counts) -> dict[str, Any]:
    """The content of the page, as JSON values."""
    measured = max(counts["documents_measured"], 1)
    names = {f"{source}_{hop}" for source in KINDS.values() for hop in ("one", "multi")}
    return {
        "simulated_clicks": bool(context.dataset.manifest.info.get("simulated_clicks", False)),
        "documents": counts["documents"],
        "pairs": counts["pairs"],
        "words": {name: round(counts[f"{name}_words"] / measured, 2) for name in TEXT_COLUMNS}
        | {"query": round(counts["query_words"] / max(counts["queries_with_triplets"], 1), 2)},
        "documents_measured": counts["documents_measured"],
        "sources": {
            name: {"offered": counts[f"{name}_offered"], "kept": counts[name]}
            for name in sorted(names)
            if counts[f"{name}_offered"]
        },
        "positives_per_query": {
            str(n): counts[f"queries_with_{n}_positives"] for n in range(1, MAX_POSITIVES_SHOWN + 1)
        },
        "pairs_of_both_sources": counts["pairs_of_both_sources"],
        "short_of_negatives": counts["short_of_negatives"],
        "left_out": {
            name: counts[name]
            for name in (
                "exact_duplicates", "near_duplicates", "held_out_documents", "held_out_by_text",
                "held_out_rows", "ignored_rows",
                "multi_already_known", "multi_contradicted", "multi_negative_is_positive", "multi_duplicate",
                "multi_over_cap", "multi_across_split", "lent_over_cap",
            )
        },
        "association": {
            name: counts[name]
            for kind in KINDS.values()
            for name in (
                f"{kind}_associations", f"{kind}_too_short", f"{kind}_truncated", f"{kind}_hot_keys",
                f"{kind}_pairs_left_out",
            )
        },
        "samples": _sample_texts(context),
    }  # fmt: skip


def statistics_page(statistics: Mapping[str, Any]) -> ReportPage:
    """What statistics.md shows of the dict that :func:`statistics` returns."""
    facts = [
        ["documents", f"{statistics['documents']:,}"],
        ["query-document pairs", f"{statistics['pairs']:,}"],
        *([f"avg. words per {name}", str(value)] for name, value in statistics["words"].items()),
        ["pairs that clicks and ranking agree on", f"{statistics['pairs_of_both_sources']:,}"],
        ["one-hop triplets short of hard negatives", f"{statistics['short_of_negatives']:,}"],
    ]
    measured = f"Words of documents: mean over {statistics['documents_measured']:,} of them."
    sections = [ReportSection("Sizes", measured, [ReportTable(["statistic", "value"], facts)])]
    for title, key in (
        ("Positives per query (the last: or more)", "positives_per_query"),
        ("Left out", "left_out"),
        ("Association", "association"),
    ):
        counts = [[name.replace("_", " "), f"{count:,}"] for name, count in statistics[key].items()]
        sections.append(ReportSection(title, tables=[ReportTable(["", "count"], counts)]))
    sources = [[name, f"{c['offered']:,}", f"{c['kept']:,}"] for name, c in statistics["sources"].items()]
    sections.append(ReportSection("Sources", tables=[ReportTable(["source", "offered", "kept"], sources)]))
    for name, rows in statistics["samples"].items():
        cells = [[row[key] or "" for key in ("query", "positive", "negative", "via")] for row in rows]
        head = ["query", "positive", "first negative", "via"]
        sections.append(ReportSection(f"Rows of {name}", tables=[ReportTable(head, cells, text=4)]))
    warnings = ["Clicks are simulated."] if statistics["simulated_clicks"] else []
    return ReportPage("Training triplets", sections, warnings=warnings)


def _sample_texts(context: CollectContext) -> dict[str, list[dict[str, Any]]]:
    """Source -> rows to read, with the beginnings of titles or contents in place of doc_ids."""
    folder = context.path("texts")
    shown: dict[str, str] = {}
    for name in fs.list_files(folder):
        for row in read_table(fs.join(folder, name)).to_pylist():
            shown[row["doc_id"]] = (row["title"] or row["content"])[:_SHOWN_CHARS]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in read_table(context.path("sample.parquet")).to_pylist():
        positive, negative = row["positive"], next(iter(row["negatives"]), "")
        rows.setdefault(f"{row['source']}_{row['hop']}", []).append(
            {
                "query": row["query"],
                "positive": shown.get(positive, positive),
                "negative": shown.get(negative, negative),
                "via": row["via"],
            }
        )
    return rows
