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
    """What the components share. Arguments are attributes of the same names, and a key is a Secret."""

    def __init__(self, url: str, api_key: Secret | None = None, model: str | None = None) -> None:
        if api_key is not None and not isinstance(api_key, Secret):
            raise ConfigError(
                f"api_key is a haystack.utils.Secret, not a {type(api_key).__name__}: give "
                f"Secret.from_env_var({KEY_VARIABLE!r}), or Secret.from_token(key), which no file can hold"
            )
        self.url, self.api_key, self.model = address(url), api_key, model

    def to_dict(self) -> dict[str, Any]:
        """Class and arguments, of a key the name of its variable; ValueError for a key given as a token."""
        names = [*inspect.signature(self.__class__.__init__).parameters][1:]
        return default_to_dict(self, **{name: getattr(self, name) for name in names})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """A component of the arguments that :meth:`to_dict` gives."""
        return default_from_dict(cls, data)

    def _client(self) -> Client:
        key = None if self.api_key is None else self.api_key.resolve_value()
        return client(self.url, None if key is None else SecretStr(key), self.model)


@component
class ScalingNoteTextEmbedder(_Component):
    """Embeds queries by the query tower of the server at `url`."""

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """The unit embedding of a query."""
        return {"embedding": self._client().embed([text], "query")[0]}


@component
class ScalingNoteDocumentEmbedder(_Component):
    """Embeds documents by the document tower of the server at `url`."""

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """The documents with their unit embeddings."""
        vectors = self._client().embed([document.content or "" for document in documents], "document")
        pairs = zip(documents, vectors, strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}


@component
class ScalingNoteRetriever(_Component):
    """The best documents of the index of the server at `url`."""

    def __init__(self, url: str, top_k: int = 10, api_key: Secret | None = None) -> None:
        _Component.__init__(self, url, api_key)  # no super(): @component makes another class of this one
        self.top_k = top_k

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, filters: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The documents, best first; `filters` has fields that the server's ``/info`` lists."""
        k = self.top_k if top_k is None else top_k
        hits = self._client().search(query, k=k, filter=filters)
        found = [
            Document(hit["doc_id"], text_of(hit), meta=metadata_of(hit), score=hit["score"]) for hit in hits
        ]
        return {"documents": found}
