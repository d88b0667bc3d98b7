"""The evaluate stage: test queries through every method, against the whole pool, into one report.

Query towers are searched exactly; the one that is served also through the index; BM25 stands beside. Where
documents have term weights, so do sparse search and each tower's hybrid with it, or with BM25. The pool is
read part by part, so it never has to fit in memory.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from jaxtyping import Float
from numpy import ndarray

from scalingnote import cluster
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate import contrastive_entropy, given, measured, retrieve, taught
from scalingnote.evaluate.ann_recall import ann_recall
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.contrastive_entropy import Entropies
from scalingnote.evaluate.encoded import Encoded
from scalingnote.evaluate.examples import choose, examples
from scalingnote.evaluate.lineage import Ancestor, lineage, seconds
from scalingnote.evaluate.page import page
from scalingnote.evaluate.pairs import Scorer, aucs, reranked
from scalingnote.evaluate.relaxed import relaxed_recall
from scalingnote.evaluate.report import markdown
from scalingnote.evaluate.retrieval import Rankings
from scalingnote.evaluate.slicing import robustness, slice_queries
from scalingnote.evaluate.test_set import TestSet, load_test_set
from scalingnote.log import Progress, environment, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact, Draft, open_artifact

log = get_logger("evaluate")


def run(
    config: EvaluateConfig,
    *,
    dataset: str,
    embeddings: str,
    index: str,
    dual_encoder: str | None = None,
    student: str | None = None,
    teacher_embeddings: str | None = None,
    bm25_terms: str | None = None,
    output: str,
) -> Artifact:
    """Build the `report` artifact. DataError when no test query has a relevant document.

    A query tower is searched in the embeddings of the documents that it was trained with: `embeddings`, the
    ones that are indexed, or `teacher_embeddings` where the student has a document tower of its own. With
    `bm25_terms` each tower is measured together with BM25, too.
    """
    uris = {"dataset": dataset, "embeddings": embeddings, "index": index, "dual_encoder": dual_encoder}
    uris |= {"student": student, "teacher_embeddings": teacher_embeddings, "bm25_terms": bm25_terms}
    parents = {  # a teacher's embeddings are of the kind of all embeddings
        name: open_artifact(uri, kind=name.removeprefix("teacher_")) for name, uri in uris.items() if uri
    }
    draft = Draft(output, kind="report", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    test = load_test_set(parents["dataset"], judgements=config.qrels)
    baseline = retrieve.baseline(config, parents)
    brought = given.read(config, parents["dataset"], test=test)
    mistyped = test.mistyped(share=config.typos, seed=config.seed) if config.typos else None
    asked = test.and_also(mistyped) if mistyped else test
    ancestors = lineage(parents.values())
    teacher = taught.sample(ancestors, queries=config.distances, seed=config.seed) if student else {}
    towers = {name: parents[kind] for name, kind in retrieve.towers(config, parents).items()}
    texts = {name: [*asked.queries, *brought.queries] for name in towers}
    for one in teacher.values():
        texts[config.names.student] += one.queries
    encoded = encode_queries(towers, texts, config=config)
    bm25 = _words(config, parents)
    found = retrieve.retrieve(config, parents, encoded, bm25, test=asked)
    runs = {name: {q: run[q] for q in test.query_ids} for name, run in found.items()}
    rankings = {
        name: {q: [doc for doc, _ in found] for q, found in run.items()} for name, run in runs.items()
    }
    values = measured.values(config, rankings, qrels=test.qrels)
    sliced = slice_queries(config, parents["dataset"], values, test=test)
    if mistyped:
        sliced["typos"] = robustness(config, found, values, mistyped=mistyped)
    report: dict[str, Any] = {
        **_about(parents, test=test),
        "methods": measured.means(values),
        "index": _index(parents["index"], rankings, served=retrieve.served(config, parents), test=test),
        "significance": measured.significance(config, values, baseline=baseline),
        "slices": sliced,
        "seconds": seconds(ancestors),
        "environment": environment(),
    }
    if student and dual_encoder and config.distances:
        teacher["test"] = encoded[config.names.dual_encoder].some(_drawn(config, test.queries))
    if teacher:
        report["distance"] = taught.told(teacher, encoded[config.names.student])
    entropy = _entropy(config, parents, encoded, ancestors, test=test)
    if entropy:
        report["contrastive_entropy"] = entropy.told()
    scorers = retrieve.scorers(config, parents, encoded, bm25)
    report |= _of_what_is_given(config, brought, scorers, rankings, dataset=parents["dataset"], draft=draft)
    chosen = choose(
        {name: row[f"nDCG@{config.ndcg_at}"] for name, row in values.items()},
        baseline=baseline,
        number=config.examples,
        seed=config.seed,
    )
    shown = examples(parents["dataset"], rankings, chosen, test=test)
    draft.write_bytes("report.html", page(report, examples=shown, ancestors=ancestors).encode())
    draft.write_bytes("report.md", markdown(report).encode())
    draft.write_json("report.json", report)
    beside = {contrastive_entropy.NAME: entropy.values} if entropy else {}
    per_query = measured.table(values, query_ids=test.query_ids, beside=beside)
    draft.write_table("per_query.parquet", per_query)
    _write_runs(draft, runs, qrels=test.qrels, depth=config.run_depth)
    counts = {"documents": report["num_documents"], "queries": report["num_queries"], "methods": len(runs)}
    told = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    log.info("%s: %s", told, fs.join(output, "report.html"))
    return draft.commit(counts=counts | {"queries_without_relevant": test.without_relevant})


def _drawn(config: EvaluateConfig, queries: Sequence[str]) -> list[str]:
    """Test queries to measure distances on: all pairs of them are looked at."""
    chosen = np.random.default_rng(config.seed).permutation(len(queries))[: config.distances]
    return [queries[row] for row in np.sort(chosen)]


def _words(config: EvaluateConfig, parents: Mapping[str, Artifact]) -> retrieve.Words | None:
    if retrieve.with_words(config, parents):
        return retrieve.Words.build(config, parents)
    if config.bm25:
        log.warning("without BM25: it holds all documents, more than %d are too many", config.bm25_documents)
    return None


def _entropy(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, Encoded],
    ancestors: Sequence[Ancestor],
    *,
    test: TestSet,
) -> Entropies | None:
    """Of every query tower, among the documents that it is searched in; None where it is not wanted."""
    if not config.entropy_negatives:
        return None
    return contrastive_entropy.entropies(
        {
            name: retrieve.embeddings_of(kind, parents)
            for name, kind in retrieve.towers(config, parents).items()
        },
        encoded,
        test=test,
        negatives=config.entropy_negatives,
        temperature=contrastive_entropy.temperature_of(ancestors),
        seed=config.seed,
    )


def _of_what_is_given(
    config: EvaluateConfig,
    brought: given.Given,
    scorers: Mapping[str, Scorer],
    rankings: Mapping[str, Rankings],
    *,
    dataset: Artifact,
    draft: Draft,
) -> dict[str, Any]:
    """The report's sections on judged pairs, candidate lists and answers, where a user brought some."""
    found: dict[str, Any] = {}
    if brought.pairs:
        found["auc"] = aucs(brought.pairs, scorers)
    if brought.candidates:
        found["reranking"], runs = reranked(config, *brought.candidates, scorers)
        for name, run in runs.items():
            trec.write_run(draft.path(f"reranked/{name}.trec"), run, tag=f"{name}-reranked")
    if brought.answers:
        found["relaxed"] = relaxed_recall(
            dataset, rankings, answers=brought.answers, recall_at=config.recall_at
        )
    return found


def _write_runs(draft: Draft, runs: Mapping[str, trec.Run], *, qrels: trec.Qrels, depth: int) -> None:
    """Every method's results and the judgements, as TREC's tools read them."""
    trec.write_qrels(draft.path("qrels.trec"), qrels)
    for name, run in runs.items():
        kept = {query_id: found[:depth] for query_id, found in run.items()}
        tag = re.sub(r"[ (+]+", "-", name.replace(")", ""))
        trec.write_run(draft.path(f"runs/{tag}.trec"), kept, tag=tag)


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
    recalls = {f"recall@{k}": ann_recall(approximate, exact, k=k) for k in retrieve.INDEX_RECALL_AT}
    return recalls | {"bytes_per_vector": index.counts["bytes_per_vector"]}


def encode_queries(
    towers: Mapping[str, Artifact], queries: Mapping[str, Sequence[str]], *, config: EvaluateConfig
) -> dict[str, Encoded]:
    """Each query tower's embeddings of its queries, from one Ray actor.

    Not in the driver: on a cluster that often sits on a head node without GPU.
    """
    cluster.check_resources(config.resources.model_copy(update={"workers": 1}), knob="evaluate.resources")
    options = cluster.actor_options(config.resources) | {"max_restarts": 3, "max_task_retries": 3}
    actor: Any = ray.remote(**options)(_QueryTower).remote()
    found: dict[str, Encoded] = {}
    for name, tower in towers.items():
        texts = list(dict.fromkeys(queries[name]))
        starts = range(0, len(texts), retrieve.QUERIES_PER_BLOCK)
        blocks = [
            actor.encode.remote(tower, texts[start : start + retrieve.QUERIES_PER_BLOCK]) for start in starts
        ]
        embeddings: list[ndarray] = []
        with Progress("evaluate", total=len(texts), unit=f"queries encoded by {name}") as progress:
            for block in blocks:
                embeddings.append(ray.get(block))
                progress.advance(len(embeddings[-1]))
        found[name] = Encoded(texts, np.concatenate(embeddings))
    return found


class _QueryTower:
    """A query tower, loaded where Ray has room for it; one after the other."""

    _loaded = ""

    def encode(self, tower: Artifact, queries: list[str]) -> Float[ndarray, "queries dim"]:
        if self._loaded != tower.uri:  # the first of its queries, or the first since a node was lost
            self._encoder, self._loaded = QueryEncoder.load(tower.directory("query")), tower.uri
        return self._encoder.encode_queries(queries)
