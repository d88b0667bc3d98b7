"""Semantic IDs: codes and a suffix for each document, the files that hold them by code, and look-ups.

Even 256^6 codes collide for similar texts, so an ID is the codes and a suffix, a hash of the document's id.
An ID depends only on the document and the codebooks: no insert, deletion or order of documents changes it.

    ids = SemanticIds.open("runs/quickstart/quantize/0123456789ab")
    ids.children([12])              # the codes that may follow 12, with their documents: constrained decoding
    ids.documents([12, 7])          # all documents whose ID begins with 12-7, as an Arrow table
    ids.nearest(queries, level=3, n=10)  # prefixes of three codes, best first
    ids.doc_id("12-7-3-4611686018427387904"), ids.of(["d17"])

Documents are stored sorted by code, a column per level, in files that are mapped into memory. Binary search
in one column after the other finds a prefix, and only the pages that it touches are read. Each file holds a
range of codes, and a summary lists the ranges.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int, Integer, Shaped, UInt16
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.storage.shuffle import hash_of

BY_CODE_SUMMARY = "by_code.json"
MAX_OPEN_FILES = 16  # files of a remote artifact are held in memory
LISTING = pa.schema({"doc_id": pa.string(), "semantic_id": pa.string()})
Metric = Literal["l2", "inner_product"]


def suffixes(doc_ids: pa.Array | pa.ChunkedArray) -> Int[ndarray, " docs"]:
    """Compute the suffixes of documents: 63 bits of a hash of their ids.

    Two of a million documents with equal codes have the same suffix in about one of twenty million corpora.
    """
    return (hash_of(doc_ids) >> np.uint64(1)).astype(np.int64)


def require_origin(semantic_ids: Artifact, embeddings: Artifact) -> None:
    """Raise ArtifactError unless the IDs were made from these embeddings."""
    origin = semantic_ids.manifest.parents.get("embeddings", {}).get("digest")
    if origin != embeddings.digest:
        raise ArtifactError(
            f"{semantic_ids.uri} was made from embeddings {str(origin)[:12]}, {embeddings.uri} is "
            f"{embeddings.digest[:12]}: re-run quantize on these embeddings"
        )


def to_strings(codes: Integer[ndarray, "docs levels"], suffix: Int[ndarray, " docs"]) -> pa.Array:
    """Convert IDs to text, "c0-c1-...-suffix"."""
    columns = [pa.array(column).cast(pa.string()) for column in (*codes.T, suffix)]
    return pc.binary_join_element_wise(*columns, "-")


def to_table(
    doc_ids: pa.ChunkedArray, codes: Integer[ndarray, "docs levels"], suffix: Int[ndarray, " docs"]
) -> pa.Table:
    """Build the rows of a semantic_ids part, with the columns of storage.schema.semantic_ids."""
    flat = pa.array(codes.astype(np.int32).reshape(-1))
    return pa.table(
        {
            "doc_id": doc_ids,
            "codes": pa.FixedSizeListArray.from_arrays(flat, codes.shape[1]),
            "suffix": pa.array(suffix.astype(np.int64)),
            "semantic_id": to_strings(codes, suffix),
        }
    )


class CodeRange(NamedTuple):
    """Documents in ascending order of codes, then suffix."""

    doc_ids: pa.Array
    suffix: Int[ndarray, " docs"]
    codes: tuple[UInt16[ndarray, " docs"], ...]  # of each level

    def cut(self, start: int, stop: int) -> "CodeRange":
        """Return the documents from `start` up to `stop`, without a copy."""
        codes = tuple(column[start:stop] for column in self.codes)
        return CodeRange(self.doc_ids[start:stop], self.suffix[start:stop], codes)

    def bounds(self, prefix: Sequence[int]) -> tuple[int, int]:
        """Find the positions where the documents with this prefix begin and end, or would be inserted."""
        start, stop = 0, len(self.suffix)
        for column, code in zip(self.codes, prefix, strict=False):
            within = column[start:stop]
            key = np.uint16(code)  # of the column's type: otherwise numpy would convert the column
            start, stop = (
                start + int(np.searchsorted(within, key, "left")),
                start + int(np.searchsorted(within, key, "right")),
            )
        return start, stop

    def matrix(self) -> UInt16[ndarray, "docs levels"]:
        """Copy the codes to one matrix."""
        return np.stack(self.codes, axis=1)


class ByCode:
    """Documents of a `semantic_ids` artifact, sorted by code."""

    def __init__(self, artifact: Artifact) -> None:
        """Open the files; raise ArtifactError if the artifact has no files by code."""
        if BY_CODE_SUMMARY not in artifact.manifest.parts:
            raise ArtifactError(f"{artifact.uri} does not list documents by code: re-run quantize")
        self._artifact = artifact
        self._ranges: list[dict[str, Any]] = artifact.read_json(BY_CODE_SUMMARY)
        self._open = lru_cache(maxsize=MAX_OPEN_FILES)(self._load)

    def pieces(self, prefix: Sequence[int] = ()) -> Iterator[CodeRange]:
        """Yield all documents with a prefix, one piece per file that has such documents."""
        return self.between(prefix, prefix)

    def between(self, low: Sequence[int], high: Sequence[int]) -> Iterator[CodeRange]:
        """Yield the documents from prefix `low` to `high` inclusive, one piece per file that has some."""
        for entry in self._ranges:
            if entry["last"][: len(low)] >= list(low) and entry["first"][: len(high)] <= list(high):
                piece = self._open(entry["name"])
                start, stop = piece.bounds(low)
                stop = stop if high == low else piece.bounds(high)[1]
                if stop > start:
                    yield piece.cut(start, stop)

    def _load(self, name: str) -> CodeRange:
        table = self._artifact.table(name)
        doc_ids, suffix, *codes = (column.combine_chunks() for column in table.columns)
        numbers = tuple(np.asarray(column) for column in (suffix, *codes))
        return CodeRange(doc_ids, numbers[0], numbers[1:])


def sortable(
    codes: Integer[ndarray, "docs levels"], suffix: Int[ndarray, " docs"]
) -> Shaped[ndarray, " docs"]:
    """Build byte strings, one per document, that sort in the order of its codes, then of its suffix."""
    columns = (codes.astype(">u2"), suffix.astype(">u8")[:, np.newaxis])
    rows = np.concatenate([column.view(np.uint8) for column in columns], axis=1)
    strings: ndarray = rows.view(f"S{rows.shape[1]}").ravel()
    return strings


class Near(NamedTuple):
    """A prefix that documents have, and the similarity of its decoded vector to a query."""

    prefix: tuple[int, ...]
    score: float  # inner product, or minus the squared distance: higher is nearer
    documents: int


class SemanticIds:
    """The IDs of a `semantic_ids` artifact."""

    def __init__(self, artifact: Artifact) -> None:
        self._by_code = ByCode(artifact)
        data = artifact.read_bytes("codebooks.safetensors")
        self.codebooks: Float[ndarray, "levels codes dim"] = safetensors.load(data)["codebooks"]
        self.levels, self.size, self.dim = self.codebooks.shape

    @classmethod
    def open(cls, uri: str) -> "SemanticIds":
        """Open the artifact at a path or URI; raise ArtifactError if there is none."""
        return cls(open_artifact(uri, kind="semantic_ids"))

    def children(self, prefix: Sequence[int] = ()) -> dict[int, int]:
        """Count the documents with each code that follows a prefix; codes ascend."""
        counts = self._children(self._check(prefix, below=self.levels))
        return {int(code): int(counts[code]) for code in np.flatnonzero(counts)}

    def count(self, prefix: Sequence[int] = ()) -> int:
        """Count the documents with a prefix."""
        return sum(len(piece.suffix) for piece in self._by_code.pieces(self._check(prefix)))

    def documents(self, prefix: Sequence[int], *, limit: int | None = None) -> pa.Table:
        """List `doc_id` and `semantic_id` of documents with a prefix, by code; at most the first `limit`."""
        tables, remaining = [LISTING.empty_table()], sys.maxsize if limit is None else limit
        for piece in self._by_code.pieces(self._check(prefix)):
            piece = piece.cut(0, remaining)
            remaining -= len(piece.suffix)
            tables.append(pa.table([piece.doc_ids, to_strings(piece.matrix(), piece.suffix)], schema=LISTING))
            if not remaining:
                break
        return pa.concat_tables(tables)

    def doc_id(self, semantic_id: str) -> str | None:
        """Find the document with an ID; None if there is none. Raise DataError if the text is not an ID."""
        numbers = _numbers(semantic_id)
        if len(numbers) != self.levels + 1:
            raise DataError(f"{semantic_id!r} is not a semantic ID of {self.levels} codes and a suffix")
        *codes, suffix = numbers
        self._check(codes)
        for piece in self._by_code.pieces(codes):  # more than one if very many documents share the codes
            if suffix > np.iinfo(piece.suffix.dtype).max:
                break
            # A number of the column's type: otherwise numpy would convert the column.
            place = int(np.searchsorted(piece.suffix, piece.suffix.dtype.type(suffix)))
            if place < len(piece.suffix) and piece.suffix[place] == suffix:
                return str(piece.doc_ids[place].as_py())
        return None

    def of(self, doc_ids: Sequence[str]) -> dict[str, str]:
        """Find the IDs of documents, without unknown ones.

        Each call reads all files: pass many ids to one call.
        """
        sought = pa.array(doc_ids, pa.string())
        id_of: dict[str, str] = {}
        for piece in self._by_code.pieces():
            rows = np.flatnonzero(pc.is_in(piece.doc_ids, sought).to_numpy(zero_copy_only=False))
            if len(rows):
                codes = np.stack([column[rows] for column in piece.codes], axis=1)
                names = piece.doc_ids.take(pa.array(rows)).to_pylist()
                id_of.update(zip(names, to_strings(codes, piece.suffix[rows]).to_pylist(), strict=True))
        return id_of

    def nearest(
        self,
        vectors: Float[ndarray, "queries dim"],
        *,
        level: int,
        n: int = 10,
        metric: Metric = "l2",
        width: int | None = 100,
    ) -> list[list[Near]]:
        """Find the prefixes that documents have and that decode nearest to each vector.

        The search extends prefixes code by code and keeps the best `width` of each length, as generative
        retrieval does with constrained beam search.

        Args:
            vectors: queries.
            level: number of codes of a prefix.
            n: prefixes per vector.
            metric: of query and decoded prefix.
            width: of the beam; None: all prefixes, which is exact but suits only few levels.

        Raises:
            ConfigError: an argument is out of range, or vectors have another dimension than the codebooks.
        """
        if not 1 <= level <= self.levels or n < 1 or (width is not None and width < n):
            raise ConfigError(
                f"level={level}, n={n}, width={width}: level is 1 to {self.levels}, n at least 1, width >= n"
            )
        if vectors.shape[1] != self.dim:
            raise ConfigError(f"vectors have {vectors.shape[1]} dimensions, the codebooks {self.dim}")
        children: dict[tuple[int, ...], ndarray] = {}  # children, which queries share
        queries = vectors.astype(np.float32)
        return [self._nearest(query, level, n, metric, width, children) for query in queries]

    def _nearest(
        self,
        query: Float[ndarray, " dim"],
        level: int,
        n: int,
        metric: Metric,
        width: int | None,
        known: dict[tuple[int, ...], ndarray],
    ) -> list[Near]:
        best_prefixes = [Near((), float(-query @ query) if metric == "l2" else 0.0, 0)]
        for codebook in self.codebooks[:level]:
            parents, codes, scores, counts = [], [], [], []
            for place, (prefix, score, _) in enumerate(best_prefixes):
                if prefix not in known:
                    known[prefix] = self._children(prefix)
                children = np.flatnonzero(known[prefix])
                centroids = codebook[children]
                gains = centroids @ query
                if metric == "l2":  # |q - p - c|^2 = |q - p|^2 - 2 (q - p) c + |c|^2
                    norms = np.einsum("ij,ij->i", centroids, centroids)
                    gains = 2 * (gains - centroids @ self._decode(prefix)) - norms
                parents.append(np.full(len(children), place))
                codes.append(children)
                scores.append(score + gains.astype(np.float64))
                counts.append(known[prefix][children])
            columns = [np.concatenate(column) for column in (parents, codes, scores, counts)]
            best = np.argsort(-columns[2], kind="stable")[:width]
            best_prefixes = [
                Near((*best_prefixes[parent].prefix, code), score, documents)
                for parent, code, score, documents in zip(*(c[best].tolist() for c in columns), strict=True)
            ]
        return best_prefixes[:n]

    def _decode(self, prefix: Sequence[int]) -> Float[ndarray, " dim"]:
        vector: ndarray = self.codebooks[np.arange(len(prefix)), list(prefix)].sum(axis=0)
        return vector

    def _children(self, prefix: Sequence[int]) -> Int[ndarray, " codes"]:
        counts = np.zeros(self.size, np.int64)
        for piece in self._by_code.pieces(prefix):
            column = piece.codes[len(prefix)]
            if len(column) < self.size:
                counts += np.bincount(column, minlength=self.size)
            else:  # the column is sorted: binary search touches few of its pages
                begins = np.searchsorted(column, np.arange(self.size, dtype=column.dtype))
                counts += np.diff(begins, append=len(column))
        return counts

    def _check(self, prefix: Sequence[int], *, below: int | None = None) -> list[int]:
        longest = self.levels if below is None else below - 1
        if len(prefix) > longest or any(not 0 <= code < self.size for code in prefix):
            raise DataError(
                f"{list(prefix)} is not a prefix: pass at most {longest} codes, each 0 to {self.size - 1}"
            )
        return list(prefix)


def parse_prefix(text: str) -> list[int]:
    """Parse the codes of a prefix such as "12-7"; raise DataError if the text is not a prefix."""
    return _numbers(text) if text else []


def _numbers(text: str) -> list[int]:
    numbers = text.split("-")
    if not all(number.isdecimal() for number in numbers):
        raise DataError(f"{text!r} is not a sequence of codes, numbers joined by '-'")
    return [int(number) for number in numbers]
