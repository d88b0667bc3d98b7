"""The one process that writes to a live index, and has another model's index take the same writes.

    rows of each pair, by its index ─► Writer ─► log of each pair ─► acknowledged
    log of the active pair ─► last write of each document ─► DocumentEncoder ─► log of an added pair

Since a pair was added, the writer gives it each write as it comes. What was written before is encoded again
and written to its delta by :class:`PairFiller`. Writes that came since are later, so a document that the
pair's log names is left alone: its log also says what was filled before a kill.
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
BATCH_DOCUMENTS = 64  # encoded at a time to fill a pair, beside the documents of requests
PROGRESS_S = 10.0  # between two log lines
Outcome = tuple[int, list[dict[str, str]]]  # documents written, and rejected rows
log = get_logger()


class Writer:
    """The one process that writes to a live index; the claim on the logs refuses a second one.

    Where the folder has two pairs, each write goes to both before it is acknowledged.

    Args:
        catalog: of the folder.
        config: of the index.
        encoder: the DocumentEncoder, for a pair that is added; None: none can be filled.
    """

    def __init__(self, catalog: LiveCatalog, config: LiveConfig, encoder: Handle | None = None) -> None:
        self._catalog, self._config = catalog, config
        self._encoder = None if encoder is None else for_reading(encoder)
        self._checks = WorkerThread("health")
        self._order = threading.Lock()  # held by a write where there are two pairs: both get one order
        self._alone = threading.Condition()
        self._running = 0  # writes, where there is one pair
        self._indexes: dict[str, LiveIndex] = {}  # by the URI of the built one, that of the active pair first
        self._filler: PairFiller | None = None  # of a second pair that is not filled
        self._filling: asyncio.Task[None] | None = None
        self._open_pairs()

    async def upsert(self, rows: Mapping[str, IndexRows]) -> Outcome | tuple[()]:
        """Write documents; durable in every pair when it returns.

        Args:
            rows: of each pair, by its index.

        Returns:
            Number of documents written, and the rejected ones. Nothing where a pair was added since they were
            encoded: none was written, encode them again.
        """
        return await asyncio.to_thread(self._upsert, rows)

    def _upsert(self, rows: Mapping[str, IndexRows]) -> Outcome | tuple[()]:
        with self._turn():
            if not self._indexes.keys() <= rows.keys():
                return ()
            (first, *second) = self._indexes
            index, own = self._indexes[first], rows[first]
            rejected, written = write_rows(index, own)
            for uri in second:
                given = rows_without(rows[uri], {document_id(row["row"], index) for row in rejected})
                written_beside = write_beside(self._indexes[uri], given)
                if self._filler is not None:
                    self._filler.note(written_beside)
        return (len(own.documents["document_id"].unique()) if index.layout.passages else written), rejected

    async def delete(self, doc_ids: Sequence[str]) -> int:
        """Number of ids deleted; durable in every pair when it returns."""
        return await asyncio.to_thread(self._delete, doc_ids)

    def _delete(self, doc_ids: Sequence[str]) -> int:
        with self._turn():
            passages = self.active.layout.passages
            deleted = [each.delete(list(doc_ids)) for each in self._indexes.values()]
            if self._filler is not None:
                self._filler.note(doc_ids)
        return len({*doc_ids}) if passages else sum(shard.rows for shard in deleted[0].values())

    async def compact(self) -> None:
        """Write the next version of the active index, where there were writes."""
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
        """Ray Serve's question: an error where the logs are not this process's, or cannot be reached.

        A pair that was added is looked for, too: its filling does not wait for a write.
        """

        def check() -> None:
            for index in [*self._indexes.values()]:
                index.require_claim()

        await self._checks.check(check)
        await self.follow_pairs()

    async def follow_pairs(self) -> None:
        """Take note of a change of the pairs, and fill one that was added in the background."""
        if self._has_other_pairs():
            await asyncio.to_thread(self._open_in_turn)
        filler, encoder, idle = self._filler, self._encoder, self._filling is None or self._filling.done()
        if filler is not None and encoder is not None and idle:
            self._filling = asyncio.create_task(self._fill(filler, encoder))

    async def _fill(self, filler: "PairFiller", encoder: Handle) -> None:
        try:
            await filler.run(encoder)
        except Exception:
            log.exception("filling the delta of %s failed; it is tried again", filler.index)
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
        """One write: beside others while there is one pair, alone else."""
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
        """Open the indexes of all pairs that are not open, and close those of pairs that ended."""
        read_at, listed = self._catalog.pairs_changed_at(), self._catalog.pairs()
        opened, folders = self._indexes, {pair.index: self._catalog.pair_folder(pair) for pair in listed}
        if self._filler is not None and self._filler.index not in folders:
            self._filler = None
        for uri in opened.keys() - folders.keys():
            opened[uri].close()
        self._indexes = {
            uri: opened[uri]
            if uri in opened
            else LiveIndex(folder, uri, delta=self._catalog.delta, config=self._config)
            for uri, folder in folders.items()
        }
        second = listed[-1]  # or the only one, which is filled
        if not second.filled and self._filler is None:
            source = self._catalog.pair_folder(listed[0])
            self._filler = PairFiller(second.index, self._indexes[second.index], source, self._order)
        self._read_at = read_at


# --- another pair ------------------------------------------------------------------------------------------


class PairFiller:
    """Fills the delta of one pair; :meth:`run` again goes on where it was ended.

    Args:
        index: URI of the pair's index.
        target: that index, open for writing.
        source: folder of the active pair, all of whose writes the target is to have.
        order: held by every write to the target.
    """

    def __init__(self, index: str, target: LiveIndex, source: str, order: threading.Lock) -> None:
        self.index, self._target, self._order = index, target, order
        self._source = versions.log_folder(source, 0)
        self._passages = target.layout.passages
        # Later records come with the writer's own writes.
        self._until = wal.last_acknowledged(self._source)
        own = overridden(versions.log_folder(target.folder, 0), after=0, passages=self._passages)
        self._known = {doc_id for _, doc_ids in own for doc_id in doc_ids}

    def note(self, doc_ids: Sequence[str]) -> None:
        """Leave documents alone that are written to the target by others, who hold the lock."""
        self._known.update(doc_ids)

    async def run(self, encoder: Handle) -> None:
        """Encode and write what the target lacks.

        ConfigError where a record of the log has no whole documents, or is gone.
        """
        left = await asyncio.to_thread(self._last_writes)
        total, start = len(left), time.monotonic()
        said, filled = start, 0
        log.info("%d documents that were written before are to be encoded for index %s", total, self.index)
        batches = self._batches(left)
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            documents, deleted = batch
            encoded = await encoder.encode.remote(documents, self.index) if documents else {}
            await asyncio.to_thread(self._write, encoded.get(self.index), deleted)
            filled += len(documents) + len(deleted)
            if (now := time.monotonic()) - said > PROGRESS_S:
                rate = filled / (now - start)
                log.info(
                    "index %s: %d of %d documents filled, %.1f/s, ETA %.0f s",
                    *(self.index, filled, total, rate, (total - filled) / rate),
                )
                said = now
        log.info("index %s has every write: %d documents filled", self.index, filled)

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
