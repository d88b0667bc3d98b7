"""Real replicas that are killed: an aggregator, the teacher, and a gateway without its documents.

After every kill an answer is complete, or it reports the missing parts and is correct in the rest. Before the
kills, the listeners are examined from the network.
"""

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from pair import built, table
from replicas_here import PAUSE_S, TRIES, find_artifacts, hits, kill, post, running

import listeners
from scalingnote.core.errors import ConfigError
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.index.shard import documents_file
from scalingnote.search.searcher import Searcher
from scalingnote.serve import app, launch
from scalingnote.storage.artifact import Artifact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of a busy machine
QUERY, K = "bakoli menura", 5
SHARDS = 3
KILLED_GROUPS = [1, 2]  # of the aggregator that is killed; the other aggregator has group 0


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("index"), shards=SHARDS)


@pytest.fixture(scope="module")
def query_tower(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return a table, which starts without torch: every replica here starts twice."""
    return table(f"{tmp_path_factory.mktemp('student')}/student")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return table(f"{tmp_path_factory.mktemp('teacher')}/teacher", seed=1)


@pytest.fixture(scope="module")
def url(cluster: None, index: Artifact, query_tower: Artifact, teacher: Artifact) -> Iterator[str]:
    """Yield the URL of a service with three groups, two aggregators, and a teacher for every query."""
    deployments = {"searcher": {"num_replicas": 1}, "encoder": {"num_replicas": 0}}
    escalation = {"teacher": teacher.uri, "share": 1.0, "deadline_ms": 500}
    knobs = {"deployments": deployments, "groups_per_aggregator": 2, "escalation": escalation}
    with running(find_artifacts(index.uri, query_tower.uri, **knobs)) as started:
        yield started


def search(url: str, **options: Any) -> tuple[int, Any]:
    return post(f"{url}/search", query=QUERY, k=K, explain=True, **options)


def health(url: str) -> Any:
    with suppress(OSError), urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
        return json.load(answer)
    return {"status": "away"}


def best(index: Artifact, tower: Artifact, shards: list[int]) -> list[str]:
    embedding = QueryEncoder(tower.directory("query")).encode_queries([QUERY])
    return [hit.doc_id for hit in Searcher.open(index.uri, shards=shards).search(embedding, k=K)[0]]


def test_without_keys_only_this_machine_has_access(url):
    try:
        network = listeners.network_address()
    except SystemExit as reason:
        pytest.skip(str(reason))
    rows = listeners.examine(psutil.Process(), network, client_s=5)
    assert {"gcs_server", "raylet", "a Ray client"} <= {row["process"] for row in rows}
    assert {row["from the network"] for row in rows} <= {"closed", "refused", "harmless"}
    answers = {(row["process"], row["from loopback"], row["from the network"]) for row in rows}
    assert ("ray::ProxyActor", "OPEN", "closed") in answers


def test_replicas_that_do_not_fit_on_nodes_are_refused(cluster, index, query_tower):
    served = find_artifacts(
        index.uri, query_tower.uri, cpus_per_replica=50, deployments={"searcher": {"num_replicas": 1}}
    )
    with pytest.raises(
        ConfigError, match=r"Gateway needs 50 CPUs per replica, no node has that; .* \d+ CPUs"
    ):
        launch.start(served, app.bind(served))


def test_without_an_aggregator_its_groups_are_missing(url, index, query_tower, teacher):
    towers = {True: teacher, False: query_tower}
    kill("Aggregator-001")
    partial = 0
    for _ in range(TRIES):
        status, answer = search(url, deadline_ms=1000)
        if status == 200:
            missing = answer["missing_groups"]
            answering = [group for group in range(SHARDS) if group not in missing]
            assert missing in ([], KILLED_GROUPS)
            assert answer["shards_answered"] == len(answering)
            assert hits(answer) == best(index, towers[answer["escalated"]], answering)
            partial += bool(missing)
        else:
            assert status == 503  # the other aggregator was slow, too
        if not partial and "aggregator:1" in health(url).get("silent", []):
            continue  # it was killed, and no request was sent since
        if health(url)["status"] == "ok":
            break
        time.sleep(PAUSE_S)
    status, answer = search(url)
    assert (status, answer["missing_groups"], answer["shards_answered"]) == (200, [], SHARDS)


def test_without_a_teacher_the_student_answers(url, index, query_tower, teacher):
    by_teacher, by_student = (best(index, tower, [*range(SHARDS)]) for tower in (teacher, query_tower))
    assert by_teacher != by_student
    killed, reasons = False, set()
    for _ in range(TRIES):
        status, answer = search(url)
        assert status == 200
        assert hits(answer) == (by_teacher if answer["escalated"] else by_student)
        assert bool(answer["degraded"]) != answer["escalated"]
        if answer["escalated"] and reasons:
            break
        if answer["escalated"]:  # also if the next one was ready before a query failed
            kill("QueryTeacher")
            killed = True
        elif killed:
            reasons |= set(answer["degraded"])
        time.sleep(PAUSE_S)
    assert answer["escalated"]
    assert reasons
    assert reasons <= {"teacher_late", "teacher_failed", "teacher_silent"}


def test_a_gateway_without_documents_answers_with_ids(url, index, teacher):
    expected = best(index, teacher, [*range(SHARDS)])
    file = f"{index.uri}/{documents_file(2)}"
    os.rename(file, f"{file}.away")
    try:
        kill("Gateway")
        for _ in range(TRIES):
            status, answer = search(url)
            if status == 200 and answer["degraded"] == ["documents_unreadable"]:  # the teacher is in time
                break
            time.sleep(PAUSE_S)
        assert answer["degraded"] == ["documents_unreadable"]
        assert hits(answer) == expected
        assert {hit["title"] for hit in answer["results"]} == {""}
        assert health(url)["silent"] == ["documents"]
    finally:
        os.rename(f"{file}.away", file)
    for _ in range(TRIES):
        status, answer = search(url)
        assert (status, hits(answer)) == (200, expected)
        if not answer["degraded"]:
            break
        time.sleep(PAUSE_S)
    assert [hit["title"] for hit in answer["results"]] == [f"Title {name[1:]}" for name in expected]
    assert health(url)["status"] == "ok"
