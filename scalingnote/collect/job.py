"""The collect stage on Ray: triplets from a dataset's click log and rankings.

Each step of :mod:`scalingnote.collect.steps` is mapped over its slices or buckets. Tables pass between steps
as files in the artifact's work directory, never through the driver, because a retried task overwrites its own
files, and because 600,000 rows on two cores took 2.5 s: ``groupby`` of a bucket column or a keyed
``repartition`` of Ray Data took 10-16 s, ``groupby("query_id")``, which calls Python once per query, over
20 s. A file records that a step is done; a run that was killed continues with the next step.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, TaskPoolStrategy

from scalingnote import cluster
from scalingnote.collect import steps, triplet_parts
from scalingnote.collect.buckets import Context, Item
from scalingnote.collect.config import BM25Ranker, CollectConfig, CrossEncoderConfig, ScoreTable
from scalingnote.datasets.splits import held_out_documents, queries
from scalingnote.errors import DataError, ScalingNoteError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact

log = get_logger("collect")
Step = Callable[[Item, Context], Any]
Ranker = ScoreTable | BM25Ranker | CrossEncoderConfig


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
    context = Context(
        config=config,
        dataset=source,
        planner=parents["planner"],
        held_out=held_out_documents(source),
        test_queries=queries(source, "test")["query"].combine_chunks(),
        work=draft.work(),
        output=draft.uri,
    )
    counts = _collect(context, draft, ranker)
    if not counts["triplets"]:
        raise DataError(
            f"{dataset} gives no triplet: none of {counts['queries']:,} training queries has a positive "
            f"and {config.num_negatives} hard negatives ({counts['without_negatives']:,} lack negatives)"
        )
    statistics = triplet_parts.statistics(context, counts)
    draft.write_json("statistics.json", statistics)
    draft.write_bytes("statistics.md", triplet_parts.markdown(statistics).encode())
    artifact = draft.commit(
        counts=dict(sorted(counts.items())),
        # Also without click positives: clicked documents are excluded from relevance negatives.
        simulated_clicks=bool(source.manifest.info.get("simulated_clicks", False)),
        ranking_model=ranker.kind if ranker else None,
    )
    log.info(
        "%s triplets (%s) of %s queries, %s without enough negatives left out, %.1fs -> %s",
        f"{counts['triplets']:,}",
        ", ".join(f"{counts[name]:,} {name}" for name in type(config.mixing).model_fields if counts[name]),
        f"{counts['queries']:,}",
        f"{counts['without_negatives']:,}",
        artifact.manifest.info["seconds"],
        output,
    )
    return artifact


def _ranker(config: CollectConfig, dataset: Artifact) -> Ranker | None:
    """The ranking model of relevance triplets. DataError if the dataset lacks evidence for the config."""
    if "click" in config.sources and not dataset.table_parts("impressions"):
        raise DataError(f"{dataset.uri} has no impressions: set collect.sources=[relevance]")
    if "relevance" not in config.sources:
        return None
    scored = bool(dataset.table_parts("scores"))
    if isinstance(config.ranker, ScoreTable) and not scored:
        raise DataError(f"{dataset.uri} has no scores: set collect.ranker to bm25 or cross_encoder")
    return config.ranker or (ScoreTable() if scored else BM25Ranker())


def _collect(context: Context, draft: Draft, ranker: Ranker | None) -> Counter[str]:
    """Run all steps in order and register the parts with the draft; returns the counts."""
    config, dataset = context.config, context.dataset
    shared = ray.put(context)

    def buckets() -> list[Item]:
        return [{"bucket": number} for number in range(config.parts)]

    counts: Counter[str] = Counter()

    def each(
        name: str,
        step: Step | type,
        items: Callable[[], list[Item]],
        *arguments: Any,
        unit: str = "buckets",
        notes: bool = False,
    ) -> None:
        """Run a step unless an earlier, killed run finished it. `notes` records each item, for slow steps."""
        note = draft.work(f"done/{name}.json")
        if not fs.exists(note):
            step_counts, todo = Counter[str](), items()
            if notes:
                step_counts, todo = _without_done(draft.work(f"done/{name}"), todo)
            for result in _map(name, step, todo, shared, *arguments, config=config, unit=unit):
                step_counts.update(result)
            fs.write_bytes(note, json.dumps(step_counts).encode())
        counts.update(json.loads(fs.read_bytes(note)))

    # Both sources need the clicks: a clicked document is no negative of its query.
    logs = ["impressions", "scores"] if isinstance(ranker, ScoreTable) else ["impressions"]
    each("queries", steps.QuerySelection, partial(_row_groups, dataset, ["queries"]), unit="queries")
    each("evidence", steps.take_evidence, partial(_row_groups, dataset, logs), unit="rows")
    if isinstance(ranker, BM25Ranker | CrossEncoderConfig):
        index = draft.work("bm25")
        if not fs.exists(draft.work("done/rank.json")):
            with tempfile.TemporaryDirectory() as local:
                steps.build_ranking_index(context, ranker, local)
                fs.upload(local, index)
        slices = partial(_slices, context)
        each("rank", steps.Ranking, slices, ranker, index, draft.fingerprint, unit="queries", notes=True)
    each("one-hop", steps.one_hop, buckets)
    if config.association:
        each("own-keys", steps.OwnKeys, buckets)
        each("own-filter", steps.own_filter, lambda: [{}])
        each("candidates", steps.candidates, buckets)
        each("associate", steps.associate, buckets)
        each("mutual", steps.mutual, buckets)
        each("transfer", steps.transfer, buckets)
    if config.query_generation:
        each("generate", steps.QueryWriting, buckets, config.query_generation, notes=True)
    for result in _map("finish", triplet_parts.write_part, buckets(), shared, config=config, unit="parts"):
        draft.register(result["name"], Part(**result["part"]))
        counts.update(result["counts"])
    triplet_parts.draw_samples(context)
    each("documents", triplet_parts.count_documents, buckets)
    each(
        "texts", triplet_parts.read_documents, partial(_row_groups, dataset, ["documents"]), unit="documents"
    )
    return counts


def _without_done(folder: str, items: list[Item]) -> tuple[Counter[str], list[Item]]:
    """Counts of the items with a note in `folder`, and the other items, each with the URI of its note."""
    done = set(fs.list_files(folder))
    counts, todo = Counter[str](), []
    for item in items:
        name = "-".join(str(item[key]) for key in ("bucket", "start") if key in item) + ".json"
        if name in done:
            counts.update(json.loads(fs.read_bytes(fs.join(folder, name))))
        else:
            todo.append(item | {"note": fs.join(folder, name)})
    return counts, todo


def _map(
    name: str,
    step: Step | type,
    items: list[Item],
    shared: Any,
    *arguments: Any,
    config: CollectConfig,
    unit: str,
) -> Iterable[Any]:
    """Results of `step` for each item; a function runs in tasks, a class is loaded once per actor."""
    if not items:
        return
    workers = min(config.resources.workers, len(items))
    rows = ray.data.from_items([{"item": json.dumps(item)} for item in items], override_num_blocks=len(items))
    options: dict[str, Any] = {"num_cpus": config.resources.cpus_per_worker}
    if isinstance(step, type):
        done = rows.map(
            _StepActor,  # type: ignore[arg-type]  # Ray's annotation forgets callable classes
            fn_constructor_args=(step, shared, *arguments),
            compute=ActorPoolStrategy(size=workers),
            num_gpus=config.resources.gpus_per_worker or None,
            **options,
        )
    else:
        task = partial(_task, step=step, shared=shared)
        done = rows.map(task, compute=TaskPoolStrategy(size=workers), **options)
    with Progress(
        "collect", total=sum(item.get("rows", 1) for item in items), unit=f"{unit} ({name})"
    ) as progress:
        for row in cluster.dataset_rows(done):
            progress.advance(row["rows"])
            yield json.loads(row["result"])


def _task(row: dict[str, str], step: Step, shared: Any) -> dict[str, Any]:
    context = ray.get(shared)
    return _run_step(row, lambda: lambda item: step(item, context))


class _StepActor:
    """Holds a step that loads a planner, an index or a model.

    It loads at the first row, because Ray drops the exception of an actor whose constructor fails.
    """

    def __init__(self, step: type, shared: Any, *arguments: Any) -> None:
        self._make, self._shared, self._arguments = step, shared, arguments
        self._step: Callable[[Item], Any] | None = None

    def __call__(self, row: dict[str, str]) -> dict[str, Any]:
        return _run_step(row, self._loaded)

    def _loaded(self) -> Callable[[Item], Any]:
        if self._step is None:
            self._step = self._make(ray.get(self._shared), *self._arguments)
        return self._step


def _run_step(row: dict[str, str], load: Callable[[], Callable[[Item], Any]]) -> dict[str, Any]:
    item = json.loads(row["item"])
    try:
        result = load()(item)
    except ScalingNoteError as error:
        return {"error": cluster.error_column(error)}
    if isinstance(result, tuple):  # a finished part
        name, part, counts = result
        result = {"name": name, "part": asdict(part), "counts": counts}
    if "note" in item:
        fs.write_bytes(item["note"], json.dumps(result).encode())
    return {"rows": item.get("rows", 1), "result": json.dumps(result)}


def _row_groups(dataset: Artifact, tables: list[str]) -> list[Item]:
    """One item per row group of the tables' files: bounded in size, and many enough for all workers."""
    parts = {table: dataset.table_parts(table) for table in tables}
    # Checksums are compared in tasks: the driver reads the parts' footers only.
    for _ in cluster.map_tasks(dataset.file, [name for names in parts.values() for name in names]):
        pass
    items: list[Item] = []
    for table, names in parts.items():
        for name in names:
            with fs.open_input(fs.join(dataset.uri, name)) as file:
                parquet = pq.ParquetFile(file).metadata
            for group in range(parquet.num_row_groups):
                items.append(
                    {
                        "table": table,
                        "uri": fs.join(dataset.uri, name),
                        "group": group,
                        "rows": parquet.row_group(group).num_rows,
                        "slice": f"{table}-{len(items):07d}",
                    }
                )
    return items


def _slices(context: Context) -> list[Item]:
    """Slices of at most QUERIES_PER_SLICE queries of one bucket."""
    items: list[Item] = []
    for bucket in range(context.config.parts):
        rows = shuffle.count_rows(context.folder("queries"), bucket)
        for start in range(0, rows, steps.QUERIES_PER_SLICE):
            size = min(steps.QUERIES_PER_SLICE, rows - start)
            items.append({"bucket": bucket, "start": start, "rows": size})
    return items
