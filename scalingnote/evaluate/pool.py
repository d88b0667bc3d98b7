"""The pool: all documents of an embeddings artifact, read part by part in tasks.

    parts ─► groups, one task each ─► a table of results ─► joined as the tables arrive, in any order

A document is identified by its row, counted over all parts. A task returns only the requested values: its
memory is bounded by a part, and that of the caller by the queries and their results, for any size of the
pool. Every task returns a table, so that finished tables can be stored (`job.RecordedTasks`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.core.bm25 import document_texts
from scalingnote.core.errors import ArtifactError
from scalingnote.core.parts import Executor
from scalingnote.datasets.passages import settings
from scalingnote.storage import arrow, shuffle
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import INDEXED_VIEW, document_of


@dataclass(frozen=True)
class Sample:
    """Share of the documents by a seeded hash of their ids, and documents that are always included."""

    share: float
    always: pa.Array
    seed: int = 0
    passages: bool = False  # whether rows are passages; all passages of a document are drawn together

    def holds(self, doc_ids: pa.ChunkedArray) -> Bool[ndarray, " docs"]:
        """Return for each document whether it is in the sample."""
        if self.passages:
            doc_ids = document_ids_of(doc_ids)
        mixed = shuffle.hash_of(doc_ids) ^ np.uint64(self.seed)
        by_share = shuffle.hash_of(pa.array(mixed)) < self.share * 2.0**64
        selected: ndarray = by_share | np.asarray(pc.is_in(doc_ids, value_set=self.always))
        return selected


@dataclass(frozen=True)
class Pool:
    """Documents that are searched; with a sample, only those of the sample."""

    embeddings: Artifact
    dataset: Artifact | None = None  # has the texts of the documents
    sample: Sample | None = None

    @property
    def passages(self) -> bool:
        """Whether the rows are passages of documents."""
        return self.dataset is not None and settings(self.dataset) is not None

    @property
    def parts(self) -> dict[str, int]:
        """Row of the first document of each part, by its name."""
        return self.embeddings.first_rows("embeddings")

    def groups(self) -> list[list[str]]:
        """Return the names of the parts of each group, in order."""
        return shuffle.slices_by_bytes(self.embeddings, "embeddings")

    def read(self, names: Iterable[str], columns: Iterable[str]) -> Iterator["PoolPart"]:
        """Yield parts with these columns of the embeddings artifact."""
        first = self.parts
        all_columns = sorted({*columns, *(["doc_id"] if self.sample or self.passages else [])})
        for name in names:
            table = self.embeddings.table(name, columns=all_columns)
            rows = np.arange(len(table))
            if self.sample:
                rows = np.flatnonzero(self.sample.holds(table["doc_id"]))
                table = table.take(pa.array(rows))
            yield PoolPart(self, name.removeprefix("embeddings/"), table, rows + first[name])


@dataclass(frozen=True)
class PoolPart:
    """Some documents of a pool: columns of the embeddings artifact, and the row of each document."""

    pool: Pool
    name: str
    table: pa.Table
    rows: Int[ndarray, " docs"]

    def __len__(self) -> int:
        return len(self.rows)

    def vectors(self) -> Float[ndarray, "docs dim"]:
        """Return the embeddings of the indexed view."""
        return arrow.to_numpy(self.table[INDEXED_VIEW])

    def first_rows(self) -> Int[ndarray, " documents"]:
        """Return the first row of each document: all rows, unless they are passages."""
        if not self.pool.passages:
            return np.arange(len(self))
        documents = document_ids_of(self.table["doc_id"])
        changes = pc.not_equal(documents[1:], documents[:-1]).to_numpy(zero_copy_only=False)
        return np.flatnonzero(np.concatenate([np.ones(min(len(self), 1), bool), changes]))

    def texts(self) -> list[str]:
        """Read the texts of the documents, for BM25."""
        dataset = self.pool.dataset
        assert dataset is not None, "a pool without a dataset has no texts"
        documents = dataset.table(f"documents/{self.name}", ["doc_id", "title", "topic", "content"])
        rows = pc.index_in(self.table["doc_id"], documents["doc_id"].combine_chunks())
        if rows.null_count:
            raise ArtifactError(
                f"{dataset.uri} has no text of {rows.null_count} documents of {self.pool.embeddings.uri}: "
                "pass the dataset from which these were encoded"
            )
        return document_texts(documents.take(rows))


def document_ids_of(passage_ids: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the id of the document of each passage."""
    return pa.array(map(document_of, passage_ids.to_pylist()), pa.string())


def document_ids(
    pool: Pool, rows: Int[ndarray, "queries k"], *, each: Executor = map
) -> tuple[Int[ndarray, " found"], pa.Array]:
    """Return distinct rows in ascending order, and the ids of their documents; negative rows are ignored.

    Only parts with these rows are read.
    """
    distinct = np.unique(rows[rows >= 0])
    parts = pool.parts
    starts = np.searchsorted(distinct, [*parts.values()])
    rows_of = dict(zip(parts, np.split(distinct, starts[1:]), strict=True))
    groups = [
        {name: (parts[name], rows_of[name]) for name in group if len(rows_of[name])}
        for group in pool.groups()
    ]
    task = partial(_ids_of_group, embeddings=pool.embeddings)
    none = pa.table({"row": pa.array([], pa.int64()), "doc_id": pa.array([], pa.string())})
    ids = pa.concat_tables([none, *each(task, [group for group in groups if group])]).sort_by("row")
    return distinct, ids["doc_id"].combine_chunks()


def _ids_of_group(
    group: Mapping[str, tuple[int, Int[ndarray, " rows"]]], *, embeddings: Artifact
) -> pa.Table:
    ids = [
        embeddings.table(name, columns=["doc_id"]).take(pa.array(rows - first))["doc_id"]
        for name, (first, rows) in group.items()
    ]
    rows = np.concatenate([rows for _, rows in group.values()])
    return pa.table({"row": rows, "doc_id": pa.chunked_array([c for one in ids for c in one.chunks])})


def gather_embeddings(
    pool: Pool, doc_ids: Sequence[str], *, each: Executor = map
) -> tuple[Float[ndarray, "docs dim"], Bool[ndarray, " docs"]]:
    """Gather embeddings of documents, and a mask of those that are in the pool; the others are 0."""
    task = partial(_vectors_of_group, pool=pool, doc_ids=pa.array(doc_ids, pa.string()))
    table = pa.concat_tables(each(task, pool.groups()))
    positions, vectors = table["place"].to_numpy(), arrow.to_numpy(table["vector"])
    embeddings, in_pool = np.zeros((len(doc_ids), vectors.shape[1]), np.float32), np.zeros(len(doc_ids), bool)
    embeddings[positions], in_pool[positions] = vectors, True
    return embeddings, in_pool


def _vectors_of_group(group: list[str], *, pool: Pool, doc_ids: pa.Array) -> pa.Table:
    tables = []
    for part in pool.read(group, ["doc_id", INDEXED_VIEW]):
        place, present = places(doc_ids, part)
        vectors = arrow.to_arrow(part.vectors()[place[present]])
        tables.append(pa.table({"place": present, "vector": vectors}))
    return pa.concat_tables(tables)


def places(
    doc_ids: pa.Array | pa.ChunkedArray, part: PoolPart
) -> tuple[Int[ndarray, " wanted"], Int[ndarray, " here"]]:
    """Find the position of each document in a part, negative if absent, and the numbers of those present."""
    position = pc.fill_null(pc.index_in(doc_ids, value_set=part.table["doc_id"].combine_chunks()), -1)
    return position.to_numpy(), np.flatnonzero(position.to_numpy() >= 0)


def find_documents(
    dataset: Artifact, doc_ids: Iterable[str], columns: list[str], *, each: Executor = map
) -> pa.Table:
    """Find documents of a dataset by their ids, sorted by id; unknown ids are left out."""
    ids = pa.array(sorted(set(doc_ids)), pa.string())
    return find_rows(dataset, "documents", "doc_id", ids, ["doc_id", *columns], each=each).sort_by("doc_id")


def values_by_id(table: pa.Table) -> dict[str, Any]:
    """Return a mapping from the first to the second column of a table with two columns."""
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


def find_rows(
    dataset: Artifact, table: str, key: str, values: pa.Array, columns: list[str], *, each: Executor = map
) -> pa.Table:
    """Find the rows of a dataset's table with a `key` in `values`, in any order."""
    task = partial(_rows_of_slice, dataset=dataset, key=key, values=values, columns=columns)
    return pa.concat_tables(each(task, shuffle.slices(dataset, table)))


def _rows_of_slice(
    parts: list[str], *, dataset: Artifact, key: str, values: pa.Array, columns: list[str]
) -> pa.Table:
    tables = [
        pa.Table.from_batches([batch.filter(pc.is_in(batch[key], value_set=values)).select(columns)])
        for part in parts
        for batch in dataset.batches(part, columns=columns)
    ]
    return pa.concat_tables(tables or [dataset.table(parts[0], columns=columns)])  # a table without rows
