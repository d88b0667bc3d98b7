"""A delta: what is written beside a large index that searchers only read.

    large index    versions of a register, searched by groups of searchers        ┐ one ranking
    delta          one shard with one log, empty at first, trained as the index   ┘

A document of the large index that was written or deleted since is *overridden*: its rows there are hidden,
whatever the delta has of it. So the state as of a log record is the large index without the documents that
records up to it name, and the delta as of this record. Every process that reads the log finds the same.

The shard of a delta starts from an index without documents, which has quantizer, settings and columns of the
large one: scores of both compare as those of two shards do.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from scalingnote.core.errors import ConfigError
from scalingnote.index import ivf, postings, shard
from scalingnote.index.live import versions, wal
from scalingnote.index.live.live_state import Delete, Upsert, decode_write
from scalingnote.index.live.versions import OpenVersion
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.manifest import read_manifest
from scalingnote.storage.schema import document_of

EMPTY = "empty"  # folder of the index without documents, beside the register


def open_empty(folder: str | Path) -> Artifact:
    """The index without documents that a delta starts from; the first process that asks writes it."""
    uri = fs.absolute(fs.join(str(folder), EMPTY))
    if read_manifest(uri) is not None:
        return open_artifact(uri, kind="index")
    large = OpenVersion(versions.read_register(folder).current)
    draft = Draft(uri, kind="index", config=large.config, parents={"index": large.index})
    if draft.finished:  # by another process, meanwhile
        return draft.existing()
    columns = pa.ipc.open_file(large.index.open(shard.documents_file(0))).schema
    layout = replace(large.layout, shards=1, documents=0)
    files = shard.write_shard(
        draft.uri,
        0,
        layout=layout,
        lists=ivf.empty(large.quantizer),
        documents=columns.empty_table(),
        terms=postings.merge([]),
    )
    for name, part in files.items():
        draft.register(name, part)
    draft.write_bytes(shard.COARSE, large.quantizer.coarse)
    draft.write_json(shard.LAYOUT_FILE, vars(layout))
    return draft.commit(counts={"documents": 0})


def overridden(
    log: str | Path, *, after: int, until: int | None = None, passages: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Records of a delta's log, in order, and the documents that each wrote or deleted.

    Args:
        log: folder of the log.
        after: number of the record before the first.
        until: number of the last; None: the last acknowledged one.
        passages: whether the ids in the log are of passages.
    """
    for record in wal.read(log, after=after, until=until):
        doc_ids = decode_write(record.payload).doc_ids
        yield record.sequence, [*dict.fromkeys(map(document_of, doc_ids))] if passages else doc_ids


def kept_writes(log: str | Path, *, until: int | None = None) -> Iterator[tuple[int, Upsert | Delete]]:
    """All records of a delta's log, in order, each upsert with the documents whole.

    ConfigError where one was written without them, or the log was not kept from its first record on.
    """
    if not wal.holds(log, after=0):
        raise ConfigError(_not_kept(log, 1))
    for record in wal.read(log, until=until):
        write = decode_write(record.payload)
        if isinstance(write, Upsert) and write.sources is None:
            raise ConfigError(_not_kept(log, record.sequence))
        yield record.sequence, write


def _not_kept(log: str | Path, record: int) -> str:
    return (
        f"record {record} of {log} has no whole documents for another model to encode: it was written "
        "without serve.live.keep_documents. Name a new folder, set it there, and send the documents again, "
        "or write them to the data set's files and run again"
    )
