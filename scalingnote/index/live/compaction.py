"""Compaction: write the next index version from the current one and what was written since.

    a shard, without rows that were deleted or replaced ─ codes and terms as they are ┐
    documents written since that belong to it ─ encoded once                          ┴► files of the shard

Of an index with a log for each shard, these documents are those of the shard's log. Of a large index with a
delta beside it, they are those of the delta whose hash gives the shard, and overridden rows are left out.

Centroids and codebooks become stale as documents change. Once the documents written reach a share of the
index, compaction trains them again on vectors of all shards and encodes every row again. So the number of
trainings per write is bounded. Those of a large index stay: once they are stale, build it anew.

What a compaction includes is fixed when it begins, so the version and the later records give the same
documents as the version before and all records: each write counts once. It only reads logs and files, so it
may run in any process that sees them, while the index is written and searched. Shards are parts, each with a
record that is written after its files are durable: after a kill the old version is current, with the whole
log, and the next call goes on. A finished version is checked before it is made current: a machine's crash
loses unsynced files in any order.
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

# Manifest entries of the built index, which versions copy.
TUNED = ("tuning", "tuning_sample", "hybrid_tuning")


def compact(
    folder: str | Path,
    *,
    retrain_at: float = LIVE_DEFAULTS.retrain_at,
    keep_versions: int = LIVE_DEFAULTS.keep_versions,
    each: Executor = map_here,
) -> Artifact | None:
    """Write the next version of the live index in `folder` and make it current; None if there is nothing new.

    Args:
        folder: of the live index.
        retrain_at: train the quantizer again once the documents written since its training are this share of
            the index, if the family keeps vectors to train on; otherwise documents keep their codes.
        keep_versions: versions to keep, those that were current last, with this one.
        each: processes the shards, one after the other by default; one shard is in memory at a time.

    Raises:
        ConfigError: another process compacts the same index.
    """
    folder = Path(folder)
    with versions.register_lock(folder):
        versions.delete_unlisted(folder)  # an earlier run may have been killed before it did
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
        counts = (f"{found.counts['documents']:,}" for found in (index, base.index))
        get_logger("index").info("%s documents, before %s, in version %d: %s", *counts, number, index.uri)
        return index


def _open_draft(uri: str, base: OpenVersion) -> Draft:
    """The draft of the next version; a damaged one of an earlier run is deleted first."""
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
    """What the next version is made of: the same in every process, and after a kill."""

    folder: Path
    version: LiveVersion
    delta: bool
    output: str
    until: list[int]  # the last record of each log that is included
    written: int  # documents written by then since the quantizer of `version` was trained
    retrained: bool = False  # whether the work has a new quantizer

    @property
    def quantizer_folder(self) -> str:
        """Where a new quantizer is."""
        return fs.join(self.output, WORK, "quantizer")


def _plan(
    draft: Draft, folder: Path, register: Register, base: OpenVersion, *, retrain_at: float
) -> _Plan | None:
    """The plan of the run that began this draft, or else a new one; None where nothing was written."""
    stored = Path(draft.work("plan.json"))
    known = partial(_Plan, folder, register.current, register.delta, draft.uri)
    if stored.exists():
        return known(**json.loads(stored.read_text()))
    logs = [versions.log_folder(folder, number) for number in range(len(base.included))]
    until = [max(done, wal.last_acknowledged(log)) for done, log in zip(base.included, logs, strict=True)]
    if until == base.included:
        return None
    written: int = versions.live_content(base.index, delta=register.delta)["written"]
    for log, done, last in zip(logs, base.included, until, strict=True):
        writes = (write for _, write in logged_writes(log, after=done, until=last))
        written += sum(write.documents.num_rows for write in writes if isinstance(write, Upsert))
    plan = known(until, written)
    stale = written >= retrain_at * base.layout.documents and base.layout.refine != "none"
    if stale and not register.delta:
        plan = replace(plan, retrained=_train(plan, base))
    fixed = {"until": plan.until, "written": plan.written, "retrained": plan.retrained}
    fs.replace_durably(stored, json.dumps(fixed))
    return plan


def _train(plan: _Plan, base: OpenVersion) -> bool:
    """Fit a quantizer of as many lists to an even sample of all shards; False where that is too small."""
    source, layout = _Source(plan), base.layout
    wanted = families.sample_size(base.config, layout.documents, nlist=layout.nlist)
    share = min(1.0, wanted / max(layout.documents, 1))
    rng = np.random.default_rng(SAMPLE_SEED)
    drawn = []
    for number in range(layout.shards):
        vectors = source.rows(number).vectors()
        drawn.append(vectors[rng.random(len(vectors)) < share])
    sample = np.concatenate(drawn)
    nlist = min(layout.nlist, max(1, len(sample) // families.POINTS_PER_CENTROID))
    try:
        quantizer = families.train(sample, base.config.family, nlist=nlist, seed=SAMPLE_SEED)
    except ConfigError as error:
        get_logger("index").warning("centroids and codebooks stay as they are: %s", error)
        return False
    families.write_quantizer(plan.quantizer_folder, quantizer)
    fs.make_durable(plan.quantizer_folder, fs.list_files(plan.quantizer_folder))
    get_logger("index").info("centroids and codebooks are trained again on %s documents", f"{len(sample):,}")
    return True


class _Rows(NamedTuple):
    """The rows of a shard of the next version."""

    before: Shard  # of the version before
    kept: Bool[ndarray, " before_rows"]
    since: Snapshot  # the rows written since are live rows of it
    added: Bool[ndarray, " live_rows"]

    def vectors(self) -> Float[ndarray, "rows dim"]:
        """Vectors of the rows: as the version before keeps them, and as they were written."""
        kept = ivf.vectors(self.before.lists.kept, np.flatnonzero(self.kept))
        return np.concatenate([kept, self.since.tail[self.added]])


class _Source:
    """The shards of the next version, by replaying logs; that of a delta is replayed once."""

    def __init__(self, plan: _Plan) -> None:
        self._plan, self.base = plan, OpenVersion(plan.version)
        if not plan.delta:
            self.quantizer = self.base.quantizer
            return
        log, passages = versions.log_folder(plan.folder, 0), self.base.layout.passages
        empty = OpenVersion(plan.version, versions.open_empty(plan.folder))
        self.quantizer = empty.quantizer
        self._since = self._replay(empty, 0)
        named = overridden(log, after=empty.included[0], until=plan.until[0], passages=passages)
        self._hidden = [*{doc_id for _, doc_ids in named for doc_id in doc_ids}]
        self._shard_of = bucket_of(self._since.live_documents["doc_id"], self.base.layout.shards)

    def rows(self, number: int) -> _Rows:
        """The rows of a shard."""
        if not self._plan.delta:
            now = self._replay(self.base, number)
            return _Rows(now.base, now.base_alive, now, now.live_alive)
        before = self.base.shard(number)
        kept = np.ones(len(before.documents), bool)
        kept[before.rows.find_all(self._hidden, passages=self.base.layout.passages)] = False
        return _Rows(before, kept, self._since, self._since.live_alive & (self._shard_of == number))

    def _replay(self, opened: OpenVersion, number: int) -> Snapshot:
        """A shard as of the last record that is included."""
        state = LiveState(opened, number)
        state.catch_up(versions.log_folder(self._plan.folder, number), until=self._plan.until[number])
        return state.snapshot


def _load(plan: _Plan) -> Callable[[tuple[int, None]], dict[str, Any]]:
    """The function that writes a shard of the next version and gives its files."""
    source = _Source(plan)
    trained = families.read_quantizer(plan.quantizer_folder) if plan.retrained else None

    def write(part: tuple[int, None]) -> dict[str, Any]:
        number, _ = part
        rows = source.rows(number)
        new = ivf.empty(trained or source.quantizer)
        if trained:
            ivf.add(new, rows.vectors())
        else:
            ivf.add(new, rows.since.tail[rows.added])
            ivf.drop_dead_rows(rows.before.lists, rows.kept)
        every = np.concatenate([rows.kept, rows.added])
        documents = pa.concat_tables([rows.before.documents, rows.since.live_documents])
        terms = () if rows.before.postings is None else (rows.before.postings, *rows.since.postings)
        files = shard.write_shard(
            plan.output,
            number,
            layout=source.base.layout,
            lists=new if trained else ivf.merge([rows.before.lists, new]),
            documents=take_rows(documents, np.flatnonzero(every)),
            terms=postings.merge(terms, kept=every if terms else None),
        )
        fs.make_durable(plan.output, files)  # before a record names them
        return {name: asdict(file) for name, file in files.items()}

    return write


def _write(draft: Draft, base: OpenVersion, plan: _Plan, each: Executor) -> Artifact:
    """Write the shards that have no record yet, and finish the version; it keeps the tuning of `base`."""
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
        trained = families.read_quantizer(plan.quantizer_folder)
        coarse, nlist = trained.coarse, len(trained.centroids)
        layout = replace(layout, nlist=nlist, nprobe=min(layout.nprobe, nlist))
    documents = sum(part.rows or 0 for part in parts.values())
    size = sum(part.bytes for name, part in parts.items() if name.endswith(".faiss")) + len(coarse)
    written = 0 if plan.retrained else plan.written
    draft.write_bytes(shard.COARSE, coarse)
    draft.write_json(shard.LAYOUT_FILE, vars(replace(layout, documents=documents)))
    live = {"origin": plan.version.origin, "included": plan.until, "written": written}
    draft.write_json(versions.LIVE, live | ({"delta": True} if plan.delta else {}))
    # Before a manifest names them.
    fs.make_durable(draft.uri, [shard.COARSE, shard.LAYOUT_FILE, versions.LIVE])
    counts = {"documents": documents, "bytes": size, "bytes_per_vector": round(size / max(documents, 1))}
    before = base.index.manifest
    tuned = {name: before.info[name] for name in TUNED if name in before.info}
    return draft.commit(counts=before.counts | counts, **tuned)
