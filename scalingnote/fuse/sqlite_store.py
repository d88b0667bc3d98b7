"""Users' features in one file: an embedded SQLite database that several processes of a machine may share.

Write-ahead logging lets readers go on while one writes; writers wait for each other. An event is taken in the
transaction that notes its id, so a killed writer leaves all of a batch or nothing.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from scalingnote.errors import ConfigError
from scalingnote.fuse.features import Clock, Event, StoreConfig, User, check

_WAIT_S = 30.0  # for other writers
_SWEEP_EVERY_S = 60.0
_TABLES = """
CREATE TABLE IF NOT EXISTS events (event_id TEXT PRIMARY KEY, taken REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS events_taken ON events (taken);
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
# Of two values of one moment the one of the greater event id stays: the order of arrival does not matter.
_PUT = """
INSERT INTO profiles VALUES (?, ?, ?, ?, ?) ON CONFLICT (user_id, name) DO UPDATE
SET value = excluded.value, time = excluded.time, event_id = excluded.event_id
WHERE (excluded.time, excluded.event_id) > (time, event_id)
"""
_TRIM = """
DELETE FROM history WHERE user_id = ?1 AND (time, event_id) NOT IN
  (SELECT time, event_id FROM history WHERE user_id = ?1 ORDER BY time DESC, event_id DESC LIMIT ?2)
"""


class SqliteStore:
    """See :class:`~scalingnote.fuse.features.FeatureStore`. Threads may share one; a fork opens its own."""

    def __init__(self, path: str, config: StoreConfig, *, clock: Clock) -> None:
        self._path, self._config, self._clock = path, config, clock
        self._local, self._swept = threading.local(), 0.0
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection()

    def write(self, events: Sequence[Event]) -> int:
        """Events that are new, in one transaction."""
        check(events)
        now, connection = self._clock(), self._connection()
        with connection:
            connection.execute("BEGIN IMMEDIATE")  # a reader that turns writer could not wait for its turn
            new = [event for event in events if self._first(connection, event, now)]
            for event in new:
                self._take(connection, event, now)
            for user_id in {event.user_id for event in new if event.semantic_id}:
                connection.execute(_TRIM, (user_id, self._config.history))
            if now - self._swept > _SWEEP_EVERY_S:
                self._sweep(connection, now)
        return len(new)

    def get_many(self, user_ids: Sequence[str]) -> list[User]:
        """One read of each table, however many users."""
        connection, names = self._connection(), json.dumps(list(user_ids))
        alive = "SELECT user_id FROM users WHERE seen > ? AND user_id IN (SELECT value FROM json_each(?))"
        known = (self._clock() - self._config.ttl_s, names)
        profiles: dict[str, dict[str, object]] = {}
        histories: dict[str, list[str]] = {}
        with connection:
            connection.execute("BEGIN")  # both tables as of one moment
            for user_id, name, value in connection.execute(
                f"SELECT user_id, name, value FROM profiles WHERE user_id IN ({alive})", known
            ):
                profiles.setdefault(user_id, {})[name] = json.loads(value)
            for user_id, semantic_id in connection.execute(
                f"SELECT user_id, semantic_id FROM history WHERE user_id IN ({alive}) "
                "ORDER BY user_id, time, event_id",
                known,
            ):
                histories.setdefault(user_id, []).append(semantic_id)
        return [User(profiles.get(user_id, {}), tuple(histories.get(user_id, ()))) for user_id in user_ids]

    def _connection(self) -> sqlite3.Connection:
        """Of this thread of this process: a connection must not cross a fork."""
        if getattr(self._local, "process", None) != os.getpid():
            try:
                made = sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None)
                made.execute("PRAGMA journal_mode=WAL")
                made.execute("PRAGMA synchronous=NORMAL")  # a crash of the machine may lose the last batches,
                made.executescript(_TABLES)  # which a replay brings again; nothing is torn
            except sqlite3.Error as error:
                raise ConfigError(f"{self._path} is no feature store: {error}; name another file") from error
            self._local.process, self._local.connection = os.getpid(), made
        connection: sqlite3.Connection = self._local.connection
        return connection

    def _first(self, connection: sqlite3.Connection, event: Event, now: float) -> bool:
        done = connection.execute(
            "INSERT INTO events VALUES (?, ?) ON CONFLICT (event_id) DO NOTHING", (event.event_id, now)
        )
        return done.rowcount == 1

    def _take(self, connection: sqlite3.Connection, event: Event, now: float) -> None:
        user = event.user_id
        dead = "SELECT 1 FROM users WHERE user_id = ? AND seen <= ?"
        if connection.execute(dead, (user, now - self._config.ttl_s)).fetchone():
            self._forget(connection, [user])  # not yet swept, and not to rise again
        connection.execute("INSERT OR REPLACE INTO users VALUES (?, ?)", (user, now))
        for name, value in event.profile.items():
            connection.execute(_PUT, (user, name, json.dumps(value), event.timestamp, event.event_id))
        if event.semantic_id:
            row = (user, event.timestamp, event.event_id, event.semantic_id)
            # It may be there, written by a replay that reaches back to before ids were forgotten.
            connection.execute("INSERT OR REPLACE INTO history VALUES (?, ?, ?, ?)", row)

    def _sweep(self, connection: sqlite3.Connection, now: float) -> None:
        """Forget users and event ids whose time is over."""
        self._swept = now
        connection.execute("DELETE FROM events WHERE taken <= ?", (now - self._config.remember_s,))
        gone = connection.execute("SELECT user_id FROM users WHERE seen <= ?", (now - self._config.ttl_s,))
        self._forget(connection, [user_id for (user_id,) in gone.fetchall()])

    def _forget(self, connection: sqlite3.Connection, user_ids: Sequence[str]) -> None:
        for table in ("profiles", "history", "users"):
            connection.executemany(f"DELETE FROM {table} WHERE user_id = ?", [(user,) for user in user_ids])
