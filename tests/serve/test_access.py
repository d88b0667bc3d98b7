"""Admission: keys, rates and limits apply before the API, and every request is recorded."""

import asyncio
import hashlib
from typing import Any

import httpx
import pytest

from scalingnote.core.errors import ConfigError
from scalingnote.run.service_config import Limits
from scalingnote.serve.access import AccessMiddleware, Admission, read_keys

KEY = "a key of sixteen or more"


def application(**knobs: Any) -> tuple[AccessMiddleware, list[int]]:
    """Access control before an application that waits for /slow and answers everything else."""
    statuses: list[int] = []

    async def api(scope, receive, send):
        if scope["path"] == "/slow":
            await asyncio.sleep(0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["state"]["record"].request_id.encode()})

    keys = frozenset({hashlib.sha256(KEY.encode()).digest()}) if knobs.pop("closed", False) else None
    is_open = knobs.pop("is_open", False)
    middleware = AccessMiddleware(
        api,
        admission=Admission(Limits(**knobs), keys, is_open=is_open),
        on_done=lambda path, note, status, seconds: statuses.append(status),
    )
    return middleware, statuses


def ask(
    middleware: AccessMiddleware,
    *paths: str,
    headers: dict[str, str] | None = None,
    client: str = "127.0.0.1",
    host: str = "test",
) -> list[httpx.Response]:
    """Send requests at the same time."""

    async def all_of_them() -> list[httpx.Response]:
        transport = httpx.ASGITransport(middleware, client=(client, 1))
        async with httpx.AsyncClient(
            transport=transport, base_url=f"http://{host}", headers=headers
        ) as client_:
            return list(await asyncio.gather(*map(client_.get, paths)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("sent_headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"Bearer  {KEY} "}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),  # the scheme ignores case, the key does not
        ({"authorization": f"BEARER\t{KEY}"}, 200),
        ({"authorization": f"Bearer {KEY.upper()}"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
    ],
)
def test_keys_are_required_and_checked(sent_headers, status):
    middleware, statuses = application(closed=True)
    (answer,) = ask(middleware, "/search", headers=sent_headers)
    assert answer.status_code == status
    assert statuses == [status]
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "unauthorized"
        assert KEY not in answer.text


@pytest.mark.parametrize(
    ("text", "encoding", "reason"),
    [
        ("", "utf-8", "one key per line"),
        ("short", "utf-8", "16 characters"),
        (KEY, "utf-16", r"keys is not UTF-8 .*save it as UTF-8"),
        (None, "utf-8", "cannot be read"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path, text, encoding, reason):
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text, encoding=encoding)
    with pytest.raises(ConfigError, match=reason):
        read_keys(str(path))
    keys = ["the-first-of-the-keys", "the-last-of-the-keys"]
    path.write_text("\r\n".join(keys) + "\r\n", encoding="utf-8-sig")  # some editors save files like this
    assert read_keys(str(path)) == {hashlib.sha256(key.encode()).digest() for key in keys}


def test_the_page_and_the_health_need_no_key():
    middleware, _ = application(closed=True)
    answers = ask(middleware, "/", "/page/page.css", "/healthz", "/info", "/pages", "/documents/page/")
    assert [answer.status_code for answer in answers] == [200, 200, 200, 401, 401, 401]


def test_a_client_above_its_rate_gets_the_time_of_a_retry():
    middleware, _ = application(rate=0.5, burst=3)
    answers = ask(middleware, *["/search"] * 5)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 429, 429]
    refusal = next(answer for answer in answers if answer.status_code == 429)
    assert 1 <= int(refusal.headers["retry-after"]) <= 3
    assert ask(middleware, "/healthz")[0].status_code == 200


def test_public_paths_do_not_count_towards_a_rate():
    middleware, _ = application(rate=0.001, burst=1, closed=True)
    key = {"authorization": f"Bearer {KEY}"}
    for headers in ({}, {"authorization": "made up"}, key):
        paths = ["/", "/page/page.js", "/page/page.css", "/openapi.json"]
        assert {answer.status_code for answer in ask(middleware, *paths, headers=headers)} == {200}
    assert [ask(middleware, "/search", headers=key)[0].status_code for _ in range(2)] == [200, 429]


def test_a_bucket_gets_new_tokens_over_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("scalingnote.serve.access.time.monotonic", lambda: now[0])
    admission = Admission(Limits(rate=1, burst=2))
    assert [admission._take_token("x") for _ in range(3)] == [0, 0, 1]
    assert admission._take_token("y") == 0
    now[0] += 1
    assert [admission._take_token("x"), admission._take_token("x")] == [0, 1]
    now[0] += 100
    assert [admission._take_token("x") for _ in range(3)] == [0, 0, 1]


def test_requests_above_the_limit_are_refused_at_once():
    middleware, statuses = application(in_flight=2)
    answers = ask(middleware, *["/slow"] * 4)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503]
    assert statuses[:2] == [503, 503]  # they did not wait for the others
    assert all(answer.headers["retry-after"] == "1" for answer in answers if answer.status_code == 503)
    assert ask(middleware, "/slow")[0].status_code == 200


def test_a_request_keeps_the_id_in_its_header():
    middleware, _ = application()
    (answer,) = ask(middleware, "/search", headers={"x-request-id": "mine"})
    assert (answer.text, answer.headers["x-request-id"]) == ("mine", "mine")


def test_a_cancelled_request_is_recorded_as_499():
    middleware, statuses = application()

    async def give_up() -> None:
        transport = httpx.ASGITransport(middleware)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.get("/slow"), 0.01)

    asyncio.run(give_up())
    assert statuses == [499]


@pytest.mark.parametrize(
    ("knobs", "options", "status"),
    [
        ({"closed": True}, {}, 401),
        ({"closed": True}, {"headers": {"authorization": f"Bearer {KEY}"}, "client": "192.0.2.7"}, 200),
        ({"is_open": True}, {"host": "localhost"}, 403),
        ({}, {"host": "localhost:8000"}, 200),
        ({}, {"host": "[::1]:8000", "client": "::1"}, 200),
        ({}, {"host": "localhost", "client": "192.0.2.7"}, 403),
        ({}, {"host": "a.site.example"}, 403),  # a name that resolves to 127.0.0.1
        ({}, {"host": "localhost", "headers": {"origin": "https://a.site.example"}}, 403),
        ({}, {"host": "localhost", "headers": {"origin": "http://localhost"}}, 200),
    ],
)
def test_admin_needs_a_key_or_this_machine(knobs, options, status):
    middleware, _ = application(**knobs)
    answers = ask(middleware, "/admin/index", "/administer", **options)
    assert answers[0].status_code == status
    if status == 403:
        assert answers[0].json()["error"]["code"] == "forbidden"
        assert answers[1].status_code == 200  # only paths below /admin
