"""Haystack: embedders of both sides of a served model, and a retriever over a served index.

Needs ``scalingnote[haystack]`` and a running `scalingnote serve`. ``Pipeline.dumps()`` writes the components,
``Pipeline.loads(text, allowed_modules=["scalingnote.*"])`` reads them.
"""

import inspect
from dataclasses import replace
from typing import Any, Self

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.utils import Secret
from pydantic import SecretStr

from scalingnote.core.errors import ConfigError
from scalingnote.integrations.client import KEY_VARIABLE, Client, address, client, metadata_of, text_of


class _Component:
    """Base of the components, with the arguments as attributes of the same names, and the key as a Secret."""

    def __init__(self, url: str, api_key: Secret | None = None, model: str | None = None) -> None:
        if api_key is not None and not isinstance(api_key, Secret):
            raise ConfigError(
                f"api_key must be a haystack.utils.Secret, not a {type(api_key).__name__}: give "
                f"Secret.from_env_var({KEY_VARIABLE!r}), or Secret.from_token(key), which cannot be saved"
            )
        self.url, self.api_key, self.model = address(url), api_key, model

    def to_dict(self) -> dict[str, Any]:
        """Return class and arguments, with the name of the variable for a key.

        Raises:
            ValueError: the key is a token.
        """
        names = [*inspect.signature(self.__class__.__init__).parameters][1:]
        return default_to_dict(self, **{name: getattr(self, name) for name in names})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a component from the result of :meth:`to_dict`."""
        return default_from_dict(cls, data)

    def _client(self) -> Client:
        key = None if self.api_key is None else self.api_key.resolve_value()
        return client(self.url, None if key is None else SecretStr(key), self.model)


@component
class ScalingNoteTextEmbedder(_Component):
    """Embedder of queries, with the query tower of the server at `url`."""

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """Return the unit embedding of a query."""
        return {"embedding": self._client().embed([text], "query")[0]}


@component
class ScalingNoteDocumentEmbedder(_Component):
    """Embedder of documents, with the document tower of the server at `url`."""

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return the documents with their unit embeddings."""
        vectors = self._client().embed([document.content or "" for document in documents], "document")
        pairs = zip(documents, vectors, strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}


@component
class ScalingNoteRetriever(_Component):
    """Retriever over the index of the server at `url`."""

    def __init__(self, url: str, top_k: int = 10, api_key: Secret | None = None) -> None:
        _Component.__init__(self, url, api_key)  # not super(): @component makes another class of this one
        self.top_k = top_k

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, filters: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the best documents, best first; `filters` has fields that the server's ``/info`` lists."""
        k = self.top_k if top_k is None else top_k
        hits = self._client().search(query, k=k, filter=filters)
        documents = [
            Document(hit["doc_id"], text_of(hit), meta=metadata_of(hit), score=hit["score"]) for hit in hits
        ]
        return {"documents": documents}
