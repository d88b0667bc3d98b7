"""Compaction: an index version and what was written since go in, the next version comes out.

    rows still alive ─ codes and terms as they are ┐
    documents written since ─ encoded once         ┴► files of a shard, one shard in memory at a time

Centroids and codebooks grow stale as documents come and go. When as many have been written as make a share of
the index, they are trained anew, on vectors of all shards, and every row is encoded by them; so each write
pays for a bounded number of trainings.

It reads logs and files only, so it may run in any process that sees them, while the index is written and
searched. Killed at any moment it leaves the old version current, with the whole log; the next call takes up
its plan and what was finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.index import ivf, postings, postings_file, rescore, shard
from scalingnote.index.config import IndexConfig
from scalingnote.index.live import registry, resume, versions, wal, writes
from scalingnote.index.live import rows as live_rows
from scalingnote.index.live.config import DEFAULTS
from scalingnote.index.live.shard import catch_up
from scalingnote.index.live.snapshot import Snapshot
from scalingnote.index.live.state import LiveState
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, WORK, Artifact, Draft, Part, write_file, write_table

TUNED = ("tuning", "hybrid_tuning")  # of the index that was built; a version goes by it


@dataclass(frozen=True)
class _Plan:
    """What is decided once: shards of one version go as far as each other, and share a quantizer."""

    until: list[int]  # the record of each log up to which the version goes
    written: int  # documents, since the quantizer of the base was trained
    stale: bool  # whether that is to be trained anew


def compact(
    folder: str | Path,
    *,
    output: str | None = None,
    retrain_at: float = DEFAULTS.retrain_at,
    keep_versions: int = DEFAULTS.keep_versions,
) -> Artifact | None:
    """Write the next version of the live index in `folder` and make it current; None if there is nothing new.

    `output` is a path or URI, by default beside the logs. The quantizer is trained anew once the documents
    written since it was are the share `retrain_at` of the index, where the family keeps vectors to train it
    on; else documents keep the codes they have. Of all versions the `keep_versions` that were current last
    are kept, this one included. ConfigError when another process compacts the same index.
    """
    folder = Path(folder)
    with registry.changing(folder):
        versions.sweep(folder)  # where a kill came before
        version = versions.current(folder)
        base = version.open()
        number, place = versions.following(folder)
        taken = [each.number for each in versions.listing(folder) if each.uri == fs.absolute(output or place)]
        if taken:
            raise ConfigError(f"{output} holds version {taken[0]}, which is kept: choose another output")
        draft = _begun(output or place, base, anew=output is None)
        if draft.finished:  # and killed before it became current
            index = draft.existing()
        else:
            plan = _planned(draft, folder, base, retrain_at=retrain_at)
            if plan is None:
                fs.delete(draft.uri)
                return None
            index = _write(draft, folder, base, plan, origin=version.origin)
        fs.make_durable(index.uri, [MANIFEST])
        versions.advance(folder, versions.described(number, index), keep=keep_versions)
        get_logger("index").info(
            "%s documents, before %s, in version %d: %s",
            *(f"{each.counts['documents']:,}" for each in (index, base)),
            *(number, index.uri),
        )
        return index


def due(snapshots: Sequence[Snapshot], *, share: float) -> bool:
    """Whether the rows written since a version, and those of it that are gone, are this share of its rows."""
    rows = sum(len(each.base_alive) for each in snapshots)
    gone = rows - sum(int(np.count_nonzero(each.base_alive)) for each in snapshots)
    return gone + sum(len(each.live_alive) for each in snapshots) >= share * max(rows, 1)


def _begun(uri: str, base: Artifact, *, anew: bool) -> Draft:
    """The next version, as far as an earlier run came; `anew` where what that finished is damaged.

    That is for a place where nothing else can be: elsewhere ArtifactError says what to delete.
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
        get_logger("index").warning("what an earlier compaction left is written anew: %s", error)
        fs.delete(uri)
        return begin()


def _planned(draft: Draft, folder: Path, base: Artifact, *, retrain_at: float) -> _Plan | None:
    """The plan of the run that this one takes up, or a new one; None if there is nothing new."""
    found = resume.noted(draft, "plan.json")
    if found is not None:
        return _Plan(**found)
    done = versions.included(base)
    logs = [versions.log_folder(folder, number) for number in range(len(done))]
    until = [max(record, wal.acknowledged(log)) for record, log in zip(done, logs, strict=True)]
    if until == done:
        return None
    layout = shard.open_layout(base)
    written = versions.written(base) + _written(folder, base, until)
    stale = layout.refine != "none" and written >= retrain_at * layout.documents
    plan = _Plan(until, written, stale)
    for others in ("quantizer.json", "shards"):  # of a plan that cannot be read
        fs.delete(draft.work(others))
    resume.note(draft, "plan.json", vars(plan))
    fs.make_durable(draft.uri, [f"{WORK}/plan.json"])  # no shard outlives the plan that it belongs to
    return plan


def _write(draft: Draft, folder: Path, base: Artifact, plan: _Plan, *, origin: str) -> Artifact:
    layout = shard.open_layout(base)
    old = versions.open_quantizer(base, layout)
    trained = _trained_anew(draft, folder, base, old, plan.until) if plan.stale else None
    quantizer = trained or old
    coarse = ivf.dump(ivf.coarse_of(quantizer.centroids))
    parts = {shard.COARSE: write_file(draft.path(shard.COARSE), coarse)}
    with Progress("index", total=layout.documents, unit="documents compacted") as progress:
        for number, last in enumerate(plan.until):
            record = f"shards/{number:05d}.json"
            files = resume.finished(draft, record)
            if files is None:
                now = _replayed(folder, base, number, old, last)
                lists = _encoded_anew(now, trained) if trained else _cut_down(now, old)
                files = _write_shard(draft, number, layout, lists, now)
                resume.finish(draft, record, files)
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
    """How many documents the logs have that the base does not include."""
    found = 0
    for number, (after, last) in enumerate(zip(versions.included(base), until, strict=True)):
        for record in wal.read(versions.log_folder(folder, number), after=after, until=last):
            write = writes.decode(record.payload)
            found += write.documents.num_rows if isinstance(write, writes.Upsert) else 0
    return found


def _replayed(folder: Path, base: Artifact, number: int, quantizer: ivf.Quantizer, until: int) -> Snapshot:
    """A shard as of record `until` of its log."""
    layout = shard.open_layout(base)
    opened = shard.open_shard(base, number, layout=layout, coarse=ivf.coarse_of(quantizer.centroids))
    state = LiveState(opened, quantizer, sequence=versions.included(base)[number])
    catch_up(state, versions.log_folder(folder, number), until=until)
    return state.snapshot


def _trained_anew(
    draft: Draft, folder: Path, base: Artifact, old: ivf.Quantizer, until: Sequence[int]
) -> ivf.Quantizer | None:
    """The quantizer that an earlier run trained, or a new one; None where there is too little to train on."""
    record = "quantizer.json"
    if found := resume.finished(draft, record):
        return ivf.parse_quantizer({Path(name).name: fs.read_bytes(draft.path(name)) for name in found})
    trained = _trained(folder, base, old, until)
    if trained is not None:
        fs.delete(draft.work("shards"))  # codes of another quantizer
        files = {
            f"{WORK}/quantizer/{name}": write_file(draft.work(f"quantizer/{name}"), data)
            for name, data in ivf.dump_quantizer(trained).items()
        }
        resume.finish(draft, record, files)
        fs.make_durable(draft.uri, [*files, f"{WORK}/{record}"])  # nor the quantizer of its codes
    return trained


def _trained(folder: Path, base: Artifact, old: ivf.Quantizer, until: Sequence[int]) -> ivf.Quantizer | None:
    """A quantizer of as many lists, fitted to an even sample of all shards; None where that is too small."""
    config = IndexConfig.model_validate(base.manifest.config)
    layout = shard.open_layout(base)
    share = min(1.0, config.train_documents / max(layout.documents, 1))
    rng = np.random.default_rng(config.seed)
    drawn = []
    for number, last in enumerate(until):
        vectors = _alive(_replayed(folder, base, number, old, last))
        drawn.append(vectors[rng.random(len(vectors)) < share])
    sample = np.concatenate(drawn)
    nlist = min(layout.nlist, max(1, len(sample) // ivf.POINTS_PER_CENTROID))
    try:
        found = ivf.train(sample, config.family, nlist=nlist, iterations=config.iterations, seed=config.seed)
    except ConfigError as error:
        get_logger("index").warning("centroids and codebooks stay as they are: %s", error)
        return None
    get_logger("index").info("centroids and codebooks are trained anew on %s documents", f"{len(sample):,}")
    return found


def _alive(now: Snapshot) -> Float[ndarray, "rows dim"]:
    """Vectors of the rows alive: those kept of the base, those written of the others."""
    kept = rescore.vectors(now.base.lists.kept, np.flatnonzero(now.base_alive))
    return np.concatenate([kept, now.tail[now.live_alive]])


def _encoded_anew(now: Snapshot, quantizer: ivf.Quantizer) -> ivf.Lists:
    lists = ivf.empty(quantizer)
    ivf.add(lists, _alive(now))
    return lists


def _cut_down(now: Snapshot, quantizer: ivf.Quantizer) -> ivf.Lists:
    """The base's lists without what is dead, and what was written since behind it."""
    new = ivf.empty(quantizer)
    ivf.add(new, now.tail[now.live_alive])
    live_rows.keep(now.base.lists, now.base_alive)
    return ivf.merge([now.base.lists, new])


def _write_shard(
    draft: Draft, number: int, layout: shard.Layout, lists: ivf.Lists, now: Snapshot
) -> dict[str, Part]:
    documents = now.documents(np.flatnonzero(now.alive))
    names = shard.vector_files(number, family=layout.family, refine=layout.refine)
    files = dict(zip(names, ivf.dump_files(lists), strict=True))
    if layout.sparse:
        own, terms = shard.term_files(number), postings.merged(now.term_segments, kept=now.alive)
        files |= {own[name]: data for name, data in postings_file.dump(terms).items()}
    parts = {name: write_file(draft.path(name), data) for name, data in files.items()}
    parts[shard.documents_file(number)] = write_table(draft.path(shard.documents_file(number)), documents)
    return parts
