"""A client of `scalingnote serve` for the frameworks: embeddings of both sides, and search."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from pydantic import AfterValidator, SecretStr

from scalingnote.core.errors import SearchError

MAX_REQUEST_TEXTS = 2048  # per request, equal to scalingnote.serve.embeddings.MAX_TEXTS
KEY_VARIABLE = "SCALINGNOTE_API_KEY"  # name of the key for frameworks that need one


def address(url: str) -> str:
    """Check the URL of a server, and return it without a slash at its end.

    Raises:
        SearchError: it is not the URL of a server, or contains a password.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme in ("http", "https") and parts.port != 0 else None
    except ValueError:  # brackets that do not close, a port that is not a number
        host = None
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise SearchError("the address of a server must have no user or password: give the key as api_key")
    if not host or parts.query or parts.fragment:
        raise SearchError(f"{url!r} is not the address of a server: give http://HOST:PORT")
    return url.rstrip("/")


Address = Annotated[str, AfterValidator(address)]


class Client:
    """Client of a running server.

    Args:
        url: URL of the server.
        api_key: API key, if the server requires one.
        model: a name from ``/v1/models``; None: the server's model.
        timeout_s: timeout of a request.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, model: str | None = None, timeout_s: float = 60.0
    ) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            # Checked here, because the error of urllib shows the key.
            raise SearchError("the API key has a line break or another character that headers cannot have")
        self._url, self._key, self._model, self._timeout_s = address(url), api_key, model, timeout_s
        self._served: str | None = None  # the server's model, after the first request

    def embed(self, texts: Sequence[str], side: Literal["query", "document"]) -> list[list[float]]:
        """Return unit embeddings of texts, from one side of the model.

        Raises:
            SearchError: the server refuses the texts or does not answer.
        """
        embeddings: list[list[float]] = []
        for first in range(0, len(texts), MAX_REQUEST_TEXTS):
            body = {
                "model": self._model or self._served_model(),
                "input": list(texts[first : first + MAX_REQUEST_TEXTS]),
                "input_type": side,
                "encoding_format": "base64",
            }
            try:
                rows = self._call("/v1/embeddings", body)["data"]
            except SearchError:
                self._served = None  # it may have changed: the next call requests it again
                raise
            embeddings += [np.frombuffer(base64.b64decode(row["embedding"]), "<f4").tolist() for row in rows]
        return embeddings

    def _served_model(self) -> str:
        if self._served is None:
            self._served = self._call("/info")["model_id"]
        return self._served

    def search(self, query: str, *, k: int, **options: Any) -> list[dict[str, Any]]:
        """Return the results of ``POST /search``, best first; `options` are its further fields."""
        fields = {name: value for name, value in options.items() if value is not None}
        hits: list[dict[str, Any]] = self._call("/search", {"query": query, "k": k, **fields})["results"]
        return hits

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            text = refused.read().decode(errors="replace")
            raise SearchError(f"{self._url}{path} refuses with {refused.code}: {text[:500]}") from None
        except OSError as error:
            raise SearchError(f"no answer from {self._url}: {error}") from None


@lru_cache(maxsize=32)
def client(url: str, api_key: SecretStr | None, model: str | None = None) -> Client:
    """Return a client, the same one for equal arguments, because it requests the server's model only once.

    The classes of the frameworks hold no client, so changes of their arguments take effect.
    """
    return Client(url, api_key=None if api_key is None else api_key.get_secret_value(), model=model)


def text_of(hit: dict[str, Any]) -> str:
    """Join title and snippet of a result."""
    return "\n".join(filter(None, (hit["title"], hit["snippet"])))


def metadata_of(hit: dict[str, Any]) -> dict[str, Any]:
    """Return the other fields of a result, as metadata."""
    return {name: value for name, value in hit.items() if name not in ("snippet", "explain")}
