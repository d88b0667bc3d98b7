"""An embeddings artifact as a pool of documents: read part by part, scored exactly.

Its documents have an embedding, and terms too where their tower has a sparse head, or BM25 weights words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.errors import ArtifactError
from scalingnote.evaluate import exact
from scalingnote.evaluate.exact import Found, Part
from scalingnote.lexical import weights
from scalingnote.log import Progress
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.storage import vectors
from scalingnote.storage.artifact import Artifact

INDEXED_VIEW = "summary"
_PAIRS_AT_ONCE = 65_536


def search(
    embeddings: Artifact,
    score: exact.Score,
    *,
    queries: int,
    k: int,
    dim: int | None = None,
    terms: int | None = None,
    words: Artifact | None = None,
) -> Found:
    """The true answer: every document scored, by its embedding (of `dim` values), its `terms`, or both.

    Terms are those of `words`, an artifact `bm25_terms`, or else those encoded beside the embeddings.
    """
    total = embeddings.counts["documents"]
    with Progress("evaluate", total=total, unit="documents searched") as progress:
        parts = _parts(embeddings, progress, dim=dim, terms=terms, words=words)
        return exact.search(parts, score, queries=queries, k=k)


def named(embeddings: Artifact, rows: Int[ndarray, "queries k"]) -> tuple[Int[ndarray, " found"], pa.Array]:
    """The rows that were found, ascending and each once, and their documents' ids; below 0 is none."""
    wanted = np.unique(rows[rows >= 0])
    found, start = [pa.array([], pa.string())], 0
    for batch in embeddings.batches("embeddings", columns=["doc_id"]):
        inside = slice(*np.searchsorted(wanted, (start, start + len(batch))))
        found.append(batch["doc_id"].take(pa.array(wanted[inside] - start)))
        start += len(batch)
    return wanted, pa.concat_arrays(found)


def gather(
    embeddings: Artifact, doc_ids: Sequence[str]
) -> tuple[Float[ndarray, "docs dim"], Bool[ndarray, " docs"]]:
    """The embeddings of some documents, and which of them are in the pool; the others' are 0."""
    wanted = pa.array(doc_ids, pa.string())
    found, known = np.zeros((len(doc_ids), 0), np.float32), np.zeros(len(doc_ids), bool)
    for name in embeddings.names("embeddings/", ".parquet"):
        table = embeddings.table(name, columns=["doc_id", INDEXED_VIEW])
        place, here = _places(wanted, table)
        documents = vectors.to_numpy(table[INDEXED_VIEW])
        if not found.size:
            found = np.zeros((len(doc_ids), documents.shape[1]), np.float32)
        found[here], known[here] = documents[place[here]], True
    return found, known


def score_pairs(
    embeddings: Artifact,
    queries: Float[ndarray, "queries dim"],
    rows: Int[ndarray, " pairs"],
    doc_ids: Sequence[str],
) -> Float[ndarray, " pairs"]:
    """Inner products of ``queries[rows[i]]`` with document ``doc_ids[i]``; NaN for one not in the pool."""
    wanted = pa.array(doc_ids, pa.string())
    scores = np.full(len(doc_ids), np.nan)
    for name in embeddings.names("embeddings/", ".parquet"):
        table = embeddings.table(name, columns=["doc_id", INDEXED_VIEW])
        place, here = _places(wanted, table)
        documents = vectors.to_numpy(table[INDEXED_VIEW])
        for start in range(0, len(here), _PAIRS_AT_ONCE):
            some = here[start : start + _PAIRS_AT_ONCE]
            scores[some] = np.einsum("pd,pd->p", queries[rows[some]], documents[place[some]])
    return scores


def _places(wanted: pa.Array, table: pa.Table) -> tuple[Int[ndarray, " wanted"], Int[ndarray, " here"]]:
    """The row of each wanted document in a part, below 0 for none; and which of them have one."""
    place = pc.fill_null(pc.index_in(wanted, value_set=table["doc_id"].combine_chunks()), -1).to_numpy()
    return place, np.flatnonzero(place >= 0)


def _parts(
    embeddings: Artifact, progress: Progress, *, dim: int | None, terms: int | None, words: Artifact | None
) -> Iterator[Part]:
    own = ["terms", "impacts"] if words is None else ["doc_id"]
    columns = [INDEXED_VIEW] * (dim is not None) + own * (terms is not None)
    for name in embeddings.names("embeddings/", ".parquet"):
        table = embeddings.table(name, columns=columns)
        dense = vectors.to_numpy(table[INDEXED_VIEW]) if dim is not None else None
        if dense is not None and dense.shape[1] != dim:
            raise ArtifactError(
                f"the query tower gives {dim} dimensions, {embeddings.uri} has "
                f"{dense.shape[1]}: evaluate with towers that were trained together"
            )
        sparse = None
        if terms is not None:
            rows = table
            if words is not None:
                rows = weights.read_columns(words, name.removeprefix("embeddings/"), table["doc_id"])
            sparse = exact.document_matrix(rows["terms"], rows["impacts"], vocabulary=terms)
        yield Part(dense, sparse)
        progress.advance(len(table))


@dataclass(frozen=True)
class SparseQueries:
    """Queries as terms."""

    matrix: Any  # csr_array [queries, vocabulary]
    vocabulary: int
    words: Artifact | None = None  # that has the documents' terms, where the embeddings have not


def has_terms(embeddings: Artifact, towers: Artifact | None) -> bool:
    """Whether documents were encoded by `towers`, and these have a sparse head."""
    own = towers is not None and "dual_encoder" in embeddings.manifest.parents
    return towers is not None and own and bool(towers.names("sparse_query/"))


def sparse_queries(
    embeddings: Artifact, towers: Artifact | None, queries: Sequence[str]
) -> SparseQueries | None:
    """Queries as terms for documents that `towers` have encoded; None where these have no sparse head."""
    if towers is None or not has_terms(embeddings, towers):
        return None
    return _as_terms(towers, queries)


def bm25_queries(words: Artifact, queries: Sequence[str]) -> SparseQueries:
    """Queries as words for documents whose words are weighted in `words`, an artifact `bm25_terms`."""
    return replace(_as_terms(words, queries), words=words)


def _as_terms(source: Artifact, queries: Sequence[str]) -> SparseQueries:
    sparse = SparseQuery.load(source.directory("sparse_query"))
    rows, vocabulary = sparse.encode(queries), sparse.vocabulary
    return SparseQueries(exact.query_matrix(rows, vocabulary=vocabulary), vocabulary)
