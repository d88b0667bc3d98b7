"""Write docs/performance.md, and the tables of other pages, from the JSON files of docs/results.

    python -m benchmarks.performance           writes the pages
    python -m benchmarks.performance --check   exits with 1 if a page differs from the results

docs/performance.md has one table between two markers: the metrics of HEADLINES. Any page below docs/ may have
a table of a result, between markers with the keys of its rows:

    <!-- table distillation.json: tables / medquad, scratch -->
    <!-- end of table -->
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import table

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RESULTS = DOCS / "performance.md", DOCS / "results"
BEGIN, END = "<!-- from here on: python -m benchmarks.performance -->", "<!-- up to here -->"
TABLE = re.compile(
    r"(?P<first><!-- table (?P<name>\w+)\.json: (?P<keys>[^>]+) -->\n).*?(?P<last><!-- end of table -->)",
    re.S,
)
Report = Mapping[str, Any]
# Benchmark -> metric -> its meaning, and its bar if it has one. A peer's bar is 1.
HEADLINES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "front_door": {
        "table_speedup_b1": ("queries/s of a table, one at a time, over its teacher's", ">= 500"),
        "table_kept_mean": (
            "nDCG@10 of a `static` table over its teacher's, no training queries",
            ">= 0.965",
        ),
        "attention_or_terms_kept_mean": ("the same, the default `table` with rows for pairs", ">= 0.965"),
        "escalated30_kept_mean": ("the same, a table and its teacher for 30 % of the queries", ">= 0.985"),
        "hybrid_kept_mean": ("a table with BM25 over its teacher with BM25", ">= 0.985"),
        "certificate_error_max": ("error of what `distill` expects a table to keep, on a set left out", ""),
    },
    "zero_shot": {
        "zero_shot_kept_mean": ("nDCG@10 of one table of general texts over its teacher's, unseen sets", ""),
        "zero_shot_hybrid_kept_mean": ("the same, both with BM25", ""),
    },
    "long_documents": {
        "kept_with_passages": ("nDCG@10 of passages of joined abstracts over separate abstracts'", ">= 0.95"),
        "kept_when_cut": ("the same, documents cut where the model stops reading", ""),
        "hybrid_kept_with_passages": ("of its table with BM25", ">= 0.95"),
    },
    "teachers": {
        "max_difference": ("embeddings by an endpoint and by the folder, largest difference", "<= 1e-4"),
        "asked_twice": ("texts that an endpoint was asked for twice, after a kill", "<= 0"),
        "vectors_kept_mean": ("nDCG@10 of a student of stored vectors over its teacher's", ""),
    },
    "distillation": {
        "scalingnote_over_scalingdual_R50": (
            "R@50 of the best student over its teacher's, at worst",
            ">= 0.98",
        ),
        "lookup_best_over_scalingdual_R50": ("the same, the best table", ">= 0.95"),
        "light_over_bm25_R50": ("R@50 of the best query tower without a model over BM25's, at worst", ">= 1"),
    },
    "teacher": {
        "stored_teacher_speedup": ("distilling from stored embeddings over a teacher in the loop", ">= 10"),
    },
    "reproduce": {
        "order_kept_share": (
            "orders of methods in three papers that hold, of those significant here",
            ">= 0.75",
        ),
    },
    "decoders": {
        "decoder_r10": ("R@10 of SmolLM2 pooled at its end token, 150 answers, 60 steps", ">= 0.9"),
        "lightretriever_dense_r10": ("the same, LightRetriever's dense half, 150 steps", ">= 0.8"),
        "hybrid_not_below_halves": (
            "sets on which LightRetriever's hybrid, all 30 layers, is not below its halves",
            ">= 3",
        ),
    },
    "methods": {
        "scratch/scalingdual/R@50": ("R@50 of ScalingDual from random weights, medquad, 100 steps", ""),
        "scratch/twinbert/R@50": ("R@50 of TwinBERT, the same", ""),
    },
    "train": {
        "samples_per_s_over_sentence_transformers": (
            "a step of stage I on texts of many lengths, speed over sentence-transformers'",
            ">= 2",
        ),
        "samples_per_s_over_sentence_transformers_bert_equal": ("the same, equal lengths", ">= 1"),
        "peak_memory_over_sentence_transformers": ("its peak memory over sentence-transformers'", "<= 1"),
        "base_int8_bytes_over_full": ("bytes of frozen layers stored as int8 over whole ones", ""),
        "base_int8_time_over_full": ("time of a LoRA step on them", ""),
    },
    "ladder": {"r2_joint": ("R² of the scaling law over size and data", "")},
    "gpu": {
        "encode_padded_mfu": ("7B on an H100: share of the peak, encoding padded rows", ""),
        "queries_4_layers_over_llm": ("queries/s of a student of 4 layers over the 7B model's", ""),
        "queries_lookup_over_llm": ("the same, a table", ""),
    },
    "collect": {
        "association_queries_per_second": ("queries/s of Algorithm 1 as a join", ""),
        "association_speedup_over_every_pair": ("its speed over comparing every pair", ""),
    },
    "encode": {
        "tokens_per_s_over_floor": (
            "the encode job, one worker, mixed lengths, over a bare forward pass",
            ">= 0.9",
        ),
        "tokens_per_s_over_sentence_transformers": ("the same over sentence-transformers", ">= 1.05"),
    },
    "native": {
        "max_difference": ("largest difference of an embedding from sentence-transformers", "<= 1e-05"),
        "speed_over_sentence_transformers": ("documents/s over sentence-transformers", ">= 1"),
    },
    "scale": {
        "driver_rss_gb_max": ("memory of the largest driver, ten million documents, GB", "<= 1"),
        "driver_rss_growth": ("its growth from one million documents", "<= 1.2"),
        "growth_exponent_max": ("largest exponent of a stage's seconds in the documents", "<= 1.1"),
        "plan_seconds_error_max": ("largest error of `scalingnote plan`'s seconds of a stage", ""),
    },
    "query_encoder": {
        "onnx_int8_b1_over_torch_fp32": (
            "a transformer with 8-bit products over torch float32, one query",
            ">= 6",
        ),
        "onnx_int8_b1_over_sentence_transformers": ("the same over sentence-transformers", ">= 1"),
        "cosine_onnx_int8": ("its least cosine to float32", ">= 0.999"),
        "lookup_b1_over_torch_fp32": ("a table over a transformer of 4 layers, one query", ">= 500"),
    },
    "mteb_agreement": {
        "ndcg_difference_scifact": (
            "nDCG@10 of a published folder by mteb and by us, difference",
            "<= 0.002",
        ),
        "ndcg_difference_nfcorpus": ("the same, nfcorpus", "<= 0.002"),
    },
    "index": {
        "recall100_default": ("recall@100 of the default index, a million vectors", ">= 0.95"),
        "us_per_query_over_faiss_default": ("its time of a query over faiss's factory, same setting", "<= 1"),
        "shards4_over_single_cpu": ("a searcher of 4 shards over one index", "<= 1.4"),
    },
    "sparse_index": {
        "numpy_over_numba": ("exact sparse search, speed over numpy, 300,000 documents", ">= 1"),
        "scipy_over_numba": ("the same over SciPy", ">= 1"),
    },
    "live_index": {
        "lost_writes": ("acknowledged writes lost in 255 kills", "= 0"),
        "duplicates": ("documents found twice", "= 0"),
        "wrong_answers": ("answers that differ from brute force", "= 0"),
        "streaming_recall_gap": ("points of recall@10 lost while documents change", "<= 1"),
    },
    "delta": {
        "recall_gap": ("recall@10 of an index built anew over an index with a delta, difference", "<= 0.005"),
        "search_over_base": (
            "time of a search of index and delta over the index alone, one process",
            "<= 1.25",
        ),
        "writes_per_s": ("durable documents/s beside a large index, batches of a hundred", ">= 36800"),
        "lost_writes": ("acknowledged writes lost while the writer is killed, with folds", "= 0"),
        "duplicates": ("documents found twice", "= 0"),
        "wrong_answers": ("answers that differ from brute force", "= 0"),
    },
    "serve": {
        "rps_over_noop_c16_lookup": (
            "requests/s with a table over an application that does nothing",
            ">= 0.6",
        ),
        "rps_over_handwritten_c16": (
            "requests/s with an int8 transformer over a hand-written service",
            ">= 3",
        ),
    },
    "fanout": {
        "qps_48_over_1": ("queries/s of a gateway before 48 groups of shards over one", ">= 0.5"),
        "hedge_p99_cut": ("share of p99 that second calls save if a replica is slow", ">= 0.3"),
    },
    "serve_faults": {
        "lost": ("acknowledged writes lost while replicas are killed", "= 0"),
        "wrong or mixed": ("answers that are wrong or of two index versions", "= 0"),
        "doubled": ("documents twice in an answer", "= 0"),
        "undocumented": ("errors that docs/guides/operations.md does not name", "= 0"),
        "dead_replica_errors": ("requests that failed because a searcher or encoder was killed", "= 0"),
        "limit_restarts": ("replicas that a change of limits restarted", "= 0"),
        "limit_errors": ("requests that failed while limits changed", "= 0"),
        "errors_per_request": ("share of requests that failed", ""),
    },
    "api_fuzz": {
        "cases": ("requests that the OpenAPI allows and forbids", ">= 2000"),
        "server_errors": ("faults of the server", "= 0"),
        "undocumented_statuses": ("statuses that the OpenAPI does not list", "= 0"),
        "undocumented_bodies": ("bodies that are not as it describes", "= 0"),
        "accepted_invalid": ("forbidden requests answered with success", "= 0"),
    },
    "package": {
        "help_s": ("seconds of `scalingnote --help`", "<= 0.15"),
        "import_s": ("seconds of `from scalingnote import QueryEncoder`", "<= 0.3"),
        "core_install_mb": ("megabytes of an install without extras", ""),
    },
    "house": {"files": ("files of scalingnote/", ""), "lines": ("lines", ""), "options": ("settings", "")},
}


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    options = parser.parse_args()
    stale = [(path, text) for path, text in pages(read()) if text != path.read_text(encoding="utf-8")]
    for path, text in stale:
        if options.check:
            print(f"{path}: differs from the results: run this without --check")
        else:
            path.write_text(text, encoding="utf-8")
            print(path)
    sys.exit(bool(options.check and stale))


def read(folder: Path = RESULTS) -> dict[str, Report]:
    """Return the results by benchmark."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def pages(reports: Mapping[str, Report]) -> Iterator[tuple[Path, str]]:
    """Yield every page with a table of results, with its tables from `reports`."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if path == PAGE:
            page = fill_page(page, reports)
        if TABLE.search(page) or path == PAGE:
            yield path, TABLE.sub(lambda match: _result_table(match, reports), page)


def fill_page(page: str, reports: Mapping[str, Report]) -> str:
    """Return docs/performance.md with the text between its markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{PAGE} needs the lines {BEGIN!r} and {END!r} once each")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n\n{content(reports)}\n\n{END}{after}"


def content(reports: Mapping[str, Report]) -> str:
    """Return the summary of bars, the table, and the machines of its letters."""
    machines: dict[str, str] = {}
    lines, with_bar, missed = [], 0, 0
    for name, metrics in HEADLINES.items():
        if name not in reports:
            lines.append(f"| {name} | not measured | | | `python -m benchmarks.{name}` | |")
            continue
        report, first = reports[name], True
        letter = machines.setdefault(machine(report), chr(ord("A") + len(machines)))
        for metric, (meaning, bar) in metrics.items():
            value = report["metrics"][metric]
            met = is_met(value, bar)
            with_bar += bool(bar)
            verdict = bar if met else f"{bar}: **missed**"
            missed += not met
            command = f"`{report['command'] or f'python -m benchmarks.{name}'}`"
            cells = (f"[{name}](results/{name}.json)", command, letter) if first else ("", "", "")
            lines.append(
                f"| {cells[0]} | {meaning} | {number(value)} | {verdict} | {cells[1]} | {cells[2]} |"
            )
            first = False
    summary = f"{with_bar} metrics have a bar; {missed} miss it."
    head = "| benchmark | what | value | bar | command | machine |\n| --- | --- | --: | --- | --- | --- |"
    letters = "\n".join(f"- {letter}: {text}" for text, letter in machines.items())
    return "\n\n".join([summary, "\n".join([head, *lines]), letters])


def is_met(value: float, bar: str) -> bool:
    """Return whether a value meets a bar such as ``>= 2``; without a bar every value does."""
    if not bar:
        return True
    sign, limit = bar.split()
    reached = {">=": value >= float(limit), "<=": value <= float(limit), "=": value == float(limit)}
    return reached[sign]


def number(value: float) -> str:
    """Return three digits, or a whole number from a hundred on; a cosine of 0.9989 stays below 0.999."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 0.9 < abs(value) < 1 else f"{value:.3g}"


def machine(report: Report) -> str:
    """Return machine and versions of a result."""
    facts = dict(report.get("environment", {}))
    first = f"{facts.pop('system', '?')}, {facts.pop('processor', 'processor not recorded')}, "
    first += f"{facts.pop('cpus', '?')} CPUs, {facts.pop('memory_gb', '?')} GB"
    device = [report["device"]] if "device" in report else []
    return ", ".join([*device, first, *(f"{name} {version}" for name, version in facts.items())])


def _result_table(match: re.Match[str], reports: Mapping[str, Report]) -> str:
    name, keys = match["name"], match["keys"].split(" / ")
    if name not in reports:
        return match[0]
    rows: Any = reports[name]
    for key in keys:
        if key not in rows:
            raise SystemExit(f"docs/results/{name}.json has no {key!r}, which {match['first'].strip()} needs")
        rows = rows[key]
    return f"{match['first']}\n{table(_without_repeats(rows))}\n\n{match['last']}"


def _without_repeats(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return rows whose first cell is empty if it repeats the cell above."""
    first = next(iter(rows[0]))
    above = [None, *(row[first] for row in rows)]
    return [{**row, first: ""} if row[first] == last else row for row, last in zip(rows, above, strict=False)]


if __name__ == "__main__":
    main()
