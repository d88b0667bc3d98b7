"""A client of `scalingnote serve` for the frameworks: embeddings of both sides, and searches."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from scalingnote.errors import SearchError

MAX_TEXTS = 2048  # of one request, see serve.limits.max_texts


class Client:
    """Calls a running server.

    Args:
        url: of the server.
        api_key: where the server asks for one.
        model: a name of ``/v1/models``; None: the server's own.
        timeout_s: of a request.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, model: str | None = None, timeout_s: float = 60.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise SearchError(f"{url!r} is no address of a server: http://HOST:PORT")
        self._url, self._key, self._model, self._timeout_s = url.rstrip("/"), api_key, model, timeout_s

    def embed(self, texts: Sequence[str], side: Literal["query", "document"]) -> list[list[float]]:
        """Unit embeddings of texts, read by one side of the model. SearchError when they are refused."""
        if self._model is None:
            self._model = self._call("/info")["model_id"]
        found: list[list[float]] = []
        for first in range(0, len(texts), MAX_TEXTS):
            body = {
                "model": self._model,
                "input": list(texts[first : first + MAX_TEXTS]),
                "input_type": side,
                "encoding_format": "base64",
            }
            rows = self._call("/v1/embeddings", body)["data"]
            found += [np.frombuffer(base64.b64decode(row["embedding"]), "<f4").tolist() for row in rows]
        return found

    def search(self, query: str, *, k: int, **options: Any) -> list[dict[str, Any]]:
        """The results of ``POST /search``, best first; `options` are its further fields."""
        given = {name: value for name, value in options.items() if value is not None}
        hits: list[dict[str, Any]] = self._call("/search", {"query": query, "k": k, **given})["results"]
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


def text_of(hit: dict[str, Any]) -> str:
    """Title and snippet of a result."""
    return "\n".join(filter(None, (hit["title"], hit["snippet"])))


def metadata_of(hit: dict[str, Any]) -> dict[str, Any]:
    """The other fields of a result."""
    return {name: value for name, value in hit.items() if name not in ("snippet", "explain")}
