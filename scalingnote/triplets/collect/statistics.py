"""Statistics of triplets: counts of parts, and the page with them.

    part of triplets ─► part_statistics ─┐
    distinct documents of a bucket ──────┼─► summary ─► statistics.json, statistics.md
    words of some documents ─────────────┘

The page has the paper's Tables 1 and 2, and the sources of rows.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.reports import ReportPage, ReportSection, ReportTable
from scalingnote.storage.schema import TEXT_COLUMNS
from scalingnote.storage.shuffle import NumberedSlice
from scalingnote.triplets.collect.association import KINDS
from scalingnote.triplets.collect.steps import Bucket, CollectContext, Counts
from scalingnote.triplets.planner.planner import words

MAX_POSITIVES_SHOWN = 5
_MEASURED_DOCUMENTS = 200  # per part; enough for mean lengths of a corpus of any size
_LEFT_OUT = (
    "exact_duplicates", "near_duplicates", "held_out_documents", "held_out_by_text", "held_out_rows",
    "ignored_rows", "multi_already_known", "multi_contradicted", "multi_negative_is_positive",
    "multi_duplicate", "multi_over_cap", "multi_across_split", "lent_over_cap",
)  # fmt: skip
_OF_ASSOCIATION = ("associations", "too_short", "truncated", "hot_keys", "pairs_left_out")


def part_statistics(triplets: pa.Table) -> Counts:
    """Count pairs, queries, query words and positives per query of a part; counts of parts can be added.

    ``pairs_of_both_sources`` counts pairs from clicks and from relevance; ``queries_with_{n}_positives``
    counts queries, and the last n means "or more".
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


def count_documents(item: Bucket, *, context: CollectContext) -> Counts:
    """Count the distinct documents of one bucket that occur in triplets."""
    documents = context.gather("documents", item[1], pa.schema({"doc_id": pa.string()}))
    return {"documents": len(pc.unique(documents["doc_id"]))}


def count_words(item: NumberedSlice, *, context: CollectContext) -> Counts:
    """Count the words of the first documents of each part of a slice."""
    counts = Counter(documents_measured=0)
    for part in item[1]:
        batches = context.dataset.batches(part, rows=_MEASURED_DOCUMENTS, columns=TEXT_COLUMNS)
        for batch in islice(batches, 1):
            counts["documents_measured"] += len(batch)
            for name in TEXT_COLUMNS:
                counts[f"{name}_words"] += sum(len(words(text)) for text in batch[name].to_pylist())
    return counts


def summary(context: CollectContext, counts: Counts) -> dict[str, Any]:
    """Compute the contents of the page, as JSON values."""
    measured = max(counts["documents_measured"], 1)
    sources = sorted(f"{source}_{hop}" for source in KINDS.values() for hop in ("one", "multi"))
    return {
        "simulated_clicks": bool(context.dataset.manifest.info.get("simulated_clicks", False)),
        "documents": counts["documents"],
        "pairs": counts["pairs"],
        "words": {name: round(counts[f"{name}_words"] / measured, 2) for name in TEXT_COLUMNS}
        | {"query": round(counts["query_words"] / max(counts["queries_with_triplets"], 1), 2)},
        "documents_measured": counts["documents_measured"],
        "sources": {
            name: {"offered": counts[f"{name}_offered"], "kept": counts[name]}
            for name in sources
            if counts[f"{name}_offered"]
        },
        "positives_per_query": {
            str(n): counts[f"queries_with_{n}_positives"] for n in range(1, MAX_POSITIVES_SHOWN + 1)
        },
        "pairs_of_both_sources": counts["pairs_of_both_sources"],
        "short_of_negatives": counts["short_of_negatives"],
        "left_out": {name: counts[name] for name in _LEFT_OUT},
        "association": {
            f"{kind}_{name}": counts[f"{kind}_{name}"] for kind in KINDS.values() for name in _OF_ASSOCIATION
        },
    }


def statistics_page(statistics: Mapping[str, Any]) -> ReportPage:
    """Build the page statistics.md from the dict that :func:`summary` returns."""
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
    warnings = ["Clicks are simulated."] if statistics["simulated_clicks"] else []
    return ReportPage("Training triplets", sections, warnings=warnings)
