"""Documents sorted by their codes, in files that are mapped into memory: all with a prefix lie together.

A column per level, so that a prefix is found by binary search in one column after the other; only the pages
that a search touches are read. Each file holds a range of codes; a summary names the ranges.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Int, Integer, UInt16, UInt64
from numpy import ndarray

from scalingnote.errors import ArtifactError
from scalingnote.quantize.semantic_id import Given
from scalingnote.storage.artifact import Artifact

SUMMARY = "by_code.json"
_OPEN = 16  # files open at a time: those of a remote artifact are held in memory


class Piece(NamedTuple):
    """Documents in ascending order of codes, then suffix."""

    doc_ids: pa.Array
    suffix: Int[ndarray, " docs"]
    codes: tuple[UInt16[ndarray, " docs"], ...]  # of each level

    def cut(self, start: int, stop: int) -> "Piece":
        """Documents from `start` up to `stop`; nothing is copied."""
        codes = tuple(column[start:stop] for column in self.codes)
        return Piece(self.doc_ids[start:stop], self.suffix[start:stop], codes)

    def bounds(self, prefix: Sequence[int]) -> tuple[int, int]:
        """Where the documents with this prefix begin and end, or would."""
        start, stop = 0, len(self.suffix)
        for column, code in zip(self.codes, prefix, strict=False):
            within = column[start:stop]
            key = np.uint16(code)  # of the column's type, or numpy would convert the column
            start, stop = (
                start + int(np.searchsorted(within, key, "left")),
                start + int(np.searchsorted(within, key, "right")),
            )
        return start, stop

    def matrix(self) -> UInt16[ndarray, "docs levels"]:
        """The codes, copied."""
        return np.stack(self.codes, axis=1)


class ByCode:
    """The sorted documents of a `semantic_ids` artifact."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._ranges: list[dict[str, Any]] = artifact.read_json(SUMMARY)
        self._open = lru_cache(maxsize=_OPEN)(self._load)

    def pieces(self, prefix: Sequence[int] = ()) -> Iterator[Piece]:
        """All documents with a prefix, a piece for every file that has some."""
        sought = list(prefix)
        for found in self._ranges:
            if found["first"][: len(sought)] <= sought <= found["last"][: len(sought)]:
                piece = self._open(found["name"])
                start, stop = piece.bounds(sought)
                if stop > start:
                    yield piece.cut(start, stop)

    def between(self, low: Sequence[int], high: Sequence[int] | None) -> Given:
        """The documents from the first with prefix `low` on, up to those with `high` (None: to the end)."""
        pieces = []
        for found in self._ranges:
            if found["last"] < list(low) or (high is not None and found["first"] >= list(high)):
                continue
            piece = self._open(found["name"])
            stop = len(piece.suffix) if high is None else piece.bounds(high)[0]
            pieces.append(piece.cut(piece.bounds(low)[0], stop))
        levels = len(self._ranges[0]["first"])
        return Given(
            pa.concat_arrays([pa.array([], pa.string()), *(piece.doc_ids for piece in pieces)]),
            np.concatenate([np.empty((0, levels), np.uint16), *(piece.matrix() for piece in pieces)]),
            np.concatenate([np.empty(0, np.int32), *(piece.suffix for piece in pieces)]),
        )

    def _load(self, name: str) -> Piece:
        table = self._artifact.table(name)
        doc_ids, suffix, *codes = (column.combine_chunks() for column in table.columns)
        numbers = tuple(np.asarray(column) for column in (suffix, *codes))
        return Piece(doc_ids, numbers[0], numbers[1:])


def open_by_code(artifact: Artifact) -> ByCode:
    """ArtifactError when the artifact has no such files."""
    if SUMMARY not in artifact.manifest.parts:
        raise ArtifactError(f"{artifact.uri} does not list documents by code: re-run quantize")
    return ByCode(artifact)


def to_table(
    doc_ids: pa.Array, codes: UInt16[ndarray, "docs levels"], suffix: Int[ndarray, " docs"]
) -> pa.Table:
    """A file's table, its rows sorted."""
    order = np.lexsort((suffix, *codes.T[::-1]))
    columns = {f"code_{level}": pa.array(column[order]) for level, column in enumerate(codes.T)}
    return pa.table({"doc_id": doc_ids.take(pa.array(order)), "suffix": pa.array(suffix[order]), **columns})


def keys(codes: Integer[ndarray, "docs levels"], *, size: int) -> UInt64[ndarray, " docs"]:
    """As many first codes as 64 bits hold, as a number: ordered as the codes are."""
    bits = _bits(size)
    found = np.zeros(len(codes), np.uint64)
    for column in codes.T[: 64 // bits]:
        found = (found << np.uint64(bits)) | column.astype(np.uint64)
    return found


def prefix_of(key: int, *, size: int, levels: int) -> list[int]:
    """The codes that make a key."""
    bits = _bits(size)
    packed = min(levels, 64 // bits)
    return [key >> bits * (packed - 1 - level) & (1 << bits) - 1 for level in range(packed)]


def _bits(size: int) -> int:
    return (size - 1).bit_length()
