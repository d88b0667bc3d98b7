"""The deployment that encodes documents for a live index, by the models of all pairs that take writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.datasets.passages import PassageSplitter
from scalingnote.run.ingest import DocumentFlow, IndexRows, index_rows
from scalingnote.serve.concurrency import WorkerThread
from scalingnote.serve.live_pairs import DocumentPathParts, LivePair, LivePairs
from scalingnote.serve.towers import HEALTH_TEXT, require_finite
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import open_artifact


@dataclass(frozen=True)
class _DocumentPath:
    """What turns documents into rows of one index, loaded."""

    flow: DocumentFlow
    schema: pa.Schema  # of the documents of the data set
    splitter: PassageSplitter | None
    snippet_chars: int

    @classmethod
    def load(cls, parts: DocumentPathParts) -> "_DocumentPath":
        locations = (parts.towers, parts.semantic_ids, parts.embeddings, parts.dataset)
        towers, semantic_ids, embeddings, dataset = (open_artifact(uri, kind=kind) for uri, kind in locations)
        words = parts.bm25_terms and open_artifact(parts.bm25_terms[0], kind=parts.bm25_terms[1])
        first = dataset.file(dataset.table_parts("documents")[0])
        return cls(
            DocumentFlow.load(towers, semantic_ids, embeddings, words),
            pq.read_schema(fs.open_input(first)),
            PassageSplitter.of(dataset),
            parts.snippet_chars,
        )

    def rows(self, documents: Sequence[Mapping[str, Any]]) -> IndexRows:
        return index_rows(
            documents,
            self.flow,
            schema=self.schema,
            snippet_chars=self.snippet_chars,
            splitter=self.splitter,
        )


class DocumentEncoder:
    """Encodes documents by the document tower, the codebooks and the fusion networks of each pair.

    Args:
        pairs: of the live folder.
        keeps_documents: whether the writer wants them whole, too.
    """

    def __init__(self, pairs: LivePairs, keeps_documents: bool = False) -> None:
        self._pairs, self._keeps_documents, self._read_at = pairs, keeps_documents, pairs.changed_at()
        self._paths: dict[str, _DocumentPath] = {}  # by index
        self._thread = WorkerThread("documents")
        self._load(pairs.read())

    async def encode(
        self, documents: Sequence[Mapping[str, Any]], only: str | None = None
    ) -> dict[str, IndexRows]:
        """For each pair, by its index, the rows for the writer and the documents that were rejected.

        `only`: the index of one pair, whose rows alone are wanted.
        """
        return await self._thread.run(lambda: self._rows(documents, only))

    async def check_health(self) -> None:
        """Ray Serve's question: an error where a document cannot be encoded, or where the thread hangs."""
        document = {"doc_id": "health", "title": HEALTH_TEXT, "topic": "", "content": HEALTH_TEXT}

        def check() -> None:
            for rows in self._rows([document], None).values():
                require_finite(rows.vectors)

        await self._thread.check(check)

    def _rows(self, documents: Sequence[Mapping[str, Any]], only: str | None) -> dict[str, IndexRows]:
        if (changed := self._pairs.changed_at()) != self._read_at:
            self._load(self._pairs.read())
            self._read_at = changed
        found = {index: path.rows(documents) for index, path in self._paths.items() if only in (None, index)}
        if self._keeps_documents:
            return found
        return {index: rows._replace(sources=None) for index, rows in found.items()}

    def _load(self, pairs: Sequence[LivePair]) -> None:
        parts = {pair.index: pair.documents for pair in pairs if pair.documents is not None}
        self._paths = {
            index: self._paths.get(index) or _DocumentPath.load(own) for index, own in parts.items()
        }
