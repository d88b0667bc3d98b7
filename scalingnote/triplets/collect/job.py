"""The collect stage on Ray: triplets from a dataset's click log and rankings.

Each step is mapped over slices or buckets. Tables pass between steps as files in the artifact's work
directory, never through the driver, because a retried task overwrites its own files, and because 600,000 rows
on two cores took 2.5 s: ``groupby`` of a bucket column or a keyed ``repartition`` of Ray Data took 10-16 s,
``groupby("query_id")``, which calls Python once per query, over 20 s. Every finished item of a step is
recorded; a run that was killed continues with the others.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

from scalingnote.core import cluster
from scalingnote.core.config import Resources
from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import PartStage
from scalingnote.core.reports import render
from scalingnote.datasets.splits import find_held_out, queries
from scalingnote.encode.lexical.frequencies import count_frequencies
from scalingnote.encode.lexical.language import language_of
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.shuffle import TaskRunner, named_parts, run_slices, slices
from scalingnote.triplets.collect import steps, triplet_parts
from scalingnote.triplets.collect.config import (
    AnyRanker,
    BM25Ranker,
    CollectConfig,
    CrossEncoderConfig,
    ScoreTable,
)
from scalingnote.triplets.collect.steps import CollectContext, Item

log = get_logger("collect")
MAX_BUCKET_ROWS = 1 << 22  # of queries and evidence, some 300 bytes of a task's memory for each
# A bucket costs each step several requests, on which small data would spend all its time: it gets one for so
# many rows, until there are enough of them for the cores of a machine.
SMALL_BUCKET_ROWS, ENOUGH_BUCKETS = 1 << 17, 8
Step = Callable[..., Any]  # of an item, the context and further arguments


def run(config: CollectConfig, *, dataset: str, planner: str, output: str) -> Artifact:
    """Build the `triplets` artifact of a dataset.

    Args:
        config: sources, negatives, association, split.
        dataset: URI of the dataset.
        planner: URI of the planner whose term scores associate queries.
        output: URI of the artifact.

    Raises:
        DataError: the dataset lacks evidence that the config asks for, or gives no triplet.
    """
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "planner": open_artifact(planner, kind="planner"),
    }
    draft = Draft(output, kind="triplets", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    source = parents["dataset"]
    ranker = _ranker(config, source)
    cluster.check_resources(config.resources, knob="collect.resources")
    tasks = _tasks(config.resources)
    held_out = find_held_out(source, each=tasks)
    context = CollectContext(
        config=config,
        parts=_parts(config, source, ranker),
        dataset=source,
        planner=parents["planner"],
        held_out=held_out["doc_id"].combine_chunks(),
        test_queries=queries(source, "test", each=tasks)["query"].combine_chunks(),
        work=draft.work(),
        output=draft.uri,
        language=language_of(source, section="collect") if _ranks(ranker) else "none",
    )
    counts = _collect(context, draft, ranker)
    counts["held_out_documents"] = len(held_out)
    counts["held_out_by_text"] = len(held_out.filter(held_out["by_text"]))
    if not counts["triplets"]:
        raise DataError(
            f"{dataset} gives no triplet: none of {counts['queries']:,} training queries has a positive"
        )
    statistics = triplet_parts.statistics(context, counts)
    draft.write_json("statistics.json", statistics)
    page = triplet_parts.statistics_page(statistics)
    draft.write_bytes("statistics.md", render("report.md", page=page).encode())
    artifact = draft.commit(
        counts=dict(sorted(counts.items())),
        # Also without click positives: clicked documents are excluded from relevance negatives.
        simulated_clicks=bool(source.manifest.info.get("simulated_clicks", False)),
        ranking_model=ranker.kind if ranker else None,
    )
    log.info(
        "%s triplets (%s) of %s queries, %s short of hard negatives, %.1fs -> %s",
        f"{counts['triplets']:,}",
        ", ".join(f"{counts[name]:,} {name}" for name in type(config.mixing).model_fields if counts[name]),
        f"{counts['queries']:,}",
        f"{counts['short_of_negatives']:,}",
        artifact.manifest.info["seconds"],
        output,
    )
    return artifact


def _ranker(config: CollectConfig, dataset: Artifact) -> AnyRanker | None:
    """The ranking model of relevance triplets. DataError if the dataset lacks evidence for the config."""
    if "click" in config.sources and not dataset.table_parts("impressions"):
        raise DataError(f"{dataset.uri} has no impressions: set collect.sources=[relevance]")
    if "relevance" not in config.sources:
        return None
    scored = bool(dataset.table_parts("scores"))
    if isinstance(config.ranker, ScoreTable) and not scored:
        raise DataError(f"{dataset.uri} has no scores: set collect.ranker to bm25 or cross_encoder")
    return config.ranker or (ScoreTable() if scored else BM25Ranker())


def _ranks(ranker: AnyRanker | None) -> TypeGuard[BM25Ranker | CrossEncoderConfig]:
    """Whether documents are ranked here, by their words."""
    return isinstance(ranker, BM25Ranker | CrossEncoderConfig)


def _parts(config: CollectConfig, dataset: Artifact, ranker: AnyRanker | None) -> int:
    """Number of buckets of queries: few for few rows, more than configured where one is too large."""
    rows = {
        table: sum(dataset.rows_of(dataset.table_parts(table)).values())
        for table in ("queries", "impressions", "scores")
    }
    if _ranks(ranker):
        rows["scores"] = rows["queries"] * config.top_t
    total = sum(rows.values())
    parts = config.parts or min(-(-total // SMALL_BUCKET_ROWS), ENOUGH_BUCKETS)
    return max(parts, -(-total // MAX_BUCKET_ROWS), 1)


def _collect(context: CollectContext, draft: Draft, ranker: AnyRanker | None) -> Counter[str]:
    """Run all steps in order and register the parts with the draft; returns the counts."""
    config, dataset = context.config, context.dataset
    run = _Steps(context)
    buckets: list[Item] = [{"bucket": number} for number in range(context.parts)]
    # Both sources need the clicks: a clicked document is no negative of its query.
    logs = ["impressions", "scores"] if isinstance(ranker, ScoreTable) else ["impressions"]
    run("queries", steps.QuerySelection, steps.dataset_slices(dataset, "queries"), unit="slices")
    run("evidence", steps.take_evidence, steps.dataset_slices(dataset, *logs), unit="slices")
    if _ranks(ranker):
        _rank(run, context, ranker)
    run("one-hop", steps.one_hop, buckets)
    if config.association:
        run("own-keys", steps.OwnKeys, buckets, config.association)
        run("own-filter", steps.own_filter, [{"keys": run.counts["own_keys"]}])
        run("candidates", steps.candidates, buckets, config.association)
        run("associate", steps.associate, buckets, config.association)
        run("mutual", steps.mutual, buckets)
        run("transfer", triplet_parts.transfer, buckets)
    if config.query_generation:
        run("generate", steps.QueryWriting, buckets, config.query_generation)
    for record in run.records("finish", triplet_parts.write_part, buckets):
        for name, part in named_parts(record["files"]):
            draft.register(name, part)
        run.counts.update(record["counts"])
    run("sample", triplet_parts.draw_samples, [{}])
    run("documents", triplet_parts.count_documents, buckets)
    run("texts", triplet_parts.read_documents, steps.dataset_slices(dataset, "documents"), unit="slices")
    return run.counts


def _rank(run: "_Steps", context: CollectContext, ranker: BM25Ranker | CrossEncoderConfig) -> None:
    """Rank the training documents for every query."""
    scored = isinstance(ranker, CrossEncoderConfig)
    depth = ranker.candidates if isinstance(ranker, CrossEncoderConfig) else context.config.top_t
    shards = slices(context.dataset, "documents")
    corpus = count_frequencies(
        shards,
        partial(steps.read_training_words, context=context),
        texts=context.dataset.counts.get("documents", 0),
        most=steps.MAX_VOCABULARY_WORDS,
        folder=context.path("rank"),
        each=run.tasks,
        section="collect",
    )
    if not corpus.length:
        raise DataError(
            f"{context.dataset.uri}: none of {corpus.texts:,} training documents has a word to index: check "
            "title, topic, content"
        )
    numbered: list[Item] = [{"shard": number, "parts": parts} for number, parts in enumerate(shards)]
    run("shards", steps.write_shard, numbered, corpus, unit="shards")
    size = steps.PAIR_GROUP_QUERIES if scored else steps.GROUP_QUERIES
    buckets: list[Item] = [{"bucket": number} for number in range(context.parts)]
    queries = run.records("groups", steps.write_groups, buckets, size)
    groups = steps.groups(queries, size)
    numbers = range(len(shards))
    searches: list[Item] = [
        group | {"shards": [*numbers[first : first + steps.SHARDS_PER_SEARCH]]}
        for first in range(0, len(shards), steps.SHARDS_PER_SEARCH)
        for group in groups
    ]
    run("search", steps.search_shards, searches, depth, unit="searches")
    merge = steps.merge_pairs if scored else steps.merge_hits
    run("rank", merge, groups, depth, shards, unit="groups of queries")
    if scored:
        pairs = steps.groups(queries, steps.SCORED_QUERIES)
        run("score", steps.PairScoring, pairs, ranker, unit="slices of queries")


class _Steps:
    """Runs steps: a function in tasks, a class, which loads something, in actors. Adds up their counts."""

    def __init__(self, context: CollectContext) -> None:
        self._context, self._resources = context, context.config.resources
        self.tasks = _tasks(self._resources)
        self.counts: Counter[str] = Counter()

    def __call__(
        self, name: str, step: Step | type, items: Sequence[Item], *arguments: Any, unit: str = "buckets"
    ) -> None:
        """Run a step that returns counts for each item."""
        for counts in self.records(name, step, items, *arguments, unit=unit):
            self.counts.update(counts)

    def records(
        self, name: str, step: Step | type, items: Sequence[Item], *arguments: Any, unit: str = "buckets"
    ) -> list[Any]:
        """Results of a step for each item; those that an earlier, killed run recorded are not repeated."""
        task: PartStage | Callable[[tuple[int, Item]], Any] = partial(
            _call, step=step, context=self._context, arguments=arguments
        )
        each = self.tasks
        if isinstance(step, type):
            task = PartStage(partial(_load, step, self._context, arguments))
            each = partial(cluster.map_loaded, resources=self._resources)
        work = self._context.work
        return run_slices(name, task, items, folder=work, each=each, section="collect", unit=unit)


def _tasks(resources: Resources) -> TaskRunner:
    """Runs tasks, which need no GPU."""
    return partial(cluster.map_tasks, resources=resources.without_gpus())


def _load(step: type, context: CollectContext, arguments: Sequence[Any]) -> Callable[[tuple[int, Item]], Any]:
    work = step(context, *arguments)
    return lambda item: work(item[1])


def _call(item: tuple[int, Item], *, step: Step, context: CollectContext, arguments: Sequence[Any]) -> Any:
    return step(item[1], context, *arguments)
