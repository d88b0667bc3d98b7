"""Documents as token rows: what is read and tokenised on any CPU, and handed to a worker that encodes."""

import hashlib

import pyarrow as pa

from scalingnote.errors import DataError
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.token_rows import token_columns
from scalingnote.storage import schema

COLUMNS = ["doc_id", "title", "topic", "content"]
TEXTS = COLUMNS[1:]


def tokenise(documents: pa.Table, prompt: DocumentPrompt) -> tuple[pa.Table, list[dict[str, str]]]:
    """The documents that can be encoded, in order, and for each other one why not (rows of REJECTED).

    Columns are those of `documents` but for its texts, then ``ids`` and ``positions``.
    """
    rows, rejected = [], []
    kept = []
    found = prompt.rows(*(documents[name].to_pylist() for name in TEXTS))
    for doc_id, row in zip(documents["doc_id"].to_pylist(), found, strict=True):
        kept.append(not isinstance(row, DataError))
        if isinstance(row, DataError):
            rejected.append({"table": "documents", "row": doc_id, "reason": str(row)})
        else:
            rows.append(row)
    table = documents.drop_columns(TEXTS).filter(pa.array(kept, pa.bool_()))
    for name, column in token_columns([rows], views=prompt.width).items():
        table = table.append_column(name, column)
    return table, rejected


def content_hashes(documents: pa.Table) -> pa.Array:
    """A hash of each document's title, topic and content: equal as long as nothing that is read changed."""
    texts = zip(*(documents[name].to_pylist() for name in TEXTS), strict=True)
    return pa.array(
        # Lengths in front, so that no text can run into the next one.
        [
            hashlib.blake2b(
                b"".join(b"%d:%s" % (len(text), text) for text in map(str.encode, fields)), digest_size=16
            ).digest()
            for fields in texts
        ],
        schema.CONTENT_HASH.type,
    )
