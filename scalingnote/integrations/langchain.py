"""LangChain: embeddings of both sides of a served model, and a retriever over a served index.

Needs ``scalingnote[langchain]`` and a running `scalingnote serve`. ``dumps`` writes the classes without their
key; ``loads`` takes ``valid_namespaces=["scalingnote"]``, the classes as ``allowed_objects``, and the key in
``secrets_map`` by the name SCALINGNOTE_API_KEY.
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.load import Serializable
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, SecretStr

from scalingnote.integrations.client import (
    KEY_VARIABLE,
    Address,
    Client,
    client,
    metadata_of,
    text_of,
)


class _Keyed(Serializable):
    """Base of both classes, of which ``dumps`` writes all fields except the key."""

    url: Address
    api_key: SecretStr | None = None

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return whether ``dumps`` can write the class."""
        return True

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Name of the key, which ``dumps`` writes instead of the key."""
        return {"api_key": KEY_VARIABLE}


class ScalingNoteEmbeddings(_Keyed, Embeddings):
    """Embeddings of documents by the document tower, and of queries by the query tower.

    Args:
        url: URL of the server.
        api_key: API key, if the server requires one.
        model: a name from ``/v1/models``; None: the server's model.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None

    def __init__(self, url: str, *, api_key: str | SecretStr | None = None, model: str | None = None) -> None:
        super().__init__(url=url, api_key=api_key, model=model)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return unit embeddings of documents."""
        return self._client().embed(texts, "document")

    def embed_query(self, text: str) -> list[float]:
        """Return the unit embedding of a query."""
        return self._client().embed([text], "query")[0]

    def _client(self) -> Client:
        return client(self.url, self.api_key, self.model)


class ScalingNoteRetriever(_Keyed, BaseRetriever):
    """Retriever over the server's index; `filter` has fields that its ``/info`` lists."""

    model_config = ConfigDict(extra="forbid")

    k: int = 10
    filter: dict[str, Any] | None = None

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        server = client(self.url, self.api_key)
        return [
            Document(id=hit["doc_id"], page_content=text_of(hit), metadata=metadata_of(hit))
            for hit in server.search(query, k=self.k, filter=self.filter)
        ]
