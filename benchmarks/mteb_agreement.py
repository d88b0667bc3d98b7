"""mteb against our evaluation: two programs measure the same towers, documents and judgements.

    python -m benchmarks.mteb_agreement --json docs/results/mteb_agreement.json [--sets scifact nfcorpus]

For each BEIR folder below $SCALINGNOTE_DATA the published all-MiniLM-L6-v2 encodes the documents, a table of
tokens is distilled from them (few pseudo-queries, short documents: the measurement is the agreement, not the
quality), and the stage evaluate searches the test queries exactly. Student and teacher are published as one
Router folder; mteb loads this folder and encodes all documents again.

- ndcg_difference_SET: |nDCG@10 by mteb - nDCG@10 by the stage evaluate| of the table
- the row "search": the run's index with BM25, compressed like in a service, by mteb, with the report's exact
  hybrid

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
    parser.add_argument(
        "--documents", type=int, default=64, help="tokens of a document, default: %(default)s"
    )
    parser.add_argument("--run-dir", default="runs/mteb_agreement", help="default: %(default)s")
    options = parser.parse_args()
    rows = [row for name in options.sets for row in compare(name, options)]
    show("nDCG@10 by two programs", rows)
    metrics = {
        f"ndcg_difference_{row['set']}": row["difference"] for row in rows if row["what"] == "Router folder"
    }
    write(options.json, metrics=metrics, rows=rows)


def compare(name: str, options: Any) -> list[dict[str, Any]]:
    """Measure one set: the Router folder and the search, by mteb and by us."""
    config = config_of(name, options)
    run_dir = Path(config.run_dir)
    artifacts = pipeline.run(config, stages.select(config))
    router, task = run_dir / "router", mteb_model.beir_task(beir.folder(name))
    api.publish(artifacts, router, model=None)
    ours = artifacts["report"].read_json("report.json")["methods"]
    sides: dict[str, tuple[Any, str]] = {
        "Router folder": (mteb_model.folder_model(router), STUDENT),
        "search": (api.mteb_search(run_dir), f"{STUDENT} + bm25"),
    }
    rows = []
    for what, (model, method) in sides.items():
        scores = mteb_model.evaluate(model, [task], to=run_dir / "mteb", resume=True)[name]
        mteb, own = scores["ndcg_at_10"], ours[method]["nDCG@10"]
        numbers = {"mteb": round(mteb, 5), "evaluate": round(own, 5), "difference": round(abs(mteb - own), 5)}
        rows.append({"set": name, "what": what, **numbers})
    return rows


def config_of(name: str, options: Any) -> RunConfig:
    """Return the config of one set's run, without the parts of the report that are not compared."""
    knobs = [
        f"adopt.document_max_length={options.documents}",
        "pseudo_queries.count=3000",
        "index={shards: 1}",
        "bm25={}",
        "evaluate={typos: 0, tower_measures: false}",
    ]
    run_options = Namespace(run_dir=options.run_dir, set=knobs)
    return front_door.config_of("minilm", name, STUDENT, 0, run_options)


if __name__ == "__main__":
    main()
