"""A closed-loop load generator over HTTP/1.1: each connection sends its next request after an answer.

    bodies ─► connections, kept alive ─► one status and latency per request

It parses only status and length, because it shares the machine with the server.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from urllib.parse import urlsplit

import numpy as np

_HEAD = b"\r\n\r\n"


@dataclass
class Load:
    """Results of a load: latencies in seconds, and the number of answers by status (0: no answer)."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Answers with status 200 a second."""
        return self.statuses.get(200, 0) / self.seconds

    def percentile(self, percent: float) -> float:
        """Compute a percentile of the latency in milliseconds."""
        return float(1000 * np.percentile(self.latencies, percent))

    def count(self, status: int, latency: float) -> None:
        """Count one answer."""
        self.latencies.append(latency)
        self.statuses[status] = self.statuses.get(status, 0) + 1


def run(url: str, bodies: Sequence[bytes], *, connections: int, seconds: float) -> Load:
    """POST the bodies in turn to a URL for some seconds."""
    return asyncio.run(_run(url, bodies, connections, seconds))


async def _run(url: str, bodies: Sequence[bytes], connections: int, seconds: float) -> Load:
    loop, place = asyncio.get_running_loop(), urlsplit(url)
    requests = cycle([_request(place.netloc, place.path or "/", body) for body in bodies])
    load, start = Load(), time.perf_counter()
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(
            lambda: _Client(requests, load, start + seconds),
            place.hostname or "localhost",
            place.port or 80,
        )
        clients.append(client.done)
    await asyncio.gather(*clients)
    load.seconds = time.perf_counter() - start
    return load


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, requests: Iterator[bytes], load: Load, end: float) -> None:
        self._requests, self._load, self._end = requests, load, end
        self._got, self._sent = b"", 0.0
        self._needed: int | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._next()

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self._needed is None:
            end = self._got.find(_HEAD)
            if end < 0:
                return
            head = self._got[:end].lower()
            at = head.find(b"content-length:")
            self._needed = end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if self._needed and len(self._got) >= self._needed:
            status = int(self._got[9:12])
            self._load.count(status, time.perf_counter() - self._sent)
            self._next()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.done.done():
            self._load.count(0, time.perf_counter() - self._sent)
            self.done.set_result(None)

    def _next(self) -> None:
        if time.perf_counter() >= self._end:
            self.done.set_result(None)
            self._transport.close()
            return
        self._got, self._needed = b"", None
        self._sent = time.perf_counter()
        self._transport.write(next(self._requests))


def _request(host: str, path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
