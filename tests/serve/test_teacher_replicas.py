"""Escalation: the teacher encodes uncertain queries, and is not called for certain ones."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gateway_here import Client, service
from pair import DIM, student

import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.encode.encoder import Encoder
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import AppArgs, Escalation, Limits, ServeConfig
from scalingnote.search.query_path import Query, doubt
from scalingnote.search.searcher import Candidates, Searcher
from scalingnote.serve import api, app, artifacts, escalation
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import ServedArm
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts
from scalingnote.serve.escalation import MAX_SILENT
from scalingnote.serve.messages import SearchRequest, SearchResponse
from scalingnote.serve.telemetry import RequestRecord
from scalingnote.storage.artifact import Artifact

QUERIES = [row["title"] for row in tiny.document_rows(12)]
K = 5


class Counted(ArmEncoder):
    """A teacher that stores its queries."""

    def __init__(self, tower: Artifact) -> None:
        super().__init__(QueryPathParts((tower.uri, "student")))
        self.counted: list[str] = []

    async def encode(self, query: str, user_id: str | None = None) -> Query:
        self.counted.append(query)
        return await super().encode(query, user_id)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return student(f"{tmp_path_factory.mktemp('teacher')}/teacher", seed=1)


def best(index: Artifact, tower: Artifact, query: str, k: int = K) -> list[Any]:
    embedding = Encoder.load(tower.directory("query")).encode_queries([query])
    return Searcher.open(index.uri).search(embedding, k=k)[0]


@pytest.mark.parametrize("groups", [1, 2])
def test_only_uncertain_queries_get_the_teachers_answer(
    index: Artifact, query_tower: Artifact, teacher: Artifact, groups: int
):
    scores = np.array([[hit.score for hit in best(index, query_tower, query, 10)] for query in QUERIES])
    doubts = doubt(scores)
    limit = float(np.sort(doubts)[-4:-2].mean())  # between two values: three queries escalate
    teacher_encoder = Counted(teacher)
    config = ServeConfig(deadline_s=60, escalation=Escalation(deadline_ms=60_000))
    gateway = service(index, query_tower, config, groups=groups, teacher=teacher_encoder)
    gateway._teacher._window._limit = limit
    client = Client(api.build(gateway, config))
    uncertain = [query for query, value in zip(QUERIES, doubts, strict=True) if value > limit]
    differ = 0
    for query in QUERIES:
        answer = client.search(query=query, k=K).json()
        SearchResponse.model_validate(answer, extra="forbid")
        ids = [hit["doc_id"] for hit in answer["results"]]
        by_student, by_teacher = (
            [hit.doc_id for hit in best(index, tower, query)] for tower in (query_tower, teacher)
        )
        assert ids == (by_teacher if query in uncertain else by_student)
        assert (answer["escalated"], answer["degraded"]) == (query in uncertain, [])
        assert bool(answer["timings_ms"]["escalate"] > 0) >= answer["escalated"]
        differ += by_student != by_teacher
    assert teacher_encoder.counted == uncertain
    assert len(uncertain) == 3
    assert differ > 6
    vector = client("POST", "/encode", json={"queries": [uncertain[0]]}).json()["embeddings"][0]
    assert not client.search(vector=vector).json()["escalated"]  # there is no text to encode again
    client.close()


class Failing:
    """A teacher that is slow or dead."""

    def __init__(self) -> None:
        self.seconds, self.calls, self.cancelled = 0.0, 0, 0
        self.waiting = self.most = 0

    async def encode(self, query: str) -> Query:
        self.calls += 1
        if self.seconds < 0:
            raise OSError("the replica is gone")
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        return Query(np.eye(1, DIM, dtype=np.float32))

    async def ping(self) -> bool:
        return self.seconds >= 0


@pytest.fixture
def failing() -> Failing:
    return Failing()


@pytest.fixture
def client(index: Artifact, query_tower: Artifact, failing: Failing) -> Iterator[Client]:
    config = ServeConfig(
        deadline_s=60, escalation=Escalation(share=1.0, deadline_ms=20), limits=Limits(in_flight=20)
    )
    http_client = Client(api.build(service(index, query_tower, config, teacher=failing), config))
    yield http_client
    http_client.close()


def test_the_student_answers_if_the_teacher_fails(
    client: Client, failing: Failing, index: Artifact, query_tower: Artifact, monkeypatch: pytest.MonkeyPatch
):
    expected = [hit.doc_id for hit in best(index, query_tower, QUERIES[0])]
    now = [100.0]
    monkeypatch.setattr(escalation, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def reason() -> str:
        answer = client.search(query=QUERIES[0], k=K).json()
        assert ([hit["doc_id"] for hit in answer["results"]] == expected) != answer["escalated"]
        assert len(answer["degraded"]) == (not answer["escalated"])
        return "".join(answer["degraded"])

    assert reason() == ""
    failing.seconds = -1.0
    assert reason() == "teacher_failed"
    health = client("GET", "/healthz").json()
    assert (health["status"], health["silent"]) == ("degraded", ["teacher"])
    failing.seconds = 60.0
    assert [reason() for _ in range(MAX_SILENT)] == ["teacher_late"] * (MAX_SILENT - 1) + ["teacher_silent"]
    assert failing.cancelled == MAX_SILENT - 1  # no request waits for it
    calls = failing.calls
    assert [reason() for _ in range(5)] == ["teacher_silent"] * 5
    assert failing.calls == calls  # it costs nothing now
    now[0] += escalation.PAUSE_S + 0.1
    assert [reason(), reason()] == ["teacher_late", "teacher_silent"]  # one query tries
    failing.seconds, now[0] = 0.0, now[0] + escalation.PAUSE_S + 0.1
    assert [reason(), reason()] == ["", ""]


def test_few_queries_wait_for_a_slow_teacher(client: Client, failing: Failing):
    failing.seconds = 60.0

    async def crowd() -> list[Any]:
        calls = [client._client.post("/search", json={"query": query, "k": K}) for query in QUERIES]
        return [answer.json() for answer in await asyncio.gather(*calls)]

    reasons = [reason for answer in client.wait(crowd()) for reason in answer["degraded"]]
    assert len(reasons) == len(QUERIES)
    assert set(reasons) <= {"teacher_late", "teacher_busy", "teacher_silent"}
    assert reasons.count("teacher_late") == failing.calls
    assert "teacher_busy" in reasons
    assert failing.most == 5  # a quarter of the requests that the gateway works on


def test_a_complete_answer_is_preferred_to_a_partial_one(
    index: Artifact, query_tower: Artifact, failing: Failing
):
    config = ServeConfig(deadline_s=60, escalation=Escalation(share=1.0, deadline_ms=1000))
    gateway = service(index, query_tower, config, groups=2, teacher=failing)
    asyncio.run(gateway.versions.start())
    find, calls = gateway._find, 0

    async def lose_a_group(query: Query, left_s: float) -> Any:
        nonlocal calls
        calls += 1
        candidates = await find(query, left_s)
        assert isinstance(candidates, Candidates)
        return candidates if calls == 1 else replace(candidates, searched=1, missing=(1,))

    gateway._find = lose_a_group
    answer = asyncio.run(gateway.search(SearchRequest(query=QUERIES[0], k=K), RequestRecord("r")))
    assert (answer["degraded"], answer["shards_answered"], answer["missing_groups"]) == (
        ["teacher_late"],
        2,
        [],
    )
    assert calls == 2


def test_pinned_arms_and_personal_queries_do_not_escalate(
    index: Artifact, query_tower: Artifact, failing: Failing
):
    config = ServeConfig(deadline_s=60, escalation=Escalation(share=1.0, deadline_ms=1000))
    gateway = service(index, query_tower, config, teacher=failing)
    asyncio.run(gateway.versions.start())
    plain = gateway._arms["default"]

    class Personal:
        async def encode(self, query: str, user_id: str | None) -> Query:
            return Query(np.eye(1, DIM, dtype=np.float32), personalised=True)

    gateway._arms |= {
        "pinned": ServedArm("pinned", plain.encoder, "torch", False, gateway.versions.active.name),
        "personal": ServedArm("personal", LocalHandle(Personal()), "torch", True),
    }
    for arm, calls in (("pinned", 0), ("personal", 0), ("default", 1)):
        asyncio.run(gateway.search(SearchRequest(query=QUERIES[0], arm=arm), RequestRecord("r")))
        assert failing.calls == calls


# --- the deployment ---


def deployed(args: AppArgs) -> Any:
    """Return the deployment of the teacher of an application."""
    served = artifacts.find(args)
    assert isinstance(served, artifacts.ServedArtifacts)
    gateway: Any = app.bind(served)._bound_deployment
    teacher = gateway.init_args[0].teacher
    return None if teacher is None else teacher._bound_deployment


def test_the_teacher_has_its_own_replicas_and_gpus(index: Artifact, query_tower: Artifact, teacher: Artifact):
    knobs = {
        "escalation": {"teacher": teacher.uri},
        "deployments": {"teacher": {"num_replicas": 3, "num_gpus": 0.5}},
    }
    args = {"index": index.uri, "query_tower": query_tower.uri}
    teacher_deployment = deployed(AppArgs.model_validate(args | {"serve": knobs}))
    assert (teacher_deployment.name, teacher_deployment.num_replicas) == ("QueryTeacher", 3)
    assert teacher_deployment.ray_actor_options == {"num_cpus": 0.1, "num_gpus": 0.5}
    catalog, part = teacher_deployment.init_args
    assert (catalog.first.towers.teacher, part) == ((teacher.uri, "student"), "teacher")
    assert deployed(AppArgs.model_validate(args)) is None


def test_the_teacher_of_a_run_encoded_its_documents(
    index: Artifact, query_tower: Artifact, teacher: Artifact, monkeypatch: pytest.MonkeyPatch
):
    run = RunConfig.model_validate({"dataset": {"name": "python_docs"}})
    built = {"index": index, "student": query_tower, "dual_encoder": teacher}
    monkeypatch.setattr(pipeline, "locate", lambda _, kind: built[kind])
    config = ServeConfig(escalation=Escalation())
    assert artifacts._teacher(config, run, DIM) == (teacher.uri, "student")
    with pytest.raises(ConfigError, match="no student that searches the embeddings of its teacher"):
        artifacts._teacher(config, run.model_copy(update={"distill": None}), DIM)
    with pytest.raises(ConfigError, match=r"needs a run_dir, or the URI of a tower in serve\.escalation"):
        artifacts._teacher(config, None, DIM)


def test_a_teacher_of_another_dimension_is_refused(index: Artifact, query_tower: Artifact, tmp_path: Path):
    narrow = student(f"{tmp_path}/narrow", dim=DIM // 2)
    args = {"index": index.uri, "query_tower": query_tower.uri}
    with pytest.raises(ConfigError, match="dim 16, the teacher of 8"):
        deployed(AppArgs.model_validate(args | {"serve": {"escalation": {"teacher": narrow.uri}}}))
