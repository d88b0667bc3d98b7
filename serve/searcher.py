"""The searcher: a query's embedding goes in, candidates of the shards held here come out.

It holds every version that the catalog keeps. A call names the version it means, so no answer mixes two,
whatever is activated meanwhile; one that is not open yet is opened for the first call that names it.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.index import filters
from scalingnote.index.shard import Layout
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.config import Joining
from scalingnote.search.found import Found
from scalingnote.search.searcher import Searcher
from serve.batcher import Batcher
from serve.catalog import Catalog, Version

MOST = 32  # queries scanned together
FACETS = 1000  # a text field with more values is no facet
log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Wanted:
    """One search of one version; `embedding` and `terms` have one row."""

    version: str
    embedding: Float[ndarray, "one dim"]
    k: int
    terms: SparseRows | None = None
    nprobe: int | None = None
    where: filters.Filter | None = None

    @property
    def alike(self) -> str:
        """Searches of which this is the same are done together."""
        where = json.dumps(self.where, sort_keys=True)
        return f"{self.version} {self.k} {self.nprobe} {self.terms is None} {where}"


@dataclass(frozen=True)
class Refused:
    """Why a search cannot be done, for the client to read."""

    reason: str


@dataclass(frozen=True)
class Described:
    """What some shards of a version hold."""

    layout: Layout
    fields: pa.Schema  # that a search may filter by
    facets: Mapping[str, Mapping[str, int]]  # text fields with few values: how many documents have each

    def joined(self, other: "Described") -> "Described":
        """What these shards and others hold together."""
        facets = {
            name: Counter(values) + Counter(other.facets[name])
            for name, values in self.facets.items()
            if name in other.facets
        }
        return replace(self, facets=facets)


class IndexSearcher:
    """Holds some shards of each kept version of an index, or all of them."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        shards: Sequence[int] | None = None,
        nprobe: int | None = None,
        joining: Joining | None = None,
    ) -> None:
        self._catalog, self._shards, self._nprobe = catalog, shards, nprobe
        self._joining = joining or Joining()
        self._opening = asyncio.Lock()
        self._batcher: Batcher[Wanted, Found | Refused] = Batcher(self._work, most=MOST)
        self._held = {version.name: self._open(version) for version in catalog.read().versions}

    async def search(self, wanted: Wanted) -> Found | Refused:
        """The best candidates of the shards held here."""
        await self._require(wanted.version)
        found: Found | Refused = await self._batcher(wanted)
        return found

    async def document(self, version: str, doc_id: str) -> list[dict[str, Any]]:
        """The document of this id: one, or none."""
        searcher = await self._require(version)
        found = await self._batcher.in_turn(lambda: searcher.get(doc_id))
        return [] if found is None else [found]

    async def vector(self, version: str, doc_id: str) -> Float[ndarray, "found dim"] | Refused:
        """The vector of the document of this id: one row, or none."""
        searcher = await self._require(version)
        try:
            found = await self._batcher.in_turn(lambda: searcher.vector(doc_id))
        except SearchError as error:
            return Refused(str(error))
        return np.empty((0, searcher.dim), np.float32) if found is None else found[np.newaxis]

    async def load(self, version: Version) -> bool:
        """Open a version beside those that are held; those that the catalog no longer keeps are let go."""
        async with self._opening:
            if version.name not in self._held:
                searcher = await asyncio.to_thread(self._open, version)
                kept = {each.name for each in self._catalog.read().versions} | {version.name}
                # Searches under way hold what they search.
                self._held = {name: held for name, held in self._held.items() if name in kept}
                self._held[version.name] = searcher
        return True

    async def describe(self, version: str) -> Described:
        """What can be asked of the shards held here."""
        searcher = await self._require(version)
        facets = await asyncio.to_thread(searcher.facets, most=FACETS)
        return Described(searcher.layout, searcher.fields, facets)

    async def ping(self) -> int:
        """How many shards are held; answers as long as the event loop turns."""
        return len(next(iter(self._held.values())).shards)

    async def _require(self, name: str) -> Searcher:
        if name not in self._held:
            await self.load(self._catalog.read().named(name))
        return self._held[name]

    def _open(self, version: Version) -> Searcher:
        log.info("opening index version %s: %s", version.name, version.uri)
        return Searcher.open(version.uri, shards=self._shards, nprobe=self._nprobe)

    def _work(self, batch: Sequence[Wanted]) -> list[Found | Refused | Exception]:
        """Searches that are alike together, the others after them; the answers in the order of the batch."""
        order = sorted(range(len(batch)), key=lambda number: batch[number].alike)
        answers: list[Found | Refused | Exception] = [Refused("")] * len(batch)
        for _, numbers in groupby(order, key=lambda number: batch[number].alike):
            group = list(numbers)
            for number, answer in zip(group, self._together([batch[n] for n in group]), strict=True):
                answers[number] = answer
        return answers

    def _together(self, wanted: Sequence[Wanted]) -> Sequence[Found | Refused | Exception]:
        first = wanted[0]
        try:
            return self._held[first.version].find(
                np.concatenate([each.embedding for each in wanted]),
                k=first.k,
                terms=_stacked([each.terms for each in wanted if each.terms is not None]),
                joining=self._joining,
                nprobe=first.nprobe,
                where=first.where,
            )
        except SearchError as error:
            if len(wanted) > 1:  # of one of them, perhaps: a bad vector does not spoil the others
                return [answer for each in wanted for answer in self._together([each])]
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
