"""Documents beyond a model's input: nDCG@10 kept by an index of passages, and with cut texts.

    python -m benchmarks.long_documents --json docs/results/long_documents.json [--documents N] [--count N]

Abstracts of SciFact (BEIR folder below $SCALINGNOTE_DATA) are joined, ten per document in a seeded order; a
document is relevant to a query if one of its abstracts is. all-MiniLM-L6-v2 and its default table search

- passages: an index of the documents, which `build_index` divides by default; the table learns from these
- separate: an index of the abstracts; each result represents the document with this abstract
- cut: an index of the documents; the model reads only their beginning

For all three the first ten documents are compared with the same judgements, by linear gain (trec_eval's):
`kept_with_passages` and `kept_when_cut` are the model's shares of its nDCG@10 over separate abstracts,
`table_` and `hybrid_` (with BM25) those of its table. `--documents` limits the abstracts, but keeps all
judged ones. An interrupted run continues below --run-dir.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import beir
from benchmarks.minilm import PACKAGE
from benchmarks.public_sets import write_json_lines
from benchmarks.report import arguments, show, write
from scalingnote import QueryEncoder, api
from scalingnote.evaluate.measures import measure
from scalingnote.run import pipeline, stages
from scalingnote.search.query_path import QueryPath

Row = dict[str, Any]
JOINED, DEPTH = 10, 100  # abstracts of a document; results, from at least ten documents
SET, MODEL = "scifact", f"package:{PACKAGE}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, help="abstracts, default: all")
    parser.add_argument("--count", type=int, help="texts that the tables learn from, default: the recipe's")
    parser.add_argument("--run-dir", type=Path, default="runs/long_documents", help="default: %(default)s")
    options = parser.parse_args()
    judgements, texts_of = beir.judged(SET), beir.queries(SET)
    queries = {query_id: texts_of[query_id] for query_id in judgements}
    abstracts = chosen({doc_id for doc_ids in judgements.values() for doc_id in doc_ids}, options.documents)
    home, long = joined(abstracts)
    relevant = {query: {home[doc_id]: 1 for doc_id in doc_ids} for query, doc_ids in judgements.items()}
    options.run_dir.mkdir(parents=True, exist_ok=True)
    texts = {name: options.run_dir / f"{name}.jsonl" for name in ("separate", "joined")}
    for path, rows in zip(texts.values(), (abstracts, long), strict=True):
        write_json_lines(path, rows)
    runs = {name: str(options.run_dir / name) for name in ("passages", "separate", "cut")}
    api.build_index(MODEL, texts["joined"], run_dir=runs["passages"], count=options.count)
    build_whole(runs["passages"], runs["separate"], texts["separate"])
    build_whole(runs["passages"], runs["cut"], texts["joined"])
    table = query_encoder(runs["passages"], "student")
    towers = {"model": query_encoder(runs["passages"], "dual_encoder"), "table": table, "hybrid": table}
    rows = [
        {"index": name, **facts(run_dir), **quality(run_dir, towers, queries, relevant, home)}
        for name, run_dir in runs.items()
    ]
    show("nDCG@10", rows)
    metrics = kept(rows) | {"documents": len(long), "abstracts": len(abstracts), "queries": len(queries)}
    show("Kept of the separate abstracts' nDCG@10", [metrics])
    write(options.json, metrics=metrics, indexes=rows)


def chosen(needed: set[str], count: int | None) -> list[Row]:
    """Return abstracts in a seeded order, at most `count`, including all needed ones."""
    rows = beir.documents(SET)
    random.Random(0).shuffle(rows)
    rows.sort(key=lambda row: row["_id"] not in needed)  # stable: needed ones first
    abstracts = rows[: max(count or len(rows), len(needed))]
    random.Random(1).shuffle(abstracts)
    return [{"id": row["_id"], "title": row["title"], "text": row["text"]} for row in abstracts]


def joined(abstracts: Sequence[Row]) -> tuple[dict[str, str], list[Row]]:
    """Join abstracts; return the document id of each abstract, and the documents."""
    home: dict[str, str] = {}
    documents: list[Row] = []
    for start in range(0, len(abstracts), JOINED):
        group = abstracts[start : start + JOINED]
        text = "\n\n".join(f"{row['title']}\n{row['text']}" for row in group)
        documents.append({"id": f"long-{len(documents)}", "text": text})
        home |= {row["id"]: documents[-1]["id"] for row in group}
    return home, documents


def build_whole(like: str, run_dir: str, texts: Path) -> None:
    """Build the index of a run, without its student, for other texts and without passages."""
    config, changes = pipeline.load_run(like), {"run_dir": run_dir, "distill": None, "pseudo_queries": None}
    dataset = config.dataset.model_copy(update={"path": str(texts), "passages": None})
    documents = len(texts.read_text(encoding="utf-8").splitlines())
    quantize = config.quantize.model_copy(update={"codes": min(config.quantize.codes, documents // 4)})
    config = config.model_copy(update=changes | {"dataset": dataset, "quantize": quantize})
    pipeline.run(config, stages.select(config, until="index"))


def query_encoder(run_dir: str, kind: str) -> QueryEncoder:
    """Return a query tower of a run."""
    return QueryEncoder(pipeline.locate(pipeline.load_run(run_dir), kind).directory("query"))


def quality(
    run_dir: str,
    towers: Mapping[str, QueryEncoder],
    queries: Mapping[str, str],
    relevant: Mapping[str, Mapping[str, int]],
    home: Mapping[str, str],
) -> Row:
    """Measure nDCG@10 of the model, of its table, and of the table with BM25."""
    index, measures = api.Index(run_dir), {}
    for name, tower in towers.items():
        path = QueryPath(tower, index.query_path.sparse if name == "hybrid" else None)
        rankings = {}
        for query_id, query in zip(queries, path([*queries.values()]), strict=True):
            (hits,) = index.searcher.search(query.embedding, query.terms, k=DEPTH)
            rankings[query_id] = [*dict.fromkeys(home.get(hit.doc_id, hit.doc_id) for hit in hits)]
        measures[name] = measure(rankings, relevant)["nDCG@10"]
    return measures


def facts(run_dir: str) -> Row:
    """Return the rows of an index, and the share of the tokens that its model did not read."""
    counts = pipeline.locate(pipeline.load_run(run_dir), "embeddings").counts
    lost = counts["lost_tokens"] / (counts["tokens"] + counts["lost_tokens"])
    return {"rows": counts["documents"], "cut_texts": counts["cut_texts"], "lost_share": round(lost, 4)}


def kept(rows: Sequence[Row]) -> dict[str, float]:
    """Return shares of the nDCG@10 on separate abstracts."""
    by_index = {row["index"]: row for row in rows}
    prefixes = {"model": "", "table": "table_", "hybrid": "hybrid_"}
    return {
        f"{prefix}{label}": by_index[index][method] / by_index["separate"][method]
        for method, prefix in prefixes.items()
        for index, label in (("passages", "kept_with_passages"), ("cut", "kept_when_cut"))
    }


if __name__ == "__main__":
    main()
