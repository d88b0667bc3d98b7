"""Retrieval methods of the report: test queries in, each method's ranked documents out.

Query towers are searched exactly, and the served one also through the index. If documents have term weights,
there are also sparse search and each tower's hybrid with it; if the run has weighted words by BM25, each
tower's hybrid with BM25. BM25 over the same pool is the lexical baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import hybrid
from scalingnote.bm25 import BM25, document_texts
from scalingnote.errors import ConfigError
from scalingnote.evaluate import exact_search
from scalingnote.evaluate.config import EvaluateConfig, Hybrid
from scalingnote.evaluate.exact_search import QueryEmbeddings, TopDocuments
from scalingnote.evaluate.test_set import TestSet
from scalingnote.evaluate.user_files import Scorer
from scalingnote.log import Progress, get_logger
from scalingnote.search.searcher import Searcher
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

log = get_logger("evaluate")
INDEX_RECALL_AT = (10, 100)
QUERIES_PER_BLOCK = 256


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
        if exact_search.has_terms(embeddings_of(kind, parents), parents.get("dual_encoder")):
            names += [f"{name} (sparse)"] * (kind == "dual_encoder") + [f"{name} (hybrid)"]
        names += [f"{name} + bm25"] * ("bm25_terms" in parents)
        names += [f"{name} (index)"] * (name == served_method(config, parents) and "index" in parents)
    return names + ["bm25"] * uses_bm25(config, parents)


def uses_bm25(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> bool:
    """Whether BM25 is a method: it is switched on, and the pool is within its limit."""
    return config.bm25 and parents["embeddings"].counts["documents"] <= config.bm25_documents


def served_method(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> str:
    """The name of the query tower that is searched through the index."""
    return config.names.student if "student" in parents else config.names.dual_encoder


def tower_kinds(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> dict[str, str]:
    """Method -> name of the parent artifact with its query tower."""
    names = {"dual_encoder": config.names.dual_encoder, "student": config.names.student}
    return {name: kind for kind, name in names.items() if kind in parents}


def retrieve(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, QueryEmbeddings],
    bm25: "Bm25Pool | None",
    *,
    test: TestSet,
) -> dict[str, trec.Run]:
    """Search the test queries with every method.

    Args:
        config: depths of measures, names and hybrid settings.
        parents: artifacts by name.
        encoded: method -> embeddings of its queries.
        bm25: BM25 over the pool; None: leave it out.
        test: queries to search.

    Returns:
        Method -> run.
    """
    depth = max(
        config.run_depth, config.mrr_at, config.map_at, config.ndcg_at, *config.recall_at, *INDEX_RECALL_AT
    )
    runs: dict[str, trec.Run] = {}
    for name, kind in tower_kinds(config, parents).items():
        queries = encoded[name].unit(test.queries)
        pool = embeddings_of(kind, parents)
        by_embeddings = exact_search.search(
            pool, exact_search.dense_score(queries), dim=queries.shape[1], queries=len(queries), k=depth
        )
        runs[name] = _run_of(pool, by_embeddings, test=test)
        sparse = exact_search.sparse_queries(pool, parents.get("dual_encoder"), test.queries)
        if sparse is not None:
            by_terms, joined = _hybrid_search(
                queries, by_embeddings, sparse, pool=pool, joining=config.hybrid, depth=depth
            )
            if kind == "dual_encoder":  # a student has the same terms
                runs[f"{name} (sparse)"] = _run_of(pool, by_terms, test=test)
            runs[f"{name} (hybrid)"] = _run_of(pool, joined, test=test)
        if "bm25_terms" in parents:
            words = exact_search.bm25_queries(parents["bm25_terms"], test.queries)
            _, joined = _hybrid_search(
                queries, by_embeddings, words, pool=pool, joining=config.hybrid, depth=depth
            )
            runs[f"{name} + bm25"] = _run_of(pool, joined, test=test)
        if name == served_method(config, parents) and "index" in parents:
            runs[f"{name} (index)"] = _through_index(parents["index"].uri, queries, test=test, depth=depth)
    if bm25 is not None:
        rows, scores = bm25.index.search(test.queries, depth)
        runs["bm25"] = _run(test, bm25.doc_ids, rows, scores)
    return runs


def scorers(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, QueryEmbeddings],
    bm25: "Bm25Pool | None",
) -> dict[str, Scorer]:
    """Methods that can score any pair of query and document: each query tower, and BM25."""

    def by_tower(name: str, kind: str) -> Scorer:
        def score(queries: Sequence[str], doc_ids: Sequence[str]) -> Float[ndarray, " pairs"]:
            row = {query: i for i, query in enumerate(dict.fromkeys(queries))}
            rows = np.array([row[query] for query in queries], np.int64)
            pool = embeddings_of(kind, parents)
            return exact_search.score_pairs(pool, encoded[name].unit(list(row)), rows, doc_ids)

        return score

    by_method = {name: by_tower(name, kind) for name, kind in tower_kinds(config, parents).items()}
    return by_method | ({"bm25": bm25.scores} if bm25 is not None else {})


@dataclass(frozen=True)
class Bm25Pool:
    """BM25 over the same pool, so without documents that have no embedding."""

    index: BM25
    doc_ids: pa.Array

    @classmethod
    def build(cls, config: EvaluateConfig, parents: Mapping[str, Artifact]) -> "Bm25Pool":
        """Build it over the documents that have an embedding."""
        ids = parents["embeddings"].table("embeddings", columns=["doc_id"])["doc_id"].combine_chunks()
        documents = parents["dataset"].table("documents", columns=["doc_id", "title", "topic", "content"])
        documents = documents.filter(pc.is_in(documents["doc_id"], value_set=ids))
        log.info("building BM25 over %s documents", f"{documents.num_rows:,}")
        index = BM25.build(document_texts(documents), k1=config.bm25_k1, b=config.bm25_b)
        return cls(index, documents["doc_id"].combine_chunks())

    def scores(self, queries: Sequence[str], doc_ids: Sequence[str]) -> Float[ndarray, " pairs"]:
        """BM25 of pairs; NaN for a document that is not in the pool."""
        rows = pc.fill_null(pc.index_in(pa.array(doc_ids, pa.string()), value_set=self.doc_ids), -1)
        out = np.full(len(queries), np.nan)
        pairs_of: dict[str, list[int]] = {}
        for pair, (query, row) in enumerate(zip(queries, rows.to_pylist(), strict=True)):
            if row >= 0:
                pairs_of.setdefault(query, []).append(pair)
        for query, pairs in pairs_of.items():
            out[pairs] = self.index.scores(query)[rows.take(pa.array(pairs)).to_numpy()]
        return out


def embeddings_of(kind: str, parents: Mapping[str, Artifact]) -> Artifact:
    """The document embeddings that a query tower is searched in."""
    own = kind == "dual_encoder" and "teacher_embeddings" in parents
    return parents["teacher_embeddings" if own else "embeddings"]


def _hybrid_search(
    queries: Float[ndarray, "queries dim"],
    by_embeddings: TopDocuments,
    sparse: exact_search.SparseQueries,
    *,
    pool: Artifact,
    joining: Hybrid,
    depth: int,
) -> tuple[TopDocuments, TopDocuments]:
    """Sparse search of a pool, and its hybrid with the results by embeddings."""
    search = partial(exact_search.search, pool, queries=len(queries), k=depth)
    terms: Any = {"terms": sparse.vocabulary, "words": sparse.words}
    by_terms = _without_zero_scores(search(exact_search.sparse_score(sparse.matrix), **terms))
    if joining.kind == "reciprocal_rank":
        scores, rows = hybrid.reciprocal_ranks(by_embeddings.rows, by_terms.rows, k=joining.k, depth=depth)
        return by_terms, TopDocuments(scores, rows, scores.min(1), scores.max(1))
    weight, ranges = joining.dense_weight, (by_embeddings, by_terms)
    score = exact_search.hybrid_score(queries, sparse.matrix, ranges=ranges, dense_weight=weight)
    return by_terms, search(score, dim=queries.shape[1], **terms)


def _without_zero_scores(result: TopDocuments) -> TopDocuments:
    """Drop documents that share no term with the query: like in BM25 and in service, they have no rank."""
    return replace(result, rows=np.where(result.scores > 0, result.rows, -1))


def _run_of(embeddings: Artifact, result: TopDocuments, *, test: TestSet) -> trec.Run:
    distinct, doc_ids = exact_search.document_ids(embeddings, result.rows)
    places = np.where(result.rows < 0, -1, np.searchsorted(distinct, result.rows))
    return _run(test, doc_ids, places, result.scores)


def _through_index(
    index: str, queries: Float[ndarray, "queries dim"], *, test: TestSet, depth: int
) -> trec.Run:
    searcher = Searcher.open(index, mapped=True)
    run: trec.Run = {}
    with Progress("evaluate", total=len(queries), unit="queries through the index") as progress:
        for start in range(0, len(queries), QUERIES_PER_BLOCK):
            answers = searcher.search(queries[start : start + QUERIES_PER_BLOCK], k=depth)
            for query_id, results in zip(test.query_ids[start:], answers, strict=False):
                run[query_id] = [(result.doc_id, float(result.score)) for result in results]
            progress.advance(len(answers))
    return run


def _run(
    test: TestSet,
    doc_ids: pa.Array,
    rows: Int[ndarray, "queries k"],
    scores: Float[ndarray, "queries k"],
) -> trec.Run:
    run: trec.Run = {}
    for query_id, best, values in zip(test.query_ids, rows, scores, strict=True):
        valid = best >= 0
        run[query_id] = list(
            zip(doc_ids.take(pa.array(best[valid])).to_pylist(), values[valid].tolist(), strict=True)
        )
    return run
