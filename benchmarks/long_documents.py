"""Documents that a model cannot read whole: nDCG@10 kept by an index of passages, and where texts are cut.

    python -m benchmarks.long_documents --json docs/results/long_documents.json [--documents N] [--count N]

Abstracts of SciFact (BEIR folder below $SCALINGNOTE_DATA) are joined, ten in a document in a seeded order; a
document is relevant to a query if one of its abstracts is. all-MiniLM-L6-v2 and its default table search

- passages: an index of the documents, which `build_index` divides by itself; the table learns from these
- separate: an index of the abstracts; each result stands for the document that the abstract is in
- cut: an index of the documents, of which the model reads the beginning

Of all three the first ten documents are compared with the same judgements, by linear gain (trec_eval's):
`kept_with_passages` and `kept_when_cut` are the model's shares of what it reaches over separate abstracts,
`table_` and `hybrid_` (with BM25) those of its table. `--documents` takes so many abstracts, all judged ones
among them. An interrupted run continues below --run-dir.
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
JOINED, DEPTH = 10, 100  # abstracts of a document; results, which stand for ten documents at least
SET, MODEL = "scifact", f"package:{PACKAGE}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, help="abstracts, default: all")
    parser.add_argument("--count", type=int, help="texts that the tables learn from, default: the recipe's")
    parser.add_argument("--run-dir", type=Path, default="runs/long_documents", help="default: %(default)s")
    options = parser.parse_args()
    judged, texts_of = beir.judged(SET), beir.queries(SET)
    queries = {query_id: texts_of[query_id] for query_id in judged}
    abstracts = chosen({doc_id for own in judged.values() for doc_id in own}, options.documents)
    home, long = joined(abstracts)
    relevant = {query: {home[doc_id]: 1 for doc_id in own} for query, own in judged.items()}
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
    """Abstracts in a seeded order, at most `count`, with all of those that are needed."""
    rows = beir.documents(SET)
    random.Random(0).shuffle(rows)
    rows.sort(key=lambda row: row["_id"] not in needed)  # stable: the needed ones come first
    own = rows[: max(count or len(rows), len(needed))]
    random.Random(1).shuffle(own)
    return [{"id": row["_id"], "title": row["title"], "text": row["text"]} for row in own]


def joined(abstracts: Sequence[Row]) -> tuple[dict[str, str], list[Row]]:
    """The document that each abstract is in, and the documents."""
    home: dict[str, str] = {}
    documents: list[Row] = []
    for start in range(0, len(abstracts), JOINED):
        own = abstracts[start : start + JOINED]
        text = "\n\n".join(f"{row['title']}\n{row['text']}" for row in own)
        documents.append({"id": f"long-{len(documents)}", "text": text})
        home |= {row["id"]: documents[-1]["id"] for row in own}
    return home, documents


def build_whole(like: str, run_dir: str, texts: Path) -> None:
    """Build the index of a run, without its student, of other texts, which are not divided."""
    config, changes = pipeline.load_run(like), {"run_dir": run_dir, "distill": None, "pseudo_queries": None}
    dataset = config.dataset.model_copy(update={"path": str(texts), "passages": None})
    documents = len(texts.read_text(encoding="utf-8").splitlines())
    quantize = config.quantize.model_copy(update={"codes": min(config.quantize.codes, documents // 4)})
    config = config.model_copy(update=changes | {"dataset": dataset, "quantize": quantize})
    pipeline.run(config, stages.select(config, until="index"))


def query_encoder(run_dir: str, kind: str) -> QueryEncoder:
    """A query tower of a run."""
    return QueryEncoder(pipeline.locate(pipeline.load_run(run_dir), kind).directory("query"))


def quality(
    run_dir: str,
    towers: Mapping[str, QueryEncoder],
    queries: Mapping[str, str],
    relevant: Mapping[str, Mapping[str, int]],
    home: Mapping[str, str],
) -> Row:
    """nDCG@10 of the model, of its table, and of the table with BM25."""
    index, found = api.Index(run_dir), {}
    for name, tower in towers.items():
        path = QueryPath(tower, index.query_path.sparse if name == "hybrid" else None)
        rankings = {}
        for query_id, query in zip(queries, path([*queries.values()]), strict=True):
            (hits,) = index.searcher.search(query.embedding, query.terms, k=DEPTH)
            rankings[query_id] = [*dict.fromkeys(home.get(hit.doc_id, hit.doc_id) for hit in hits)]
        found[name] = measure(rankings, relevant)["nDCG@10"]
    return found


def facts(run_dir: str) -> Row:
    """Rows of an index, and the share of the tokens that its model has not read."""
    counts = pipeline.locate(pipeline.load_run(run_dir), "embeddings").counts
    lost = counts["lost_tokens"] / (counts["tokens"] + counts["lost_tokens"])
    return {"rows": counts["documents"], "cut_texts": counts["cut_texts"], "lost_share": round(lost, 4)}


def kept(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of what the separate abstracts give."""
    by_index = {row["index"]: row for row in rows}
    prefixes = {"model": "", "table": "table_", "hybrid": "hybrid_"}
    return {
        f"{prefix}{label}": by_index[index][method] / by_index["separate"][method]
        for method, prefix in prefixes.items()
        for index, label in (("passages", "kept_with_passages"), ("cut", "kept_when_cut"))
    }


if __name__ == "__main__":
    main()
