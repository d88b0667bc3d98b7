"""Requests for embeddings over HTTP: OpenAI's ``/v1/embeddings`` or TEI's ``/embed``.

A request that is refused temporarily (429, 5xx, no connection) is retried after the time that the endpoint
states, or with a growing back-off. A request that cannot succeed later raises an error that states what to
change.
"""

import base64
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.core.errors import EndpointError
from scalingnote.core.log import get_logger
from scalingnote.encode.config import EndpointConfig

ENDPOINT_KEY_VARIABLE = "SCALINGNOTE_ENDPOINT_KEY"
OPENAI_KEY_VARIABLE = "OPENAI_API_KEY"  # sent only to hosts of openai.com
MAX_RETRY_WAIT_S = 60.0
GIVE_UP_S, GIVE_UP_FIRST_S = 600.0, 15.0  # time without an answer; time without a first answer
WARNING_INTERVAL_S = 10.0  # between lines about a busy endpoint
TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # statuses of requests that may succeed later
REFUSED_TEXTS = (400, 413, 422)  # too many, too long, or not readable
SHOWN_ANSWER_CHARS = 300  # of an answer in an error message
log = get_logger("encode")


class RefusedTextsError(Exception):
    """The endpoint refuses to embed these texts together; fewer texts may succeed."""


class EndpointClient:
    """A client that sends batches of texts, from any thread.

    Attributes:
        usage: requests, texts, tokens as the endpoint counts them, and retries. If the endpoint reports them,
            like `scalingnote serve`, also `cut_texts`, which it has not read completely, and `lost_tokens`.
    """

    def __init__(self, config: EndpointConfig, fields: dict[str, Any]) -> None:
        """Create a client; `fields` are added to the body of every request."""
        self._config, self._fields = config, fields
        self.usage = dict.fromkeys(("requests", "texts", "tokens", "retries"), 0)
        self._key_variable = _key_variable(config.address)
        self._base64 = not config.is_tei
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._has_answered, self._last_answer, self._last_warning = False, time.monotonic(), 0.0

    def stop(self) -> None:
        """Stop the threads that wait for a busy endpoint."""
        self._stop.set()

    def embed(self, texts: list[str]) -> Float32[ndarray, "texts dim"]:
        """Request the vectors of texts, in their order, not normalised.

        Raises:
            RefusedTextsError: the texts are too many, too long, or not readable.
            EndpointError: the endpoint refuses the key or the model, returns no valid answer, or does not
                answer; or `max_requests` requests were sent.
        """
        delay_s = 0.5
        while True:
            try:
                return self._vectors(len(texts), self._post(self._body(texts)))
            except _BusyError as error:
                wait_s = error.retry_after_s or random.uniform(delay_s / 2, delay_s)
                silent_s = time.monotonic() - self._last_answer
                if silent_s > (GIVE_UP_S if self._has_answered else GIVE_UP_FIRST_S):
                    raise EndpointError(
                        f"{self._config.address} has not answered for {silent_s:.0f} s ({error}): check the "
                        "URL; received answers are kept, run the same command again to continue"
                    ) from None
                self._count_retry(wait_s, error)
                if self._stop.wait(wait_s):
                    raise EndpointError(f"{self._config.address}: {error}") from None
                delay_s = min(2 * delay_s, MAX_RETRY_WAIT_S)

    def _count_retry(self, wait_s: float, error: Exception) -> None:
        with self._lock:
            self.usage["retries"] += 1
            now = time.monotonic()
            is_quiet = now - self._last_warning > WARNING_INTERVAL_S
            self._last_warning = now if is_quiet else self._last_warning
        if is_quiet:
            log.warning("%s: retry in %.1f s (%s)", self._config.address, wait_s, error)

    def _body(self, texts: list[str]) -> dict[str, Any]:
        if self._config.is_tei:
            return {"inputs": texts, "truncate": True, **self._fields}
        form = {"encoding_format": "base64"} if self._base64 else {}
        return {"model": self._config.model, "input": texts, **form, **self._fields}

    def _post(self, body: dict[str, Any]) -> Any:
        """Send a request; return the parsed answer."""
        with self._lock:
            limit = self._config.max_requests
            if limit is not None and self.usage["requests"] >= limit:
                raise EndpointError(
                    f"endpoint.max_requests is {limit:,}, and this number of requests was sent: received "
                    "answers are kept, run the same command again to continue"
                )
            self.usage["requests"] += 1
        headers = {"content-type": "application/json"}
        if key := os.environ.get(self._key_variable):
            headers["authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._config.address, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self._config.timeout_s) as answer:
                parsed = json.load(answer)
        except urllib.error.HTTPError as refused:
            raise self._refusal(refused) from None
        except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, half an answer
            raise _BusyError(f"{type(error).__name__}: {error}") from None
        self._has_answered, self._last_answer = True, time.monotonic()
        return parsed

    def _refusal(self, refused: urllib.error.HTTPError) -> Exception:
        text = refused.read().decode(errors="replace")[:SHOWN_ANSWER_CHARS]
        address, variable = self._config.address, self._key_variable
        if refused.code in TEMPORARY:
            return _BusyError(f"{refused.code}: {text}", _retry_after_s(refused.headers.get("retry-after")))
        if refused.code in (401, 403):
            is_given = bool(os.environ.get(variable))
            how = f"refuses the key in {variable}" if is_given else f"needs a key: set {variable}"
            return EndpointError(f"{address} {how} ({refused.code}: {text})")
        if refused.code == 404:
            model = self._config.model
            return EndpointError(f"{address} has no model {model!r}, or the URL is wrong (404: {text})")
        if refused.code not in REFUSED_TEXTS:
            return EndpointError(f"{address} refuses with {refused.code}: {text}")
        if self._base64 and "encoding_format" in text:
            self._base64 = False  # vectors come as numbers
            return _BusyError("it does not support base64")
        return RefusedTextsError(f"{refused.code}: {text}")

    def _vectors(self, count: int, answer: Any) -> Float32[ndarray, "texts dim"]:
        """Parse the vectors of an answer to `count` texts."""
        try:
            rows, counts = answer, {}
            if not self._config.is_tei:
                rows = [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]
                usage = answer.get("usage") or {}
                counts = {"tokens": int(usage.get("total_tokens", 0))}
                counts |= {name: int(usage[name]) for name in ("cut_texts", "lost_tokens") if name in usage}
            vectors = [_vector(row) for row in rows]
        except (KeyError, TypeError, ValueError, AttributeError):
            form = "TEI" if self._config.is_tei else "OpenAI"
            raise EndpointError(
                f"{self._config.address} does not answer in the format of {form}'s embeddings: "
                f"{str(answer)[:SHOWN_ANSWER_CHARS]}"
            ) from None
        lengths = sorted({len(vector) for vector in vectors})
        if len(vectors) != count or len(lengths) != 1:
            sizes = " and ".join(f"{length:,}" for length in lengths)
            raise EndpointError(
                f"{self._config.address} answers {count:,} texts by {len(vectors):,} vectors"
                + (f" of {sizes} values" if lengths else "")
                + ": it must return one vector for each text, all of one length"
            )
        with self._lock:
            for name, value in {"texts": count, **counts}.items():
                self.usage[name] = self.usage.get(name, 0) + value
        return np.stack(vectors)


class _BusyError(Exception):
    """A request that may succeed later."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def _key_variable(address: str) -> str:
    """Choose the variable with the key: OpenAI's only for OpenAI, so that no other host receives its key."""
    is_openai = f".{urlsplit(address).hostname}".endswith(".openai.com")
    return (
        OPENAI_KEY_VARIABLE
        if is_openai and ENDPOINT_KEY_VARIABLE not in os.environ
        else ENDPOINT_KEY_VARIABLE
    )


def _vector(value: Any) -> Float32[ndarray, " dim"]:
    """Parse a vector: base64 of little-endian float32, or numbers; null becomes NaN."""
    if isinstance(value, str):
        return np.frombuffer(base64.b64decode(value, validate=True), "<f4")
    vector = np.array([np.nan if number is None else number for number in value], np.float32)
    if vector.ndim != 1:
        raise ValueError("not a list of numbers")
    return vector


def _retry_after_s(header: str | None) -> float | None:
    """Parse a ``Retry-After``, a number of seconds or a date, to seconds; None if there is none."""
    if header is None:
        return None
    try:
        if header.strip().replace(".", "", 1).isdigit():
            seconds = float(header)
        else:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
    except ValueError:
        return None
    return min(max(seconds, 0.1), GIVE_UP_S)
