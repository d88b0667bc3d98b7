"""Writes of documents: encoders turn their text into rows of the index, one writer makes them durable.

documents ─► DocumentEncoder (replicas) ─► rows, vectors ─► Writer (one process) ─► log ─► acknowledged
                                                               searchers follow the log ◄─┘
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from scalingnote.index.live.config import LiveConfig
from scalingnote.index.live.index import LiveIndex
from scalingnote.ingest.flow import DocumentFlow
from scalingnote.ingest.rows import IndexRows, index_rows
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import open_artifact

Place = tuple[str, str]  # URI and kind of an artifact


@dataclass(frozen=True)
class DocumentParts:
    """Where the parts lie that make an index row of a document."""

    towers: Place
    semantic_ids: Place
    embeddings: Place
    dataset: Place
    snippet_chars: int


class DocumentEncoder:
    """Holds the document tower of a run, its codebooks, and the networks that merge features in."""

    def __init__(self, parts: DocumentParts) -> None:
        places = (parts.towers, parts.semantic_ids, parts.embeddings, parts.dataset)
        towers, semantic_ids, embeddings, dataset = (open_artifact(uri, kind=kind) for uri, kind in places)
        self._flow = DocumentFlow.load(towers, semantic_ids, embeddings)
        first = dataset.file(dataset.table_parts("documents")[0])
        self._schema = pq.read_schema(fs.open_input(first))
        self._snippet_chars = parts.snippet_chars
        self._one_by_one = asyncio.Lock()

    async def encode(self, documents: Sequence[Mapping[str, Any]]) -> IndexRows:
        """Rows for the writer, and the documents that were set aside."""
        async with self._one_by_one:
            return await asyncio.to_thread(
                index_rows, documents, self._flow, schema=self._schema, snippet_chars=self._snippet_chars
            )

    async def ping(self) -> bool:
        """Answers as long as the event loop turns."""
        return True


class Writer:
    """The one process that writes: a second is refused by the claim on the logs."""

    def __init__(self, folder: str, index: str, config: LiveConfig) -> None:
        self._index = LiveIndex(folder, index, config=config)

    async def upsert(self, rows: IndexRows) -> tuple[int, list[dict[str, str]]]:
        """Durable when it returns: how many were written, and those set aside."""
        written = await asyncio.to_thread(self._index.upsert, rows.documents, rows.vectors)
        rejected = [row for shard in written.values() for row in shard.rejected]
        return sum(shard.rows for shard in written.values()), [*rows.rejected, *rejected]

    async def delete(self, doc_ids: Sequence[str]) -> int:
        """Durable when it returns: how many ids were taken."""
        written = await asyncio.to_thread(self._index.delete, list(doc_ids))
        return sum(shard.rows for shard in written.values())

    async def compact(self) -> str | None:
        """Write the next version of the index; its URI, None where there was nothing new."""
        made = await asyncio.to_thread(self._index.compact)
        return None if made is None else made.uri

    async def ping(self) -> bool:
        """Answers as long as the event loop turns."""
        return True
