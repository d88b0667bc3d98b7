"""The process that encodes queries: a table runs in the gateway's event loop, a transformer in replicas."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pair import DIM, student, table

from scalingnote.core import ray_internals
from scalingnote.run.service_config import AppArgs
from scalingnote.search.query_path import Query
from scalingnote.serve import app, artifacts
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts
from scalingnote.storage.artifact import Artifact


def deployments(index: Artifact, tower: Artifact, **settings: Any) -> set[str]:
    """Return the names of the deployments of a service."""
    args = {"index": index.uri, "query_tower": tower.uri, "serve": settings}
    application = app.bind(artifacts.find(AppArgs.model_validate(args)))
    return {deployment.name for deployment in ray_internals.serve_deployments(application)}


def test_only_a_transformer_has_replicas(index: Artifact, query_tower: Artifact, tmp_path: Path):
    lookup_table = table(f"{tmp_path}/table")
    assert deployments(index, lookup_table) == {"Gateway"}
    assert deployments(index, query_tower) == {"Gateway", "QueryEncoder-default"}
    # Only uncertain queries go to another process: the table stays in the gateway.
    teacher = student(f"{tmp_path}/teacher", seed=1)
    assert deployments(index, lookup_table, escalation={"teacher": teacher.uri}) == {
        "Gateway",
        "QueryTeacher",
    }


def test_a_table_encodes_in_the_event_loop(tmp_path: Path):
    encoder = ArmEncoder(QueryPathParts((table(f"{tmp_path}/table").uri, "student")))
    threads: list[threading.Thread] = []
    path = encoder._path

    def observe(queries: Sequence[str]) -> list[Query]:
        threads.append(threading.current_thread())
        return path(queries)

    encoder._path = observe  # type: ignore[assignment]
    query = asyncio.run(encoder.encode("bakoli"))
    assert query.embedding.shape == (1, DIM)
    assert threads == [threading.main_thread()]
