"""Postings as files: numpy's own format, one array in each, read where they lie and checked before use."""

import io
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy import ndarray

from scalingnote.errors import ArtifactError
from scalingnote.index.postings import BLOCK, Postings, frozen

_KINDS = {
    "blocks": np.int64,
    "terms": np.int32,
    "offsets": np.int64,
    "rows": np.uint16,
    "impacts": np.float16,
}
FILES = tuple(f"sparse.{name}.npy" for name in _KINDS)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def dump(postings: Postings) -> dict[str, bytes]:
    """The bytes of each of the FILES."""
    dumped = {}
    for name, field in zip(FILES, fields(postings), strict=True):
        file = io.BytesIO()
        np.save(file, getattr(postings, field.name), allow_pickle=False)
        dumped[name] = file.getvalue()
    return dumped


def load(files: Mapping[str, Any], *, documents: int | None = None) -> Postings:
    """Postings from their files' bytes, or from buffers such as a memory map's, which are not copied.

    ArtifactError names the file that is not what it should be, or says that the postings are not of so many
    `documents`. All that a search relies on is checked, for compiled code reads and writes where these
    numbers point.
    """
    missing = [name for name in FILES if name not in files]
    if missing:
        raise ArtifactError(f"{missing[0]} is missing: re-run index")
    arrays = {
        name: _array(file, files[file], kind)
        for file, (name, kind) in zip(FILES, _KINDS.items(), strict=True)
    }
    wrong = _unsound(**arrays)
    if wrong:
        raise ArtifactError(
            f"sparse.{wrong}.npy does not fit the other files of its shard: restore it or re-run index"
        )
    postings = Postings(**arrays)
    if documents is not None and len(postings) != documents:
        raise ArtifactError(
            f"sparse.blocks.npy is of {len(postings)} documents, the shard has {documents}: re-run index"
        )
    return postings


def _array(name: str, data: Any, kind: Any) -> ndarray:
    view = memoryview(data)
    head = io.BytesIO(bytes(view[:4096]))
    try:
        shape, by_column, dtype = _HEADERS[np.lib.format.read_magic(head)](head)
        if dtype != kind or by_column:
            raise ValueError(f"it holds {dtype}, expected {np.dtype(kind)}")
        found = np.frombuffer(view, dtype, offset=head.tell()).reshape(shape)
    except (ValueError, KeyError) as error:
        raise ArtifactError(f"{name} is damaged ({error}): restore it or re-run index") from None
    return frozen(found, kind)


def _unsound(blocks: ndarray, terms: ndarray, offsets: ndarray, rows: ndarray, impacts: ndarray) -> str:
    """The first array that breaks what :class:`Postings` promises; nothing where none does."""
    if blocks.ndim != 2 or blocks.shape[1] != 2 or not len(blocks) or blocks[0].any():
        return "blocks"
    if any(array.ndim != 1 for array in (terms, offsets, rows, impacts)):
        return "terms"
    sizes = np.diff(blocks, axis=0)
    if (sizes < 0).any() or (sizes[:, 0] > BLOCK).any() or blocks[-1, 1] != len(terms):
        return "blocks"
    if len(terms) and (terms.min() < 0 or not _rises(terms, starts=blocks[:, 1])):
        return "terms"
    if len(offsets) != len(terms) + 1 or offsets[0] or (np.diff(offsets) <= 0).any():
        return "offsets"
    if len(rows) != offsets[-1]:
        return "rows"
    for (first, start), (last, stop) in pairwise(blocks):
        bounds = offsets[start : stop + 1]
        within = rows[bounds[0] : bounds[-1]]
        if len(within) and (within.max() >= last - first or not _rises(within, starts=bounds - bounds[0])):
            return "rows"
    bits = impacts.view(np.uint16)  # 0 < impact < infinity, as numbers that order the same way
    if len(impacts) != len(rows) or (len(bits) and (bits.min() == 0 or bits.max() >= 0x7C00)):
        return "impacts"
    return ""


def _rises(values: ndarray, *, starts: ndarray) -> bool:
    """Whether values ascend, but for those at the starts of lists."""
    rising = values[1:] > values[:-1]
    inner = starts[(starts > 0) & (starts < len(values))]
    rising[inner - 1] = True
    return bool(rising.all())
