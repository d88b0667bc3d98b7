"""Compaction: an index version and what was written since go in, the next version comes out.

    rows still alive ─ their codes as they are ┐
    documents written since ─ encoded once     ┴► files of a shard, one shard in memory at a time

It reads logs and files only, so it may run in any process that sees them, while the index is written and
searched. Killed at any moment it leaves the old version current, with the whole log; the next call takes up
the shards that were finished.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from scalingnote.index import ivf, shard
from scalingnote.index.build import write
from scalingnote.index.config import IndexConfig
from scalingnote.index.live import rows as live_rows
from scalingnote.index.live import versions, wal
from scalingnote.index.live.claim import claim
from scalingnote.index.live.shard import catch_up
from scalingnote.index.live.state import LiveState
from scalingnote.index.live.versions import Version
from scalingnote.index.live.wal_segment import sync_folder
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, write_table


def compact(folder: str | Path, *, output: str | None = None) -> Artifact | None:
    """Write the next version of the live index in `folder` and make it current; None if there is nothing new.

    `output` is a path or URI, by default beside the logs. Documents keep the codes they have; the quantizer
    is not trained anew. ConfigError when another process compacts the same index.
    """
    folder = Path(folder)
    taken = f"{folder} is being compacted by another process ({{owner}}): wait for it"
    lock = claim(folder / "compaction.lock", taken=taken)
    try:
        version = versions.current(folder)
        base = version.open()
        number = version.number + 1
        draft = Draft(
            output or fs.join(str(folder), "versions", f"{number:05d}"),
            kind="index",
            config=IndexConfig.model_validate(base.manifest.config),
            parents={"index": base},
        )
        if draft.finished:  # and killed before it became current
            index = draft.existing()
        else:
            until = _until(draft, folder, base)
            if until == versions.included(base):
                fs.delete(draft.uri)
                return None
            index = _write(draft, folder, base, Version(number, draft.uri, version.origin), until)
        _make_durable(index)
        versions.advance(folder, Version(number, fs.absolute(index.uri), version.origin))
        return index
    finally:
        os.close(lock)


def _until(draft: Draft, folder: Path, base: Artifact) -> list[int]:
    """The record of each log up to which this version goes; a run that takes up another goes as far."""
    plan = draft.work("until.json")
    if fs.exists(plan):
        found: list[int] = json.loads(fs.read_bytes(plan))
        return found
    done = versions.included(base)
    logs = [versions.log_folder(folder, number) for number in range(len(done))]
    until = [max(record, wal.acknowledged(log)) for record, log in zip(done, logs, strict=True)]
    fs.write_bytes(plan, json.dumps(until).encode())
    return until


def _write(draft: Draft, folder: Path, base: Artifact, version: Version, until: Sequence[int]) -> Artifact:
    layout = shard.open_layout(base)
    quantizer = versions.open_quantizer(base, layout)
    parts = {shard.COARSE: write(draft.path(shard.COARSE), fs.read_bytes(base.file(shard.COARSE)))}
    with Progress("index", total=layout.documents, unit="documents compacted") as progress:
        for number, last in enumerate(until):
            record = draft.work(f"shards/{number:05d}.json")
            if not fs.exists(record):
                files = _compact_shard(draft, folder, base, number, quantizer, last)
                fs.write_bytes(
                    record, json.dumps({name: vars(part) for name, part in files.items()}).encode()
                )
            files = {name: Part(**part) for name, part in json.loads(fs.read_bytes(record)).items()}
            parts |= files
            progress.advance(sum(part.rows or 0 for part in files.values()))
    for name, part in parts.items():
        draft.register(name, part)
    documents = sum(part.rows or 0 for part in parts.values())
    size = sum(part.bytes for name, part in parts.items() if name.endswith(".faiss"))
    draft.write_json(shard.LAYOUT, vars(replace(layout, documents=documents)))
    state = {"version": version.number, "origin": version.origin, "included": list(until)}
    draft.write_json(versions.LIVE, state)
    counts = {"documents": documents, "bytes": size, "bytes_per_vector": round(size / max(documents, 1))}
    get_logger("index").info(
        "%s documents, before %s, in version %d: %s",
        *(f"{documents:,}", f"{layout.documents:,}", version.number, draft.uri),
    )
    return draft.commit(counts=base.counts | counts, tuning=base.manifest.info.get("tuning", []))


def _compact_shard(
    draft: Draft, folder: Path, base: Artifact, number: int, quantizer: ivf.Quantizer, until: int
) -> dict[str, Part]:
    """Write a shard with what is alive of it after record `until` of its log."""
    layout = shard.open_layout(base)
    old = shard.open_shard(base, number, layout=layout, coarse=shard.open_coarse(base))
    state = LiveState(old, quantizer, sequence=versions.included(base)[number])
    catch_up(state, versions.log_folder(folder, number), until=until)
    now = state.snapshot
    new = ivf.empty(quantizer)
    ivf.add(new, now.tail[now.live_alive])
    live_rows.keep(old.lists, now.base_alive)
    lists = ivf.merge([old.lists, new])
    every = np.concatenate([now.base_alive, now.live_alive])
    documents = now.documents(np.flatnonzero(every))
    names = shard.vector_files(number, family=layout.family, refine=layout.refine)
    parts = {shard.documents_file(number): write_table(draft.path(shard.documents_file(number)), documents)}
    for name, data in zip(names, ivf.dump_files(lists), strict=True):
        parts[name] = write(draft.path(name), data)
    return parts


def _make_durable(index: Artifact) -> None:
    """A manifest is written last, but only a sync makes sure that a crash keeps this order."""
    if "://" in index.uri:
        return  # an object is durable once it is written
    root = Path(index.uri)
    paths = [root / name for name in [*index.manifest.parts, "manifest.json"]]
    for path in paths:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    for above in {parent for path in paths for parent in path.parents if parent.is_relative_to(root.parent)}:
        sync_folder(above)
