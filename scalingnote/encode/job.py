"""Encoding on Ray Data: immutable parts in, one committed part of embeddings out for each.

    part ─read─► token rows ─encode─► embeddings ─commit─► a file, then its record

A part is the unit of work, of resumption and of identity: its file has a name that depends on it alone, and
its record, written last, holds the file's checksum. A re-run after a kill redoes only parts without a record;
redoing one writes the same file again. So every document is encoded exactly once as far as any reader can
tell. One worker does all three steps, or tasks on other CPUs read ahead of it and write behind it.

Only workers import torch: the driver and all tasks start in a fraction of the time.
"""

import json
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import ray.data
from ray.data.exceptions import ExecutionTimeoutError
from ray.exceptions import RayError

from scalingnote import cluster
from scalingnote.encode import changes, queries
from scalingnote.encode.config import EncodeConfig, Fleet, TeacherConfig
from scalingnote.encode.documents import TOWER, DocumentParts, Reader, embeddings_part, read_documents
from scalingnote.encode.steps import Encoded, Record, Steps, close_wave, commit_part, recorded
from scalingnote.encode.tally import Tally, totals
from scalingnote.encode.teacher import QueryParts, pseudo_parts, read_queries
from scalingnote.errors import ArtifactError, ConfigError, DataError, EncodingError, ScalingNoteError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact
from scalingnote.storage.slices import run_slices, slices

log = get_logger("encode")


def run(config: EncodeConfig, *, dataset: str, dual_encoder: str, output: str) -> Artifact:
    """Every document through the document tower; L2-normalised, in the order and parts of the dataset."""
    return encode_documents(config, dataset, open_artifact(dual_encoder, kind="dual_encoder"), output)


def run_student(config: EncodeConfig, *, dataset: str, student: str, output: str) -> Artifact:
    """The same through the document tower of a student that has one."""
    return encode_documents(config, dataset, open_artifact(student, kind="student"), output)


def encode_documents(
    config: EncodeConfig, dataset: str, towers: Artifact, output: str, *, reader: Reader = TOWER
) -> Artifact:
    """Embeddings of every document, part by part; with a base, only of those that changed since.

    ConfigError for a view that is not there; ArtifactError for a base that other towers, or other settings,
    made; DataError when no document can be encoded.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset"), towers.manifest.kind: towers}
    if config.base is not None:
        parents["base"] = _base(config, towers)
    draft = Draft(output, kind="embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    views = _views(towers)
    missing = sorted(set(config.views) - set(views))
    if missing:
        raise ConfigError(f"{towers.uri} gives no view {missing} of a document; it gives {views}")
    cluster.check_resources_early(config.resources, knob="encode.resources", beside=beside(config.resources))
    source, base = parents["dataset"], parents.get("base")
    parts = source.names("documents/", ".parquet")
    rows = {embeddings_part(name): source.manifest.parts[name].rows or 0 for name in parts}
    counts = {} if base is None else _compare(source, base, draft)
    folder = draft.work("base")
    steps = Steps(
        partial(read_documents, source=source, towers=towers, reader=reader, base=base, folder=folder),
        partial(DocumentParts, config=config, towers=towers, reader=reader),
    )
    records = write_parts(steps, draft, rows=rows, resources=config.resources, unit="documents")
    rejected = [row for record in records for row in record["rejected"]]
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts |= {
        "documents": sum(record["part"]["rows"] for record in records),
        "rejected": len(rejected),
        "tokens": sum(record["tokens"] for record in records),
    }
    if not counts["documents"]:
        raise DataError(f"none of {sum(rows.values())} documents could be encoded: {rejected[:1]}")
    return draft.commit(counts=counts, encoding=totals(records))


def _base(config: EncodeConfig, towers: Artifact) -> Artifact:
    """The embeddings that are to be brought up to date; refused if they would not be the same today."""
    base = open_artifact(fs.absolute(str(config.base)), kind="embeddings")  # workers open it, too
    made_by = base.manifest.parents.get(towers.manifest.kind, {}).get("digest")
    settings = {name: base.manifest.config.get(name) for name in ("views", "dtype", "top_k")}
    wanted = {"views": list(config.views), "dtype": config.dtype, "top_k": config.top_k}
    if made_by != towers.digest:
        raise ArtifactError(
            f"{base.uri} was encoded by another {towers.manifest.kind} than {towers.uri}: "
            "set encode.base to null"
        )
    if settings != wanted:
        raise ArtifactError(f"{base.uri} was encoded with {settings}, not {wanted}: set encode to the same")
    return base


def _compare(source: Artifact, base: Artifact, draft: Draft) -> dict[str, int]:
    """What is the same as in the base, and what became of the others (see `encode/changes.py`)."""
    folder = draft.work("base")
    run = partial(run_slices, folder=folder, each=cluster.map_tasks, room="encode", unit="tasks")
    sides = ((base, "embeddings"), (source, "documents"))
    buckets = changes.buckets(sum(artifact.counts["documents"] for artifact, _ in sides))
    for artifact, table in sides:
        deal = partial(changes.deal, artifact=artifact, table=table, folder=folder, buckets=buckets)
        run(f"deal-{table}", deal, slices(artifact, table, rows=changes.ROWS))
    settled = run("settle", partial(changes.settle, folder=folder, output=draft.uri), range(buckets))
    groups = changes.groups(len(source.table_parts("documents")))
    copied = run("sort", partial(changes.sort, folder=folder), groups)
    for record in settled:
        draft.register(record["name"], Part(**record["part"]))
    found = {kind: sum(record[kind] for record in settled) for kind in ("added", "changed", "deleted")}
    found["copied"] = sum(copied)
    log.info("since %s: %s", base.uri, ", ".join(f"{count:,} {kind}" for kind, count in found.items()))
    return found


def _views(towers: Artifact) -> list[str]:
    """A cross-encoder, which has no document tower, gives one embedding of a document."""
    if not towers.names("document/"):
        return ["summary"]
    views: list[str] = towers.read_json("document/tower.json")["views"]
    return views


def run_queries(
    config: TeacherConfig,
    *,
    dual_encoder: str,
    triplets: str | None = None,
    pseudo_queries: str | None = None,
    output: str,
) -> Artifact:
    """The teacher's embeddings of training queries and of pseudo-queries; not normalised by us.

    Queries come from `triplets` (generated ones too), from `pseudo_queries`, or from both. Beside the
    embeddings lie the teacher's tokenizer and what it knows of each token.

    ConfigError where neither is given; DataError where they hold no query.
    """
    if triplets is None and pseudo_queries is None:
        raise ConfigError("a teacher needs texts: give triplets, pseudo_queries, or both")
    given = {"dual_encoder": dual_encoder, "triplets": triplets, "pseudo_queries": pseudo_queries}
    parents = {kind: open_artifact(uri, kind=kind) for kind, uri in given.items() if uri is not None}
    draft = Draft(output, kind="query_embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    cluster.check_resources_early(config.resources, knob="teacher.resources", beside=beside(config.resources))
    pieces = distinct_queries(config, parents["triplets"], draft) if triplets is not None else []
    rows = {f"embeddings/part-{piece['name']}.parquet": int(piece["rows"]) for piece in pieces}
    pseudo = parents.get("pseudo_queries")
    rows |= {} if pseudo is None else pseudo_parts(pseudo)
    if not rows:
        raise DataError(f"{triplets} holds no queries: re-run collect")
    steps = Steps(
        partial(read_queries, folder=draft.work(), pseudo=pseudo),
        partial(
            QueryParts,
            towers=parents["dual_encoder"],
            token_budget=config.token_budget,
            teacher={next(iter(rows)): draft.path("teacher")},
        ),
    )
    records = write_parts(
        steps, draft, rows=rows, resources=config.resources, unit="queries", knob="teacher.resources"
    )
    return draft.commit(counts={"queries": sum(record["part"]["rows"] for record in records)})


def distinct_queries(config: TeacherConfig, triplets: Artifact, draft: Draft) -> list[queries.Piece]:
    """Files of the queries of triplets, each once, in the draft's work directory (see `encode/queries.py`).

    Tasks that an earlier, killed run finished stand as they are.
    """
    folder = draft.work()
    buckets = queries.buckets(triplets)
    run = partial(run_slices, folder=folder, each=cluster.map_tasks, room="encode", unit="tasks")
    deal = partial(queries.deal, triplets=triplets, folder=folder, buckets=buckets)
    run("deal", deal, slices(triplets, *queries.TABLES))
    settle = partial(_settle, folder=folder, rows_per_piece=config.rows_per_part)
    found: list[list[queries.Piece]] = run("settle", settle, range(buckets))
    return [piece for pieces in found for piece in pieces]


def _settle(item: tuple[int, int], **knobs: Any) -> list[queries.Piece]:
    return queries.settle(item[1], **knobs)


def write_parts(steps: Steps, draft: Draft, **how: Any) -> list[Record]:
    """The parts of an artifact, by :func:`each_part`; what they hold is registered with the draft."""
    records = each_part(steps, output=draft.uri, work=draft.work("parts"), **how)
    for record in records:
        draft.register(record["name"], Part(**record["part"]))
    return records


def each_part(
    steps: Steps,
    *,
    output: str,
    work: str,
    rows: dict[str, int],
    resources: Fleet,
    unit: str,
    knob: str = "encode.resources",
) -> list[Record]:
    """Encode all parts into files below `output`; their records, in order, which are kept below `work`.

    Records of a killed run are taken as they are. `rows` says how many rows each part has, `knob` where the
    resources of this stage are set. What fails is tried again after the others, whether a step of it broke,
    Ray lost more than it mends by itself, or nothing went on for half an hour; EncodingError when two waves
    in a row finish nothing.
    """
    cluster.check_resources(resources, knob=knob, beside=beside(resources))
    records = recorded(work, set(rows))
    if records:
        log.info("resuming: %d of %d parts are done", len(records), len(rows))
    tally = Tally(price_per_hour=resources.price_per_hour * resources.workers)
    done, barren = sum(rows[name] for name in records), False
    with Progress("encode", total=sum(rows.values()), done=done, unit=unit) as progress:
        while todo := [name for name in rows if name not in records][: resources.parts_per_wave]:
            wave: dict[str, Record] = {}
            failure = ""

            def add(record: Record, wave: dict[str, Record] = wave) -> None:
                wave[record["name"]] = record
                tally.add(record)
                progress.advance(rows[record["name"]], note=tally)

            try:
                for row in _run_wave(steps, todo, resources, output=output, work=work):
                    failure = failure or row["failure"]
                    if row["record"]:
                        add(json.loads(row["record"]))
            # The second after half an hour without progress: no node came, or a part ends whoever takes it.
            except (RayError, ExecutionTimeoutError) as error:
                failure = str(error)
                for name, record in recorded(work, set(todo)).items():
                    if name not in wave:  # more may be done than Ray came to tell
                        add(record)
            left, before, barren = len(todo) - len(wave), barren, not wave
            if barren and before:
                raise EncodingError(f"none of {left} parts could be encoded: {failure}")
            if left:
                log.warning("%d parts of %d are left, trying again: %s", left, len(todo), failure)
            records |= wave
            close_wave(work, wave)
    log.info("%s %s: %s -> %s", f"{sum(rows.values()):,}", unit, tally, output)
    return [records[name] for name in rows]


def beside(resources: Fleet) -> int:
    """CPUs that tasks beside the workers need at least."""
    return min(resources.readers, 1)


def _run_wave(steps: Steps, todo: Sequence[str], resources: Fleet, **where: str) -> Iterator[dict[str, str]]:
    """Of each part, as it is done with: its ``record`` as JSON, or the ``failure``; one of them is empty."""
    parts: Any = ray.data.from_items([{"name": name} for name in todo], override_num_blocks=len(todo))
    around: dict[str, Any] = {
        "batch_size": 1,
        "compute": ray.data.TaskPoolStrategy(size=max(resources.readers, 1)),
        "num_cpus": 1,
    }
    if resources.readers:
        parts = parts.map_batches(read_part, fn_kwargs={"steps": steps}, **around)
    encoded = parts.map_batches(
        EncodeParts,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(resources.workers, len(todo))),
        fn_constructor_kwargs={
            "steps": steps,
            "threads": resources.cpus_per_worker,
            "commit": None if resources.readers else where,
        },
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker or None,
    )
    if resources.readers:
        encoded = encoded.map_batches(write_part, fn_kwargs=where, **around)
    yield from cluster.dataset_rows(encoded)


def read_part(batch: Any, *, steps: Steps) -> Any:
    """Task: what there is to encode of a part."""
    (name,) = batch["name"]
    return {"name": [name], "given": [pickle.dumps(_attempt(steps.read, name))]}


class EncodeParts:
    """Actor: encodes parts. Named, as the tasks are, so that Ray's dashboard reads well."""

    def __init__(self, *, steps: Steps, threads: float, commit: dict[str, str] | None) -> None:
        import torch

        torch.set_num_threads(max(int(threads), 1))
        self._read, self._commit, self._encode = steps.read, commit, steps.encoder()
        self._since = time.monotonic()

    def __call__(self, batch: Any) -> Any:
        """A part that was read in, or its name; its record out, or what is to be written."""
        (name,) = batch["name"]
        given = pickle.loads(batch["given"][0]) if "given" in batch else _attempt(self._read, name)
        found = given if given.failed else _attempt(self._timed, name, given.value)
        if self._commit is None:
            return {"name": [name], "found": [pickle.dumps(found)]}
        return _committed(name, found, **self._commit)

    def _timed(self, name: str, given: Any) -> tuple[Encoded, dict[str, float]]:
        """A part encoded, and the seconds since the one before: waiting for input counts."""
        encoded = self._encode(name, given)
        now = time.monotonic()
        self._since, seconds = now, now - self._since
        return encoded, {"seconds": seconds, "peak": getattr(self._encode, "peak", 0.0)}


def write_part(batch: Any, *, output: str, work: str) -> Any:
    """Task: write a part, then its record."""
    return _committed(batch["name"][0], pickle.loads(batch["found"][0]), output=output, work=work)


@dataclass(frozen=True)
class _Attempt:
    """What a step gave; or an `error` of ours, which ends the run; or a `failure`, and others go on."""

    value: Any = None
    error: str = ""
    failure: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error or self.failure)


def _attempt(step: Callable[..., Any], *args: Any, **kwargs: Any) -> _Attempt:
    try:
        return _Attempt(step(*args, **kwargs))
    except ScalingNoteError as error:
        return _Attempt(error=cluster.error_column(error))
    except Exception:
        return _Attempt(failure=traceback.format_exc())


def _committed(name: str, found: _Attempt, *, output: str, work: str) -> Any:
    if not found.failed:
        found = _attempt(commit_part, name, *found.value, output=output, work=work)
    return {"record": [found.value or ""], "error": [found.error], "failure": [found.failure]}
