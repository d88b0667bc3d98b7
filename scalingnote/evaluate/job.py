"""The evaluate stage: test queries through every retrieval method over the whole pool, into one report.

The pool is searched in tasks that read its parts; this process holds queries, judgements and results.
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
from scalingnote.evaluate import contrastive_entropy, retrieval_methods
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.contrastive_entropy import Entropies
from scalingnote.evaluate.lineage import Ancestor, lineage, seconds, usage
from scalingnote.evaluate.measures import (
    Rankings,
    ann_recall,
    means,
    measure_methods,
    per_query_table,
    significance_section,
)
from scalingnote.evaluate.page import choose_queries, example_queries, page
from scalingnote.evaluate.query_embeddings import QueryEmbeddings
from scalingnote.evaluate.report import markdown
from scalingnote.evaluate.retrieval_methods import QUERIES_PER_BLOCK
from scalingnote.evaluate.teacher_distance import distance_section, sample_teacher_queries
from scalingnote.evaluate.test_set import TestSet, load_test_set, slice_queries, typo_slices
from scalingnote.evaluate.user_files import (
    PairScorer,
    UserFiles,
    auc_section,
    read_user_files,
    relaxed_recall,
    reranking_section,
)
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
    """Build the `report` artifact.

    Each query tower is searched in the document embeddings it was trained with.

    Args:
        config: measures, their depths, and optional files with judgements, candidates and answers.
        dataset: URI of queries, judgements and documents.
        embeddings: URI of the indexed document embeddings.
        index: URI of the index that the served query tower is searched through.
        dual_encoder: URI of stage I's towers.
        student: URI of the distilled query tower.
        teacher_embeddings: URI of the dual encoder's document embeddings, if `embeddings` are a student's
            own.
        bm25_terms: URI of BM25's document weights: each tower is then also measured as a hybrid with BM25.
        output: URI of the artifact.

    Raises:
        DataError: no test query has a relevant document.
    """
    uris = {"dataset": dataset, "embeddings": embeddings, "index": index, "dual_encoder": dual_encoder}
    uris |= {"student": student, "teacher_embeddings": teacher_embeddings, "bm25_terms": bm25_terms}
    parents = {  # teacher_embeddings are an artifact of kind embeddings
        name: open_artifact(uri, kind=name.removeprefix("teacher_")) for name, uri in uris.items() if uri
    }
    draft = Draft(output, kind="report", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    counts = _evaluate(config, parents, draft)
    counted = ", ".join(f"{counts[name]:,} {name}" for name in ("documents", "queries", "methods"))
    log.info("%s: %s", counted, fs.join(output, "report.html"))
    return draft.commit(counts=counts)


def _evaluate(config: EvaluateConfig, parents: Mapping[str, Artifact], draft: Draft) -> dict[str, int]:
    """Retrieve, measure and write all files; returns the artifact's counts."""
    # Everything a user can get wrong is checked before the first query is encoded.
    test = load_test_set(parents["dataset"], judgements=config.qrels)
    baseline = retrieval_methods.baseline_method(config, parents)
    files = read_user_files(config, parents["dataset"], test=test)
    with_typos = test.with_typos(share=config.typos, seed=config.seed) if config.typos else None
    queries = test.together_with(with_typos) if with_typos else test
    ancestors = lineage(parents.values())
    encoded, teacher = _encode(config, parents, ancestors, [*queries.queries, *files.queries], test=test)

    asked, each = [*queries.queries, *files.queries], cluster.map_tasks
    bm25 = retrieval_methods.count_bm25(config, parents, asked, test=queries, each=each)
    all_runs, searched = retrieval_methods.retrieve(config, parents, encoded, bm25, test=queries, each=each)
    runs = {name: {q: run[q] for q in test.query_ids} for name, run in all_runs.items()}
    rankings = {name: {q: [doc for doc, _ in run[q]] for q in run} for name, run in runs.items()}
    values = measure_methods(config, rankings, qrels=test.qrels)
    slices = slice_queries(config, parents["dataset"], values, test=test, each=each)
    if with_typos:
        slices["typos"] = typo_slices(config, all_runs, values, with_typos=with_typos)
    report: dict[str, Any] = {
        **_about(parents, searched, test=test),
        "methods": means(values),
        "index": _index_section(
            config, parents, rankings, test=test, sampled=searched < parents["embeddings"].counts["documents"]
        ),
        "significance": significance_section(config, values, baseline=baseline),
        "slices": slices,
        "seconds": seconds(ancestors),
        "usage": usage(ancestors),
        "environment": environment(),
    }
    if teacher:
        report["distance"] = distance_section(teacher, encoded[config.names.student])
    entropy = _entropy(config, parents, encoded, ancestors, test=test)
    if entropy:
        report["contrastive_entropy"] = entropy.section()
    score = retrieval_methods.pair_scorer(config, parents, encoded, bm25, each=each)
    report |= _user_file_sections(config, files, score, rankings, dataset=parents["dataset"], draft=draft)

    ndcg = {name: row[f"nDCG@{config.ndcg_at}"] for name, row in values.items()}
    chosen = choose_queries(ndcg, baseline=baseline, number=config.examples, seed=config.seed)
    examples = example_queries(parents["dataset"], rankings, chosen, test=test, each=each)
    draft.write_bytes("report.html", page(report, examples=examples, ancestors=ancestors).encode())
    draft.write_bytes("report.md", markdown(report).encode())
    draft.write_json("report.json", report)
    further = {contrastive_entropy.NAME: entropy.values} if entropy else {}
    draft.write_table("per_query.parquet", per_query_table(values, query_ids=test.query_ids, further=further))
    _write_runs(draft, runs, qrels=test.qrels, depth=config.run_depth)
    counts = {"documents": report["num_documents"], "queries": len(test.query_ids), "methods": len(runs)}
    return counts | {"queries_without_relevant": test.without_relevant}


def _encode(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    ancestors: Sequence[Ancestor],
    queries: Sequence[str],
    *,
    test: TestSet,
) -> tuple[dict[str, QueryEmbeddings], dict[str, QueryEmbeddings]]:
    """Embeddings of queries by every tower, and the teacher's by split, to compare the student with."""
    towers = {name: parents[kind] for name, kind in retrieval_methods.tower_kinds(config, parents).items()}
    texts = {name: list(queries) for name in towers}
    teacher = {}
    if "student" in parents:
        teacher = sample_teacher_queries(ancestors, queries=config.distances, seed=config.seed)
    for sample in teacher.values():
        texts[config.names.student] += sample.queries
    encoded = encode_queries(towers, texts, config=config)
    if "student" in parents and "dual_encoder" in parents and config.distances:
        teacher["test"] = encoded[config.names.dual_encoder].subset(_sample(config, test.queries))
    return encoded, teacher


def _sample(config: EvaluateConfig, queries: Sequence[str]) -> list[str]:
    """Test queries on which distances are measured; a sample, because all pairs of them are compared."""
    chosen = np.random.default_rng(config.seed).permutation(len(queries))[: config.distances]
    return [queries[row] for row in np.sort(chosen)]


def _entropy(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    encoded: Mapping[str, QueryEmbeddings],
    ancestors: Sequence[Ancestor],
    *,
    test: TestSet,
) -> Entropies | None:
    """Contrastive entropy of every query tower; None if it is switched off."""
    if not config.entropy_negatives:
        return None
    towers = retrieval_methods.tower_kinds(config, parents)
    return contrastive_entropy.entropies(
        {name: parents[retrieval_methods.pool_of(kind, parents)] for name, kind in towers.items()},
        encoded,
        test=test,
        negatives=config.entropy_negatives,
        temperature=contrastive_entropy.temperature_of(ancestors),
        seed=config.seed,
        each=cluster.map_tasks,
    )


def _user_file_sections(
    config: EvaluateConfig,
    files: UserFiles,
    score: PairScorer,
    rankings: Mapping[str, Rankings],
    *,
    dataset: Artifact,
    draft: Draft,
) -> dict[str, Any]:
    """The report's sections on judged pairs, candidates and answers, as far as there are such files."""
    sections: dict[str, Any] = {}
    if files.pairs:
        sections["auc"] = auc_section(files.pairs, score)
    if files.candidates:
        sections["reranking"], runs = reranking_section(config, *files.candidates, score)
        for name, run in runs.items():
            trec.write_run(draft.path(f"reranked/{name}.trec"), run, tag=f"{name}-reranked")
    if files.answers:
        sections["relaxed"] = relaxed_recall(
            dataset,
            rankings,
            answers=files.answers,
            recall_at=config.recall_at,
            each=cluster.map_tasks,
        )
    return sections


def _write_runs(draft: Draft, runs: Mapping[str, trec.Run], *, qrels: trec.Qrels, depth: int) -> None:
    """Write every method's results and the judgements in TREC's formats."""
    trec.write_qrels(draft.path("qrels.trec"), qrels)
    for name, run in runs.items():
        tag = re.sub(r"[ (+]+", "-", name.replace(")", ""))
        best = {query_id: results[:depth] for query_id, results in run.items()}
        trec.write_run(draft.path(f"runs/{tag}.trec"), best, tag=tag)


def _about(parents: Mapping[str, Artifact], searched: int, *, test: TestSet) -> dict[str, Any]:
    """What was evaluated; with the number of documents of exact search where these are a sample."""
    dataset, documents = parents["dataset"], parents["embeddings"].counts["documents"]
    about = {
        "dataset": str(dataset.manifest.config.get("name", dataset.uri.rstrip("/").rsplit("/", 1)[-1])),
        "num_documents": documents,
        "num_queries": len(test.query_ids),
        "simulated_clicks": bool(dataset.manifest.info.get("simulated_clicks", False)),
    }
    return about | ({"sample": {"documents": searched}} if searched < documents else {})


def _index_section(
    config: EvaluateConfig,
    parents: Mapping[str, Artifact],
    rankings: Mapping[str, Rankings],
    *,
    test: TestSet,
    sampled: bool,
) -> dict[str, int | float]:
    """Size of the index, and its recall against exact search, unless this covered a sample only."""
    size: dict[str, int | float] = {"bytes_per_vector": parents["index"].counts["bytes_per_vector"]}
    if sampled:
        return size
    served = retrieval_methods.served_method(config, parents)
    exact, approximate = (
        [rankings[name][q] for q in test.query_ids] for name in (served, f"{served} (index)")
    )
    recalls = {f"recall@{k}": ann_recall(approximate, exact, k=k) for k in retrieval_methods.INDEX_RECALL_AT}
    return recalls | size


def encode_queries(
    towers: Mapping[str, Artifact], queries: Mapping[str, Sequence[str]], *, config: EvaluateConfig
) -> dict[str, QueryEmbeddings]:
    """Each query tower's embeddings of its queries, computed by one Ray actor.

    The driver does not encode, because on a cluster it often runs on a head node without GPU.
    """
    cluster.check_resources(config.resources.model_copy(update={"workers": 1}), knob="evaluate.resources")
    options = cluster.actor_options(config.resources) | {"max_restarts": 3, "max_task_retries": 3}
    actor: Any = ray.remote(**options)(_QueryTowerActor).remote()
    encoded: dict[str, QueryEmbeddings] = {}
    for name, tower in towers.items():
        texts = list(dict.fromkeys(queries[name]))
        starts = range(0, len(texts), QUERIES_PER_BLOCK)
        blocks = [actor.encode.remote(tower, texts[start : start + QUERIES_PER_BLOCK]) for start in starts]
        embeddings: list[ndarray] = []
        with Progress("evaluate", total=len(texts), unit=f"queries encoded by {name}") as progress:
            for block in blocks:
                embeddings.append(ray.get(block))
                progress.advance(len(embeddings[-1]))
        encoded[name] = QueryEmbeddings(texts, np.concatenate(embeddings))
    return encoded


class _QueryTowerActor:
    """Ray actor that holds one query tower at a time."""

    _loaded = ""

    def encode(self, tower: Artifact, queries: list[str]) -> Float[ndarray, "queries dim"]:
        if self._loaded != tower.uri:  # a new tower, or the actor was restarted
            self._encoder, self._loaded = QueryEncoder.load(tower.directory("query")), tower.uri
        return self._encoder.encode_queries(queries)
