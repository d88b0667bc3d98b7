"""Answers of a running service to requests that its OpenAPI allows and forbids, made by schemathesis.

    python -m benchmarks.api_fuzz --run runs/quickstart --json docs/results/api_fuzz.json

It serves a finished run with every path: live writes, embeddings of both towers, a cross-encoder, API keys.
Every operation gets requests at the bounds of each of its fields, --examples random ones, valid and invalid,
and the methods that it does not have.

- cases: requests
- server_errors: statuses from 500 on, except a 503 to a request with a `deadline_ms`
- undocumented_statuses: statuses that the OpenAPI does not list for the operation
- undocumented_bodies: bodies, content types and headers that differ from the OpenAPI
- accepted_invalid: forbidden requests with a successful answer
- wrong_methods: wrong methods without a 405 and an Allow header that lists the right ones
"""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from schemathesis.engine import from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished
from schemathesis.engine.recorder import ScenarioRecorder

from benchmarks import minilm, report
from benchmarks.serve import running

KEY = "a-key-of-the-api-fuzz-benchmark"
# Names in half of the valid requests: random names fail at once and would hide later faults.
UNKNOWN = object()  # a field with values that depend on the run: it is left out
SEARCH = {"k": 10, "arm": "default", "filter": UNKNOWN, "deadline_ms": UNKNOWN}
KNOWN: dict[str, dict[str, Any]] = {
    "/search": {**SEARCH, "query": "join tensors"}
    | dict.fromkeys(("vector", "dense_weight", "rerank"), UNKNOWN),
    "/similar": SEARCH,
    "/encode": {"arm": "default", "queries": ["join tensors", "split arrays"]},
    "/v1/embeddings": {"input_type": "query", "dimensions": 8},
}
METRICS = {
    "status_code_conformance": "undocumented_statuses",
    "content_type_conformance": "undocumented_bodies",
    "response_schema_conformance": "undocumented_bodies",
    "response_headers_conformance": "undocumented_bodies",
    "negative_data_rejection": "accepted_invalid",
    "unsupported_method": "wrong_methods",
    "allow_header_conformance": "wrong_methods",
}


def main() -> None:
    """Serve the run, send the requests, print statuses by operation and faults, write the results."""
    parser = report.arguments(__doc__, examples=100)
    parser.add_argument("--run", default="runs/quickstart", help="a finished run to be served")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "keys").write_text(KEY)
        cross_encoder(f"{folder}/cross_encoder")
        knobs = (
            "port=0",
            f"api_keys={folder}/keys",
            f"live.folder={folder}/live",
            f"rerank.model={folder}/cross_encoder",
            "deployments.document_tower.num_replicas=1",
            "deadline_s=60",  # the generator of the requests loads the machine
        )
        words = ["-m", "scalingnote.cli.main", "serve", "--run", options.run]
        words += [word for knob in knobs for word in ("--set", f"serve.{knob}")]
        with running(words, {}) as url:
            rows, faults = fuzz(url, Path(options.run).name, examples=options.examples)
    report.show("Statuses by operation", rows)
    for fault in faults:
        print(f"{fault['metric']}: {fault['operation']}: {fault['what']}\n  {fault['request']}")
    metrics = {"cases": sum(row["cases"] for row in rows)}
    fault_counts = Counter(fault["metric"] for fault in faults)
    metrics |= {name: fault_counts[name] for name in ("server_errors", *dict.fromkeys(METRICS.values()))}
    report.show("Faults", [metrics])
    report.write(options.json, metrics=metrics, table=rows, faults=faults)


def fuzz(url: str, model: str, *, examples: int) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Send all requests; return a row per operation with the number of answers by status, and the faults.

    Args:
        url: URL of the service.
        model: a name of its model in requests for embeddings.
        examples: number of random requests per operation.
    """
    statuses: dict[str, Counter[int]] = {}
    faults: list[dict[str, str]] = []
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", config=settings(examples))
    known = {**KNOWN, "/v1/embeddings": {**KNOWN["/v1/embeddings"], "model": model}}

    @schema.hook
    def map_case(_: Any, case: schemathesis.Case[Any]) -> schemathesis.Case[Any]:
        mode, body = None if case.meta is None else case.meta.generation.mode, case.body
        valid = mode is schemathesis.GenerationMode.POSITIVE
        if valid and isinstance(body, dict) and len(str(body)) % 2:
            values = body | known.get(case.operation.path, {})
            case.body = {name: value for name, value in values.items() if value is not UNKNOWN}
        return case

    for event in from_schema(schema).execute():
        match event:
            case ScenarioFinished():
                counts = statuses.setdefault(event.recorder.label, Counter())
                for interaction in event.recorder.interactions.values():
                    counts[0 if interaction.response is None else interaction.response.status_code] += 1
                faults += faults_of(event.recorder)
            case NonFatalError():
                raise RuntimeError(f"{event.label} could not be tested") from event.value
            case FatalError():
                raise event.exception
    rows = [
        {
            "operation": name,
            "cases": counts.total(),
            "statuses": ", ".join(f"{status}: {counts[status]}" for status in sorted(counts)),
        }
        for name, counts in sorted(statuses.items())
    ]
    return rows, faults


def settings(examples: int) -> schemathesis.Config:
    """Return the settings of schemathesis: its requests and its checks."""
    checks = {name: {"enabled": True} for name in METRICS}
    return schemathesis.Config.from_dict(
        {
            "seed": 0,
            "continue-on-failure": True,
            "headers": {"Authorization": f"Bearer {KEY}"},
            "generation": {"mode": "all", "max-examples": examples, "no-shrink": True, "database": "none"},
            "phases": {"stateful": {"enabled": False}},
            "checks": {"enabled": False, **checks},
        }
    )


def faults_of(recorder: ScenarioRecorder) -> list[dict[str, str]]:
    """Return the faults in the answers to the requests of an operation."""
    faults: list[tuple[str, str, str]] = []
    for case_id, interaction in recorder.interactions.items():
        response, request = interaction.response, recorder.cases[case_id]
        if response is None:
            faults.append(("server_errors", "no answer", case_id))
            continue
        hurried = isinstance(request.value.body, dict) and request.value.body.get("deadline_ms") is not None
        if response.status_code >= 500 and not (hurried and response.status_code == 503):
            faults.append(("server_errors", f"{response.status_code}: {response.text[:300]}", case_id))
    for case_id, checks in recorder.checks.items():
        for check in checks:
            if check.failure_info is not None and check.name in METRICS:
                failure = check.failure_info.failure
                faults.append((METRICS[check.name], f"{failure.title}: {failure.message}"[:400], case_id))
    return [
        {
            "metric": metric,
            "operation": recorder.label,
            "what": what,
            "request": shown(recorder.cases[case_id].value),
        }
        for metric, what, case_id in faults
    ]


def shown(case: schemathesis.Case[Any]) -> str:
    """Return a request as one line of text."""
    sent = repr(case.body) if isinstance(case.body, bytes) else json.dumps(case.body, default=repr)
    return f"{case.method} {case.formatted_path} {sent[:300]}"


def cross_encoder(folder: str) -> None:
    """Write a cross-encoder with arbitrary scores."""
    from sentence_transformers import CrossEncoder

    CrossEncoder(str(minilm.path()), num_labels=1, device="cpu").save_pretrained(folder)


if __name__ == "__main__":
    main()
