"""A shard: its vectors and the documents they stand for, found by the same row number.

Shards are contiguous ranges of the corpus, so each reads only its own parts and row order is corpus order.
Where neighbouring documents are alike, one shard may hold most of what a query scans; that moves work between
shards, never the merged answer, as all shards share one quantizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import faiss
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.errors import ArtifactError
from scalingnote.index import ivf, postings_file
from scalingnote.index.config import Refine
from scalingnote.index.postings import Postings
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.stored_rows import StoredRows

DOCUMENTS = pa.schema({name: pa.string() for name in ("doc_id", "title", "topic", "snippet", "semantic_id")})


COARSE = "coarse.faiss"  # the centroids all shards share
LAYOUT = "index.json"


@dataclass(frozen=True)
class Layout:
    """What a reader must know before it opens a shard; the contents of index.json."""

    dim: int
    documents: int
    shards: int
    family: str
    refine: Refine
    nlist: int
    nprobe: int
    refine_factor: int
    recall: float | None  # that nprobe and refine_factor were tuned to; None where nobody measured
    filters: tuple[str, ...]
    sparse: bool = False  # whether documents have terms
    background: float | None = None  # mean cosine of a query with a random document, if measured
    dense_weight: float | None = None  # of dense scores in hybrid search, if tuned

    def fields(self, documents: pa.Schema) -> pa.Schema:
        """Those columns of a shard's documents that a search may filter by."""
        return pa.schema([documents.field(name) for name in self.filters])


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
    postings: Postings | None = None

    @cached_property
    def stored(self) -> StoredRows:
        """The documents one by one, as searches give them."""
        return StoredRows(self.documents)


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


def documents_file(number: int) -> str:
    """A shard's documents."""
    return f"shard-{number:05d}/documents.arrow"


def vector_files(number: int, *, family: str, refine: Refine) -> list[str]:
    """A shard's inverted lists, and the vectors it keeps, as far as the family has them."""
    names = [*(["lists.faiss"] if family != "flat" else []), *(["kept.faiss"] if refine != "none" else [])]
    return [f"shard-{number:05d}/{name}" for name in names]


def term_files(number: int) -> dict[str, str]:
    """The files of a shard's postings: name among themselves -> part of the artifact."""
    return {name: f"shard-{number:05d}/{name}" for name in postings_file.FILES}


def document_columns(filters: Sequence[str]) -> list[str]:
    """Columns of the dataset's documents that a shard is made of."""
    own = ("doc_id", "title", "topic", "content")
    return [*own, *(name for name in filters if name not in own)]


def document_rows(
    doc_ids: pa.ChunkedArray, *, documents: pa.Table, semantic_ids: pa.Table, snippet_chars: int
) -> pa.Table:
    """Rows of the document store in the order of `doc_ids`; columns that are not the store's own go last.

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
    rows = pa.table(dict(zip(DOCUMENTS.names, columns, strict=True)), schema=DOCUMENTS)
    for name in found.column_names:
        if name not in {*DOCUMENTS.names, "content"}:
            rows = rows.append_column(found.schema.field(name), found[name])
    return rows


def open_layout(index: Artifact) -> Layout:
    """The layout of an index."""
    values = index.read_json(LAYOUT)
    try:
        return Layout(**values | {"filters": tuple(values["filters"])})
    except (TypeError, KeyError):
        raise ArtifactError(f"{index.uri} was built by another release: re-run index") from None


def open_coarse(index: Artifact) -> Any:
    """The coarse quantizer that all shards of an index share."""
    return ivf.parse(fs.read_bytes(index.file(COARSE)))


def open_shard(index: Artifact, number: int, *, layout: Layout, coarse: Any, mapped: bool = False) -> Shard:
    """Open a shard, each of its files checked against the manifest first: faiss itself has no checksum.

    `mapped`: the vectors kept stay in their file, which is copied to this machine if it is not on it, and the
    system holds as much of them in memory as there is room for; nobody may add to them.
    """
    files = vector_files(number, family=layout.family, refine=layout.refine)
    if mapped and layout.refine != "none":
        *others, name = files
        index.file(name)
        folder = fs.download(index.uri, [name], version=index.digest)
        kept = faiss.read_index(str(folder / name), faiss.IO_FLAG_MMAP_IFC)
        codes = fs.read_bytes(index.file(others[0])) if others else None
        lists = replace(ivf.load(coarse, codes, None), kept=kept)
    else:
        data = [fs.read_bytes(index.file(name)) for name in files]
        lists = parse(data, layout=layout, coarse=coarse)
    documents = index.table(documents_file(number))
    if len(documents) != len(lists):
        raise ArtifactError(
            f"{index.uri}: shard {number} has {len(lists)} vectors and {len(documents)} documents: "
            "re-run index"
        )
    postings = None
    if layout.sparse:
        buffers = {
            name: fs.open_input(index.file(part)).read_buffer() for name, part in term_files(number).items()
        }
        postings = postings_file.load(buffers, documents=len(documents))
    return Shard(number, lists, documents, postings)


def parse(files: Sequence[bytes], *, layout: Layout, coarse: Any) -> ivf.Lists:
    """A shard's vectors from the contents of :func:`vector_files`."""
    lists = files[0] if layout.family != "flat" else None
    return ivf.load(coarse, lists, files[-1] if layout.refine != "none" else None)


def _lookup(table: pa.Table, doc_ids: pa.ChunkedArray, missing: str) -> pa.Table:
    rows = pc.index_in(doc_ids, table["doc_id"])
    if rows.null_count:
        first = doc_ids.filter(rows.is_null())[0].as_py()
        raise ArtifactError(f"{rows.null_count} embeddings, first of {first!r}, have no {missing}")
    return table.take(rows)
