"""Tuning: the cheapest nprobe and refine_factor that reach a recall, and the best weight of dense scores.

Queries and documents are encoded by different towers and are distributed differently. So recall is measured
on real queries against their exact answers, never on perturbed documents.

    each sampled shard, opened once ─► for each nprobe, candidates by codes and their scores by vectors kept
    these shards together ─► the best refine_factor * k by codes ─► the best k of these ─► recall

A searcher of these shards does the same; searchers of one shard each have at least this recall. Exact answers
come from the same shards: the k best of a part of the corpus are harder to find than those of the whole, so
the recall of the whole is rather higher. One task opens shard after shard; the driver holds only settings and
their recall.

The cost of a setting is counted, not timed, so that the same inputs give the same index: codes scanned, and
vectors rescored, each of which costs as much as `RESCORE_COST` codes.
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
MIN_RECALL_GAIN = 0.002  # of doubling nprobe, to be worth its time
TIMED_QUERIES = 64
TUNING_QUERIES = 500  # test queries to tune with
MAX_SHARDS = 8  # evenly spaced, to tune on against their own exact answers
log = get_logger("index")


@dataclass(frozen=True)
class IndexRun:
    """Settings and inputs that all tasks of a run share."""

    config: IndexConfig
    layout: shard.IndexLayout
    parents: dict[str, str]  # kind -> URI
    output: str
    sampled: tuple[int, ...]  # shards to tune on
    queries: ivf.UnitQueries | None  # to tune with
    terms: SparseRows | None = None  # of the same queries, where documents have terms
    judged: tuple[str, ...] = ()  # doc_ids with a judgement for some of these queries

    def work(self, name: str) -> str:
        """Path of a file that is not part of the artifact."""
        return fs.join(self.output, WORK, name)


class ShardAnswers(NamedTuple):
    """Candidates of some shards for the tuning queries at one nprobe."""

    rows: ivf.CandidateRows
    by_codes: ivf.CandidateScores
    by_vectors: ivf.CandidateScores
    scanned: float  # codes per query


@dataclass(frozen=True)
class OperatingPoint:
    """A setting, its recall and its cost."""

    nprobe: int
    refine_factor: int
    recall: float
    cost: float  # codes per query, of all shards


def write_exact_answers(run: IndexRun, number: int, best: topk.Best, total: Float[ndarray, " dim"]) -> None:
    """Store the best documents of a shard for every tuning query, and the sum of its vectors."""
    sink = io.BytesIO()
    np.savez(sink, scores=best.scores, rows=best.ids, total=total)
    fs.write_bytes(run.work(f"exact/{number:05d}.npz"), sink.getvalue())


def sampled_shards(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Up to `count` shards to tune on, evenly spaced among those that have documents."""
    filled = [number for number, size in enumerate(sizes) if size]
    count = min(count, len(filled))
    return tuple(filled[len(filled) * place // count] for place in range(count))


def probes(nlist: int) -> list[int]:
    """Values of nprobe to try: powers of two up to all lists."""
    return [*(1 << power for power in range(nlist.bit_length()) if 1 << power < nlist), nlist]


def factors(family: str, refine: Refine) -> tuple[int, ...]:
    """Refine factors to try; a flat index compares by the vectors it keeps anyway."""
    return REFINE_FACTORS if refine != "none" and family != "flat" else (1,)


def candidates(lists: ivf.Lists, queries: ivf.UnitQueries, *, nprobe: int, k: int) -> ShardAnswers:
    """The k best of one shard by codes, for the measurement of one nprobe."""
    chosen = ivf.choose_lists(queries, lists.coarse, nprobe=nprobe)
    scores, rows = ivf.scan(lists, queries, chosen=chosen, k=k)
    scores[rows < 0] = -np.inf
    exact = scores if lists.kept is None else ivf.scores(lists.kept, queries, rows)
    scanned = float(len(lists))
    if lists.index is not None:
        sizes = [lists.index.invlists.list_size(number) for number in range(lists.index.nlist)]
        scanned = np.array(sizes)[chosen[1]].sum() / len(queries)
    return ShardAnswers(rows, scores, exact, float(scanned))


def join(one: ShardAnswers, other: ShardAnswers, *, depth: int) -> ShardAnswers:
    """The `depth` best by codes of either; of equal ones those of `one` first."""
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
    """Recall and cost of one nprobe with each refine factor.

    `found` and `exact` (-1 where there are fewer documents) count rows over these shards, which hold `share`
    of the documents.
    """
    order = np.argsort(-found.by_codes, axis=1, kind="stable")
    k = exact.shape[1]
    points = []
    for factor in factors:
        best = order[:, : factor * k]
        chosen = (np.take_along_axis(x, best, axis=1) for x in (found.by_vectors, found.rows))
        value = recall(topk.merge(*chosen, k=k)[1], exact)
        cost = found.scanned / share + factor * k * ivf.RESCORE_COST
        points.append(OperatingPoint(nprobe, factor, round(value, 4), round(cost, 1)))
    return points


def recall(found: Int[ndarray, "queries k"], exact: Int[ndarray, "queries k"]) -> float:
    """Mean share of each query's exact answer that was found."""
    shares = [
        np.isin(theirs[theirs >= 0], mine).mean()
        for mine, theirs in zip(found, exact, strict=True)
        if (theirs >= 0).any()
    ]
    return float(np.mean(shares))


def choose(points: Sequence[OperatingPoint], *, target: float) -> OperatingPoint:
    """The cheapest point that reaches the target; else, with a warning, the cheapest near the best recall."""
    enough = [point for point in points if point.recall >= target]
    if enough:
        return min(enough, key=lambda point: (point.cost, point.nprobe))
    best = max(point.recall for point in points)
    near_best = [point for point in points if point.recall > best - MIN_RECALL_GAIN]
    chosen = min(near_best, key=lambda point: (point.cost, point.nprobe))
    log.warning(
        "recall %.3f is the most this index finds, the target is %.3f, and more than nprobe=%d does not "
        "raise it: its codes are too coarse. Keep finer vectors (index.family.refine=flat) or take a finer "
        "family (ivf_sq8)",
        best,
        target,
        chosen.nprobe,
    )
    return chosen


def tune_recall(run: IndexRun, sizes: Sequence[int]) -> tuple[shard.IndexLayout, dict[str, Any]]:
    """Tune nprobe and refine_factor on the sampled shards, given the documents of each shard.

    Returns:
        The layout with what was chosen; and for the manifest, the curve of recall, cost and time that led to
        it, and the sample that it was measured on. Without queries the layout as it is and no curve.
    """
    config, layout = run.config, run.layout
    if run.queries is None:
        return layout, {"tuning": []}
    tried = (config.nprobe,) if config.nprobe else probes(layout.nlist)
    tried_factors = (config.refine_factor,) if config.refine_factor else factors(layout.family, layout.refine)
    measuring = partial(_measure_shards, run=run, probes=tried, factors=tried_factors)
    ((points, background),) = cluster.map_tasks(measuring, [sizes], config.resources)
    documents = sum(sizes[number] for number in run.sampled)
    best = choose(points, target=config.tuning.recall)
    curve = [point for point in points if point.refine_factor == best.refine_factor]
    timing = partial(_time_searches, run=run, refine_factor=best.refine_factor, probes=tried)
    largest = max(run.sampled, key=sizes.__getitem__)
    (timed,) = cluster.map_tasks(timing, [largest], config.resources)
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
        "tuning": [vars(point) | {"us_per_query": us} for point, us in zip(curve, timed, strict=True)],
        "tuning_sample": {"shards": list(run.sampled), "documents": documents, "queries": len(run.queries)},
    }


def tune_weight(
    run: IndexRun, layout: shard.IndexLayout, sizes: Sequence[int], relevant: Sequence[dict[str, int]]
) -> tuple[shard.IndexLayout, dict[str, Any]]:
    """Tune the weight of dense scores in hybrid search.

    Args:
        run: its queries and their terms are those to tune with.
        layout: with nprobe and refine_factor.
        sizes: documents of each shard.
        relevant: judgements of each query, doc_id -> grade.

    Returns:
        The layout with the weight of the best nDCG@10, and nDCG@10 of each weight. Without terms, kept
        vectors or judgements, the layout as it is and nothing.
    """
    if run.queries is None or run.terms is None or layout.refine == "none":
        return layout, {}
    items = [*enumerate(accumulate(sizes[:-1], initial=0))]
    measured = partial(_measure_shard_hybrid, run=run, layout=layout)
    shares = in_order(cluster.map_tasks(measured, items, run.config.resources))
    both, rows = next(shares)
    for found, judged_rows in shares:
        both = hybrid.merge([both, found], candidates=run.config.tuning.k)
        rows = np.maximum(rows, judged_rows)  # -1 but in the one shard that has it
    row_of = {doc_id: row for doc_id, row in zip(run.judged, rows.tolist(), strict=True) if row >= 0}
    graded = [{row_of[i]: grade for i, grade in judged.items() if i in row_of} for judged in relevant]
    judged = sum(any(grade > 0 for grade in grades.values()) for grades in graded)
    if not judged:
        log.warning("the weight of dense scores is not tuned: no test query has a relevant document indexed")
        return layout, {}
    both = hybrid.merge([both], candidates=run.config.tuning.k)
    weight, curve = hybrid.tune_weight(both, graded, background=layout.background or 0.0)
    log.info(
        "nDCG@10 of %.3f on %d judged queries by dense_weight=%.2f; embeddings alone %.3f, terms alone %.3f",
        *(curve[weight], judged, weight, curve[1.0], curve[0.0]),
    )
    points = [{"dense_weight": w, "ndcg@10": round(value, 4)} for w, value in curve.items()]
    return replace(layout, dense_weight=weight), {"queries": judged, "curve": points}


def _measure_shards(
    sizes: Sequence[int], *, run: IndexRun, probes: Sequence[int], factors: Sequence[int]
) -> tuple[list[OperatingPoint], float]:
    """Task: recall and cost of each setting on the sampled shards, opened one after the other.

    One task, because what the shards find is megabytes for each setting, which need not travel. The second
    result is the mean cosine of queries and documents.
    """
    use_threads(run.config.resources)
    assert run.queries is not None
    depth = run.config.tuning.k * factors[-1]
    first = dict(zip(run.sampled, accumulate((sizes[n] for n in run.sampled), initial=0), strict=False))
    documents = sum(sizes[number] for number in first)
    found: dict[int, ShardAnswers] = {}
    for number, first_row in first.items():
        lists = _reopen(number, run)
        for nprobe in probes:
            share = candidates(lists, run.queries, nprobe=nprobe, k=depth)
            share = share._replace(rows=topk.count_from(first_row, share.rows))
            found[nprobe] = join(found[nprobe], share, depth=depth) if nprobe in found else share
    exact, background = _exact_answers(run, first, documents=documents)
    points = [
        point
        for nprobe, answers in found.items()
        for point in measure(answers, exact, nprobe=nprobe, factors=factors, share=documents / sum(sizes))
    ]
    return points, background


def _measure_shard_hybrid(
    item: tuple[int, int], *, run: IndexRun, layout: shard.IndexLayout
) -> tuple[int, tuple[HybridCandidates, Int[ndarray, " judged"]]]:
    """Task: the shard, its hybrid candidates, and its rows of the judged documents, -1 for others.

    The item is (shard, number of rows before it), from which rows are counted on.
    """
    number, first_row = item
    use_threads(run.config.resources)
    queries, terms, k = run.queries, run.terms, run.config.tuning.k
    assert queries is not None
    assert terms is not None
    lists = _reopen(number, run)
    chosen = ivf.choose_lists(queries, lists.coarse, nprobe=layout.nprobe)
    nearest = ivf.candidates(lists, queries, chosen=chosen, k=k, refine_factor=layout.refine_factor)
    _, rows = topk.merge(*nearest, k=k)
    files = {
        name: fs.read_bytes(fs.join(run.output, part)) for name, part in shard.term_files(number).items()
    }
    score = partial(ivf.scores, lists.kept, queries)
    found = hybrid_candidates(rows, score, [postings.load(files)], terms, k=k)
    doc_ids = read_table(fs.join(run.output, shard.columns_file(number)))["doc_id"]
    judged = pc.index_in(pa.array(run.judged, pa.string()), doc_ids).fill_null(-1).to_numpy()
    found = replace(found, ids=topk.count_from(first_row, found.ids))
    return number, (found, topk.count_from(first_row, judged))


def _time_searches(number: int, *, run: IndexRun, refine_factor: int, probes: Sequence[int]) -> list[float]:
    """Task: microseconds of processor time per query by each nprobe, one at a time, in a finished shard."""
    use_threads(run.config.resources)
    lists = _reopen(number, run)
    assert run.queries is not None
    queries, k = run.queries[:TIMED_QUERIES], run.config.tuning.k
    timed = []
    for nprobe in probes:
        start = time.process_time()
        for query in queries:
            chosen = ivf.choose_lists(query[None], lists.coarse, nprobe=nprobe)
            nearest = ivf.candidates(lists, query[None], chosen=chosen, k=k, refine_factor=refine_factor)
            topk.merge(*nearest, k=k)
        timed.append(round((time.process_time() - start) / len(queries) * 1e6, 1))
    return timed


def _exact_answers(
    run: IndexRun, first: Mapping[int, int], *, documents: int
) -> tuple[Int[ndarray, "queries k"], float]:
    """Rows of the exact answers in shards, given the rows before each; and the mean cosine of all pairs."""
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
