"""Compaction: write the next index version from the current one and the log.

    rows still alive ─ codes and terms as they are ┐
    documents written since ─ encoded once         ┴► files of a shard, one shard in memory at a time

Centroids and codebooks become stale as documents change. Once the documents written reach a share of the
index, compaction trains them again on vectors of all shards and encodes every row again. So the number of
trainings per write is bounded.

Compaction only reads logs and files, so it may run in any process that sees them, while the index is written
and searched. A kill leaves the old version current, with the whole log, and the next call starts anew: an
index that is compacted fits into the memory of a process. A finished version is checked before it is made
current: a machine's crash loses unsynced files in any order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import Progress, get_logger
from scalingnote.index import families, ivf, postings, shard
from scalingnote.index.config import LIVE_DEFAULTS
from scalingnote.index.live import versions, wal
from scalingnote.index.live.live_state import LiveState, Snapshot, Upsert, catch_up, decode_write
from scalingnote.index.live.versions import OpenVersion
from scalingnote.quantize.kmeans import SAMPLE_SEED
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, Draft, Part, write_file

# Manifest entries of the built index, which versions copy.
TUNED = ("tuning", "tuning_sample", "hybrid_tuning")


def compact(
    folder: str | Path,
    *,
    retrain_at: float = LIVE_DEFAULTS.retrain_at,
    keep_versions: int = LIVE_DEFAULTS.keep_versions,
) -> Artifact | None:
    """Write the next version of the live index in `folder` and make it current; None if there is nothing new.

    Args:
        folder: of the live index.
        retrain_at: train the quantizer again once the documents written since its training are this share of
            the index, if the family keeps vectors to train on; otherwise documents keep their codes.
        keep_versions: versions to keep, those that were current last, with this one.

    Raises:
        ConfigError: another process compacts the same index.
    """
    folder = Path(folder)
    with versions.register_lock(folder):
        versions.delete_unlisted(folder)  # an earlier run may have been killed before it did
        register = versions.read_register(folder)
        if register.delta:
            raise ConfigError(f"{folder} has a delta beside its index: fold it (index/live/fold.py)")
        base, number = OpenVersion(register.current), register.last + 1
        draft = _open_draft(versions.default_path(folder, number), base)
        if draft.finished:  # by a run that was killed before it made the version current
            index = draft.existing()
        else:
            logs = [versions.log_folder(folder, number) for number in range(len(base.included))]
            until = [
                max(done, wal.last_acknowledged(log)) for done, log in zip(base.included, logs, strict=True)
            ]
            if until == base.included:
                fs.delete(draft.uri)
                return None
            states = _States(folder, base, until)
            index = _write(draft, states, retrain_at=retrain_at, origin=register.current.origin)
        fs.make_durable(index.uri, [MANIFEST])
        versions.make_current(folder, versions.version_of(number, index), keep=keep_versions)
        get_logger("index").info(
            "%s documents, before %s, in version %d: %s",
            *(f"{each.counts['documents']:,}" for each in (index, base.index)),
            *(number, index.uri),
        )
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
class _States:
    """The shards of a version as of the last records that the next one includes."""

    folder: Path
    base: OpenVersion
    until: list[int]

    def shard(self, number: int) -> Snapshot:
        """A shard, replayed from its log."""
        state = LiveState(self.base.shard(number), self.base.quantizer, sequence=self.base.included[number])
        catch_up(state, versions.log_folder(self.folder, number), until=self.until[number])
        return state.snapshot

    def count_written(self) -> int:
        """Documents written since the quantizer of the base was trained."""
        written = self.base.written
        for number, (done, last) in enumerate(zip(self.base.included, self.until, strict=True)):
            log = versions.log_folder(self.folder, number)
            writes = (decode_write(record.payload) for record in wal.read(log, after=done, until=last))
            written += sum(write.documents.num_rows for write in writes if isinstance(write, Upsert))
        return written


def _write(draft: Draft, states: _States, *, retrain_at: float, origin: str) -> Artifact:
    base, written = states.base, states.count_written()
    stale = base.layout.refine != "none" and written >= retrain_at * base.layout.documents
    trained = _train(states) if stale else None
    quantizer, layout = trained or base.quantizer, base.layout
    parts = {shard.COARSE: write_file(draft.path(shard.COARSE), quantizer.coarse)}
    with Progress("index", total=layout.documents, unit="documents compacted") as progress:
        for number in range(len(states.until)):
            now = states.shard(number)
            files = shard.write_shard(
                draft.uri,
                number,
                layout=layout,
                lists=_encode_again(now, trained) if trained else _kept_codes(now, base.quantizer),
                documents=now.documents(np.flatnonzero(now.alive)),
                terms=postings.merge(now.term_segments, kept=now.alive if layout.sparse else None),
            )
            parts |= files
            progress.advance(sum(part.rows or 0 for part in files.values()))
    nlist = len(quantizer.centroids)
    layout = replace(layout, nlist=nlist, nprobe=min(layout.nprobe, nlist))
    live = {"origin": origin, "included": states.until, "written": 0 if trained else written}
    return commit_version(draft, base.index, parts, layout=layout, live=live, unsynced=[*parts])


def commit_version(
    draft: Draft,
    before: Artifact,
    parts: Mapping[str, Part],
    *,
    layout: shard.IndexLayout,
    live: Mapping[str, Any],
    unsynced: Sequence[str],
) -> Artifact:
    """Finish the next version of an index, whose shards are written.

    Args:
        draft: of the version.
        before: version that it takes the place of, whose tuning it keeps.
        parts: files that are to be registered, those of all shards among them.
        layout: of the version; its number of documents is that of the parts.
        live: content of versions.LIVE.
        unsynced: files of the draft that are not durable yet.
    """
    for name, part in parts.items():
        draft.register(name, part)
    documents = sum(part.rows or 0 for part in parts.values())
    size = sum(part.bytes for name, part in parts.items() if name.endswith(".faiss"))
    draft.write_json(shard.LAYOUT_FILE, vars(replace(layout, documents=documents)))
    draft.write_json(versions.LIVE, dict(live))
    counts = {"documents": documents, "bytes": size, "bytes_per_vector": round(size / max(documents, 1))}
    tuned = {name: before.manifest.info[name] for name in TUNED if name in before.manifest.info}
    fs.make_durable(draft.uri, [*unsynced, shard.LAYOUT_FILE, versions.LIVE])  # before a manifest names them
    return draft.commit(counts=before.manifest.counts | counts, **tuned)


def _train(states: _States) -> families.Quantizer | None:
    """A quantizer of as many lists, fitted to an even sample of all shards; None where that is too small."""
    config, layout = states.base.config, states.base.layout
    wanted = families.sample_size(config, layout.documents, nlist=layout.nlist)
    share = min(1.0, wanted / max(layout.documents, 1))
    rng = np.random.default_rng(SAMPLE_SEED)
    drawn = []
    for number in range(len(states.until)):
        vectors = _live_vectors(states.shard(number))
        drawn.append(vectors[rng.random(len(vectors)) < share])
    sample = np.concatenate(drawn)
    nlist = min(layout.nlist, max(1, len(sample) // families.POINTS_PER_CENTROID))
    try:
        quantizer = families.train(sample, config.family, nlist=nlist, seed=SAMPLE_SEED)
    except ConfigError as error:
        get_logger("index").warning("centroids and codebooks stay as they are: %s", error)
        return None
    get_logger("index").info("centroids and codebooks are trained again on %s documents", f"{len(sample):,}")
    return quantizer


def _live_vectors(now: Snapshot) -> Float[ndarray, "rows dim"]:
    """Vectors of the live rows: as kept by the base, and as written for later rows."""
    kept = ivf.vectors(now.base.lists.kept, np.flatnonzero(now.base_alive))
    return np.concatenate([kept, now.tail[now.live_alive]])


def _encode_again(now: Snapshot, quantizer: families.Quantizer) -> ivf.Lists:
    lists = ivf.empty(quantizer)
    ivf.add(lists, _live_vectors(now))
    return lists


def _kept_codes(now: Snapshot, quantizer: families.Quantizer) -> ivf.Lists:
    """The base's lists without dead rows, followed by the rows written since."""
    new = ivf.empty(quantizer)
    ivf.add(new, now.tail[now.live_alive])
    ivf.drop_dead_rows(now.base.lists, now.base_alive)
    return ivf.merge([now.base.lists, new])
