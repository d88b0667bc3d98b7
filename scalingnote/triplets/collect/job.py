"""The collect stage on Ray: triplets from a dataset's click log and rankings.

Each step is mapped over slices or buckets. Steps exchange tables as files in the artifact's work directory,
never through the driver. A retried task overwrites its own files, and files are fast: 600,000 rows on two
cores took 2.5 s, but ``groupby`` of a bucket column or a keyed ``repartition`` of Ray Data took 10-16 s, and
``groupby("query_id")``, which calls Python once per query, over 20 s. Every finished item of a step is
recorded; a run after a kill continues with the others.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

from scalingnote.core import cluster
from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Executor, PartStage
from scalingnote.core.reports import render
from scalingnote.datasets.splits import find_held_out, queries
from scalingnote.encode.lexical.words import count_frequencies, language_of
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.shuffle import JsonRecord, named_parts, run_slices, slices
from scalingnote.triplets.collect import ranking, statistics, steps, triplet_parts
from scalingnote.triplets.collect.steps import CollectContext
from scalingnote.triplets.config import (
    AnyRanker,
    BM25Ranker,
    CollectConfig,
    CrossEncoderConfig,
    ScoreTable,
)

log = get_logger("collect")
MAX_BUCKET_ROWS = 1 << 22  # of queries and evidence; each needs about 300 bytes of a task's memory
# A bucket costs several requests in each step, which would dominate the time of small data: there is one
# bucket per SMALL_BUCKET_ROWS rows, up to ENOUGH_BUCKETS, which is enough for the cores of a machine.
SMALL_BUCKET_ROWS, ENOUGH_BUCKETS = 1 << 17, 8
# A function of a numbered item and the context; it returns counts, or a record with "counts".
Step = Callable[..., JsonRecord]


def run(config: CollectConfig, *, dataset: str, planner: str, output: str) -> Artifact:
    """Build the `triplets` artifact of a dataset.

    Args:
        config: sources, negatives, association, split.
        dataset: URI of the dataset.
        planner: URI of the planner with the term scores that associate queries.
        output: URI of the artifact.

    Raises:
        DataError: the dataset lacks evidence that the config requires, or no triplet can be made.
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
    tasks = partial(cluster.map_tasks, resources=config.resources.without_gpus())
    held_out = find_held_out(source, each=tasks)
    context = CollectContext(
        folder=draft.work(),
        buckets=_parts(config, source, ranker),
        config=config,
        dataset=source,
        planner=parents["planner"],
        held_out=held_out["doc_id"].combine_chunks(),
        test_queries=queries(source, "test", each=tasks)["query"].combine_chunks(),
        output=draft.uri,
        language=language_of(source, section="collect") if _ranks(ranker) else "none",
    )
    counts = _collect(context, draft, ranker, tasks)
    counts["held_out_documents"] = len(held_out)
    counts["held_out_by_text"] = len(held_out.filter(held_out["by_text"]))
    if not counts["triplets"]:
        raise DataError(
            f"{dataset} has no triplets: none of {counts['queries']:,} training queries has a positive"
        )
    facts = statistics.summary(context, counts)
    draft.write_json("statistics.json", facts)
    page = statistics.statistics_page(facts)
    draft.write_bytes("statistics.md", render("report.md", page=page).encode())
    artifact = draft.commit(
        counts=dict(sorted(counts.items())),
        # Also without click positives, because clicked documents are excluded from relevance negatives.
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
    """Choose the ranking model of relevance triplets; raise DataError if the dataset lacks evidence."""
    if "click" in config.sources and not dataset.table_parts("impressions"):
        raise DataError(f"{dataset.uri} has no impressions: set collect.sources=[relevance]")
    if "relevance" not in config.sources:
        return None
    scored = bool(dataset.table_parts("scores"))
    if isinstance(config.ranker, ScoreTable) and not scored:
        raise DataError(f"{dataset.uri} has no scores: set collect.ranker to bm25 or cross_encoder")
    return config.ranker or (ScoreTable() if scored else BM25Ranker())


def _ranks(ranker: AnyRanker | None) -> TypeGuard[BM25Ranker | CrossEncoderConfig]:
    """Return whether this stage ranks documents, by their words."""
    return isinstance(ranker, BM25Ranker | CrossEncoderConfig)


def _parts(config: CollectConfig, dataset: Artifact, ranker: AnyRanker | None) -> int:
    """Compute the number of buckets: few for few rows, more than configured if one would be too large."""
    rows = {
        table: sum(dataset.rows_of(dataset.table_parts(table)).values())
        for table in ("queries", "impressions", "scores")
    }
    if _ranks(ranker):
        rows["scores"] = rows["queries"] * config.top_t
    total = sum(rows.values())
    parts = config.parts or min(-(-total // SMALL_BUCKET_ROWS), ENOUGH_BUCKETS)
    return max(parts, -(-total // MAX_BUCKET_ROWS), 1)


def _collect(
    context: CollectContext, draft: Draft, ranker: AnyRanker | None, tasks: Executor
) -> Counter[str]:
    """Run all steps in order and register the parts with the draft; return the counts."""
    config, dataset = context.config, context.dataset
    run = _Steps(context, tasks)
    buckets = range(context.buckets)
    # Both sources need the clicks, because a clicked document is not a negative of its query.
    logs = ["impressions", "scores"] if isinstance(ranker, ScoreTable) else ["impressions"]
    evidence = [(table, parts) for table in logs for parts in slices(dataset, table)]
    run("queries", steps.select_queries, slices(dataset, "queries"), unit="slices")
    run("evidence", steps.take_evidence, evidence, unit="slices")
    if _ranks(ranker):
        _rank(run, context, ranker)
    run("one-hop", steps.one_hop, buckets)
    if config.association:
        run("own-keys", steps.own_keys, buckets, config=config.association)
        run("own-filter", steps.own_filter, [run.counts["own_keys"]])
        run("candidates", steps.candidates, buckets, config=config.association)
        run("associate", steps.associate, buckets, config=config.association)
        run("mutual", steps.mutual, buckets)
        run("transfer", triplet_parts.transfer, buckets)
    if config.query_generation:
        run.on_actors("generate", steps.QueryWriting, buckets, config.query_generation)
    for record in run("finish", triplet_parts.write_part, buckets):
        for name, part in named_parts(record["files"]):
            draft.register(name, part)
    run("documents", statistics.count_documents, buckets)
    run("words", statistics.count_words, slices(dataset, "documents"), unit="slices")
    return run.counts


def _rank(run: "_Steps", context: CollectContext, ranker: BM25Ranker | CrossEncoderConfig) -> None:
    scored = isinstance(ranker, CrossEncoderConfig)
    depth = ranker.candidates if isinstance(ranker, CrossEncoderConfig) else context.config.top_t
    shards = slices(context.dataset, "documents")
    corpus = count_frequencies(
        shards,
        partial(ranking.read_training_words, context=context),
        texts=context.dataset.counts.get("documents", 0),
        most=ranking.MAX_VOCABULARY_WORDS,
        folder=context.path("rank"),
        each=run.tasks,
        section="collect",
    )
    if not corpus.length:
        raise DataError(
            f"{context.dataset.uri}: none of {corpus.texts:,} training documents has a word to index: check "
            "title, topic, content"
        )
    run("shards", ranking.write_shard, shards, unit="shards", corpus=corpus)
    buckets, numbers, size = range(context.buckets), [*range(len(shards))], ranking.SHARDS_PER_SEARCH
    some = [numbers[first : first + size] for first in range(0, len(shards), size)]
    searches = [(bucket, shard_numbers) for shard_numbers in some for bucket in buckets]
    run("search", ranking.search_shards, searches, unit="searches", depth=depth)
    merge = ranking.merge_pairs if scored else ranking.merge_hits
    ranked = run("rank", merge, buckets, depth=depth, shards=shards)
    if isinstance(ranker, CrossEncoderConfig):
        starts = [
            (bucket, start)
            for bucket, counts in enumerate(ranked)
            for start in range(0, counts["ranked"], ranking.SCORED_QUERIES)
        ]
        run.on_actors("score", ranking.PairScoring, starts, ranker, unit="slices of queries")


class _Steps:
    """Runner of steps over items, with the sums of the counts that they return.

    Items of a step that an earlier, killed run recorded are not repeated.
    """

    def __init__(self, context: CollectContext, tasks: Executor) -> None:
        self._context, self.tasks = context, tasks
        self.counts: Counter[str] = Counter()

    def __call__(
        self, name: str, step: Step, items: Sequence[Any], *, unit: str = "buckets", **arguments: Any
    ) -> list[JsonRecord]:
        """Run a step in tasks; return its record of each item."""
        return self._run(name, partial(step, context=self._context, **arguments), items, self.tasks, unit)

    def on_actors(
        self, name: str, step: type, items: Sequence[Any], config: Any, *, unit: str = "buckets"
    ) -> None:
        """Run a step that loads a model, once in each actor."""
        actors = partial(cluster.map_loaded, resources=self._context.config.resources)
        self._run(name, PartStage(partial(step, self._context, config)), items, actors, unit)

    def _run(
        self, name: str, work: Step | PartStage, items: Sequence[Any], each: Executor, unit: str
    ) -> list[JsonRecord]:
        folder = self._context.folder
        records = run_slices(name, work, items, folder=folder, each=each, section="collect", unit=unit)
        for record in records:
            self.counts.update(record.get("counts", record))
        return records
