"""The gateway before small fakes: in this process where possible, one real application for HTTP."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from fastapi import HTTPException
from ray import serve

from scalingnote.search.config import ServeConfig
from scalingnote.search.searcher import Candidates
from serve import app
from serve.gateway import Gateway
from serve.messages import SearchRequest

# What the query asks the fakes to do; it travels in the embedding, as the query itself would.
BEHAVIOURS = ["all well", "one slow", "one dead", "all dead", "documents lost", "encoder slow"]
SLOW_S = 120.0


@serve.deployment
class Encoder:
    async def encode(self, query: str) -> np.ndarray:
        if query == "encoder slow":
            await asyncio.sleep(SLOW_S)
        return np.float32([BEHAVIOURS.index(query)])

    async def ping(self) -> bool:
        return True


@serve.deployment
class Shard:
    """Ten documents; shard s holds the scores s, s+2, s+4, ... so that the merge has to interleave."""

    def __init__(self, shard: int) -> None:
        self._shard = shard

    async def candidates(self, query: np.ndarray, k: int) -> Candidates:
        behaviour = BEHAVIOURS[int(query[0])]
        if behaviour == "one slow" and self._shard == 1:
            await asyncio.sleep(SLOW_S)
        if behaviour == "all dead" or (behaviour == "one dead" and self._shard == 1):
            raise OSError("the disk is gone")
        self._lost = behaviour == "documents lost" and self._shard == 1
        rows = np.arange(10)[::-1][np.newaxis, :k]
        return Candidates(np.float32(2 * rows + self._shard), np.full_like(rows, self._shard), rows)

    async def documents(self, rows: list[int]) -> list[dict[str, str]]:
        if self._lost:
            raise OSError("the disk is gone")
        return [
            {
                "doc_id": self._doc_id(row),
                "title": f"title of {row}",
                "topic": "fakes",
                "snippet": "<b>not markup</b>",
                "semantic_id": f"{self._shard}-{row}-0",
            }
            for row in rows
        ]

    async def ping(self) -> bool:
        return True

    def _doc_id(self, row: int) -> str:
        return f"{self._shard}/{row}"


def application(config: ServeConfig) -> serve.Application:
    idle = {"num_cpus": 0.1}
    shards = [Shard.options(name=f"Shard-{n}", ray_actor_options=idle).bind(n) for n in range(2)]
    encoder = Encoder.options(ray_actor_options=idle).bind()
    return Gateway.options(ray_actor_options=idle).bind(encoder, shards, config)


@pytest.fixture(scope="module")
def gateway() -> serve.handle.DeploymentHandle:
    config = ServeConfig(deadline_s=0.5, max_k=20, max_query_chars=40)
    return serve.run(application(config), name="local", _local_testing_mode=True)


def search(gateway: serve.handle.DeploymentHandle, query: str, k: int = 5) -> Any:
    return gateway.search.remote(SearchRequest(query=query, k=k)).result()


def test_results_of_all_shards_are_merged_best_first(gateway):
    answer = search(gateway, "all well", k=5)
    assert [hit.doc_id for hit in answer.results] == ["1/9", "0/9", "1/8", "0/8", "1/7"]
    assert [hit.score for hit in answer.results] == [19.0, 18.0, 17.0, 16.0, 15.0]
    assert [hit.semantic_id for hit in answer.results] == ["1-9-0", "0-9-0", "1-8-0", "0-8-0", "1-7-0"]
    assert (answer.shards, answer.shards_answered) == (2, 2)
    took = answer.timings_ms
    assert took.total >= took.encode + took.search + took.documents - 0.01 > 0


def test_k_beyond_the_index_gives_all_there_is(gateway):
    assert len(search(gateway, "all well", k=20).results) == 20


def test_white_space_around_a_query_is_no_part_of_it(gateway):
    assert len(search(gateway, "  all well\n").results) == 5


@pytest.mark.parametrize("behaviour", ["one slow", "one dead"])
def test_a_shard_that_is_slow_or_dead_is_left_out_and_that_is_said(gateway, behaviour):
    answer = search(gateway, behaviour, k=3)
    assert [hit.doc_id for hit in answer.results] == ["0/9", "0/8", "0/7"]
    assert (answer.shards, answer.shards_answered) == (2, 1)
    assert answer.timings_ms.total < 1000 * SLOW_S


def test_a_shard_lost_between_search_and_documents_counts_as_silent(gateway):
    answer = search(gateway, "documents lost", k=4)
    assert [hit.doc_id for hit in answer.results] == ["0/9", "0/8"]
    assert (answer.shards, answer.shards_answered) == (2, 1)


@pytest.mark.parametrize("behaviour", ["all dead", "encoder slow"])
def test_when_nothing_answers_the_client_is_told_instead_of_kept_waiting(gateway, behaviour):
    with pytest.raises(HTTPException) as refused:
        search(gateway, behaviour)
    assert refused.value.status_code == 503


@pytest.mark.parametrize(
    ("query", "k", "reason"),
    [("   ", 5, "empty"), ("x" * 41, 5, "41 characters"), ("all well", 21, "up to 20")],
)
def test_what_this_server_does_not_take_is_refused_with_the_reason(gateway, query, k, reason):
    with pytest.raises(HTTPException) as refused:
        search(gateway, query, k)
    assert refused.value.status_code == 422
    assert reason in refused.value.detail


def test_the_page_is_one_file_that_asks_nothing_of_other_hosts(gateway):
    page = gateway.page.remote().result().body.decode()
    assert "<input" in page
    assert "//" not in page.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    assert "innerHTML" not in page  # documents are shown as text, whatever they hold


@pytest.fixture(scope="module")
def url(cluster: None) -> Iterator[str]:
    """The same fakes as a real application behind HTTP."""
    config = ServeConfig(port=app._free_port("127.0.0.1", 0), deadline_s=1.0, max_k=20)
    yield app.launch(application(config), config)
    serve.shutdown()


def post(url: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/search", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_http_answers_a_query(url):
    status, answer = post(url, b'{"query": "all well", "k": 2}')
    assert status == 200
    assert [hit["doc_id"] for hit in answer["results"]] == ["1/9", "0/9"]
    assert set(answer["results"][0]) == {"doc_id", "score", "title", "topic", "snippet", "semantic_id"}
    assert set(answer["timings_ms"]) == {"encode", "search", "documents", "total"}
    assert (answer["shards"], answer["shards_answered"]) == (2, 2)


def test_http_answers_in_part_when_a_shard_is_slow(url):
    status, answer = post(url, b'{"query": "one slow"}')
    assert status == 200
    assert (answer["shards"], answer["shards_answered"]) == (2, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"query": ""}',
        b'{"k": 3}',
        b'{"query": 3}',
        b'{"query": null}',
        b'{"query": "all well", "k": 0}',
        b'{"query": "all well", "k": -1}',
        b'{"query": "all well", "k": 21}',
        b'{"query": "all well", "k": 2.5}',
        b'{"query": "all well", "k": true}',
        b'{"query": "all well", "k": "2"}',
        b'{"query": "all well", "k": NaN}',
        b'{"query": "all well", "top": 2}',
        b'{"query": "\\ud800"}',
    ],
)
def test_http_refuses_what_it_does_not_understand(url, body):
    status, answer = post(url, body)
    assert status == 422
    assert answer["detail"]


def test_http_refuses_bytes_that_are_no_text(url):
    status, answer = post(url, b'{"query": "\xff"}')
    assert status == 400
    assert answer["detail"]


def test_http_serves_the_page_and_its_health(url):
    with urllib.request.urlopen(url, timeout=60) as page:
        assert page.headers["Content-Type"].startswith("text/html")
        assert b"ScalingNote" in page.read()
    with urllib.request.urlopen(f"{url}/healthz", timeout=60) as health:
        assert json.load(health) == {
            "status": "ok",
            "encoder_answers": True,
            "shards": 2,
            "shards_answered": 2,
        }


def test_http_survives_a_replica_that_is_killed(url):
    # Serve starts another one; until then the answer is partial, never an error and never late.
    replica = next(
        actor["name"]
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if "#Shard-1#" in actor["name"]
    )
    ray.kill(ray.get_actor(replica, namespace="serve"))
    for _ in range(20):
        status, answer = post(url, b'{"query": "all well"}')
        assert status == 200
        assert answer["shards_answered"] in (1, 2)
        assert answer["results"]
