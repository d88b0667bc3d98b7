"""The documents that answers show, for every version that a gateway serves.

A gateway maps the files with the documents of each version. If the index is in a bucket, searchers read the
documents of their shards instead, because a copy of all would fill the disk of every gateway. If documents
are missing or damaged, searches still work, because the files of the searchers have the id of every document.
So a gateway that cannot read documents starts, answers with ids, reports it in every answer and in
``/healthz``, and tries again every few seconds.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from scalingnote.core.errors import ScalingNoteError
from scalingnote.index.shard import SHARD_DOCUMENTS, DocumentStore
from scalingnote.search.searcher import Results, with_documents
from scalingnote.serve.access import unavailable
from scalingnote.serve.concurrency import Handle, LocalHandle, gather_in_time
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import Refused
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import open_artifact

INLINE_STORE_DOCUMENTS = 500_000  # largest store that is read in the event loop: its pages are in memory
REOPEN_AFTER_S = 5.0  # between two attempts: each reads the files to check them
DOCUMENTS_SHARE = 0.8  # of the time left, for searchers to send documents; the rest is for only ids
READ_ERRORS = (ScalingNoteError, OSError, ValueError, pa.ArrowException)
log = get_logger()


class DocumentStores:
    """The document stores of a gateway, by the name of the version.

    Args:
        searchers: one handle for each group of shards.

    Attributes:
        shards_of_groups: number of shards of each searcher, in the order of the groups.
    """

    def __init__(self, searchers: Sequence[Handle]) -> None:
        self._searchers = list(searchers)
        self.shards_of_groups: Sequence[int] = ()
        self._uris: dict[str, str] = {}
        # The stores that can be read; None: the searchers read documents, and one may have failed lately.
        self._stores: dict[str, DocumentStore | None] = {}
        self._failing: set[str] = set()
        self._tried = 0.0  # time of the last attempt, in time.monotonic()

    async def open(self, version: str, uri: str) -> None:
        """Open the store of a version; one of READ_ERRORS if it cannot be read."""
        if version not in self._stores:
            if read_by_searchers(uri, self._searchers):
                await asyncio.gather(*(each.open_documents.remote(version) for each in self._searchers))
                self._stores[version] = None
            else:
                self._stores[version] = await asyncio.to_thread(
                    lambda: DocumentStore.open(open_artifact(uri, kind="index"))
                )
        self._uris[version] = uri

    async def try_open(self, version: str, uri: str) -> None:
        """Open the store of a version; if this fails, serve the version without its documents for now."""
        self._uris[version] = uri
        try:
            await self.open(version, uri)
        except READ_ERRORS:
            log.exception("the documents of version %s cannot be read: its answers have only ids", version)

    async def reopen(self) -> None:
        """Try again to open the stores that could not be read, at most every few seconds."""
        missing = self._uris.keys() - self._stores
        if missing and time.monotonic() > self._tried + REOPEN_AFTER_S:
            for version in missing:
                await self.try_open(version, self._uris[version])
            self._tried = time.monotonic()

    def keep(self, versions: set[str]) -> None:
        """Close the stores of all other versions."""
        self._uris = {name: uri for name, uri in self._uris.items() if name in versions}
        self._failing &= versions
        self._stores = {name: store for name, store in self._stores.items() if name in versions}

    def unreadable(self, version: str) -> bool:
        """Return whether a version has a store that cannot be read. Live indexes have no stores."""
        return version in self._failing or (version in self._uris and version not in self._stores)

    def store(self, version: str) -> DocumentStore | None:
        """Return the store of a version; None if searchers read its documents, as in a live index.

        RefusedError (503) if the store cannot be read.
        """
        if version in self._uris and version not in self._stores:
            raise unavailable("the documents of the index cannot be read here: try again")
        return self._stores.get(version)

    async def read(self, results: Results, left_s: float) -> tuple[Results, bool]:
        """Read the documents that an answer shows.

        Args:
            results: of a version that was opened here, or with their documents.
            left_s: seconds until the deadline of the request.

        Returns:
            The results, and whether their documents were read. If they were not, a result has only its id and
            the columns that a search may filter by, and results of a searcher that does not answer are left
            out.

        Raises:
            RefusedError: 503 if the version is no longer kept, or ids cannot be read either.
        """
        version = results.best.version
        if results.is_read:
            return results, True
        if version not in self._uris:
            raise unavailable(f"version {version} of the index is no longer kept: try again")
        ids, rows = results.best.ids.tolist(), results.documents or [None] * len(results)
        known = {number: row for number, row in zip(ids, rows, strict=True) if row is not None}  # of a delta
        store = self._stores.get(version)
        if store is not None:
            try:
                if len(store) <= INLINE_STORE_DOCUMENTS:  # microseconds
                    return with_documents(results, store), True
                return await asyncio.to_thread(with_documents, results, store), True
            except READ_ERRORS:
                log.exception("the documents of version %s can no longer be read", version)
                self._stores.pop(version, None)
        elif version in self._stores:
            others = results.take([place for place, number in enumerate(ids) if number not in known])
            known |= await self._from_searchers(others, DOCUMENTS_SHARE * left_s)
            if len(known) == len(results):
                return results.with_documents([known[number] for number in ids]), True
            left_s *= 1 - DOCUMENTS_SHARE
        return await self._columns_only(results, known, left_s), False

    async def _from_searchers(self, results: Results, left_s: float) -> dict[int, dict[str, Any]]:
        """Return the documents that the searchers of their shards send in time, by candidate id."""
        ids, version = results.best.ids.tolist(), results.best.version
        ends = np.cumsum(self.shards_of_groups)
        groups = np.unique(np.searchsorted(ends, results.best.shards, side="right")).tolist()
        calls = [self._searchers[group].documents.remote(version, ids) for group in groups]
        known: dict[int, dict[str, Any]] = {}
        for answer in await gather_in_time(calls, deadline_s=left_s):
            if isinstance(answer, Refused):
                self._failing.add(version)
            else:
                known |= answer or {}
        if len(known) == len(results):
            self._failing.discard(version)
        return known

    async def _columns_only(
        self, results: Results, documents: Mapping[int, dict[str, Any]], left_s: float
    ) -> Results:
        """Return results with ids and filter columns, or with their documents if these are known."""
        ids = results.best.ids.tolist()
        missing = [number for number in ids if number not in documents]
        calls = [searcher.columns.remote(results.best.version, missing) for searcher in self._searchers]
        known: dict[int, dict[str, Any]] = {}
        for answer in await gather_in_time(calls, deadline_s=left_s):
            known |= answer or {}
        known |= documents
        places = [place for place, number in enumerate(ids) if number in known]
        if not places:
            raise unavailable("neither documents nor ids of the results can be read: try again")
        empty = dict.fromkeys(SHARD_DOCUMENTS.names, "")
        rows = [{**empty, **known[ids[place]]} for place in places]
        return results.take(places).with_documents(rows)


def read_by_searchers(uri: str, searchers: Sequence[Handle]) -> bool:
    """Return whether searchers read the documents: the index is remote, and they are other processes."""
    return not fs.is_local(uri) and not any(isinstance(each, LocalHandle) for each in searchers)
