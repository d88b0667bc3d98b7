"""A shard: its vectors and the documents they stand for, found by the same row number.

Shards are contiguous ranges of the corpus, so each reads only its own parts and row order is corpus order.
Where neighbouring documents are alike, one shard may hold most of what a query scans; that moves work between
shards, never the merged answer, as all shards share one quantizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray

from scalingnote.errors import ArtifactError
from scalingnote.index import ivf
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact

DOCUMENTS = pa.schema({name: pa.string() for name in ("doc_id", "title", "topic", "snippet", "semantic_id")})


COARSE = "coarse.faiss"  # the centroids all shards share
LAYOUT = "index.json"


@dataclass(frozen=True)
class Layout:
    """What a reader must know before it opens a shard; the contents of index.json."""

    dim: int
    documents: int
    shards: int
    nlist: int
    m: int
    nbits: int
    refine: ivf.Refine
    refine_factor: int
    nprobe: int


@dataclass(frozen=True)
class Slice:
    """Rows `start` to `stop` of one embeddings part."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """A shard open for search; `documents` is memory-mapped where the index is local."""

    number: int
    lists: ivf.Lists
    documents: pa.Table


def assign(parts: Sequence[str], rows: Sequence[int], *, shards: int) -> list[list[Slice]]:
    """Cut parts of these row counts into `shards` ranges whose sizes differ by at most one."""
    total = sum(rows)
    bounds = [total * number // shards for number in range(shards + 1)]
    assigned: list[list[Slice]] = [[] for _ in range(shards)]
    first = 0
    for part, count in zip(parts, rows, strict=True):
        for number in range(shards):
            start = max(bounds[number], first)
            stop = min(bounds[number + 1], first + count)
            if start < stop:
                assigned[number].append(Slice(part, start - first, stop - first))
        first += count
    return assigned


def file_names(number: int, *, refine: bool) -> list[str]:
    """A shard's parts of the artifact: documents, IVFPQ, and kept vectors if there are any."""
    names = ["documents.arrow", "ivfpq.faiss", *(["refine.faiss"] if refine else [])]
    return [f"shard-{number:05d}/{name}" for name in names]


def document_rows(
    doc_ids: pa.ChunkedArray, *, documents: pa.Table, semantic_ids: pa.Table, snippet_chars: int
) -> pa.Table:
    """Rows of the document store in the order of `doc_ids`.

    Raises ArtifactError when an embedding has no document or no semantic ID: they belong to other datasets.
    """
    found = _lookup(documents, doc_ids, "document in the dataset: embeddings and dataset differ in origin")
    named = _lookup(semantic_ids, doc_ids, "semantic ID: re-run quantize on these embeddings")
    # Snippets are one line: runs of white space become one space before the cut, not after it.
    opening = pc.utf8_slice_codeunits(found["content"].fill_null(""), 0, 8 * snippet_chars)
    line = pc.utf8_trim_whitespace(pc.replace_substring_regex(opening, r"\s+", " "))
    snippet = pc.utf8_slice_codeunits(line, 0, snippet_chars)
    title, topic = (found[name].fill_null("") for name in ("title", "topic"))
    columns = [doc_ids, title, topic, snippet, named["semantic_id"]]
    return pa.table(dict(zip(DOCUMENTS.names, columns, strict=True)), schema=DOCUMENTS)


def open_layout(index: Artifact) -> Layout:
    """The layout of an index."""
    return Layout(**index.read_json(LAYOUT))


def open_centroids(index: Artifact) -> Float[ndarray, "nlist dim"]:
    """The centroids that all shards of an index share."""
    return ivf.load_centroids(fs.read_bytes(index.file(COARSE)))


def open_shard(
    index: Artifact, number: int, *, centroids: Float[ndarray, "nlist dim"], refine: bool
) -> Shard:
    """Open a shard, each of its files checked against the manifest first: faiss itself has no checksum."""
    documents, *vectors = file_names(number, refine=refine)
    lists = ivf.load(centroids, *(fs.read_bytes(index.file(name)) for name in vectors))
    table = index.table(documents)
    if len(table) != len(lists):
        raise ArtifactError(
            f"{index.uri}: shard {number} has {len(lists)} vectors and {len(table)} documents: re-run index"
        )
    return Shard(number, lists, table)


def _lookup(table: pa.Table, doc_ids: pa.ChunkedArray, missing: str) -> pa.Table:
    rows = pc.index_in(doc_ids, table["doc_id"])
    if rows.null_count:
        first = doc_ids.filter(rows.is_null())[0].as_py()
        raise ArtifactError(f"{rows.null_count} embeddings, first of {first!r}, have no {missing}")
    return table.take(rows)
