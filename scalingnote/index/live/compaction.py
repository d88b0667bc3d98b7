"""Compaction, which writes the next index version from the current one and the later writes.

    a shard without deleted or replaced rows ─ codes and terms are copied ┐
    documents written since that belong to it ─ encoded once              ┴► files of the shard

In an index with a log for each shard, these documents are those of the shard's log. In a large index with a
delta, they are the documents of the delta that the hash assigns to the shard, and overridden rows are left
out.

Centroids and codebooks become outdated as documents change. When the written documents reach a share of the
index, compaction trains them again on vectors of all shards and encodes every row again. So the number of
trainings per write is bounded. With a delta they are not trained again: a large index must be built again.

The last record that a compaction includes is fixed when it begins. Therefore the new version and the later
records give the same documents as the version before and all records: each write counts once. Compaction only
reads logs and files, so it may run in any process that has access to them, while the index is written and
searched. Shards are parts, each with a record that is written after its files are durable: after a kill the
old version is current, with the complete log, and the next call continues. A finished version is checked
before it becomes current, because a crash of the machine can lose any of the unsynced files.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float
from numpy import ndarray

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Executor, PartStage, map_here
from scalingnote.index import families, ivf, postings, shard
from scalingnote.index.config import LIVE_DEFAULTS
from scalingnote.index.live import versions, wal
from scalingnote.index.live.live_state import LiveState, Snapshot
from scalingnote.index.live.versions import LiveVersion, OpenVersion, Register
from scalingnote.index.live.writes import Upsert, logged_writes, overridden
from scalingnote.index.shard import Shard
from scalingnote.quantize.kmeans import SAMPLE_SEED
from scalingnote.storage import filesystem as fs
from scalingnote.storage.arrow import take_rows
from scalingnote.storage.artifact import MANIFEST, WORK, Artifact, Draft, Part
from scalingnote.storage.shuffle import bucket_of, run_slices

# Manifest entries of the built index that versions copy.
TUNED = ("tuning", "tuning_sample", "hybrid_tuning")


def compact(
    folder: str | Path,
    *,
    retrain_at: float = LIVE_DEFAULTS.retrain_at,
    keep_versions: int = LIVE_DEFAULTS.keep_versions,
    each: Executor = map_here,
) -> Artifact | None:
    """Write the next version of the live index in `folder` and make it current.

    Args:
        folder: of the live index.
        retrain_at: train the quantizer again when the documents written since its training are this share of
            the index, if the family keeps vectors for training; otherwise documents keep their codes.
        keep_versions: number of versions to keep, including the new one: those that were last current.
        each: processes the shards, by default one after the other; one shard is in memory at a time.

    Returns:
        The new version; None if there are no new writes.

    Raises:
        ConfigError: another process compacts the same index.
    """
    folder = Path(folder)
    with versions.register_lock(folder):
        versions.delete_unlisted(folder)  # an earlier run may have been killed before this step
        register = versions.read_register(folder)
        base, number = OpenVersion(register.current), register.last + 1
        draft = _open_draft(versions.default_path(folder, number), base)
        if draft.finished:  # by a run that was killed before it made the version current
            index = draft.existing()
        else:
            plan = _plan(draft, folder, register, base, retrain_at=retrain_at)
            if plan is None:
                fs.delete(draft.uri)
                return None
            index = _write(draft, base, plan, each)
        fs.make_durable(index.uri, [MANIFEST])
        version = versions.version_of(number, index, delta=register.delta)
        versions.make_current(folder, version, keep=keep_versions)
        counts = (f"{artifact.counts['documents']:,}" for artifact in (index, base.index))
        get_logger("index").info("%s documents (%s before) in version %d: %s", *counts, number, index.uri)
        return index


def _open_draft(uri: str, base: OpenVersion) -> Draft:
    """Open the draft of the next version; a damaged draft of an earlier run is deleted first."""
    begin = partial(Draft, uri, kind="index", config=base.config, parents={"index": base.index})
    try:
        draft = begin()
        if draft.finished:
            versions.check(draft.existing())
        return draft
    except ArtifactError as error:
        get_logger("index").warning("files of an earlier compaction are written again: %s", error)
        fs.delete(uri)
        return begin()


@dataclass(frozen=True)
class _Plan:
    """Inputs of the next version, the same in every process and after a kill."""

    folder: Path
    version: LiveVersion
    delta: bool
    output: str
    until: list[int]  # the last record of each log that is included
    written: int  # documents written up to `until` since the quantizer of `version` was trained
    retrained: bool = False  # whether the working folder has a new quantizer

    @property
    def quantizer_folder(self) -> str:
        """Folder of a new quantizer."""
        return fs.join(self.output, WORK, "quantizer")


def _plan(
    draft: Draft, folder: Path, register: Register, base: OpenVersion, *, retrain_at: float
) -> _Plan | None:
    """Read the plan of the run that began this draft, or make a new one; None if there are no new writes."""
    path = Path(draft.work("plan.json"))
    plan_of = partial(_Plan, folder, register.current, register.delta, draft.uri)
    if path.exists():
        return plan_of(**json.loads(path.read_text()))
    logs = [versions.log_folder(folder, number) for number in range(len(base.included))]
    until = [max(after, wal.last_acknowledged(log)) for after, log in zip(base.included, logs, strict=True)]
    if until == base.included:
        return None
    written_documents: int = versions.live_content(base.index, delta=register.delta)["written"]
    for log, after, last in zip(logs, base.included, until, strict=True):
        writes = (write for _, write in logged_writes(log, after=after, until=last))
        written_documents += sum(write.documents.num_rows for write in writes if isinstance(write, Upsert))
    plan = plan_of(until, written_documents)
    is_outdated = written_documents >= retrain_at * base.layout.documents and base.layout.refine != "none"
    if is_outdated and not register.delta:
        plan = replace(plan, retrained=_train(plan, base))
    values = {"until": plan.until, "written": plan.written, "retrained": plan.retrained}
    fs.replace_durably(path, json.dumps(values))
    return plan


def _train(plan: _Plan, base: OpenVersion) -> bool:
    """Train a new quantizer on an even sample of all shards; return False if the sample is too small."""
    source, layout = _Source(plan), base.layout
    size = families.sample_size(base.config, layout.documents, nlist=layout.nlist)
    share = min(1.0, size / max(layout.documents, 1))
    rng = np.random.default_rng(SAMPLE_SEED)
    samples = []
    for number in range(layout.shards):
        vectors = source.rows(number).vectors()
        samples.append(vectors[rng.random(len(vectors)) < share])
    sample = np.concatenate(samples)
    nlist = min(layout.nlist, max(1, len(sample) // families.POINTS_PER_CENTROID))
    try:
        quantizer = families.train(sample, base.config.family, nlist=nlist, seed=SAMPLE_SEED)
    except ConfigError as error:
        get_logger("index").warning("centroids and codebooks are not trained again: %s", error)
        return False
    families.write_quantizer(plan.quantizer_folder, quantizer)
    fs.make_durable(plan.quantizer_folder, fs.list_files(plan.quantizer_folder))
    get_logger("index").info("trained centroids and codebooks again on %s documents", f"{len(sample):,}")
    return True


class _Rows(NamedTuple):
    """Rows of a shard of the next version."""

    before: Shard  # the shard of the version before
    kept: Bool[ndarray, " before_rows"]
    since: Snapshot  # has the rows written since as live rows
    added: Bool[ndarray, " live_rows"]

    def vectors(self) -> Float[ndarray, "rows dim"]:
        """Return vectors of the rows: those that the version before keeps, then those of the writes."""
        kept_vectors = ivf.vectors(self.before.lists.kept, np.flatnonzero(self.kept))
        return np.concatenate([kept_vectors, self.since.tail[self.added]])


class _Source:
    """Shards of the next version, made by replaying logs; the log of a delta is replayed only once."""

    def __init__(self, plan: _Plan) -> None:
        self._plan, self.base = plan, OpenVersion(plan.version)
        if not plan.delta:
            self.quantizer = self.base.quantizer
            return
        log, passages = versions.log_folder(plan.folder, 0), self.base.layout.passages
        empty = OpenVersion(plan.version, versions.open_empty(plan.folder))
        self.quantizer = empty.quantizer
        self._since = self._replay(empty, 0)
        writes = overridden(log, after=empty.included[0], until=plan.until[0], passages=passages)
        self._hidden = [*{doc_id for _, doc_ids in writes for doc_id in doc_ids}]
        self._shard_of = bucket_of(self._since.live_documents["doc_id"], self.base.layout.shards)

    def rows(self, number: int) -> _Rows:
        """Return the rows of a shard."""
        if not self._plan.delta:
            now = self._replay(self.base, number)
            return _Rows(now.base, now.base_alive, now, now.live_alive)
        before = self.base.shard(number)
        kept_rows = np.ones(len(before.documents), bool)
        kept_rows[before.rows.find_all(self._hidden, passages=self.base.layout.passages)] = False
        return _Rows(before, kept_rows, self._since, self._since.live_alive & (self._shard_of == number))

    def _replay(self, opened: OpenVersion, number: int) -> Snapshot:
        """Build a shard as of the last record that is included."""
        state = LiveState(opened, number)
        state.catch_up(versions.log_folder(self._plan.folder, number), until=self._plan.until[number])
        return state.snapshot


def _load(plan: _Plan) -> Callable[[tuple[int, None]], dict[str, Any]]:
    """Return the function that writes a shard of the next version and returns its files."""
    source = _Source(plan)
    new_quantizer = families.read_quantizer(plan.quantizer_folder) if plan.retrained else None

    def write(part: tuple[int, None]) -> dict[str, Any]:
        number, _ = part
        rows = source.rows(number)
        new = ivf.empty(new_quantizer or source.quantizer)
        if new_quantizer:
            ivf.add(new, rows.vectors())
        else:
            ivf.add(new, rows.since.tail[rows.added])
            ivf.drop_dead_rows(rows.before.lists, rows.kept)
        selected = np.concatenate([rows.kept, rows.added])
        documents = pa.concat_tables([rows.before.documents, rows.since.live_documents])
        terms = () if rows.before.postings is None else (rows.before.postings, *rows.since.postings)
        files = shard.write_shard(
            plan.output,
            number,
            layout=source.base.layout,
            lists=new if new_quantizer else ivf.merge([rows.before.lists, new]),
            documents=take_rows(documents, np.flatnonzero(selected)),
            terms=postings.merge(terms, kept=selected if terms else None),
        )
        fs.make_durable(plan.output, files)  # before a record names them
        return {name: asdict(file) for name, file in files.items()}

    return write


def _write(draft: Draft, base: OpenVersion, plan: _Plan, each: Executor) -> Artifact:
    """Write the shards that have no record yet, and finish the version, with the tuning of `base`."""
    layout = base.layout
    records = run_slices(
        "shards",
        PartStage(partial(_load, plan)),
        [None] * layout.shards,
        folder=draft.work(),
        each=each,
        section="index",
        unit="shards compacted",
    )
    parts = {name: Part(**part) for record in records for name, part in record.items()}
    for name, part in parts.items():
        draft.register(name, part)
    coarse = base.index.read_bytes(shard.COARSE)
    if plan.retrained:
        quantizer = families.read_quantizer(plan.quantizer_folder)
        coarse, nlist = quantizer.coarse, len(quantizer.centroids)
        layout = replace(layout, nlist=nlist, nprobe=min(layout.nprobe, nlist))
    documents = sum(part.rows or 0 for part in parts.values())
    size = sum(part.bytes for name, part in parts.items() if name.endswith(".faiss")) + len(coarse)
    written_count = 0 if plan.retrained else plan.written
    draft.write_bytes(shard.COARSE, coarse)
    draft.write_json(shard.LAYOUT_FILE, vars(replace(layout, documents=documents)))
    live = {"origin": plan.version.origin, "included": plan.until, "written": written_count}
    draft.write_json(versions.LIVE, live | ({"delta": True} if plan.delta else {}))
    # They must be durable before a manifest names them.
    fs.make_durable(draft.uri, [shard.COARSE, shard.LAYOUT_FILE, versions.LIVE])
    counts = {"documents": documents, "bytes": size, "bytes_per_vector": round(size / max(documents, 1))}
    before = base.index.manifest
    tuning = {name: before.info[name] for name in TUNED if name in before.info}
    return draft.commit(counts=before.counts | counts, **tuning)
