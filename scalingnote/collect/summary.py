"""The statistics page of a triplets artifact: the paper's Tables 1-2, where rows came from, rows to read."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote import tables
from scalingnote.collect.statistics import MAX_POSITIVES_SHOWN, sample
from scalingnote.collect.steps import Context, Counts, Item, read, row_group
from scalingnote.collect.term_keys import KINDS
from scalingnote.planner.words import words
from scalingnote.storage import exchange
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table
from scalingnote.storage.schema import TRIPLETS

FIELDS = ("title", "topic", "content")
_MEASURED = 200  # documents of a row group whose words are counted: enough for a mean, whatever the corpus
_SHOWN_CHARS = 100


def count_documents(item: Item, context: Context) -> Counts:
    """Distinct documents of one bucket that the triplets name."""
    named = exchange.gather(
        context.folder("documents"), item["bucket"], schema=pa.schema({"doc_id": pa.string()})
    )
    return {"documents": len(pc.unique(named["doc_id"]))}


def draw_samples(context: Context) -> None:
    """The rows to read, drawn from those that the buckets drew."""
    rows = [read(context.bucket(number, "sample")) for number in range(context.config.parts)]
    drawn = sample(pa.concat_tables([TRIPLETS.empty_table(), *rows]), seed=context.config.seed)
    write_table(context.folder("sample.parquet"), drawn)


def look_up(item: Item, context: Context) -> Counts:
    """One row group of documents: titles that the sampled rows name, and the words of some documents."""
    wanted = _samples(context)
    ids = pa.concat_arrays([*wanted["positive"].chunks, *pc.list_flatten(wanted["negatives"]).chunks])
    table = row_group(item, ["doc_id", *FIELDS])
    found = table.filter(pc.is_in(table["doc_id"], value_set=ids)).select(["doc_id", "title", "content"])
    write_table(fs.join(context.folder("texts"), f"{item['slice']}.parquet"), found)
    measured = table.slice(0, _MEASURED)
    counts = {
        f"{name}_words": sum(len(words(text)) for text in measured[name].to_pylist()) for name in FIELDS
    }
    return counts | {"documents_measured": len(measured)}


def statistics(context: Context, counts: Counts) -> dict[str, Any]:
    """What the page shows, as JSON."""
    measured = max(counts["documents_measured"], 1)
    names = {f"{source}_{hop}" for source in KINDS.values() for hop in ("one", "multi")}
    return {
        "simulated_clicks": bool(context.dataset.manifest.info.get("simulated_clicks", False)),
        "documents": counts["documents"],
        "pairs": counts["pairs"],
        "words": {name: round(counts[f"{name}_words"] / measured, 2) for name in FIELDS}
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
        "left_out": {
            name: counts[name]
            for name in (
                "exact_duplicates", "near_duplicates", "held_out_rows", "ignored_rows", "without_negatives",
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
        "samples": _rows_to_read(context),
    }  # fmt: skip


def markdown(found: dict[str, Any]) -> str:
    """The page itself."""
    lines = ["# Training triplets", ""]
    if found["simulated_clicks"]:
        lines += ["**Clicks are simulated.**", ""]
    facts = [
        ["documents", f"{found['documents']:,}"],
        ["query-document pairs", f"{found['pairs']:,}"],
        *([f"avg. words per {name}", str(value)] for name, value in found["words"].items()),
        ["pairs that clicks and ranking agree on", f"{found['pairs_of_both_sources']:,}"],
    ]
    lines += [tables.markdown(["statistic", "value"], facts), ""]
    lines += [f"Words of documents: mean over {found['documents_measured']:,} of them.", ""]
    for title, key in (
        ("Positives per query (the last: or more)", "positives_per_query"),
        ("Left out", "left_out"),
        ("Association", "association"),
    ):
        counts = [[name.replace("_", " "), f"{count:,}"] for name, count in found[key].items()]
        lines += [f"## {title}", "", tables.markdown(["", "count"], counts), ""]
    sources = [[name, f"{c['offered']:,}", f"{c['kept']:,}"] for name, c in found["sources"].items()]
    lines += ["## Sources", "", tables.markdown(["source", "offered", "kept"], sources), ""]
    for name, rows in found["samples"].items():
        cells = [[_cell(row[key]) for key in ("query", "positive", "negative", "via")] for row in rows]
        head = ["query", "positive", "first negative", "via"]
        lines += [f"## Rows of {name}", "", tables.markdown(head, cells, text=len(head)), ""]
    return "\n".join(lines)


def _samples(context: Context) -> pa.Table:
    return read(context.folder("sample.parquet"))


def _rows_to_read(context: Context) -> dict[str, list[dict[str, Any]]]:
    folder = context.folder("texts")
    shown: dict[str, str] = {}
    for name in fs.list_files(folder):
        for row in read(fs.join(folder, name)).to_pylist():
            shown[row["doc_id"]] = (row["title"] or row["content"])[:_SHOWN_CHARS]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in _samples(context).to_pylist():
        rows.setdefault(f"{row['source']}_{row['hop']}", []).append(
            {
                "query": row["query"],
                "positive": shown.get(row["positive"], row["positive"]),
                "negative": shown.get(row["negatives"][0], row["negatives"][0]),
                "via": row["via"],
            }
        )
    return rows


def _cell(value: str | None) -> str:
    return " ".join((value or "").split()).replace("|", "\\|")
