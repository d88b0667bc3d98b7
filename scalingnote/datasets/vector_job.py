"""The stage teacher for given vectors: files of texts and vectors become `query_embeddings`.

Vectors are in Parquet, JSON lines, or rows of .npy together with a file of texts. Texts are read and checked
like documents; a title is put before its text. Unusable rows are set aside with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.core.log import Progress, get_logger
from scalingnote.datasets.column_checks import check_table
from scalingnote.datasets.config import VectorsConfig
from scalingnote.datasets.documents import rechunk
from scalingnote.datasets.file_heads import LISTS, FileHead, list_columns
from scalingnote.datasets.input_files import File, Quarantine, cut, find_files, shown_row
from scalingnote.datasets.layouts import FileLayout, find_layouts
from scalingnote.datasets.readers import count_rows, document_slices
from scalingnote.datasets.tables import column_schema, read_tables, table_format
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.shuffle import hash_of

VECTOR_NAMES = ("vector", "embedding")
BLOCK_ROWS = 4096
_TEXT_SUFFIXES = (".parquet", ".jsonl", ".txt", ".tsv")
log = get_logger("datasets")


def run(config: VectorsConfig, *, output: str) -> Artifact:
    """Build the artifact `query_embeddings` of a file; its table `rejected` has the rows that are set aside.

    Some of the queries are held out, or of the texts if there are no queries.

    Raises:
        DataError: a file cannot be read, or the vectors of texts and queries have different lengths.
    """
    draft = Draft(output, kind="query_embeddings", config=config, parents={})
    if draft.finished:
        return draft.existing()
    draft.discard_parts()  # the files may have changed since an interrupted run
    sources = open_files(config)
    counts = {"queries": 0, "validation": 0}
    for number, files in enumerate(sources):
        share = config.validation_share if files is sources[-1] else 0.0
        with Progress("datasets", total=0, unit=f"texts with vectors of {files.path}") as progress:
            for block, table in enumerate(files.tables()):
                if files.dim != sources[0].dim:
                    raise DataError(
                        f"{files.path} has vectors of {files.dim:,} values, {sources[0].path} of "
                        f"{sources[0].dim:,}: use vectors of one model for both"
                    )
                held_out = hash_of(table["query"]) < share * 2.0**64
                split = pa.array(
                    ["validation" if is_held_out else "train" for is_held_out in held_out.tolist()]
                )
                draft.write_table(
                    f"embeddings/part-{number}-{block:05d}.parquet", table.append_column("split", split)
                )
                counts["queries"] += len(table)
                counts["validation"] += int(held_out.sum())
                progress.advance(len(table))
        if files.quarantine.rejected:
            log.warning("%s%s", files.path, files.quarantine.reasons())
    draft.write_table("rejected.parquet", pa.concat_tables(files.quarantine.table() for files in sources))
    reasons = Counter[str]()
    for files in sources:
        for key, count in files.quarantine.rejected.items():
            reasons[key.partition(": ")[2]] += count
    counts["rejected"] = reasons.total()
    return draft.commit(counts=counts, similarity="cosine", rejected_by_reason=dict(reasons))


def open_files(config: VectorsConfig) -> list["VectorFiles"]:
    """Open the files of texts and that of queries, and find their columns, before any row is read."""
    columns = {str(ours): theirs for ours, theirs in config.columns.items()}
    opened = [VectorFiles(config.path, texts=config.texts, columns=columns)]
    if config.queries is not None:
        opened.append(VectorFiles(config.queries, texts=None, columns=columns))
    return opened


# --- files ------------------------------------------------------------------------------------------------


class VectorFiles:
    """The usable rows of files, each text once; all vectors have the length of the first ones."""

    def __init__(self, path: str, *, texts: str | None, columns: Mapping[str, str]) -> None:
        """Find the files' columns.

        Args:
            path: .parquet, .jsonl, or one .npy file.
            texts: the file of texts of a .npy file.
            columns: our names (title, content, vector) -> those of the files, if these are not known names.

        Raises:
            DataError: there is no file; texts or vectors have no clear column, or their numbers differ.
        """
        self.path, self.quarantine, self.dim = path, Quarantine(), 0
        self._seen: set[int] = set()
        self._matrix: ndarray | None = None
        self._features = column_schema({} if path.endswith(".npy") else {"vector": "vector"})
        of_texts = {ours: theirs for ours, theirs in columns.items() if ours != "vector"}
        if path.endswith(".npy"):
            if texts is None:
                raise DataError(
                    f"{path} holds only vectors: give the file of their texts, row by row, by --texts"
                )
            self._matrix, layouts = _load_matrix(path), _layouts(texts, _TEXT_SUFFIXES, of_texts)
            rows = sum(map(count_rows, cut([*layouts])))
            if rows != len(self._matrix):
                raise DataError(
                    f"{path} has {len(self._matrix):,} rows, {texts} {rows:,} texts (without blank lines): "
                    "give one text for each row, in the same order"
                )
        else:
            if texts is not None:
                raise DataError(f"{path} has its own texts: leave --texts {texts} out, or give a .npy file")
            layouts = {
                file: _with_vectors(layout, columns.get("vector"))
                for file, layout in _layouts(path, (".parquet", ".jsonl"), of_texts).items()
            }
        self._slices = document_slices(layouts, numbered=True)

    def tables(self) -> Iterator[pa.Table]:
        """Yield blocks of rows as ``query_id``, ``query`` and ``embedding``; DataError if none is usable."""
        for block in rechunk(self._checked_rows(), BLOCK_ROWS):
            texts = pc.binary_join_element_wise(block["title"], block["content"], " ")
            usable_rows = [
                (text, vector)
                for text, vector in zip(
                    pc.utf8_trim_whitespace(texts).to_pylist(), self._vectors(block), strict=True
                )
                if self._is_good(text, vector)
            ]
            if usable_rows:
                query = pa.array([text for text, _ in usable_rows], pa.string())
                columns = {
                    "query_id": pa.array([f"text {number:016x}" for number in hash_of(query).tolist()]),
                    "query": query,
                    "embedding": arrow.to_arrow(np.stack([vector for _, vector in usable_rows])),
                }
                yield pa.table(columns)
        if not self._seen:
            raise DataError(f"{self.path} has no text with a vector{self.quarantine.reasons()}")

    def _checked_rows(self) -> Iterator[pa.Table]:
        """Yield the rows with a text; their doc_id is their number."""
        form = table_format("documents", self._features)
        for rows in self._slices:
            for table in read_tables(rows, form, quarantine=self.quarantine):
                yield check_table(table, "documents", features=self._features, quarantine=self.quarantine)

    def _vectors(self, block: pa.Table) -> ndarray:
        """Return the vector of each row; None if it has none."""
        if self._matrix is None:
            lists: ndarray = block["vector"].combine_chunks().to_numpy(zero_copy_only=False)
            return lists
        numbers = block["doc_id"].cast(pa.int64()).to_numpy()
        return np.asarray(self._matrix[numbers - 1], np.float32)

    def _is_good(self, text: str, vector: Float[ndarray, " dim"] | None) -> bool:
        reason = ""
        if vector is None or not len(vector):
            reason = "no vector"
        elif not np.isfinite(vector).all() or not vector.any():
            reason = "a vector that is 0, or has a value that is not a finite number"
        elif len(vector) != (self.dim or len(vector)):
            reason = f"a vector of another length than {self.dim}, the length of the first one"
        elif (key := hash(text)) in self._seen:
            reason = "a text that occurred before"
        else:
            self.dim = len(vector)
            self._seen.add(key)
        if reason:
            self.quarantine.reject("vectors", shown_row(text), reason)
        return not reason


def _layouts(path: str, suffixes: tuple[str, ...], columns: dict[str, str]) -> dict[File, FileLayout]:
    files = find_files(path, suffixes)
    if empty := [file.uri for file in files if not file.size]:
        raise DataError(f"{empty[0]} is empty: leave it out, or write it again")
    return find_layouts(files, columns, names=("title", "content"), numbered=True)


def _with_vectors(layout: FileLayout, chosen: str | None) -> FileLayout:
    """Add the column of vectors to a layout; DataError if there is no clear one."""
    column = _vector_column(layout.head) if chosen is None else chosen
    if column not in layout.head.kinds:
        raise DataError(f"{layout.head.uri} {layout.head.lack([column])}")
    if layout.head.kind(column) not in (LISTS, ""):
        raise DataError(
            f"{layout.head.uri}: column {column!r} does not hold lists of numbers: choose another one"
        )
    return replace(layout, columns={**layout.columns, "vector": column})


def _vector_column(head: FileHead) -> str:
    lists = [name for name in head.kinds if head.kind(name) == LISTS]
    candidates = [name for name in VECTOR_NAMES if name in lists] or lists
    if len(candidates) == 1:
        return candidates[0]
    state = f"several, {list_columns(candidates)}" if candidates else f"none in {list_columns(head.kinds)}"
    raise DataError(
        f"{head.uri}: the column of vectors (lists of numbers) is not clear, there are {state}: choose "
        "one by --set vectors.columns.vector=NAME"
    )


def _load_matrix(path: str) -> ndarray:
    """Map the rows of a .npy file into memory."""
    (file,) = find_files(path, (".npy",))
    try:
        matrix: ndarray = np.load(file.uri, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is not a .npy file of numbers ({error}): write it by numpy.save") from None
    if matrix.ndim != 2 or not np.issubdtype(matrix.dtype, np.number):
        shape = " x ".join(map(str, matrix.shape))
        raise DataError(f"{path} holds {shape} of {matrix.dtype}: give a matrix with a row per text")
    return matrix
