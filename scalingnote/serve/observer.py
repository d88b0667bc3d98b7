"""What a request leaves behind: metrics, and a line of the access log."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scalingnote.experiment.access_writer import AccessWriter
from scalingnote.serve.metrics import Metrics


@dataclass
class Note:
    """What is known of a search while it is answered; it lies in the request's state."""

    query: str | None
    k: int
    filter: Mapping[str, Any] | None
    unit: str | None  # None: the request named its arm, the split had no say
    arm: str
    answer: Mapping[str, Any] = field(default_factory=dict)


class Observer:
    """Told of every request when it is answered."""

    def __init__(self, metrics: Metrics, log: AccessWriter | None = None) -> None:
        self._metrics, self._log = metrics, log

    def done(self, path: str, state: Mapping[str, Any], status: int, seconds: float) -> None:
        """Count a request, and write it down if it was a search; over gRPC as its like over HTTP."""
        note: Note | None = state.get("note")
        self._metrics.request(path, status, note.arm if note else "", seconds)
        if "refused" in state:
            self._metrics.refused(state["refused"])
        if note is None:
            return
        if note.answer:
            self._metrics.search(note.answer)
        if self._log is not None:
            self._log.append(_line(path, status, seconds, note, state))


def _line(path: str, status: int, seconds: float, note: Note, state: Mapping[str, Any]) -> dict[str, Any]:
    answer = note.answer
    results = answer.get("results", ())
    return {
        "time": time.time(),
        "request_id": state["request_id"],
        "path": path,
        "status": status,
        "arm": note.arm,
        "unit": note.unit,
        "query": note.query,
        "k": note.k,
        "filter": note.filter,
        "doc_ids": [hit["doc_id"] for hit in results],
        "scores": [hit["score"] for hit in results],
        "personalised": answer.get("personalised", False),
        "index_version": answer.get("index_version"),
        "shards": answer.get("shards"),
        "shards_answered": answer.get("shards_answered"),
        "timings_ms": answer.get("timings_ms", {"total": round(1000 * seconds, 3)}),
        "error": state.get("refused"),
    }
