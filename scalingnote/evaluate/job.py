"""The evaluate stage, which runs test queries through every retrieval method and writes one report.

Tasks read the parts of the pool and search them; this process holds queries, their judgements and results.
Every task writes a table to the work directory: a run after a kill repeats only tasks without a table.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import pyarrow as pa

from scalingnote.core import cluster
from scalingnote.core.errors import ConfigError
from scalingnote.core.log import Progress, environment, get_logger
from scalingnote.core.parts import Executor, PartStage
from scalingnote.core.reports import render
from scalingnote.datasets.passages import settings
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate import tower_measures
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.measures import (
    MeasureValues,
    Rankings,
    ann_recall,
    means,
    measure_methods,
    per_query_table,
    rankings_of,
    significance_section,
)
from scalingnote.evaluate.report import Ancestor, latest, lineage, report_page, seconds, usage
from scalingnote.evaluate.retrieval_methods import (
    INDEX_RECALL_AT,
    QUERIES_PER_SEARCH,
    RUN_DEPTH,
    Methods,
    count_bm25,
    pair_scorer,
    retrieve,
)
from scalingnote.evaluate.test_set import QueryEmbeddings, TestSet, load_test_set, typo_slices
from scalingnote.evaluate.user_files import (
    PairScoreFunction,
    UserFiles,
    auc_section,
    read_user_files,
    relaxed_recall,
    reranking_section,
)
from scalingnote.storage import arrow, trec
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table, write_table

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

    Each query tower searches the document embeddings with which it was trained.

    Args:
        config: depths, methods, and optional files with judgements, candidates and answers.
        dataset: URI of queries, judgements and documents.
        embeddings: URI of the indexed document embeddings.
        index: URI of the index that the served query tower searches.
        dual_encoder: URI of the dual encoder of stage I.
        student: URI of the distilled query tower.
        teacher_embeddings: URI of the dual encoder's document embeddings, if `embeddings` are those of a
            student's document tower.
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
    sizes = ", ".join(f"{counts[name]:,} {name}" for name in ("documents", "queries", "methods"))
    log.info("%s: %s", sizes, fs.join(output, "report.html"))
    return draft.commit(counts=counts)


def _evaluate(config: EvaluateConfig, parents: Mapping[str, Artifact], draft: Draft) -> dict[str, int]:
    """Retrieve, measure and write all files; return the counts of the artifact."""
    # All settings and files of the user are checked before the first query is encoded.
    has_passages = _is_divided(config, parents["dataset"])
    each = RecordedTasks(draft.work("passes"), cluster.map_tasks)
    methods = Methods(config, parents, each)
    baseline = methods.baseline
    test = load_test_set(parents["dataset"], judgements=config.qrels, each=each)
    files = read_user_files(config, parents["dataset"], test=test, each=each)
    with_typos = test.with_typos(share=config.typos) if config.typos else None
    queries = test.together_with(with_typos) if with_typos else test
    ancestors = lineage(parents.values())
    texts = [*queries.queries, *files.queries]
    encoded, teacher = _encode(methods, ancestors, texts, test=test, keep=each)

    bm25 = count_bm25(methods, texts, test=queries)
    runs, searched_count = retrieve(methods, encoded, bm25, test=queries)
    rankings = rankings_of(runs, test.query_ids)
    recall_at = config.recall_at
    values = measure_methods(rankings, qrels=test.qrels, recall_at=recall_at)
    typos = typo_slices(runs, values, with_typos=with_typos, recall_at=recall_at) if with_typos else None
    report: dict[str, Any] = {
        **_about(parents, searched_count, test=test),
        "methods": means(values),
        "queries_per_core_second": {
            name: 1 / one.core_seconds for name, one in encoded.items() if one.core_seconds
        },
        "index": _index_section(methods, rankings, test=test, searched=searched_count),
        "significance": significance_section(values, baseline=baseline),
        "slices": {"typos": typos} if typos else {},
        "seconds": seconds(ancestors),
        "usage": usage(ancestors),
        "environment": environment(),
    }
    if teacher:
        report["distance"] = tower_measures.distance_section(teacher, encoded[config.names.student])
    entropy, entropies = _entropy(methods, encoded, ancestors, test=test)
    if entropy:
        report["contrastive_entropy"] = entropy
    score = pair_scorer(methods, encoded, bm25)
    if not has_passages:
        report |= _user_file_sections(methods, files, score, rankings, draft=draft)

    page = report_page(report, ancestors)
    for name in ("report.html", "report.md"):
        draft.write_bytes(name, render(name, page=page).encode())
    draft.write_json("report.json", report)
    draft.write_table("per_query.parquet", per_query_table(values, entropies, query_ids=test.query_ids))
    _write_runs(draft, runs, qrels=test.qrels)
    return {
        "documents": report["num_documents"],
        "queries": len(test.query_ids),
        "methods": len(runs),
        "queries_without_relevant": test.without_relevant,
    }


def _is_divided(config: EvaluateConfig, dataset: Artifact) -> bool:
    """Return whether rows are passages; raise a ConfigError if there are files on complete documents then."""
    has_passages = settings(dataset) is not None
    files = [name for name in ("judgements", "candidates", "answers") if getattr(config, name) is not None]
    if has_passages and files:
        raise ConfigError(
            f"evaluate.{files[0]} refers to complete documents, but the index has passages: leave it out"
        )
    return has_passages


def _encode(
    methods: Methods,
    ancestors: Sequence[Ancestor],
    queries: Sequence[str],
    *,
    test: TestSet,
    keep: "RecordedTasks",
) -> tuple[dict[str, QueryEmbeddings], dict[str, QueryEmbeddings]]:
    """Encode queries by every tower, and return the teacher's embeddings by split for the comparison."""
    config, parents = methods.config, methods.parents
    towers = {name: parents[kind] for name, kind in methods.towers.items()}
    texts = {name: list(queries) for name in towers}
    teacher = {}
    has_comparison = config.tower_measures and "student" in parents
    if has_comparison:
        teacher = tower_measures.sample_teacher_queries(latest(ancestors, "query_embeddings"))
    for sample in teacher.values():
        texts[config.names.student] += sample.queries
    encoded = encode_queries(towers, texts, config=config, keep=keep)
    if has_comparison and "dual_encoder" in parents:
        order = np.random.default_rng(0).permutation(len(test.queries))
        rows = np.sort(order[: tower_measures.DISTANCE_QUERIES])
        dual = encoded[config.names.dual_encoder]
        teacher["test"] = dual.subset([test.queries[row] for row in rows])
    return encoded, teacher


def _entropy(
    methods: Methods, encoded: Mapping[str, QueryEmbeddings], ancestors: Sequence[Ancestor], *, test: TestSet
) -> tuple[dict[str, Any], MeasureValues]:
    """Compute contrastive entropy of every query tower, for the report and per query; empty if disabled."""
    # It compares a query with its relevant documents, but judgements do not state the relevant passage.
    if not methods.config.tower_measures or settings(methods.parents["dataset"]) is not None:
        return {}, {}
    return tower_measures.entropies(
        {name: methods.parents[methods.pool_of(kind)] for name, kind in methods.towers.items()},
        encoded,
        test=test,
        temperature=tower_measures.temperature_of(latest(ancestors, "dual_encoder")),
        each=methods.each,
    )


def _user_file_sections(
    methods: Methods,
    files: UserFiles,
    score: PairScoreFunction,
    rankings: Mapping[str, Rankings],
    *,
    draft: Draft,
) -> dict[str, Any]:
    """Build the sections of the report on judged pairs, candidates and answers, if there are such files."""
    sections: dict[str, Any] = {}
    if files.pairs:
        sections["auc"] = auc_section(files.pairs, score)
    recall_at = methods.config.recall_at
    if files.candidates:
        sections["reranking"], runs = reranking_section(*files.candidates, score, recall_at=recall_at)
        for name, run in runs.items():
            trec.write_run(draft.path(f"reranked/{name}.trec"), run, tag=f"{name}-reranked")
    if files.answers:
        sections["relaxed"] = relaxed_recall(
            methods.parents["dataset"],
            rankings,
            answers=files.answers,
            recall_at=recall_at,
            each=methods.each,
        )
    return sections


def _write_runs(draft: Draft, runs: Mapping[str, trec.Run], *, qrels: trec.Qrels) -> None:
    """Write the judgements, and the results of every method for the judged queries, in TREC's formats."""
    trec.write_qrels(draft.path("qrels.trec"), qrels)
    for name, run in runs.items():
        tag = re.sub(r"[ (+]+", "-", name.replace(")", ""))
        best = {query_id: run[query_id][:RUN_DEPTH] for query_id in qrels}
        trec.write_run(draft.path(f"runs/{tag}.trec"), best, tag=tag)


def _about(parents: Mapping[str, Artifact], searched: int, *, test: TestSet) -> dict[str, Any]:
    """Describe the data set; include the number of documents of exact search if they are a sample."""
    dataset, documents = parents["dataset"], parents["embeddings"].counts["documents"]
    about: dict[str, Any] = {
        "dataset": str(dataset.manifest.config.get("name", dataset.uri.rstrip("/").rsplit("/", 1)[-1])),
        "num_documents": documents,
        "num_queries": len(test.query_ids),
        "simulated_clicks": bool(dataset.manifest.info.get("simulated_clicks", False)),
    }
    return about | ({"sample": {"documents": searched}} if searched < documents else {})


def _index_section(
    methods: Methods, rankings: Mapping[str, Rankings], *, test: TestSet, searched: int
) -> dict[str, int | float]:
    """Return the size of the index, and its recall against exact search if this covered all documents."""
    size: dict[str, int | float] = {"bytes_per_vector": methods.parents["index"].counts["bytes_per_vector"]}
    if searched < methods.parents["embeddings"].counts["documents"]:
        return size
    names = (f"{methods.served} (index)", methods.served)
    approximate, exact = ([rankings[name][q] for q in test.query_ids] for name in names)
    return {f"recall@{k}": ann_recall(approximate, exact, k=k) for k in INDEX_RECALL_AT} | size


class RecordedTasks:
    """Runner of tasks that return tables, which stores the tables and never repeats a finished task.

    Passes are identified by their number, because a repeated stage makes the same passes in the same order.
    """

    def __init__(self, folder: str, each: Executor) -> None:
        self._folder, self._each, self._passes = folder, each, count()

    def __call__(
        self,
        task: PartStage | Callable[[Any], pa.Table],
        items: Iterable[Any],
        *,
        each: Executor | None = None,
    ) -> Iterator[pa.Table]:
        """Return the tables of all items, in any order; `each` runs the tasks that have no table yet."""
        folder = fs.join(self._folder, f"{next(self._passes):03d}")
        finished = fs.list_files(folder)
        item_of = {f"{number:05d}.arrow": item for number, item in enumerate(items)}
        todo = [(fs.join(folder, name), item) for name, item in item_of.items() if name not in finished]
        if finished:
            log.info("resuming: %d of %d tasks of a pass are done", len(finished), len(item_of))
        store = PartStage(partial(_load, task)) if isinstance(task, PartStage) else partial(_keep, task=task)
        new = (each or self._each)(store, todo) if todo else ()
        return map(read_table, chain((fs.join(folder, name) for name in finished), new))


def _load(stage: PartStage) -> Callable[[tuple[str, Any]], str]:
    return partial(_keep, task=stage.start())


def _keep(item: tuple[str, Any], *, task: Callable[[Any], pa.Table]) -> str:
    """Run a task, write its table atomically, and return the URI of the table."""
    uri, task_item = item
    write_table(uri, task(task_item).combine_chunks())
    return uri


def encode_queries(
    towers: Mapping[str, Artifact],
    queries: Mapping[str, Sequence[str]],
    *,
    config: EvaluateConfig,
    keep: Callable[..., Iterable[pa.Table]],
) -> dict[str, QueryEmbeddings]:
    """Encode queries by each query tower in an actor; `keep` runs the tasks and stores their tables.

    The driver does not encode, because on a cluster it often runs on a head node without GPU.
    """
    resources = config.resources.model_copy(update={"workers": 1})
    cluster.check_resources(resources, knob="evaluate.resources")
    encoded: dict[str, QueryEmbeddings] = {}
    for name, tower in towers.items():
        texts = list(dict.fromkeys(queries[name]))
        starts = range(0, len(texts), QUERIES_PER_SEARCH)
        blocks = [texts[start : start + QUERIES_PER_SEARCH] for start in starts]
        on_actor = partial(cluster.map_loaded, resources=resources)
        tables = []
        with Progress("evaluate", total=len(texts), unit=f"queries encoded by {name}") as progress:
            for table in keep(PartStage(partial(_BlockEncoder, tower)), blocks, each=on_actor):
                tables.append(table)
                progress.advance(len(table))
        encoded_table = pa.concat_tables(tables)
        core_seconds = float(np.median(encoded_table["seconds"])) * max(config.resources.cpus_per_worker, 1)
        encoded[name] = QueryEmbeddings(
            encoded_table["query"].to_pylist(), arrow.to_numpy(encoded_table["embedding"]), core_seconds
        )
    return encoded


class _BlockEncoder:
    """Encoder of blocks of queries, in an actor."""

    def __init__(self, tower: Artifact) -> None:
        self._encoder = QueryEncoder(tower.directory("query"))

    def __call__(self, queries: list[str]) -> pa.Table:
        start = time.perf_counter()
        embeddings = arrow.to_arrow(self._encoder.encode_queries(queries))
        seconds = np.full(len(queries), (time.perf_counter() - start) / len(queries))
        return pa.table({"query": queries, "embedding": embeddings, "seconds": seconds})
