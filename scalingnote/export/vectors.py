"""Copy the vectors of a run into a vector database: dense, terms, ids and columns of the documents.

    embeddings, terms, documents ─by part─► rows ─by batch─► a database ─► the checkpoint, after each batch

Rows have the order of the embeddings. The checkpoint is a file with the number of rows that the database has
acknowledged, from which a killed export continues. The batch in flight at a kill may be written twice, but
under the same ids, so there are no duplicates. Memory is bounded by a part of the embeddings.
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32
from numpy import ndarray

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import Progress, get_logger
from scalingnote.encode.lexical import weights
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.storage.schema import INDEXED_VIEW, SPARSE

RESERVED = ("dense", "terms", "impacts")  # names of the vectors
log = get_logger("export")


@dataclass(frozen=True)
class ExportLayout:
    """Columns of the rows of an export."""

    dim: int  # of the dense vectors, which are compared by inner product
    sparse: bool  # whether rows have terms
    payload: pa.Schema  # columns of the documents


@dataclass(frozen=True)
class ExportRows:
    """A batch of rows."""

    first: int  # number of the first row
    ids: list[str]
    dense: Float32[ndarray, "rows dim"]
    sparse: pa.Table | None  # of the schema SPARSE
    payload: pa.Table

    def sparse_rows(self) -> list[dict[int, float]]:
        """Return term -> weight above 0 for each row; the dictionaries are empty without terms."""
        if self.sparse is None:
            return [{} for _ in self.ids]
        columns = (self.sparse[name].to_pylist() for name in SPARSE.names)
        return [
            {
                term: float(weight)
                for term, weight in zip(terms or (), impacts or (), strict=True)
                if weight > 0
            }
            for terms, impacts in zip(*columns, strict=True)
        ]

    def payload_rows(self) -> list[dict[str, object]]:
        """Return the columns of each row that are not null."""
        return [
            {name: value for name, value in row.items() if value is not None}
            for row in self.payload.to_pylist()
        ]


class Database(ABC):
    """A collection of a vector database."""

    batch_rows: int  # rows per request

    @abstractmethod
    def open(self, layout: ExportLayout) -> None:
        """Create the collection, or use an existing one.

        Raises:
            ConfigError: the existing collection has another layout.
        """

    @abstractmethod
    def count(self) -> int:
        """Count the rows of the collection."""

    @abstractmethod
    def write(self, rows: ExportRows, *, known: bool) -> None:
        """Write rows by their ids, and return when they are durable; `known`: some may exist already."""

    def finish(self) -> None:  # noqa: B027
        """Make the written rows searchable and fast."""


@dataclass(frozen=True)
class ExportSource:
    """Artifacts to export: embeddings, and data of other artifacts about the same documents.

    Attributes:
        embeddings: artifact with the table `embeddings` of doc_id, summary and, from some towers, terms.
        dataset: artifact of the documents; None: no columns of them.
        terms: artifact `bm25_terms`, with terms that replace those of the embeddings.
        columns: columns of the documents to export.
    """

    embeddings: Artifact
    dataset: Artifact | None = None
    terms: Artifact | None = None
    columns: tuple[str, ...] = ()

    def layout(self) -> ExportLayout:
        """Read the columns of the rows.

        Raises:
            ConfigError: the documents have no such column, or there is no dataset.
            DataError: there are no embeddings.
        """
        parts = self.embeddings.table_parts("embeddings")
        if not parts:
            raise DataError(f"{self.embeddings.uri} has no embeddings: give an artifact of the stage encode")
        embedding_schema = _schema(self.embeddings, parts[0])
        documents = pa.schema([])
        if self.columns:
            if self.dataset is None:
                raise ConfigError(f"columns {', '.join(self.columns)} need a dataset, and there is none")
            available = _schema(self.dataset, self.dataset.table_parts("documents")[0])
            if reserved := {"doc_id", *RESERVED} & {*self.columns}:
                raise ConfigError(f"column {min(reserved)!r} is part of every row: leave it out")
            if missing := [name for name in self.columns if name not in available.names]:
                raise ConfigError(
                    f"documents have no column {missing[0]!r}: they have {', '.join(available.names)}"
                )
            documents = pa.schema([available.field(name) for name in self.columns])
        sparse = self.terms is not None or "terms" in embedding_schema.names
        return ExportLayout(embedding_schema.field(INDEXED_VIEW).type.list_size, sparse, documents)

    def rows(self) -> int:
        """Count the rows."""
        return sum(self.embeddings.rows_of(self.embeddings.table_parts("embeddings")).values())

    def digest(self) -> str:
        """Compute a digest, which is equal for equal rows."""
        artifacts = [each and each.digest for each in (self.embeddings, self.dataset, self.terms)]
        return hashlib.sha256(json.dumps([artifacts, self.columns]).encode()).hexdigest()

    def batches(self, *, start: int, stop: int, size: int) -> Iterator[ExportRows]:
        """Yield the rows from `start` to before `stop`, in batches of at most `size`."""
        term_columns = SPARSE.names if self.terms is None and self.layout().sparse else []
        firsts = self.embeddings.first_rows("embeddings")
        for part, count in self.embeddings.rows_of(firsts).items():
            first = firsts[part]
            if first + count <= start or first >= stop:
                continue
            table = self._part(part, term_columns)
            for row in range(max(start, first), min(stop, first + count), size):
                piece = table.slice(row - first, min(size, stop - row, first + count - row))
                terms = piece.select(SPARSE.names) if "terms" in piece.schema.names else None
                vectors = arrow.to_numpy(piece[INDEXED_VIEW])
                yield ExportRows(row, piece["doc_id"].to_pylist(), vectors, terms, piece.select(self.columns))

    def _part(self, part: str, term_columns: list[str]) -> pa.Table:
        """Read a part of the embeddings with terms and columns of its documents; check its vectors."""
        table = self.embeddings.table(part, ["doc_id", INDEXED_VIEW, *term_columns])
        if not np.isfinite(arrow.to_numpy(table[INDEXED_VIEW])).all():
            raise DataError(f"{self.embeddings.uri}/{part} has a vector that is not finite: run encode again")
        base = part.removeprefix("embeddings/")
        if self.terms is not None:
            terms = weights.read_columns(self.terms, base, table["doc_id"])
            for name in SPARSE.names:
                table = table.append_column(SPARSE.field(name), terms[name])
        if self.columns and self.dataset is not None:
            documents = self.dataset.table(f"documents/{base}", ["doc_id", *self.columns])
            missing = f"row in {self.dataset.uri}: give the dataset that was encoded"
            documents = arrow.take_documents(documents, table["doc_id"], missing=missing)
            for name in self.columns:
                table = table.append_column(name, documents[name])
        return table


def of_embeddings(uri: str, *, columns: Sequence[str] | None) -> ExportSource:
    """Build a source from an `embeddings` artifact, with its parent as the dataset."""
    embeddings = open_artifact(uri, kind="embeddings")
    parent = embeddings.manifest.parents.get("dataset")
    dataset = open_artifact(parent["uri"], kind="dataset") if parent and columns else None
    return ExportSource(embeddings, dataset, None, tuple(columns or ()))


@dataclass(frozen=True)
class Summary:
    """Result of an export."""

    rows: int  # number of rows of the export in the database
    written: int  # number of them that this call has written
    seconds: float
    held: int  # number of rows in the collection

    def lines(self) -> list[str]:
        """Format the summary as lines for the terminal."""
        speed = self.written / max(self.seconds, 1e-9)
        lines = [
            f"{self.written:,} of {self.rows:,} rows written in {self.seconds:,.1f} s ({speed:,.0f} rows/s)",
            f"{self.held:,} rows in the collection",
        ]
        if self.held > self.rows:
            lines.append(
                f"{self.held - self.rows:,} of them are from another export: delete the collection first"
            )
        return lines


def export(
    source: ExportSource,
    database: Database,
    *,
    checkpoint: str,
    most: int | None = None,
    batch_rows: int | None = None,
) -> Summary:
    """Write the rows of a source to a database, after those of an earlier export of the same source.

    Args:
        source: the rows.
        database: the target.
        checkpoint: file with the progress of the export; each source needs a separate one.
        most: largest number of rows to write, from the first one; None: all.
        batch_rows: rows per request; None: the default of the database.

    Raises:
        ConfigError: the collection has another layout, or the checkpoint is of other rows.
        DataError: the database holds fewer rows than were written.
    """
    start = time.monotonic()
    layout, digest, total = source.layout(), source.digest(), source.rows()
    total = total if most is None else min(total, most)
    database.open(layout)
    rows_done, empty = _progress(checkpoint, digest, database)
    first = rows_done
    known = bool(rows_done) or not empty  # the batch in flight at a kill may have been written
    with Progress("export", total=total, done=rows_done, unit="vectors") as progress:
        for rows in source.batches(start=rows_done, stop=total, size=batch_rows or database.batch_rows):
            database.write(rows, known=known)
            known = not empty
            rows_done = rows.first + len(rows.ids)
            state = {"digest": digest, "rows": rows_done, "empty": empty}
            fs.write_bytes(checkpoint, json.dumps(state).encode())
            progress.advance(len(rows.ids))
    database.finish()
    count = database.count()
    if count < rows_done:
        raise DataError(
            f"the collection holds {count:,} of {rows_done:,} rows: ids repeat, or rows were deleted; "
            f"delete {checkpoint} to write all of them again"
        )
    return Summary(rows_done, rows_done - first, time.monotonic() - start, count)


def _progress(checkpoint: str, digest: str, database: Database) -> tuple[int, bool]:
    """Return the rows that an earlier export wrote, and whether the collection was empty before it."""
    count = database.count()
    if not fs.exists(checkpoint):
        return 0, not count
    before = json.loads(fs.read_bytes(checkpoint))
    if before["digest"] != digest:
        raise ConfigError(
            f"{checkpoint} is of an export of other rows: delete it, or give another checkpoint"
        )
    if count < before["rows"]:
        log.info("the collection has lost rows since the last export: writing all of them")
        return 0, not count
    log.info("resuming: %s rows are written", f"{before['rows']:,}")
    return before["rows"], before["empty"]


def _schema(artifact: Artifact, part: str) -> pa.Schema:
    with fs.open_input(fs.join(artifact.uri, part)) as file:
        return pq.read_schema(file)


def checkpoint_name(source: ExportSource, *, to: str, url: str, collection: str) -> str:
    """Return the file name of the checkpoint of a source and a collection."""
    identity: Sequence[str] = (to, fs.absolute(url), collection, source.digest())
    return f"{to}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}.json"
