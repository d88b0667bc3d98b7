"""Small corpora for the tests of quantize, index and search: clustered unit vectors in artifacts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from scalingnote.core.config import Config
from scalingnote.quantize.semantic_id import to_table
from scalingnote.storage.arrow import to_arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.schema import DOCUMENTS, SPARSE

NOTHING: Mapping[str, pa.Table] = MappingProxyType({})


class Settings(Config):
    """Config of these artifacts, instead of those of the stages."""

    seed: int = 0


def vectors(count: int, dim: int, *, seed: int = 0, clusters: int | None = None) -> np.ndarray:
    """Draw unit vectors in clusters, with a spectrum that falls by a power law like text embeddings."""
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1, dim + 1) ** -0.5
    centres = rng.standard_normal((clusters or max(4, count // 40), dim)) * spectrum
    popularity = 1 / np.arange(1, len(centres) + 1) ** 0.7
    cluster_numbers = rng.choice(len(centres), count, p=popularity / popularity.sum())
    return unit(centres[cluster_numbers] + 0.5 * rng.standard_normal((count, dim)) * spectrum)


def queries(documents: np.ndarray, count: int, *, seed: int = 1) -> np.ndarray:
    """Draw documents and perturb them."""
    rng = np.random.default_rng(seed)
    chosen_documents = documents[rng.choice(len(documents), count, replace=len(documents) < count)]
    noise = rng.standard_normal(chosen_documents.shape) * 0.4 / np.sqrt(chosen_documents.shape[1])
    return unit(chosen_documents + noise)


def unit(matrix: np.ndarray) -> np.ndarray:
    return (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float32)


def dataset(uri: str, *, sizes: list[int], tables: Mapping[str, pa.Table] = NOTHING) -> Artifact:
    """Build a dataset of documents d0, d1, ... in parts of these sizes, and of further tables."""
    draft = Draft(uri, kind="dataset", config=Settings(), parents={})
    first = 0
    for number, size in enumerate(sizes):
        names = range(first, first + size)
        columns = {
            "doc_id": [f"d{i}" for i in names],
            "title": [f"Title {i}" for i in names],
            "topic": [f"topic {i % 7}" for i in names],
            "content": [f"Text  of\ndocument {i}. " * 30 for i in names],
            "group": [f"g{i}" for i in names],
        }
        draft.write_table(f"documents/part-{number:05d}.parquet", pa.table(columns, schema=DOCUMENTS))
        first += size
    for name, table in tables.items():
        draft.write_table(f"{name}.parquet", table)
    return draft.commit(counts={"documents": first})


def embeddings(
    uri: str,
    matrix: np.ndarray,
    *,
    parent: Artifact,
    sizes: list[int],
    missing: tuple[int, ...] = (),
    sparse: bool = False,
) -> Artifact:
    """Build embeddings: row i of `matrix` is the summary of document d<i>; rows in `missing` are left out.

    The terms of a `sparse` document are the digits of its number; the impact of a digit is its count.
    """
    draft = Draft(uri, kind="embeddings", config=Settings(), parents={"dataset": parent})
    first = 0
    for number, size in enumerate(sizes):
        rows = [i for i in range(first, first + size) if i not in missing]
        table = pa.table({"doc_id": [f"d{i}" for i in rows], "summary": to_arrow(matrix[rows])})
        if sparse:
            terms = [sorted({int(digit) for digit in str(i)}) for i in rows]
            impacts = [
                [np.float16(str(i).count(str(term))) for term in terms[at]] for at, i in enumerate(rows)
            ]
            for field, values in zip(SPARSE, (terms, impacts), strict=True):
                table = table.append_column(field, pa.array(values, field.type))
        draft.write_table(f"embeddings/part-{number:05d}.parquet", table)
        first += size
    return draft.commit(counts={"documents": len(matrix) - len(missing)})


def semantic_ids(uri: str, source: Artifact, *, numbered: bool = False) -> Artifact:
    """Build IDs "1-0-<number of the document>": the number in its id, or, if `numbered`, that of its row."""
    draft = Draft(uri, kind="semantic_ids", config=Settings(), parents={"embeddings": source})
    first = 0
    for name in source.names("embeddings/", ".parquet"):
        doc_ids = source.table(name, ["doc_id"])["doc_id"]
        rows = range(first, first := first + len(doc_ids))
        numbers = rows if numbered else [int(doc_id[1:]) for doc_id in doc_ids.to_pylist()]
        codes = np.tile([1, 0], (len(numbers), 1))
        table = to_table(doc_ids, codes, np.array(numbers, np.int32))
        draft.write_table("codes/" + name.removeprefix("embeddings/"), table)
    return draft.commit(counts={})


@dataclass(frozen=True)
class Corpus:
    """The parents of an index."""

    matrix: np.ndarray
    uris: dict[str, str]

    @classmethod
    def build(
        cls,
        base: str,
        *,
        sizes: list[int],
        dim: int,
        missing: tuple[int, ...] = (),
        seed: int = 0,
        sparse: bool = False,
        tables: Mapping[str, pa.Table] = NOTHING,
    ) -> "Corpus":
        matrix = vectors(sum(sizes), dim, seed=seed)
        documents = dataset(f"{base}/dataset", sizes=sizes, tables=tables)
        vectors_artifact = embeddings(
            f"{base}/embeddings", matrix, parent=documents, sizes=sizes, missing=missing, sparse=sparse
        )
        ids_artifact = semantic_ids(f"{base}/semantic_ids", vectors_artifact)
        uris = {
            "dataset": documents.uri,
            "embeddings": vectors_artifact.uri,
            "semantic_ids": ids_artifact.uri,
        }
        return cls(matrix, uris)
