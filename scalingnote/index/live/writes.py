"""Writes to a live index: what is checked, what a log record holds, and what the records of a log name.

    documents ─checked_upsert─► write ─encode_write─► log record ─logged_writes─► the same write, anywhere

Of a delta, records say which documents of the large index are *overridden*: written or deleted since.
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
    """Documents with distinct doc_ids, and their vectors as the index compares them."""

    documents: pa.RecordBatch
    vectors: Float[ndarray, "rows dim"]
    terms: pa.RecordBatch | None = None  # as storage.schema.SPARSE; None where the index holds no terms
    sources: pa.RecordBatch | None = None  # the documents whole, as they were sent; None: they are not kept

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
    """Outcome of a write, durable up to and including log record `sequence`."""

    sequence: int
    rows: int
    rejected: list[dict[str, str]] = field(default_factory=list)  # as storage.schema.REJECTED has them


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
    """Separate the rows that can be written from those to reject; of rows with equal doc_ids the last counts.

    Arguments and errors are those of :meth:`LiveShard.upsert`; `base` is a shard of the index, of whose terms
    the `strongest` are kept. Returns the write, and the rejected rows as in storage.schema.REJECTED.
    """
    table, dim = _cast(documents, base.documents.schema), base.lists.coarse.d
    terms = None if base.postings is None else _terms_of(documents)
    unfit = {} if terms is None else _unfit(terms)
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
        if reason := _reason(doc_id, float(lengths[row])) or unfit.get(row, ""):
            rejected.append({"table": "documents", "row": doc_id or f"row {numbers[row]}", "reason": reason})
        else:
            last[doc_id] = row
    kept = sorted(last.values())
    searched = wide[kept] / lengths[kept, None] if similarity == "cosine" else wide[kept]
    places = pa.array(kept, pa.int64())
    strong = None if terms is None else _single_batch(_strongest(terms.take(places), strongest))
    written, own = table.take(places), None
    if sources is not None:
        ids = written["document_id" if "document_id" in written.column_names else "doc_id"]
        own = _single_batch(sources.filter(pc.is_in(sources["doc_id"], value_set=ids)))
    return Upsert(_single_batch(written), searched.astype(np.float32), strong, own), rejected


def checked_delete(doc_ids: Sequence[str]) -> Delete:
    """A deletion; DataError where a doc_id is not a non-empty string."""
    wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str) or not doc_id]
    if wrong:
        raise DataError(f"{wrong[0]!r} is not a doc_id: pass strings that are not empty")
    return Delete(list(dict.fromkeys(doc_ids)))


def encode_write(write: Upsert | Delete) -> bytes:
    """A log record's payload: an Arrow stream of index rows, and one of whole documents if they are kept."""
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
    """The inverse of :func:`encode_write`."""
    stored = pa.BufferReader(payload)
    batch = _read_batch(stored)
    if VECTOR not in batch.schema.names:
        return Delete(batch.column("doc_id").to_pylist())
    sparse = SPARSE.names if batch.schema.names[-2:] == SPARSE.names else []
    documents = batch.drop_columns([VECTOR, *sparse])
    terms = batch.select(sparse) if sparse else None
    sources = _read_batch(stored) if stored.tell() < stored.size() else None
    return Upsert(documents, to_numpy(batch.column(VECTOR)), terms, sources)


def _read_batch(stored: pa.BufferReader) -> pa.RecordBatch:
    """The only batch of the stream that begins here; `stored` is at its end then."""
    with pa.ipc.open_stream(stored) as stream:
        (batch,) = stream
    return batch


# --- the writes of a log ------------------------------------------------------------------------------------


def logged_writes(
    log: str | Path, *, after: int = 0, until: int | None = None
) -> Iterator[tuple[int, Upsert | Delete]]:
    """Numbers of records of a log, in order, and what each wrote or deleted.

    Args:
        log: folder of the log.
        after: number of the record before the first.
        until: number of the last; None: the last acknowledged one.

    Raises:
        ArtifactError: a record is damaged, or was dropped.
    """
    for number, payload in wal.read(log, after=after, until=until):
        yield number, _decode_write(payload)


def overridden(
    log: str | Path, *, after: int, until: int | None = None, passages: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Records of a delta's log, as :func:`logged_writes`, and the documents that each wrote or deleted.

    `passages`: the ids in the log are of passages.
    """
    for number, write in logged_writes(log, after=after, until=until):
        yield number, [*dict.fromkeys(map(document_of, write.doc_ids))] if passages else write.doc_ids


def kept_writes(log: str | Path, *, until: int | None = None) -> Iterator[tuple[int, Upsert | Delete]]:
    """All records of a delta's log, in order, each upsert with the documents whole.

    ConfigError where one was written without them, or the log was not kept from its first record on.
    """
    if not wal.holds(log, after=0):
        raise ConfigError(_not_kept(log, 1))
    for number, write in logged_writes(log, until=until):
        if isinstance(write, Upsert) and write.sources is None:
            raise ConfigError(_not_kept(log, number))
        yield number, write


def _not_kept(log: str | Path, record: int) -> str:
    return (
        f"record {record} of {log} has no whole documents for another model to encode: it was written "
        "without serve.live.keep_documents. Name a new folder, set it there, and send the documents again, "
        "or write them to the data set's files and run again"
    )


# --- checks of documents ------------------------------------------------------------------------------------


def _terms_of(documents: pa.Table) -> pa.Table:
    """Terms of documents, null where the columns are missing."""
    if any(name in documents.column_names for name in SPARSE.names):
        return _cast(documents, SPARSE)
    return pa.table([pa.nulls(len(documents), field.type) for field in SPARSE], schema=SPARSE)


def _unfit(terms: pa.Table) -> dict[int, str]:
    """Rows whose terms cannot be indexed, with the reasons."""

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
    cut = postings.build(terms["terms"], terms["impacts"], strongest=k)
    return pa.table(postings.columns([cut]), schema=SPARSE)


def _cast(documents: pa.Table, schema: pa.Schema) -> pa.Table:
    missing = [name for name in schema.names if name not in documents.column_names]
    if missing:
        raise DataError(
            f"documents have no column {missing[0]!r}: this index holds {', '.join(schema.names)}"
        )
    try:
        return documents.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"documents are not of the types this index holds: {error}") from None


def _reason(doc_id: str | None, length: float) -> str:
    if not doc_id:
        return "doc_id is missing"
    if not np.isfinite(length):
        return "vector is not finite"
    return "" if length > 0 else "vector is all zero: it has no direction"


def _single_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
