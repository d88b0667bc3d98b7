"""The records of the gateway about requests: metrics, the access log, traces, and the log of replicas.

Metrics go through Ray, and every node exports those of its replicas for Prometheus (prefixed with ``ray_``):

    scalingnote_request_ms                path, status, arm: its count is the number of requests
    scalingnote_step_ms                   step (encode, search), arm: of every eighth search
    scalingnote_partial_answers_total     arm
    scalingnote_escalated_total           arm: searches by the teacher's embedding
    scalingnote_degraded_total            arm, reason (docs/guides/serve.md)
    scalingnote_refused_total             code
    scalingnote_in_flight                 requests that a gateway replica works on
    scalingnote_canary_recall             share of the exact best that the index found, per query
    scalingnote_index_documents           version

Traces go through OpenTelemetry: Serve opens a span for a request, and the steps of a search are its children.
Environment variables of Serve set whether and how often a request is traced (docs/guides/operations.md).
"""

import logging
import os
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import ray
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from ray.serve import metrics
from ray.serve.schema import LoggingConfig

from scalingnote.evaluate.experiment.config import unit_of
from scalingnote.serve.access_writer import AccessWriter

BUCKETS_MS = [0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 50, 75, 100, 200, 500, 1000, 2000, 5000]
BUCKETS_RECALL = [0.5, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.999]
EXPORTED_PREFIXES = ("ray_scalingnote_", "ray_serve_")
STEPS_SAMPLED_ONE_IN = 8  # searches: observing both steps takes longer than a lookup tower's encoding
SCRAPE_TIMEOUT_S = 2.0
# Below WARNING Serve formats a line for each request, even if it is not written, which takes a twentieth of
# the time of a search. ``serve.access_log`` logs requests.
SERVE_LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)
TRACED_ATTRIBUTES = (
    *("request_id", "arm", "index_version", "personalised", "shards", "shards_answered"),
    *("escalated", "degraded"),
)
_tracer = trace.get_tracer("scalingnote")


def get_logger() -> logging.Logger:
    """Return the logger of replicas: INFO and above to the replica's log file, whatever Serve's level."""
    logger = logging.getLogger("ray.serve.scalingnote")
    logger.setLevel(logging.INFO)
    return logger


# --- metrics ----------------------------------------------------------------------------------------------


class Metrics:
    """Metrics of a gateway replica."""

    def __init__(self) -> None:
        name, self._version = "scalingnote_{}".format, ""
        self._samples_steps = cycle([True, *[False] * (STEPS_SAMPLED_ONE_IN - 1)])
        self._request_ms = metrics.Histogram(
            name("request_ms"),
            "milliseconds of a request in the gateway",
            boundaries=BUCKETS_MS,
            tag_keys=("path", "status", "arm"),  # type: ignore[arg-type]  # Ray says tuple[str]
        )
        self._step_ms = metrics.Histogram(
            name("step_ms"),
            "milliseconds of a step of a search",
            boundaries=BUCKETS_MS,
            tag_keys=("step", "arm"),  # type: ignore[arg-type]
        )
        self._partial = metrics.Counter(
            name("partial_answers_total"), "answers without some shards", tag_keys=("arm",)
        )
        self._escalated = metrics.Counter(
            name("escalated_total"), "searches by the teacher's embedding", tag_keys=("arm",)
        )
        self._degraded = metrics.Counter(
            name("degraded_total"),
            "answers that had to do without a part",
            tag_keys=("arm", "reason"),  # type: ignore[arg-type]
        )
        self._refused = metrics.Counter(name("refused_total"), "requests refused", tag_keys=("code",))
        self._in_flight = metrics.Gauge(name("in_flight"), "requests being worked on")
        self._recall = metrics.Histogram(
            name("canary_recall"), "share of the exact best found", boundaries=BUCKETS_RECALL
        )
        self._documents = metrics.Gauge(
            name("index_documents"), "documents of the active version", tag_keys=("version",)
        )

    def observe_request(self, path: str, status: int, arm: str, seconds: float) -> None:
        """Count an answered request; `arm` is empty if it is not a search."""
        tags = {"path": path, "status": str(status), "arm": arm}
        self._request_ms.observe(max(1000 * seconds, 1e-3), tags=tags)

    def observe_search(self, response: Mapping[str, Any]) -> None:
        """Count an answered search, a :class:`~scalingnote.serve.messages.SearchResponse`."""
        for step in ("encode", "search") if next(self._samples_steps) else ():
            step_ms = max(response["timings_ms"][step], 1e-3)
            self._step_ms.observe(step_ms, tags={"step": step, "arm": response["arm"]})
        if response["shards_answered"] < response["shards"]:
            self._partial.inc(tags={"arm": response["arm"]})
        if response["escalated"]:
            self._escalated.inc(tags={"arm": response["arm"]})
        for reason in response["degraded"]:
            self._degraded.inc(tags={"arm": response["arm"], "reason": reason})

    def count_refusal(self, code: str) -> None:
        """Count a request that was refused."""
        self._refused.inc(tags={"code": code})

    def set_version(self, name: str, documents: int) -> None:
        """Set the gauge of the active version's documents. This is called periodically."""
        if self._version not in ("", name):  # without this, the gauge of the old version would keep its value
            self._documents.set(0, tags={"version": self._version})
        self._version = name
        self._documents.set(documents, tags={"version": name})

    def set_in_flight(self, requests: int) -> None:
        """Set the gauge of requests in flight."""
        self._in_flight.set(requests)

    def observe_recall(self, value: float) -> None:
        """Record the recall of a query, measured by an exact search."""
        self._recall.observe(max(value, 1e-6))


def scrape() -> str:
    """Return the metrics of this application and of Serve on all nodes, in Prometheus' text format."""
    return "".join(_scraped_lines())


def _scraped_lines() -> Iterator[str]:
    comments: set[str] = set()
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        try:
            with urllib.request.urlopen(address, timeout=SCRAPE_TIMEOUT_S) as answer:
                lines = answer.read().decode().splitlines(keepends=True)
        except OSError:
            continue  # the node is shutting down
        for line in lines:
            is_comment = line.startswith("# ")  # "# HELP name ...", "# TYPE name ..."
            name = line.split(" ", 3)[2].strip() if is_comment else line
            # Every node repeats the comments; Prometheus accepts each only once.
            if name.startswith(EXPORTED_PREFIXES) and not (is_comment and line in comments):
                comments.add(line)
                yield line


# --- the access log ---------------------------------------------------------------------------------------


def secret() -> str:
    """Return the key for hashes of user ids, which is the same in all gateways during an experiment."""
    return os.environ.get("SCALINGNOTE_SECRET", "")


@dataclass
class RequestRecord:
    """The facts about a request for metrics and the access log; a search sets the last three."""

    request_id: str
    refused: str | None = None  # the code of the refusal
    search: Any = None  # a scalingnote.serve.messages.SearchRequest
    arm: str = ""
    answer: Mapping[str, Any] | None = None  # a scalingnote.serve.messages.SearchResponse


class RequestObserver:
    """A callback that records every request in the metrics, and every search in traces and the access log."""

    def __init__(self, metrics: Metrics, log: AccessWriter | None = None) -> None:
        self._metrics, self._log, self._secret = metrics, log, secret()

    def __call__(self, path: str, record: RequestRecord, status: int, seconds: float) -> None:
        """Record a request. A request over gRPC has the `path` of the same request over HTTP."""
        self._metrics.observe_request(path, status, record.arm, seconds)
        if record.refused is not None:
            self._metrics.count_refusal(record.refused)
        if record.answer is not None:
            self._metrics.observe_search(record.answer)
            trace_search(record.answer, seconds)
        if self._log is not None and record.search is not None:
            self._log.append(self._line(path, status, seconds, record))

    def _line(self, path: str, status: int, seconds: float, record: RequestRecord) -> dict[str, Any]:
        request, answer = record.search, record.answer or {}
        results = answer.get("results", ())
        # A request that names its arm is not in an experiment, even if the split would choose the same arm.
        unit = None if request.arm else unit_of(request.user_id, record.request_id, secret=self._secret)
        return {
            "time": time.time(),
            "request_id": record.request_id,
            "path": path,
            "status": status,
            "arm": record.arm,
            "unit": unit,
            "query": request.query,
            "k": request.k,
            "filter": request.model_dump(include={"filter"}, exclude_none=True).get("filter"),
            "doc_ids": [hit["doc_id"] for hit in results],
            "scores": [hit["score"] for hit in results],
            "personalised": answer.get("personalised", False),
            "index_version": answer.get("index_version"),
            "shards": answer.get("shards"),
            "shards_answered": answer.get("shards_answered"),
            "timings_ms": answer.get("timings_ms", {"total": round(1000 * seconds, 3)}),
            "error": record.refused,
        }


# --- traces -----------------------------------------------------------------------------------------------


def otlp() -> list[SpanProcessor]:
    """Return a processor that sends spans as OTLP over HTTP.

    Serve calls this function if RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH names it. The exporter reads the
    address from OTEL_EXPORTER_OTLP_ENDPOINT. It needs ``scalingnote[traces]``.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return [BatchSpanProcessor(OTLPSpanExporter())]


def trace_search(answer: Mapping[str, Any], seconds: float) -> None:
    """Add the steps of a search that began `seconds` ago to the span of its request, if it is recorded."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    span.set_attributes({f"scalingnote.{name}": answer[name] for name in TRACED_ATTRIBUTES})
    start = time.time_ns() - int(1e9 * seconds)
    for step in ("encode", "search", "escalate", "rerank"):
        if answer["timings_ms"][step]:
            end = start + int(1e6 * answer["timings_ms"][step])
            _tracer.start_span(step, start_time=start).end(end)
            start = end
