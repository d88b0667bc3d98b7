"""Query towers distilled from a published model without queries: kept quality, speed, seconds to distil.

    python -m benchmarks.front_door --json docs/results/front_door.json [--sets scifact ...] [--seeds N]

For each teacher (all-MiniLM-L6-v2 by default, or all-mpnet-base-v2), each set (a BEIR folder below
$SCALINGNOTE_DATA, or one of `benchmarks.public_sets`) and each seed, the published teacher encodes the
documents, pseudo-queries are drawn from them, and students learn only from those (configs/methods). Test
queries and judgements serve only for the measurement. Quality is nDCG@10 with linear gain (trec_eval's) over
all documents; "kept" is a student's over the teacher's.

- static (a table of tokens, with words and pairs of words: `table_kept_mean`), table (with rows for pairs of
  tokens and end tokens: `attention_or_terms_kept_mean`): the student's own ranking
- bm25s: that library with an English stemmer, and our stop words, k1 and b (`bm25_under_lucene_max`: the
  largest amount by which our nDCG@10 is lower on a set)
- escalated30: the table's best 100, in the teacher's order for the 30 % of the queries with most doubt
- hybrid: the mean of both scores, scaled to [0, 1] per query over the union of both best 1,000; the table
  with BM25 over the teacher with BM25
- cosine, overlap@10: of student and teacher on held-out texts, like the output of `distill`
- certificate_*: the estimate of `distill` from the overlap@10 (`agreement.expected_kept`): start and slope of
  a line through the sets, and its largest error on a set that the fit omits. Only here `--further-sets`
  count, with one seed
- table_speedup_b1: queries/s of one thread, one query at a time, over the teacher's in sentence-transformers

An interrupted run continues: every artifact is kept below --run-dir.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from benchmarks import minilm, mpnet, public_sets
from benchmarks.report import arguments, run_isolated, show, write
from scalingnote.core.bm25 import BM25
from scalingnote.core.config import load
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig
from scalingnote.search.query_path import doubt, escalation_threshold
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.train.distillation import agreement

Row = dict[str, Any]
TEACHERS = {"minilm": minilm.path, "mpnet": mpnet.path}
SETS = ("scifact", "nfcorpus", "feedbackqa")
STUDENTS = ("static", "table")
FILES = ("documents", "queries", "qrels")  # of a public set
MAX_DOCUMENTS = 5000  # of a public set
TEST_FRACTION = 0.5  # of its queries; no query trains
DEPTH = 1000  # documents of a ranking that are joined and measured
ESCALATED = 0.3  # share of the queries
ESCALATED_DEPTH = 100  # documents that the teacher orders again
SHARES = tuple(step / 10 for step in range(11))
HYBRID_WEIGHT = 0.5  # of the dense score
MEASURED_QUERIES = 400  # for speeds
NOT_COMPARED: Row = {"cosine": "", "overlap@10": ""}  # with a teacher
MIN_LINE_SETS = 4  # with fewer there is no line


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=SETS, help="BEIR folders, default: %(default)s")
    parser.add_argument("--further-sets", nargs="+", default=(), help="only for the certificate")
    parser.add_argument("--teachers", nargs="+", default=["minilm"], choices=TEACHERS)
    parser.add_argument("--students", nargs="+", default=STUDENTS, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--run-dir", default="runs/front_door", help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the file's rows of other sets")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw quality against speed")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="override a knob")
    options = parser.parse_args()
    previous = json.loads(options.json.read_text(encoding="utf-8")) if options.keep else {}
    rows, curves = (
        [row for row in previous.get(table, ()) if row["set"] not in options.sets]
        for table in ("rows", "escalation")
    )
    for teacher, name, seed in product(options.teachers, options.sets, range(options.seeds)):
        set_rows, points = measure(teacher, name, seed, options)
        rows += set_rows
        curves += points
        show(f"{teacher}, {name}, seed {seed}", set_rows)
    further: list[Row] = []
    for teacher, name in product(options.teachers, options.further_sets):
        further += measure(teacher, name, 0, options)[0]
        show(f"{teacher}, {name}", further)
    summary = summarise(rows)
    show("Means over sets and seeds", summary)
    metrics = metrics_of(summary, rows, curves) | certificate([*rows, *further])
    speeds = run_isolated(speed, *towers(options))
    show("Queries per second, one thread", speeds)
    by_name = {row["query side"]: row for row in speeds}
    if "table" in by_name:
        metrics["table_speedup_b1"] = round(by_name["table"]["batch 1"] / by_name["teacher"]["batch 1"], 1)
    print("\n" + ", ".join(f"{name} {value}" for name, value in metrics.items()))
    if options.plot:
        plot(summary, by_name, options.plot)
    write(
        options.json,
        metrics=metrics,
        summary=summary,
        rows=rows,
        further=further,
        escalation=curves,
        speeds=speeds,
    )


def config_of(teacher: str, name: str, student: str, seed: int, options: Any) -> RunConfig:
    """Return the config of one student's run: one of configs/methods with one set."""
    folder = Path(os.environ.get("SCALINGNOTE_DATA", "data")) / name
    dataset = f"{{name: beir, path: {folder}}}"
    if name in public_sets.SETS:
        own = public_sets.prepare(name)
        tables = ", ".join(f"{table}: {{path: {own}/{table}.jsonl}}" for table in FILES)
        sizes = f"max_documents: {MAX_DOCUMENTS}, test_fraction: {TEST_FRACTION}, click_model: null"
        dataset = f"{{name: columns, {tables}, {sizes}}}"
    knobs = [
        f"run_dir={options.run_dir}/{teacher}/{name}",
        f"dataset={dataset}",
        f"adopt.path={TEACHERS[teacher]()}",
        f"pseudo_queries.seed={seed}",
        f"distill.seed={seed}",
        "encode.dtype=float32",
        *(f"{stage}.resources={{workers: 1, cpus_per_worker: 2}}" for stage in ("encode", "teacher")),
    ]
    return load(RunConfig, [f"configs/methods/{student}.yaml"], [*knobs, *options.set])


@dataclass(frozen=True)
class Pool:
    """A test set: its documents, embedded by the teacher, its queries, and their judgements."""

    doc_ids: list[str]
    documents: Float[ndarray, "docs dim"]
    queries: list[str]
    gains: Float[ndarray, "queries docs"]
    bm25: Float[ndarray, "queries docs"]
    bm25s: Float[ndarray, "queries docs"]


def measure(of: str, name: str, seed: int, options: Any) -> tuple[list[Row], list[Row]]:
    """Measure the teacher `of`, BM25 and each student on one set and seed; return rows and escalations."""
    from scalingnote.encode.encoder import Encoder
    from scalingnote.encode.query_encoder import QueryEncoder

    rows: list[Row] = []
    curves: list[Row] = []
    pool: Pool | None = None
    for student in options.students:
        config = config_of(of, name, student, seed, options)
        built = pipeline.run(config, stages.select(config, until="encode"), record=False)
        if pool is None:
            pool = pool_of(built["dataset"], built["embeddings"])
            encoder = Encoder.load(built["dual_encoder"].directory("query"), precision="float32")
            teacher = arrow.l2_normalize(encoder.encode_queries(pool.queries)) @ pool.documents.T
            others = {"bm25": pool.bm25, "bm25s": pool.bm25s, "teacher": teacher}
            rows += [
                row(name, seed, side, pool, scores, 0.0) | NOT_COMPARED for side, scores in others.items()
            ]
        tower = QueryEncoder(built["student"].directory("query"), precision="float32")
        scores = arrow.l2_normalize(tower.encode_queries(pool.queries)) @ pool.documents.T
        kinds = ("pseudo_queries", "query_embeddings", "student")
        seconds = sum(built[kind].manifest.info["seconds"] for kind in kinds)
        compared = ("query_embeddings", "student", "dataset", "dual_encoder", "embeddings")
        measures = agreement.compare(**{kind: built[kind] for kind in compared}).measures()
        teacher_agreement = {name: round(measures[name], 4) for name in ("cosine", "overlap@10")}
        rows.append(row(name, seed, student, pool, scores, seconds) | teacher_agreement)
        if student == "table":
            curves = escalated(name, seed, pool, scores, teacher)
    for each in (*rows, *curves):
        each["teacher"] = of
    return with_shares(rows), curves


def with_shares(rows: Sequence[Row]) -> list[Row]:
    """Add to the rows of one set the kept shares of the teacher's nDCG@10, without and with BM25."""
    teacher = next(each for each in rows if each["method"] == "teacher")
    shares = {"kept": "nDCG@10", "hybrid kept": "+ BM25"}
    return [
        each | {name: round(each[measure] / teacher[measure], 4) for name, measure in shares.items()}
        for each in rows
    ]


def pool_of(dataset: Artifact, embeddings: Artifact) -> Pool:
    """Return the test queries of a dataset, over all encoded documents."""
    table = embeddings.table("embeddings", ["doc_id", INDEXED_VIEW])
    doc_ids = table["doc_id"].to_pylist()
    place = {doc_id: number for number, doc_id in enumerate(doc_ids)}
    texts_of = {
        row["query_id"]: row["query"]
        for row in dataset.table("queries").to_pylist()
        if row["split"] == "test"
    }
    judged = [row for row in dataset.table("qrels").to_pylist() if row["query_id"] in texts_of]
    relevant = sorted({row["query_id"] for row in judged if row["relevance"] > 0})
    number = {query_id: row for row, query_id in enumerate(relevant)}
    gains = np.zeros((len(relevant), len(doc_ids)), np.float32)
    for row in judged:
        if row["query_id"] in number and row["doc_id"] in place:
            gains[number[row["query_id"]], place[row["doc_id"]]] = max(row["relevance"], 0)
    texts = dataset.table("documents", ["doc_id", "title", "content"])
    by_id = {row["doc_id"]: f"{row['title']} {row['content']}" for row in texts.to_pylist()}
    corpus = [by_id[doc_id] for doc_id in doc_ids]
    queries = [texts_of[query_id] for query_id in relevant]
    lexical = BM25.build(corpus)
    bm25 = np.stack([lexical.scores(query) for query in queries])
    documents = arrow.l2_normalize(arrow.to_numpy(table[INDEXED_VIEW]))
    return Pool(doc_ids, documents, queries, gains, bm25, bm25s_scores(corpus, queries))


def bm25s_scores(corpus: Sequence[str], queries: Sequence[str]) -> Float[ndarray, "queries docs"]:
    """Compute the scores of bm25s with its word rules and an English stemmer."""
    import bm25s
    import Stemmer

    split = partial(
        bm25s.tokenize,
        stopwords="english_plus",
        stemmer=Stemmer.Stemmer("english"),
        return_ids=False,
        show_progress=False,
    )
    index = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
    index.index(split(corpus), show_progress=False)
    return np.stack([index.get_scores(words) for words in split(queries)])


def row(
    name: str, seed: int, method: str, pool: Pool, scores: Float[ndarray, "queries docs"], seconds: float
) -> Row:
    """Return the row of one method on one set."""
    ranking = ranked(scores)
    hybrid = float(ndcg(ranked(joined(scores, pool.bm25, HYBRID_WEIGHT)), pool.gains).mean())
    return {
        "set": name,
        "seed": seed,
        "method": method,
        "nDCG@10": round(float(ndcg(ranking, pool.gains).mean()), 4),
        "R@100": round(recall(ranking, pool.gains), 4),
        "+ BM25": round(hybrid, 4),
        "seconds": round(seconds, 1),
    }


def ranked(scores: Float[ndarray, "queries docs"]) -> Int[ndarray, "queries depth"]:
    """Return the best documents of each query; of equal scores, the first."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :DEPTH]


def ndcg(
    ranking: Int[ndarray, "queries depth"], gains: Float[ndarray, "queries docs"]
) -> Float[ndarray, " queries"]:
    """Compute nDCG@10 of each query, with trec_eval's linear gain."""
    discount = 1 / np.log2(np.arange(10) + 2)
    top_gains = np.take_along_axis(gains, ranking[:, :10], axis=1)
    ideal = -np.sort(-gains, axis=1)[:, :10]
    values: ndarray = (top_gains @ discount[: top_gains.shape[1]]) / (ideal @ discount[: ideal.shape[1]])
    return values


def recall(ranking: Int[ndarray, "queries depth"], gains: Float[ndarray, "queries docs"]) -> float:
    """Compute the mean R@100."""
    relevant = np.take_along_axis(gains, ranking[:, :100], axis=1) > 0
    return float((relevant.sum(1) / (gains > 0).sum(1)).mean())


def joined(
    dense: Float[ndarray, "queries docs"], lexical: Float[ndarray, "queries docs"], weight: float
) -> Float[ndarray, "queries docs"]:
    """Average scores, scaled to [0, 1] per query over the union of the best documents; others are last."""
    out = np.full(dense.shape, -1.0, np.float32)
    for number in range(len(dense)):
        best = [np.argpartition(-side[number], DEPTH - 1)[:DEPTH] for side in (dense, lexical)]
        candidates = np.union1d(best[0], best[1][lexical[number, best[1]] > 0])
        sides = [_unit_range(side[number, candidates]) for side in (dense, lexical)]
        out[number, candidates] = weight * sides[0] + (1 - weight) * sides[1]
    return out


def _unit_range(scores: Float[ndarray, " docs"]) -> Float[ndarray, " docs"]:
    spread = float(np.ptp(scores))
    return (scores - scores.min()) / spread if spread > 0 else np.zeros_like(scores)


def escalated(
    name: str,
    seed: int,
    pool: Pool,
    student: Float[ndarray, "queries docs"],
    teacher: Float[ndarray, "queries docs"],
) -> list[Row]:
    """Return nDCG@10 by the share of queries with best documents that the teacher orders again."""
    best = ranked(student)[:, :ESCALATED_DEPTH]
    order = np.argsort(-np.take_along_axis(teacher, best, axis=1), axis=1, kind="stable")
    doubts = doubt(np.take_along_axis(student, best, axis=1))
    before, after = ndcg(best, pool.gains), ndcg(np.take_along_axis(best, order, axis=1), pool.gains)
    teacher_ndcg = float(ndcg(ranked(teacher), pool.gains).mean())
    rows = []
    for share in SHARES:
        chosen = doubts > escalation_threshold(doubts, share)
        value = float(np.where(chosen, after, before).mean())
        row = {"set": name, "seed": seed, "share": share, "escalated": round(float(chosen.mean()), 4)}
        rows.append(row | {"nDCG@10": round(value, 4), "kept": round(value / teacher_ndcg, 4)})
    return rows


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Return means of each teacher and method over sets and seeds."""
    out = []
    for teacher, method in dict.fromkeys((row["teacher"], row["method"]) for row in rows):
        method_rows = [row for row in rows if (row["teacher"], row["method"]) == (teacher, method)]
        numbers = ("nDCG@10", "R@100", "kept", "+ BM25", "hybrid kept", "seconds")
        means = {number: round(statistics.mean(row[number] for row in method_rows), 4) for number in numbers}
        seeds = len({row["seed"] for row in method_rows})
        by_set = {
            f"kept, {name}": round(
                statistics.mean(row["kept"] for row in method_rows if row["set"] == name), 4
            )
            for name in dict.fromkeys(row["set"] for row in method_rows)
        }
        out.append({"teacher": teacher, "method": method, "seeds": seeds, **means, **by_set})
    return out


def metrics_of(summary: Sequence[Row], rows: Sequence[Row], curves: Sequence[Row]) -> dict[str, float]:
    """Return the metrics."""
    metrics: dict[str, float] = {}
    for teacher in dict.fromkeys(row["teacher"] for row in summary):
        by_method = {row["method"]: row for row in summary if row["teacher"] == teacher}
        points = [point for point in curves if point["teacher"] == teacher]
        before = "" if teacher == "minilm" else f"{teacher}_"
        metrics |= {f"{before}{name}": value for name, value in _kept(by_method, points).items()}
    behind = [
        theirs["nDCG@10"] - ours["nDCG@10"]
        for ours, theirs in pairwise(rows)
        if (ours["method"], theirs["method"]) == ("bm25", "bm25s")
    ]
    return metrics | {"bm25_under_lucene_max": round(max(behind), 4)}


def _kept(of: Mapping[str, Row], curves: Sequence[Row]) -> dict[str, float]:
    """Return the shares that the students of one teacher keep."""
    kept = {"table_kept_mean": "static", "attention_or_terms_kept_mean": "table"}
    metrics: dict[str, float] = {name: of[student]["kept"] for name, student in kept.items() if student in of}
    if "table" in of:
        metrics["hybrid_kept_mean"] = of["table"]["hybrid kept"]
        for share, name in ((ESCALATED, "escalated30_kept_mean"), (1.0, "escalated100_kept_mean")):
            chosen = [point["kept"] for point in curves if point["share"] == share]
            metrics[name] = round(statistics.mean(chosen), 4)
    return metrics


def certificate(rows: Sequence[Row]) -> dict[str, float]:
    """Fit the line from overlap@10 to the kept share, through the mean of each set's tables.

    `error_max` is the largest error on a set, by the line through all others.
    """
    tables = [each for each in rows if each["method"] in STUDENTS]
    names = [*dict.fromkeys(each["set"] for each in tables)]
    if len(names) < MIN_LINE_SETS:
        return {}
    columns = ("overlap@10", "kept")
    points = np.array(
        [[statistics.mean(t[c] for t in tables if t["set"] == name) for c in columns] for name in names]
    )
    errors = []
    for left_out in range(len(names)):
        slope, start = _line(np.delete(points, left_out, axis=0))
        overlap, kept = points[left_out]
        errors.append(abs(start + slope * overlap - kept))
    slope, start = _line(points)
    figures = {"start": start, "per_overlap": slope, "error_max": max(errors)}
    figures |= {"overlap_min": points[:, 0].min(), "overlap_max": points[:, 0].max(), "sets": len(names)}
    return {f"certificate_{name}": round(float(value), 4) for name, value in figures.items()}


def _line(points: Float[ndarray, "sets xy"]) -> tuple[float, float]:
    slope, start = np.polyfit(points[:, 0], points[:, 1], 1).tolist()
    return slope, start


def towers(options: Any) -> tuple[dict[str, str], str, list[str]]:
    """Return folders of the first teacher's students on the first set, its path, and queries to encode."""
    teacher, name = options.teachers[0], options.sets[0]
    folders = {}
    for student in options.students:
        config = config_of(teacher, name, student, 0, options)
        folders[student] = str(pipeline.locate(config, "student").directory("query"))
    queries = pipeline.locate(config, "dataset").table("queries", ["query", "split"]).to_pylist()
    texts = [row["query"] for row in queries if row["split"] == "test"][:MEASURED_QUERIES]
    return folders, str(TEACHERS[teacher]()), texts


def speed(folders: Mapping[str, str], teacher: str, queries: Sequence[str]) -> list[Row]:
    """Measure queries per second of one thread: in the first pass over all queries, and the later median."""
    import torch
    from sentence_transformers import SentenceTransformer

    from scalingnote.encode.query_encoder import QueryEncoder

    torch.set_num_threads(1)
    model = SentenceTransformer(teacher, device="cpu")
    sides: dict[str, Callable[[list[str]], Any]] = {
        "teacher": lambda texts: model.encode(texts, batch_size=64, show_progress_bar=False)
    }
    for name, folder in folders.items():
        sides[name] = QueryEncoder(Path(folder), threads=1).encode_queries
    rows = []
    for name, encode in sides.items():
        rates = {"new words": _rate(encode, queries, 1, passes=1)}  # a table caches the tokens of words
        rates |= {f"batch {size}": _rate(encode, queries, size) for size in (1, 64)}
        rows.append({"query side": name} | {column: round(rate, 1) for column, rate in rates.items()})
    return rows


def _rate(encode: Callable[[list[str]], Any], queries: Sequence[str], size: int, *, passes: int = 6) -> float:
    batches = [list(queries[start : start + size]) for start in range(0, len(queries), size)]
    rates = []
    for _ in range(passes):
        start = time.perf_counter()
        for batch in batches:
            encode(batch)
        rates.append(len(queries) / (time.perf_counter() - start))
    return statistics.median(rates[1:] or rates)


def plot(summary: Sequence[Row], speeds: Mapping[str, Row], path: Path) -> None:
    """Draw mean nDCG@10 against queries per second of a thread, without and with BM25."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind, marker in (("nDCG@10", "o"), ("+ BM25", "s")):
        rows = [each for each in summary if each["method"] in speeds]
        rates = [speeds[each["method"]]["batch 1"] for each in rows]
        label = "embeddings only" if kind == "nDCG@10" else "with BM25"
        axes.scatter(rates, [each[kind] for each in rows], marker=marker, label=label)
        for each, rate in zip(rows, rates, strict=True):
            side, offset = ("left", 6) if rate == max(rates) else ("right", -6)  # tables are near each other
            at, by = (rate, each[kind]), (offset, 4)
            axes.annotate(each["method"], at, xytext=by, textcoords="offset points", ha=side)
    lexical = next(each for each in summary if each["method"] == "bm25")
    axes.axhline(lexical["nDCG@10"], color="gray", linestyle="--", label="BM25 only")
    axes.set(xscale="log", xlabel="queries encoded per second, one thread, one at a time", ylabel="nDCG@10")
    axes.margins(x=0.25, y=0.15)
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
