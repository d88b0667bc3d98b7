"""Quality against cost of every query side: which one to choose.

    python -m benchmarks.distillation --json docs/results/distillation.json

Every method is run to its report on a dataset's quickstart sizes, for several seeds of training and
distillation, on towers from scratch and (encoders only) on MiniLM; methods that share stage I share its
artifact. Quality: means over seeds, with a
two-sided paired t-test of success@50 per query against the teacher's. Cost: queries per second of one thread,
one query at a time, string in and embedding out, in the fastest form of the folder that was saved.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from numpy import ndarray

from benchmarks import minilm, teacher
from benchmarks.report import alone, arguments, show, write
from scalingnote import pipeline
from scalingnote.config import load
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate.retrieval import measure
from scalingnote.evaluate.significance import paired_t_test
from scalingnote.evaluate.test_set import load_test_set
from scalingnote.log import configure
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

METHODS = (
    *("scalingdual", "scalingnote-1l", "scalingnote-2l", "scalingnote-4l", "scalingdoc", "twinbert"),
    *("embeddistill-one-hot", "embeddistill-scores", "embeddistill-inherit", "embeddistill-matching"),
    *("embeddistill-only-matching", "embeddistill-symmetric-matching"),
    *("lightretriever-dense", "lightretriever-sparse", "lightretriever"),
    *("lookup-qkd", "lookup-qkd-convolution", "lookup-qkd-ngrams", "lookup-qkd-hybrid"),
)
TEACHER = "scalingdual"
CUTOFFS = (1, 10, 50, 100)
SHOWN = (*(f"R@{k}" for k in CUTOFFS), "nDCG@10")
LIGHT = ("lightretriever", "lightretriever-dense")  # its baseline is read by the whole model
CAUSAL = "lightretriever"  # reads single tokens behind an instruction, as decoders do
SPEED_SECONDS = 1.0
PLOT = Path("docs/results/distillation.png")


@dataclass
class Row:
    """What one method gave over all seeds."""

    measures: list[dict[str, float]]
    success: list[Float[ndarray, " queries"]]  # per seed: whether a relevant document is in the first 50
    speed: float | None

    def mean(self, name: str) -> float:
        """Mean over seeds."""
        return float(np.mean([found[name] for found in self.measures]))

    def spread(self, name: str) -> float:
        """Standard deviation over seeds."""
        values = [found[name] for found in self.measures]
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def main() -> None:
    """Parse arguments, run, print, write and plot."""
    parser = arguments(__doc__)
    parser.add_argument("--datasets", nargs="+", default=["medquad", "python_docs"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument(
        "--backbones", nargs="+", choices=("scratch", "minilm"), default=["scratch", "minilm"]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    parser.add_argument("--plot", type=Path, default=PLOT)
    options = parser.parse_args()
    configure()
    tables: dict[str, list[dict[str, Any]]] = {}
    found: dict[str, dict[str, Row]] = {}
    for dataset, backbone in product(options.datasets, options.backbones):
        title = f"{dataset}, {backbone}"
        found[title] = {}
        for method in options.methods:
            if backbone == "minilm" and method.startswith(CAUSAL):
                continue
            rows = run(dataset, backbone, method, seeds=options.seeds, overrides=options.overrides)
            for name, row in rows.items():
                found[title].setdefault(name, row)
            tables[title] = table(found[title])
            write(options.json, metrics=metrics(found), tables=tables)  # hours of work: kept as it comes
        show(f"{title}, {options.seeds} seeds", tables[title])
    stored = alone(teacher.run, teacher.parser().parse_args([]))["metrics"]
    write(options.json, metrics=metrics(found) | stored, tables=tables)
    plot(found, options.plot)


def run(dataset: str, backbone: str, method: str, *, seeds: int, overrides: Sequence[str]) -> dict[str, Row]:
    """Name in the report -> row: a method may report several query sides (dense, sparse, hybrid)."""
    rows: dict[str, Row] = {}
    for seed in range(seeds):
        files = [f"configs/quickstart/{dataset}.yaml", f"configs/methods/{method}.yaml"]
        plain = load(pipeline.RunConfig, files, overrides)
        # Short runs in this process: half of their time would be the start of Ray's workers.
        knobs = [f"train.seed={seed}", "train.resources.workers=0"]
        if plain.distill is not None:
            knobs += [f"distill.seed={seed}", "distill.resources.workers=0"]
        if backbone == "minilm":
            knobs += minilm.overrides(plain)
        config = load(pipeline.RunConfig, files, [*knobs, *overrides])
        built = pipeline.run(config, record=False)
        qrels = trec.read_qrels(built["report"].file("qrels.trec"))
        names = config.evaluate.names
        for name in built["report"].read_json("report.json")["methods"]:
            if name.endswith("(index)"):
                continue
            tag = name.replace(")", "").replace(" (", "-").replace(" ", "-")
            rankings = {
                query: [doc for doc, _ in results]
                for query, results in trec.read_run(built["report"].file(f"runs/{tag}.trec")).items()
            }
            row = rows.setdefault(name, Row([], [], None))
            row.measures.append(measure(rankings, qrels, recall_at=CUTOFFS, mrr_at=10, ndcg_at=10))
            row.success.append(np.array([answered(rankings.get(q, []), qrels[q]) for q in sorted(qrels)]))
            tower = built.get("student") if name.startswith(names.student) else built.get("dual_encoder")
            if row.speed is None and tower is not None and name != "bm25":
                row.speed = alone(
                    speed, name, tower, built["dual_encoder"], load_test_set(built["dataset"]).queries
                )
    return rows


def answered(ranking: Sequence[str], judged: Mapping[str, int], *, depth: int = 50) -> float:
    """1 when a relevant document is among the first."""
    return float(any(judged.get(doc, 0) > 0 for doc in ranking[:depth]))


def speed(name: str, tower: Artifact, dual_encoder: Artifact, queries: Sequence[str]) -> float:
    """Queries per second of one thread; to be called in a process of its own.

    Tokens are counted as the document tower of `dual_encoder` wants them.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    ways: list[Callable[[list[str]], Any]] = []
    if not name.endswith("(sparse)"):
        ways.append(QueryEncoder.load(tower.directory("query"), threads=1).encode_queries)
    if name.endswith(("(sparse)", "(hybrid)")):
        ways.append(SparseQuery.load(dual_encoder.directory("sparse_query")).encode)
    for query in queries[:20]:
        for way in ways:
            way([query])
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SPEED_SECONDS:
        for way in ways:
            way([queries[count % len(queries)]])
        count += 1
    return count / (time.perf_counter() - start)


def table(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Rows as they are shown, the best R@50 first."""
    best = rows.get(TEACHER)
    shown = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1].mean("R@50")):
        line: dict[str, Any] = {
            "query side": name,
            "queries/s": "-" if row.speed is None else round(row.speed),
        }
        line |= {m: f"{row.mean(m):.3f} ± {row.spread(m):.3f}" for m in SHOWN}
        line["of the teacher's R@50"] = f"{row.mean('R@50') / best.mean('R@50'):.1%}" if best else "-"
        line["p"] = f"{p_value(row, best):.3f}" if best and row is not best else "-"
        shown.append(line)
    return shown


def p_value(row: Row, best: Row) -> float:
    """Two-sided paired t-test over queries, of success@50 averaged over seeds."""
    differences = np.mean(row.success, axis=0) - np.mean(best.success, axis=0)
    return float(paired_t_test(differences[:, None])[0])


def metrics(found: Mapping[str, Mapping[str, Row]]) -> dict[str, float]:
    """The best student and the best lookup-class query side as shares of the teacher's R@50, at worst."""
    best: dict[str, list[float]] = {"scalingnote": [], "lookup_best": []}
    for rows in found.values():
        if TEACHER not in rows:
            continue
        upper = rows[TEACHER].mean("R@50")
        notes = [row.mean("R@50") for name, row in rows.items() if name.startswith("scalingnote")]
        light = [row.mean("R@50") for name, row in rows.items() if is_light(name)]
        for name, values in (("scalingnote", notes), ("lookup_best", light)):
            if values:
                best[name].append(max(values) / upper)
    return {f"{name}_over_scalingdual_R50": round(min(values), 4) for name, values in best.items() if values}


def is_light(name: str) -> bool:
    """Whether a query of this row is looked up, or counted: no model runs."""
    tower, _, what = name.partition(" ")
    return tower.startswith("lookup") or tower in LIGHT or what == "(sparse)"


def plot(found: Mapping[str, Mapping[str, Row]], path: Path) -> None:
    """One panel per dataset: R@50 over queries per second."""
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(6.2 * len(found), 4.6), layout="constrained")
        for axes, (dataset, rows) in zip(
            figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
        ):
            for name, row in rows.items():
                if row.speed is None:
                    axes.axhline(row.mean("R@50"), color="#8a8f98", linewidth=1, linestyle=":")
                    axes.annotate(
                        name, (0.01, row.mean("R@50")), xycoords=("axes fraction", "data"), va="bottom"
                    )
                    continue
                axes.errorbar(row.speed, row.mean("R@50"), yerr=row.spread("R@50"), fmt="o", color="#0f8b8d")
                axes.annotate(name, (row.speed, row.mean("R@50")), xytext=(5, 3), textcoords="offset points")
            axes.set_xscale("log")
            axes.set_xlabel("queries per second, one thread, one at a time")
            axes.set_ylabel("R@50")
            axes.set_title(dataset)
            axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
