"""Traces of searches, by OpenTelemetry: Serve opens a span for a request, the steps of a search lie below it.

Serve's environment says whether there are any (docs/operations.md), and how many: most requests have none.
"""

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

_tracer = trace.get_tracer("scalingnote")


def otlp() -> list[SpanProcessor]:
    """Send spans as OTLP over HTTP (RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH=scalingnote.serve.traces:otlp).

    Where to, the exporter reads from OTEL_EXPORTER_OTLP_ENDPOINT and the like. Needs ``scalingnote[traces]``.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return [BatchSpanProcessor(OTLPSpanExporter())]


def searched(answer: Mapping[str, Any]) -> None:
    """Note an answered search, a :class:`~scalingnote.serve.messages.SearchResponse`."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    told = ("request_id", "arm", "index_version", "personalised", "shards", "shards_answered")
    span.set_attributes({f"scalingnote.{name}": answer[name] for name in told})
    took = answer["timings_ms"]
    start = time.time_ns() - int(1e6 * took["total"])
    for step in ("encode", "search", "rerank"):
        if took[step]:
            end = start + int(1e6 * took[step])
            _tracer.start_span(step, start_time=start).end(end)
            start = end
