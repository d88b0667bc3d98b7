"""The report on an experiment: access logs, and what users said and did, in; an `experiment` artifact out.

    logs ─► requests of the experiment ─► sums per unit ─────────────────┐
                     └─► a sample ─► pairs ─judge, on Ray─► sums per unit ─┴─► comparisons ─► report

Logs are streamed: what stays in memory is a row per unit, a latency per request and the sample.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray.data

from scalingnote import cluster
from scalingnote.collect.config import BM25Ranker
from scalingnote.config import Resources
from scalingnote.datasets.quarantine import Quarantine
from scalingnote.datasets.rows import files as local_files
from scalingnote.errors import ConfigError, DataError, ScalingNoteError
from scalingnote.experiment import access_log, comparison, judge, outcomes, relevance, report, signals
from scalingnote.experiment.config import AnyJudge, DualPooledJudge, ExperimentConfig, Relevance
from scalingnote.experiment.page import page
from scalingnote.experiment.requests import Sample, Selection
from scalingnote.log import Progress, environment, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, fingerprint, open_artifact, write_table

log = get_logger("compare")
PAIRS_PER_BLOCK = 2048
Read = tuple[outcomes.Outcomes, Sample | None, dict[str, Any]]  # the last is part of the report


def run(config: ExperimentConfig, *, dataset: str, output: str) -> Artifact:
    """Build the artifact below the folder `output`, named by config and contents of the logs.

    DataError when the log has no request of the experiment, or a file is missing.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset")}
    logs = _checked(config, parents["dataset"])
    config = config.model_copy(update={"inputs_sha256": _checksums(config, logs)})
    place = fs.absolute(fs.join(output, fingerprint("experiment", config, parents)[:12]))
    draft = Draft(place, kind="experiment", config=config, parents=parents)
    if draft.finished:
        log.info("finished before: %s", place)
        return draft.existing()
    if config.relevance:
        cluster.connect()
        cluster.check_resources_early(config.resources.model_copy(update={"workers": 1}), knob="resources")
    quarantine = Quarantine()
    found, sample, requests = _read(config, logs, quarantine)
    units = found.units()
    judged: dict[str, Any] | None = None
    if sample is not None and config.relevance is not None:
        drawn = sample.table()
        scores = _judge(config, drawn, parents["dataset"], draft)
        by_unit = relevance.by_unit(
            drawn, scores, below=config.relevance.irrelevant_below, depths=config.relevance.depths
        )
        units = outcomes.joined(units, by_unit)
        judged = _told(config.relevance, drawn, scores)
        draft.write_table("sample.parquet", drawn)
        draft.write_table("judged.parquet", scores)
    measures = outcomes.measures(
        few_results=config.few_results,
        depths=config.relevance.depths if config.relevance else (),
        satisfaction=config.feedback is not None,
        clicks=config.clicks is not None,
    )
    told = comparison.compared(config, units, measures) | requests | {"judge": judged}
    for name, arm in told["arms"].items():
        arm["latency_ms"] = found.percentiles(name, report.PERCENTILES)
    told["warnings"] = comparison.warnings(config, told)
    told["environment"] = environment()
    for text in told["warnings"]:
        log.warning("%s", text)
    draft.write_table("units.parquet", units)
    draft.write_table("rejected.parquet", quarantine.table())
    draft.write_json("report.json", told)
    draft.write_bytes("report.md", report.markdown(told).encode())
    draft.write_bytes("report.html", page(told).encode())
    counts = {"requests": found.requests, "units": len(units), "rejected": sum(quarantine.rejected.values())}
    log.info("%s", report.summary(told))
    return draft.commit(counts=counts, rejected_by_reason=dict(sorted(quarantine.rejected.items())))


def _checked(config: ExperimentConfig, dataset: Artifact) -> list[str]:
    """The log files; what is missing, cannot be read or would not fit is refused before anything is."""
    logs = access_log.find(config.logs)
    for pattern in (config.feedback, config.clicks):
        if pattern is not None:
            signals.check(pattern)
    if config.relevance and isinstance(config.relevance.judge, DualPooledJudge):
        open_artifact(config.relevance.judge.uri, kind="cross_encoder")
    documents = dataset.counts["documents"]
    if (
        config.relevance
        and isinstance(config.relevance.judge, BM25Ranker)
        and documents > judge.BM25_DOCUMENTS
    ):
        raise ConfigError(
            f"BM25 as a judge holds all documents in memory, and {documents:,} are more than "
            f"{judge.BM25_DOCUMENTS:,}: set relevance.judge to a cross-encoder, or relevance to null"
        )
    return logs


def _checksums(config: ExperimentConfig, logs: Sequence[str]) -> tuple[str, ...]:
    """Of every file that is read: logs grow, and then the report is another."""
    given = [p for pattern in (config.feedback, config.clicks) if pattern for p in local_files(pattern)]
    return tuple(fs.checksum(uri) for uri in (*logs, *map(str, given)))


def _read(config: ExperimentConfig, logs: Sequence[str], quarantine: Quarantine) -> Read:
    """Everything that comes of one pass over the logs."""
    satisfied = signals.feedback(config.feedback, quarantine) if config.feedback else None
    clicked = signals.clicks(config.clicks, quarantine) if config.clicks else None
    start, end = (moment.timestamp() if moment else None for moment in (config.start, config.end))
    selection = Selection(config.split, start=start, end=end)
    found = outcomes.Outcomes(few_results=config.few_results, satisfied=satisfied, clicked=clicked)
    sample = None
    if config.relevance:
        depth = max(config.relevance.depths)
        sample = Sample(config.relevance.requests_per_arm, depth=depth, seed=config.seed)
    read = 0
    with Progress("compare", total=len(logs), unit="log files") as progress:
        for uri in logs:
            for batch in access_log.read([uri], quarantine):
                read += len(batch)
                progress.advance(0, f"{read:,} lines")
                if len(requests := selection(batch)):
                    found.add(requests)
                    if sample is not None:
                        sample.add(requests)
            progress.advance(1)
    if not found.requests:
        left = ", ".join(f"{count:,} {reason}" for reason, count in selection.left_out.items())
        raise DataError(
            f"no request of experiment {config.split.name!r} in {len(logs)} files of {read:,} lines"
            + (f" ({left})" if left else "")
            + ": check split, start and end against what was served"
        )
    refused = sum(n for reason, n in quarantine.rejected.items() if reason.startswith(access_log.TABLE))
    ends = (selection.first, selection.last)
    first, last = (datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds") for moment in ends)
    signal_counts = {"rated": found.rated} if satisfied is not None else {}
    signal_counts |= {"clicked": found.clicks} if clicked is not None else {}
    counts = {"read": read + refused, "rejected": refused, "used": found.requests, **signal_counts}
    told = {"first": first, "last": last, "days": (selection.last - selection.first) / 86_400}
    return found, sample, told | {"requests": {**counts, "left_out": dict(selection.left_out)}}


def _judge(config: ExperimentConfig, drawn: pa.Table, dataset: Artifact, draft: Draft) -> pa.Table:
    """The pairs of the sample with their scores, a block per task; finished blocks survive a kill."""
    assert config.relevance is not None
    pairs = relevance.pairs(drawn)
    starts = range(0, len(pairs), PAIRS_PER_BLOCK)
    blocks = [draft.work(f"judged/{number:05d}.parquet") for number in range(len(starts))]
    todo = [number for number, uri in enumerate(blocks) if not fs.exists(uri)]
    # BM25 indexes the whole data set once, not once in every actor.
    workers = 1 if isinstance(config.relevance.judge, BM25Ranker) else config.resources.workers
    size = [min(PAIRS_PER_BLOCK, len(pairs) - start) for start in starts]
    for number in todo:
        block = pairs.slice(starts[number], PAIRS_PER_BLOCK)
        write_table(draft.work(f"pairs/{number:05d}.parquet"), block)
    done = len(pairs) - sum(size[number] for number in todo)
    resources = config.resources.model_copy(update={"workers": min(workers, len(todo))})
    if todo and not fs.exists(draft.work(judge.DOCUMENTS)):  # one pass over the corpus, not one a block
        write_table(draft.work(judge.DOCUMENTS), judge.texts(dataset, pc.unique(pairs["doc_id"])))
    with Progress("compare", total=len(pairs), done=done, unit="pairs judged") as progress:
        for number in (
            _on_ray(todo, (config.relevance.judge, dataset, draft.work()), resources) if todo else ()
        ):
            progress.advance(size[number])
    tables = [pq.read_table(fs.open_input(uri)) for uri in blocks]
    return pa.concat_tables([relevance.JUDGED.empty_table(), *tables])


def _on_ray(todo: Sequence[int], arguments: tuple[Any, ...], resources: Resources) -> Iterator[int]:
    """Blocks as they are judged, by actors of :class:`Judging`."""
    cluster.check_resources(resources, knob="resources")
    blocks = ray.data.from_items([{"number": number} for number in todo], override_num_blocks=len(todo))
    judged = blocks.map_batches(
        Judging,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=resources.workers),
        fn_constructor_args=arguments,
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker or None,
    )
    for row in cluster.dataset_rows(judged):
        yield int(row["number"])


class Judging:
    """Actor: judges blocks of pairs. It loads at the first: Ray hides why an actor could not start."""

    def __init__(self, config: AnyJudge, dataset: Artifact, work: str) -> None:
        self._config, self._dataset, self._work = config, dataset, work
        self._judge: judge.Judge | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The number of a block, once its scores are written; or what went wrong."""
        number = int(batch["number"][0])
        try:
            self._judge = self._judge or judge.load(self._config, self._dataset)
            pairs, documents = (
                pq.read_table(fs.open_input(fs.join(self._work, name)))
                for name in (f"pairs/{number:05d}.parquet", judge.DOCUMENTS)
            )
            scored = judge.judge_pairs(self._judge, pairs, documents)
            write_table(fs.join(self._work, f"judged/{number:05d}.parquet"), scored)
            return {"number": [number], "error": [""]}
        except ScalingNoteError as error:
            return {"number": [number], "error": [cluster.error_column(error)]}


def _told(config: Relevance, drawn: pa.Table, scores: pa.Table) -> dict[str, Any]:
    """What the report says of the judge."""
    return {
        "kind": config.judge.kind,
        "irrelevant_below": config.irrelevant_below,
        "requests": len(drawn),
        "pairs": len(scores),
        "unknown": scores["score"].null_count,
    }
