"""LlamaIndex: embeddings of both sides of a served model, and a retriever over a served index.

Needs ``scalingnote[llama-index]`` and a running `scalingnote serve`.
"""

import asyncio
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from scalingnote.integrations.client import Client, metadata_of, text_of


class ScalingNoteEmbedding(BaseEmbedding):
    """Nodes are embedded by the document tower, queries by the query tower of the server at `url`."""

    _client: Client = PrivateAttr()

    def __init__(
        self, url: str, *, api_key: str | None = None, model: str | None = None, **more: Any
    ) -> None:
        super().__init__(model_name=model or "scalingnote", **more)
        self._client = Client(url, api_key=api_key, model=model)

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._client.embed([query], "query")[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._client.embed(texts, "document")


class ScalingNoteRetriever(BaseRetriever):
    """The `k` best documents of the server's index; `filter` has fields that its ``/info`` lists."""

    def __init__(
        self, url: str, *, k: int = 10, filter: dict[str, Any] | None = None, api_key: str | None = None
    ) -> None:
        super().__init__()
        self._client, self._k, self._filter = Client(url, api_key=api_key), k, filter

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        hits = self._client.search(query_bundle.query_str, k=self._k, filter=self._filter)
        nodes = [TextNode(id_=hit["doc_id"], text=text_of(hit), metadata=metadata_of(hit)) for hit in hits]
        return [NodeWithScore(node=node, score=hit["score"]) for node, hit in zip(nodes, hits, strict=True)]
