"""A simulated day of traffic on real queries, split between query towers, and the report on it.

    python -m benchmarks.experiment --json docs/results/experiment.json [--report FILE] [--users N]

Real: questions, answers and judgements of `medquad`, the towers' answers and their latencies (in this
process, one query at a time, over all documents), the split, the access log with its writers and reader, the
report. Simulated: who asks what and when, clicks and satisfaction (position-based, from the judgements), and
half a percent of requests that fail.

The towers are lookup tables of a pretrained model's token embeddings (pip install 'scalingnote[bench]'), in
one space with the documents:

    control   the mean of a query's rows
    short     the same, of the 64 of 384 principal directions alone that tell documents apart best
    again     the control under another name: what is found of it is found by chance (A/A)
"""

import itertools
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray
from safetensors import torch as safetensors
from tokenizers import Tokenizer

from benchmarks import minilm
from benchmarks.plain_embeddings import term_counts
from benchmarks.report import arguments, show, write
from scalingnote import cluster, topk
from scalingnote.config import validate
from scalingnote.datasets.config import MedQuad, PositionClicks
from scalingnote.datasets.job import run as prepare
from scalingnote.datasets.simulate import browse, probability_by_grade
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.experiment import job, report
from scalingnote.experiment.access_log import AccessWriter
from scalingnote.experiment.config import Arm, ExperimentConfig, TrafficSplit, arm_of, unit_of
from scalingnote.experiment.report import Report
from scalingnote.log import configure, get_logger
from scalingnote.models import lookup
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact

DAY = datetime(2026, 1, 5, tzinfo=UTC).timestamp()
K, FAILS, RATED, NAMED, SHORT = 20, 0.005, 0.3, 0.01, 64
SPLIT = TrafficSplit(
    name="query-towers",
    arms=(Arm(name="control", share=0.4), Arm(name="short", share=0.4), Arm(name="again", share=0.2)),
)
CLICKS = PositionClicks()
log = get_logger("bench")


def main() -> None:
    """One day, one report."""
    parser = arguments(__doc__)
    parser.add_argument("--users", type=int, default=1500, help="default: %(default)s")
    parser.add_argument("--max-documents", type=int, help="default: all")
    parser.add_argument("--report", type=Path, help="copy report.md here")
    options = parser.parse_args()
    configure()
    with TemporaryDirectory() as folder:
        source = MedQuad(max_documents=options.max_documents, click_model=CLICKS)
        dataset = prepare(source, output=f"{folder}/dataset")
        engine = Engine(dataset, Path(folder))
        simulate(engine, dataset, Path(folder), users=options.users)
        cluster.connect()
        values = {
            "run_dir": folder,
            "logs": [folder],
            "split": SPLIT.model_dump(),
            "feedback": f"{folder}/feedback.jsonl",
            "clicks": f"{folder}/clicks.jsonl",
        }
        config = validate(ExperimentConfig, values, source="benchmark")
        made = job.run(config, dataset=dataset.uri, output=f"{folder}/report")
        told = made.read_json("report.json")
        if options.report:
            options.report.write_text(report.markdown(told))
    print(report.summary(told), *told["warnings"], "", report.comparison_table(told), sep="\n")
    rows = [
        {"arm": name, "stage": s, **dict(zip(("p50", "p90", "p99"), ms, strict=True))}
        for name, s, ms in times(told)
    ]
    show("latency, ms", rows)
    metrics = {
        f"{arm}_{measure}_{key}": found[key]
        for arm, measures in told["comparisons"].items()
        for measure, found in measures.items()
        for key in ("relative", "p_holm")
        if found[key] is not None
    }
    write(options.json, metrics=metrics, report=told)


def times(told: Report) -> list[tuple[str, str, list[float]]]:
    """(arm, stage, percentiles)."""
    return [(name, s, ms) for name, arm in told["arms"].items() for s, ms in arm["latency_ms"].items()]


class Engine:
    """Documents and query towers in one space; exact search."""

    def __init__(self, dataset: Artifact, folder: Path) -> None:
        documents = dataset.table("documents", ["doc_id", "title", "topic"])
        columns = (documents[name].to_pylist() for name in ("title", "topic"))
        texts = [" ".join(value or "" for value in row) for row in zip(*columns, strict=True)]
        tokenizer = Tokenizer.from_file(str(minilm.path() / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        counts = term_counts(texts, tokenizer)
        weights = safetensors.load_file(minilm.path() / "model.safetensors")
        (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
        plain = weights[name].float().numpy()[: counts.shape[1]]
        idf = np.log(counts.shape[0] / np.maximum((counts > 0).sum(axis=0).A1, 1)).astype(np.float32)
        directions = np.linalg.svd(np.cov((counts @ (plain * idf[:, None])).T))[2].astype(np.float32)
        plain = plain @ directions.T  # in order of what they tell apart
        weighted = plain * idf[:, None]
        self.doc_ids = documents["doc_id"].to_pylist()
        self.documents = arrow.l2_normalize(np.asarray(counts @ weighted, np.float32))
        self.towers: dict[str, Callable[[list[str]], Float[ndarray, "queries dim"]]] = {}
        short = plain.copy()
        short[:, SHORT:] = 0
        for arm, rows in (("control", plain), ("short", short)):
            tower = lookup.from_table(np.ascontiguousarray(rows), tokenizer, max_length=64)
            tower.save(folder / arm)
            self.towers[arm] = QueryEncoder.load(folder / arm).encode_queries
        self.towers["again"] = self.towers["control"]

    def answer(self, query: str, arm: str) -> tuple[list[str], list[float], dict[str, float]]:
        """doc_ids, scores and milliseconds of one query."""
        clock = [time.perf_counter()]
        embedding = arrow.l2_normalize(self.towers[arm]([query]))
        clock.append(time.perf_counter())
        scores, rows = topk.search(embedding, self.documents, k=K)
        clock.append(time.perf_counter())
        encode, search = (1000 * (after - before) for before, after in itertools.pairwise(clock))
        ms = {"encode": encode, "search": search, "rerank": 0.0, "total": encode + search}
        return [self.doc_ids[row] for row in rows[0]], scores[0].tolist(), ms


def simulate(engine: Engine, dataset: Artifact, folder: Path, *, users: int) -> None:
    """Requests of a day into the logs of two replicas; feedback.jsonl and clicks.jsonl beside them."""
    rng = np.random.default_rng(0)
    asked = dataset.table("queries")
    texts = asked["query"].to_pylist()
    grades: dict[str, dict[str, float]] = {query_id: {} for query_id in asked["query_id"].to_pylist()}
    best = pc.max(dataset.table("qrels")["relevance"]).as_py()
    for row in dataset.table("qrels").to_pylist():
        grades[row["query_id"]][row["doc_id"]] = row["relevance"] / best
    judged = list(grades.values())
    writers = [AccessWriter(folder, f"gateway-{number}") for number in range(2)]
    requests = rng.permutation(np.repeat(np.arange(users), 1 + rng.geometric(0.2, users)))
    # Few at night, most in the evening.
    hours = 24 * rng.beta(3, 1.8, len(requests))
    log.info("%s requests of %s users", f"{len(requests):,}", f"{users:,}")
    feedback: list[dict[str, Any]] = []
    clicks: list[dict[str, Any]] = []
    for number, (user, hour) in enumerate(zip(requests.tolist(), hours.tolist(), strict=True)):
        request_id = f"request-{number}"
        unit = unit_of(f"user-{user}", request_id, secret="benchmark")
        arm = arm_of(unit, SPLIT).name
        named = rng.random() < NAMED
        if named:
            arm = str(rng.choice([one.name for one in SPLIT.arms]))
        query = int(rng.integers(len(texts)))
        record = {
            "time": DAY + 3600 * hour,
            "request_id": request_id,
            "path": "/search",
            "status": 200,
            "arm": arm,
            "unit": None if named else unit,
            "query": texts[query],
            "k": K,
            "shards": 1,
            "shards_answered": 1,
        }
        if rng.random() < FAILS:
            writers[number % 2].append(record | {"status": 503, "shards_answered": 0, "error": "unavailable"})
            continue
        doc_ids, scores, ms = engine.answer(texts[query], arm)
        writers[number % 2].append(record | {"doc_ids": doc_ids, "scores": scores, "timings_ms": ms})
        grade = np.array([[judged[query].get(doc_id, 0.0) for doc_id in doc_ids]])
        response = browse(
            probability_by_grade(grade, best=CLICKS.attractiveness, other=CLICKS.noise),
            probability_by_grade(grade, best=CLICKS.satisfaction, other=CLICKS.satisfaction_noise),
            config=CLICKS,
            rng=rng,
            second=rng,
        )
        places = np.flatnonzero(response.clicked[0])
        clicks += ({"request_id": request_id, "doc_id": doc_ids[place]} for place in places.tolist())
        if rng.random() < RATED:
            feedback.append({"request_id": request_id, "satisfied": bool(response.satisfied.any())})
    for writer in writers:
        writer.close()
    for name, rows in (("feedback", feedback), ("clicks", clicks)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
