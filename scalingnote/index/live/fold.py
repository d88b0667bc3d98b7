"""Fold: write the next version of a large index from the current one and the delta beside it.

    a shard, without overridden rows ─ codes and terms as they are ┐
    documents of the delta whose hash gives it ─ encoded once      ┴► files of the shard

A fold includes the log up to a record that is fixed when it begins, so the version and the later records give
the same documents as the version before and all records: each write counts once. Shards are parts, each with
a record that is written after its files are durable: after a kill the next call goes on with the same record
of the log. Until the finished version is made current, nothing changes for those who search and write.

The quantizer stays: once it is stale, build the large index anew.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Executor, PartStage, map_here
from scalingnote.index import ivf, postings, shard
from scalingnote.index.config import LIVE_DEFAULTS
from scalingnote.index.live import versions, wal
from scalingnote.index.live.compaction import commit_version
from scalingnote.index.live.delta import open_empty, overridden
from scalingnote.index.live.live_state import LiveState, catch_up
from scalingnote.index.live.versions import LiveVersion, OpenVersion
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, Draft, Part
from scalingnote.storage.shuffle import bucket_of, run_slices

UNTIL = "until"  # in the work of a version: the last record that it includes


def fold(
    folder: str | Path, *, keep_versions: int = LIVE_DEFAULTS.keep_versions, each: Executor = map_here
) -> Artifact | None:
    """Write the next version of the large index whose delta is in `folder`, and make it current.

    Args:
        folder: of the live index.
        keep_versions: versions to keep, those that were current last, with this one.
        each: processes the shards, one after the other by default; one shard is in memory at a time.

    Returns:
        The version; None if nothing was written since the current one.

    Raises:
        ConfigError: another process folds the same delta, or the folder has none.
    """
    folder = Path(folder)
    with versions.register_lock(folder):
        versions.delete_unlisted(folder)  # an earlier run may have been killed before it did
        register = versions.read_register(folder)
        if not register.delta:
            raise ConfigError(f"{folder} has no delta: compact it")
        large, number = OpenVersion(register.current), register.last + 1
        draft = Draft(
            versions.default_path(folder, number),
            kind="index",
            config=large.config,
            parents={"index": large.index},
        )
        if draft.finished:  # by a run that was killed before it made the version current
            index = draft.existing()
        else:
            until = _until(draft, folder)
            if until <= large.included[0]:
                fs.delete(draft.uri)
                return None
            index = _write(draft, large, _Source(folder, register.current, until, draft.uri), each)
        fs.make_durable(index.uri, [MANIFEST])
        versions.make_current(folder, versions.version_of(number, index, delta=True), keep=keep_versions)
        counts = (f"{found.counts['documents']:,}" for found in (index, large.index))
        get_logger("index").info("%s documents, before %s, in version %d: %s", *counts, number, index.uri)
        return index


@dataclass(frozen=True)
class _Source:
    """What a shard of the next version is made of."""

    folder: Path
    version: LiveVersion
    until: int  # last record of the log
    output: str


def _until(draft: Draft, folder: Path) -> int:
    """The record up to which the log is included: the last one when the version was begun."""
    path = draft.work(UNTIL)
    if not fs.exists(path):
        fs.write_bytes(path, str(wal.last_acknowledged(versions.log_folder(folder, 0))).encode())
    return int(fs.read_bytes(path))


def _write(draft: Draft, large: OpenVersion, source: _Source, each: Executor) -> Artifact:
    layout = large.layout
    records = run_slices(
        "shards",
        PartStage(partial(_load, source)),
        [None] * layout.shards,
        folder=draft.work(),
        each=each,
        section="index",
        unit="shards folded",
    )
    files = {name: Part(**part) for record in records for name, part in record["files"].items()}
    draft.write_bytes(shard.COARSE, large.index.read_bytes(shard.COARSE))
    written = versions.count_written(large.index, delta=True) + sum(record["added"] for record in records)
    live = {"origin": source.version.origin, "included": [source.until], "written": written, "delta": True}
    return commit_version(draft, large.index, files, layout=layout, live=live, unsynced=[shard.COARSE])


def _load(source: _Source) -> Callable[[tuple[int, None]], dict[str, Any]]:
    """The function that writes a shard of the next version: replays the delta's log once."""
    large, log = OpenVersion(source.version), versions.log_folder(source.folder, 0)
    delta = OpenVersion(source.version, open_empty(source.folder))
    passages = large.layout.passages
    state = LiveState(delta.shard(0), delta.quantizer, sequence=delta.included[0], whole_documents=passages)
    catch_up(state, log, until=source.until)
    now = state.snapshot
    named = overridden(log, after=delta.included[0], until=source.until, passages=passages)
    hidden = [*{doc_id for _, doc_ids in named for doc_id in doc_ids}]
    shard_of = bucket_of(now.documents(np.arange(now.rows))["doc_id"], large.layout.shards)

    def write(part: tuple[int, None]) -> dict[str, Any]:
        number, _ = part
        before = large.shard(number)
        kept = np.ones(len(before.documents), bool)
        kept[before.rows_of(hidden, passages=passages)] = False
        added = now.alive & (shard_of == number)
        new = ivf.empty(delta.quantizer)
        ivf.add(new, now.tail[added])
        ivf.drop_dead_rows(before.lists, kept)
        own = [] if before.postings is None else [before.postings, *now.postings]
        documents = [before.documents.filter(pa.array(kept)), now.documents(np.flatnonzero(added))]
        files = shard.write_shard(
            source.output,
            number,
            layout=large.layout,
            lists=ivf.merge([before.lists, new]),
            documents=pa.concat_tables(documents),
            terms=postings.merge(own, kept=np.concatenate([kept, added]) if own else None),
        )
        fs.make_durable(source.output, files)  # before a record names them
        return {"files": {name: asdict(file) for name, file in files.items()}, "added": int(added.sum())}

    return write
