"""mteb against our own evaluation: the same towers, documents and judgements, two programs that measure them.

    python -m benchmarks.mteb_agreement --json docs/results/mteb_agreement.json [--sets scifact nfcorpus]

For each BEIR folder below $SCALINGNOTE_DATA all-MiniLM-L6-v2 as published encodes the documents, a table of
tokens is distilled from them (few pseudo-queries, short documents: the agreement is measured, not the
quality), and the stage evaluate searches the test queries exactly. The student and its teacher are published
as one Router folder, which mteb evaluates by itself from the same folder: it encodes all documents again.

- ndcg_difference_SET: |nDCG@10 by mteb - nDCG@10 by the stage evaluate| of the table
- the row "search": the run's index with BM25, compressed as it is served, by mteb, with the report's
  exact hybrid

An interrupted run continues: every artifact is kept below --run-dir.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import beir, front_door
from benchmarks.report import arguments, show, write
from scalingnote import api
from scalingnote.evaluate import mteb_model
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig

SETS = ("scifact", "nfcorpus")
STUDENT = "static"  # name of the row in our report


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=SETS, help="BEIR folders, default: %(default)s")
    parser.add_argument("--documents", type=int, default=64, help="tokens of one, default: %(default)s")
    parser.add_argument("--run-dir", default="runs/mteb_agreement", help="default: %(default)s")
    options = parser.parse_args()
    rows = [row for name in options.sets for row in compare(name, options)]
    show("nDCG@10 by two programs", rows)
    metrics = {
        f"ndcg_difference_{row['set']}": row["difference"] for row in rows if row["what"] == "Router folder"
    }
    write(options.json, metrics=metrics, rows=rows)


def compare(name: str, options: Any) -> list[dict[str, Any]]:
    """Rows of one set: the Router folder and the search, by mteb and by us."""
    config = config_of(name, options)
    run_dir = Path(config.run_dir)
    built = pipeline.run(config, stages.select(config))
    router, task = run_dir / "router", mteb_model.beir_task(beir.folder(name))
    api.publish(built, router, model=None)
    ours = built["report"].read_json("report.json")["methods"]
    sides: dict[str, tuple[Any, str]] = {
        "Router folder": (mteb_model.folder_model(router), STUDENT),
        "search": (api.mteb_search(run_dir), f"{STUDENT} + bm25"),
    }
    rows = []
    for what, (model, method) in sides.items():
        found = mteb_model.evaluate(model, [task], to=run_dir / "mteb", resume=True)[name]
        mteb, own = found["ndcg_at_10"], ours[method]["nDCG@10"]
        numbers = {"mteb": round(mteb, 5), "evaluate": round(own, 5), "difference": round(abs(mteb - own), 5)}
        rows.append({"set": name, "what": what, **numbers})
    return rows


def config_of(name: str, options: Any) -> RunConfig:
    """The run of one set, without the parts of the report that are not compared."""
    knobs = [
        f"adopt.document_max_length={options.documents}",
        "pseudo_queries.count=3000",
        "index={shards: 1}",
        "bm25={}",
        "evaluate={typos: 0, tower_measures: false}",
    ]
    given = Namespace(run_dir=options.run_dir, set=knobs)
    return front_door.config_of("minilm", name, STUDENT, 0, given)


if __name__ == "__main__":
    main()
