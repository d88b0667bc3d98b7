"""Artifacts of passages: what benchmarks of vector databases copy from and search beside.

Passages of real text with their vectors (benchmarks/passages.py), and their tokens as terms, weighted by
(1 + log tf) * idf. A query is the beginning of a passage that is no document.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray
from tokenizers import Tokenizer

from benchmarks import minilm, passages
from benchmarks.plain_embeddings import term_counts
from scalingnote.config import Config
from scalingnote.index import job
from scalingnote.index.config import FastScan, IndexConfig
from scalingnote.models.sparse_query import SparseRows
from scalingnote.quantize.semantic_id import to_table
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.schema import DOCUMENTS, SPARSE

DIM, PART, TOPICS = 128, 50_000, 20
QUERY_WORDS = 8
PROBED, REFINED = 16, 4  # of the index, where a search does not say


class Passages(Config):
    """Stands in for the configs of the stages that would have built these."""

    documents: int


@dataclass(frozen=True)
class Inputs:
    """Artifacts, and the queries asked of them."""

    dataset: Artifact
    embeddings: Artifact
    matrix: Float[ndarray, "documents dim"]
    queries: Float[ndarray, "queries dim"]
    terms: SparseRows  # of the queries


def build(folder: str, *, documents: int, queries: int) -> Inputs:
    """A dataset and its embeddings with terms, below `folder`."""
    texts = passages.texts(documents + queries)
    if len(texts) < documents + queries:
        raise SystemExit(
            f"there are {len(texts):,} passages: ask for up to {len(texts) - queries:,} documents"
        )
    asked = [" ".join(text.split()[:QUERY_WORDS]) for text in texts[documents:]]
    vectors = passages.vectors([*texts[:documents], *asked], dim=DIM)
    tokenizer = Tokenizer.from_file(str(minilm.path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    counts = term_counts(texts[:documents], tokenizer)
    idf = np.log(documents / np.maximum((counts > 0).sum(axis=0).A1, 1)).astype(np.float32)
    weighted = counts.multiply(idf).tocsr()
    weighted.eliminate_zeros()
    weighted.sort_indices()
    query = term_counts(asked, tokenizer)
    query.sort_indices()
    terms = SparseRows(
        query.indptr.astype(np.int64), query.indices.astype(np.int32), query.data.astype(np.float32)
    )
    config = Passages(documents=documents)
    dataset = Draft(f"{folder}/dataset", kind="dataset", config=config, parents={})
    for part, first in enumerate(range(0, documents, PART)):
        rows = range(first, min(first + PART, documents))
        names, own = [f"p{row}" for row in rows], texts[rows.start : rows.stop]
        columns = [names, own, [f"topic {row % TOPICS}" for row in rows], own, names]
        table = pa.table(dict(zip(DOCUMENTS.names, columns, strict=True)), schema=DOCUMENTS)
        dataset.write_table(f"documents/part-{part:05d}.parquet", table)
    stored = dataset.commit(counts={"documents": documents})
    draft = Draft(f"{folder}/embeddings", kind="embeddings", config=config, parents={"dataset": stored})
    for part, first in enumerate(range(0, documents, PART)):
        rows = range(first, min(first + PART, documents))
        own = weighted[rows.start : rows.stop]
        values = (own.indices.astype(np.int32), own.data.astype(np.float16))
        lists = [
            pa.ListArray.from_arrays(pa.array(own.indptr, pa.int32()), pa.array(each, field.type.value_type))
            for field, each in zip(SPARSE, values, strict=True)
        ]
        columns = [
            pa.array(f"p{row}" for row in rows),
            arrow.to_arrow(vectors[rows.start : rows.stop]),
            *lists,
        ]
        table = pa.table(columns, names=["doc_id", "summary", *SPARSE.names])
        draft.write_table(f"embeddings/part-{part:05d}.parquet", table)
    embeddings = draft.commit(counts={"documents": documents})
    return Inputs(stored, embeddings, vectors[:documents], vectors[documents:], terms)


def index(folder: str, inputs: Inputs) -> Artifact:
    """An index of the passages that keeps their vectors as they are; Ray fills it."""
    draft = Draft(
        f"{folder}/semantic_ids",
        kind="semantic_ids",
        config=Passages(documents=len(inputs.matrix)),
        parents={"embeddings": inputs.embeddings},
    )
    for name in inputs.embeddings.names("embeddings/", ".parquet"):
        doc_ids = inputs.embeddings.table(name, ["doc_id"])["doc_id"]
        table = to_table(
            doc_ids, np.zeros((len(doc_ids), 2), np.int32), np.arange(len(doc_ids), dtype=np.int32)
        )
        draft.write_table("codes/" + name.removeprefix("embeddings/"), table)
    config = IndexConfig(
        shards=1, family=FastScan(refine="flat"), nprobe=PROBED, refine_factor=REFINED, filters=("topic",)
    )
    return job.run(
        config,
        dataset=inputs.dataset.uri,
        embeddings=inputs.embeddings.uri,
        semantic_ids=draft.commit(counts={}).uri,
        output=f"{folder}/index",
    )
