"""A shard: its files, its vectors, and their documents in rows with the same numbers.

    lists.faiss, kept.faiss, sparse.*.npy    vectors and terms        ┐
    columns.arrow                            ids and filter columns   ├ files that a searcher opens
    ids.npy                                  id ─► row                ┘
    documents.arrow                          title and snippet for answers: the document store

A searcher of a built index never opens the documents: the process that builds the answer reads the documents
of its k results from a :class:`DocumentStore`, by shard and row. All of these files are mapped; only lists of
fast scan and RaBitQ are copied to memory.

Shards are contiguous ranges of the corpus: each reads only its own parts, and row order is corpus order.
If neighbouring documents are similar, one shard may contain most of the documents that a query scans. This
shifts work between shards, but never changes the merged answer, because all shards share one quantizer.
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
COARSE = "coarse.faiss"  # the centroids that all shards share
_COARSE: WeakValueDictionary[str, Any] = WeakValueDictionary()  # by the checksum of the file
LAYOUT_FILE = "index.json"
ID_ROW_BYTES = 16  # bytes of a document in the file of :func:`sorted_ids`


@dataclass(frozen=True)
class IndexLayout:
    """Properties of an index that are required to open a shard: the contents of index.json."""

    dim: int
    documents: int
    shards: int
    family: str
    refine: Refine
    nlist: int
    nprobe: int
    refine_factor: int
    recall: float | None  # measured with nprobe and refine_factor; None if they were not tuned
    filters: tuple[str, ...]
    sparse: bool = False  # whether documents have terms
    background: float | None = None  # mean score of a query and a random document, if measured
    dense_weight: float | None = None  # weight of dense scores in hybrid search, if tuned
    similarity: Similarity = "cosine"  # dot: vectors of documents are not normalised to length 1
    passages: bool = False  # whether rows are passages of documents; `documents` counts passages then

    def fields(self, documents: pa.Schema) -> pa.Schema:
        """Return the fields by which a search may filter, from the schema of a shard's documents."""
        return pa.schema([documents.field(name) for name in self.filters])


@dataclass(frozen=True)
class EmbeddingSlice:
    """Rows `start` to `stop` (excluded) of one part of the embeddings."""

    part: str
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """A shard that is open for search.

    `documents` has all columns, or only ids and filter columns; it is memory-mapped if the index is local.
    """

    number: int
    lists: ivf.Lists
    documents: pa.Table
    postings: Postings | None = None
    ids: UInt64[ndarray, "two rows"] | None = None  # see :func:`sorted_ids`; None: computed when needed

    @cached_property
    def rows(self) -> "DocumentRows":
        """Documents by row and by id."""
        return DocumentRows(self.documents, self.ids)


def assign(parts: Sequence[str], rows: Sequence[int], *, shards: int) -> list[list[EmbeddingSlice]]:
    """Divide parts into `shards` contiguous ranges with sizes that differ by at most one row."""
    firsts = [*accumulate(rows, initial=0)]
    bounds = [firsts[-1] * number // shards for number in range(shards + 1)]
    assignment = []
    for start, stop in pairwise(bounds):
        slices = []
        for part in range(bisect_right(firsts, start) - 1, bisect_left(firsts, stop)):
            first, last = max(start, firsts[part]), min(stop, firsts[part + 1])
            if first < last:
                slices.append(EmbeddingSlice(parts[part], first - firsts[part], last - firsts[part]))
        assignment.append(slices)
    return assignment


def documents_file(number: int) -> str:
    """Return the name of the file of a shard's documents."""
    return f"shard-{number:05d}/documents.arrow"


def columns_file(number: int) -> str:
    """Return the name of the file of the ids and filter columns of a shard's documents."""
    return f"shard-{number:05d}/columns.arrow"


def ids_file(number: int) -> str:
    """Return the name of the file of a shard's :func:`sorted_ids`."""
    return f"shard-{number:05d}/ids.npy"


def vector_files(number: int, *, family: str, refine: Refine) -> list[str]:
    """Return the names of the files of a shard's inverted lists and kept vectors, if the family has them."""
    names = {"lists.faiss": family != "flat", "kept.faiss": refine != "none"}
    return [f"shard-{number:05d}/{name}" for name, is_there in names.items() if is_there]


def term_files(number: int) -> dict[str, str]:
    """Map each name in :data:`postings.POSTING_FILES` to the part of the artifact for this shard."""
    return {name: f"shard-{number:05d}/{name}" for name in postings.POSTING_FILES}


def document_columns(filters: Sequence[str], *, passages: bool = False) -> list[str]:
    """Return the columns of the dataset's documents that a shard reads."""
    passage_columns = PASSAGE.names if passages else []
    return [*dict.fromkeys(("doc_id", "title", "topic", "content", *filters, *passage_columns))]


def searched_columns(filters: Sequence[str]) -> list[str]:
    """Return the columns of a shard's documents that searchers open."""
    return [*dict.fromkeys(("doc_id", *filters))]


def document_rows(
    doc_ids: pa.ChunkedArray, *, documents: pa.Table, semantic_ids: pa.Table, snippet_chars: int
) -> pa.Table:
    """Build rows of a shard's document table.

    Args:
        doc_ids: of the rows, in order.
        documents: table with :func:`document_columns`; columns not in SHARD_DOCUMENTS are appended.
        semantic_ids: table with `doc_id` and `semantic_id`.
        snippet_chars: length of the snippet.

    Raises:
        ArtifactError: a doc_id has no document or no semantic ID, because they come from other datasets.
    """
    origin = "row in the dataset: embeddings and dataset differ in origin"
    matching = arrow.take_documents(documents, doc_ids, missing=origin)
    semantic = arrow.take_documents(
        semantic_ids, doc_ids, missing="semantic ID: re-run quantize on these embeddings"
    )
    # Runs of white space become one space before the cut, so that snippets use their full length.
    opening = pc.utf8_slice_codeunits(matching["content"].fill_null(""), 0, 8 * snippet_chars)
    line = pc.utf8_trim_whitespace(pc.replace_substring_regex(opening, r"\s+", " "))
    snippet = pc.utf8_slice_codeunits(line, 0, snippet_chars)
    title, topic = (matching[name].fill_null("") for name in ("title", "topic"))
    columns = [doc_ids, title, topic, snippet, semantic["semantic_id"]]
    rows = pa.table(dict(zip(SHARD_DOCUMENTS.names, columns, strict=True)), schema=SHARD_DOCUMENTS)
    for name in matching.column_names:
        if name not in {*SHARD_DOCUMENTS.names, "content"}:
            rows = rows.append_column(matching.schema.field(name), matching[name])
    return rows


def write_shard(
    folder: str, number: int, *, layout: IndexLayout, lists: ivf.Lists, documents: pa.Table, terms: Postings
) -> dict[str, Part]:
    """Write the files of a shard in `folder`; `terms` are ignored if the index has no terms."""
    names = vector_files(number, family=layout.family, refine=layout.refine)
    files = dict(zip(names, ivf.dump_files(lists), strict=True))
    if layout.sparse:
        term_parts = term_files(number)
        files |= {term_parts[name]: data for name, data in postings.dump(terms).items()}
    files[ids_file(number)] = arrow.npy_bytes(sorted_ids(documents["doc_id"]))
    parts = {name: write_file(fs.join(folder, name), data) for name, data in files.items()}
    # One batch, because opening reads the head of each batch, and Linux maps up to 2 MB around each head.
    columns = documents.select(searched_columns(layout.filters)).combine_chunks()
    tables = {columns_file(number): columns, documents_file(number): documents}
    parts |= {name: write_table(fs.join(folder, name), table) for name, table in tables.items()}
    # A document has a row in both tables, but must be counted once.
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

    Indexes in this process with equal quantizers (versions of a live index, a delta) share one object, so
    that a search over several of them chooses lists once.
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
    """Check the files of a shard against the manifest, because faiss has no checksums, and open the shard.

    Args:
        index: the artifact.
        number: of the shard.
        layout: of the index.
        coarse: from :func:`open_coarse`.
        mapped: memory-map inverted lists and kept vectors read-only, so that processes of a machine share
            them; a remote file is copied to this machine first. Lists of fast scan and RaBitQ are still read
            to memory, because faiss cannot map their blocks.
        columns_only: open only ids and filter columns; a :class:`DocumentStore` has the documents.

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
    """Open ids and filter columns of a shard's documents; all columns in an index of an earlier release."""
    name = columns_file(number)
    return index.table(name if name in index.manifest.parts else documents_file(number))


def open_ids(index: Artifact, number: int, *, rows: int) -> UInt64[ndarray, "two rows"] | None:
    """Map the ids file of a shard to memory; None in an index of an earlier release."""
    name = ids_file(number)
    if name not in index.manifest.parts:
        return None
    ids: ndarray = np.load(index.local_file(name), mmap_mode="r", allow_pickle=False)
    if ids.shape != (2, rows) or ids.dtype != np.uint64:
        raise ArtifactError(f"{index.uri}: {name} does not have {rows} documents: re-run index")
    return ids


def sorted_ids(doc_ids: pa.ChunkedArray) -> UInt64[ndarray, "two rows"]:
    """Sort the hashes of document ids in ascending order, with the row of each: 16 bytes per document.

    Raises:
        ArtifactError: an id occurs twice, so a write to it would be ambiguous.
    """
    hashes = hash_of(doc_ids)
    rows = np.argsort(hashes, kind="stable")
    hashes = hashes[rows]
    equal = np.flatnonzero(hashes[1:] == hashes[:-1])
    names = [doc_ids[row].as_py() for row in rows[np.union1d(equal, equal + 1)].tolist()]
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ArtifactError(
            f"doc_id {repeated!r} is in the shard twice: re-run prepare, which removes repeats"
        )
    return np.stack([hashes, rows.astype(np.uint64)])


class DocumentRows:
    """Documents of a shard by row, and rows by the ids of documents. Threads may share one instance.

    A dictionary of the ids would take ten times the 16 bytes of :func:`sorted_ids`. Hashes may collide, so
    :meth:`find` compares the stored id, too.

    Args:
        documents: of the shard, with all or some columns.
        ids: :func:`sorted_ids` of these documents; None: computed when needed.
    """

    def __init__(self, documents: pa.Table, ids: UInt64[ndarray, "two rows"] | None = None) -> None:
        self._stored, self._doc_ids, self._ids = StoredRows(documents), documents["doc_id"], ids

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._stored[row]

    def find(self, doc_ids: Sequence[str]) -> Int64[ndarray, " ids"]:
        """Find the row of each id, -1 if it is unknown; raise a DataError if an id is not a string."""
        wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str)]
        if wrong:
            raise DataError(f"{wrong[0]!r} is not a doc_id: pass strings")
        rows = np.full(len(doc_ids), -1, np.int64)
        for number, row in _with_equal_hash(self._sorted, doc_ids):
            if self._doc_ids[row].as_py() == doc_ids[number]:
                rows[number] = row
        return rows

    def find_all(self, document_ids: Sequence[str], *, passages: bool) -> Int64[ndarray, " rows"]:
        """Find the rows of documents, with `passages` those of all passages; unknown ids are left out."""
        if not passages:
            rows = self.find(document_ids)
            return rows[rows >= 0]
        passage_rows = [
            row
            for number, row in _with_equal_hash(self._sorted_by_document, document_ids)
            if document_of(self._doc_ids[row].as_py()) == document_ids[number]
        ]
        return np.array(passage_rows, np.int64)

    @cached_property
    def _sorted(self) -> UInt64[ndarray, "two rows"]:
        return sorted_ids(self._doc_ids) if self._ids is None else self._ids

    @cached_property
    def _sorted_by_document(self) -> UInt64[ndarray, "two rows"]:
        """Like :func:`sorted_ids`, but with the ids of the documents instead of their passages."""
        hashes = hash_of(pc.replace_substring_regex(self._doc_ids, r"#[^#]*$", ""))  # same as document_of
        rows = np.argsort(hashes, kind="stable")
        return np.stack([hashes[rows], rows.astype(np.uint64)])


def _with_equal_hash(
    sorted_hashes: UInt64[ndarray, "two rows"], ids: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of the position of an id in `ids` and a row with an id of the same hash."""
    hashes, rows = sorted_hashes
    if not len(ids) or not len(hashes):
        return
    id_hashes = hash_of(pa.array(ids, pa.string()))
    starts, stops = np.searchsorted(hashes, id_hashes), np.searchsorted(hashes, id_hashes, side="right")
    for number in np.flatnonzero(starts < stops).tolist():
        for row in rows[starts[number] : stops[number]].tolist():
            yield number, row


class DocumentStore:
    """Documents of an index version by shard and row, and by id, read from mapped files.

    The files are mapped for random reads: reading ten documents takes tens of microseconds if the pages are
    cached, and about 10 ms if not. Threads may share one instance.
    """

    def __init__(self, shards: Mapping[int, DocumentRows], *, rows: int) -> None:
        """Take the documents of shards by their numbers, and the total number of documents."""
        self._shards, self._rows = shards, rows

    @classmethod
    def open(cls, index: Artifact, shards: Sequence[int] | None = None) -> "DocumentStore":
        """Open the documents of shards (None: all); check the files, and copy remote ones to this machine."""
        numbers = range(open_layout(index).shards) if shards is None else shards
        tables = {n: arrow.map_rows(index.local_file(documents_file(n))) for n in numbers}
        rows_of = {n: DocumentRows(table, open_ids(index, n, rows=len(table))) for n, table in tables.items()}
        return cls(rows_of, rows=sum(map(len, tables.values())))

    def __len__(self) -> int:
        """Return the number of documents."""
        return self._rows

    def read(self, shard: int, row: int) -> dict[str, Any]:
        """Read the document in a row of a shard."""
        return self._shards[shard][row]

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """Return the document with this id; None if there is none."""
        for rows in self._shards.values():
            if (row := int(rows.find([doc_id])[0])) >= 0:
                return rows[row]
        return None
