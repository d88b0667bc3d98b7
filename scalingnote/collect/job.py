"""The collect stage: a dataset's click log and rankings become triplets, on Ray.

Each step of :mod:`scalingnote.collect.steps` is mapped over its slices or buckets; tables pass between
steps as files in the artifact's work directory, never through the driver. Files rather than Ray Data's
groupby: a retried task overwrites its own, and 600,000 rows on two cores took 2.5 s, against 10-16 s for
``groupby`` of a bucket column or a keyed ``repartition``, and over 20 s for ``groupby("query_id")``, which
calls Python once per query. A step that finished is noted; a killed run goes on with the next one.
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
from scalingnote.collect import actors, steps, summary
from scalingnote.collect.config import BM25Ranker, CollectConfig, CrossEncoderConfig, ScoreTable
from scalingnote.collect.steps import Context, Item
from scalingnote.datasets.trainable import held_out_documents, queries
from scalingnote.errors import DataError, ScalingNoteError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import exchange
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact

log = get_logger("collect")
Step = Callable[[Item, Context], Any]


def run(config: CollectConfig, *, dataset: str, planner: str, output: str) -> Artifact:
    """Build the `triplets` artifact of a dataset. DataError when it cannot give a single triplet."""
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
            f"{dataset} gives no triplet: of {counts['queries']:,} training queries none has a positive "
            f"and {config.num_negatives} hard negatives ({counts['without_negatives']:,} lack negatives)"
        )
    statistics = summary.statistics(context, counts)
    draft.write_json("statistics.json", statistics)
    draft.write_bytes("statistics.md", summary.markdown(statistics).encode())
    artifact = draft.commit(
        counts=dict(sorted(counts.items())),
        # Also where no click is a positive: clicks keep documents from being relevance negatives.
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


def _ranker(config: CollectConfig, dataset: Artifact) -> ScoreTable | BM25Ranker | CrossEncoderConfig | None:
    """Where relevance comes from; DataError when the dataset lacks what the config asks for."""
    if "click" in config.sources and not dataset.table_parts("impressions"):
        raise DataError(f"{dataset.uri} has no impressions: set collect.sources=[relevance]")
    if "relevance" not in config.sources:
        return None
    scored = bool(dataset.table_parts("scores"))
    if isinstance(config.ranker, ScoreTable) and not scored:
        raise DataError(f"{dataset.uri} has no scores: set collect.ranker to bm25 or cross_encoder")
    return config.ranker or (ScoreTable() if scored else BM25Ranker())


def _collect(
    context: Context, draft: Draft, ranker: ScoreTable | BM25Ranker | CrossEncoderConfig | None
) -> Counter[str]:
    """All steps in order; their counts, and each part registered with the draft."""
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
        """Run one step, unless an earlier, killed run finished it; with `notes` only what that one left."""
        note = draft.work(f"done/{name}.json")
        if not fs.exists(note):
            found, left = Counter[str](), items()
            if notes:
                earlier, left = _noted(draft.work(f"done/{name}"), left)
                found.update(earlier)
            for result in _map(name, step, left, shared, *arguments, config=config, unit=unit):
                found.update(result)
            fs.write_bytes(note, json.dumps(found).encode())
        counts.update(json.loads(fs.read_bytes(note)))

    # Clicks matter to both sources: a clicked document is no negative of its query.
    logs = ["impressions", "scores"] if isinstance(ranker, ScoreTable) else ["impressions"]
    each("queries", actors.TakeQueries, partial(_row_groups, dataset, ["queries"]), unit="queries")
    each("evidence", steps.take_evidence, partial(_row_groups, dataset, logs), unit="rows")
    if isinstance(ranker, BM25Ranker | CrossEncoderConfig):
        index = draft.work("bm25")
        if not fs.exists(draft.work("done/rank.json")):
            with tempfile.TemporaryDirectory() as local:
                actors.build_index(context, ranker, local)
                fs.upload(local, index)
        slices = partial(_slices, context)
        each("rank", actors.Ranker, slices, ranker, index, draft.fingerprint, unit="queries", notes=True)
    each("one-hop", steps.one_hop, buckets)
    if config.association:
        each("own-keys", actors.OwnKeys, buckets)
        each("own-filter", steps.own_filter, lambda: [{}])
        each("candidates", steps.candidates, buckets)
        each("associate", steps.associate, buckets)
        each("mutual", steps.mutual, buckets)
        each("lend", steps.lend_bucket, buckets)
    if config.query_generation:
        each("generate", actors.Generate, buckets, config.query_generation, notes=True)
    for result in _map("finish", steps.finish, buckets(), shared, config=config, unit="parts"):
        draft.register(result["name"], Part(**result["part"]))
        counts.update(result["counts"])
    summary.draw_samples(context)
    each("documents", summary.count_documents, buckets)
    each("texts", summary.look_up, partial(_row_groups, dataset, ["documents"]), unit="documents")
    return counts


def _noted(folder: str, items: list[Item]) -> tuple[Counter[str], list[Item]]:
    """What the items said that have a note already, and the others, told where to leave theirs."""
    done = set(fs.list_files(folder))
    found, left = Counter[str](), []
    for item in items:
        name = "-".join(str(item[key]) for key in ("bucket", "start") if key in item) + ".json"
        if name in done:
            found.update(json.loads(fs.read_bytes(fs.join(folder, name))))
        else:
            left.append(item | {"note": fs.join(folder, name)})
    return found, left


def _map(
    name: str,
    step: Step | type,
    items: list[Item],
    shared: Any,
    *arguments: Any,
    config: CollectConfig,
    unit: str,
) -> Iterable[Any]:
    """What `step` (a function, or a class that is loaded once per actor) says of each item, with progress."""
    if not items:
        return
    workers = min(config.resources.workers, len(items))
    rows = ray.data.from_items([{"item": json.dumps(item)} for item in items], override_num_blocks=len(items))
    options: dict[str, Any] = {"num_cpus": config.resources.cpus_per_worker}
    if isinstance(step, type):
        done = rows.map(
            _Actor,  # type: ignore[arg-type]  # Ray's annotation forgets callable classes
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
    return _answer(row, lambda: lambda item: step(item, context))


class _Actor:
    """Holds what a step loads once: a planner, an index, a model.

    It loads at the first row: Ray gives an actor up that fails to start, and its reason with it.
    """

    def __init__(self, step: type, shared: Any, *arguments: Any) -> None:
        self._make, self._shared, self._arguments = step, shared, arguments
        self._step: Callable[[Item], Any] | None = None

    def __call__(self, row: dict[str, str]) -> dict[str, Any]:
        return _answer(row, self._loaded)

    def _loaded(self) -> Callable[[Item], Any]:
        if self._step is None:
            self._step = self._make(ray.get(self._shared), *self._arguments)
        return self._step


def _answer(row: dict[str, str], load: Callable[[], Callable[[Item], Any]]) -> dict[str, Any]:
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
    """One item per row group of the tables' files: bounded, and enough of them to share out."""
    items: list[Item] = []
    for table in tables:
        for name in dataset.table_parts(table):
            with fs.open_input(dataset.file(name)) as file:
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
    """A few hundred queries of one bucket each."""
    items: list[Item] = []
    for bucket in range(context.config.parts):
        rows = exchange.rows_in(context.folder("queries"), bucket)
        for start in range(0, rows, actors.QUERIES_PER_SLICE):
            size = min(actors.QUERIES_PER_SLICE, rows - start)
            items.append({"bucket": bucket, "start": start, "rows": size})
    return items
