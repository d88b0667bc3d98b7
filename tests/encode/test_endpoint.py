"""With an endpoint that is slow, busy, invalid or killed, each text is requested once and has its vector."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedding_server import DIM, Server, embed_by_hash, vector
from scalingnote.core.errors import ConfigError, EndpointError
from scalingnote.encode import endpoint_client
from scalingnote.encode.config import EndpointConfig
from scalingnote.encode.endpoint import Endpoint
from scalingnote.encode.endpoint_client import ENDPOINT_KEY_VARIABLE, OPENAI_KEY_VARIABLE
from scalingnote.models.published_model import Role

TEXTS = [f"text {number}" for number in range(100)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in (ENDPOINT_KEY_VARIABLE, OPENAI_KEY_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    test_server = Server()
    yield test_server
    test_server.shutdown()
    test_server.server_close()


def endpoint(
    server: Server, folder: Path, path: str = "/v1", role: Role = "query", **settings: Any
) -> Endpoint:
    config = EndpointConfig(url=server.url(path), model="m", **{"batch_texts": 8, **settings})
    return Endpoint(config, str(folder), role)


def embed(source: Endpoint, texts: list[str]) -> np.ndarray:
    source.ask(texts)
    vectors, problems = source.read(texts)
    assert not problems
    return vectors


@pytest.mark.parametrize("path", ["/v1", "", "/v1/embeddings", "/embed"])
def test_vectors_are_in_the_order_of_the_texts(path: str, server: Server, tmp_path: Path):
    source = endpoint(server, tmp_path, path)
    texts = [*TEXTS, TEXTS[3], ""]
    np.testing.assert_array_equal(embed(source, texts), embed_by_hash(texts))
    assert set(server.asked.values()) == {1}
    usage = source.ask(texts)
    assert usage["requests"] == 14  # the shortest text is sent first, by itself
    assert usage["tokens"] == (0 if path == "/embed" else 2 * 101)


def test_texts_that_the_endpoint_cuts_are_counted(server: Server, tmp_path: Path, caplog):
    server.usage = {"cut_texts": 1, "lost_tokens": 30}
    usage = endpoint(server, tmp_path).ask(TEXTS)
    assert (usage["cut_texts"], usage["lost_tokens"]) == (usage["requests"], 30 * usage["requests"])
    assert "longer than the endpoint's model reads" in caplog.text


def test_a_second_run_requests_only_new_texts(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    embed(endpoint(server, tmp_path), TEXTS[:40])
    with caplog.at_level("INFO"):
        np.testing.assert_array_equal(embed(endpoint(server, tmp_path), TEXTS), embed_by_hash(TEXTS))
    assert "60 of 100 texts need requests: about 9 requests and 120 tokens" in caplog.text
    assert set(server.asked.values()) == {1}
    other = EndpointConfig(url=server.url(), model="another")
    embed(Endpoint(other, str(tmp_path), "query"), TEXTS[:1])
    assert server.asked[TEXTS[0]] == 2  # answers are separate for each model


def test_a_role_has_its_prefix_and_fields(server: Server, tmp_path: Path):
    settings = {"document_prefix": "passage: ", "query_fields": {"input_type": "query", "dimensions": 6}}
    vectors = embed(endpoint(server, tmp_path, role="document", **settings), ["a"])
    np.testing.assert_array_equal(vectors, embed_by_hash(["passage: a"]))
    embed(endpoint(server, tmp_path, **settings), ["a"])
    assert [body.get("input_type") for body in server.bodies] == [None, "query"]
    assert (server.bodies[1]["input"], server.bodies[1]["dimensions"]) == (["a"], 6)


def test_requests_to_a_busy_endpoint_wait_for_retry_after(server: Server, tmp_path: Path):
    times: list[float] = []

    def busy(_: Any) -> Any:
        times.append(time.monotonic())
        return (429, {"retry-after": "0.3"}, {}) if len(times) == 1 else None

    server.fault = busy
    source = endpoint(server, tmp_path, concurrency=1)
    np.testing.assert_array_equal(embed(source, TEXTS[:8]), embed_by_hash(TEXTS[:8]))
    assert times[1] - times[0] >= 0.3  # the minimum, at any load of the machine
    assert source.ask([])["retries"] == 1


def test_an_endpoint_that_never_answers_fails_early(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(endpoint_client, "GIVE_UP_FIRST_S", 0.0)
    server.fault = lambda _: (503, {}, {"error": "loading"})
    with pytest.raises(EndpointError, match=r"has not answered for .*503: .*loading.*check the URL"):
        endpoint(server, tmp_path).ask(TEXTS)
    server.shutdown()
    server.server_close()
    with pytest.raises(EndpointError, match=r"has not answered for .*refused"):
        endpoint(server, tmp_path).ask(TEXTS)


def test_refused_batches_are_halved_and_texts_set_aside(server: Server, tmp_path: Path):
    bad = TEXTS[5]
    server.fault = lambda body: (
        (413, {}, {"error": "too large"}) if len(body["input"]) > 3 or bad in body["input"] else None
    )
    source = endpoint(server, tmp_path)
    source.ask(TEXTS[:16])
    vectors, problems = source.read(TEXTS[:16])
    assert problems == {5: 'the endpoint refuses it: 413: {"error": "too large"}'}
    np.testing.assert_array_equal(np.delete(vectors, 5, 0), np.delete(embed_by_hash(TEXTS[:16]), 5, 0))


def test_vectors_are_numbers_without_base64(server: Server, tmp_path: Path):
    server.fault = lambda body: (400, {}, "encoding_format is unknown") if "encoding_format" in body else None
    source = endpoint(server, tmp_path, concurrency=1)
    np.testing.assert_array_equal(embed(source, TEXTS[:16]), embed_by_hash(TEXTS[:16]))
    assert [("encoding_format" in body) for body in server.bodies] == [True, *[False] * 3]


def test_a_vector_without_numbers_is_set_aside(server: Server, tmp_path: Path):
    def with_nan(body: dict[str, Any]) -> Any:
        rows = [[0.0] * DIM if text == TEXTS[3] else vector(text).tolist() for text in body["input"]]
        rows = [
            [None] * DIM if text == TEXTS[4] else row for text, row in zip(body["input"], rows, strict=True)
        ]
        return 200, {}, {"data": [{"index": n, "embedding": row} for n, row in enumerate(rows)]}

    server.fault = with_nan
    source = endpoint(server, tmp_path)
    source.ask(TEXTS[:8])
    vectors, problems = source.read(TEXTS[:8])
    assert sorted(problems) == [3, 4]
    assert "is 0, or not all values are finite" in problems[3]
    np.testing.assert_allclose(np.delete(vectors, [3, 4], 0), np.delete(embed_by_hash(TEXTS[:8]), [3, 4], 0))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((401, {}, {}), "needs a key: set SCALINGNOTE_ENDPOINT_KEY .401"),
        ((403, {}, {"error": "other project"}), "needs a key: .*403: .*other project"),
        ((404, {}, {"error": "gone"}), "has no model 'm', or the URL is wrong .404: .*gone"),
        ((400, {}, {"error": "dimensions"}), "refuses even one text: 400: .*dimensions"),
        ((402, {}, {"error": "no credit"}), "refuses with 402: .*no credit"),
        ((200, {}, {"data": []}), "answers 1 texts by 0 vectors"),
        ((200, {}, []), "does not answer in the format of OpenAI's embeddings"),
    ],
)
def test_errors_state_the_reason(fault: Any, reason: str, server: Server, tmp_path: Path):
    server.fault = lambda _: fault
    with pytest.raises(EndpointError, match=reason):
        endpoint(server, tmp_path).ask(TEXTS[:8])
    assert len(server.bodies) == 1  # no further request


def test_vectors_of_two_lengths_are_an_error(server: Server, tmp_path: Path):
    def one_longer(body: dict[str, Any]) -> Any:
        sizes = [DIM + (text == TEXTS[7]) for text in body["input"]]
        data = [{"index": n, "embedding": [1.0] * size} for n, size in enumerate(sizes)]
        return 200, {}, {"data": data}

    server.fault = one_longer
    with pytest.raises(EndpointError, match="answers 7 texts by 7 vectors of 6 and 7 values"):
        endpoint(server, tmp_path).ask(TEXTS[:8])
    with pytest.raises(EndpointError, match=r"returned vectors of 6 values before, now of 7: another model"):
        endpoint(server, tmp_path).ask(TEXTS[7:8])


def test_requests_have_a_limit(server: Server, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"100 texts take about 14 requests .*max_requests is 3"):
        endpoint(server, tmp_path, max_requests=3).ask(TEXTS)
    assert not server.bodies
    server.fault = lambda body: (413, {}, {}) if len(body["input"]) > 3 else None
    with pytest.raises(EndpointError, match="max_requests is 14, and this number of requests was sent"):
        endpoint(server, tmp_path, max_requests=14).ask(TEXTS)
    assert len(server.bodies) == 14
    server.fault = lambda _: None
    np.testing.assert_array_equal(embed(endpoint(server, tmp_path), TEXTS), embed_by_hash(TEXTS))
    assert set(server.asked.values()) == {1}


def test_a_key_is_sent_only_to_its_own_host(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(OPENAI_KEY_VARIABLE, "of OpenAI")
    embed(endpoint(server, tmp_path), TEXTS[:1])
    assert server.keys == {None}
    assert endpoint_client._key_variable("https://api.openai.com/v1/embeddings") == OPENAI_KEY_VARIABLE
    assert endpoint_client._key_variable("https://api-openai.com/v1/embeddings") == ENDPOINT_KEY_VARIABLE
    monkeypatch.setenv(ENDPOINT_KEY_VARIABLE, "secret")
    embed(endpoint(server, tmp_path), TEXTS[1:2])
    assert server.keys == {None, "Bearer secret"}
    server.fault = lambda _: (401, {}, {})
    with pytest.raises(EndpointError, match=f"refuses the key in {ENDPOINT_KEY_VARIABLE}"):
        endpoint(server, tmp_path).ask(TEXTS[2:3])


def ask_in_process(url: str, folder: str) -> None:
    config = EndpointConfig(url=url, model="m", batch_texts=2, concurrency=1)
    Endpoint(config, folder, "query").ask(TEXTS)


def test_a_killed_run_requests_no_answered_text_again(server: Server, tmp_path: Path):
    stop = threading.Event()

    def wait_for_kill(_: Any) -> Any:
        if sum(server.asked.values()) >= 30 and not stop.is_set():
            stop.wait(30)
            return 503, {}, {}
        return None

    server.fault = wait_for_kill
    child = multiprocessing.get_context("spawn").Process(
        target=ask_in_process, args=(server.url(), str(tmp_path))
    )
    child.start()
    deadline = time.monotonic() + 60
    while (
        len(server.bodies) < 17 and time.monotonic() < deadline
    ):  # 1 + 15 x 2 texts, and one waiting request
        time.sleep(0.05)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    stop.set()
    np.testing.assert_array_equal(embed(endpoint(server, tmp_path), TEXTS), embed_by_hash(TEXTS))
    assert set(server.asked.values()) == {1}
    assert len(server.asked) == 100
