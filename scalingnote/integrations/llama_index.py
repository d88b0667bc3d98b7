"""LlamaIndex: embeddings of both sides of a served model, and a retriever over a served index.

Needs ``scalingnote[llama-index]`` and a running `scalingnote serve`. ``to_dict`` leaves the key out:
``from_dict(data, api_key=KEY)`` adds it.
"""

import asyncio
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from pydantic import ConfigDict, Field, SecretStr

from scalingnote.core.errors import ConfigError
from scalingnote.integrations.client import (
    Address,
    Client,
    address,
    client,
    metadata_of,
    text_of,
)


class ScalingNoteEmbedding(BaseEmbedding):
    """Embeddings of nodes by the document tower, and of queries by the query tower, of the server at `url`.

    The cache of an IngestionPipeline distinguishes servers by `url` and `model`: set `model` if the server's
    model may change.
    """

    model_config = ConfigDict(extra="forbid")

    url: Address
    api_key: SecretStr | None = Field(None, exclude=True)
    model: str | None = None

    def __init__(
        self, url: str, *, api_key: str | SecretStr | None = None, model: str | None = None, **more: Any
    ) -> None:
        if more.get("embeddings_cache") is not None:
            raise ConfigError(
                "embeddings_cache has one embedding per text, for all sides and servers: "
                "use the cache of an IngestionPipeline"
            )
        more.setdefault("model_name", model or "scalingnote")
        super().__init__(url=url, api_key=api_key, model=model, **more)

    @classmethod
    def class_name(cls) -> str:
        """Return the name in dictionaries and events."""
        return "ScalingNoteEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._client().embed([query], "query")[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._client().embed(texts, "document")

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)

    def _client(self) -> Client:
        return client(self.url, self.api_key, self.model)


class ScalingNoteRetriever(BaseRetriever):
    """Retriever of the `k` best documents in the server's index; `filter` has fields of its ``/info``."""

    def __init__(
        self,
        url: str,
        *,
        k: int = 10,
        filter: dict[str, Any] | None = None,
        api_key: str | SecretStr | None = None,
    ) -> None:
        super().__init__()
        self.url, self.k, self.filter = address(url), k, filter
        self.api_key = SecretStr(api_key) if isinstance(api_key, str) else api_key

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        server = client(self.url, self.api_key)
        hits = server.search(query_bundle.query_str, k=self.k, filter=self.filter)
        nodes = [TextNode(id_=hit["doc_id"], text=text_of(hit), metadata=metadata_of(hit)) for hit in hits]
        return [NodeWithScore(node=node, score=hit["score"]) for node, hit in zip(nodes, hits, strict=True)]
