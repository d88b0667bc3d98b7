"""Lines of access logs: write a line like a gateway, and read files like the analysis."""

import json
from pathlib import Path

import pyarrow as pa

from scalingnote.datasets.input_files import Quarantine
from scalingnote.evaluate.experiment import access_log

RECORD = {
    "time": 1764000000.123,
    "request_id": "q1",
    "path": "/search",
    "status": 200,
    "arm": "student",
    "unit": "u:9f3c",
    "query": "高血压",
    "k": 10,
    "filter": {"topic": "cardiology"},
    "doc_ids": ["d1", "d2"],
    "scores": [0.75, 0.5],
    "personalised": False,
    "index_version": "3f0c",
    "shards": 4,
    "shards_answered": 3,
    "timings_ms": {"encode": 0.5, "search": 1.25, "rerank": 0, "total": 2},
    "error": None,
}


def line(**changes) -> bytes:
    return json.dumps(RECORD | changes).encode() + b"\n"


def requests(*files: Path) -> tuple[list[dict], dict[str, int]]:
    quarantine = Quarantine()
    batches = access_log.read_requests(map(str, files), quarantine, rows=3)
    rows = pa.Table.from_batches(batches, schema=access_log.REQUESTS).to_pylist()
    return rows, dict(quarantine.rejected)
