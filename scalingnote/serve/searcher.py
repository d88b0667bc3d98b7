"""The searcher: a query's embedding goes in, candidates of the shards held here come out.

It holds every version that the catalog keeps, and for some seconds more what the catalog has let go. A call
names the version it means, so no answer mixes two, whatever is activated meanwhile; one that is not open yet
is opened for the first call that names it.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.index import filters, sparse
from scalingnote.index.live.index import LiveIndex
from scalingnote.index.shard import Layout
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.config import Joining
from scalingnote.search.found import Found
from scalingnote.search.live_searcher import LiveSearcher
from scalingnote.search.searcher import Searcher
from scalingnote.serve.batcher import AtOnce, Batcher
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.following import again_and_again
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.log import get_logger

MOST = 32  # queries scanned together
BRIEF, BRIEF_K = 500_000, 100  # documents and results: MOST searches of that take about 5 ms
FACETS = 1000  # a text field with more values is no facet
OPENING_S = 600.0  # for all searchers to open a version; the catalog does not list it before
LET_GO_S = 10.0  # gateways go over within a second; what they were asked before names the old version
LOOK_S = 5.0  # between two looks at which versions are kept
log = get_logger()


@dataclass(frozen=True)
class Wanted:
    """One search of one version; `embedding` and `terms` have one row."""

    version: str
    embedding: Float[ndarray, "one dim"]
    k: int
    terms: SparseRows | None = None
    nprobe: int | None = None
    where: filters.Filter | None = None
    exact: bool = False

    @cached_property
    def alike(self) -> tuple[str | int | bool, ...]:
        """Searches of which this is the same are done together."""
        where = json.dumps(self.where, sort_keys=True) if self.where else ""
        return self.version, self.k, self.nprobe or 0, self.exact, self.terms is None, where


_Call = tuple[Searcher | LiveSearcher, Wanted]  # what a search is of is settled when it comes in


@dataclass(frozen=True)
class Refused:
    """Why a search cannot be done, for the client to read."""

    reason: str


@dataclass(frozen=True)
class Described:
    """What some shards of a version hold."""

    layout: Layout
    held: int  # how many of its shards
    fields: pa.Schema  # that a search may filter by
    facets: Mapping[str, Mapping[str, int]]  # text fields with few values: how many documents have each

    def joined(self, other: "Described") -> "Described":
        """What these shards and others hold together."""
        facets = {
            name: Counter(values) + Counter(other.facets[name])
            for name, values in self.facets.items()
            if name in other.facets
        }
        return replace(self, held=self.held + other.held, facets=facets)


@dataclass(frozen=True)
class Answered:
    """What was found, and in which version: of a live index it is the current one, whatever was named."""

    version: str
    found: Found
    shards: int  # how many were searched


class IndexSearcher:
    """Holds some shards of each kept version of an index, or all; of a live index all of the current one.

    The shards of a live index stay together, as a search of theirs is one of a single moment.
    """

    def __init__(
        self,
        catalog: Catalog | LiveCatalog,
        *,
        shards: Sequence[int] | None = None,
        nprobe: int | None = None,
        mapped: bool = False,
        joining: Joining | None = None,
        refresh_s: float = 0.1,
    ) -> None:
        self._catalog, self._shards, self._nprobe, self._mapped = catalog, shards, nprobe, mapped
        self._joining, self._refresh_s = joining or Joining(), refresh_s
        self._opening = asyncio.Lock()
        self._batcher: Batcher[_Call, Found | Refused] = Batcher(self._work, most=MOST)
        self._at_once: AtOnce[_Call, Found | Refused] = AtOnce(self._work, most=MOST)
        self._following: asyncio.Task[None] | None = None
        serving = catalog.read()
        kept = serving.versions[:1] if self._live else serving.versions
        self._held = {version.name: self._open(version) for version in kept}
        self._until = dict.fromkeys(self._held, time.monotonic() + OPENING_S)  # held till then, listed or not

    async def search(self, wanted: Wanted) -> Answered | Refused:
        """The best candidates of the shards held here."""
        name, searcher = await self._require(wanted.version)
        same = wanted if wanted.version == name else replace(wanted, version=name)
        search = self._at_once if self._is_brief(searcher, same) else self._batcher
        found = await search((searcher, same))
        return found if isinstance(found, Refused) else Answered(name, found, len(searcher.shards))

    def _is_brief(self, searcher: Searcher | LiveSearcher, wanted: Wanted) -> bool:
        """Whether a search is sure to take less than a millisecond: by vectors alone, and these in memory."""
        if not isinstance(searcher, Searcher) or self._mapped or len(searcher) > BRIEF or wanted.k > BRIEF_K:
            return False
        return wanted.where is None and wanted.terms is None and not wanted.exact and not wanted.nprobe

    async def document(self, version: str, doc_id: str) -> list[dict[str, Any]]:
        """The document of this id: one, or none."""
        _, searcher = await self._require(version)
        found = await self._batcher.in_turn(lambda: searcher.get(doc_id))
        return [] if found is None else [found]

    async def vector(self, version: str, doc_id: str) -> Float[ndarray, "found dim"] | Refused:
        """The vector of the document of this id: one row, or none."""
        _, searcher = await self._require(version)
        try:
            found = await self._batcher.in_turn(lambda: searcher.vector(doc_id))
        except SearchError as error:
            return Refused(str(error))
        return np.empty((0, searcher.dim), np.float32) if found is None else found[np.newaxis]

    async def describe(self, version: str) -> Described:
        """What can be asked of the shards held here."""
        _, searcher = await self._require(version)
        facets = await asyncio.to_thread(searcher.facets, most=FACETS)
        return Described(searcher.layout, len(searcher.shards), searcher.fields, facets)

    async def load(self, version: Version) -> bool:
        """Open a version beside those that are held; those that the catalog no longer keeps are let go.

        Of a live index it is the current one that is opened, if it is not held yet.
        """
        async with self._opening:
            serving = await asyncio.to_thread(self._catalog.read)
            if self._live:
                version, kept = serving.active, {serving.active.name}
            else:
                kept = {each.name for each in serving.versions} | {version.name}
            if version.name not in self._held:
                opened = await asyncio.to_thread(self._open, version)
                # Searches under way, and those that wait, hold what they search.
                self._held = {name: held for name, held in self._held.items() if name in kept}
                self._held[version.name] = opened
            self._until[version.name] = time.monotonic() + OPENING_S
        return True

    async def refresh(self) -> bool:
        """Show what was written to a live index by now, and go over to its current version."""
        if self._live:
            active = (await asyncio.to_thread(self._catalog.read)).active
            if active.name not in self._held:
                await self.load(active)
            (searcher,) = self._held.values()
            assert isinstance(searcher, LiveSearcher)
            await asyncio.to_thread(searcher.refresh)
        return True

    async def let_go(self) -> None:
        """Let go of what the catalog has not listed for some seconds, once the active version is here."""
        serving = await asyncio.to_thread(self._catalog.read)
        listed, now = {version.name for version in serving.versions}, time.monotonic()
        if serving.active.name in self._held:
            until = {name: now + LET_GO_S if name in listed else self._until[name] for name in self._held}
            self._until = {name: then for name, then in until.items() if then > now}
            self._held = {name: self._held[name] for name in self._until}

    async def ping(self, version: str) -> int:
        """How many shards of a version are held, or of another before it; the event loop turns."""
        return len(self._held.get(version, next(iter(self._held.values()))).shards)

    @property
    def _live(self) -> bool:
        return isinstance(self._catalog, LiveCatalog)

    async def _require(self, name: str) -> tuple[str, Searcher | LiveSearcher]:
        """The version to search, opened if need be."""
        if self._following is None:  # not before there is an event loop
            self._following = asyncio.create_task(self._follow())
        if self._live:
            (name,) = self._held
        elif name not in self._held:
            await self.load(self._catalog.read().named(name))
        return name, self._held[name]

    async def _follow(self) -> None:
        if self._live:
            await again_and_again(self.refresh, every_s=self._refresh_s, doing="following the live index")
        else:
            await again_and_again(self.let_go, every_s=LOOK_S, doing="looking which versions are kept")

    def _open(self, version: Version) -> Searcher | LiveSearcher:
        log.info("opening index version %s: %s", version.name, version.uri)
        opened: Searcher | LiveSearcher
        if isinstance(self._catalog, LiveCatalog):
            live = LiveIndex(self._catalog.folder, self._catalog.index, follow=True)
            opened = LiveSearcher(live, nprobe=self._nprobe)
        else:
            opened = Searcher.open(version.uri, shards=self._shards, nprobe=self._nprobe, mapped=self._mapped)
        # The first search compiles, or loads code and pages: not at a user's cost.
        opened.find(np.ones((1, opened.dim), np.float32), k=10)
        if opened.layout.sparse:
            sparse.warm()
        return opened

    def _work(self, batch: Sequence[_Call]) -> list[Found | Refused | Exception]:
        """Searches that are alike together, the others after them; the answers in the order of the batch."""
        order = sorted(range(len(batch)), key=lambda number: batch[number][1].alike)
        answers: list[Found | Refused | Exception] = [Refused("")] * len(batch)
        for _, numbers in groupby(order, key=lambda number: batch[number][1].alike):
            group = list(numbers)
            searcher = batch[group[0]][0]
            found = self._together(searcher, [batch[number][1] for number in group])
            for number, answer in zip(group, found, strict=True):
                answers[number] = answer
        return answers

    def _together(
        self, searcher: Searcher | LiveSearcher, wanted: Sequence[Wanted]
    ) -> Sequence[Found | Refused | Exception]:
        first = wanted[0]
        try:
            return searcher.find(
                np.concatenate([each.embedding for each in wanted]),
                k=first.k,
                terms=_stacked([each.terms for each in wanted if each.terms is not None]),
                joining=self._joining,
                nprobe=first.nprobe,
                where=first.where,
                exact=first.exact,
            )
        except SearchError as error:
            if len(wanted) > 1:  # of one of them, perhaps: a bad vector does not spoil the others
                return [answer for each in wanted for answer in self._together(searcher, [each])]
            return [Refused(str(error))]
        except Exception as error:
            return [error] * len(wanted)


def _stacked(rows: Sequence[SparseRows]) -> SparseRows | None:
    """Sparse rows under one another."""
    if not rows:
        return None
    if len(rows) == 1:
        return rows[0]
    sizes = np.concatenate([np.diff(each.offsets) for each in rows])
    return SparseRows(
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.concatenate([each.terms for each in rows]),
        np.concatenate([each.values for each in rows]),
    )
