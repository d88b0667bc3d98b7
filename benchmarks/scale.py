"""Seconds, requests and memory of the offline stages by the sizes of corpus, queries and codes.

    python -m benchmarks.scale --json docs/results/scale.json

Corpora are synthetic (benchmarks/scale_inputs.py): embeddings of 32 dimensions, one impression per document,
the same 2,000 training and 500 test queries at each size. Every stage runs in a separate process, the driver,
on a private Ray cluster, like `scalingnote` runs it, with the settings below. Stages with costs that depend
on a product run again on small corpora, one after the other on one cluster: `collect` and `mine` with more
training queries, `quantize` with more codes.

- driver_rss_gb_max: resident memory of the largest driver, including interpreter and libraries
- driver_rss_growth: the largest ratio, over stages, of the driver's memory at the two largest sizes
- growth_exponent_max: the largest x of seconds ~ documents^x between the two largest sizes, over stages
- plan_seconds_error_max: the largest relative error, over stages, of `scalingnote plan` from the smaller
  sizes for the largest run; plan_requests_error_max and plan_driver_error_max likewise
- plan_over_run_queries, plan_over_run_codes: seconds of the run with most queries (or codes) by `scalingnote
  plan` from runs with fewer, over the measured seconds; of several stages the ratio farthest from 1

`--costs FILE` writes the costs of stages to the constants of the plan, scalingnote/plan/constants.json.
`--folder` keeps corpora, artifacts and finished measurements: after a kill, a run continues.
"""

import importlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from benchmarks import scale_inputs
from benchmarks.report import arguments, peak_memory_mb, run_isolated, show, write
from scalingnote.core import cluster
from scalingnote.core.config import Config
from scalingnote.core.log import configure
from scalingnote.datasets.config import Columns, Logs, TableFile
from scalingnote.encode.config import BM25Config
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.index.config import IndexConfig
from scalingnote.plan.capacity import STAGE_FIGURES, stage_figures
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.triplets.config import BM25Ranker, CollectConfig, MineConfig, PseudoQueriesConfig, Statistics
from scalingnote.triplets.mine.search import QUERIES_PER_BATCH

SIZES = (100_000, 1_000_000, 10_000_000)
AXIS_SIZES = (100_000, 400_000)  # documents; the first two of QUERIES and CODES predict the third
QUERIES = (2_000, 10_000, 40_000)
CODES = (256, 1024, 4096)  # of each level
LEVELS = 4
DOCUMENTS_PER_SHARD = 2_500_000
MADE_FROM_EMBEDDINGS = ("quantize", "mine")  # embeddings are made before, and not measured
# The factor of a stage's work in addition to the documents: a column of its runs.
AXES = {"collect (BM25)": "queries", "mine": "queries", "quantize": "codes"}
PER_PASS = {"mine": QUERIES_PER_BATCH}  # queries per pass over all documents
READS_EMBEDDINGS = ("quantize", "index", "mine", "evaluate")  # the rows of other stages are texts
Row = dict[str, Any]


class Stage(NamedTuple):
    """A job of the package, the names of the artifacts that it reads and writes in a folder, its config."""

    job: str
    reads: Mapping[str, str]
    output: str
    config: Config

    def run(self, folder: Path) -> Artifact:
        """Run the job. It is imported here, so that a driver imports only the code of its stage."""
        job = importlib.import_module(f"scalingnote.{self.job}.job")
        parents = {name: f"{folder}/{artifact}" for name, artifact in self.reads.items()}
        made: Artifact = job.run(self.config, **parents, output=f"{folder}/{self.output}")
        return made


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=SIZES)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=[*STAGES])
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--costs", type=Path, metavar="FILE")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        axes = run_isolated(measured_axes, folder) if set(AXES) & set(options.stages) else []
        sizes = options.documents
        rows = [row for size in sizes for row in measured(folder / str(size), size, options.stages)]
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    show("Stages", rows)
    by_stage = [[row for row in rows if row["stage"] == stage] for stage in options.stages]
    growth = [row for stage_rows in by_stage for row in grown(stage_rows)]
    plan_rows = [row for stage_rows in by_stage for row in predicted(stage_rows)]
    metrics: dict[str, float] = {"driver_rss_gb_max": max(row["driver GB"] for row in rows)}
    if growth:
        show("From the second largest corpus to the largest", growth)
        metrics["driver_rss_growth"] = max(row["driver growth"] for row in growth)
        metrics["growth_exponent_max"] = max(row["exponent"] for row in growth)
    if plan_rows:
        show("What the smaller corpora predict of the largest", plan_rows)
        for figure in ("seconds", "requests", "driver"):
            metrics[f"plan_{figure}_error_max"] = max(row[f"{figure} error"] for row in plan_rows)
    axis_rows = [over_run(axes, stage) for stage in AXES] if axes else []
    if axis_rows:
        show("More queries and more codes", axes)
        show("What runs with fewer predict of the one with the most", axis_rows)
        for name in dict.fromkeys(row["axis"] for row in axis_rows):
            ratios = [row["plan over run"] for row in axis_rows if row["axis"] == name]
            metrics[f"plan_over_run_{name}"] = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    show("Metrics", [metrics])
    tables: dict[str, Any] = {
        "axes": axes,
        "growth": growth,
        "predicted": plan_rows,
        "plan_over_run": axis_rows,
    }
    write(options.json, metrics=metrics, stages=rows, **tables)
    if options.costs:
        constants = json.loads(options.costs.read_text(encoding="utf-8"))
        constants["stages"] = all_stage_costs(rows, axes)
        options.costs.write_text(json.dumps(constants, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def measured(folder: Path, documents: int, stages: list[str]) -> list[Row]:
    """Return a row for each stage on a corpus of this size; reuse finished ones in `folder`."""
    counts = {"documents": documents, "queries": scale_inputs.TRAIN_QUERIES, "codes": LEVELS * CODES[0]}
    return [
        noted(folder / f"{name}.json", {"stage": name, **counts}, measure, name, folder, documents)
        for name in STAGES
        if name in stages
    ]


def measure(name: str, folder: Path, documents: int) -> Row:
    """Make the inputs of a stage, then run it in a separate process, on a separate cluster."""
    scale_inputs.files(folder, documents)
    if name in MADE_FROM_EMBEDDINGS:
        run_isolated(_embeddings, folder, documents)
    return run_isolated(run, folder, documents, stages(folder, documents)[name])


def noted(note: Path, of: Row, work: Callable[..., Row], *given: Any) -> Row:
    """Return a measurement from its file; if there is none, measure and write it. It begins with `of`."""
    if not note.exists():
        note.write_text(json.dumps(of | work(*given)), encoding="utf-8")
    row: Row = json.loads(note.read_text(encoding="utf-8"))
    return row


def measured_axes(folder: Path) -> list[Row]:
    """Measure the stages of AXES, on one cluster, with all of AXIS_SIZES and of QUERIES or CODES.

    The largest count runs only at the largest size. The inputs of the stages are made before and not
    measured.
    """
    import ray

    configure()
    rows = []
    try:
        for documents in AXIS_SIZES:
            least = {"documents": documents, "queries": QUERIES[0], "codes": LEVELS * CODES[0]}
            largest = documents == AXIS_SIZES[-1]
            for count in QUERIES if largest else QUERIES[:-1]:
                axis_folder = folder / f"{documents}-{count}"
                for name in ("collect (BM25)", "mine"):
                    counts = least | {"queries": count}
                    work = partial(on_axis, stages(axis_folder, documents)[name], axis_folder, counts)
                    rows.append(noted(axis_folder / f"{name}.json", {"stage": name, **counts}, work))
            axis_folder = folder / f"{documents}-{QUERIES[0]}"
            for count in CODES if largest else CODES[:-1]:
                counts = least | {"codes": LEVELS * count}
                stage = stages(axis_folder, documents)["quantize"]
                config = stage.config.model_copy(update={"codes": count})
                stage = stage._replace(config=config, output=f"semantic_ids-{count}")
                work = partial(on_axis, stage, axis_folder, counts)
                rows.append(
                    noted(axis_folder / f"quantize-{count}.json", {"stage": "quantize", **counts}, work)
                )
    finally:
        ray.shutdown()
    return rows


def on_axis(stage: Stage, folder: Path, counts: Row) -> Row:
    """Make missing inputs of a stage of AXES, then run it on the cluster of this process."""
    documents = counts["documents"]
    scale_inputs.files(folder, documents, train_queries=counts["queries"])
    cluster.connect()
    all_stages = stages(folder, documents)
    all_stages["prepare (columns)"].run(folder)
    all_stages["planner"]._replace(reads={"dataset": "dataset"}).run(folder)
    _embeddings(folder, documents)
    return timed(stage, folder, documents)


def all_stage_costs(rows: Sequence[Row], axes: Sequence[Row]) -> dict[str, Row]:
    """Return the costs of every measured stage, with six digits."""
    costs = {}
    for name in dict.fromkeys(row["stage"] for row in rows):
        stage_rows, others = ([row for row in table if row["stage"] == name] for table in (rows, axes))
        costs[name] = stage_costs(stage_rows, others)
        for figure in STAGE_FIGURES:
            costs[name][figure] = [float(f"{value:.6g}") for value in costs[name][figure]]
    return costs


def stage_costs(rows: Sequence[Row], others: Sequence[Row] = ()) -> Row:
    """Return the costs of a stage, in the form of `scalingnote.plan.capacity.stage_figures`.

    A figure is [a, b, c, d] of a + b·documents·passes + c·units + d·documents·units, where units are queries
    or codes (AXES). a and b are the line through the two largest of `rows`; c and d are fitted to the runs
    `others` with different units.
    """
    small, large = sorted(rows, key=lambda row: row["documents"])[-2:]
    stage = large["stage"]
    axis = AXES.get(stage) if others else None
    costs: Row = {
        "rows": "embeddings" if stage in READS_EMBEDDINGS else "texts",
        "units": axis,
        "units_per_pass": PER_PASS.get(stage) if axis else None,
    }
    for figure in STAGE_FIGURES:
        slope = (large[figure] - small[figure]) / (large["documents"] - small["documents"])
        slope = max(slope, 0.0)  # noise of a stage that does not grow
        fixed = max(large[figure] - slope * large["documents"], 0.0)
        unit = pair = 0.0
        if axis is not None and figure != "driver GB":  # one driver ran them all
            unit, pair = _unit_costs(others, axis, figure)
            fixed = max(fixed - unit * large[axis], 0.0)
            slope = max(slope - pair * large[axis], 0.0)
        costs[figure] = [fixed, slope, unit, pair]
    return costs


def _unit_costs(rows: Sequence[Row], name: str, figure: str) -> tuple[float, float]:
    """Fit the increase of a figure per query, or code: without documents, and for each document.

    Least squares of the relative error, from the runs' differences to the run of their size with the fewest.
    """
    first: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row[name]):
        first.setdefault(row["documents"], row)
    pairs = [(first[row["documents"]], row) for row in rows if row is not first[row["documents"]]]
    more = np.array([row[name] - base[name] for base, row in pairs], np.float64)
    added = np.array([row[figure] - base[figure] for base, row in pairs], np.float64)
    sizes = np.array([row["documents"] for _, row in pairs], np.float64)
    weight = 1 / np.maximum([row[figure] for _, row in pairs], 1e-9)
    scale = np.array([more.max(), (more * sizes).max()])
    features = np.stack([more, more * sizes], axis=1) / scale
    (unit, pair), _ = nnls(features * weight[:, None], added * weight)
    return float(unit / scale[0]), float(pair / scale[1])


def over_run(axes: list[Row], stage: str) -> Row:
    """Predict the run with the most queries, or codes, from runs with fewer; return it with its seconds."""
    name = AXES[stage]
    stage_rows = [row for row in axes if row["stage"] == stage]
    *counts, most = sorted({row[name] for row in stage_rows})
    (largest,) = (row for row in stage_rows if row[name] == most)
    fewer = [row for row in stage_rows if row[name] < most]
    costs = stage_costs([row for row in fewer if row[name] == counts[0]], fewer)
    figures = stage_figures(costs, documents=largest["documents"], units=most)
    return {
        "stage": stage,
        "axis": name,
        "from": counts[-1],
        "to": most,
        "seconds predicted": round(figures["seconds"], 2),
        "seconds measured": largest["seconds"],
        "plan over run": round(figures["seconds"] / largest["seconds"], 3),
    }


def run(folder: Path, documents: int, stage: Stage) -> Row:
    """Run one stage in this process, on a separate cluster, and return its figures."""
    import ray

    configure()
    cluster.connect()
    try:
        return timed(stage, folder, documents)
    finally:
        ray.shutdown()


def timed(stage: Stage, folder: Path, documents: int) -> Row:
    """Run one stage and return its figures."""
    start = time.perf_counter()
    artifact = stage.run(folder)
    seconds = time.perf_counter() - start
    usage: Mapping[str, int] = artifact.manifest.info["usage"]
    return {
        "seconds": round(seconds, 1),
        "documents/s": round(documents / seconds),
        "driver GB": round(peak_memory_mb() / 1024, 3),
        "worker GB": round(usage["worker_peak_bytes"] / 2**30, 3),
        "read MB": round(usage["bytes_read"] / 1e6),
        "written MB": round(usage["bytes_written"] / 1e6),
        "requests": usage["requests"],
    }


def grown(rows: list[Row]) -> list[Row]:
    """Compute the growth of a stage's figures between the two largest corpora."""
    if len(rows) < 2:
        return []
    small, large = sorted(rows, key=lambda row: row["documents"])[-2:]
    factor = math.log(large["documents"] / small["documents"])
    return [
        {
            "stage": large["stage"],
            "exponent": round(math.log(large["seconds"] / small["seconds"]) / factor, 3),
            "driver growth": round(large["driver GB"] / small["driver GB"], 3),
            "requests growth": round(large["requests"] / small["requests"], 2),
        }
    ]


def predicted(rows: list[Row]) -> list[Row]:
    """Predict the figures of a stage's largest corpus from smaller ones; compare with the measured ones."""
    if len(rows) < 3:
        return []
    *smaller, largest = sorted(rows, key=lambda row: row["documents"])
    figures = stage_figures(stage_costs(smaller), documents=largest["documents"])
    row: Row = {"stage": largest["stage"]}
    for figure, name in (("seconds", "seconds"), ("requests", "requests"), ("driver GB", "driver")):
        row |= {
            f"{name} predicted": round(figures[figure], 3),
            f"{name} measured": largest[figure],
            f"{name} error": round(abs(figures[figure] / largest[figure] - 1), 3),
        }
    return [row]


def _embeddings(folder: Path, documents: int) -> Artifact:
    """Make embeddings and their table of words, in place of the stages that do not run."""
    towers = scale_inputs.towers(folder, documents)
    dataset = open_artifact(f"{folder}/dataset", kind="dataset")
    return scale_inputs.embeddings(folder, dataset, towers, documents)


def stages(folder: Path, documents: int) -> dict[str, Stage]:
    """Return every stage by its name, for the corpus of a folder."""
    files = ("documents", "queries", "qrels", "impressions")
    tables = {name: TableFile(path=f"{folder}/{name}/*.parquet") for name in files}
    log = {"documents": tables["documents"], "impressions": tables.pop("impressions")}
    part = {"documents_per_part": scale_inputs.DOCUMENTS_PER_PART}
    days = [f"2024-{day}T00:00:00Z" for day in ("01-01", "01-31", "02-02")]
    windows = {"train": days[:2], "test": days[1:]}
    logs = Logs.model_validate(log | part | windows | {"parts": max(16, documents // 250_000)})
    clicks = CollectConfig(sources=("click",), parts=max(8, documents // 250_000))
    ranked = CollectConfig(sources=("relevance",), ranker=BM25Ranker(), association=None)
    index = IndexConfig(shards=max(2, documents // DOCUMENTS_PER_SHARD))

    def reads(*names: str) -> dict[str, str]:
        return {name: name for name in names}

    of_logs = {"dataset": "logs"}
    towers = reads("dataset", "embeddings", "dual_encoder")
    return {
        "prepare (columns)": Stage("datasets", {}, "dataset", Columns(click_model=None, **part, **tables)),
        "prepare (logs)": Stage("datasets", {}, "logs", logs),
        "planner": Stage("triplets.planner", of_logs, "planner", Statistics()),
        "collect (clicks)": Stage("triplets.collect", of_logs | reads("planner"), "click_triplets", clicks),
        "collect (BM25)": Stage("triplets.collect", reads("dataset", "planner"), "triplets", ranked),
        "pseudo_queries": Stage(
            "triplets.pseudo_queries", reads("dataset"), "pseudo_queries", PseudoQueriesConfig()
        ),
        "quantize": Stage(
            "quantize", reads("embeddings"), "semantic_ids", QuantizeConfig(levels=LEVELS, codes=CODES[0])
        ),
        "bm25": Stage("encode.lexical", reads("dataset"), "bm25_terms", BM25Config()),
        "index": Stage("index", towers | reads("semantic_ids"), "index", index),
        "mine": Stage("triplets.mine", towers | reads("triplets"), "mined", MineConfig()),
        "evaluate": Stage(
            "evaluate",
            towers | reads("index", "bm25_terms"),
            "report",
            EvaluateConfig(typos=0, tower_measures=False),
        ),
    }


STAGES = tuple(stages(Path(), 0))

if __name__ == "__main__":
    main()
