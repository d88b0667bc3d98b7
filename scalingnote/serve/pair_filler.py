"""What was written before a pair was added to a live folder: encoded again, and written to the pair's delta.

    log of the active pair ─► last write of each document ─► DocumentEncoder ─► log of the added pair

Since it was added, the writer gives the pair each write as it comes. Those are later, so a document that the
pair's log names is left alone: its log also says what was filled before a kill.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.index.live import versions, wal
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.writes import Delete, kept_writes, overridden
from scalingnote.run.ingest import IndexRows
from scalingnote.serve.concurrency import Handle
from scalingnote.serve.telemetry import get_logger
from scalingnote.storage.schema import document_of

BATCH_DOCUMENTS = 64  # encoded at a time, beside the documents of requests
PROGRESS_S = 10.0  # between two log lines
log = get_logger()


class PairFiller:
    """Fills the delta of one pair; :meth:`run` again goes on where it was ended.

    Args:
        target: the pair's index, open for writing.
        source: folder of the active pair, all of whose writes the target is to have.
        order: held by every write to the target.
    """

    def __init__(self, target: LiveIndex, source: str, order: threading.Lock) -> None:
        self._target, self._order = target, order
        self._source = versions.log_folder(source, 0)
        self._passages = target.layout.passages
        # Later records come with the writer's own writes.
        self._until = wal.last_acknowledged(self._source)
        own = overridden(versions.log_folder(target.folder, 0), after=0, passages=self._passages)
        self._known = {doc_id for _, doc_ids in own for doc_id in doc_ids}

    def note(self, doc_ids: Sequence[str]) -> None:
        """Leave documents alone that are written to the target by others, who hold the lock."""
        self._known.update(doc_ids)

    async def run(self, encoder: Handle, index: str) -> None:
        """Encode and write what the target lacks.

        Args:
            encoder: the DocumentEncoder.
            index: of the target, whose rows alone are wanted.

        Raises:
            ConfigError: a record of the log has no whole documents, or is gone.
        """
        left = await asyncio.to_thread(self._last_writes)
        total, start = len(left), time.monotonic()
        said, filled = start, 0
        log.info("%d documents that were written before are to be encoded for index %s", total, index)
        batches = self._batches(left)
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            documents, deleted = batch
            rows = (await encoder.encode.remote(documents, index))[index] if documents else None
            await asyncio.to_thread(self._write, rows, deleted)
            filled += len(documents) + len(deleted)
            if (now := time.monotonic()) - said > PROGRESS_S:
                rate = filled / (now - start)
                log.info(
                    "index %s: %d of %d documents filled, %.1f/s, ETA %.0f s",
                    *(index, filled, total, rate, (total - filled) / rate),
                )
                said = now
        log.info("index %s has every write: %d documents filled", index, filled)

    def _last_writes(self) -> dict[str, int]:
        """For each document that was written or deleted, and is not known, the last record that names it."""
        named = overridden(self._source, after=0, until=self._until, passages=self._passages)
        last = {doc_id: record for record, doc_ids in named for doc_id in doc_ids}
        with self._order:
            return {doc_id: record for doc_id, record in last.items() if doc_id not in self._known}

    def _batches(self, left: dict[str, int]) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
        """Documents to encode and ids of deleted ones, each from the last record that names it."""
        documents: list[dict[str, Any]] = []
        deleted: list[str] = []
        for record, write in kept_writes(self._source, until=self._until):
            if isinstance(write, Delete):
                ids = [*map(document_of, write.doc_ids)] if self._passages else write.doc_ids
                deleted += [doc_id for doc_id in dict.fromkeys(ids) if left.get(doc_id) == record]
            elif write.sources is not None:
                sources = write.sources.to_pylist()
                documents += [each for each in sources if left.get(each["doc_id"]) == record]
            while len(documents) + len(deleted) >= BATCH_DOCUMENTS:
                yield documents[:BATCH_DOCUMENTS], deleted
                documents, deleted = documents[BATCH_DOCUMENTS:], []
        if documents or deleted:
            yield documents, deleted

    def _write(self, rows: IndexRows | None, deleted: Sequence[str]) -> None:
        with self._order:
            if rows is not None:
                rows = rows_without(rows, self._known)
                self._known.update(write_beside(self._target, rows))
            left = [doc_id for doc_id in deleted if doc_id not in self._known]
            self._target.delete(left)
            self._known.update(left)


def write_rows(index: LiveIndex, rows: IndexRows) -> tuple[list[dict[str, str]], int]:
    """Write rows to the index of a pair: the rejected ones, and the number of rows that are durable."""
    written = index.upsert(rows.documents, rows.vectors, rows.sources).values()
    rejected = [row for shard in written for row in shard.rejected]
    return [*rows.rejected, *rejected], sum(shard.rows for shard in written)


def write_beside(index: LiveIndex, rows: IndexRows) -> list[str]:
    """Write rows to a pair that does not answer; the ids of the documents.

    A document that is rejected here is deleted: an earlier version of it must not come back.
    """
    rejected, _ = write_rows(index, rows)
    if rejected:
        log.warning("%d rows are rejected in %s, first %s", len(rejected), index.folder, rejected[0])
        index.delete([document_id(row["row"], index) for row in rejected])
    assert rows.sources is not None
    ids: list[str] = rows.sources["doc_id"].to_pylist()
    return ids


def document_id(row: str, index: LiveIndex) -> str:
    """The document that a rejected row is of: itself, or in an index of passages maybe one of them."""
    return document_of(row) if index.layout.passages and "#" in row else row


def rows_without(rows: IndexRows, known: set[str]) -> IndexRows:
    """Rows without those of documents that are known."""
    if not known:
        return rows
    assert rows.sources is not None
    ids = rows.documents["document_id" if "document_id" in rows.documents.column_names else "doc_id"]
    new = np.array([doc_id not in known for doc_id in ids.to_pylist()], bool)
    sources = rows.sources.filter(pc.invert(pc.is_in(rows.sources["doc_id"], value_set=pa.array(known))))
    rejected = [row for row in rows.rejected if row["row"] not in known]
    return rows._replace(
        documents=rows.documents.filter(pa.array(new)),
        vectors=rows.vectors[new],
        sources=sources,
        rejected=rejected,
    )
