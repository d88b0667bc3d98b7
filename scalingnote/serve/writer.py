"""The one process that writes to a live index, and also to the index of another model.

    rows of each pair, by its index ─► Writer ─► log of each pair ─► acknowledged
    log of the active pair ─► last write of each document ─► DocumentEncoder ─► log of an added pair

After a pair is added, the writer writes each new write to it, too. :class:`PairFiller` encodes earlier writes
again and writes them to its delta. It skips documents that the log of the pair already has: these writes are
newer, or were filled before a kill.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.index.config import LiveConfig
from scalingnote.index.live import versions, wal
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.writes import Delete, kept_writes, overridden
from scalingnote.run.ingest import IndexRows
from scalingnote.serve.concurrency import Handle, WorkerThread, for_reading
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.telemetry import get_logger
from scalingnote.storage.schema import document_of

FILL_AGAIN_S = 5.0  # after an error
BATCH_DOCUMENTS = 64  # documents that are encoded at once to fill a pair; requests are served meanwhile
PROGRESS_S = 10.0  # between two log lines
Outcome = tuple[int, list[dict[str, str]]]  # number of written documents, and rejected rows
log = get_logger()


class Writer:
    """The one process that writes to a live index; the claim on the logs refuses a second one.

    If the folder has two pairs, each write goes to both before it is acknowledged.

    Args:
        catalog: of the folder.
        config: of the index.
        encoder: the DocumentEncoder, to fill a pair that is added; None: no pair can be filled.
    """

    def __init__(self, catalog: LiveCatalog, config: LiveConfig, encoder: Handle | None = None) -> None:
        self._catalog, self._config = catalog, config
        self._encoder = None if encoder is None else for_reading(encoder)
        self._checks = WorkerThread("health")
        self._order = threading.Lock()  # held by a write if there are two pairs, so both have the same order
        self._alone = threading.Condition()
        self._running = 0  # running writes, if there is one pair
        self._indexes: dict[str, LiveIndex] = {}  # by the URI of the built index, the active pair first
        self._filler: PairFiller | None = None  # of a second pair that is not filled
        self._filling: asyncio.Task[None] | None = None
        self._open_pairs()

    async def upsert(self, rows: Mapping[str, IndexRows]) -> Outcome | tuple[()]:
        """Write documents. They are durable in every pair when this returns.

        Args:
            rows: of each pair, by its index.

        Returns:
            Number of written documents, and the rejected rows. An empty tuple if a pair was added since the
            documents were encoded: nothing is written, so encode them again.
        """
        return await asyncio.to_thread(self._upsert, rows)

    def _upsert(self, rows: Mapping[str, IndexRows]) -> Outcome | tuple[()]:
        with self._turn():
            if not self._indexes.keys() <= rows.keys():
                return ()
            (first, *second) = self._indexes
            index, active_rows = self._indexes[first], rows[first]
            rejected, count = write_rows(index, active_rows)
            for uri in second:
                other_rows = rows_without(rows[uri], {document_id(row["row"], index) for row in rejected})
                doc_ids = write_beside(self._indexes[uri], other_rows)
                if self._filler is not None:
                    self._filler.note(doc_ids)
        if index.layout.passages:
            count = len(active_rows.documents["document_id"].unique())
        return count, rejected

    async def delete(self, doc_ids: Sequence[str]) -> int:
        """Delete documents, durably in every pair when this returns; return the number of deleted ids."""
        return await asyncio.to_thread(self._delete, doc_ids)

    def _delete(self, doc_ids: Sequence[str]) -> int:
        with self._turn():
            passages = self.active.layout.passages
            results = [each.delete(list(doc_ids)) for each in self._indexes.values()]
            if self._filler is not None:
                self._filler.note(doc_ids)
        return len({*doc_ids}) if passages else sum(shard.rows for shard in results[0].values())

    async def compact(self) -> None:
        """Write the next version of the active index, if there were writes."""
        await self.follow_pairs()
        await asyncio.to_thread(self.active.compact)

    @property
    def active(self) -> LiveIndex:
        """The index of the pair that answers."""
        return next(iter(self._indexes.values()))

    def close(self) -> None:
        """Release the logs."""
        for index in self._indexes.values():
            index.close()

    async def check_health(self) -> None:
        """Raise an error if this process has no claim on the logs or cannot reach them. Ray Serve calls this.

        It also looks for an added pair, so that the pair is filled even if there is no write.
        """

        def check() -> None:
            for index in [*self._indexes.values()]:
                index.require_claim()

        await self._checks.check(check)
        await self.follow_pairs()

    async def follow_pairs(self) -> None:
        """Read changes of the pairs, and start to fill an added pair in the background."""
        if self._has_other_pairs():
            await asyncio.to_thread(self._open_in_turn)
        filler, encoder, idle = self._filler, self._encoder, self._filling is None or self._filling.done()
        if filler is not None and encoder is not None and idle:
            self._filling = asyncio.create_task(self._fill(filler, encoder))

    async def _fill(self, filler: "PairFiller", encoder: Handle) -> None:
        try:
            await filler.run(encoder)
        except Exception:
            log.exception("filling the delta of %s failed; it is retried", filler.index)
            await asyncio.sleep(FILL_AGAIN_S)
            return
        if self._filler is filler:
            self._filler = None
        await asyncio.to_thread(self._catalog.set_filled, filler.index)

    def _has_other_pairs(self) -> bool:
        return self._catalog.pairs_changed_at() != self._read_at

    def _open_in_turn(self) -> None:
        with self._turn():
            pass

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Run one write: concurrently with others if there is one pair, else exclusively."""
        with self._order:
            if self._has_other_pairs():
                with self._alone:
                    self._alone.wait_for(lambda: not self._running)
                self._open_pairs()
            if len(self._indexes) > 1:
                yield
                return
            with self._alone:
                self._running += 1
        try:
            yield
        finally:
            with self._alone:
                self._running -= 1
                self._alone.notify_all()

    def _open_pairs(self) -> None:
        """Open the indexes of new pairs, and close those of removed pairs."""
        read_at, pairs = self._catalog.pairs_changed_at(), self._catalog.pairs()
        indexes, folders = self._indexes, {pair.index: self._catalog.pair_folder(pair) for pair in pairs}
        if self._filler is not None and self._filler.index not in folders:
            self._filler = None
        for uri in indexes.keys() - folders.keys():
            indexes[uri].close()
        self._indexes = {
            uri: indexes[uri]
            if uri in indexes
            else LiveIndex(folder, uri, delta=self._catalog.delta, config=self._config)
            for uri, folder in folders.items()
        }
        second = pairs[-1]  # or the only one, which is filled
        if not second.filled and self._filler is None:
            source = self._catalog.pair_folder(pairs[0])
            self._filler = PairFiller(second.index, self._indexes[second.index], source, self._order)
        self._read_at = read_at


# --- another pair ------------------------------------------------------------------------------------------


class PairFiller:
    """The task that fills the delta of one pair. After an interruption, :meth:`run` continues.

    Args:
        index: URI of the index of the pair.
        target: this index, open for writing.
        source: folder of the active pair; its writes are copied to the target.
        order: lock that every write to the target holds.
    """

    def __init__(self, index: str, target: LiveIndex, source: str, order: threading.Lock) -> None:
        self.index, self._target, self._order = index, target, order
        self._source = versions.log_folder(source, 0)
        self._passages = target.layout.passages
        # The writer itself writes later records to the target.
        self._until = wal.last_acknowledged(self._source)
        target_writes = overridden(versions.log_folder(target.folder, 0), after=0, passages=self._passages)
        self._known = {doc_id for _, doc_ids in target_writes for doc_id in doc_ids}

    def note(self, doc_ids: Sequence[str]) -> None:
        """Mark documents that another write put into the target, to skip them. The caller holds the lock."""
        self._known.update(doc_ids)

    async def run(self, encoder: Handle) -> None:
        """Encode and write the documents that the target lacks.

        ConfigError if a record of the log has no complete documents, or is lost.
        """
        last_writes = await asyncio.to_thread(self._last_writes)
        total, start = len(last_writes), time.monotonic()
        logged_at, filled = start, 0
        log.info("%d documents that were written before are to be encoded for index %s", total, self.index)
        batches = self._batches(last_writes)
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            documents, deleted_ids = batch
            rows = await encoder.encode.remote(documents, self.index) if documents else {}
            await asyncio.to_thread(self._write, rows.get(self.index), deleted_ids)
            filled += len(documents) + len(deleted_ids)
            if (now := time.monotonic()) - logged_at > PROGRESS_S:
                rate = filled / (now - start)
                log.info(
                    "index %s: %d of %d documents filled, %.1f/s, ETA %.0f s",
                    *(self.index, filled, total, rate, (total - filled) / rate),
                )
                logged_at = now
        log.info("index %s has every write: %d documents filled", self.index, filled)

    def _last_writes(self) -> dict[str, int]:
        """Return the last record of each document that was written or deleted and is not known."""
        writes = overridden(self._source, after=0, until=self._until, passages=self._passages)
        last = {doc_id: record for record, doc_ids in writes for doc_id in doc_ids}
        with self._order:
            return {doc_id: record for doc_id, record in last.items() if doc_id not in self._known}

    def _batches(self, last_writes: dict[str, int]) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
        """Yield documents to encode and ids of deleted documents, each from the last record with its id."""
        documents: list[dict[str, Any]] = []
        deleted_ids: list[str] = []
        for record, write in kept_writes(self._source, until=self._until):
            if isinstance(write, Delete):
                ids = [*map(document_of, write.doc_ids)] if self._passages else write.doc_ids
                deleted_ids += [each for each in dict.fromkeys(ids) if last_writes.get(each) == record]
            elif write.sources is not None:
                sources = write.sources.to_pylist()
                documents += [each for each in sources if last_writes.get(each["doc_id"]) == record]
            while len(documents) + len(deleted_ids) >= BATCH_DOCUMENTS:
                yield documents[:BATCH_DOCUMENTS], deleted_ids
                documents, deleted_ids = documents[BATCH_DOCUMENTS:], []
        if documents or deleted_ids:
            yield documents, deleted_ids

    def _write(self, rows: IndexRows | None, deleted_ids: Sequence[str]) -> None:
        with self._order:
            if rows is not None:
                rows = rows_without(rows, self._known)
                self._known.update(write_beside(self._target, rows))
            missing_ids = [doc_id for doc_id in deleted_ids if doc_id not in self._known]
            self._target.delete(missing_ids)
            self._known.update(missing_ids)


def write_rows(index: LiveIndex, rows: IndexRows) -> tuple[list[dict[str, str]], int]:
    """Write rows to the index of a pair; return the rejected ones, and the number of durable rows."""
    results = index.upsert(rows.documents, rows.vectors, rows.sources).values()
    rejected = [row for shard in results for row in shard.rejected]
    return [*rows.rejected, *rejected], sum(shard.rows for shard in results)


def write_beside(index: LiveIndex, rows: IndexRows) -> list[str]:
    """Write rows to a pair that does not answer queries; return the ids of the documents.

    A rejected document is deleted, so that this pair does not keep an earlier version of it.
    """
    rejected, _ = write_rows(index, rows)
    if rejected:
        log.warning("%d rows are rejected in %s, first %s", len(rejected), index.folder, rejected[0])
        index.delete([document_id(row["row"], index) for row in rejected])
    assert rows.sources is not None
    ids: list[str] = rows.sources["doc_id"].to_pylist()
    return ids


def document_id(row: str, index: LiveIndex) -> str:
    """Return the document id of a rejected row, which in an index of passages may be the id of a passage."""
    return document_of(row) if index.layout.passages and "#" in row else row


def rows_without(rows: IndexRows, known: set[str]) -> IndexRows:
    """Return rows without those of known documents."""
    if not known:
        return rows
    assert rows.sources is not None
    ids = rows.documents["document_id" if "document_id" in rows.documents.column_names else "doc_id"]
    is_new = np.array([doc_id not in known for doc_id in ids.to_pylist()], bool)
    sources = rows.sources.filter(pc.invert(pc.is_in(rows.sources["doc_id"], value_set=pa.array(known))))
    rejected = [row for row in rows.rejected if row["row"] not in known]
    return rows._replace(
        documents=rows.documents.filter(pa.array(is_new)),
        vectors=rows.vectors[is_new],
        sources=sources,
        rejected=rejected,
    )
