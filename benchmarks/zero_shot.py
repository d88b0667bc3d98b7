"""One table of general texts for all-MiniLM-L6-v2, on collections that it was not trained on.

    python -m benchmarks.zero_shot --json docs/results/zero_shot.json

`benchmarks/front_door.py` trains a table on the documents of each collection. This one uses the same recipe
once, on documents of other public sets, and is measured on the same sets: nDCG@10 over the teacher's
(`zero_shot_kept_mean`), and of both with BM25 (`zero_shot_hybrid_kept_mean`).

An interrupted run continues: every artifact is kept below --run-dir, which may be that of front_door.
"""

import json
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import front_door, public_sets
from benchmarks.front_door import MAX_DOCUMENTS, SETS, TEACHERS, Row
from benchmarks.report import arguments, show, write
from scalingnote.core.config import load
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact

TEACHER = "minilm"
SOURCES = ("medquad", "stackexchange_devops", "chorus_icecat")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=SETS, help="to measure, default: %(default)s")
    parser.add_argument("--sources", nargs="+", default=SOURCES, help="to train on, default: %(default)s")
    parser.add_argument("--run-dir", default="runs/front_door", help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="override a knob")
    options = parser.parse_args()
    student = general_table(options)
    rows = [row for name in options.sets for row in measure(name, student, options)]
    show("A table of general texts", rows)
    table_rows = [row for row in rows if row["method"] == "general table"]
    metrics = {
        "zero_shot_kept_mean": round(statistics.mean(row["kept"] for row in table_rows), 4),
        "zero_shot_hybrid_kept_mean": round(statistics.mean(row["hybrid kept"] for row in table_rows), 4),
    }
    write(options.json, metrics=metrics, rows=rows)


def general_table(options: Any) -> Artifact:
    """Train the default table on documents of several public sets together."""
    folder = Path(options.run_dir) / TEACHER / "general"
    folder.mkdir(parents=True, exist_ok=True)
    texts = folder / "texts.jsonl"
    with texts.open("w", encoding="utf-8") as stream:
        for name in options.sources:
            rows = public_sets.json_rows(public_sets.prepare(name) / "documents.jsonl")
            for row in islice(rows, MAX_DOCUMENTS):
                text = {"text": row.get("content") or "", "title": row.get("title") or ""}
                stream.write(json.dumps(text) + "\n")
    knobs = [
        f"run_dir={folder}",
        f"dataset={{name: texts, path: {texts}}}",
        f"adopt.path={TEACHERS[TEACHER]()}",
        "teacher.resources={workers: 1, cpus_per_worker: 2}",
    ]
    config = load(RunConfig, ["configs/methods/table.yaml"], [*knobs, *options.set])
    return pipeline.run(config, stages.select(config, until="distill"), record=False)["student"]


def measure(name: str, student: Artifact, options: Any) -> list[Row]:
    """Measure BM25, the teacher and the table on one set, with documents encoded by the teacher."""
    from scalingnote.encode.encoder import Encoder
    from scalingnote.encode.query_encoder import QueryEncoder

    config = front_door.config_of(TEACHER, name, "table", 0, options)
    needed_stages = [stages.select(config, only=stage)[0] for stage in ("prepare", "adopt", "encode")]
    artifacts = pipeline.run(config, needed_stages, record=False)
    pool = front_door.pool_of(artifacts["dataset"], artifacts["embeddings"])
    teacher = Encoder.load(artifacts["dual_encoder"].directory("query"), precision="float32")
    table = QueryEncoder(student.directory("query"), precision="float32")
    sides = {"teacher": teacher.encode_queries, "general table": table.encode_queries}
    rows = [front_door.row(name, 0, "bm25", pool, pool.bm25, 0.0)]
    for method, encode in sides.items():
        scores = arrow.l2_normalize(encode(pool.queries)) @ pool.documents.T
        rows.append(front_door.row(name, 0, method, pool, scores, 0.0))
    return front_door.with_shares(rows)


if __name__ == "__main__":
    main()
