"""A shard: its files, its vectors, and their documents in rows of the same numbers.

    lists.faiss, kept.faiss, sparse.*.npy    vectors and terms        ┐
    columns.arrow                            ids and filter columns   ├ what a searcher opens
    ids.npy                                  id ─► row                ┘
    documents.arrow                          title and snippet for answers: the document store

A searcher of a built index never opens the documents: the process that makes the answer reads those of its k
results from a :class:`DocumentStore`, by shard and row. All of these files are mapped; only lists of fast
scan are copied to memory.

Shards are contiguous ranges of the corpus: each reads only its own parts, and row order is corpus order.
Where neighbouring documents are similar, one shard may hold most of what a query scans. That shifts work
between shards, but never changes the merged answer, because all shards share one quantizer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.index import families, ivf, postings
from scalingnote.index.config import Refine
from scalingnote.index.postings import Postings
from scalingnote.models.published_model import Similarity
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.arrow import StoredRows
from scalingnote.storage.artifact import Artifact, Part, write_file, write_table
from scalingnote.storage.schema import PASSAGE, document_of
from scalingnote.storage.shuffle import hash_of

SHARD_DOCUMENTS = pa.schema(
    {name: pa.string() for name in ("doc_id", "title", "topic", "snippet", "semantic_id")}
)
COARSE = "coarse.faiss"  # the centroids all shards share
_COARSE: WeakValueDictionary[str, Any] = WeakValueDictionary()  # by the checksum of the file
LAYOUT_FILE = "index.json"
ID_ROW_BYTES = 16  # of a document in the file of :func:`sorted_ids`


@dataclass(frozen=True)
class IndexLayout:
    """Properties of an index that opening a shard requires; the contents of index.json."""

    dim: int
    documents: int
    shards: int
    family: str
    refine: Refine
    nlist: int
    nprobe: int
    refine_factor: int
    recall: float | None  # measured with nprobe and refine_factor; None where they were not tuned
    filters: tuple[str, ...]
    sparse: bool = False  # whether documents have terms
    background: float | None = None  # mean score of a query and a random document, if measured
    dense_weight: float | None = None  # of dense scores in hybrid search, if tuned
    similarity: Similarity = "cosine"  # dot: vectors of documents have their own length
    passages: bool = False  # whether rows are passages of documents; `documents` counts them

    def fields(self, documents: pa.Schema) -> pa.Schema:
        """Columns of a shard's documents that a search may filter by."""
        return pa.schema([documents.field(name) for name in self.filters])


@dataclass(frozen=True)
class EmbeddingSlice:
    """Rows `start` to `stop` of one embeddings part."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """A shard open for search.

    `documents` are whole, or ids and filter columns only; memory-mapped where the index is local.
    """

    number: int
    lists: ivf.Lists
    documents: pa.Table
    postings: Postings | None = None
    ids: UInt64[ndarray, "two rows"] | None = None  # see :func:`sorted_ids`; None: computed when needed

    @cached_property
    def rows(self) -> "DocumentRows":
        """The documents by row and by id."""
        return DocumentRows(self.documents, self.ids)


def assign(parts: Sequence[str], rows: Sequence[int], *, shards: int) -> list[list[EmbeddingSlice]]:
    """Divide parts into `shards` contiguous ranges whose sizes differ by at most one row."""
    firsts = [*accumulate(rows, initial=0)]
    bounds = [firsts[-1] * number // shards for number in range(shards + 1)]
    assigned = []
    for start, stop in pairwise(bounds):
        own = []
        for part in range(bisect_right(firsts, start) - 1, bisect_left(firsts, stop)):
            first, last = max(start, firsts[part]), min(stop, firsts[part + 1])
            if first < last:
                own.append(EmbeddingSlice(parts[part], first - firsts[part], last - firsts[part]))
        assigned.append(own)
    return assigned


def documents_file(number: int) -> str:
    """File of a shard's documents."""
    return f"shard-{number:05d}/documents.arrow"


def columns_file(number: int) -> str:
    """File of the ids of a shard's documents and the columns that a search may filter by."""
    return f"shard-{number:05d}/columns.arrow"


def ids_file(number: int) -> str:
    """File of a shard's :func:`sorted_ids`."""
    return f"shard-{number:05d}/ids.npy"


def vector_files(number: int, *, family: str, refine: Refine) -> list[str]:
    """Files of a shard's inverted lists and kept vectors, as far as the family has them."""
    names = {"lists.faiss": family != "flat", "kept.faiss": refine != "none"}
    return [f"shard-{number:05d}/{name}" for name, is_there in names.items() if is_there]


def term_files(number: int) -> dict[str, str]:
    """Files of a shard's postings: name in :data:`postings.FILES` -> part of the artifact."""
    return {name: f"shard-{number:05d}/{name}" for name in postings.POSTING_FILES}


def document_columns(filters: Sequence[str], *, passages: bool = False) -> list[str]:
    """Columns of the dataset's documents that a shard reads."""
    own = PASSAGE.names if passages else []
    return [*dict.fromkeys(("doc_id", "title", "topic", "content", *filters, *own))]


def searched_columns(filters: Sequence[str]) -> list[str]:
    """Columns of a shard's documents that searchers open."""
    return [*dict.fromkeys(("doc_id", *filters))]


def document_rows(
    doc_ids: pa.ChunkedArray, *, documents: pa.Table, semantic_ids: pa.Table, snippet_chars: int
) -> pa.Table:
    """Rows of a shard's document table.

    Args:
        doc_ids: of the rows, in order.
        documents: with :func:`document_columns`; columns besides SHARD_DOCUMENTS are appended.
        semantic_ids: `doc_id` and `semantic_id`.
        snippet_chars: length of the snippet.

    Raises:
        ArtifactError: a doc_id has no document or no semantic ID, because they come from other datasets.
    """
    origin = "row in the dataset: embeddings and dataset differ in origin"
    found = arrow.take_documents(documents, doc_ids, missing=origin)
    named = arrow.take_documents(
        semantic_ids, doc_ids, missing="semantic ID: re-run quantize on these embeddings"
    )
    # Runs of white space become one space before the cut, so that snippets use their full length.
    opening = pc.utf8_slice_codeunits(found["content"].fill_null(""), 0, 8 * snippet_chars)
    line = pc.utf8_trim_whitespace(pc.replace_substring_regex(opening, r"\s+", " "))
    snippet = pc.utf8_slice_codeunits(line, 0, snippet_chars)
    title, topic = (found[name].fill_null("") for name in ("title", "topic"))
    columns = [doc_ids, title, topic, snippet, named["semantic_id"]]
    rows = pa.table(dict(zip(SHARD_DOCUMENTS.names, columns, strict=True)), schema=SHARD_DOCUMENTS)
    for name in found.column_names:
        if name not in {*SHARD_DOCUMENTS.names, "content"}:
            rows = rows.append_column(found.schema.field(name), found[name])
    return rows


def write_shard(
    folder: str, number: int, *, layout: IndexLayout, lists: ivf.Lists, documents: pa.Table, terms: Postings
) -> dict[str, Part]:
    """Write the files of a shard below `folder`; `terms` are ignored where the index holds none."""
    names = vector_files(number, family=layout.family, refine=layout.refine)
    files = dict(zip(names, ivf.dump_files(lists), strict=True))
    if layout.sparse:
        own = term_files(number)
        files |= {own[name]: data for name, data in postings.dump(terms).items()}
    files[ids_file(number)] = arrow.npy_bytes(sorted_ids(documents["doc_id"]))
    parts = {name: write_file(fs.join(folder, name), data) for name, data in files.items()}
    # In one batch: opening reads the head of each batch, for which Linux maps up to 2 MB around it.
    columns = documents.select(searched_columns(layout.filters)).combine_chunks()
    tables = {columns_file(number): columns, documents_file(number): documents}
    parts |= {name: write_table(fs.join(folder, name), table) for name, table in tables.items()}
    # A document has rows in two tables, and is counted once.
    return parts | {columns_file(number): replace(parts[columns_file(number)], rows=None)}


def open_layout(index: Artifact) -> IndexLayout:
    """Read the layout of an index."""
    values = index.read_json(LAYOUT_FILE)
    try:
        return IndexLayout(**values | {"filters": tuple(values["filters"])})
    except (TypeError, KeyError):
        raise ArtifactError(f"{index.uri} was built by another release: re-run index") from None


def open_coarse(index: Artifact) -> Any:
    """Read the coarse quantizer that all shards of an index share.

    Indexes in this process with equal ones (versions of a live index, a delta) have one in memory: a search
    over several of them chooses lists once.
    """
    data, digest = index.read_bytes(COARSE), index.manifest.parts[COARSE].sha256  # a damaged file is refused
    coarse = _COARSE.get(digest)
    if coarse is None:
        coarse = _COARSE[digest] = families.parse(data)
    return coarse


def open_shard(
    index: Artifact,
    number: int,
    *,
    layout: IndexLayout,
    coarse: Any,
    mapped: bool = False,
    columns_only: bool = False,
) -> Shard:
    """Open a shard after checking its files against the manifest, because faiss has no checksums.

    Args:
        index: the artifact.
        number: of the shard.
        layout: of the index.
        coarse: from :func:`open_coarse`.
        mapped: memory-map inverted lists and kept vectors read-only, so that processes of a machine share
            them; a remote file is copied to this machine first. Lists of fast scan and RaBitQ are read to
            memory all the same: faiss cannot map their blocks.
        columns_only: leave the documents to a :class:`DocumentStore`.

    Raises:
        ArtifactError: a file is missing or damaged, or files do not fit each other.
    """
    files = vector_files(number, family=layout.family, refine=layout.refine)
    if mapped or fs.is_local(index.uri):
        lists = ivf.read(coarse, [index.local_file(name) for name in files], mapped=mapped)
    else:
        lists = ivf.load(coarse, *(index.read_bytes(name) for name in files))
    documents = open_columns(index, number) if columns_only else index.table(documents_file(number))
    if len(documents) != len(lists):
        raise ArtifactError(
            f"{index.uri}: shard {number} has {len(lists)} vectors and {len(documents)} documents: "
            "re-run index"
        )
    terms = None
    if layout.sparse:
        buffers = {name: index.open(part).read_buffer() for name, part in term_files(number).items()}
        terms = postings.load(buffers, documents=len(documents))
    return Shard(number, lists, documents, terms, open_ids(index, number, rows=len(documents)))


def open_columns(index: Artifact, number: int) -> pa.Table:
    """Ids and filter columns of a shard's documents; of an earlier release, whole documents."""
    name = columns_file(number)
    return index.table(name if name in index.manifest.parts else documents_file(number))


def open_ids(index: Artifact, number: int, *, rows: int) -> UInt64[ndarray, "two rows"] | None:
    """The ids file of a shard, mapped; None in an index of an earlier release."""
    name = ids_file(number)
    if name not in index.manifest.parts:
        return None
    found: ndarray = np.load(index.local_file(name), mmap_mode="r", allow_pickle=False)
    if found.shape != (2, rows) or found.dtype != np.uint64:
        raise ArtifactError(f"{index.uri}: {name} is not of {rows} documents: re-run index")
    return found


def sorted_ids(doc_ids: pa.ChunkedArray) -> UInt64[ndarray, "two rows"]:
    """Hashes of document ids in ascending order, and the row of each: 16 bytes per document.

    ArtifactError where an id occurs twice: a write to it would be ambiguous.
    """
    hashes = hash_of(doc_ids)
    rows = np.argsort(hashes, kind="stable")
    hashes = hashes[rows]
    equal = np.flatnonzero(hashes[1:] == hashes[:-1])
    names = [doc_ids[row].as_py() for row in rows[np.union1d(equal, equal + 1)].tolist()]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArtifactError(f"doc_id {twice!r} is in the shard twice: re-run prepare, which removes repeats")
    return np.stack([hashes, rows.astype(np.uint64)])


class DocumentRows:
    """Documents of a shard by row, and rows by the ids of documents. Threads may share one.

    A dictionary of the ids would take ten times the 16 bytes of :func:`sorted_ids`. Hashes may collide, so an
    id is found only where the stored id is equal.

    Args:
        documents: of the shard, whole or some columns.
        ids: :func:`sorted_ids` of them; None: computed when needed.
    """

    def __init__(self, documents: pa.Table, ids: UInt64[ndarray, "two rows"] | None = None) -> None:
        self._stored, self._doc_ids, self._ids = StoredRows(documents), documents["doc_id"], ids

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._stored[row]

    def find(self, doc_ids: Sequence[str]) -> Int64[ndarray, " ids"]:
        """Row of each id, -1 where it is unknown; DataError where an id is not a string."""
        wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str)]
        if wrong:
            raise DataError(f"{wrong[0]!r} is no doc_id: pass strings")
        found = np.full(len(doc_ids), -1, np.int64)
        for number, row in _with_equal_hash(self._sorted, doc_ids):
            if self._doc_ids[row].as_py() == doc_ids[number]:
                found[number] = row
        return found

    def find_all(self, document_ids: Sequence[str], *, passages: bool) -> Int64[ndarray, " rows"]:
        """Rows of these documents, with `passages` of all passages of each; unknown ones are left out."""
        if not passages:
            rows = self.find(document_ids)
            return rows[rows >= 0]
        found = [
            row
            for number, row in _with_equal_hash(self._sorted_by_document, document_ids)
            if document_of(self._doc_ids[row].as_py()) == document_ids[number]
        ]
        return np.array(found, np.int64)

    @cached_property
    def _sorted(self) -> UInt64[ndarray, "two rows"]:
        return sorted_ids(self._doc_ids) if self._ids is None else self._ids

    @cached_property
    def _sorted_by_document(self) -> UInt64[ndarray, "two rows"]:
        """As :func:`sorted_ids`, of the documents that the rows are passages of."""
        hashes = hash_of(pc.replace_substring_regex(self._doc_ids, r"#[^#]*$", ""))  # as document_of
        rows = np.argsort(hashes, kind="stable")
        return np.stack([hashes[rows], rows.astype(np.uint64)])


def _with_equal_hash(stored: UInt64[ndarray, "two rows"], ids: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Numbers of ids, and the rows whose ids have the same hash."""
    hashes, rows = stored
    if not len(ids) or not len(hashes):
        return
    wanted = hash_of(pa.array(ids, pa.string()))
    starts, stops = np.searchsorted(hashes, wanted), np.searchsorted(hashes, wanted, side="right")
    for number in np.flatnonzero(starts < stops).tolist():
        for row in rows[starts[number] : stops[number]].tolist():
            yield number, row


class DocumentStore:
    """Documents of an index version by shard and row, and by id; they are not held in memory.

    Arrow files mapped for random reads: ten documents take tens of microseconds warm and about 10 ms cold.
    Threads may share one.
    """

    def __init__(self, shards: Mapping[int, DocumentRows], *, rows: int) -> None:
        """Take the documents of shards by their numbers, and how many there are."""
        self._shards, self._rows = shards, rows

    @classmethod
    def open(cls, index: Artifact, shards: Sequence[int] | None = None) -> "DocumentStore":
        """Open the documents of shards, None: all; files are checked, and copied here where remote."""
        numbers = range(open_layout(index).shards) if shards is None else shards
        tables = {n: arrow.map_rows(index.local_file(documents_file(n))) for n in numbers}
        opened = {n: DocumentRows(table, open_ids(index, n, rows=len(table))) for n, table in tables.items()}
        return cls(opened, rows=sum(map(len, tables.values())))

    def __len__(self) -> int:
        """Number of documents."""
        return self._rows

    def read(self, shard: int, row: int) -> dict[str, Any]:
        """The document of a row of a shard."""
        return self._shards[shard][row]

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """The document with this id; None where there is none."""
        for rows in self._shards.values():
            if (row := int(rows.find([doc_id])[0])) >= 0:
                return rows[row]
        return None
