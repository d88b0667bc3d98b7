"""The pool: all documents of an embeddings artifact, read part by part in tasks.

    parts ─► groups, a task for each ─► what it found, merged as the results arrive

A document is known by its row, counted over all parts. Only what was asked for leaves a task: memory is
bounded by a part there, and by the queries and their results in the caller, whatever the size of the pool.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.bm25 import document_texts
from scalingnote.errors import ArtifactError
from scalingnote.storage import arrow, shuffle
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner

INDEXED_VIEW = "summary"


@dataclass(frozen=True)
class Sample:
    """A share of the documents by a seeded hash of their ids, and some documents in any case."""

    share: float
    seed: int
    always: pa.Array

    def holds(self, doc_ids: pa.ChunkedArray) -> Bool[ndarray, " docs"]:
        """Whether each document is in the sample."""
        mixed = shuffle.hash_of(doc_ids) ^ np.uint64(self.seed)
        drawn = shuffle.hash_of(pa.array(mixed)) < self.share * 2.0**64
        held: ndarray = drawn | np.asarray(pc.is_in(doc_ids, value_set=self.always))
        return held


@dataclass(frozen=True)
class Pool:
    """The documents that queries are searched in; with a sample, only those."""

    embeddings: Artifact
    dataset: Artifact | None = None  # with the documents' texts
    sample: Sample | None = None

    @property
    def parts(self) -> dict[str, int]:
        """Name of each part -> the row of its first document."""
        return self.embeddings.first_rows("embeddings")

    def groups(self) -> list[list[str]]:
        """Names of parts, in order, by group."""
        return shuffle.slices_by_bytes(self.embeddings, "embeddings")

    def read(self, names: Iterable[str], columns: Iterable[str]) -> Iterator["PoolPart"]:
        """Parts with these columns of the embeddings artifact."""
        first = self.parts
        wanted = sorted({*columns, *(["doc_id"] if self.sample else [])})
        for name in names:
            table = self.embeddings.table(name, columns=wanted)
            rows = np.arange(len(table))
            if self.sample:
                rows = np.flatnonzero(self.sample.holds(table["doc_id"]))
                table = table.take(pa.array(rows))
            yield PoolPart(self, name.removeprefix("embeddings/"), table, rows + first[name])


@dataclass(frozen=True)
class PoolPart:
    """Some documents of a pool: columns of the embeddings artifact, and each document's row."""

    pool: Pool
    name: str
    table: pa.Table
    rows: Int[ndarray, " docs"]

    def __len__(self) -> int:
        return len(self.rows)

    def vectors(self) -> Float[ndarray, "docs dim"]:
        """Embeddings of the indexed view."""
        return arrow.to_numpy(self.table[INDEXED_VIEW])

    def texts(self) -> list[str]:
        """Texts of the documents, for BM25."""
        dataset = self.pool.dataset
        assert dataset is not None, "a pool without a dataset has no texts"
        documents = dataset.table(f"documents/{self.name}", ["doc_id", "title", "topic", "content"])
        rows = pc.index_in(self.table["doc_id"], documents["doc_id"].combine_chunks())
        if rows.null_count:
            raise ArtifactError(
                f"{dataset.uri} has no text of {rows.null_count} documents of {self.pool.embeddings.uri}: "
                "these were encoded from another dataset"
            )
        return document_texts(documents.take(rows))


def document_ids(
    pool: Pool, rows: Int[ndarray, "queries k"], *, each: TaskRunner = map
) -> tuple[Int[ndarray, " found"], pa.Array]:
    """Distinct rows in ascending order, and the ids of their documents; negative rows are ignored.

    Only parts with such a document are read.
    """
    distinct = np.unique(rows[rows >= 0])
    parts = pool.parts
    wanted = dict(
        zip(parts, np.split(distinct, np.searchsorted(distinct, [*parts.values()][1:])), strict=True)
    )
    groups = [
        {name: wanted[name] - parts[name] for name in group if len(wanted[name])} for group in pool.groups()
    ]
    items = [(number, group) for number, group in enumerate(groups) if group]
    found = dict(each(partial(_ids_of_group, embeddings=pool.embeddings), items))
    return distinct, pa.concat_arrays([pa.array([], pa.string()), *(found[number] for number, _ in items)])


def _ids_of_group(
    item: tuple[int, dict[str, Int[ndarray, " rows"]]], *, embeddings: Artifact
) -> tuple[int, pa.Array]:
    number, group = item
    ids = [
        embeddings.table(name, columns=["doc_id"])["doc_id"].take(pa.array(rows))
        for name, rows in group.items()
    ]
    return number, pa.concat_arrays([chunk for one in ids for chunk in one.chunks])


def gather_embeddings(
    pool: Pool, doc_ids: Sequence[str], *, each: TaskRunner = map
) -> tuple[Float[ndarray, "docs dim"], Bool[ndarray, " docs"]]:
    """Embeddings of some documents, and a mask of those that are in the pool; the others are 0."""
    gathered, in_pool = np.zeros((len(doc_ids), 0), np.float32), np.zeros(len(doc_ids), bool)
    task = partial(_vectors_of_group, pool=pool, doc_ids=pa.array(doc_ids, pa.string()))
    for present, vectors in each(task, pool.groups()):
        if not gathered.size:
            gathered = np.zeros((len(doc_ids), vectors.shape[1]), np.float32)
        gathered[present], in_pool[present] = vectors, True
    return gathered, in_pool


def _vectors_of_group(
    group: list[str], *, pool: Pool, doc_ids: pa.Array
) -> tuple[Int[ndarray, " present"], Float[ndarray, "present dim"]]:
    found = []
    for part in pool.read(group, ["doc_id", INDEXED_VIEW]):
        place, present = places(doc_ids, part)
        found.append((present, part.vectors()[place[present]]))
    return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found])


def places(doc_ids: pa.Array, part: PoolPart) -> tuple[Int[ndarray, " wanted"], Int[ndarray, " here"]]:
    """The place of each document in a part, negative if absent; and the positions of those present."""
    place = pc.fill_null(pc.index_in(doc_ids, value_set=part.table["doc_id"].combine_chunks()), -1)
    return place.to_numpy(), np.flatnonzero(place.to_numpy() >= 0)
