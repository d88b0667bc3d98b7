"""LangChain: embeddings of both sides of a served model, and a retriever over a served index.

Needs ``scalingnote[langchain]`` and a running `scalingnote serve`.
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever

from scalingnote.integrations.client import Client, metadata_of, text_of


class ScalingNoteEmbeddings(Embeddings):
    """Documents are embedded by the document tower, queries by the query tower.

    Args:
        url: of the server.
        api_key: where the server asks for one.
        model: a name of ``/v1/models``; None: the server's own.
    """

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        self._client = Client(url, api_key=api_key, model=model)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Unit embeddings of texts that are to be found."""
        return self._client.embed(texts, "document")

    def embed_query(self, text: str) -> list[float]:
        """Unit embedding of a query."""
        return self._client.embed([text], "query")[0]


class ScalingNoteRetriever(BaseRetriever):
    """The best documents of the server's index; `filter` has fields that its ``/info`` lists."""

    url: str
    k: int = 10
    filter: dict[str, Any] | None = None
    api_key: str | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        hits = Client(self.url, api_key=self.api_key).search(query, k=self.k, filter=self.filter)
        return [
            Document(id=hit["doc_id"], page_content=text_of(hit), metadata=metadata_of(hit)) for hit in hits
        ]
