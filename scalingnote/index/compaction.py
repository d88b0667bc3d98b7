"""Compaction: write the next index version from the current one and the log.

    rows still alive ─ codes and terms as they are ┐
    documents written since ─ encoded once         ┴► files of a shard, one shard in memory at a time

Centroids and codebooks become stale as documents change. Once the documents written reach a share of the
index, compaction trains them again on vectors of all shards and encodes every row again. So the number of
trainings per write is bounded.

Compaction only reads logs and files, so it may run in any process that sees them, while the index is written
and searched. A kill leaves the old version current, with the whole log; the next call continues its plan. It
keeps finished files as long as they match their records: a machine's crash loses unsynced files in any order,
so checksums decide, and a record that cannot be read counts as not written.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.index import families, ivf, postings, shard, versions, wal
from scalingnote.index.config import LIVE_DEFAULTS, IndexConfig
from scalingnote.index.live_state import LiveState, Snapshot, Upsert, catch_up, decode_write
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, WORK, Artifact, Draft, Part, write_file

TUNED = (
    "tuning",
    "tuning_sample",
    "hybrid_tuning",
)  # manifest entries of the built index, which versions copy


@dataclass(frozen=True)
class _Plan:
    """Decisions for all shards of a version, which must agree after a kill too."""

    until: list[int]  # last record of each log that the version includes
    written: int  # documents written since the quantizer of the base was trained
    stale: bool  # whether the quantizer must be trained again


def compact(
    folder: str | Path,
    *,
    output: str | None = None,
    retrain_at: float = LIVE_DEFAULTS.retrain_at,
    keep_versions: int = LIVE_DEFAULTS.keep_versions,
) -> Artifact | None:
    """Write the next version of the live index in `folder` and make it current; None if there is nothing new.

    Args:
        folder: of the live index.
        output: path or URI of the version; None: beside the logs.
        retrain_at: train the quantizer again once the documents written since its training are this share of
            the index, if the family keeps vectors to train on; otherwise documents keep their codes.
        keep_versions: versions to keep, those that were current last, with this one.

    Raises:
        ConfigError: another process compacts the same index, or `output` holds a version that is kept.
    """
    folder = Path(folder)
    with versions.register_lock(folder):
        versions.delete_unlisted(folder)  # an earlier run may have been killed before it did
        version = versions.current(folder)
        base = version.open()
        number, default = versions.next_version(folder)
        uri = output or default
        taken = [each.number for each in versions.listing(folder) if each.uri == fs.absolute(uri)]
        if taken:
            raise ConfigError(f"{output} holds version {taken[0]}, which is kept: choose another output")
        draft = _open_draft(uri, base, anew=output is None)
        if draft.finished:  # by a run that was killed before it made the version current
            index = draft.existing()
        else:
            plan = _plan_for(draft, folder, base, retrain_at=retrain_at)
            if plan is None:
                fs.delete(draft.uri)
                return None
            index = _write(draft, folder, base, plan, origin=version.origin)
        fs.make_durable(index.uri, [MANIFEST])
        versions.make_current(folder, versions.described(number, index), keep=keep_versions)
        get_logger("index").info(
            "%s documents, before %s, in version %d: %s",
            *(f"{each.counts['documents']:,}" for each in (index, base)),
            *(number, index.uri),
        )
        return index


def due(snapshots: Sequence[Snapshot], *, share: float) -> bool:
    """Whether the rows written since a version, and its rows that died, reach a share of its rows."""
    rows = sum(len(each.base_alive) for each in snapshots)
    gone = rows - sum(int(np.count_nonzero(each.base_alive)) for each in snapshots)
    return gone + sum(len(each.live_alive) for each in snapshots) >= share * max(rows, 1)


def _open_draft(uri: str, base: Artifact, *, anew: bool) -> Draft:
    """The draft of the next version, with the files of an earlier run.

    If those are damaged, `anew` deletes them, which is safe only at a path without other users; otherwise
    ArtifactError names what to delete.
    """
    config = IndexConfig.model_validate(base.manifest.config)
    begin = partial(Draft, uri, kind="index", config=config, parents={"index": base})
    try:
        draft = begin()
        if draft.finished:
            versions.check(draft.existing())
        return draft
    except ArtifactError as error:
        if not anew:
            raise
        get_logger("index").warning("files of an earlier compaction are written again: %s", error)
        fs.delete(uri)
        return begin()


def _plan_for(draft: Draft, folder: Path, base: Artifact, *, retrain_at: float) -> _Plan | None:
    """The plan of the run that this one continues, or a new plan; None if there is nothing new."""
    found = read_note(draft, "plan.json")
    if found is not None:
        return _Plan(**found)
    done = versions.included(base)
    logs = [versions.log_folder(folder, number) for number in range(len(done))]
    until = [max(record, wal.acknowledged(log)) for record, log in zip(done, logs, strict=True)]
    if until == done:
        return None
    layout = shard.open_layout(base)
    written = versions.documents_since_training(base) + _written(folder, base, until)
    stale = layout.refine != "none" and written >= retrain_at * layout.documents
    plan = _Plan(until, written, stale)
    for others in ("quantizer.json", "shards"):  # they belong to a plan that cannot be read
        fs.delete(draft.work(others))
    write_note(draft, "plan.json", vars(plan))
    fs.make_durable(
        draft.uri, [f"{WORK}/plan.json"]
    )  # before any shard, which would be useless without its plan
    return plan


def _write(draft: Draft, folder: Path, base: Artifact, plan: _Plan, *, origin: str) -> Artifact:
    layout = shard.open_layout(base)
    old = versions.open_quantizer(base, layout)
    trained = _retrained(draft, folder, base, old, plan.until) if plan.stale else None
    quantizer = trained or old
    coarse = quantizer.coarse
    parts = {shard.COARSE: write_file(draft.path(shard.COARSE), coarse)}
    with Progress("index", total=layout.documents, unit="documents compacted") as progress:
        for number, last in enumerate(plan.until):
            record = f"shards/{number:05d}.json"
            files = recorded_files(draft, record)
            if files is None:
                now = _replayed(folder, base, number, old, last)
                lists = _reencoded(now, trained) if trained else _kept_codes(now, old)
                files = shard.write_shard(
                    draft.uri,
                    number,
                    layout=layout,
                    lists=lists,
                    documents=now.documents(np.flatnonzero(now.alive)),
                    terms=postings.merged(now.term_segments, kept=now.alive if layout.sparse else None),
                )
                record_files(draft, record, files)
            parts |= files
            progress.advance(sum(part.rows or 0 for part in files.values()))
    for name, part in parts.items():
        draft.register(name, part)
    documents = sum(part.rows or 0 for part in parts.values())
    size = sum(part.bytes for name, part in parts.items() if name.endswith(".faiss"))
    layout = replace(layout, documents=documents, nlist=len(quantizer.centroids))
    draft.write_json(shard.LAYOUT, vars(replace(layout, nprobe=min(layout.nprobe, layout.nlist))))
    written = 0 if trained else plan.written
    draft.write_json(versions.LIVE, {"origin": origin, "included": plan.until, "written": written})
    counts = {"documents": documents, "bytes": size, "bytes_per_vector": round(size / max(documents, 1))}
    tuned = {name: base.manifest.info[name] for name in TUNED if name in base.manifest.info}
    fs.make_durable(draft.uri, [*parts, shard.LAYOUT, versions.LIVE])  # before a manifest names them
    return draft.commit(counts=base.counts | counts, **tuned)


def _written(folder: Path, base: Artifact, until: Sequence[int]) -> int:
    """Number of documents in the logs that the base does not include."""
    found = 0
    for number, (after, last) in enumerate(zip(versions.included(base), until, strict=True)):
        for record in wal.read(versions.log_folder(folder, number), after=after, until=last):
            write = decode_write(record.payload)
            found += write.documents.num_rows if isinstance(write, Upsert) else 0
    return found


def _replayed(
    folder: Path, base: Artifact, number: int, quantizer: families.Quantizer, until: int
) -> Snapshot:
    """A shard as of record `until` of its log."""
    layout = shard.open_layout(base)
    opened = shard.open_shard(base, number, layout=layout, coarse=families.parse(quantizer.coarse))
    state = LiveState(opened, quantizer, sequence=versions.included(base)[number])
    catch_up(state, versions.log_folder(folder, number), until=until)
    return state.snapshot


def _retrained(
    draft: Draft, folder: Path, base: Artifact, old: families.Quantizer, until: Sequence[int]
) -> families.Quantizer | None:
    """A new quantizer, or that of an earlier run; None where there are too few vectors to train on."""
    record = "quantizer.json"
    if found := recorded_files(draft, record):
        return families.parse_quantizer({Path(name).name: fs.read_bytes(draft.path(name)) for name in found})
    trained = _trained(folder, base, old, until)
    if trained is not None:
        fs.delete(draft.work("shards"))  # they hold codes of another quantizer
        files = {
            f"{WORK}/quantizer/{name}": write_file(draft.work(f"quantizer/{name}"), data)
            for name, data in families.dump_quantizer(trained).items()
        }
        record_files(draft, record, files)
        fs.make_durable(draft.uri, [*files, f"{WORK}/{record}"])  # before any shard with its codes
    return trained


def _trained(
    folder: Path, base: Artifact, old: families.Quantizer, until: Sequence[int]
) -> families.Quantizer | None:
    """A quantizer of as many lists, fitted to an even sample of all shards; None where that is too small."""
    config = IndexConfig.model_validate(base.manifest.config)
    layout = shard.open_layout(base)
    wanted = families.sample_size(config, layout.documents, nlist=layout.nlist)
    share = min(1.0, wanted / max(layout.documents, 1))
    rng = np.random.default_rng(config.seed)
    drawn = []
    for number, last in enumerate(until):
        vectors = _live_vectors(_replayed(folder, base, number, old, last))
        drawn.append(vectors[rng.random(len(vectors)) < share])
    sample = np.concatenate(drawn)
    nlist = min(layout.nlist, max(1, len(sample) // families.POINTS_PER_CENTROID))
    try:
        found = families.train(
            sample,
            config.family,
            nlist=nlist,
            iterations=config.iterations,
            seed=config.seed,
            kind=config.coarse,
        )
    except ConfigError as error:
        get_logger("index").warning("centroids and codebooks stay as they are: %s", error)
        return None
    get_logger("index").info("centroids and codebooks are trained again on %s documents", f"{len(sample):,}")
    return found


def _live_vectors(now: Snapshot) -> Float[ndarray, "rows dim"]:
    """Vectors of the live rows: as kept by the base, and as written for later rows."""
    kept = ivf.vectors(now.base.lists.kept, np.flatnonzero(now.base_alive))
    return np.concatenate([kept, now.tail[now.live_alive]])


def _reencoded(now: Snapshot, quantizer: families.Quantizer) -> ivf.Lists:
    lists = ivf.empty(quantizer)
    ivf.add(lists, _live_vectors(now))
    return lists


def _kept_codes(now: Snapshot, quantizer: families.Quantizer) -> ivf.Lists:
    """The base's lists without dead rows, followed by the rows written since."""
    new = ivf.empty(quantizer)
    ivf.add(new, now.tail[now.live_alive])
    ivf.drop_dead_rows(now.base.lists, now.base_alive)
    return ivf.merge([now.base.lists, new])


def record_files(draft: Draft, record: str, files: Mapping[str, Part]) -> None:
    """Record finished files, so that later runs do not write them again."""
    write_note(draft, record, {name: vars(part) for name, part in files.items()})


def recorded_files(draft: Draft, record: str) -> dict[str, Part] | None:
    """The files of a record; None where there is no record, or one of its files differs."""
    found = read_note(draft, record)
    if found is None:
        return None
    files = {name: Part(**part) for name, part in found.items()}
    paths = {draft.path(name): part.sha256 for name, part in files.items()}
    whole = all(fs.exists(path) and fs.checksum(path) == sha256 for path, sha256 in paths.items())
    return files if whole else None


def write_note(draft: Draft, name: str, value: Mapping[str, Any]) -> None:
    """Store a value for later runs."""
    fs.write_bytes(draft.work(name), json.dumps(value).encode())


def read_note(draft: Draft, name: str) -> dict[str, Any] | None:
    """The value; None where there is none, or a crash left the file without its contents."""
    path = draft.work(name)
    try:
        found: dict[str, Any] | None = json.loads(fs.read_bytes(path)) if fs.exists(path) else None
    except ValueError:
        return None
    return found
