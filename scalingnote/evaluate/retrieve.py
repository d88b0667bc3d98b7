"""Test queries through every method: their embeddings come in, each method's ranked documents go out.

Query towers are searched exactly; the one that is served also through the index; BM25 stands beside. Where
documents have term weights, so do sparse search and each tower's hybrid with it; where the run has weighted
words by BM25, each tower's hybrid with BM25.
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
from scalingnote.evaluate import exact
from scalingnote.evaluate import pool as pools
from scalingnote.evaluate.config import EvaluateConfig, Hybrid
from scalingnote.evaluate.encoded import Encoded
from scalingnote.evaluate.exact import Found
from scalingnote.evaluate.pairs import Scorer
from scalingnote.evaluate.test_set import TestSet
from scalingnote.log import Progress, get_logger
from scalingnote.search.searcher import Searcher
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

log = get_logger("evaluate")
INDEX_RECALL_AT = (10, 100)
QUERIES_PER_BLOCK = 256


def baseline(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> str:
    """The method that others are compared with. ConfigError before anything is searched."""
    names = method_names(config, parents)
    if config.baseline is not None and config.baseline not in names:
        raise ConfigError(
            f"evaluate.baseline={config.baseline!r} is none of the methods: set one of {', '.join(names)}"
        )
    return config.baseline or names[0]


def method_names(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> list[str]:
    """What :func:`retrieve` will give, in its order."""
    found = []
    for name, kind in towers(config, parents).items():
        found.append(name)
        if pools.has_terms(embeddings_of(kind, parents), parents.get("dual_encoder")):
            found += [f"{name} (sparse)"] * (kind == "dual_encoder") + [f"{name} (hybrid)"]
        found += [f"{name} + bm25"] * ("bm25_terms" in parents)
        found += [f"{name} (index)"] * (name == served(config, parents) and "index" in parents)
    return found + ["bm25"] * with_words(config, parents)


def with_words(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> bool:
    """Whether BM25 stands beside: it is wanted, and holds no more documents in memory than it may."""
    return config.bm25 and parents["embeddings"].counts["documents"] <= config.bm25_documents


def served(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> str:
    """The name of the query tower that is searched through the index."""
    return config.names.student if "student" in parents else config.names.dual_encoder


def towers(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> dict[str, str]:
    """Method -> which of the parents has its query tower."""
    names = {"dual_encoder": config.names.dual_encoder, "student": config.names.student}
    return {name: kind for kind, name in names.items() if kind in parents}


def retrieve(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, Encoded],
    bm25: "Words | None",
    *,
    test: TestSet,
) -> dict[str, trec.Run]:
    """Method -> run: each query tower exactly, the served one through the index too, sparse, hybrid, BM25."""
    depth = max(
        config.run_depth, config.mrr_at, config.map_at, config.ndcg_at, *config.recall_at, *INDEX_RECALL_AT
    )
    runs: dict[str, trec.Run] = {}
    for name, kind in towers(config, parents).items():
        queries = encoded[name].unit(test.queries)
        pool = embeddings_of(kind, parents)
        found = pools.search(pool, exact.dense(queries), dim=queries.shape[1], queries=len(queries), k=depth)
        runs[name] = _run_of(pool, found, test=test)
        sparse = pools.sparse_queries(pool, parents.get("dual_encoder"), test.queries)
        if sparse is not None:
            by_terms, joined = _with_terms(
                queries, found, sparse, pool=pool, joining=config.hybrid, depth=depth
            )
            if kind == "dual_encoder":  # a student's terms are no others
                runs[f"{name} (sparse)"] = _run_of(pool, by_terms, test=test)
            runs[f"{name} (hybrid)"] = _run_of(pool, joined, test=test)
        if "bm25_terms" in parents:
            words = pools.bm25_queries(parents["bm25_terms"], test.queries)
            _, joined = _with_terms(queries, found, words, pool=pool, joining=config.hybrid, depth=depth)
            runs[f"{name} + bm25"] = _run_of(pool, joined, test=test)
        if name == served(config, parents) and "index" in parents:
            runs[f"{name} (index)"] = _through_index(parents["index"].uri, queries, test=test, depth=depth)
    if bm25 is not None:
        rows, scores = bm25.index.search(test.queries, depth)
        runs["bm25"] = _run(test, bm25.doc_ids, rows, scores)
    return runs


def scorers(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, Encoded],
    bm25: "Words | None",
) -> dict[str, Scorer]:
    """Methods that can score any pair: each query tower, and BM25."""

    def by_tower(name: str, kind: str) -> Scorer:
        def score(queries: Sequence[str], doc_ids: Sequence[str]) -> Float[ndarray, " pairs"]:
            row = {query: i for i, query in enumerate(dict.fromkeys(queries))}
            rows = np.array([row[query] for query in queries], np.int64)
            pool = embeddings_of(kind, parents)
            return pools.score_pairs(pool, encoded[name].unit(list(row)), rows, doc_ids)

        return score

    found = {name: by_tower(name, kind) for name, kind in towers(config, parents).items()}
    return found | ({"bm25": bm25.scores} if bm25 is not None else {})


@dataclass(frozen=True)
class Words:
    """BM25 over the same pool: documents without an embedding are left out here, too."""

    index: BM25
    doc_ids: pa.Array

    @classmethod
    def build(cls, config: EvaluateConfig, parents: Mapping[str, Artifact]) -> "Words":
        """Of the documents that have an embedding."""
        ids = parents["embeddings"].table("embeddings", columns=["doc_id"])["doc_id"].combine_chunks()
        documents = parents["dataset"].table("documents", columns=["doc_id", "title", "topic", "content"])
        documents = documents.filter(pc.is_in(documents["doc_id"], value_set=ids))
        log.info("building BM25 over %s documents", f"{documents.num_rows:,}")
        index = BM25.build(document_texts(documents), k1=config.bm25_k1, b=config.bm25_b)
        return cls(index, documents["doc_id"].combine_chunks())

    def scores(self, queries: Sequence[str], doc_ids: Sequence[str]) -> Float[ndarray, " pairs"]:
        """Of pairs; NaN for a document not in the pool."""
        rows = pc.fill_null(pc.index_in(pa.array(doc_ids, pa.string()), value_set=self.doc_ids), -1)
        out = np.full(len(queries), np.nan)
        of: dict[str, list[int]] = {}
        for pair, (query, row) in enumerate(zip(queries, rows.to_pylist(), strict=True)):
            if row >= 0:
                of.setdefault(query, []).append(pair)
        for query, pairs in of.items():
            out[pairs] = self.index.scores(query)[rows.take(pa.array(pairs)).to_numpy()]
        return out


def embeddings_of(kind: str, parents: Mapping[str, Artifact]) -> Artifact:
    """The document embeddings that a query tower is searched in."""
    own = kind == "dual_encoder" and "teacher_embeddings" in parents
    return parents["teacher_embeddings" if own else "embeddings"]


def _with_terms(
    queries: Float[ndarray, "queries dim"],
    found: Found,
    sparse: pools.SparseQueries,
    *,
    pool: Artifact,
    joining: Hybrid,
    depth: int,
) -> tuple[Found, Found]:
    """Sparse search of a pool that was searched by embeddings before, and the hybrid of both."""
    search = partial(pools.search, pool, queries=len(queries), k=depth)
    terms: Any = {"terms": sparse.vocabulary, "words": sparse.words}
    by_terms = _sharing(search(exact.sparse(sparse.matrix), **terms))
    if joining.kind == "reciprocal_rank":
        scores, rows = hybrid.reciprocal_ranks(found.rows, by_terms.rows, k=joining.k, depth=depth)
        return by_terms, Found(scores, rows, scores.min(1), scores.max(1))
    weight, ranges = joining.dense_weight, (found, by_terms)
    score = exact.joined(queries, sparse.matrix, ranges=ranges, dense_weight=weight)
    return by_terms, search(score, dim=queries.shape[1], **terms)


def _sharing(found: Found) -> Found:
    """Without documents that share no term with the query: as in BM25, and as served, they have no rank."""
    return replace(found, rows=np.where(found.scores > 0, found.rows, -1))


def _run_of(embeddings: Artifact, found: Found, *, test: TestSet) -> trec.Run:
    wanted, doc_ids = pools.named(embeddings, found.rows)
    places = np.where(found.rows < 0, -1, np.searchsorted(wanted, found.rows))
    return _run(test, doc_ids, places, found.scores)


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
    for query_id, found, values in zip(test.query_ids, rows, scores, strict=True):
        kept = found >= 0
        run[query_id] = list(
            zip(doc_ids.take(pa.array(found[kept])).to_pylist(), values[kept].tolist(), strict=True)
        )
    return run
