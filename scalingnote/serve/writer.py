"""Writes of documents: encoders turn them into index rows, one writer process makes the rows durable.

    documents ─► DocumentEncoder (replicas) ─► rows, vectors ─► Writer (one process) ─► log ─► acknowledged
                                                                   searchers follow the log ◄─┘

:class:`DocumentWrites` is the gateway's side, the other two are deployments.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq
from pydantic import ValidationError

from scalingnote.datasets.passages import PassageSplitter
from scalingnote.index.config import LiveConfig
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.run.ingest import DocumentFlow, IndexRows, index_rows
from scalingnote.run.service_config import ENCODING_DEADLINE_S
from scalingnote.serve import messages
from scalingnote.serve.access import conflict, unavailable
from scalingnote.serve.concurrency import Handle, LocalHandle, RequestTimer, gather_in_time
from scalingnote.serve.deployed import Deployed
from scalingnote.serve.towers import HEALTH_TEXT, Location, require_finite
from scalingnote.serve.versions import Versions
from scalingnote.serve.worker_thread import WorkerThread
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import open_artifact


@dataclass(frozen=True)
class DocumentPathParts:
    """The artifacts that turn a document into an index row, for replicas to load."""

    towers: Location
    semantic_ids: Location
    embeddings: Location
    dataset: Location
    snippet_chars: int


class DocumentEncoder:
    """Encodes documents by the document tower, the codebooks and the fusion networks of a run."""

    def __init__(self, parts: DocumentPathParts) -> None:
        locations = (parts.towers, parts.semantic_ids, parts.embeddings, parts.dataset)
        towers, semantic_ids, embeddings, dataset = (open_artifact(uri, kind=kind) for uri, kind in locations)
        self._flow = DocumentFlow.load(towers, semantic_ids, embeddings)
        first = dataset.file(dataset.table_parts("documents")[0])
        self._schema = pq.read_schema(fs.open_input(first))
        self._splitter = PassageSplitter.of(dataset)
        self._snippet_chars = parts.snippet_chars
        self._thread = WorkerThread("documents")

    async def encode(self, documents: Sequence[Mapping[str, Any]]) -> IndexRows:
        """Rows for the writer, and the documents that were rejected."""
        return await self._thread.run(lambda: self._rows(documents))

    async def check_health(self) -> None:
        """Ray Serve's question: an error where a document cannot be encoded, or where the thread hangs."""
        document = {"doc_id": "health", "title": HEALTH_TEXT, "topic": "", "content": HEALTH_TEXT}
        await self._thread.check(lambda: require_finite(self._rows([document]).vectors))

    def _rows(self, documents: Sequence[Mapping[str, Any]]) -> IndexRows:
        return index_rows(
            documents,
            self._flow,
            schema=self._schema,
            snippet_chars=self._snippet_chars,
            splitter=self._splitter,
        )


class Writer:
    """The one process that writes to a live index; the claim on the logs refuses a second one."""

    def __init__(self, folder: str, index: str, config: LiveConfig, delta: bool = False) -> None:
        self._index = LiveIndex(folder, index, delta=delta, config=config)
        self._checks = WorkerThread("health")

    async def upsert(self, rows: IndexRows) -> tuple[int, list[dict[str, str]]]:
        """Number of documents written, and the rejected ones; durable when it returns."""
        written = await asyncio.to_thread(self._index.upsert, rows.documents, rows.vectors)
        rejected = [row for shard in written.values() for row in shard.rejected]
        count = sum(shard.rows for shard in written.values())
        if self._index.layout.passages:
            count = len(rows.documents["document_id"].unique())
        return count, [*rows.rejected, *rejected]

    async def delete(self, doc_ids: Sequence[str]) -> int:
        """Number of ids deleted; durable when it returns."""
        written = await asyncio.to_thread(self._index.delete, list(doc_ids))
        if self._index.layout.passages:
            return len({*doc_ids})
        return sum(shard.rows for shard in written.values())

    async def compact(self) -> None:
        """Write the next version of the index, where there were writes."""
        await asyncio.to_thread(self._index.compact)

    async def check_health(self) -> None:
        """Ray Serve's question: an error where the logs are not this process's, or cannot be reached."""
        await self._checks.check(self._index.require_claim)


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
        encoding = [self._encoder.encode.remote(documents)]
        (rows,) = await gather_in_time(encoding, deadline_s=timer.left_s())
        if rows is None:
            raise unavailable("the documents were not encoded, nothing was written: try again")
        written, rejected_rows = await self._acknowledge(writer.upsert.remote(rows), timer)
        rejected += [messages.Rejected(doc_id=row["row"], reason=row["reason"]) for row in rejected_rows]
        return messages.Written(
            written=written,
            rejected=rejected,
            cut_texts=rows.cost.cut_texts,
            lost_tokens=rows.cost.lost_tokens,
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
