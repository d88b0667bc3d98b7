"""Metrics of the gateway, through Ray: every node exports those of its replicas for Prometheus to scrape.

    scalingnote_request_ms                path, status, arm: its count is that of requests
    scalingnote_step_ms                   step (encode, search), arm: of one search in eight, by turns
    scalingnote_partial_answers_total     arm
    scalingnote_refused_total             code
    scalingnote_in_flight                 requests that a gateway replica works on
    scalingnote_canary_recall             share of the exact best that the index found, per query
    scalingnote_index_documents           version

Ray prefixes them with ``ray_``. :func:`scraped` is what ``/metrics`` of any gateway gives: that of all nodes.
"""

import urllib.request
from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

import ray
from ray.serve import metrics

MILLISECONDS = [0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 2000, 5000]
RECALLS = [0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.999]
OURS = ("ray_scalingnote_", "ray_serve_")
ONE_IN = 8  # searches whose steps are observed: that takes longer than encoding by a lookup
_SCRAPE_S = 2.0


class Metrics:
    """What a gateway replica measures."""

    def __init__(self) -> None:
        name, self._version = "scalingnote_{}".format, ""
        self._turn = cycle([True, *[False] * (ONE_IN - 1)])
        self._took = metrics.Histogram(
            name("request_ms"),
            "milliseconds of a request in the gateway",
            boundaries=MILLISECONDS,
            tag_keys=("path", "status", "arm"),  # type: ignore[arg-type]  # Ray says tuple[str]
        )
        self._steps = metrics.Histogram(
            name("step_ms"),
            "milliseconds of a step of a search",
            boundaries=MILLISECONDS,
            tag_keys=("step", "arm"),  # type: ignore[arg-type]
        )
        self._partial = metrics.Counter(
            name("partial_answers_total"), "answers without some shards", tag_keys=("arm",)
        )
        self._refused = metrics.Counter(name("refused_total"), "requests refused", tag_keys=("code",))
        self._in_flight = metrics.Gauge(name("in_flight"), "requests being worked on")
        self._recall = metrics.Histogram(
            name("canary_recall"), "share of the exact best found", boundaries=RECALLS
        )
        self._documents = metrics.Gauge(
            name("index_documents"), "documents of the active version", tag_keys=("version",)
        )

    def request(self, path: str, status: int, arm: str, seconds: float) -> None:
        """A request was answered."""
        tags = {"path": path, "status": str(status), "arm": arm}
        self._took.observe(max(1000 * seconds, 1e-3), tags=tags)

    def search(self, answer: Mapping[str, Any]) -> None:
        """A search was answered, as described by :class:`~scalingnote.serve.messages.SearchResponse`."""
        for step in ("encode", "search") if next(self._turn) else ():
            took = max(answer["timings_ms"][step], 1e-3)
            self._steps.observe(took, tags={"step": step, "arm": answer["arm"]})
        if answer["shards_answered"] < answer["shards"]:
            self._partial.inc(tags={"arm": answer["arm"]})

    def refused(self, code: str) -> None:
        """A request was not answered."""
        self._refused.inc(tags={"code": code})

    def state(self, *, in_flight: int, version: str, documents: int) -> None:
        """How things stand; told now and then."""
        self._in_flight.set(in_flight)
        if self._version not in ("", version):  # one version is active, the others have none
            self._documents.set(0, tags={"version": self._version})
        self._version = version
        self._documents.set(documents, tags={"version": version})

    def recall(self, value: float) -> None:
        """A query was searched again exactly."""
        self._recall.observe(max(value, 1e-6))


def scraped() -> str:
    """The metrics of this application and of Serve on all nodes, in Prometheus' text format."""
    return "".join(_of_all_nodes())


def _of_all_nodes() -> Iterator[str]:
    told: set[str] = set()
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        try:
            with urllib.request.urlopen(address, timeout=_SCRAPE_S) as answer:
                lines = answer.read().decode().splitlines(keepends=True)
        except OSError:
            continue  # a node on its way out; its gauges are those of nobody
        for line in lines:
            of = line.split(" ", 3)[2].strip() if line.startswith("# ") else line
            if of.startswith(OURS) and not (line.startswith("# ") and line in told):
                told.add(line)
                yield line
