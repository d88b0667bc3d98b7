"""Writes to a live shard: checked, made ready, and turned into the bytes of a log record and back.

A table that cannot be read at all is refused; a row that cannot be indexed is set aside with its reason, and
the others are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.ipc
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.errors import DataError
from scalingnote.index import postings
from scalingnote.storage.schema import SPARSE
from scalingnote.storage.vectors import to_arrow, to_numpy

VECTOR = "vector"  # the column a log record has beside those of the documents; a deletion has none


@dataclass(frozen=True)
class Upsert:
    """Documents and their vectors, of unit length; no doc_id is there twice."""

    documents: pa.RecordBatch
    vectors: Float[ndarray, "rows dim"]
    terms: pa.RecordBatch | None = None  # as storage.schema.SPARSE; None where the index holds none

    @property
    def doc_ids(self) -> list[str]:
        """Of the documents, in order."""
        ids: list[str] = self.documents.column("doc_id").to_pylist()
        return ids


@dataclass(frozen=True)
class Delete:
    """Ids of documents; those that are not there are no error."""

    doc_ids: list[str]


@dataclass(frozen=True)
class Written:
    """What became of a write: durable up to and including log record `sequence`."""

    sequence: int
    rows: int
    rejected: list[dict[str, str]] = field(default_factory=list)  # as storage.schema.REJECTED has them


def upsert(
    documents: pa.Table,
    vectors: Shaped[ndarray, "..."],
    *,
    schema: pa.Schema,
    dim: int,
    sparse: bool = False,
    strongest: int | None = None,
    rows: Sequence[int] | None = None,
) -> tuple[Upsert, list[dict[str, str]]]:
    """The rows that can be written, as `schema` has them, and those set aside.

    Where the index is `sparse`, the columns `terms` and `impacts` say which terms a document has; without
    these columns, or with nulls there, it has none. The `strongest` of its terms are taken, or all. Of two
    rows with one doc_id the later is written. One without is named by its place, or its number in `rows`.
    DataError when columns are missing or of another type, or the vectors are not one of `dim` floats per
    document.
    """
    table = _typed(documents, schema)
    terms = _terms(documents) if sparse else None
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
    unit = (wide[kept] / lengths[kept, None]).astype(np.float32)
    places = pa.array(kept, pa.int64())
    if terms is not None:
        terms = _strongest(terms.take(places), strongest)
    return Upsert(_batch(table.take(places)), unit, None if terms is None else _batch(terms)), rejected


def delete(doc_ids: Sequence[str]) -> Delete:
    """A deletion; DataError when something else than ids is named."""
    wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str) or not doc_id]
    if wrong:
        raise DataError(f"{wrong[0]!r} is no doc_id: pass strings that are not empty")
    return Delete(list(dict.fromkeys(doc_ids)))


def encode(write: Upsert | Delete) -> bytes:
    """The payload of a log record: one Arrow table."""
    if isinstance(write, Upsert):
        batch = write.documents.append_column(VECTOR, to_arrow(write.vectors))
        if write.terms is not None:
            for name in SPARSE.names:
                batch = batch.append_column(name, write.terms.column(name))
    else:
        batch = pa.record_batch({"doc_id": pa.array(write.doc_ids, pa.string())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def decode(payload: bytes) -> Upsert | Delete:
    """The inverse of :func:`encode`."""
    batch = pa.ipc.open_stream(payload).read_next_batch()
    if VECTOR not in batch.schema.names:
        return Delete(batch.column("doc_id").to_pylist())
    sparse = SPARSE.names if batch.schema.names[-2:] == SPARSE.names else []
    documents = batch.drop_columns([VECTOR, *sparse])
    return Upsert(documents, to_numpy(batch.column(VECTOR)), batch.select(sparse) if sparse else None)


def _terms(documents: pa.Table) -> pa.Table:
    """The terms of documents: as they are given, or none."""
    if any(name in documents.column_names for name in SPARSE.names):
        return _typed(documents, SPARSE)
    return pa.table([pa.nulls(len(documents), field.type) for field in SPARSE], schema=SPARSE)


def _unfit(terms: pa.Table) -> dict[int, str]:
    """The rows whose terms cannot be indexed, and why."""

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


def _typed(documents: pa.Table, schema: pa.Schema) -> pa.Table:
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


def _batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
