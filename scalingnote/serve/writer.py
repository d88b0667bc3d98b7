"""Writes of documents: encoders turn them into index rows, one writer process makes the rows durable.

    documents ─► DocumentEncoder (replicas) ─► rows, vectors ─► Writer (one process) ─► log ─► acknowledged
                                                                   searchers follow the log ◄─┘

:class:`DocumentWrites` is the gateway's side, the other two are deployments, the first in
:mod:`scalingnote.serve.document_encoder`. While there are two pairs of a
model and its index (:mod:`scalingnote.serve.live_pairs`), both take each write.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from scalingnote.index.config import LiveConfig
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.run.ingest import IndexRows
from scalingnote.run.service_config import ENCODING_DEADLINE_S
from scalingnote.serve import messages
from scalingnote.serve.access import conflict, unavailable
from scalingnote.serve.concurrency import (
    Handle,
    LocalHandle,
    RequestTimer,
    WorkerThread,
    for_reading,
    gather_in_time,
)
from scalingnote.serve.deployed import Deployed
from scalingnote.serve.live_pairs import LivePairs
from scalingnote.serve.pair_filler import PairFiller, document_id, rows_without, write_beside, write_rows
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.versions import Versions

FILL_AGAIN_S = 5.0  # after an error
Outcome = tuple[int, list[dict[str, str]]]  # documents written, and rejected rows
log = get_logger()


class Writer:
    """The one process that writes to a live index; the claim on the logs refuses a second one.

    Where the folder has two pairs, each write goes to both before it is acknowledged, and a pair that was
    added is given what was written before (:mod:`scalingnote.serve.pair_filler`).

    Args:
        pairs: of the folder; without a delta the first one alone.
        config: of the index.
        delta: whether what is written lies beside the index.
        encoder: the DocumentEncoder, for a pair that is added; None: none can be filled.
    """

    def __init__(
        self, pairs: LivePairs, config: LiveConfig, delta: bool = False, encoder: Handle | None = None
    ) -> None:
        self._pairs, self._config, self._delta = pairs, config, delta
        self._encoder = None if encoder is None else for_reading(encoder)
        self._checks = WorkerThread("health")
        self._order = threading.Lock()  # held by a write where there are two pairs: both get one order
        self._alone = threading.Condition()
        self._running = 0  # writes, where there is one pair
        self._indexes: dict[str, LiveIndex] = {}  # by the URI of the built one, that of the active pair first
        self._fillers: dict[str, PairFiller] = {}  # of the pairs that are not filled, by the same
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
            (first, *others) = self._indexes
            index, own = self._indexes[first], rows[first]
            rejected, written = write_rows(index, own)
            for uri in others:
                given = rows_without(rows[uri], {document_id(row["row"], index) for row in rejected})
                filled = write_beside(self._indexes[uri], given)
                if uri in self._fillers:
                    self._fillers[uri].note(filled)
        return (len(own.documents["document_id"].unique()) if index.layout.passages else written), rejected

    async def delete(self, doc_ids: Sequence[str]) -> int:
        """Number of ids deleted; durable in every pair when it returns."""
        return await asyncio.to_thread(self._delete, doc_ids)

    def _delete(self, doc_ids: Sequence[str]) -> int:
        with self._turn():
            (first, *others) = self._indexes
            index = self._indexes[first]
            written = index.delete(list(doc_ids))
            for uri in others:
                self._indexes[uri].delete(list(doc_ids))
                if uri in self._fillers:
                    self._fillers[uri].note(doc_ids)
        return len({*doc_ids}) if index.layout.passages else sum(shard.rows for shard in written.values())

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
        if self._fillers and self._encoder is not None and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill(self._encoder))

    async def _fill(self, encoder: Handle) -> None:
        for uri, filler in [*self._fillers.items()]:
            try:
                await filler.run(encoder, uri)
            except Exception:
                log.exception("filling the delta of %s failed; it is tried again", uri)
                await asyncio.sleep(FILL_AGAIN_S)
            else:
                self._fillers.pop(uri, None)
                await asyncio.to_thread(self._pairs.set_filled, uri)

    def _has_other_pairs(self) -> bool:
        return self._delta and self._pairs.changed_at() != self._read_at

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
        read_at = self._pairs.changed_at()
        listed = self._pairs.read() if self._delta else (self._pairs.first,)
        opened, folders = self._indexes, {pair.index: self._pairs.folder(pair) for pair in listed}
        for uri in opened.keys() - folders.keys():
            self._fillers.pop(uri, None)
            opened[uri].close()
        self._indexes = {
            uri: opened[uri]
            if uri in opened
            else LiveIndex(folder, uri, delta=self._delta, config=self._config)
            for uri, folder in folders.items()
        }
        for pair in listed[1:]:
            if not pair.filled and pair.index not in self._fillers:
                active = self._pairs.folder(listed[0])
                self._fillers[pair.index] = PairFiller(self._indexes[pair.index], active, self._order)
        self._read_at = read_at


class DocumentWrites:
    """Requests that write.

    Searchers in this process show a write at once, others after
    :data:`~scalingnote.serve.delta.LIVE_REFRESH_S`; with a delta, so do this gateway and all others.

    Args:
        deployed: without a writer the index is read only, and every write is refused.
        versions: follow a compaction.
    """

    def __init__(self, deployed: Deployed, versions: Versions) -> None:
        self._encoder, self._writer, self._versions = deployed.document_encoder, deployed.writer, versions
        self._local_searchers = [each for each in deployed.searchers if isinstance(each, LocalHandle)]

    async def upsert(self, request: messages.UpsertRequest) -> messages.Written:
        """Write documents, each in place of the one with its id; durable when it returns."""
        writer, timer = self._require_writer(), RequestTimer(ENCODING_DEADLINE_S)
        messages.check_batch(request.documents, "documents")
        documents, rejected = _validate(request.documents)
        assert self._encoder is not None  # deployed with the writer
        acknowledged: Outcome | tuple[()] = ()
        while not acknowledged:  # again with the rows of a pair that was added meanwhile
            encoding = [self._encoder.encode.remote(documents)]
            (rows,) = await gather_in_time(encoding, deadline_s=timer.left_s())
            if rows is None:
                raise unavailable("the documents were not encoded, nothing was written: try again")
            acknowledged = await self._acknowledge(writer.upsert.remote(rows), timer)
            cost = next(iter(rows.values())).cost
        written, rejected_rows = acknowledged
        rejected += [messages.Rejected(doc_id=row["row"], reason=row["reason"]) for row in rejected_rows]
        return messages.Written(
            written=written,
            rejected=rejected,
            cut_texts=cost.cut_texts,
            lost_tokens=cost.lost_tokens,
        )

    async def delete(self, doc_ids: Sequence[str]) -> messages.Deleted:
        """Delete documents; ids that are not in the index are no error. Durable when it returns."""
        writer = self._require_writer()
        messages.check_batch(doc_ids, "doc_ids")
        timer = RequestTimer(ENCODING_DEADLINE_S)
        deleted = await self._acknowledge(writer.delete.remote(doc_ids), timer)
        return messages.Deleted(deleted=deleted)

    async def compact(self) -> None:
        """Write the next version of a live index now, and answer from it."""
        writer = self._require_writer()

        async def compact_and_follow() -> None:
            await writer.compact.remote()
            await self._versions.follow()

        # A compaction goes on when its request is cancelled.
        await asyncio.shield(asyncio.create_task(compact_and_follow()))

    def _require_writer(self) -> Handle:
        if self._writer is None:
            raise conflict("this index is read only: set serve.live to a folder for its writes")
        return self._writer

    async def _acknowledge(self, call: Any, timer: RequestTimer) -> Any:
        """The writer's answer, once the searchers of this process have read what it wrote."""
        (answer,) = await gather_in_time([call], deadline_s=timer.left_s())
        if answer is None:
            raise unavailable("not acknowledged: the write may be there or not, send it again")
        for searcher in self._local_searchers:
            await searcher.refresh.remote()
        if self._versions.deltas is not None:
            await self._versions.deltas.refresh()
        return answer


def _validate(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[messages.Rejected]]:
    """The rows that are valid documents, and the reason for each of the others."""
    documents, rejected = [], []
    for number, row in enumerate(rows):
        try:
            documents.append(messages.Document.model_validate(row).model_dump())
        except ValidationError as error:
            (first, *_) = error.errors()
            field = ".".join(map(str, first["loc"]))
            doc_id = row.get("doc_id")
            if not isinstance(doc_id, str) or not 0 < len(doc_id) <= 512 or not doc_id.isprintable():
                doc_id = f"document {number}"
            rejected.append(messages.Rejected(doc_id=doc_id, reason=f"{field}: {first['msg']}"))
    return documents, rejected
