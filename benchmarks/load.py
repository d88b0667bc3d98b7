"""A closed-loop load generator over HTTP/1.1: so many connections, each sends its next request on an answer.

    bodies ─► connections, kept alive ─► one status and latency per request

It parses only status and length: it shares the machine with the server.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from urllib.parse import urlsplit

import numpy as np


@dataclass
class Load:
    """What came of a load: latencies in seconds, and how many answers had each status (0: none came)."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Answers with status 200 a second."""
        return self.statuses.get(200, 0) / self.seconds

    def percentile(self, percent: float) -> float:
        """Latency in milliseconds."""
        return float(1000 * np.percentile(self.latencies, percent))

    def count(self, status: int, latency: float) -> None:
        """Take down one answer."""
        self.latencies.append(latency)
        self.statuses[status] = self.statuses.get(status, 0) + 1


def run(url: str, bodies: Sequence[bytes], *, connections: int, seconds: float) -> Load:
    """POST the bodies in turn to a URL for some seconds."""
    return asyncio.run(_run(url, bodies, connections, seconds))


async def _run(url: str, bodies: Sequence[bytes], connections: int, seconds: float) -> Load:
    place = urlsplit(url)
    requests = cycle([_request(place.netloc, place.path or "/", body) for body in bodies])
    load, start = Load(), time.perf_counter()
    pairs = [await asyncio.open_connection(place.hostname, place.port) for _ in range(connections)]
    await asyncio.gather(*(_ask(*pair, requests, load, start + seconds) for pair in pairs))
    load.seconds = time.perf_counter() - start
    return load


async def _ask(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    requests: Iterator[bytes],
    load: Load,
    end: float,
) -> None:
    """One connection: it sends its next request when it has the answer to the last."""
    while (sent := time.perf_counter()) < end:
        writer.write(next(requests))
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            load.count(0, time.perf_counter() - sent)
            break
        load.count(int(head[9:12]), time.perf_counter() - sent)
    writer.close()


def _request(host: str, path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
