"""Writes to a live index: their checks, the contents of a log record, and the documents that a log names.

    documents ─checked_upsert─► write ─encode_write─► log record ─logged_writes─► the same write

The records of a delta determine which documents of the large index are *overridden*, that is, written or
deleted since.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.index import postings
from scalingnote.index.live import wal
from scalingnote.index.shard import Shard
from scalingnote.models.published_model import Similarity
from scalingnote.storage.arrow import to_arrow, to_numpy
from scalingnote.storage.schema import SPARSE, document_of

VECTOR = "vector"  # column that a log record adds to those of the documents; deletions lack it


@dataclass(frozen=True)
class Upsert:
    """Documents with distinct doc_ids, and their vectors, scaled for the index."""

    documents: pa.RecordBatch
    vectors: Float[ndarray, "rows dim"]
    terms: pa.RecordBatch | None = None  # with storage.schema.SPARSE; None if the index has no terms
    sources: pa.RecordBatch | None = None  # the complete documents of the request; None: not kept

    @property
    def doc_ids(self) -> list[str]:
        """Ids of the documents, in order."""
        ids: list[str] = self.documents.column("doc_id").to_pylist()
        return ids


@dataclass(frozen=True)
class Delete:
    """Deletion of documents; unknown ids are allowed."""

    doc_ids: list[str]


@dataclass(frozen=True)
class WriteResult:
    """Outcome of a write that is durable with log record `sequence`."""

    sequence: int
    rows: int
    rejected: list[dict[str, str]] = field(default_factory=list)  # rows of storage.schema.REJECTED


def checked_upsert(
    documents: pa.Table,
    vectors: Shaped[ndarray, "..."],
    base: Shard,
    *,
    strongest: int | None,
    rows: Sequence[int] | None,
    similarity: Similarity,
    sources: pa.Table | None,
) -> tuple[Upsert, list[dict[str, str]]]:
    """Separate valid rows from rows to reject; of rows with equal doc_ids the last one counts.

    Arguments and errors are those of :meth:`LiveShard.upsert`. In addition, `base` is a shard of the index,
    and `strongest` the number of terms to keep per document.

    Returns:
        The write, and the rejected rows in the form of storage.schema.REJECTED.
    """
    table, dim = _cast(documents, base.documents.schema), base.lists.coarse.d
    terms = None if base.postings is None else _terms_of(documents)
    invalid_terms = {} if terms is None else _invalid_terms(terms)
    if vectors.ndim != 2 or vectors.shape != (len(table), dim) or vectors.dtype.kind != "f":
        raise DataError(
            f"vectors are {vectors.dtype} of shape {vectors.shape}: pass floats of shape "
            f"({len(table)}, {dim}), one row per document, from the document tower of this index"
        )
    wide = vectors.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    numbers = range(len(table)) if rows is None else rows
    last: dict[str, int] = {}
    rejected = []
    for row, doc_id in enumerate(table["doc_id"].to_pylist()):
        if reason := _reason(doc_id, float(lengths[row])) or invalid_terms.get(row, ""):
            rejected.append({"table": "documents", "row": doc_id or f"row {numbers[row]}", "reason": reason})
        else:
            last[doc_id] = row
    valid = sorted(last.values())
    scaled = wide[valid] / lengths[valid, None] if similarity == "cosine" else wide[valid]
    positions = pa.array(valid, pa.int64())
    strong = None if terms is None else _single_batch(_strongest(terms.take(positions), strongest))
    valid_rows, row_sources = table.take(positions), None
    if sources is not None:
        ids = valid_rows["document_id" if "document_id" in valid_rows.column_names else "doc_id"]
        row_sources = _single_batch(sources.filter(pc.is_in(sources["doc_id"], value_set=ids)))
    return Upsert(_single_batch(valid_rows), scaled.astype(np.float32), strong, row_sources), rejected


def checked_delete(doc_ids: Sequence[str]) -> Delete:
    """Return the deletion of these documents; raise a DataError if a doc_id is not a non-empty string."""
    wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str) or not doc_id]
    if wrong:
        raise DataError(f"{wrong[0]!r} is not a doc_id: pass strings that are not empty")
    return Delete(list(dict.fromkeys(doc_ids)))


def encode_write(write: Upsert | Delete) -> bytes:
    """Encode the payload of a log record: an Arrow stream of index rows, then one of `sources` if kept."""
    if isinstance(write, Delete):
        batches = [pa.record_batch({"doc_id": pa.array(write.doc_ids, pa.string())})]
    else:
        rows = write.documents.append_column(VECTOR, to_arrow(write.vectors))
        if write.terms is not None:
            for name in SPARSE.names:
                rows = rows.append_column(name, write.terms.column(name))
        batches = [rows] if write.sources is None else [rows, write.sources]
    sink = pa.BufferOutputStream()
    for batch in batches:
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def _decode_write(payload: bytes) -> Upsert | Delete:
    buffer = pa.BufferReader(payload)
    batch = _read_batch(buffer)
    if VECTOR not in batch.schema.names:
        return Delete(batch.column("doc_id").to_pylist())
    sparse = SPARSE.names if batch.schema.names[-2:] == SPARSE.names else []
    documents = batch.drop_columns([VECTOR, *sparse])
    terms = batch.select(sparse) if sparse else None
    sources = _read_batch(buffer) if buffer.tell() < buffer.size() else None
    return Upsert(documents, to_numpy(batch.column(VECTOR)), terms, sources)


def _read_batch(buffer: pa.BufferReader) -> pa.RecordBatch:
    """Read the only batch of the stream that begins here; the buffer is at the end of the stream then."""
    with pa.ipc.open_stream(buffer) as stream:
        (batch,) = stream
    return batch


# --- the writes of a log ------------------------------------------------------------------------------------


def logged_writes(
    log: str | Path, *, after: int = 0, until: int | None = None
) -> Iterator[tuple[int, Upsert | Delete]]:
    """Yield the numbers and writes of the records of a log, in order.

    Args:
        log: folder of the log.
        after: number of the record before the first.
        until: number of the last record; None: the last acknowledged one.

    Raises:
        ArtifactError: a record is damaged, or was dropped.
    """
    for number, payload in wal.read(log, after=after, until=until):
        yield number, _decode_write(payload)


def overridden(
    log: str | Path, *, after: int, until: int | None = None, passages: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yield the numbers of the records of a delta's log, and the documents that each wrote or deleted.

    `passages` states that the ids in the log are ids of passages. The other arguments and errors are those of
    :func:`logged_writes`.
    """
    for number, write in logged_writes(log, after=after, until=until):
        yield number, [*dict.fromkeys(map(document_of, write.doc_ids))] if passages else write.doc_ids


def kept_writes(log: str | Path, *, until: int | None = None) -> Iterator[tuple[int, Upsert | Delete]]:
    """Yield all records of a delta's log, in order; each upsert has its complete documents.

    Raises:
        ConfigError: a record has no complete documents, or the log was not kept from its first record on.
    """
    if not wal.holds(log, after=0):
        raise ConfigError(_not_kept(log, 1))
    for number, write in logged_writes(log, until=until):
        if isinstance(write, Upsert) and write.sources is None:
            raise ConfigError(_not_kept(log, number))
        yield number, write


def _not_kept(log: str | Path, record: int) -> str:
    return (
        f"record {record} of {log} has no complete documents that another model could encode: it was written "
        "without serve.live.keep_documents. Name a new folder, set the option there, and send the documents "
        "again, or write them to the files of the data set and run again"
    )


# --- checks of documents ------------------------------------------------------------------------------------


def _terms_of(documents: pa.Table) -> pa.Table:
    """Return the terms of documents, null if the columns are missing."""
    if any(name in documents.column_names for name in SPARSE.names):
        return _cast(documents, SPARSE)
    return pa.table([pa.nulls(len(documents), field.type) for field in SPARSE], schema=SPARSE)


def _invalid_terms(terms: pa.Table) -> dict[int, str]:
    """Return the rows with terms that cannot be indexed, and the reasons."""

    def reason(rows: pa.Table) -> str:
        try:
            postings.build(rows["terms"], rows["impacts"])
        except DataError as error:
            return str(error).removeprefix("document 0 ")
        return ""

    if not reason(terms):
        return {}
    return {row: why for row in range(len(terms)) if (why := reason(terms.slice(row, 1)))}


def _strongest(terms: pa.Table, k: int | None) -> pa.Table:
    if k is None:
        return terms
    strong = postings.build(terms["terms"], terms["impacts"], strongest=k)
    return pa.table(postings.columns([strong]), schema=SPARSE)


def _cast(documents: pa.Table, schema: pa.Schema) -> pa.Table:
    missing = [name for name in schema.names if name not in documents.column_names]
    if missing:
        raise DataError(f"documents have no column {missing[0]!r}: this index has {', '.join(schema.names)}")
    try:
        return documents.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"documents do not have the types of this index: {error}") from None


def _reason(doc_id: str | None, length: float) -> str:
    if not doc_id:
        return "doc_id is missing"
    if not np.isfinite(length):
        return "vector is not finite"
    return "" if length > 0 else "vector is all zero: it has no direction"


def _single_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
