"""The evaluate stage: test queries through every method, against the whole pool, into one report.

Query towers are searched exactly; the one that is served also through the index; BM25 stands beside. Where
documents have term weights, so do sparse search and each tower's hybrid with it. The pool is read part by
part, so it never has to fit in memory.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import cluster, hybrid
from scalingnote.bm25 import BM25, document_texts
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ConfigError
from scalingnote.evaluate import exact, measured, slices
from scalingnote.evaluate import pool as pools
from scalingnote.evaluate.ann_recall import ann_recall
from scalingnote.evaluate.config import EvaluateConfig, Hybrid
from scalingnote.evaluate.exact import Found
from scalingnote.evaluate.examples import examples
from scalingnote.evaluate.lineage import Ancestor, lineage, seconds
from scalingnote.evaluate.page import page
from scalingnote.evaluate.report import markdown
from scalingnote.evaluate.retrieval import Rankings
from scalingnote.evaluate.significance import Values
from scalingnote.evaluate.slices import Slice
from scalingnote.evaluate.test_set import TestSet, test_set
from scalingnote.log import Progress, environment, get_logger
from scalingnote.search.searcher import Searcher
from scalingnote.storage import filesystem as fs
from scalingnote.storage import trec, vectors
from scalingnote.storage.artifact import Artifact, Draft, open_artifact

log = get_logger("evaluate")
INDEX_RECALL_AT = (10, 100)
QUERIES_PER_BLOCK = 256


def run(
    config: EvaluateConfig,
    *,
    dataset: str,
    embeddings: str,
    index: str,
    dual_encoder: str | None = None,
    student: str | None = None,
    teacher_embeddings: str | None = None,
    output: str,
) -> Artifact:
    """Build the `report` artifact. DataError when no test query has a relevant document.

    A query tower is searched in the embeddings of the documents that it was trained with: `embeddings`, the
    ones that are indexed, or `teacher_embeddings` where the student has a document tower of its own.
    """
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
        "index": open_artifact(index, kind="index"),
    }
    if dual_encoder:
        parents["dual_encoder"] = open_artifact(dual_encoder, kind="dual_encoder")
    if student:
        parents["student"] = open_artifact(student, kind="student")
    if teacher_embeddings:
        parents["teacher_embeddings"] = open_artifact(teacher_embeddings, kind="embeddings")
    draft = Draft(output, kind="report", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    test = test_set(parents["dataset"])
    baseline = _baseline(config, parents)
    mistyped = test.mistyped(share=config.typos, seed=config.seed) if config.typos else None
    found = _retrieve(config, parents, test=test.and_also(mistyped) if mistyped else test)
    runs = {name: {q: run[q] for q in test.query_ids} for name, run in found.items()}
    rankings = {
        name: {q: [doc for doc, _ in found] for q, found in run.items()} for name, run in runs.items()
    }
    values = measured.values(config, rankings, qrels=test.qrels)
    ancestors = lineage(parents.values())
    sliced = _slices(config, parents["dataset"], ancestors, values, test=test)
    if mistyped:
        sliced["typos"] = _robustness(config, found, values, mistyped=mistyped)
    report = {
        **_about(parents, test=test),
        "methods": measured.means(values),
        "index": _index(parents["index"], rankings, served=_served(config, parents), test=test),
        "significance": measured.significance(config, values, baseline=baseline),
        "slices": sliced,
        "seconds": seconds(ancestors),
        "environment": environment(),
    }
    draft.write_table("per_query.parquet", measured.table(values, query_ids=test.query_ids))
    draft.write_json("report.json", report)
    draft.write_bytes("report.md", markdown(report).encode())
    shown = examples(parents["dataset"], rankings, test=test, number=config.examples, seed=config.seed)
    draft.write_bytes("report.html", page(report, examples=shown, ancestors=ancestors).encode())
    trec.write_qrels(draft.path("qrels.trec"), test.qrels)
    for name, run in runs.items():
        kept = {query_id: found[: config.run_depth] for query_id, found in run.items()}
        tag = re.sub(r"[ (]+", "-", name.replace(")", ""))
        trec.write_run(draft.path(f"runs/{tag}.trec"), kept, tag=tag)
    documents, queries = report["num_documents"], report["num_queries"]
    place = fs.join(output, "report.html")
    log.info("%d methods, %s queries, %s documents: %s", len(runs), f"{queries:,}", f"{documents:,}", place)
    return draft.commit(
        counts={"documents": documents, "queries": queries, "methods": len(runs)}
        | {"queries_without_relevant": test.without_relevant}
    )


def _baseline(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> str:
    """The method that others are compared with. ConfigError before anything is searched."""
    names = _method_names(config, parents)
    if config.baseline is not None and config.baseline not in names:
        raise ConfigError(
            f"evaluate.baseline={config.baseline!r} is none of the methods: set one of {', '.join(names)}"
        )
    return config.baseline or names[0]


def _method_names(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> list[str]:
    """What :func:`_retrieve` will give, in its order."""
    found = []
    for kind, name in (("dual_encoder", config.names.dual_encoder), ("student", config.names.student)):
        if kind not in parents:
            continue
        found.append(name)
        if pools.has_terms(_embeddings_of(kind, parents), parents.get("dual_encoder")):
            found += [f"{name} (sparse)"] * (kind == "dual_encoder") + [f"{name} (hybrid)"]
        found += [f"{name} (index)"] * (name == _served(config, parents))
    return found + ["bm25"] * config.bm25


def _served(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> str:
    """The name of the query tower that is searched through the index."""
    return config.names.student if "student" in parents else config.names.dual_encoder


def _retrieve(
    config: EvaluateConfig, parents: Mapping[str, Artifact], *, test: TestSet
) -> dict[str, trec.Run]:
    """Method -> run: each query tower exactly, the served one through the index too, sparse, hybrid, BM25."""
    doc_ids = parents["embeddings"].table("embeddings", columns=["doc_id"])["doc_id"].combine_chunks()
    depth = max(
        config.run_depth, config.mrr_at, config.map_at, config.ndcg_at, *config.recall_at, *INDEX_RECALL_AT
    )
    runs: dict[str, trec.Run] = {}
    names = {"dual_encoder": config.names.dual_encoder, "student": config.names.student}
    towers = {names[kind]: parents[kind] for kind in names if kind in parents}
    encoded = encode_queries(towers, test.queries, config=config)
    for kind, name in names.items():
        if kind not in parents:
            continue
        queries = vectors.unit(encoded[name])
        pool = _embeddings_of(kind, parents)
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
        if name == _served(config, parents):
            runs[f"{name} (index)"] = _through_index(parents["index"].uri, queries, test=test, depth=depth)
    if config.bm25:
        runs["bm25"] = _bm25(parents["dataset"], test=test, doc_ids=doc_ids, depth=depth, config=config)
    return runs


def _embeddings_of(kind: str, parents: Mapping[str, Artifact]) -> Artifact:
    """The document embeddings that a query tower is searched in."""
    own = kind == "dual_encoder" and "teacher_embeddings" in parents
    return parents["teacher_embeddings" if own else "embeddings"]


def _about(parents: Mapping[str, Artifact], *, test: TestSet) -> dict[str, Any]:
    """What was measured on."""
    dataset = parents["dataset"]
    return {
        "dataset": str(dataset.manifest.config.get("name", dataset.uri.rstrip("/").rsplit("/", 1)[-1])),
        "num_documents": parents["embeddings"].counts["documents"],
        "num_queries": len(test.query_ids),
        "simulated_clicks": bool(dataset.manifest.info.get("simulated_clicks", False)),
    }


def _index(
    index: Artifact, rankings: Mapping[str, Rankings], *, served: str, test: TestSet
) -> dict[str, float]:
    """How much of the exact answer the index gives, and its size."""
    exact, approximate = (
        [rankings[name][q] for q in test.query_ids] for name in (served, f"{served} (index)")
    )
    recalls = {f"recall@{k}": ann_recall(approximate, exact, k=k) for k in INDEX_RECALL_AT}
    return recalls | {"bytes_per_vector": index.counts["bytes_per_vector"]}


def _slices(
    config: EvaluateConfig,
    dataset: Artifact,
    ancestors: Sequence[Ancestor],
    values: Mapping[str, Values],
    *,
    test: TestSet,
) -> dict[str, list[Slice]]:
    """Slicing -> its slices; one that does not tell queries apart is left out."""
    documents = test.documents
    topics = _topics(dataset, documents) if config.topics else {}
    slicings = {"length": slices.by_length(test.queries)}
    if topics:
        slicings["topic"] = slices.by_topic([topics.get(d, "") for d in documents], most=config.topics)
    triplets = [a.artifact for a in ancestors if a.kind == "triplets" and a.artifact]
    if triplets:
        met = _met_in_training(triplets[-1], documents)
        slicings["frequency"] = slices.by_frequency([met.get(d, 0) for d in documents])
    found = {name: slices.sliced(labels, values, order=order) for name, (labels, order) in slicings.items()}
    return {name: parts for name, parts in found.items() if len(parts) > 1}


def _robustness(
    config: EvaluateConfig,
    found: Mapping[str, trec.Run],
    values: Mapping[str, Values],
    *,
    mistyped: TestSet,
) -> list[Slice]:
    """The test queries as they were written and with typos."""
    rankings = {
        name: {q: [doc for doc, _ in run[q]] for q in mistyped.query_ids} for name, run in found.items()
    }
    again = measured.values(config, rankings, qrels=mistyped.qrels)
    return [
        {"label": label, "queries": len(mistyped.query_ids), "methods": measured.means(one)}
        for label, one in (("as written", values), ("with typos", again))
    ]


def _topics(dataset: Artifact, documents: Sequence[str]) -> dict[str, str]:
    wanted = pa.array(sorted(set(documents)), pa.string())
    found: dict[str, str] = {}
    for batch in dataset.batches("documents", columns=["doc_id", "topic"]):
        batch = batch.filter(pc.is_in(batch["doc_id"], value_set=wanted))
        found.update(zip(batch["doc_id"].to_pylist(), batch["topic"].to_pylist(), strict=True))
    return {doc_id: topic for doc_id, topic in found.items() if topic}


def _met_in_training(triplets: Artifact, documents: Sequence[str]) -> dict[str, int]:
    """How many training triplets have each of the documents as their positive."""
    wanted = pa.array(sorted(set(documents)), pa.string())
    found: Counter[str] = Counter()
    for batch in triplets.batches("triplets", columns=["positive", "split"]):
        mine = pc.and_(pc.is_in(batch["positive"], value_set=wanted), pc.equal(batch["split"], "train"))
        found.update(batch.filter(mine)["positive"].to_pylist())
    return found


def encode_queries(
    towers: Mapping[str, Artifact], queries: Sequence[str], *, config: EvaluateConfig
) -> dict[str, Float[ndarray, "queries dim"]]:
    """Embeddings of `queries` by each artifact's query tower, as it gives them, from one Ray actor.

    Not in the driver: on a cluster that often sits on a head node without GPU.
    """
    actor: Any = ray.remote(**cluster.actor_options(config.resources))(_QueryTower).remote()
    starts = range(0, len(queries), QUERIES_PER_BLOCK)
    found: dict[str, ndarray] = {}
    for name, tower in towers.items():
        loaded = actor.load.remote(tower)
        blocks = [actor.encode.remote(list(queries[start : start + QUERIES_PER_BLOCK])) for start in starts]
        embeddings: list[ndarray] = []
        with Progress("evaluate", total=len(queries), unit=f"queries encoded by {name}") as progress:
            ray.get(loaded)
            for block in blocks:
                embeddings.append(ray.get(block))
                progress.advance(len(embeddings[-1]))
        found[name] = np.concatenate(embeddings)
    return found


class _QueryTower:
    """A query tower, loaded where Ray has room for it; one after the other."""

    def load(self, tower: Artifact) -> None:
        self._encoder = QueryEncoder.load(tower.directory("query"))

    def encode(self, queries: list[str]) -> Float[ndarray, "queries dim"]:
        return self._encoder.encode_queries(queries)


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
    terms = sparse.vocabulary
    search = partial(pools.search, pool, queries=len(queries), k=depth)
    by_terms = search(exact.sparse(sparse.matrix), terms=terms)
    if joining.kind == "reciprocal_rank":
        scores, rows = hybrid.reciprocal_ranks(found.rows, by_terms.rows, k=joining.k, depth=depth)
        return by_terms, Found(scores, rows, scores.min(1), scores.max(1))
    weight, ranges = joining.dense_weight, (found, by_terms)
    score = exact.joined(queries, sparse.matrix, ranges=ranges, dense_weight=weight)
    return by_terms, search(score, dim=queries.shape[1], terms=terms)


def _run_of(embeddings: Artifact, found: Found, *, test: TestSet) -> trec.Run:
    doc_ids = embeddings.table("embeddings", columns=["doc_id"])["doc_id"].combine_chunks()
    return _run(test, doc_ids, found.rows, found.scores)


def _through_index(
    index: str, queries: Float[ndarray, "queries dim"], *, test: TestSet, depth: int
) -> trec.Run:
    searcher = Searcher.open(index)
    run: trec.Run = {}
    with Progress("evaluate", total=len(queries), unit="queries through the index") as progress:
        for start in range(0, len(queries), QUERIES_PER_BLOCK):
            answers = searcher.search(queries[start : start + QUERIES_PER_BLOCK], k=depth)
            for query_id, results in zip(test.query_ids[start:], answers, strict=False):
                run[query_id] = [(result.doc_id, float(result.score)) for result in results]
            progress.advance(len(answers))
    return run


def _bm25(
    dataset: Artifact, *, test: TestSet, doc_ids: pa.Array, depth: int, config: EvaluateConfig
) -> trec.Run:
    """BM25 over the same pool: documents without an embedding are left out here, too."""
    documents = dataset.table("documents", columns=["doc_id", "title", "topic", "content"])
    documents = documents.filter(pc.is_in(documents["doc_id"], value_set=doc_ids))
    log.info("building BM25 over %s documents", f"{documents.num_rows:,}")
    bm25 = BM25.build(document_texts(documents), k1=config.bm25_k1, b=config.bm25_b)
    rows, scores = bm25.search(test.queries, depth)
    return _run(test, documents["doc_id"].combine_chunks(), rows, scores)


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
