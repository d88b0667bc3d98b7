"""Columns of every table that passes between stages.

Documents may have further columns, their *features* (price, supplier, votes...), and users may have a
*profile*. Both are kept.
"""

import pyarrow as pa

TEXT_COLUMNS = ["title", "topic", "content"]  # of documents
DOCUMENT_COLUMNS = ["doc_id", *TEXT_COLUMNS]
DOCUMENTS = pa.schema(
    {
        "doc_id": pa.string(),
        "title": pa.string(),
        "topic": pa.string(),
        "content": pa.string(),
        # Documents of one group are never split between training and test (e.g. one medical focus).
        "group": pa.string(),
    }
)
# A long document is several rows, its passages. The doc_id of a row is "ID#NUMBER" (:func:`passage_id`), its
# content a part of the document's content; all other columns are repeated.
PASSAGE = pa.schema(
    {
        "document_id": pa.string(),
        "passage": pa.int64(),  # number in the document, from 1
        "start": pa.int64(),  # in characters of the document's content
        "end": pa.int64(),
    }
)
QUERIES = pa.schema(
    {
        "query_id": pa.string(),
        "query": pa.string(),
        "split": pa.string(),  # "train" or "test"
    }
)
# Texts drawn from documents and real queries, which a teacher encodes.
PSEUDO_QUERIES = pa.schema(
    {
        "query_id": pa.string(),
        "query": pa.string(),
        "split": pa.string(),  # "train" or "validation"
    }
)
QRELS = pa.schema({"query_id": pa.string(), "doc_id": pa.string(), "relevance": pa.int32()})
IMPRESSIONS = pa.schema(
    {
        "session_id": pa.string(),
        "user_id": pa.string(),  # may be null
        "query_id": pa.string(),
        "doc_id": pa.string(),
        "position": pa.int32(),  # 1 is the top
        "clicked": pa.bool_(),
        "timestamp": pa.timestamp("ms"),  # UTC; Parquet has no unit of seconds
        "dwell_s": pa.float32(),  # seconds spent on a clicked document; null if unknown
    }
)
USERS = pa.schema({"user_id": pa.string()})
SCORES = pa.schema({"query_id": pa.string(), "doc_id": pa.string(), "score": pa.float32()})
TRIPLETS = pa.schema(
    {
        "query_id": pa.string(),
        "query": pa.string(),
        "positive": pa.string(),  # doc_id
        "negatives": pa.list_(pa.string()),  # doc_ids
        "source": pa.string(),  # "click" or "relevance"
        "hop": pa.string(),  # "one": the query's own evidence; "multi": an associated query's
        "via": pa.string(),  # query_id whose evidence this is, for hop "multi"; else null
        "weight": pa.float32(),  # of this row in the losses
        # Scores of a ranking model: the positive's, then each negative's; null unless it scored all of them.
        "scores": pa.list_(pa.float32()),
        "split": pa.string(),  # "train" or "validation"
    }
)
# Next to triplets: every known answer of a query, so that it is not drawn as a negative later.
ANSWERS = pa.schema({"query_id": pa.string(), "positive": pa.string()})
# Finished trainings of several sizes, to which scaling laws are fitted. Further columns are kept.
LADDER = pa.schema(
    {
        "parameters": pa.int64(),  # of the document tower, without embeddings
        "examples": pa.int64(),  # training pairs
        "tokens": pa.int64(),  # of both towers, seen in training
        "contrastive_entropy": pa.float64(),  # on held-out queries, always the same ones
    }
)
REJECTED = pa.schema({"table": pa.string(), "row": pa.string(), "reason": pa.string()})


def passage_id(document_id: str, number: int) -> str:
    """Return the doc_id of a document's passage; in a data set of passages every row has such an id."""
    return f"{document_id}#{number}"


def document_of(passage_id: str) -> str:
    """Return the id of a passage's document."""
    return passage_id.rpartition("#")[0]


INDEXED_VIEW = "summary"  # the column of embeddings that is quantized, indexed and searched


def embedding_field(name: str, dim: int, *, dtype: str = "float32") -> pa.Field:
    """Build the field of an embedding column: FixedSizeList of float16 or float32, for any Arrow reader."""
    return pa.field(name, pa.list_(pa.from_numpy_dtype(dtype), dim))


# A document's sparse vector: terms of the tower's vocabulary, ascending, and the weight of each.
SPARSE = pa.schema({"terms": pa.list_(pa.int32()), "impacts": pa.list_(pa.float16())})


# Hash of the encoded text: a document with the same hash need not be encoded again.
CONTENT_HASH = pa.field("content_hash", pa.binary(16))
# The change of a document since an earlier corpus: "added", "changed" or "deleted".
CHANGES = pa.schema({"doc_id": pa.string(), "change": pa.string()})


def embeddings(views: list[str], dim: int, *, dtype: str = "float32", sparse: bool = False) -> pa.Schema:
    """Build the schema of embeddings: id, hash, a column per view, optionally the sparse vector."""
    dense = [embedding_field(view, dim, dtype=dtype) for view in views]
    return pa.schema([pa.field("doc_id", pa.string()), CONTENT_HASH, *dense, *(SPARSE if sparse else [])])


def semantic_ids(levels: int) -> pa.Schema:
    """Build the schema of semantic IDs: codes, and `suffix`, a hash that separates equal codes."""
    return pa.schema(
        {
            "doc_id": pa.string(),
            "codes": pa.list_(pa.int32(), levels),
            "suffix": pa.int64(),
            "semantic_id": pa.string(),  # "c0-c1-...-suffix"
        }
    )
