"""Haystack: embedders of both sides of a served model, and a retriever over a served index.

Needs ``scalingnote[haystack]`` and a running `scalingnote serve`.
"""

from dataclasses import replace
from typing import Any

from haystack import Document, component

from scalingnote.integrations.client import Client, metadata_of, text_of


@component
class ScalingNoteTextEmbedder:
    """Embeds queries by the query tower of the server at `url`."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._client = Client(url, api_key=api_key, model=model)

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """The unit embedding of a query."""
        return {"embedding": self._client.embed([text], "query")[0]}


@component
class ScalingNoteDocumentEmbedder:
    """Embeds documents by the document tower of the server at `url`."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._client = Client(url, api_key=api_key, model=model)

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """The documents with their unit embeddings."""
        vectors = self._client.embed([document.content or "" for document in documents], "document")
        pairs = zip(documents, vectors, strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}


@component
class ScalingNoteRetriever:
    """The best documents of the index of the server at `url`."""

    def __init__(self, url: str, top_k: int = 10, api_key: str | None = None) -> None:
        self._client, self._top_k = Client(url, api_key=api_key), top_k

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, filters: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The documents, best first; `filters` has fields that the server's ``/info`` lists."""
        hits = self._client.search(query, k=top_k or self._top_k, filter=filters)
        found = [
            Document(hit["doc_id"], text_of(hit), meta=metadata_of(hit), score=hit["score"]) for hit in hits
        ]
        return {"documents": found}
