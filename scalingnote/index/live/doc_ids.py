"""From a document's id to its row in a shard: a sorted array of hashes, 16 bytes a document.

A dictionary of the ids would take ten times as much. Hashes may collide: an id counts as found only where the
stored id itself is equal.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from numpy import ndarray

from scalingnote.errors import ArtifactError, DataError
from scalingnote.storage.exchange import hash_of


class DocIds:
    """The rows of an immutable column of ids. Threads may share one."""

    def __init__(self, doc_ids: pa.ChunkedArray) -> None:
        """ArtifactError when an id is there twice: a write could not say which row it means."""
        self._doc_ids = doc_ids
        hashes = hash_of(doc_ids)
        self._rows = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._rows]
        equal = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        names = [doc_ids[row].as_py() for row in self._rows[np.union1d(equal, equal + 1)].tolist()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArtifactError(
                f"doc_id {twice!r} is in the shard twice: re-run prepare, which removes repeats"
            )

    def rows(self, doc_ids: Sequence[str]) -> Int64[ndarray, " ids"]:
        """The row of each id, -1 where it is not there; DataError when something else than ids is named."""
        wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str)]
        if wrong:
            raise DataError(f"{wrong[0]!r} is no doc_id: pass strings")
        found = np.full(len(doc_ids), -1, np.int64)
        if not len(doc_ids) or not len(self._hashes):
            return found
        hashes = hash_of(pa.array(doc_ids, pa.string()))
        starts = np.searchsorted(self._hashes, hashes)
        stops = np.searchsorted(self._hashes, hashes, side="right")
        for number in np.flatnonzero(starts < stops).tolist():
            for row in self._rows[starts[number] : stops[number]].tolist():
                if self._doc_ids[row].as_py() == doc_ids[number]:
                    found[number] = row
        return found
