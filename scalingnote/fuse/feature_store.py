"""The online store of users' features, opened by its URL and fed from a stream of events."""

import time
from collections.abc import Iterable

from scalingnote.errors import ConfigError
from scalingnote.fuse.features import Clock, Event, FeatureStore, StoreConfig
from scalingnote.log import Progress

_BATCH = 512


def open_store(config: StoreConfig, *, clock: Clock = time.time) -> FeatureStore:
    """The store at a URL. ConfigError when there is no such kind, or its package is missing."""
    scheme, _, place = config.url.partition(":")
    match scheme:
        case "sqlite" if place:
            from scalingnote.fuse.sqlite_store import SqliteStore

            return SqliteStore(place, config, clock=clock)
        case "redis" | "rediss" | "unix":
            try:
                from scalingnote.fuse.redis_store import RedisStore
            except ModuleNotFoundError:
                raise ConfigError(
                    f"{config.url} needs redis-py: pip install 'scalingnote[redis]', or use sqlite:PATH"
                ) from None
            return RedisStore(config, clock=clock)
        case _:
            raise ConfigError(f"no feature store at {config.url!r}: give sqlite:PATH or redis://HOST:PORT/DB")


def consume(store: FeatureStore, events: Iterable[Event], *, batch: int = _BATCH) -> tuple[int, int]:
    """Write a stream of events; how many were read, and how many of them were new."""
    read = new = 0
    waiting: list[Event] = []

    def flush() -> None:
        nonlocal new
        new += store.write(waiting)
        waiting.clear()

    with Progress("features", total=0, unit="events") as progress:
        for event in events:
            waiting.append(event)
            read += 1
            if len(waiting) == batch:
                flush()
                progress.advance(batch)
        if waiting:
            progress.advance(len(waiting))
            flush()
    return read, new
