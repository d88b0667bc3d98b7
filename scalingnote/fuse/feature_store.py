"""The online store of users' features: events are written, and features of several users are read at once.

    events stream ─write─► profile (the newest value of each column) and history (bounded, oldest first)
    user_ids ─get_many─► User, which :class:`~scalingnote.fuse.fusion.QueryFusion` reads

Writes may be repeated, in any order and from many processes: :func:`merge` returns the same features. So a
stream can be replayed from an earlier position after a crash, and no event is counted twice or lost.

    SqliteStore    one file, for the processes of one machine
    RedisStore     Redis or Valkey, for many machines

Both hold a JSON text for each user. A writer reads the text, merges events into it and replaces it, unless
another writer has changed it meanwhile; then the writer retries.
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
from typing import Any

from pydantic import Field

from scalingnote.core import DAY_S
from scalingnote.core.config import Config
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import Progress
from scalingnote.core.words import is_valid_unicode

EVENTS_PER_WRITE = 512


class StoreConfig(Config):
    """Address of the store of online features, and the amount that it keeps."""

    url: str = Field(
        "sqlite:features.db", description="sqlite:PATH of an embedded database, or redis://HOST:PORT/DB"
    )
    history: int = Field(100, ge=1, description="documents kept per user, the latest by time")
    ttl_s: float = Field(
        90 * DAY_S, gt=0, description="seconds without a written event after which a user is deleted"
    )


@dataclass(frozen=True)
class User:
    """Features of a user: columns of the profile, and semantic IDs of clicked documents, oldest first."""

    profile: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[str] = ()


@dataclass(frozen=True)
class Event:
    """An action of a user: a click on a document, a change of the profile, or both.

    Raises:
        DataError: no store can hold the event.
    """

    event_id: str  # the same each time the event is sent
    user_id: str
    timestamp: float  # seconds since 1970, when it happened
    semantic_id: str | None = None  # of the document that was clicked
    profile: Mapping[str, Any] = field(default_factory=dict)  # JSON values

    def __post_init__(self) -> None:
        if not self.event_id or not self.user_id:
            raise DataError(f"event without an id or a user id: {self}")
        if not 0 <= self.timestamp < float("inf"):
            raise DataError(f"event {self.event_id!r} has time {self.timestamp}: pass seconds since 1970")
        values = [self.event_id, self.user_id, self.semantic_id, dict(self.profile)]
        if not is_valid_unicode(json.dumps(values, ensure_ascii=False)):
            raise DataError(f"{self} has a text with a lone surrogate (invalid UTF-8): fix its producer")


class FeatureStore:
    """Features of users, in a store that several threads and processes may open.

    A subclass reads and swaps texts.
    """

    def __init__(self, config: StoreConfig) -> None:
        self._config = config

    def write(self, events: Sequence[Event]) -> None:
        """Apply events, all events of a user at once; events that were written before change nothing.

        After an error the events of some users may have been applied: write all events again.
        """
        waiting: dict[str, list[Event]] = {}
        for event in events:
            waiting.setdefault(event.user_id, []).append(event)
        while waiting:
            names = list(waiting)
            old = self._read(names)
            new = [
                merge(text, waiting[name], history=self._config.history)
                for name, text in zip(names, old, strict=True)
            ]
            for name, swapped in zip(names, self._swap(names, old, new), strict=True):
                if swapped:
                    del waiting[name]

    def get_many(self, user_ids: Sequence[str]) -> list[User]:
        """Read the features of each user, in order; an empty User for an unknown one."""
        return [_user(text) for text in self._read(user_ids)]

    def _read(self, user_ids: Sequence[str]) -> list[str | None]:
        """Read the text of each user; None if the user is unknown or deleted."""
        raise NotImplementedError

    def _swap(self, user_ids: Sequence[str], old: Sequence[str | None], new: Sequence[str]) -> list[bool]:
        """Write the new text of each user whose text is still the old one; return whether it was."""
        raise NotImplementedError


def merge(text: str | None, events: Iterable[Event], *, history: int) -> str:
    """Merge events into the features of a user; the order of events and repeated events change nothing.

    Args:
        text: the earlier features, as this function returns them; None: there are none.
        events: of this user.
        history: number of documents that are kept, the latest by time.

    Returns:
        JSON of ``profile``, column -> [timestamp, event id, value] of the latest event, and ``history``,
        [timestamp, event id, semantic ID] of each click in order. If timestamps are equal, the event with the
        greater id is the later one.
    """
    known = json.loads(text) if text else {"profile": {}, "history": []}
    profile: dict[str, list[Any]] = known["profile"]
    clicks = {(time, event_id): semantic_id for time, event_id, semantic_id in known["history"]}
    for event in events:
        moment = (event.timestamp, event.event_id)
        for name, value in event.profile.items():
            if name not in profile or moment > tuple(profile[name][:2]):
                profile[name] = [*moment, value]
        if event.semantic_id:
            clicks[moment] = event.semantic_id
    latest_clicks = [[*moment, clicks[moment]] for moment in sorted(clicks)[-history:]]
    return json.dumps({"profile": profile, "history": latest_clicks})


def _user(text: str | None) -> User:
    known = json.loads(text) if text else {"profile": {}, "history": []}
    profile = {name: value for name, (_, _, value) in known["profile"].items()}
    return User(profile, tuple(semantic_id for _, _, semantic_id in known["history"]))


def open_store(config: StoreConfig) -> FeatureStore:
    """Open the store at a URL: sqlite:PATH, redis://HOST:PORT/DB, rediss:// or unix://.

    Raises:
        ConfigError: the URL has another scheme, the store cannot be opened, or redis-py is not installed.
    """
    scheme, _, path = config.url.partition(":")
    match scheme:
        case "sqlite" if path:
            return SqliteStore(path, config)
        case "redis" | "rediss" | "unix":
            return RedisStore(config)
        case _:
            raise ConfigError(f"no feature store at {config.url!r}: set sqlite:PATH or redis://HOST:PORT/DB")


def consume(store: FeatureStore, events: Iterable[Event], *, batch: int = EVENTS_PER_WRITE) -> int:
    """Write a stream of events in batches; return their number."""
    count, stream = 0, iter(events)
    with Progress("features", total=0, unit="events") as progress:
        while some := list(islice(stream, batch)):
            store.write(some)
            count += len(some)
            progress.advance(len(some))
    return count


# --- the two stores ---------------------------------------------------------------------------------------

WRITER_TIMEOUT_S = 30.0  # wait for other writers
SQLITE_SCHEMA = """
CREATE TABLE IF NOT EXISTS features (user_id TEXT PRIMARY KEY, text TEXT NOT NULL, written REAL NOT NULL);
CREATE INDEX IF NOT EXISTS features_written ON features (written);
"""
SQLITE_READ = """
SELECT user_id, text FROM features WHERE written > ? AND user_id IN (SELECT value FROM json_each(?))
"""


class SqliteStore(FeatureStore):
    """Features in an SQLite file. A forked process opens its own connection.

    With the write-ahead log readers continue while one process writes; writers wait for each other. A batch
    is one transaction: a killed writer has written all of it or nothing.
    """

    def __init__(self, path: str, config: StoreConfig) -> None:
        super().__init__(config)
        self._path, self._local = path, threading.local()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection()

    def _read(self, user_ids: Sequence[str]) -> list[str | None]:
        parameters = (time.time() - self._config.ttl_s, json.dumps(list(user_ids)))
        text_of: dict[str, str] = dict(self._connection().execute(SQLITE_READ, parameters).fetchall())
        return [text_of.get(user_id) for user_id in user_ids]

    def _swap(self, user_ids: Sequence[str], old: Sequence[str | None], new: Sequence[str]) -> list[bool]:
        connection, now = self._connection(), time.time()
        with connection:
            # A read transaction that is upgraded would fail at once instead of waiting.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM features WHERE written <= ?", (now - self._config.ttl_s,))
            same = [text == before for text, before in zip(self._read(user_ids), old, strict=True)]
            rows = zip(user_ids, new, same, strict=True)
            connection.executemany(
                "INSERT OR REPLACE INTO features VALUES (?, ?, ?)",
                [(user_id, text, now) for user_id, text, swapped in rows if swapped],
            )
        return same

    def _connection(self) -> sqlite3.Connection:
        """Return the connection of this thread and process: connections must not be used after a fork."""
        if getattr(self._local, "process", None) != os.getpid():
            try:
                opened = sqlite3.connect(self._path, timeout=WRITER_TIMEOUT_S, isolation_level=None)
                opened.execute("PRAGMA journal_mode=WAL")
                # A crash of the machine may lose the last batches, which a replay restores; no batch is torn.
                opened.execute("PRAGMA synchronous=NORMAL")
                opened.executescript(SQLITE_SCHEMA)
            except sqlite3.Error as error:
                raise ConfigError(f"{self._path} is not a feature store: {error}; set another") from error
            self._local.process, self._local.connection = os.getpid(), opened
        connection: sqlite3.Connection = self._local.connection
        return connection


# KEYS: of a user. ARGV: old text or "", new text, milliseconds after which the text is deleted.
REDIS_SWAP = """
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""


class RedisStore(FeatureStore):
    """Features in Redis (or Valkey), a key ``sn:user:ID`` for each user."""

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        try:
            import redis  # optional
        except ModuleNotFoundError:
            raise ConfigError(
                f"{config.url} needs redis-py: pip install 'scalingnote[redis]', or use sqlite:PATH"
            ) from None
        self._redis: Any = redis.Redis.from_url(config.url, decode_responses=True)
        try:
            self._redis.ping()
        except redis.RedisError as error:
            raise ConfigError(f"no Redis answers at {config.url}: {error}") from error
        self._script = self._redis.register_script(REDIS_SWAP)

    def _read(self, user_ids: Sequence[str]) -> list[str | None]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for user_id in user_ids:
                pipeline.get(_redis_key(user_id))
            return list(pipeline.execute())

    def _swap(self, user_ids: Sequence[str], old: Sequence[str | None], new: Sequence[str]) -> list[bool]:
        ttl_ms = max(round(1000 * self._config.ttl_s), 1)
        with self._redis.pipeline(transaction=False) as pipeline:
            for user_id, before, text in zip(user_ids, old, new, strict=True):
                self._script(keys=[_redis_key(user_id)], args=[before or "", text, ttl_ms], client=pipeline)
            return [bool(swapped) for swapped in pipeline.execute()]


def _redis_key(user_id: str) -> str:
    return f"sn:user:{user_id}"
