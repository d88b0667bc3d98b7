"""The delta beside a large index, in every gateway, and its search with the groups of shards.

    writer ─► log ─┬─► gateway: the delta of each served version ─► candidates as of record n ┐
                   └─► searchers: the rows that it overrides ─────► candidates as of record n ┴► one ranking

A search takes the newest record n that its gateway has read and names it to the searchers, which answer as of
n (:mod:`scalingnote.search.delta`). So all parts of an answer are of one moment. A gateway reads the log ten
times a second, and at once when a write through it was acknowledged.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from scalingnote.index.live import versions
from scalingnote.search.delta import Delta
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import concatenate
from scalingnote.serve.access import unavailable
from scalingnote.serve.concurrency import Batcher, WorkerThread, gather_in_time, run_periodically
from scalingnote.serve.fan_out import MAX_SEARCHED, Answer, SearchCall, search_batch
from scalingnote.serve.live_pairs import LivePairs
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import Refused

LIVE_REFRESH_S = 0.1  # between two reads of the writes to a live index
log = get_logger()


class Deltas:
    """The deltas of the versions that a gateway serves; those of one model follow one log.

    Args:
        pairs: of the live folder.
        group: number that an answer without the delta names as missing: the one after the groups of shards.
    """

    def __init__(self, pairs: LivePairs, *, group: int) -> None:
        self._pairs, self._group = pairs, group
        self._deltas: dict[str, Delta] = {}  # by the name of the version
        self._batcher: Batcher[SearchCall, Answer] = Batcher(
            search_batch, max_batch=MAX_SEARCHED, thread=WorkerThread("delta")
        )
        self._following: asyncio.Task[None] | None = None
        self.is_readable = True  # whether the last read of the log succeeded

    async def open(self, name: str) -> None:
        """Open the delta of a version, and follow the log from now on."""
        if name not in self._deltas:
            self._deltas[name] = await asyncio.to_thread(self._open, name)
        if self._following is None:
            self._following = asyncio.create_task(
                run_periodically(self.refresh, interval_s=LIVE_REFRESH_S, name="reading the log of the delta")
            )

    def keep(self, names: set[str]) -> None:
        """Release the deltas of all other versions."""
        self._deltas = {name: delta for name, delta in self._deltas.items() if name in names}

    async def refresh(self) -> None:
        """Read what was acknowledged by now."""
        try:
            for delta in [*self._deltas.values()]:
                await asyncio.to_thread(delta.refresh)
        except Exception:
            self.is_readable = False
            raise
        self.is_readable = True

    def of(self, name: str) -> Delta:
        """The delta of a version; RefusedError (503) where it is no longer kept."""
        if name not in self._deltas:
            raise unavailable(f"version {name} of the index is no longer kept: try again")
        return self._deltas[name]

    async def search(
        self, query: Query, left_s: float, groups: Callable[[Query, float], Awaitable[Answer]]
    ) -> Answer:
        """The candidates of the groups of shards and of the delta, all as of one record of the log."""
        moment = self.of(query.version).now()
        query = replace(query, record=moment.record)
        if not len(moment):
            return await groups(query, left_s)
        own = gather_in_time([self._batcher((moment, query))], deadline_s=left_s)
        of_groups, (of_delta,) = await asyncio.gather(groups(query, left_s), own)
        if isinstance(of_groups, Refused):
            return of_groups
        if isinstance(of_delta, Refused):
            return of_delta
        if of_delta is None:
            return concatenate([of_groups], missing=[self._group])
        return concatenate([of_groups, of_delta])

    def _open(self, name: str) -> Delta:
        folder, number = self._pairs.place(name)
        return Delta(folder, versions.kept_version(folder, number), name=name)
