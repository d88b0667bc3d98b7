"""Users' features in Redis (or Valkey), for many machines at once.

    sn:u:{user}:p   hash, column -> [timestamp, event id, value] as JSON
    sn:u:{user}:h   sorted set by timestamp, members "event id \\0 semantic id"
    sn:u:{user}:e   sorted set of the event ids that were taken, by the time they were

A user's keys share a hash tag, so that they lie on one node of a cluster, and one script takes one event: it
notes the id and does the rest, or finds the id and does nothing. Ids are noted per user: an event is always
its user's. What nobody writes to expires by itself.
"""

import json
from collections.abc import Sequence
from typing import Any

import redis

from scalingnote.errors import ConfigError
from scalingnote.fuse.features import Clock, Event, StoreConfig, User, check

_SEPARATOR = "\0"
# KEYS: profile, history, events. ARGV: event id, timestamp, member or "", kept, ttl in ms, now, forget ids
# before, remember in ms, then columns, each as name and [timestamp, event id, value].
_TAKE = """
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ARGV[7])
if redis.call('ZADD', KEYS[3], 'NX', ARGV[6], ARGV[1]) == 0 then return 0 end
for i = 9, #ARGV, 2 do
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
redis.call('PEXPIRE', KEYS[3], ARGV[8])
return 1
"""


class RedisStore:
    """See :class:`~scalingnote.fuse.features.FeatureStore`. Threads and processes may share one."""

    def __init__(self, config: StoreConfig, *, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._redis: Any = redis.Redis.from_url(config.url, decode_responses=True)
        try:
            self._redis.ping()
        except redis.RedisError as error:
            raise ConfigError(f"no Redis answers at {config.url}: {error}") from error
        self._take = self._redis.register_script(_TAKE)

    def write(self, events: Sequence[Event]) -> int:
        """Events that are new: one round trip, one script each. Each is taken whole, or not at all.

        A connection lost on the way may have taken some of them: write them all again.
        """
        check(events)
        now = self._clock()
        with self._redis.pipeline(transaction=False) as pipeline:
            for event in events:
                self._take(keys=_keys(event.user_id), args=self._arguments(event, now), client=pipeline)
            return int(sum(pipeline.execute()))

    def get_many(self, user_ids: Sequence[str]) -> list[User]:
        """One round trip, however many users."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for user_id in user_ids:
                profile, history, _ = _keys(user_id)
                pipeline.hgetall(profile)
                pipeline.zrange(history, 0, -1)
            found = pipeline.execute()
        return [
            User(
                {name: json.loads(value)[2] for name, value in profile.items()},
                tuple(member.partition(_SEPARATOR)[2] for member in history),
            )
            for profile, history in zip(found[::2], found[1::2], strict=True)
        ]

    def _arguments(self, event: Event, now: float) -> list[str | int | float]:
        member = f"{event.event_id}{_SEPARATOR}{event.semantic_id}" if event.semantic_id else ""
        ttl, remember = round(1000 * self._config.ttl_s), round(1000 * self._config.remember_s)
        columns: list[str | int | float] = []
        for name, value in event.profile.items():
            columns += [name, json.dumps([event.timestamp, event.event_id, value])]
        what = (event.event_id, repr(event.timestamp), member)
        return [
            *(*what, self._config.history, max(ttl, 1)),
            *(repr(now), repr(now - self._config.remember_s), max(remember, 1)),
            *columns,
        ]


def _keys(user_id: str) -> list[str]:
    return [f"sn:u:{{{user_id}}}:{part}" for part in "phe"]
