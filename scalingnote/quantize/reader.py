"""Reading semantic IDs, for generative retrieval: what lies under a prefix, and which prefixes are near.

    ids = SemanticIds.open("runs/quickstart/quantize/0123456789ab")
    ids.children([12])              # the codes that may follow 12, with their documents: constrained decoding
    ids.documents([12, 7])          # all documents whose ID begins 12-7, as an Arrow table
    ids.nearest(queries, level=3, n=10)  # prefixes of three codes, best first
    ids.doc_id("12-7-3-0"), ids.of(["d17"])

It works on the artifact's files by code, which are mapped into memory: opening costs nothing, and a look-up
reads the pages that it touches.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.errors import ConfigError, DataError
from scalingnote.quantize.by_code import ByCode, open_by_code
from scalingnote.quantize.semantic_id import to_strings
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact

Metric = Literal["l2", "inner_product"]


class Near(NamedTuple):
    """A prefix that documents have, and how near it decodes to a vector: higher is nearer."""

    prefix: tuple[int, ...]
    score: float  # inner product, or minus the squared distance
    documents: int


class SemanticIds:
    """The IDs of a `semantic_ids` artifact."""

    def __init__(self, artifact: Artifact) -> None:
        self._by_code: ByCode = open_by_code(artifact)
        data = fs.read_bytes(artifact.file("codebooks.safetensors"))
        self.codebooks: Float[ndarray, "levels codes dim"] = safetensors.load(data)["codebooks"]
        self.levels, self.size, self.dim = self.codebooks.shape

    @classmethod
    def open(cls, uri: str) -> "SemanticIds":
        """Of the artifact at a path or URI; ArtifactError when it is none."""
        return cls(open_artifact(uri, kind="semantic_ids"))

    def children(self, prefix: Sequence[int] = ()) -> dict[int, int]:
        """The codes that follow a prefix in some ID, ascending, each with its number of documents."""
        counts = self._children(self._checked(prefix, below=self.levels))
        return {int(code): int(counts[code]) for code in np.flatnonzero(counts)}

    def count(self, prefix: Sequence[int] = ()) -> int:
        """How many documents have a prefix."""
        return sum(len(piece.suffix) for piece in self._by_code.pieces(self._checked(prefix)))

    def documents(self, prefix: Sequence[int], *, limit: int | None = None) -> pa.Table:
        """Documents under a prefix, `doc_id` and `semantic_id`, by code; the first `limit` of them."""
        tables, room = [_FOUND.empty_table()], limit
        for piece in self._by_code.pieces(self._checked(prefix)):
            piece = piece if room is None else piece.cut(0, room)
            room = None if room is None else room - len(piece.suffix)
            tables.append(pa.table([piece.doc_ids, to_strings(piece.matrix(), piece.suffix)], schema=_FOUND))
            if room == 0:
                break
        return pa.concat_tables(tables)

    def doc_id(self, semantic_id: str) -> str | None:
        """The document with an ID, None if no document has it; DataError when the text is no ID."""
        numbers = _numbers(semantic_id)
        if len(numbers) != self.levels + 1:
            raise DataError(f"{semantic_id!r} is no semantic ID: {self.levels} codes and a suffix make one")
        *codes, suffix = numbers
        self._checked(codes)
        for piece in self._by_code.pieces(codes):  # one at most: equal codes lie together
            place = int(np.searchsorted(piece.suffix, np.int32(suffix)))
            if place < len(piece.suffix) and piece.suffix[place] == suffix:
                return str(piece.doc_ids[place].as_py())
        return None

    def of(self, doc_ids: Sequence[str]) -> dict[str, str]:
        """The IDs of documents; unknown ones are left out. One pass over all files: ask for many at once."""
        sought = pa.array(doc_ids, pa.string())
        found: dict[str, str] = {}
        for piece in self._by_code.pieces():
            rows = np.flatnonzero(pc.is_in(piece.doc_ids, sought).to_numpy(zero_copy_only=False))
            if len(rows):
                codes = np.stack([column[rows] for column in piece.codes], axis=1)
                names = piece.doc_ids.take(pa.array(rows)).to_pylist()
                found.update(zip(names, to_strings(codes, piece.suffix[rows]).to_pylist(), strict=True))
        return found

    def nearest(
        self,
        vectors: Float[ndarray, "queries dim"],
        *,
        level: int,
        n: int = 10,
        metric: Metric = "l2",
        width: int | None = 100,
    ) -> list[list[Near]]:
        """For each vector the `n` nearest prefixes of `level` codes that documents have, best first.

        Prefixes are met from the first code on, and `width` of a length go on to the next one, as in
        generative retrieval with constrained beam search. None looks at every prefix: exact, for few levels.
        """
        if not 1 <= level <= self.levels or n < 1 or (width is not None and width < n):
            raise ConfigError(
                f"level={level}, n={n}, width={width}: level is 1 to {self.levels}, n at least 1, width >= n"
            )
        if vectors.shape[1] != self.dim:
            raise ConfigError(f"vectors have {vectors.shape[1]} dimensions, the codebooks {self.dim}")
        known: dict[tuple[int, ...], ndarray] = {}  # children, which queries share
        queries = vectors.astype(np.float32)
        return [self._nearest(query, level, n, metric, width, known) for query in queries]

    def _nearest(
        self,
        query: Float[ndarray, " dim"],
        level: int,
        n: int,
        metric: Metric,
        width: int | None,
        known: dict[tuple[int, ...], ndarray],
    ) -> list[Near]:
        kept = [Near((), float(-query @ query) if metric == "l2" else 0.0, 0)]
        for codebook in self.codebooks[:level]:
            parents, codes, scores, counts = [], [], [], []
            for place, (prefix, score, _) in enumerate(kept):
                if prefix not in known:
                    known[prefix] = self._children(prefix)
                met = np.flatnonzero(known[prefix])
                centroids = codebook[met]
                gains = centroids @ query
                if metric == "l2":  # |q - p - c|^2 = |q - p|^2 - 2 (q - p) c + |c|^2
                    norms = np.einsum("ij,ij->i", centroids, centroids)
                    gains = 2 * (gains - centroids @ self._decoded(prefix)) - norms
                parents.append(np.full(len(met), place))
                codes.append(met)
                scores.append(score + gains.astype(np.float64))
                counts.append(known[prefix][met])
            columns = [np.concatenate(column) for column in (parents, codes, scores, counts)]
            best = np.argsort(-columns[2], kind="stable")[:width]
            kept = [
                Near((*kept[parent].prefix, code), score, documents)
                for parent, code, score, documents in zip(*(c[best].tolist() for c in columns), strict=True)
            ]
        return kept[:n]

    def _decoded(self, prefix: Sequence[int]) -> Float[ndarray, " dim"]:
        vector: ndarray = self.codebooks[np.arange(len(prefix)), list(prefix)].sum(axis=0)
        return vector

    def _children(self, prefix: Sequence[int]) -> Int[ndarray, " codes"]:
        counts = np.zeros(self.size, np.int64)
        for piece in self._by_code.pieces(prefix):
            column = piece.codes[len(prefix)]
            if len(column) < self.size:
                counts += np.bincount(column, minlength=self.size)
            else:  # sorted: where each code begins, without reading the rest
                begins = np.searchsorted(column, np.arange(self.size, dtype=column.dtype))
                counts += np.diff(begins, append=len(column))
        return counts

    def _checked(self, prefix: Sequence[int], *, below: int | None = None) -> list[int]:
        longest = self.levels if below is None else below - 1
        if len(prefix) > longest or any(not 0 <= code < self.size for code in prefix):
            raise DataError(
                f"{list(prefix)} is no prefix here: at most {longest} codes, each 0 to {self.size - 1}"
            )
        return list(prefix)


def parse(text: str) -> list[int]:
    """The codes of a prefix written as IDs are, "12-7"; DataError when it is none."""
    return _numbers(text) if text else []


def _numbers(text: str) -> list[int]:
    numbers = text.split("-")
    if not all(number.isdecimal() for number in numbers):
        raise DataError(f"{text!r} is not made of codes: numbers joined by '-'")
    return [int(number) for number in numbers]


_FOUND = pa.schema({"doc_id": pa.string(), "semantic_id": pa.string()})
