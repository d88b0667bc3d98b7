"""From new documents to the rows that a live index takes: read as the data set's, encoded, described.

mappings (JSON) ─typed─► documents ─flow─► codes, embeddings ─► rows of the document store, vectors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.encode.steps import Rejected
from scalingnote.index.shard import document_rows
from scalingnote.ingest.flow import VIEW, DocumentFlow
from scalingnote.quantize import semantic_id
from scalingnote.storage import vectors
from scalingnote.storage.exchange import hash_of

# Suffixes of semantic IDs count documents with equal codes. Nobody counts while documents come one by one:
# theirs are drawn from above all that a corpus would count to, and its next full build counts them in.
_FREE = 1 << 30


@dataclass(frozen=True)
class IndexRows:
    """Documents for :meth:`LiveIndex.upsert`, their vectors, and those set aside."""

    documents: pa.Table
    vectors: Float[ndarray, "docs dim"]
    rejected: Rejected


def index_rows(
    documents: Sequence[Mapping[str, Any]], flow: DocumentFlow, *, schema: pa.Schema, snippet_chars: int
) -> IndexRows:
    """Encode documents; `schema` is that of the data set's documents. Of equal ids the last counts."""
    table, rejected = typed(documents, schema)
    ready = flow(table)
    rejected = [*rejected, *ready.rejected]
    codes = vectors.matrix_of(ready.table["codes"]).astype(np.int32)
    doc_ids = ready.table["doc_id"]
    suffix = (_FREE + hash_of(doc_ids) % _FREE).astype(np.int32)
    named = semantic_id.to_table(doc_ids, codes, suffix)
    rows = document_rows(doc_ids, documents=table, semantic_ids=named, snippet_chars=snippet_chars)
    return IndexRows(rows, vectors.to_numpy(ready.table[VIEW]), rejected)


def typed(documents: Sequence[Mapping[str, Any]], schema: pa.Schema) -> tuple[pa.Table, Rejected]:
    """Documents as a table, and those with a field that the data set has not, or of another type."""
    rows, rejected = dict[str, dict[str, Any]](), []
    for document in documents:
        doc_id = str(document["doc_id"])
        unknown = [name for name in document if name not in schema.names]
        if unknown:
            known = ", ".join(schema.names)
            rejected.append(_reason(doc_id, f"no field {unknown[0]!r} in the data set, it has {known}"))
            continue
        row = {field.name: document.get(field.name) for field in schema}
        try:
            pa.Table.from_pylist([row], schema=schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
            rejected.append(_reason(doc_id, str(error)))
            continue
        rows.pop(doc_id, None)
        rows[doc_id] = row
    return pa.Table.from_pylist(list(rows.values()), schema=schema), rejected


def _reason(doc_id: str, reason: str) -> dict[str, str]:
    return {"table": "documents", "row": doc_id, "reason": reason}
