"""Parts of the corpus as fusion reads them: embeddings, codes and features of documents, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, Int32
from numpy import ndarray

from scalingnote.errors import ArtifactError
from scalingnote.storage import vectors
from scalingnote.storage.artifact import Artifact

VIEW = "summary"  # the embedding that is searched


@dataclass(frozen=True)
class Corpus:
    """The artifacts that documents come from; their parts have the same names behind the folder."""

    dataset: Artifact
    embeddings: Artifact
    semantic_ids: Artifact


@dataclass(frozen=True)
class DocumentRows:
    """Some documents: ids and features, plain embeddings, and the codes of their semantic IDs."""

    table: pa.Table
    embeddings: Float32[ndarray, "docs dim"]
    codes: Int32[ndarray, "docs levels"]


def read_part(corpus: Corpus, part: str, columns: Sequence[str]) -> DocumentRows:
    """The documents of an embeddings part, in its order, with these feature columns.

    ArtifactError when one of them has no document or no semantic ID: they belong to other runs.
    """
    name = part.removeprefix("embeddings/")
    found = corpus.embeddings.table(part, ["doc_id", VIEW])
    doc_ids = found["doc_id"]
    features = _aligned(
        corpus.dataset.table(f"documents/{name}", ["doc_id", *columns]), doc_ids, "document in the dataset"
    )
    codes = _aligned(corpus.semantic_ids.table(f"codes/{name}", ["doc_id", "codes"]), doc_ids, "semantic ID")
    return DocumentRows(features, vectors.to_numpy(found[VIEW]), code_matrix(codes["codes"]))


def code_matrix(column: pa.ChunkedArray) -> Int32[ndarray, "docs levels"]:
    """A column of codes as a matrix."""
    return vectors.matrix_of(column).astype(np.int32)


def _aligned(table: pa.Table, doc_ids: pa.ChunkedArray, what: str) -> pa.Table:
    rows = pc.index_in(doc_ids, table["doc_id"])
    if rows.null_count:
        first = doc_ids.filter(rows.is_null())[0].as_py()
        raise ArtifactError(
            f"{rows.null_count} embeddings, first of {first!r}, have no {what}: re-run the stages between"
        )
    same = len(table) == len(doc_ids) and pc.all(pc.equal(doc_ids, table["doc_id"])).as_py()
    return table if same else table.take(rows)
