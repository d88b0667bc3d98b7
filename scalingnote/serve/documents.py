"""Documents that answers show: a store for each open version; ids and filter columns where it cannot be read.

A store is files of the index, which a gateway maps. Where they are missing or damaged, searchers still find:
their own files have the id of every document. So a gateway that cannot read documents starts, answers by ids,
says so in every answer and in ``/healthz``, and tries again every few seconds.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pydantic_core import from_json

from scalingnote.errors import ScalingNoteError
from scalingnote.index.shard import DOCUMENTS, DocumentStore
from scalingnote.search.searcher import Candidates, with_documents
from scalingnote.serve.access import unavailable
from scalingnote.serve.concurrency import Handle, gather_in_time
from scalingnote.serve.telemetry import get_logger
from scalingnote.storage.artifact import open_artifact

INLINE_MAX_DOCUMENTS = 500_000  # of a store that is read in the event loop: its pages are in memory
REOPEN_AFTER_S = 5.0  # between two attempts: each reads the files to check them
READ_ERRORS = (ScalingNoteError, OSError, ValueError, pa.ArrowException)
log = get_logger()


class Documents:
    """The document stores of a gateway, by the name of the version.

    Args:
        searchers: one handle for each group of shards.
    """

    def __init__(self, searchers: Sequence[Handle]) -> None:
        self._searchers = list(searchers)
        self._uris: dict[str, str] = {}
        self._stores: dict[str, DocumentStore] = {}  # those that can be read
        self._tried = 0.0  # in time.monotonic()

    async def open(self, version: str, uri: str) -> None:
        """Open the store of a version; one of READ_ERRORS where it cannot be read."""
        if version not in self._stores:
            self._stores[version] = await asyncio.to_thread(_open, uri)
        self._uris[version] = uri

    async def try_open(self, version: str, uri: str) -> None:
        """Open the store of a version, or serve the version without its documents for the time being."""
        self._uris[version] = uri
        try:
            await self.open(version, uri)
        except READ_ERRORS:
            log.exception("the documents of version %s cannot be read: its answers have ids alone", version)

    async def reopen(self) -> None:
        """Try again to open what could not be read, every few seconds."""
        missing = self._uris.keys() - self._stores
        if missing and time.monotonic() > self._tried + REOPEN_AFTER_S:
            for version in missing:
                await self.try_open(version, self._uris[version])
            self._tried = time.monotonic()

    def keep(self, versions: set[str]) -> None:
        """Close the stores of all other versions."""
        self._uris = {name: uri for name, uri in self._uris.items() if name in versions}
        self._stores = {name: store for name, store in self._stores.items() if name in versions}

    def unreadable(self, version: str) -> bool:
        """Whether a version has a store, and it cannot be read; that of a live index has none."""
        return version in self._uris and version not in self._stores

    def store(self, version: str) -> DocumentStore | None:
        """The store of a version; None of a live index, whose searchers send documents.

        RefusedError (503) where it cannot be read.
        """
        if self.unreadable(version):
            raise unavailable("the documents of the index cannot be read here: try again")
        return self._stores.get(version)

    async def shown(self, found: Candidates, left_s: float) -> tuple[Candidates, bool]:
        """Ranked candidates with the documents that the answer shows.

        Args:
            found: of a version that was opened here, or with their documents.
            left_s: seconds until the request's deadline.

        Returns:
            The candidates, and whether their documents were read: without them each has its id and the
            columns that a search may filter by, and those whose searcher is silent are left out.

        Raises:
            RefusedError: 503 where the version is no longer kept, or no id can be read either.
        """
        if found.documents or not len(found):
            read = [from_json(row) if isinstance(row, bytes) else row for row in found.documents]
            return replace(found, documents=read), True
        if found.version not in self._uris:
            raise unavailable(f"version {found.version} of the index is no longer kept: try again")
        store = self._stores.get(found.version)
        if store is not None:
            try:
                if len(store) <= INLINE_MAX_DOCUMENTS:  # microseconds
                    return with_documents(found, store), True
                return await asyncio.to_thread(with_documents, found, store), True
            except READ_ERRORS:
                log.exception("the documents of version %s can no longer be read", found.version)
                self._stores.pop(found.version, None)
        return await self._by_columns(found, left_s), False

    async def _by_columns(self, found: Candidates, left_s: float) -> Candidates:
        ids = found.ids.tolist()
        calls = [searcher.columns.remote(found.version, ids) for searcher in self._searchers]
        known: dict[int, dict[str, Any]] = {}
        for answer in await gather_in_time(calls, deadline_s=left_s):
            known |= answer or {}
        places = [place for place, number in enumerate(ids) if number in known]
        if not places:
            raise unavailable("neither documents nor ids of the results can be read: try again")
        nothing = dict.fromkeys(DOCUMENTS.names, "")
        kept = found.take(places, [found.scores[place] for place in places])
        return replace(kept, documents=[{**nothing, **known[ids[place]]} for place in places])


def _open(uri: str) -> DocumentStore:
    return DocumentStore.open(open_artifact(uri, kind="index"))
