"""Documents from an index of passages: each once, at the place of its best passage, which is its snippet.

    k documents ─► the best passages, a few per document ─► one per document ─► k of them? else more passages

A ranking of passages is searched as any other; what is grouped is its beginning. So the k documents are
exactly the first k of the whole ranking of passages: a document that is not found has no passage among those
read, all of which are better than its own. There are fewer than k only if the ranking ends, or at MAX_DEPTH.
A hybrid ranking is that of as many candidates of either kind as an index of documents has, at least `depth`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.storage.schema import PASSAGE, document_of, passage_id

if TYPE_CHECKING:
    from scalingnote.search.searcher import Results

FIRST_DEPTH = 4  # passages per document asked for, in the first search
DEEPER = 4  # times as many in each further one
MAX_DEPTH = 16_000  # passages of one query; Milvus gives 16,384


def first_depth(k: int) -> int:
    """Passages to search first for k documents."""
    return min(FIRST_DEPTH * k, MAX_DEPTH)


def next_depth(found: "Results", passages: int, *, k: int, depth: int) -> int | None:
    """Passages to search next, if the documents `found` are too few; None where a search would find no more.

    Args:
        found: documents, of :func:`best_per_document`.
        passages: that the search of `depth` passages found.
        k: documents asked for.
        depth: of that search.
    """
    if len(found) >= k or passages < depth or depth >= MAX_DEPTH:
        return None
    return min(DEEPER * depth, MAX_DEPTH)


def best_per_document(results: "Results") -> "Results":
    """Results with passages as results with documents, in the order of their best passages."""
    first: dict[str, int] = {}
    for place, row in enumerate(results.documents):
        first.setdefault(document_of(row["doc_id"]), place)
    found = results.take([*first.values()])
    return found.with_documents([as_document(row) for row in found.documents])


def first_passages(tables: Iterable[pa.Table]) -> list[pa.Table]:
    """The row of each document's first passage, which every document has: to count documents."""
    return [table.filter(pc.ends_with(table["doc_id"], passage_id("", 1))) for table in tables]


def as_document(row: Mapping[str, Any]) -> dict[str, Any]:
    """The stored row of a passage as its document, with the place of the passage in it, if it was read."""
    shown = {name: value for name, value in row.items() if name not in PASSAGE.names}
    shown["doc_id"] = document_of(row["doc_id"])
    if "passage" in row:
        shown["passage"] = {"number": row["passage"], "start": row["start"], "end": row["end"]}
    return shown
