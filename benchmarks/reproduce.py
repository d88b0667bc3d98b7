"""Tests of the claims of three papers, with small pretrained models on public data.

    python -m benchmarks.reproduce --json docs/results/reproduce.json --trials docs/results/trials.jsonl

A decoder is SmolLM2-135M's first layers (benchmarks/smollm.py), pooled at its end token like in the papers;
all layers for orders that four layers cannot show (smollm-30). An encoder is all-MiniLM-L6-v2
(benchmarks/minilm.py). BM25, the models before training, and hybrids with BM25 are in every table. An order
of two methods counts if nDCG@10 differs by a paired two-sided t-test over queries, p < 0.05 after Holm's
correction for all orders. Finished trials are not repeated (benchmarks/trials.py): after an interruption,
start this again. benchmarks/decoders.py measures whether a decoder learns at all, and whether
LightRetriever's hybrid of all 30 layers is below its halves; its results are included here.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import minilm, smollm
from benchmarks.distillation import LIGHTRETRIEVER, Row
from benchmarks.report import show, write
from benchmarks.trial import Outcome, Side, Trial, unchanged
from benchmarks.trials import require, run_given, trial_machines, trial_parser
from scalingnote.core.log import configure
from scalingnote.evaluate.measures import holm, paired_t_test
from scalingnote.evaluate.test_set import load_test_set
from scalingnote.run import pipeline, stages
from scalingnote.train import prepare, tokens

NDCG, SIGNIFICANT = "nDCG@10", 0.05
LEARNED = ("decoder_r10", "lightretriever_dense_r10", "whole_decoders", "hybrid_not_below_halves")
SEEDS = {"medquad": 3, "feedbackqa": 3, "scifact": 1, "stackexchange_devops": 1}
STEPS = {"smollm": 150, "minilm-native": 60, "smollm-30": 200, "smollm-gpu": 512}
SHORT = {"smollm": "SmolLM2", "smollm-30": "SmolLM2, 30 layers", "minilm-native": "MiniLM"}
DEEP = "smollm-30"
ON_GPU = "-gpu"  # all layers, complete corpora, longer texts, batches of 64
HALF_OF_THEIR_DOCUMENTS = dict.fromkeys(("medquad", "stackexchange_devops"), ("dataset.max_documents=3000",))
LIGHT = "ablations/lightretriever-"
LADDER = ("embeddistill-one-hot", "embeddistill-scores", "embeddistill-inherit", "embeddistill-matching")
CE = ("embeddistill-ce-scores", "embeddistill-ce-matching")
CE_KNOBS = ("cross_encoder.in_batch=1", "cross_encoder.global_batch=16")
DECODERS = (
    ("methods/scalingdual", True),
    ("methods/scalingnote-2l", True),
    (f"methods/{LIGHTRETRIEVER}", True),
    ("methods/scalingdoc", True),
    ("methods/twinbert", True),
    ("methods/scalingdual", False),
    (f"methods/{LIGHTRETRIEVER}", False),
    (f"methods/{LIGHTRETRIEVER}-dense", True),
    (f"{LIGHT}without-kl", True),
    (f"{LIGHT}light-both", True),
    (f"{LIGHT}light-documents", True),
    (f"{LIGHT}without-instruction", True),
    (f"{LIGHT}embedding-layer", True),
)
# LightRetriever's Table 4: with four layers, means of single tokens are as good as uncut texts.
NEEDS_DEPTH = (f"methods/{LIGHTRETRIEVER}-dense", f"{LIGHT}light-both", f"{LIGHT}light-documents")
# By dataset, backbone and method: half the rival's steps save half an hour of a core, and do not favour it.
FEWER_STEPS = {("stackexchange_devops", DEEP, NEEDS_DEPTH[0]): 100}
# By backbone, the most important first: files of configs/, and whether they are trained.
METHODS: Mapping[str, Sequence[tuple[str, bool]]] = {
    "smollm": DECODERS,
    "minilm-native": (("methods/native", False), *((f"methods/{name}", True) for name in (*LADDER, *CE))),
    DEEP: [(method, True) for method in NEEDS_DEPTH],
    f"smollm{ON_GPU}": DECODERS,
}
Found = Mapping[str, Mapping[str, Row]]  # by dataset: label of a query side -> its results
Rows = list[dict[str, Any]]


class Order(NamedTuple):
    """The order of two query sides in a paper, by their labels, with its table and its figures."""

    paper: str
    better: str
    worse: str
    figures: str


def _smollm(paper: str, better: str, worse: str, figures: str) -> Order:
    return Order(paper, f"{better}, SmolLM2", f"{worse}, SmolLM2", figures)


LR = LIGHTRETRIEVER
DENSE = f"{LR}-dense"
# EmbedDistill, Table 1: R@20 of students of 67.5M on NQ; Table 5: nDCG@10 on MS MARCO.
RUNGS = ("59.7", "81.6", "83.9", "86.5")
ORDERS = (
    _smollm("ScalingNote, Table 4", "scalingdual", "scalingdoc", "R@50 55.15, 47.19"),
    _smollm("ScalingNote, Table 4", "scalingnote-2l", "scalingdoc", "R@50 54.57, 47.19"),
    _smollm("ScalingNote, Table 4", "scalingdoc", "twinbert", "R@50 47.19, 38.64"),
    _smollm("LightRetriever, Table 2", f"{LR} (hybrid)", LR, "nDCG@10 54.4, 52.0"),
    _smollm("LightRetriever, Table 2", f"{LR} (hybrid)", f"{LR} (sparse)", "nDCG@10 54.4, 49.5"),
    _smollm("LightRetriever, Table 3", LR, f"{LR}-without-kl", "nDCG@10 52.0, 50.8"),
    _smollm("LightRetriever, Table 4", DENSE, f"{LR}-light-both", "nDCG@10 48.7, 34.9"),
    _smollm("LightRetriever, Table 4", DENSE, f"{LR}-light-documents", "nDCG@10 48.7, 8.7"),
    _smollm("LightRetriever, Table 4", DENSE, f"{LR}-without-instruction", "nDCG@10 48.7, 47.1"),
    _smollm("LightRetriever, Table 4", DENSE, f"{LR}-embedding-layer", "nDCG@10 48.7, 37.5"),
    *(
        Order("EmbedDistill, Table 1", f"{better}, MiniLM", f"{worse}, MiniLM", f"R@20 {high}, {low}")
        for (worse, low), (better, high) in pairwise(zip(LADDER, RUNGS, strict=True))
    ),
    Order("EmbedDistill, Table 5", f"{CE[0]}, MiniLM", f"{LADDER[0]}, MiniLM", "nDCG@10 38.7, 32.2"),
    Order("EmbedDistill, Table 5", f"{CE[1]}, MiniLM", f"{LADDER[0]}, MiniLM", "nDCG@10 41.7, 32.2"),
)


def main() -> None:
    """Parse arguments, run missing trials, print and write."""
    parser = trial_parser(__doc__, datasets=list(SEEDS))
    on_cpus = [name for name in METHODS if not name.endswith(ON_GPU)]
    parser.add_argument("--backbones", nargs="+", choices=list(METHODS), default=on_cpus)
    results = Path("docs/results/decoders.json")
    parser.add_argument("--decoders", type=Path, default=results, help="results of benchmarks.decoders")
    options = parser.parse_args()
    configure()
    all_trials = trials(options.datasets, options.backbones, options)
    outcomes = run_given(all_trials, options)
    sides_by_data = by_dataset(outcomes)
    tables = {f"quality, {dataset}": quality(sides) for dataset, sides in sides_by_data.items()}
    tables |= {"orders": orders(sides_by_data), "before training": untrained(sides_by_data)}
    tables = {title: rows for title, rows in tables.items() if rows}
    for title, rows in tables.items():
        show(title, rows)
    all_metrics = metrics(sides_by_data) | learned(options.decoders)
    if "feedbackqa" in options.datasets:
        all_metrics["first_token_overlap"] = first_token_overlap("feedbackqa", run_dir=options.run_dir)
    machine = trial_machines(outcomes)
    write(options.json, metrics=all_metrics, machine=machine, settings=settings(), tables=tables)
    require(all_trials, outcomes, options)


def settings() -> dict[str, Any]:
    """Return the settings of the trials, for the page."""
    decoder = {"layers": smollm.LAYERS, "of": smollm.ALL_LAYERS, "millions": 135, "steps": STEPS["smollm"]}
    deep = {"layers": smollm.ALL_LAYERS, "steps": STEPS[DEEP], "fewer": [*FEWER_STEPS.values()]}
    encoder = {"layers": minilm.SMALL_LAYERS, "steps": STEPS["minilm-native"]}
    sizes = minilm.CPU._asdict() | {"cores": 2, "p": SIGNIFICANT, "negatives": 1}
    return {"decoder": decoder, "deep decoder": deep, "encoder": encoder, "sizes": sizes}


# --- trials ------------------------------------------------------------------------------------------------


def trials(datasets: Sequence[str], backbones: Sequence[str], options: Any) -> list[Trial]:
    """Return the trials, the most important first: every method with the first seed, then the second seed."""
    return [
        trial(dataset, backbone, method, seed, trained=trained, options=options)
        for seed in range(options.seeds)
        for backbone in backbones
        for method, trained in METHODS[backbone]
        for dataset in datasets
        if seed < SEEDS.get(dataset, options.seeds) and (trained or not seed)
    ]


def trial(dataset: str, backbone: str, method: str, seed: int, *, trained: bool, options: Any) -> Trial:
    """Return the trial of a method on a dataset, with BM25 and the hybrid of LightRetriever's authors."""
    trial_knobs = (
        "bm25={}",
        *(() if backbone.endswith(ON_GPU) else HALF_OF_THEIR_DOCUMENTS.get(dataset, ())),
    )
    trial_knobs += CE_KNOBS if method.removeprefix("methods/") in CE else ()
    # A decoder's student has a separate projection, which starts at random.
    trial_knobs += ("distill.global_batch=64", f"distill.epochs={10 if backbone.startswith('smollm') else 3}")
    if LIGHTRETRIEVER in method:
        trial_knobs += ("evaluate.hybrid.dense_weight=0.7", "evaluate.hybrid.raw=false")
    usual = FEWER_STEPS.get((dataset, backbone, method), STEPS[backbone])
    steps = (options.steps or usual) if trained else 0
    return Trial(dataset, backbone, method, seed, steps, (*trial_knobs, *options.overrides))


def by_dataset(outcomes: Iterable[Outcome]) -> Found:
    """Return every query side's results by its label, from the first trial that reports the side."""
    by_seed: dict[str, dict[str, dict[int, Side]]] = {}
    for outcome in outcomes:
        one = outcome.trial
        for name, side in outcome.sides.items():
            data = f"{one.dataset}, GPU" if one.backbone.endswith(ON_GPU) else one.dataset
            seeds = by_seed.setdefault(data, {}).setdefault(label(one, name), {})
            seeds.setdefault(one.seed, side)
    return {data: {name: Row(seeds) for name, seeds in sides.items()} for data, sides in by_seed.items()}


def label(one: Trial, side: str) -> str:
    """Return the label of a query side of a trial: `scalingdual, SmolLM2, untrained`."""
    if side == "bm25":
        return side
    name, plus, _ = side.partition(" + bm25")
    before = ", untrained" if one.steps == 0 and one.method != "methods/native" else ""
    return f"{name}, {SHORT[one.backbone.removesuffix(ON_GPU)]}{before}{plus}"


# --- tables ------------------------------------------------------------------------------------------------


def quality(sides: Mapping[str, Row]) -> Rows:
    """Return a row for each query side, the best nDCG@10 first; of hybrids with BM25 only nDCG@10."""
    rows = []
    plain = [name for name in sides if not name.endswith(" + bm25")]
    for name in sorted(plain, key=lambda name: -sides[name].mean(NDCG)):
        row, joined = sides[name], sides.get(f"{name} + bm25")
        line: dict[str, Any] = {"query side": name, "seeds": len(row.sides)}
        line |= {measure: row.shown(measure) for measure in (NDCG, "R@10", "R@100")}
        line["+ BM25, nDCG@10"] = "-" if joined is None else joined.shown(NDCG)
        line["queries/s"] = "-" if row.speed is None else round(row.speed)
        rows.append(line)
    return rows


def orders(found: Found) -> Rows:
    """Compare the papers' orders by nDCG@10; p after Holm's correction for the complete table."""
    pairs = [
        (dataset, order, sides[order.better], sides[order.worse])
        for dataset, sides in found.items()
        for order in (_deepest(order, sides) for order in ORDERS)
        if _compared(order, sides)
    ]
    p = holm({str(at): p_value(better, worse) for at, (*_, better, worse) in enumerate(pairs)})
    rows = []
    for at, (dataset, order, *row_pair) in enumerate(pairs):
        better, worse = row_pair[0].with_common_seeds(row_pair[1])  # of their common seeds
        clear, gap = p[str(at)] < SIGNIFICANT, better.mean(NDCG) - worse.mean(NDCG)
        rows.append(
            {"paper": order.paper, "its figures": order.figures, "data": dataset}
            | {"said to be better": method_of(order.better), "than": method_of(order.worse)}
            | {"nDCG@10": f"{better.mean(NDCG):.3f}", "of the other": f"{worse.mean(NDCG):.3f}"}
            | {
                "p": f"{p[str(at)]:.2g}",
                "holds": ("yes" if gap > 0 else "reversed") if clear else "not significant",
            }
        )
    return rows


def _compared(order: Order, sides: Mapping[str, Row]) -> bool:
    """Return whether both query sides exist, with a common seed."""
    seed_sets = [sides[name].sides.keys() for name in (order.better, order.worse) if name in sides]
    return len(seed_sets) == 2 and bool(seed_sets[0] & seed_sets[1])


def _deepest(order: Order, sides: Mapping[str, Row]) -> Order:
    """Return the order of the same methods with all layers, if both were trained so; else the same order."""
    better, worse = (name.replace(SHORT["smollm"], SHORT[DEEP]) for name in (order.better, order.worse))
    deep = order._replace(better=better, worse=worse)
    return deep if _compared(deep, sides) else order


def method_of(label: str) -> str:
    """Return the method of a query side, without the model's name: `x`, or `x, 30 layers`."""
    method, _, model = label.partition(", ")
    return ", ".join([method, *model.split(", ")[1:]])


def p_value(row: Row, other: Row) -> float:
    """Compute p of a two-sided paired t-test over queries, of nDCG@10 averaged over common seeds, or NaN."""
    mine, theirs = row.with_common_seeds(other)
    if not mine.sides:
        return math.nan
    first, second = (
        np.mean([side.gains for side in each.sides.values() if side.gains is not None], axis=0)
        for each in (mine, theirs)
    )
    return float(paired_t_test((first - second)[:, None])[0])


def untrained(found: Found) -> Rows:
    """Return every trained side and its models before training."""
    rows = []
    for dataset, sides in found.items():
        for name, row in sides.items():
            before = sides.get(f"{name}, untrained")
            if before is not None:
                gap = row.mean(NDCG) - before.mean(NDCG)
                numbers = {"before": f"{before.mean(NDCG):.3f}", "after": f"{row.mean(NDCG):.3f}"}
                gains = {"gain": f"{gap:+.3f}", "p": f"{p_value(row, before):.2g}"}
                rows.append({"data": dataset, "query side": name} | numbers | gains)
    return rows


# --- metrics -----------------------------------------------------------------------------------------------


def metrics(found: Found) -> dict[str, float]:
    """Return the share of significant orders that hold, and the smallest gain of training."""
    values: dict[str, float] = {}
    verdicts = [row["holds"] for row in orders(found)]
    significant = [verdict for verdict in verdicts if verdict != "not significant"]
    if verdicts:
        values |= {"orders_compared": len(verdicts), "orders_significant": len(significant)}
    if significant:
        values["order_kept_share"] = round(significant.count("yes") / len(significant), 3)
    if rows := untrained(found):
        values["untrained_gap"] = min(float(row["gain"]) for row in rows)
    return values


def learned(results: Path) -> dict[str, float]:
    """Return the results of benchmarks.decoders: recalls on a pool of answers, and hybrids of all layers."""
    if not results.exists():
        raise SystemExit(f"{results} does not exist: run python -m benchmarks.decoders --json {results}")
    decoder_metrics: dict[str, float] = json.loads(results.read_text(encoding="utf-8"))["metrics"]
    return {name: decoder_metrics[name] for name in LEARNED if name in decoder_metrics}


def first_token_overlap(dataset: str, *, run_dir: str) -> float:
    """Compute the share of test queries with their first term in an answer (LightRetriever, sparse half)."""
    plain = unchanged(dataset, f"methods/{LIGHTRETRIEVER}")
    config = unchanged(dataset, f"methods/{LIGHTRETRIEVER}", [f"run_dir={run_dir}", *smollm.overrides(plain)])
    artifacts = pipeline.run(config, stages.select(config, until="prepare"), record=False)
    test = load_test_set(artifacts["dataset"])
    table = artifacts["dataset"].table("documents", ["doc_id", "title", "content"])
    texts = {row["doc_id"]: f"{row['title']} {row['content']}" for row in table.to_pylist()}
    prompt = tokens.build_prompt(config.train.document, role="document", tokenizer_json=None, sparse=True)
    query = prepare.sparse_query(config.train, prompt.tokenizer)
    assert query is not None
    overlaps = []
    for query_id, text in zip(test.query_ids, test.queries, strict=True):
        terms = query.tokens([text])[0]
        answers = [texts[doc] for doc, grade in test.qrels[query_id].items() if grade > 0]
        answer_terms = {term for answer in answers for term in prompt.tokenizer.encode(answer).ids}
        overlaps.append(bool(len(terms)) and int(terms[0]) in answer_terms)
    return round(float(np.mean(overlaps)), 3)


if __name__ == "__main__":
    main()
