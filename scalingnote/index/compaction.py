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
from scalingnote.index.config import LIVE_DEFAULTS
from scalingnote.index.live_state import LiveState, Snapshot, Upsert, catch_up, decode_write
from scalingnote.index.versions import OpenVersion
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, WORK, Artifact, Draft, Part, write_file

# Manifest entries of the built index, which versions copy.
TUNED = ("tuning", "tuning_sample", "hybrid_tuning")


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
        register = versions.read_register(folder)
        base, number = OpenVersion(register.current), register.last + 1
        uri = output or versions.default_path(folder, number)
        taken = [each.number for each in register.kept if each.uri == fs.absolute(uri)]
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
            index = _write(draft, folder, base, plan, origin=register.current.origin)
        fs.make_durable(index.uri, [MANIFEST])
        versions.make_current(folder, versions.described(number, index), keep=keep_versions)
        get_logger("index").info(
            "%s documents, before %s, in version %d: %s",
            *(f"{each.counts['documents']:,}" for each in (index, base.index)),
            *(number, index.uri),
        )
        return index


def _open_draft(uri: str, base: OpenVersion, *, anew: bool) -> Draft:
    """The draft of the next version, with the files of an earlier run.

    If those are damaged, `anew` deletes them, which is safe only at a path without other users; otherwise
    ArtifactError names what to delete.
    """
    begin = partial(Draft, uri, kind="index", config=base.config, parents={"index": base.index})
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


def _plan_for(draft: Draft, folder: Path, base: OpenVersion, *, retrain_at: float) -> _Plan | None:
    """The plan of the run that this one continues, or a new plan; None if there is nothing new."""
    found = _read_note(draft, "plan.json")
    if found is not None:
        return _Plan(**found)
    logs = [versions.log_folder(folder, number) for number in range(len(base.included))]
    until = [max(done, wal.acknowledged(log)) for done, log in zip(base.included, logs, strict=True)]
    if until == base.included:
        return None
    written = base.written
    for log, done, last in zip(logs, base.included, until, strict=True):
        writes = (decode_write(record.payload) for record in wal.read(log, after=done, until=last))
        written += sum(write.documents.num_rows for write in writes if isinstance(write, Upsert))
    stale = base.layout.refine != "none" and written >= retrain_at * base.layout.documents
    plan = _Plan(until, written, stale)
    for others in ("quantizer.json", "shards"):  # they belong to a plan that cannot be read
        fs.delete(draft.work(others))
    _write_note(draft, "plan.json", vars(plan))
    # Before any shard, which would be useless without its plan.
    fs.make_durable(draft.uri, [f"{WORK}/plan.json"])
    return plan


def _write(draft: Draft, folder: Path, base: OpenVersion, plan: _Plan, *, origin: str) -> Artifact:
    trained = _trained_again(draft, folder, base, plan.until) if plan.stale else None
    quantizer, layout = trained or base.quantizer, base.layout
    parts = {shard.COARSE: write_file(draft.path(shard.COARSE), quantizer.coarse)}
    with Progress("index", total=layout.documents, unit="documents compacted") as progress:
        for number, last in enumerate(plan.until):
            record = f"shards/{number:05d}.json"
            files = _recorded_files(draft, record)
            if files is None:
                now = _replayed(folder, base, number, last)
                files = shard.write_shard(
                    draft.uri,
                    number,
                    layout=layout,
                    lists=_encoded_again(now, trained) if trained else _kept_codes(now, base.quantizer),
                    documents=now.documents(np.flatnonzero(now.alive)),
                    terms=postings.merged(now.term_segments, kept=now.alive if layout.sparse else None),
                )
                _record_files(draft, record, files)
            parts |= files
            progress.advance(sum(part.rows or 0 for part in files.values()))
    for name, part in parts.items():
        draft.register(name, part)
    documents = sum(part.rows or 0 for part in parts.values())
    size = sum(part.bytes for name, part in parts.items() if name.endswith(".faiss"))
    nlist = len(quantizer.centroids)
    layout = replace(layout, documents=documents, nlist=nlist, nprobe=min(layout.nprobe, nlist))
    draft.write_json(shard.LAYOUT, vars(layout))
    written = 0 if trained else plan.written
    draft.write_json(versions.LIVE, {"origin": origin, "included": plan.until, "written": written})
    counts = {"documents": documents, "bytes": size, "bytes_per_vector": round(size / max(documents, 1))}
    before = base.index.manifest
    tuned = {name: before.info[name] for name in TUNED if name in before.info}
    fs.make_durable(draft.uri, [*parts, shard.LAYOUT, versions.LIVE])  # before a manifest names them
    return draft.commit(counts=before.counts | counts, **tuned)


def _replayed(folder: Path, base: OpenVersion, number: int, until: int) -> Snapshot:
    """A shard as of record `until` of its log."""
    state = LiveState(base.shard(number), base.quantizer, sequence=base.included[number])
    catch_up(state, versions.log_folder(folder, number), until=until)
    return state.snapshot


def _trained_again(
    draft: Draft, folder: Path, base: OpenVersion, until: Sequence[int]
) -> families.Quantizer | None:
    """A new quantizer, or that of an earlier run; None where there are too few vectors to train on."""
    record = "quantizer.json"
    if found := _recorded_files(draft, record):
        return families.parse_quantizer({Path(name).name: fs.read_bytes(draft.path(name)) for name in found})
    try:
        trained = _train(folder, base, until)
    except ConfigError as error:
        get_logger("index").warning("centroids and codebooks stay as they are: %s", error)
        return None
    fs.delete(draft.work("shards"))  # they hold codes of another quantizer
    files = {
        f"{WORK}/quantizer/{name}": write_file(draft.work(f"quantizer/{name}"), data)
        for name, data in families.dump_quantizer(trained).items()
    }
    _record_files(draft, record, files)
    fs.make_durable(draft.uri, [*files, f"{WORK}/{record}"])  # before any shard with its codes
    return trained


def _train(folder: Path, base: OpenVersion, until: Sequence[int]) -> families.Quantizer:
    """A quantizer of as many lists, fitted to an even sample of all shards; ConfigError where it is small."""
    config, layout = base.config, base.layout
    wanted = families.sample_size(config, layout.documents, nlist=layout.nlist)
    share = min(1.0, wanted / max(layout.documents, 1))
    rng = np.random.default_rng(config.seed)
    drawn = []
    for number, last in enumerate(until):
        vectors = _live_vectors(_replayed(folder, base, number, last))
        drawn.append(vectors[rng.random(len(vectors)) < share])
    sample = np.concatenate(drawn)
    found = families.train(
        sample,
        config.family,
        nlist=min(layout.nlist, max(1, len(sample) // families.POINTS_PER_CENTROID)),
        iterations=config.iterations,
        seed=config.seed,
        kind=config.coarse,
    )
    get_logger("index").info("centroids and codebooks are trained again on %s documents", f"{len(sample):,}")
    return found


def _live_vectors(now: Snapshot) -> Float[ndarray, "rows dim"]:
    """Vectors of the live rows: as kept by the base, and as written for later rows."""
    kept = ivf.vectors(now.base.lists.kept, np.flatnonzero(now.base_alive))
    return np.concatenate([kept, now.tail[now.live_alive]])


def _encoded_again(now: Snapshot, quantizer: families.Quantizer) -> ivf.Lists:
    lists = ivf.empty(quantizer)
    ivf.add(lists, _live_vectors(now))
    return lists


def _kept_codes(now: Snapshot, quantizer: families.Quantizer) -> ivf.Lists:
    """The base's lists without dead rows, followed by the rows written since."""
    new = ivf.empty(quantizer)
    ivf.add(new, now.tail[now.live_alive])
    ivf.drop_dead_rows(now.base.lists, now.base_alive)
    return ivf.merge([now.base.lists, new])


def _record_files(draft: Draft, record: str, files: Mapping[str, Part]) -> None:
    """Record finished files, so that later runs do not write them again."""
    _write_note(draft, record, {name: vars(part) for name, part in files.items()})


def _recorded_files(draft: Draft, record: str) -> dict[str, Part] | None:
    """The files of a record; None where there is no record, or one of its files differs."""
    found = _read_note(draft, record)
    if found is None:
        return None
    files = {name: Part(**part) for name, part in found.items()}
    paths = {draft.path(name): part.sha256 for name, part in files.items()}
    whole = all(fs.exists(path) and fs.checksum(path) == sha256 for path, sha256 in paths.items())
    return files if whole else None


def _write_note(draft: Draft, name: str, value: Mapping[str, Any]) -> None:
    fs.write_bytes(draft.work(name), json.dumps(value).encode())


def _read_note(draft: Draft, name: str) -> dict[str, Any] | None:
    """The value for later runs; None where there is none, or a crash left the file without its contents."""
    data = fs.read_if_exists(draft.work(name))
    try:
        found: dict[str, Any] | None = None if data is None else json.loads(data)
    except ValueError:
        return None
    return found
