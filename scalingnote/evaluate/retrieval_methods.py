"""Retrieval methods of the report: test queries in, each method's ranked documents out.

Query towers are searched exactly, and the served one also through the index. If documents have term weights,
there are also sparse search and each tower's hybrid with it; if the run has weighted words by BM25, each
tower's hybrid with BM25. BM25 over the same pool is the lexical baseline.

    each pool ─► scores by embeddings and by terms ─► their hybrids ─► ids of the rows found
    each shard of the index ─► its best documents, merged

Every pass runs in tasks; methods over the same documents share it. Queries and their results are held here.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from heapq import merge
from itertools import islice

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import hybrid
from scalingnote.errors import ConfigError
from scalingnote.evaluate import exact_search, scores
from scalingnote.evaluate import pool as pools
from scalingnote.evaluate.bm25_pool import Bm25Pool
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.exact_search import TopDocuments
from scalingnote.evaluate.pool import Pool, Sample
from scalingnote.evaluate.query_embeddings import QueryEmbeddings
from scalingnote.evaluate.scores import DenseScores, JoinedScores, Scores
from scalingnote.evaluate.test_set import TestSet
from scalingnote.evaluate.user_files import PairScorer
from scalingnote.index import shard as shards
from scalingnote.log import Progress
from scalingnote.search.searcher import Searcher
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner

INDEX_RECALL_AT = (10, 100)
QUERIES_PER_BLOCK = 256
TERMS, WORDS = "(terms)", "(words)"  # scores that are no method of their own name
Ranked = tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]  # scores and rows; a row of -1 is none
IndexHit = tuple[float, int, int, str]  # minus its score, its shard, its rank there, and doc_id: in order


def baseline_method(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> str:
    """The method that all others are compared with; ConfigError if the config names an unknown one."""
    names = method_names(config, parents)
    if config.baseline is not None and config.baseline not in names:
        raise ConfigError(
            f"evaluate.baseline={config.baseline!r} is none of the methods: set one of {', '.join(names)}"
        )
    return config.baseline or names[0]


def method_names(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> list[str]:
    """Names of the methods of :func:`retrieve`, in its order."""
    names = []
    for name, kind in tower_kinds(config, parents).items():
        names.append(name)
        if scores.has_terms(parents[pool_of(kind, parents)], parents.get("dual_encoder")):
            names += [f"{name} (sparse)"] * (kind == "dual_encoder") + [f"{name} (hybrid)"]
        names += [f"{name} + bm25"] * ("bm25_terms" in parents)
        names += [f"{name} (index)"] * (name == served_method(config, parents) and "index" in parents)
    return names + ["bm25"] * config.bm25


def served_method(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> str:
    """The name of the query tower that is searched through the index."""
    return config.names.student if "student" in parents else config.names.dual_encoder


def tower_kinds(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> dict[str, str]:
    """Method -> name of the parent artifact with its query tower."""
    names = {"dual_encoder": config.names.dual_encoder, "student": config.names.student}
    return {name: kind for kind, name in names.items() if kind in parents}


def pool_of(kind: str, parents: Mapping[str, Artifact]) -> str:
    """The parent artifact with the document embeddings that a query tower is searched in."""
    own = kind == "dual_encoder" and "teacher_embeddings" in parents
    return "teacher_embeddings" if own else "embeddings"


def open_pool(
    config: EvaluateConfig, parents: Mapping[str, Artifact], name: str = "embeddings", *, test: TestSet
) -> Pool:
    """The documents of an embeddings artifact; above `max_exact_documents`, a sample with all judged ones."""
    embeddings, sample = parents[name], None
    total = parents["embeddings"].counts["documents"]
    if total > config.max_exact_documents:
        judged = pa.array(sorted({doc for judged in test.qrels.values() for doc in judged}), pa.string())
        sample = Sample(config.max_exact_documents / total, config.seed, judged)
    return Pool(embeddings, parents["dataset"], sample)


def count_bm25(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    queries: Sequence[str],
    *,
    test: TestSet,
    each: TaskRunner = map,
) -> Bm25Pool | None:
    """BM25 for these queries over the documents that are searched exactly; None if it is switched off."""
    if not config.bm25:
        return None
    pool = open_pool(config, parents, test=test)
    return Bm25Pool.count(pool, queries, k1=config.bm25_k1, b=config.bm25_b, each=each)


def retrieve(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, QueryEmbeddings],
    bm25: Bm25Pool | None,
    *,
    test: TestSet,
    each: TaskRunner = map,
) -> tuple[dict[str, trec.Run], int]:
    """Search the test queries with every method.

    Args:
        config: depths of measures, names and hybrid settings.
        parents: artifacts by name.
        encoded: method -> embeddings of its queries.
        bm25: BM25 over the pool; None: leave it out.
        test: queries to search.
        each: runs the tasks.

    Returns:
        Method -> run, and the number of documents that were searched exactly.
    """
    depth = max(
        config.run_depth, config.mrr_at, config.map_at, config.ndcg_at, *config.recall_at, *INDEX_RECALL_AT
    )
    towers = tower_kinds(config, parents)
    runs: dict[str, trec.Run] = {}
    documents = 0
    for name in dict.fromkeys([*(pool_of(kind, parents) for kind in towers.values()), "embeddings"]):
        mine = {tower: kind for tower, kind in towers.items() if pool_of(kind, parents) == name}
        counted = bm25 if name == "embeddings" else None
        if mine or counted:
            pool = open_pool(config, parents, name, test=test)
            found, documents = _search_pool(
                config, parents, pool, mine, encoded, counted, queries=test.queries, k=depth, each=each
            )
            runs |= _runs(pool, found, test=test, each=each)
    served = served_method(config, parents)
    if "index" in parents:
        queries = encoded[served].unit(test.queries)
        runs[f"{served} (index)"] = _through_index(parents["index"], queries, test=test, k=depth, each=each)
    names = [name for name in method_names(config, parents) if name in runs]
    return {name: runs[name] for name in names}, documents


def _search_pool(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    pool: Pool,
    towers: Mapping[str, str],
    encoded: Mapping[str, QueryEmbeddings],
    bm25: Bm25Pool | None,
    *,
    queries: Sequence[str],
    k: int,
    each: TaskRunner,
) -> tuple[dict[str, Ranked], int]:
    """Every method's best documents of a pool, and the number of documents searched.

    A hybrid needs the score ranges of the whole pool, so that it takes a second pass.
    """
    sides: dict[str, Scores] = {name: DenseScores(encoded[name].unit(queries)) for name in towers}
    hybrids: dict[str, tuple[str, str]] = {}
    if scores.has_terms(pool.embeddings, parents.get("dual_encoder")):
        sides[TERMS] = scores.own_terms(parents["dual_encoder"], queries)
        hybrids |= {f"{name} (hybrid)": (name, TERMS) for name in towers}
    if "bm25_terms" in parents:
        sides[WORDS] = scores.bm25_terms(parents["bm25_terms"], queries)
        hybrids |= {f"{name} + bm25": (name, WORDS) for name in towers}
    if bm25 is not None:
        sides["bm25"] = bm25.scores(queries)
    single = exact_search.search(pool, sides, k=k, each=each)
    ranked = {name: (one.scores, one.ids) for name, one in single.items()}
    for name in {TERMS, WORDS, "bm25"} & sides.keys():
        ranked[name] = _with_a_term(single[name])
    found = {name: ranked[name] for name in towers}
    found |= {
        f"{name} (sparse)": ranked[TERMS]
        for name, kind in towers.items()
        if TERMS in sides and kind == "dual_encoder"
    }
    found |= {"bm25": ranked["bm25"]} if bm25 is not None else {}
    joining = config.hybrid
    if hybrids and joining.kind == "reciprocal_rank":
        for name, (dense, sparse) in hybrids.items():
            both = ranked[dense][1], ranked[sparse][1]
            found[name] = hybrid.reciprocal_ranks(*both, k=joining.k, depth=k)
    elif hybrids:
        joined = {
            name: JoinedScores(both, (single[both[0]].ranges, single[both[1]].ranges), joining.dense_weight)
            for name, both in hybrids.items()
        }
        needed = {name: sides[name] for both in hybrids.values() for name in both}
        for name, one in exact_search.search(pool, needed, k=k, joined=joined, each=each).items():
            found[name] = one.scores, one.ids
    return found, next(iter(single.values())).documents


def _with_a_term(found: TopDocuments) -> Ranked:
    """Without documents that share no term with the query: as in service, they have no rank."""
    return found.scores, np.where(found.scores > 0, found.ids, -1)


def _runs(pool: Pool, found: Mapping[str, Ranked], *, test: TestSet, each: TaskRunner) -> dict[str, trec.Run]:
    """Runs of rows as runs of document ids."""
    everything = np.concatenate([rows for _, rows in found.values()], axis=1)
    distinct, doc_ids = pools.document_ids(pool, everything, each=each)

    def hits(values: Float[ndarray, " k"], rows: Int[ndarray, " k"]) -> list[tuple[str, float]]:
        found = rows >= 0
        names = doc_ids.take(pa.array(np.searchsorted(distinct, rows[found]))).to_pylist()
        return list(zip(names, values[found].tolist(), strict=True))

    return {
        name: {query_id: hits(*line) for query_id, *line in zip(test.query_ids, *ranked, strict=True)}
        for name, ranked in found.items()
    }


def pair_scorer(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, QueryEmbeddings],
    bm25: Bm25Pool | None,
    *,
    each: TaskRunner = map,
) -> PairScorer:
    """Scores of any pairs of query and document by the methods that have some: query towers and BM25."""

    def score(queries: Sequence[str], doc_ids: Sequence[str]) -> dict[str, Float[ndarray, " pairs"]]:
        number = {query: i for i, query in enumerate(dict.fromkeys(queries))}
        rows = np.array([number[query] for query in queries], np.int64)
        found: dict[str, Float[ndarray, " pairs"]] = {}
        towers = tower_kinds(config, parents)
        sides: dict[str, dict[str, Scores]] = {}
        for name, kind in towers.items():
            dense = DenseScores(encoded[name].unit(list(number)))
            sides.setdefault(pool_of(kind, parents), {})[name] = dense
        if bm25 is not None:
            sides.setdefault("embeddings", {})["bm25"] = bm25.scores(list(number))
        for name, own in sides.items():
            pool = Pool(parents[name], parents["dataset"])
            found |= exact_search.score_pairs(pool, own, rows, doc_ids, each=each)
        return {name: found[name] for name in [*towers, "bm25"] if name in found}

    return score


def _through_index(
    index: Artifact,
    queries: Float[ndarray, "queries dim"],
    *,
    test: TestSet,
    k: int,
    each: TaskRunner,
) -> trec.Run:
    """Search an index shard by shard, as searchers do that hold one shard each."""
    found: list[list[IndexHit]] = [[] for _ in queries]
    numbers = range(shards.open_layout(index).shards)
    with Progress("evaluate", total=len(numbers), unit="shards searched through the index") as progress:
        for answers in each(partial(_search_shard, index=index.uri, queries=queries, k=k), numbers):
            found = [list(islice(merge(*both), k)) for both in zip(found, answers, strict=True)]
            progress.advance(1)
    return {
        query_id: [(doc_id, -lost) for lost, _, _, doc_id in hits]
        for query_id, hits in zip(test.query_ids, found, strict=True)
    }


def _search_shard(
    number: int, *, index: str, queries: Float[ndarray, "queries dim"], k: int
) -> list[list[IndexHit]]:
    searcher = Searcher.open(index, shards=[number], mapped=True)
    answers = []
    for start in range(0, len(queries), QUERIES_PER_BLOCK):
        for hits in searcher.search(queries[start : start + QUERIES_PER_BLOCK], k=k):
            answers.append([(-float(hit.score), number, rank, hit.doc_id) for rank, hit in enumerate(hits)])
    return answers
