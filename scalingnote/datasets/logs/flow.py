"""The four steps from slices to a data set, each of them one task for every slice or every bucket.

    check      slices             -> checked rows; documents by bucket of their id; ids and texts they name
    documents  buckets of doc_ids -> parts of documents; for each slice, the ids nobody knows
    route      slices             -> evidence about known documents, by bucket of its query
    queries    buckets of queries -> parts of queries, qrels, impressions, scores

A finished task leaves a record in the work directory. A run that was killed takes those for done, as long as
its input is still what it was, and does the others again under the same names: nothing is lost or doubled.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from scalingnote.datasets import registry
from scalingnote.datasets.config import Logs
from scalingnote.datasets.logs.buckets import settle_documents, settle_queries
from scalingnote.datasets.logs.inputs import Slice
from scalingnote.datasets.logs.slices import check_slice, route_slice
from scalingnote.datasets.logs.split import Windows, windows
from scalingnote.datasets.logs.tally import Tally
from scalingnote.errors import DataError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import CLAIM, LEASE, Artifact, Draft, Part

log = get_logger("datasets")
_OUTPUTS = ("documents", "queries", "qrels", "impressions", "scores")
_COUNTS = ("documents", "queries", "qrels", "impressions", "scores", "train_queries", "test_queries")
_ROOMY = 1 << 30  # bytes of input per bucket, above which more of them are advised
Record = dict[str, Any]  # JSON values: what a task has to say
Task = Callable[[Any], Record]
# How tasks are run: a task for every item, in any order, anywhere; records are handed over as they come.
Each = Callable[[Task, Sequence[Any]], Iterator[Record]]


def build(config: Logs, draft: Draft, slices: Sequence[Slice], *, each: Each) -> Artifact:
    """The data set of the log that `slices` make up. DataError when nothing of it is usable."""
    _resume_or_clear(draft, slices)
    _advise(config, slices)
    tally = Tally()
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
    chosen, span = _windows(config, checked, tally)
    settle = partial(settle_documents, config=config, work=work, output=output)
    parts = run("documents", settle, buckets, total=rows["documents"], unit="documents")
    route = partial(route_slice, config=config, work=work, windows=chosen)
    evidence = {number: piece for number, piece in pieces.items() if _is_evidence(piece)}
    run("route", route, evidence, total=rows["evidence"], unit="rows of evidence")
    queries = partial(settle_queries, config=config, work=work, output=output)
    settled = run("queries", queries, buckets, total=config.parts, unit="buckets of queries")
    for record in (*parts.values(), *settled.values()):
        for name, part in record["parts"].items():
            draft.register(name, Part(**part))
    return _commit(config, draft, tally, chosen, span)


def _step(
    name: str,
    task: Task,
    items: dict[int, Any],
    *,
    total: int,
    unit: str,
    draft: Draft,
    each: Each,
    tally: Tally,
) -> dict[int, Record]:
    """The records of all tasks, by number: those an earlier run left, and those of the others, done now."""
    folder = draft.work(f"records/{name}")
    records: dict[int, Record] = {}

    def take(record: Record) -> int:
        # The sum of tallies is small; one for each task, with its examples, is not.
        tally.add(record.pop("tally"), number=record["number"])
        records[record["number"]] = record
        return int(record["done"])

    found = set(fs.list_files(folder))
    left = [fs.join(folder, _file(number)) for number in items if _file(number) in found]
    done = sum(take(json.loads(fs.read_bytes(uri))) for uri in left)
    if left:
        log.info("resuming: %d of %d tasks of %r are done", len(left), len(items), name)
    todo = [item for item in items.items() if item[0] not in records]
    with Progress("datasets", total=total, done=done, unit=unit) as progress:
        for record in each(partial(_recorded, task=task, folder=folder), todo) if todo else ():
            progress.advance(take(record))
    return dict(sorted(records.items()))


def _recorded(item: tuple[int, Any], *, task: Task, folder: str) -> Record:
    """Do a task, and only then say so."""
    number, work = item
    record = {**task(work), "number": number}
    fs.write_bytes(fs.join(folder, _file(number)), json.dumps(record).encode())
    return record


def _file(number: int) -> str:
    return f"{number:06d}.json"


def _resume_or_clear(draft: Draft, slices: Sequence[Slice]) -> None:
    """Work on other files, or on other versions of them, must not be taken for this run's."""
    plan = json.dumps([asdict(piece) for piece in slices]).encode()
    uri = draft.work("plan.json")
    if fs.exists(uri) and fs.read_bytes(uri) == plan:
        return
    for name in _OUTPUTS:
        fs.delete(draft.path(name))
    for file in fs.list_files(draft.work()):
        if file not in (CLAIM, LEASE):  # or a second process would take the artifact for one nobody builds
            fs.delete(draft.work(file))
    fs.write_bytes(uri, plan)


def _advise(config: Logs, slices: Sequence[Slice]) -> None:
    per_bucket = sum(piece.size for piece in slices) // config.parts
    if per_bucket > _ROOMY:
        log.warning(
            "%s MB of input for each of %d buckets: raise dataset.parts to keep tasks small",
            f"{per_bucket // 10**6:,}",
            config.parts,
        )


def _is_evidence(piece: Slice) -> bool:
    return piece.table not in ("documents", "unpaired")


def _windows(config: Logs, checked: dict[int, Record], tally: Tally) -> tuple[Windows, tuple[int, int]]:
    for tables in (("documents", "unpaired"), ("impressions",)):
        if not any(record["rows"] for record in checked.values() if record["table"] in tables):
            raise DataError(f"logs: no usable row of {tables[0]}{_reasons(tally, of=tables[0])}")
    spans = [(record["first"], record["last"]) for record in checked.values() if "first" in record]
    span = (min(first for first, _ in spans), max(last for _, last in spans))
    return windows(config, first=span[0], last=span[1]), span


def _commit(
    config: Logs, draft: Draft, tally: Tally, chosen: Windows, span: tuple[int, int]
) -> Artifact:  # fmt: skip
    counts = {name: tally.counts[name] for name in _COUNTS}
    counts |= {"rejected": sum(tally.rejected.values()), "test_impressions": tally.counts["test_impressions"]}
    windows = chosen.shown()
    if not counts["train_queries"]:
        window, why = " to ".join(windows["train"]), _reasons(tally, of="impressions")
        raise DataError(f"logs: no query to train on in the window {window}{why}: widen dataset.train")
    if not counts["test_queries"]:
        log.warning("no query to test with in the window %s to %s: widen dataset.test", *windows["test"])
    draft.write_table("rejected.parquet", tally.table())
    about = registry.describe("logs")
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
        span=Windows(span, span).shown()["train"],
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


def _reasons(tally: Tally, *, of: str) -> str:
    rejected = Counter({reason: n for reason, n in tally.rejected.items() if reason.startswith(of)})
    worst = rejected.most_common(3)
    return "; set aside: " + ", ".join(f"{count:,} x {reason}" for reason, count in worst) if worst else ""
