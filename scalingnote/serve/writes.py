"""Writes of documents: encoders convert them to index rows, and one writer process makes these durable.

    documents ─► DocumentEncoder (replicas) ─► rows, vectors ─► Writer (one process) ─► log ─► acknowledged
                                                                   searchers follow the log ◄─┘

:class:`DocumentWrites` is the side of the gateway, :class:`DocumentEncoder` a deployment. The writer, another
deployment, is in :mod:`scalingnote.serve.writer`. While there are two pairs of a model and its index
(:mod:`scalingnote.serve.live_catalog`), each write goes to both.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow.parquet as pq
from pydantic import ValidationError

from scalingnote.datasets.passages import PassageSplitter
from scalingnote.run.ingest import DocumentFlow, IndexRows, index_rows
from scalingnote.run.service_config import ENCODING_DEADLINE_S
from scalingnote.serve import messages
from scalingnote.serve.access import conflict, unavailable
from scalingnote.serve.concurrency import Handle, LocalHandle, RequestTimer, WorkerThread, gather_in_time
from scalingnote.serve.deployed import Deployed
from scalingnote.serve.live_catalog import DocumentPathParts, LiveCatalog
from scalingnote.serve.towers import HEALTH_TEXT, require_finite
from scalingnote.serve.versions import Versions
from scalingnote.serve.writer import Outcome
from scalingnote.storage.artifact import open_artifact


class DocumentWrites:
    """The requests that write.

    Searchers in this process show a write at once, others after
    :data:`~scalingnote.serve.versions.LIVE_REFRESH_S`. With a delta, this gateway shows a write at once, and
    other gateways after that time.

    Args:
        deployed: without a writer the index is read-only, and every write is refused.
        versions: change to the version that a compaction writes.
    """

    def __init__(self, deployed: Deployed, versions: Versions) -> None:
        self._encoder, self._writer, self._versions = deployed.document_encoder, deployed.writer, versions
        self._local_searchers = [each for each in deployed.searchers if isinstance(each, LocalHandle)]

    async def upsert(self, request: messages.UpsertRequest) -> messages.Written:
        """Write documents, each in place of the one with its id. They are durable when this returns."""
        writer, timer = self._require_writer(), RequestTimer(ENCODING_DEADLINE_S)
        messages.check_batch(request.documents, "documents")
        documents, rejected = _validate(request.documents)
        assert self._encoder is not None  # deployed with the writer
        outcome: Outcome | tuple[()] = ()
        while not outcome:  # repeated with the rows of a pair that was added meanwhile
            encoding = [self._encoder.encode.remote(documents)]
            (rows,) = await gather_in_time(encoding, deadline_s=timer.left_s())
            if rows is None:
                raise unavailable("the documents were not encoded, nothing was written: try again")
            outcome = await self._acknowledge(writer.upsert.remote(rows), timer)
            cost = next(iter(rows.values())).cost
        written, rejected_rows = outcome
        rejected += [messages.Rejected(doc_id=row["row"], reason=row["reason"]) for row in rejected_rows]
        return messages.Written(
            written=written,
            rejected=rejected,
            cut_texts=cost.cut_texts,
            lost_tokens=cost.lost_tokens,
        )

    async def delete(self, doc_ids: Sequence[str]) -> messages.Deleted:
        """Delete documents, durably when this returns. An id that is not in the index is not an error."""
        writer = self._require_writer()
        messages.check_batch(doc_ids, "doc_ids")
        timer = RequestTimer(ENCODING_DEADLINE_S)
        count = await self._acknowledge(writer.delete.remote(doc_ids), timer)
        return messages.Deleted(deleted=count)

    async def compact(self) -> None:
        """Write the next version of a live index now, and answer from it."""
        writer = self._require_writer()

        async def compact_and_follow() -> None:
            await writer.compact.remote()
            await self._versions.follow()

        # A compaction continues if its request is cancelled.
        await asyncio.shield(asyncio.create_task(compact_and_follow()))

    def _require_writer(self) -> Handle:
        if self._writer is None:
            raise conflict("this index is read-only: set serve.live to a folder for its writes")
        return self._writer

    async def _acknowledge(self, call: Any, timer: RequestTimer) -> Any:
        """Return the writer's answer after the searchers of this process have read its write."""
        (answer,) = await gather_in_time([call], deadline_s=timer.left_s())
        if answer is None:
            raise unavailable("not acknowledged: the write may be durable or not, send it again")
        for searcher in self._local_searchers:
            await searcher.refresh.remote()
        if self._versions.deltas is not None:
            await self._versions.deltas.refresh()
        return answer


def _validate(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[messages.Rejected]]:
    """Return the rows that are valid documents, and the reason for each other row."""
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


# --- the encoder ------------------------------------------------------------------------------------------


class DocumentEncoder:
    """An encoder of documents by the document tower, the codebooks and the fusion networks of each pair.

    Args:
        catalog: of the live folder.
        keeps_documents: whether rows have the complete documents, too, for the writer's log.
    """

    def __init__(self, catalog: LiveCatalog, keeps_documents: bool = False) -> None:
        self._catalog, self._keeps_documents = catalog, keeps_documents
        self._paths: dict[str, Callable[[Sequence[Mapping[str, Any]]], IndexRows]] = {}  # by index
        self._thread = WorkerThread("documents")
        self._load()

    async def encode(
        self, documents: Sequence[Mapping[str, Any]], only: str | None = None
    ) -> dict[str, IndexRows]:
        """Encode documents for each pair; return its rows for the writer, with the rejected ones, by index.

        `only`: the index of one pair; documents are encoded only for it.
        """
        return await self._thread.run(lambda: self._rows(documents, only))

    async def check_health(self) -> None:
        """Raise an error if a document cannot be encoded or the thread hangs. Ray Serve calls this."""
        document = {"doc_id": "health", "title": HEALTH_TEXT, "topic": "", "content": HEALTH_TEXT}

        def check() -> None:
            for rows in self._rows([document], None).values():
                require_finite(rows.vectors)

        await self._thread.check(check)

    def _rows(self, documents: Sequence[Mapping[str, Any]], only: str | None) -> dict[str, IndexRows]:
        if self._catalog.pairs_changed_at() != self._read_at:
            self._load()
        rows = {index: encode(documents) for index, encode in self._paths.items() if only in (None, index)}
        if self._keeps_documents:
            return rows
        return {index: each._replace(sources=None) for index, each in rows.items()}

    def _load(self) -> None:
        read_at = self._catalog.pairs_changed_at()
        self._paths = {
            pair.index: self._paths.get(pair.index) or _row_encoder(pair.documents)
            for pair in self._catalog.pairs()
            if pair.documents is not None
        }
        self._read_at = read_at


def _row_encoder(parts: DocumentPathParts) -> Callable[[Sequence[Mapping[str, Any]]], IndexRows]:
    """Load the function that converts documents to rows of one index."""
    locations = (parts.towers, parts.semantic_ids, parts.embeddings, parts.dataset)
    towers, semantic_ids, embeddings, dataset = (open_artifact(uri, kind=kind) for uri, kind in locations)
    words = parts.bm25_terms and open_artifact(parts.bm25_terms[0], kind=parts.bm25_terms[1])
    return partial(
        index_rows,
        flow=DocumentFlow.load(towers, semantic_ids, embeddings, words),
        schema=pq.read_schema(dataset.open(dataset.table_parts("documents")[0])),
        snippet_chars=parts.snippet_chars,
        splitter=PassageSplitter.of(dataset),
    )
