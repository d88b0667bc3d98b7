"""The prepare stage of a log on Ray: four steps, each with one task per slice or per bucket.

    check      slices             -> checked rows; documents by bucket of their id; ids and texts they name
    documents  buckets of doc_ids -> parts of documents; for each slice, the unknown ids
    route      slices             -> impressions, scores, qrels of known documents, by bucket of the query
    queries    buckets of queries -> parts of queries, qrels, impressions, scores

No row passes through the driver or Ray's object store: tasks read and write files and return a record of a
few hundred bytes, so the driver's memory grows with the number of slices, not with the length of the log.

A finished task leaves its record in the work directory. If a run is killed, the next one keeps these records,
as long as the input is unchanged, and repeats the other tasks under the same file names.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from ray.data import TaskPoolStrategy

from scalingnote import cluster
from scalingnote.config import Resources
from scalingnote.datasets import sources
from scalingnote.datasets.config import Logs
from scalingnote.datasets.logs.column_checks import LogTally
from scalingnote.datasets.logs.inputs import LogSlice, plan_slices
from scalingnote.datasets.logs.log_tasks import check_slice, route_slice, write_documents, write_queries
from scalingnote.datasets.logs.time_split import SplitWindows, choose_windows
from scalingnote.datasets.resume import resume_or_clear
from scalingnote.errors import DataError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part
from scalingnote.storage.shuffle import JsonRecord, TaskRunner

log = get_logger("datasets")
_COUNTS = ("documents", "queries", "qrels", "impressions", "scores", "train_queries", "test_queries")
_MAX_BUCKET_BYTES = 1 << 30  # of input; above it, a warning advises more buckets
Task = Callable[[Any], JsonRecord]


def run(config: Logs, *, output: str) -> Artifact:
    """Build the `dataset` artifact of a log, or return it if it is there.

    Bad rows are set aside in `rejected.parquet` and counted by reason in the manifest (`rejected_by_reason`).

    Raises:
        DataError: a file lacks a column, or nothing usable remains.
    """
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    slices = plan_slices(config)
    cluster.check_resources(config.resources, knob="dataset.resources")
    return build(config, draft, slices, each=partial(_each, resources=config.resources))


def build(config: Logs, draft: Draft, slices: Sequence[LogSlice], *, each: TaskRunner) -> Artifact:
    """Build the data set from `slices`; `each` runs the tasks. DataError if nothing is usable."""
    resume_or_clear(draft, [asdict(piece) for piece in slices])
    _warn_of_large_buckets(config, slices)
    tally = LogTally()
    run = partial(_step, draft=draft, each=each, tally=tally)
    work, output = draft.work(), draft.uri
    buckets = {number: number for number in range(config.parts)}

    pieces = {piece.number: piece for piece in slices}
    total = sum(piece.size for piece in slices) // 1000
    checked = run(
        "check", partial(check_slice, config=config, work=work), pieces, total=total, unit="kB checked"
    )
    rows = {"documents": 0, "evidence": 0}
    for number, record in checked.items():
        rows["evidence" if _is_evidence(pieces[number]) else "documents"] += record["rows"]
    windows, span = _split_windows(config, checked, tally)
    documents = partial(write_documents, config=config, work=work, output=output)
    parts = run("documents", documents, buckets, total=rows["documents"], unit="documents")
    route = partial(route_slice, config=config, work=work, windows=windows)
    evidence = {number: piece for number, piece in pieces.items() if _is_evidence(piece)}
    run("route", route, evidence, total=rows["evidence"], unit="rows of evidence")
    queries = partial(write_queries, config=config, work=work, output=output)
    query_parts = run("queries", queries, buckets, total=config.parts, unit="buckets of queries")
    for record in (*parts.values(), *query_parts.values()):
        for name, part in record["parts"].items():
            draft.register(name, Part(**part))
    return _commit(config, draft, tally, windows, span)


def _step(
    name: str,
    task: Task,
    items: dict[int, Any],
    *,
    total: int,
    unit: str,
    draft: Draft,
    each: TaskRunner,
    tally: LogTally,
) -> dict[int, JsonRecord]:
    """The records of all tasks by number: those of an earlier run, and those of the tasks done now."""
    folder = draft.work(f"records/{name}")
    records: dict[int, JsonRecord] = {}

    def take(record: JsonRecord) -> int:
        # Summed at once: the tallies of all tasks, with their examples, may not fit in memory.
        tally.add(record.pop("tally"), number=record["number"])
        records[record["number"]] = record
        return int(record["done"])

    finished = set(fs.list_files(folder))
    left = [fs.join(folder, _file(number)) for number in items if _file(number) in finished]
    done = sum(take(json.loads(fs.read_bytes(uri))) for uri in left)
    if left:
        log.info("resuming: %d of %d tasks of %r are done", len(left), len(items), name)
    todo = [item for item in items.items() if item[0] not in records]
    with Progress("datasets", total=total, done=done, unit=unit) as progress:
        for record in each(partial(_recorded, task=task, folder=folder), todo) if todo else ():
            progress.advance(take(record))
    return dict(sorted(records.items()))


def _recorded(item: tuple[int, Any], *, task: Task, folder: str) -> JsonRecord:
    """Run a task; its record is written last, so that it exists only for finished tasks."""
    number, work = item
    record = {**task(work), "number": number}
    fs.write_bytes(fs.join(folder, _file(number)), json.dumps(record).encode())
    return record


def _file(number: int) -> str:
    return f"{number:06d}.json"


def _each(task: Task, items: Sequence[Any], *, resources: Resources) -> Iterator[JsonRecord]:
    shared = ray.put(items)
    numbers = [{"number": number} for number in range(len(items))]
    done = ray.data.from_items(numbers, override_num_blocks=len(numbers)).map(
        partial(_do, task=task, shared=shared),
        compute=TaskPoolStrategy(size=min(resources.workers, len(numbers))),
        num_cpus=resources.cpus_per_worker,
    )
    for row in cluster.dataset_rows(done):
        yield json.loads(row["record"])


def _do(row: dict[str, int], *, task: Task, shared: Any) -> dict[str, str]:
    return {"record": json.dumps(task(ray.get(shared)[row["number"]]))}


def _warn_of_large_buckets(config: Logs, slices: Sequence[LogSlice]) -> None:
    per_bucket = sum(piece.size for piece in slices) // config.parts
    if per_bucket > _MAX_BUCKET_BYTES:
        log.warning(
            "%s MB of input for each of %d buckets: raise dataset.parts to keep tasks small",
            f"{per_bucket // 10**6:,}",
            config.parts,
        )


def _is_evidence(piece: LogSlice) -> bool:
    return piece.table not in ("documents", "unpaired")


def _split_windows(
    config: Logs, checked: dict[int, JsonRecord], tally: LogTally
) -> tuple[SplitWindows, tuple[int, int]]:
    for tables in (("documents", "unpaired"), ("impressions",)):
        if not any(record["rows"] for record in checked.values() if record["table"] in tables):
            raise DataError(f"logs: no usable row of {tables[0]}{_reasons(tally, of=tables[0])}")
    spans = [(record["first"], record["last"]) for record in checked.values() if "first" in record]
    span = (min(first for first, _ in spans), max(last for _, last in spans))
    return choose_windows(config, first=span[0], last=span[1]), span


def _commit(
    config: Logs, draft: Draft, tally: LogTally, split_windows: SplitWindows, span: tuple[int, int]
) -> Artifact:  # fmt: skip
    counts = {name: tally.counts[name] for name in _COUNTS}
    counts |= {"rejected": sum(tally.rejected.values()), "test_impressions": tally.counts["test_impressions"]}
    windows = split_windows.shown()
    if not counts["train_queries"]:
        window, why = " to ".join(windows["train"]), _reasons(tally, of="impressions")
        raise DataError(f"logs: no query to train on in the window {window}{why}: widen dataset.train")
    if not counts["test_queries"]:
        log.warning("no query to test with in the window %s to %s: widen dataset.test", *windows["test"])
    draft.write_table("rejected.parquet", tally.table())
    about = sources.describe("logs")
    artifact = draft.commit(
        counts=counts,
        simulated_clicks=False,
        click_model=None,
        description=about.summary,
        licence=about.licence,
        rejected_by_reason=dict(sorted(tally.rejected.items())),
        mended=dict(sorted(tally.mended.items())),
        left_out={name: count for name, count in sorted(tally.left_out.items()) if count},
        windows=windows,
        span=SplitWindows(span, span).shown()["train"],
        hold_out_documents=config.hold_out_documents,
    )
    log.info(
        "logs: %s documents, %s impressions, %s train and %s test queries, %s rejected rows -> %s",
        *(
            f"{counts[name]:,}"
            for name in ("documents", "impressions", "train_queries", "test_queries", "rejected")
        ),
        draft.uri,
    )
    return artifact


def _reasons(tally: LogTally, *, of: str) -> str:
    rejected = Counter({reason: n for reason, n in tally.rejected.items() if reason.startswith(of)})
    worst = rejected.most_common(3)
    return "; set aside: " + ", ".join(f"{count:,} x {reason}" for reason, count in worst) if worst else ""
