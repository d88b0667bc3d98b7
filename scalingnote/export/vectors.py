"""Copy the vectors of a run into a vector database: dense, terms, ids and columns of the documents.

    embeddings, terms, documents ─by part─► rows ─by batch─► a database ─► the checkpoint, after each batch

Rows have the order of the embeddings. The checkpoint is a file that holds how many of them the database has
acknowledged: an export that was killed continues there. The batch in flight at a kill may be written twice,
under the same ids, so nothing is doubled. Memory is bounded by a part of the embeddings.
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
    """What the rows of an export have."""

    dim: int  # of the dense vectors, which are compared by inner product
    sparse: bool  # whether rows have terms
    payload: pa.Schema  # columns of the documents


@dataclass(frozen=True)
class ExportRows:
    """A batch of rows."""

    first: int  # number of the first one
    ids: list[str]
    dense: Float32[ndarray, "rows dim"]
    sparse: pa.Table | None  # of the schema SPARSE
    payload: pa.Table

    def sparse_rows(self) -> list[dict[int, float]]:
        """Term -> weight above 0 of each row; empty where there are no terms."""
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
        """The columns of each row that are not null."""
        return [
            {name: value for name, value in row.items() if value is not None}
            for row in self.payload.to_pylist()
        ]


class Database(ABC):
    """A collection of a vector database."""

    batch_rows: int  # of one request

    @abstractmethod
    def open(self, layout: ExportLayout) -> None:
        """Create the collection, or use one that is there; ConfigError where it has another layout."""

    @abstractmethod
    def count(self) -> int:
        """Rows that the collection holds."""

    @abstractmethod
    def write(self, rows: ExportRows, *, known: bool) -> None:
        """Write rows by their ids and return when they are durable; `known`: some may be there already."""

    def finish(self) -> None:  # noqa: B027
        """Make what was written searchable and fast."""


@dataclass(frozen=True)
class ExportSource:
    """What is exported: embeddings, and what other artifacts have about the same documents.

    Attributes:
        embeddings: artifact whose table `embeddings` has doc_id, summary and, of some towers, terms.
        dataset: with the documents; None: no columns of them.
        terms: artifact `bm25_terms` whose terms are taken instead of the embeddings'.
        columns: of the documents.
    """

    embeddings: Artifact
    dataset: Artifact | None = None
    terms: Artifact | None = None
    columns: tuple[str, ...] = ()

    def layout(self) -> ExportLayout:
        """Read what the rows have; ConfigError for a column that documents have not."""
        parts = self.embeddings.table_parts("embeddings")
        if not parts:
            raise DataError(f"{self.embeddings.uri} has no embeddings: name an artifact of the stage encode")
        encoded = _schema(self.embeddings, parts[0])
        documents = pa.schema([])
        if self.columns:
            if self.dataset is None:
                raise ConfigError(f"columns {', '.join(self.columns)} are asked for, but no dataset is known")
            found = _schema(self.dataset, self.dataset.table_parts("documents")[0])
            if taken := {"doc_id", *RESERVED} & {*self.columns}:
                raise ConfigError(f"column {min(taken)!r} is one that every row has: leave it out")
            if missing := [name for name in self.columns if name not in found.names]:
                raise ConfigError(
                    f"documents have no column {missing[0]!r}: they have {', '.join(found.names)}"
                )
            documents = pa.schema([found.field(name) for name in self.columns])
        sparse = self.terms is not None or "terms" in encoded.names
        return ExportLayout(encoded.field(INDEXED_VIEW).type.list_size, sparse, documents)

    def rows(self) -> int:
        """The number of rows."""
        return sum(self.embeddings.rows_of(self.embeddings.table_parts("embeddings")).values())

    def digest(self) -> str:
        """Equal for equal rows."""
        artifacts = [each and each.digest for each in (self.embeddings, self.dataset, self.terms)]
        return hashlib.sha256(json.dumps([artifacts, self.columns]).encode()).hexdigest()

    def batches(self, *, start: int, stop: int, size: int) -> Iterator[ExportRows]:
        """Rows from `start` to before `stop`, at most `size` at a time."""
        own = SPARSE.names if self.terms is None and self.layout().sparse else []
        firsts = self.embeddings.first_rows("embeddings")
        for part, count in self.embeddings.rows_of(firsts).items():
            first = firsts[part]
            if first + count <= start or first >= stop:
                continue
            table = self._part(part, own)
            for row in range(max(start, first), min(stop, first + count), size):
                piece = table.slice(row - first, min(size, stop - row, first + count - row))
                terms = piece.select(SPARSE.names) if "terms" in piece.schema.names else None
                vectors = arrow.to_numpy(piece[INDEXED_VIEW])
                yield ExportRows(row, piece["doc_id"].to_pylist(), vectors, terms, piece.select(self.columns))

    def _part(self, part: str, own: list[str]) -> pa.Table:
        """A part of the embeddings with terms and columns of its documents; DataError for a bad vector."""
        table = self.embeddings.table(part, ["doc_id", INDEXED_VIEW, *own])
        if not np.isfinite(arrow.to_numpy(table[INDEXED_VIEW])).all():
            raise DataError(f"{self.embeddings.uri}/{part} has a vector that is not finite: run encode again")
        base = part.removeprefix("embeddings/")
        if self.terms is not None:
            found = weights.read_columns(self.terms, base, table["doc_id"])
            for name in SPARSE.names:
                table = table.append_column(SPARSE.field(name), found[name])
        if self.columns and self.dataset is not None:
            documents = self.dataset.table(f"documents/{base}", ["doc_id", *self.columns])
            missing = f"row in {self.dataset.uri}: name the dataset that was encoded"
            documents = arrow.take_documents(documents, table["doc_id"], missing=missing)
            for name in self.columns:
                table = table.append_column(name, documents[name])
        return table


def of_embeddings(uri: str, *, columns: Sequence[str] | None) -> ExportSource:
    """The source of an `embeddings` artifact alone; its dataset is the one that it was made of."""
    embeddings = open_artifact(uri, kind="embeddings")
    parent = embeddings.manifest.parents.get("dataset")
    dataset = open_artifact(parent["uri"], kind="dataset") if parent and columns else None
    return ExportSource(embeddings, dataset, None, tuple(columns or ()))


@dataclass(frozen=True)
class Summary:
    """What an export did."""

    rows: int  # of the export, in the database
    written: int  # of them, by this call
    seconds: float
    held: int  # rows of the collection

    def lines(self) -> list[str]:
        """For the terminal."""
        speed = self.written / max(self.seconds, 1e-9)
        found = [
            f"{self.written:,} of {self.rows:,} rows written in {self.seconds:,.1f} s ({speed:,.0f} rows/s)",
            f"{self.held:,} rows in the collection",
        ]
        if self.held > self.rows:
            found.append(
                f"{self.held - self.rows:,} of them are not of this export: delete the collection first"
            )
        return found


def export(
    source: ExportSource,
    database: Database,
    *,
    checkpoint: str,
    most: int | None = None,
    batch_rows: int | None = None,
) -> Summary:
    """Write the rows of a source to a database, from where an earlier export of the same rows ended.

    Args:
        source: the rows.
        database: where they go.
        checkpoint: file of the export's progress; another source must have another one.
        most: write the first rows only, at most as many.
        batch_rows: rows of one request; None: the database's own number.

    Raises:
        ConfigError: the collection has another layout, or the checkpoint is of other rows.
        DataError: the database holds fewer rows than were written.
    """
    start = time.monotonic()
    layout, digest, total = source.layout(), source.digest(), source.rows()
    total = total if most is None else min(total, most)
    database.open(layout)
    done, empty = _progress(checkpoint, digest, database)
    first = done
    known = bool(done) or not empty  # the batch that was in flight at a kill may be there
    with Progress("export", total=total, done=done, unit="vectors") as progress:
        for rows in source.batches(start=done, stop=total, size=batch_rows or database.batch_rows):
            database.write(rows, known=known)
            known = not empty
            done = rows.first + len(rows.ids)
            state = {"digest": digest, "rows": done, "empty": empty}
            fs.write_bytes(checkpoint, json.dumps(state).encode())
            progress.advance(len(rows.ids))
    database.finish()
    held = database.count()
    if held < done:
        raise DataError(
            f"the collection holds {held:,} of {done:,} rows: ids repeat, or rows were deleted meanwhile; "
            f"delete {checkpoint} to write all of them again"
        )
    return Summary(done, done - first, time.monotonic() - start, held)


def _progress(checkpoint: str, digest: str, database: Database) -> tuple[int, bool]:
    """Rows that an earlier export wrote, and whether the collection was empty when it began."""
    held = database.count()
    if not fs.exists(checkpoint):
        return 0, not held
    before = json.loads(fs.read_bytes(checkpoint))
    if before["digest"] != digest:
        raise ConfigError(
            f"{checkpoint} is of an export of other rows: delete it, or name another checkpoint"
        )
    if held < before["rows"]:
        log.info("the collection has lost rows since the last export: writing all of them")
        return 0, not held
    log.info("resuming: %s rows are written", f"{before['rows']:,}")
    return before["rows"], before["empty"]


def _schema(artifact: Artifact, part: str) -> pa.Schema:
    with fs.open_input(fs.join(artifact.uri, part)) as file:
        return pq.read_schema(file)


def checkpoint_name(source: ExportSource, *, to: str, url: str, collection: str) -> str:
    """The name of the checkpoint's file of a source and a collection."""
    where: Sequence[str] = (to, fs.absolute(url), collection, source.digest())
    return f"{to}-{hashlib.sha256(json.dumps(where).encode()).hexdigest()[:16]}.json"
