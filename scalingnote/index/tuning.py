"""Tuning: the cheapest nprobe and refine_factor that reach a recall, and the best weight of dense scores.

Different towers encode queries and documents, which therefore have different distributions. So recall is
measured on real queries against their exact answers, never on perturbed documents.

    each sampled shard, opened once ─► for each nprobe, candidates by codes and their scores by kept vectors
    these shards together ─► the best refine_factor * k by codes ─► the best k of these ─► recall

A searcher of these shards does the same; searchers of one shard each have at least this recall. Exact answers
come from the same shards: the k best of a part of the corpus are harder to find than those of the entire
corpus, so the recall on the entire corpus is probably higher. One task opens shard after shard; the driver
receives only settings and their recall.

The cost of a setting is counted and not timed, so that the same inputs give the same index. It is the number
of scanned codes, plus `RESCORE_COST` for each rescored vector.
"""

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core import cluster, topk
from scalingnote.core.log import get_logger
from scalingnote.core.parts import in_order
from scalingnote.index import families, hybrid, ivf, postings, shard
from scalingnote.index.config import IndexConfig, Refine
from scalingnote.index.hybrid import HybridCandidates
from scalingnote.index.sparse import hybrid_candidates
from scalingnote.models.sparse_query import SparseRows
from scalingnote.quantize.job import use_threads
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import WORK, read_table

REFINE_FACTORS = (1, 2, 4, 8, 16)
MIN_RECALL_GAIN = 0.002  # a smaller gain does not justify a higher cost
TIMED_QUERIES = 64
TUNING_QUERIES = 500  # limit of the test queries for tuning
MAX_SHARDS = 8  # limit of the evenly spaced shards for tuning
log = get_logger("index")


@dataclass(frozen=True)
class IndexRun:
    """Settings and inputs that all tasks of a run share."""

    config: IndexConfig
    layout: shard.IndexLayout
    parents: dict[str, str]  # kind -> URI
    output: str
    sampled: tuple[int, ...]  # shards for tuning
    queries: ivf.UnitQueries | None  # for tuning
    terms: SparseRows | None = None  # terms of the same queries, if documents have terms
    judged: tuple[str, ...] = ()  # doc_ids with a judgement for some of these queries

    def work(self, name: str) -> str:
        """Return the path of a working file, which is not part of the artifact."""
        return fs.join(self.output, WORK, name)


class ShardAnswers(NamedTuple):
    """Candidates of some shards for the tuning queries at one nprobe."""

    rows: ivf.CandidateRows
    by_codes: ivf.CandidateScores
    by_vectors: ivf.CandidateScores
    scanned: float  # number of codes per query


@dataclass(frozen=True)
class OperatingPoint:
    """A setting, its recall and its cost."""

    nprobe: int
    refine_factor: int
    recall: float
    cost: float  # number of codes per query over all shards


def write_exact_answers(run: IndexRun, number: int, best: topk.Best, total: Float[ndarray, " dim"]) -> None:
    """Write the best documents of a shard for every tuning query, and the sum of its vectors."""
    sink = io.BytesIO()
    np.savez(sink, scores=best.scores, rows=best.ids, total=total)
    fs.write_bytes(run.work(f"exact/{number:05d}.npz"), sink.getvalue())


def sampled_shards(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Choose up to `count` shards for tuning, evenly spaced among those that have documents."""
    filled = [number for number, size in enumerate(sizes) if size]
    count = min(count, len(filled))
    return tuple(filled[len(filled) * place // count] for place in range(count))


def probes(nlist: int) -> list[int]:
    """Return the values of nprobe to try: powers of two, and all lists."""
    return [*(1 << power for power in range(nlist.bit_length()) if 1 << power < nlist), nlist]


def factors(family: str, refine: Refine) -> tuple[int, ...]:
    """Return the refine factors to try: only 1 for a flat index, which already compares kept vectors."""
    return REFINE_FACTORS if refine != "none" and family != "flat" else (1,)


def candidates(lists: ivf.Lists, queries: ivf.UnitQueries, *, nprobe: int, k: int) -> ShardAnswers:
    """Find the k best documents of one shard by codes, to measure one nprobe."""
    probed_lists = ivf.choose_lists(queries, lists.coarse, nprobe=nprobe)
    scores, rows = ivf.scan(lists, queries, chosen=probed_lists, k=k)
    scores[rows < 0] = -np.inf
    exact = scores if lists.kept is None else ivf.scores(lists.kept, queries, rows)
    scanned = float(len(lists))
    if lists.index is not None:
        sizes = [lists.index.invlists.list_size(number) for number in range(lists.index.nlist)]
        scanned = np.array(sizes)[probed_lists[1]].sum() / len(queries)
    return ShardAnswers(rows, scores, exact, float(scanned))


def join(one: ShardAnswers, other: ShardAnswers, *, depth: int) -> ShardAnswers:
    """Select the `depth` best of two answers by codes; if scores are equal, those of `one` come first."""
    columns = [np.concatenate(pair, axis=1) for pair in zip(one[:3], other[:3], strict=True)]
    best = topk.select(columns[1], k=depth)
    rows, codes, vectors = (np.take_along_axis(column, best, axis=1) for column in columns)
    return ShardAnswers(rows, codes, vectors, one.scanned + other.scanned)


def measure(
    found: ShardAnswers,
    exact: Int[ndarray, "queries k"],
    *,
    nprobe: int,
    factors: Sequence[int],
    share: float = 1.0,
) -> list[OperatingPoint]:
    """Measure recall and cost of one nprobe with each refine factor.

    Args:
        found: answers of the measured shards; rows are counted over all of these.
        exact: rows of the exact answers, padded with -1 if there are fewer documents.
        nprobe: of the answers.
        factors: refine factors to measure.
        share: fraction of the documents of the index that these shards contain.
    """
    order = np.argsort(-found.by_codes, axis=1, kind="stable")
    k = exact.shape[1]
    points = []
    for factor in factors:
        best = order[:, : factor * k]
        best_answers = (np.take_along_axis(x, best, axis=1) for x in (found.by_vectors, found.rows))
        value = recall(topk.merge(*best_answers, k=k)[1], exact)
        cost = found.scanned / share + factor * k * ivf.RESCORE_COST
        points.append(OperatingPoint(nprobe, factor, round(value, 4), round(cost, 1)))
    return points


def recall(found: Int[ndarray, "queries k"], exact: Int[ndarray, "queries k"]) -> float:
    """Compute the mean share of each query's exact answer that was found."""
    shares = [
        np.isin(best[best >= 0], retrieved).mean()
        for retrieved, best in zip(found, exact, strict=True)
        if (best >= 0).any()
    ]
    return float(np.mean(shares))


def choose(points: Sequence[OperatingPoint], *, target: float) -> OperatingPoint:
    """Choose the cheapest point that reaches the target; else warn and take the cheapest near the best."""
    sufficient = [point for point in points if point.recall >= target]
    if sufficient:
        return min(sufficient, key=lambda point: (point.cost, point.nprobe))
    best = max(point.recall for point in points)
    near_best = [point for point in points if point.recall > best - MIN_RECALL_GAIN]
    cheapest = min(near_best, key=lambda point: (point.cost, point.nprobe))
    log.warning(
        "the highest recall of this index is %.3f, below the target of %.3f, and more than nprobe=%d does "
        "not raise it: its codes are too coarse. Keep finer vectors (index.family.refine=flat) or use a "
        "finer family (ivf_sq8)",
        best,
        target,
        cheapest.nprobe,
    )
    return cheapest


def tune_recall(run: IndexRun, sizes: Sequence[int]) -> tuple[shard.IndexLayout, dict[str, Any]]:
    """Tune nprobe and refine_factor on the sampled shards; `sizes` are the documents of each shard.

    Returns:
        The layout with the chosen values; and for the manifest the curve of recall, cost and time from which
        they were chosen, and the sample on which it was measured. Without queries, the unchanged layout and
        no curve.
    """
    config, layout = run.config, run.layout
    if run.queries is None:
        return layout, {"tuning": []}
    nprobes = (config.nprobe,) if config.nprobe else probes(layout.nlist)
    refine_factors = (
        (config.refine_factor,) if config.refine_factor else factors(layout.family, layout.refine)
    )
    measure_task = partial(_measure_shards, run=run, probes=nprobes, factors=refine_factors)
    ((points, background),) = cluster.map_tasks(measure_task, [sizes], config.resources)
    documents = sum(sizes[number] for number in run.sampled)
    best = choose(points, target=config.tuning.recall)
    curve = [point for point in points if point.refine_factor == best.refine_factor]
    time_task = partial(_time_searches, run=run, refine_factor=best.refine_factor, probes=nprobes)
    largest = max(run.sampled, key=sizes.__getitem__)
    (times,) = cluster.map_tasks(time_task, [largest], config.resources)
    log.info(
        "recall@%d of %.3f on %d queries by nprobe=%d of %d lists and refine_factor=%d",
        *(min(config.tuning.k, documents), best.recall, len(run.queries), best.nprobe, layout.nlist),
        best.refine_factor,
    )
    tuned = replace(
        layout,
        nprobe=best.nprobe,
        refine_factor=best.refine_factor,
        recall=best.recall,
        background=background,
    )
    return tuned, {
        "tuning": [vars(point) | {"us_per_query": us} for point, us in zip(curve, times, strict=True)],
        "tuning_sample": {"shards": list(run.sampled), "documents": documents, "queries": len(run.queries)},
    }


def tune_weight(
    run: IndexRun, layout: shard.IndexLayout, sizes: Sequence[int], relevant: Sequence[dict[str, int]]
) -> tuple[shard.IndexLayout, dict[str, Any]]:
    """Tune the weight of dense scores in hybrid search.

    Args:
        run: has the queries for tuning and their terms.
        layout: with nprobe and refine_factor.
        sizes: documents of each shard.
        relevant: judgements of each query, doc_id -> grade.

    Returns:
        The layout with the weight of the best nDCG@10, and nDCG@10 of each weight. Without terms, kept
        vectors or judgements, the unchanged layout and an empty mapping.
    """
    if run.queries is None or run.terms is None or layout.refine == "none":
        return layout, {}
    items = [*enumerate(accumulate(sizes[:-1], initial=0))]
    measure_task = partial(_measure_shard_hybrid, run=run, layout=layout)
    answers = in_order(cluster.map_tasks(measure_task, items, run.config.resources))
    both, rows = next(answers)
    for shard_candidates, judged_rows in answers:
        both = hybrid.merge([both, shard_candidates], candidates=run.config.tuning.k)
        rows = np.maximum(rows, judged_rows)  # -1 except in the shard that has the document
    row_of = {doc_id: row for doc_id, row in zip(run.judged, rows.tolist(), strict=True) if row >= 0}
    graded = [{row_of[i]: grade for i, grade in judged.items() if i in row_of} for judged in relevant]
    judged_queries = sum(any(grade > 0 for grade in grades.values()) for grades in graded)
    if not judged_queries:
        log.warning("the weight of dense scores is not tuned: no test query has a relevant indexed document")
        return layout, {}
    both = hybrid.merge([both], candidates=run.config.tuning.k)
    weight, curve = hybrid.tune_weight(both, graded, background=layout.background or 0.0)
    log.info(
        "nDCG@10 of %.3f on %d judged queries by dense_weight=%.2f; only embeddings %.3f, only terms %.3f",
        *(curve[weight], judged_queries, weight, curve[1.0], curve[0.0]),
    )
    points = [{"dense_weight": w, "ndcg@10": round(value, 4)} for w, value in curve.items()]
    return replace(layout, dense_weight=weight), {"queries": judged_queries, "curve": points}


def _measure_shards(
    sizes: Sequence[int], *, run: IndexRun, probes: Sequence[int], factors: Sequence[int]
) -> tuple[list[OperatingPoint], float]:
    """Measure recall and cost of each setting on the sampled shards, opened one after the other (a task).

    This is one task, because the answers of the shards are megabytes for each setting, which would be sent
    between tasks. The second result is the mean score of queries and documents.
    """
    use_threads(run.config.resources)
    assert run.queries is not None
    depth = run.config.tuning.k * factors[-1]
    first = dict(zip(run.sampled, accumulate((sizes[n] for n in run.sampled), initial=0), strict=False))
    documents = sum(sizes[number] for number in first)
    answers: dict[int, ShardAnswers] = {}
    for number, first_row in first.items():
        lists = _reopen(number, run)
        for nprobe in probes:
            share = candidates(lists, run.queries, nprobe=nprobe, k=depth)
            share = share._replace(rows=topk.count_from(first_row, share.rows))
            answers[nprobe] = join(answers[nprobe], share, depth=depth) if nprobe in answers else share
    exact, background = _exact_answers(run, first, documents=documents)
    points = [
        point
        for nprobe, answer in answers.items()
        for point in measure(answer, exact, nprobe=nprobe, factors=factors, share=documents / sum(sizes))
    ]
    return points, background


def _measure_shard_hybrid(
    item: tuple[int, int], *, run: IndexRun, layout: shard.IndexLayout
) -> tuple[int, tuple[HybridCandidates, Int[ndarray, " judged"]]]:
    """Find hybrid candidates of a shard and its rows of the judged documents, -1 for others (a task).

    The item is (shard, number of rows before it). Rows are counted over all shards.
    """
    number, first_row = item
    use_threads(run.config.resources)
    queries, terms, k = run.queries, run.terms, run.config.tuning.k
    assert queries is not None
    assert terms is not None
    lists = _reopen(number, run)
    probed_lists = ivf.choose_lists(queries, lists.coarse, nprobe=layout.nprobe)
    nearest = ivf.candidates(lists, queries, chosen=probed_lists, k=k, refine_factor=layout.refine_factor)
    _, rows = topk.merge(*nearest, k=k)
    files = {
        name: fs.read_bytes(fs.join(run.output, part)) for name, part in shard.term_files(number).items()
    }
    score = partial(ivf.scores, lists.kept, queries)
    both = hybrid_candidates(rows, score, [postings.load(files)], terms, k=k)
    doc_ids = read_table(fs.join(run.output, shard.columns_file(number)))["doc_id"]
    judged_rows = pc.index_in(pa.array(run.judged, pa.string()), doc_ids).fill_null(-1).to_numpy()
    both = replace(both, ids=topk.count_from(first_row, both.ids))
    return number, (both, topk.count_from(first_row, judged_rows))


def _time_searches(number: int, *, run: IndexRun, refine_factor: int, probes: Sequence[int]) -> list[float]:
    """Measure microseconds of processor time per query for each nprobe, query by query (a task)."""
    use_threads(run.config.resources)
    lists = _reopen(number, run)
    assert run.queries is not None
    queries, k = run.queries[:TIMED_QUERIES], run.config.tuning.k
    times = []
    for nprobe in probes:
        start = time.process_time()
        for query in queries:
            probed_lists = ivf.choose_lists(query[None], lists.coarse, nprobe=nprobe)
            nearest = ivf.candidates(
                lists, query[None], chosen=probed_lists, k=k, refine_factor=refine_factor
            )
            topk.merge(*nearest, k=k)
        times.append(round((time.process_time() - start) / len(queries) * 1e6, 1))
    return times


def _exact_answers(
    run: IndexRun, first: Mapping[int, int], *, documents: int
) -> tuple[Int[ndarray, "queries k"], float]:
    """Read exact answers of shards, given the rows before each; and compute the mean score of all pairs."""
    assert run.queries is not None
    best, total = topk.Best(len(run.queries), min(run.config.tuning.k, documents)), np.zeros(run.layout.dim)
    for number, first_row in first.items():
        share = np.load(io.BytesIO(fs.read_bytes(run.work(f"exact/{number:05d}.npz"))))
        total += share["total"]
        best.add(slice(None), share["scores"], topk.count_from(first_row, share["rows"]))
    return best.ids, round(hybrid.background_of(run.queries, (total / documents)[np.newaxis]), 6)


def _reopen(number: int, run: IndexRun) -> ivf.Lists:
    names = shard.vector_files(number, family=run.layout.family, refine=run.layout.refine)
    coarse, *data = (fs.read_bytes(fs.join(run.output, name)) for name in (shard.COARSE, *names))
    return ivf.load(families.parse(coarse), *data)
