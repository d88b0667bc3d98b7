"""The online store of users' features: events go in, what is known of a user comes out, in one batch get.

    events stream ─write─► profile (the newest value of each column) and history (bounded, oldest first)
    user_ids ─get_many─► User, as :class:`~scalingnote.fuse.query_fusion.QueryFusion` reads it

Writes may come twice and from many processes: an event is known by its id, and one that was written before
changes nothing. So a stream is replayed from anywhere after a crash, and nothing is doubled or lost. Ids are
remembered for `remember_s` seconds: a replay must not reach further back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from scalingnote.config import Config
from scalingnote.errors import DataError
from scalingnote.storage.text import storable

Clock = Callable[[], float]  # seconds since 1970


class StoreConfig(Config):
    """Where online features lie, and how much of them is kept."""

    url: str = Field(
        "sqlite:features.db", description="sqlite:PATH of an embedded database, or redis://HOST:PORT/DB"
    )
    history: int = Field(100, ge=1, description="documents kept of a user, the latest by time")
    ttl_s: float = Field(
        90 * 86_400.0, gt=0, description="a user of whom nothing came for so long is forgotten"
    )
    remember_s: float = Field(
        7 * 86_400.0, gt=0, description="how long the id of an event is known, so that it is not taken twice"
    )


@dataclass(frozen=True)
class User:
    """Who asks: columns of the profile, and the semantic IDs of clicked documents, oldest first."""

    profile: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[str] = ()


@dataclass(frozen=True)
class Event:
    """Something a user did: clicked a document, or told of themselves, or both."""

    event_id: str  # the same whenever the event is sent again
    user_id: str
    timestamp: float  # seconds since 1970, when it happened
    semantic_id: str | None = None  # of the document that was clicked
    profile: Mapping[str, Any] = field(default_factory=dict)  # JSON values


@runtime_checkable
class FeatureStore(Protocol):
    """Two methods; processes may share what is behind them."""

    def write(self, events: Sequence[Event]) -> int:
        """Take events, each whole or not at all; how many were new.

        After an error some may have been taken: writing them all again is right. Events may come in any
        order: a history is sorted by their timestamps, and of a column of the profile the value of the latest
        event is kept.
        """
        ...

    def get_many(self, user_ids: Sequence[str]) -> list[User]:
        """What is known of each user, in order; an empty User where nothing is."""
        ...


def check(events: Sequence[Event]) -> None:
    """DataError when one cannot be stored; called before any is written."""
    for event in events:
        if not event.event_id or not event.user_id:
            raise DataError(f"an event without an id or a user cannot be told from others: {event}")
        if not event.timestamp >= 0 or event.timestamp == float("inf"):
            raise DataError(
                f"event {event.event_id!r} happened at {event.timestamp}: give seconds since 1970"
            )
        for text in _texts([event.event_id, event.user_id, event.semantic_id, event.profile]):
            if not storable(text):
                raise DataError(
                    f"event {event.event_id!r} of user {event.user_id!r} has {text!r}, with half of a "
                    "surrogate pair, which no store holds: mend what writes the events"
                )


def _texts(value: Any) -> Iterator[str]:
    """All texts of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
