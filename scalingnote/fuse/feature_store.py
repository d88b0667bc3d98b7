"""The online store of users' features: events are written, features of several users are read at once.

    events stream ─write─► profile (the newest value of each column) and history (bounded, oldest first)
    user_ids ─get_many─► User, as :class:`~scalingnote.fuse.fusion.QueryFusion` reads it

Writes may be repeated, come in any order and from many processes: the event with the greatest timestamp gives
a profile its value (of equal ones that with the greatest id), and a history has each event once, sorted by
timestamp. So a stream can be replayed from anywhere after a crash, and nothing is doubled or lost.

    SqliteStore    one file, for the processes of one machine
    RedisStore     Redis or Valkey, for many machines
"""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from scalingnote.core.config import Config
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import Progress
from scalingnote.core.units import DAY_S
from scalingnote.core.words import is_valid_unicode

EVENTS_PER_WRITE = 512


class StoreConfig(Config):
    """Address of the store of online features, and how much of them it keeps."""

    url: str = Field(
        "sqlite:features.db", description="sqlite:PATH of an embedded database, or redis://HOST:PORT/DB"
    )
    history: int = Field(100, ge=1, description="documents kept of a user, the latest by time")
    ttl_s: float = Field(
        90 * DAY_S, gt=0, description="seconds without a written event after which a user is forgotten"
    )


@dataclass(frozen=True)
class User:
    """Features of a user: columns of the profile, semantic IDs of clicked documents, oldest first."""

    profile: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[str] = ()


@dataclass(frozen=True)
class Event:
    """An action of a user: a click on a document, a change of the profile, or both."""

    event_id: str  # the same whenever the event is sent again
    user_id: str
    timestamp: float  # seconds since 1970, when it happened
    semantic_id: str | None = None  # of the document that was clicked
    profile: Mapping[str, Any] = field(default_factory=dict)  # JSON values


@runtime_checkable
class FeatureStore(Protocol):
    """Several processes may open the same store."""

    def write(self, events: Sequence[Event]) -> None:
        """Apply events, each whole or not at all; the module's docstring says how.

        After an error some events may have been applied: write all of them again.

        Raises:
            DataError: an event cannot be stored; none was applied.
        """
        ...

    def get_many(self, user_ids: Sequence[str]) -> list[User]:
        """The features of each user, in order; an empty User for an unknown one."""
        ...


def check(events: Sequence[Event]) -> None:
    """DataError when an event cannot be stored; stores call it before they write any."""
    for event in events:
        if not event.event_id or not event.user_id:
            raise DataError(f"event without an id or a user id: {event}")
        if not event.timestamp >= 0 or event.timestamp == float("inf"):
            raise DataError(
                f"event {event.event_id!r} happened at {event.timestamp}: give seconds since 1970"
            )
        values = [event.event_id, event.user_id, event.semantic_id, dict(event.profile)]
        if not is_valid_unicode(json.dumps(values, ensure_ascii=False)):
            raise DataError(
                f"{event} has a text with a lone surrogate (invalid UTF-8), which no store can hold: fix the "
                "producer of the events"
            )


def open_store(config: StoreConfig) -> FeatureStore:
    """Open the store at a URL: sqlite:PATH, redis://HOST:PORT/DB, rediss:// or unix://.

    ConfigError if the URL has another scheme, the store cannot be opened, or redis-py is not installed.
    """
    scheme, _, path = config.url.partition(":")
    match scheme:
        case "sqlite" if path:
            return SqliteStore(path, config)
        case "redis" | "rediss" | "unix":
            return RedisStore(config)
        case _:
            raise ConfigError(f"no feature store at {config.url!r}: give sqlite:PATH or redis://HOST:PORT/DB")


def consume(store: FeatureStore, events: Iterable[Event], *, batch: int = EVENTS_PER_WRITE) -> int:
    """Write a stream of events in batches; returns their number."""
    read, stream = 0, iter(events)
    with Progress("features", total=0, unit="events") as progress:
        while some := list(islice(stream, batch)):
            store.write(some)
            read += len(some)
            progress.advance(len(some))
    return read


# --- SQLite -----------------------------------------------------------------------------------------------

WRITER_TIMEOUT_S = 30.0  # for other writers
SQLITE_SCHEMA = """
CREATE TABLE IF NOT EXISTS users (user_id TEXT PRIMARY KEY, seen REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS users_seen ON users (seen);
CREATE TABLE IF NOT EXISTS profiles (
  user_id TEXT, name TEXT, value TEXT NOT NULL, time REAL NOT NULL, event_id TEXT NOT NULL,
  PRIMARY KEY (user_id, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS history (
  user_id TEXT, time REAL, event_id TEXT, semantic_id TEXT NOT NULL, PRIMARY KEY (user_id, time, event_id)
) WITHOUT ROWID;
"""
FORGET = "DELETE FROM {} WHERE user_id IN (SELECT user_id FROM users WHERE seen <= ?)"
UPSERT_PROFILE = """
INSERT INTO profiles VALUES (?, ?, ?, ?, ?) ON CONFLICT (user_id, name) DO UPDATE
SET value = excluded.value, time = excluded.time, event_id = excluded.event_id
WHERE (excluded.time, excluded.event_id) > (time, event_id)
"""
TRIM_HISTORY = """
DELETE FROM history WHERE user_id = ?1 AND (time, event_id) NOT IN
  (SELECT time, event_id FROM history WHERE user_id = ?1 ORDER BY time DESC, event_id DESC LIMIT ?2)
"""
OF_KNOWN_USERS = "JOIN users USING (user_id) WHERE seen > ? AND user_id IN (SELECT value FROM json_each(?))"


class SqliteStore:
    """A :class:`FeatureStore` in an SQLite file. Threads may share one; a forked process opens its own.

    Write-ahead logging lets readers continue while one process writes; writers wait for each other. A batch
    is one transaction, so a killed writer leaves all of it or nothing.
    """

    def __init__(self, path: str, config: StoreConfig) -> None:
        self._path, self._config, self._local = path, config, threading.local()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection()

    def write(self, events: Sequence[Event]) -> None:
        """Events, in one transaction."""
        check(events)
        now, connection = time.time(), self._connection()
        columns = [
            (event.user_id, name, json.dumps(value), event.timestamp, event.event_id)
            for event in events
            for name, value in event.profile.items()
        ]
        clicks = [(e.user_id, e.timestamp, e.event_id, e.semantic_id) for e in events if e.semantic_id]
        with connection:
            # Upgrading a read transaction would fail at once instead of waiting.
            connection.execute("BEGIN IMMEDIATE")
            # First of all: old features of a user who comes back must not come back.
            for table in ("profiles", "history", "users"):
                connection.execute(FORGET.format(table), (now - self._config.ttl_s,))
            seen = {(event.user_id, now) for event in events}
            connection.executemany("INSERT OR REPLACE INTO users VALUES (?, ?)", seen)
            connection.executemany(UPSERT_PROFILE, columns)
            connection.executemany("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?)", clicks)
            clicked = {(user_id, self._config.history) for user_id, *_ in clicks}
            connection.executemany(TRIM_HISTORY, clicked)

    def get_many(self, user_ids: Sequence[str]) -> list[User]:
        """One read of each table, however many users."""
        connection = self._connection()
        known = (time.time() - self._config.ttl_s, json.dumps(list(user_ids)))
        profiles: dict[str, dict[str, object]] = {}
        histories: dict[str, list[str]] = {}
        with connection:
            connection.execute("BEGIN")  # both tables at one moment
            columns = f"SELECT user_id, name, value FROM profiles {OF_KNOWN_USERS}"
            for user_id, name, value in connection.execute(columns, known):
                profiles.setdefault(user_id, {})[name] = json.loads(value)
            clicks = f"SELECT user_id, semantic_id FROM history {OF_KNOWN_USERS} ORDER BY time, event_id"
            for user_id, semantic_id in connection.execute(clicks, known):
                histories.setdefault(user_id, []).append(semantic_id)
        return [User(profiles.get(user_id, {}), tuple(histories.get(user_id, ()))) for user_id in user_ids]

    def _connection(self) -> sqlite3.Connection:
        """The connection of this thread of this process: connections must not be used after a fork."""
        if getattr(self._local, "process", None) != os.getpid():
            try:
                opened = sqlite3.connect(self._path, timeout=WRITER_TIMEOUT_S, isolation_level=None)
                opened.execute("PRAGMA journal_mode=WAL")
                # A crash of the machine may lose the last batches, which a replay restores; none is torn.
                opened.execute("PRAGMA synchronous=NORMAL")
                opened.executescript(SQLITE_SCHEMA)
            except sqlite3.Error as error:
                raise ConfigError(f"{self._path} is no feature store: {error}; name another file") from error
            self._local.process, self._local.connection = os.getpid(), opened
        connection: sqlite3.Connection = self._local.connection
        return connection


# --- Redis ------------------------------------------------------------------------------------------------

REDIS_SEPARATOR = "\0"
# KEYS: profile, history. ARGV: event id, timestamp, member or "", length of history, ttl in ms, then columns:
# name, [timestamp, event id, value], ...
REDIS_APPLY = """
for i = 6, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], ARGV[i])
  local newer = true
  if old then
    local time, id = tonumber(cjson.decode(old)[1]), cjson.decode(old)[2]
    newer = time < tonumber(ARGV[2]) or (time == tonumber(ARGV[2]) and id < ARGV[1])
  end
  if newer then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
if ARGV[3] ~= '' then
  redis.call('ZADD', KEYS[2], ARGV[2], ARGV[3])
  redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -tonumber(ARGV[4]) - 1)
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
"""


class RedisStore:
    """A :class:`FeatureStore` in Redis (or Valkey). Threads and processes may share one.

        sn:u:{user}:p   hash, column -> [timestamp, event id, value] as JSON
        sn:u:{user}:h   sorted set by timestamp, members "event id \\0 semantic id"

    The keys of a user share a hash tag, so that they lie on one node of a cluster. One script applies one
    event. Keys that are not written to expire.
    """

    def __init__(self, config: StoreConfig) -> None:
        try:
            import redis  # optional
        except ModuleNotFoundError:
            raise ConfigError(
                f"{config.url} needs redis-py: pip install 'scalingnote[redis]', or use sqlite:PATH"
            ) from None
        self._config = config
        self._redis: Any = redis.Redis.from_url(config.url, decode_responses=True)
        try:
            self._redis.ping()
        except redis.RedisError as error:
            raise ConfigError(f"no Redis answers at {config.url}: {error}") from error
        self._apply = self._redis.register_script(REDIS_APPLY)

    def write(self, events: Sequence[Event]) -> None:
        """Events in one round trip, a script each; a lost connection may have applied some of them."""
        check(events)
        ttl_ms = max(round(1000 * self._config.ttl_s), 1)
        with self._redis.pipeline(transaction=False) as pipeline:
            for event in events:
                clicked = f"{event.event_id}{REDIS_SEPARATOR}{event.semantic_id}" if event.semantic_id else ""
                arguments: list[str | int] = [event.event_id, repr(event.timestamp), clicked]
                arguments += [self._config.history, ttl_ms]
                for name, value in event.profile.items():
                    arguments += [name, json.dumps([event.timestamp, event.event_id, value])]
                self._apply(keys=_redis_keys(event.user_id), args=arguments, client=pipeline)
            pipeline.execute()

    def get_many(self, user_ids: Sequence[str]) -> list[User]:
        """One round trip for all users."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for user_id in user_ids:
                profile, history = _redis_keys(user_id)
                pipeline.hgetall(profile)
                pipeline.zrange(history, 0, -1)
            values = pipeline.execute()
        return [
            User(
                {name: json.loads(value)[2] for name, value in profile.items()},
                tuple(member.partition(REDIS_SEPARATOR)[2] for member in history),
            )
            for profile, history in zip(values[::2], values[1::2], strict=True)
        ]


def _redis_keys(user_id: str) -> list[str]:
    return [f"sn:u:{{{user_id}}}:{part}" for part in "ph"]
