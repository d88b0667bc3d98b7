"""New documents for an index: the steps of the offline stages, for single documents or files of them.

    documents ─tokenise─► token rows ─tower─► embeddings ─codebooks─► codes ─fusion─► final embeddings
    documents ─BM25 by the collection's statistics, or a sparse head─► terms
    mappings (JSON) ─► documents ─► final embeddings ─► rows of the document store, vectors
    file ─► dataset of new documents ─DocumentFlow, part by part─► ready/part-*.parquet, rejected.parquet

So a document that is encoded by itself gets the same result as in the corpus.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Float
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.core import cluster
from scalingnote.core.bm25 import document_texts
from scalingnote.core.log import get_logger
from scalingnote.datasets import job as datasets
from scalingnote.datasets.config import NewDocuments, TableFile
from scalingnote.datasets.file_heads import columns_of
from scalingnote.datasets.input_files import find_files
from scalingnote.datasets.passages import PassageSplitter, settings
from scalingnote.datasets.readers import NEW_SUFFIXES
from scalingnote.datasets.tables import COLUMN_TYPES
from scalingnote.encode.config import IngestConfig
from scalingnote.encode.documents import content_hashes, tokenise, write_rejected
from scalingnote.encode.engines import Cost, load_document_encoder, load_document_prompt
from scalingnote.encode.lengths import cut_of
from scalingnote.encode.lexical.weights import BM25Weights
from scalingnote.encode.parts import EncodedPart, Rejections, write_parts
from scalingnote.index.shard import document_rows
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.quantize import kmeans, semantic_id
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema
from scalingnote.storage.arrow import as_searched, dtype_of, to_arrow, to_matrix, to_numpy
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.storage.schema import (
    DOCUMENT_COLUMNS,
    INDEXED_VIEW,
    PASSAGE,
    SPARSE,
    TEXT_COLUMNS,
    document_of,
)

log = get_logger("ingest")
TOKEN_BUDGET = 8192  # tokens per forward pass


@dataclass(frozen=True)
class DocumentFlow:
    """Models for new documents, loaded once: document tower, codebooks, and any fusion networks."""

    encoder: Any
    prompt: DocumentPrompt
    codebooks: Float[ndarray, "levels codes dim"]
    width: int = 1  # of the beam of the semantic IDs
    dtype: str = "float16"  # of stored embeddings
    similarity: str = "cosine"  # of embeddings
    fusion: Any = None  # a DocumentFusion, whose module needs torch; the writer of an index has no torch
    weights: BM25Weights | None = None  # of the words; None: terms come from the sparse head, if there is one
    top_k: int = 256  # number of terms of a sparse head

    @classmethod
    def load(
        cls,
        towers: Artifact,
        semantic_ids: Artifact,
        embeddings: Artifact,
        bm25_terms: Artifact | None = None,
    ) -> "DocumentFlow":
        """Load the models of a finished run.

        `embeddings` are the indexed ones, with fusion networks if they were fused. `bm25_terms` are for an
        index with words.
        """
        from scalingnote.fuse.fusion import DocumentFusion

        first = pq.read_schema(embeddings.open(embeddings.table_parts("embeddings")[0]))
        is_fused = bool(embeddings.names("document_fusion/"))
        return cls(
            load_document_encoder(towers, TOKEN_BUDGET),
            load_document_prompt(towers),
            safetensors.load(semantic_ids.read_bytes("codebooks.safetensors"))["codebooks"],
            width=int(semantic_ids.manifest.config.get("beam", 1)),
            dtype=dtype_of(first.field(INDEXED_VIEW)),
            similarity=embeddings.manifest.info.get("similarity", "cosine"),
            fusion=DocumentFusion.load(embeddings.directory("document_fusion")) if is_fused else None,
            weights=None if bm25_terms is None else BM25Weights.of(bm25_terms),
            top_k=embeddings.manifest.config.get("top_k", 256),
        )

    def __call__(self, documents: pa.Table) -> EncodedPart:
        """Encode documents with doc_id, title, topic, content, and features for the fusion networks.

        Words that are not in the collection give no terms.

        Returns:
            A table with doc_id, content_hash, codes, the final embedding, and terms if the index has some, in
            the order of the documents, without rejected rows.
        """
        texts = documents.select(DOCUMENT_COLUMNS).append_column(
            schema.CONTENT_HASH, content_hashes(documents)
        )
        checked, rows, rejected = tokenise(texts, self.prompt)
        rejected_ids = pa.array([row["row"] for row in rejected], pa.string())
        accepted = documents.filter(pc.invert(pc.is_in(documents["doc_id"], value_set=rejected_ids)))
        encoding = self.encoder.encode_with_cost(rows, top_k=self.top_k)
        matrix = encoding.embeddings[:, list(self.encoder.views).index(INDEXED_VIEW)]
        # Rounded to the stored precision: in the stages, codes and fusion start from stored embeddings.
        embeddings = to_numpy(to_arrow(as_searched(matrix, self.similarity), dtype=self.dtype))
        codes = kmeans.encode(embeddings, self.codebooks, beam=self.width)
        if self.fusion is not None:
            embeddings = self.fusion.fuse(accepted, embeddings, codes)
        columns = {
            "doc_id": checked["doc_id"],
            "content_hash": checked["content_hash"],
            "codes": to_arrow(codes.astype(np.int32)),
            INDEXED_VIEW: to_arrow(embeddings, dtype=self.dtype),
        }
        if self.weights is not None:
            terms = self.weights.columns(document_texts(accepted))
            columns |= {name: terms[name] for name in SPARSE.names}
        elif encoding.terms is not None:
            columns |= dict(zip(SPARSE.names, encoding.terms.columns(), strict=True))
        return EncodedPart(pa.table(columns), encoding.cost + cut_of(rows), rejected)


class IndexRows(NamedTuple):
    """Documents for :meth:`LiveIndex.upsert`, with terms if the run has some, and their vectors."""

    documents: pa.Table
    vectors: Float[ndarray, "docs dim"]
    rejected: Rejections
    cost: Cost = Cost()  # with the number of cut texts and tokens
    sources: pa.Table | None = None  # the uncut documents, in the columns of the data set


def index_rows(
    documents: Sequence[Mapping[str, Any]],
    flow: DocumentFlow,
    *,
    schema: pa.Schema,
    snippet_chars: int,
    splitter: PassageSplitter | None = None,
) -> IndexRows:
    """Encode JSON objects for a live index with a dataset of documents of `schema`.

    If doc_ids are equal, the last document counts. The first `snippet_chars` of the text are stored for
    result pages. With a `splitter`, the rows are the passages of the documents, and a document with a
    rejected passage is rejected.
    """
    columns = pa.schema([field for field in schema if splitter is None or field.name not in PASSAGE.names])
    table, rejected = documents_table(documents, columns)
    sources = table
    if splitter is not None:
        table = splitter.divide(table)
    ready = flow(table)
    if splitter is not None:
        ready = _whole_documents(ready)
    codes = to_matrix(ready.table["codes"]).astype(np.int32)
    doc_ids = ready.table["doc_id"]
    ids = semantic_id.to_table(doc_ids, codes, semantic_id.suffixes(doc_ids))
    rows = document_rows(doc_ids, documents=table, semantic_ids=ids, snippet_chars=snippet_chars)
    for name in SPARSE.names if SPARSE.names[0] in ready.table.column_names else ():
        rows = rows.append_column(name, ready.table[name])
    vectors, rejected = to_numpy(ready.table[INDEXED_VIEW]), [*rejected, *ready.rejected]
    return IndexRows(rows, vectors, rejected, ready.cost, sources)


def _whole_documents(ready: EncodedPart) -> EncodedPart:
    """Reject all passages of a document with a rejected passage, as one rejected document."""
    reasons = {document_of(row["row"]): row for row in reversed(ready.rejected)}
    is_kept = [document_of(row) not in reasons for row in ready.table["doc_id"].to_pylist()]
    rejected = [row | {"row": doc_id} for doc_id, row in reversed(reasons.items())]
    return replace(ready, table=ready.table.filter(pa.array(is_kept, pa.bool_())), rejected=rejected)


def documents_table(documents: Sequence[Mapping[str, Any]], schema: pa.Schema) -> tuple[pa.Table, Rejections]:
    """Convert documents to a table of `schema`; reject those with an unknown field or a wrong type.

    Texts are stripped of white space at both ends, as in a data set.
    """
    rows, rejected = dict[str, dict[str, Any]](), []
    for document in documents:
        doc_id = str(document["doc_id"])
        row = {field.name: document.get(field.name) for field in schema}
        row |= {name: text.strip() for name in TEXT_COLUMNS if isinstance(text := row.get(name), str)}
        try:
            if unknown := [name for name in document if name not in schema.names]:
                known = ", ".join(schema.names)
                raise ValueError(f"no field {unknown[0]!r} in the data set, which has {known}")
            pa.Table.from_pylist([row], schema=schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
            rejected.append({"table": "documents", "row": doc_id, "reason": str(error)})
            continue
        rows.pop(doc_id, None)  # the last one also determines the place
        rows[doc_id] = row
    return pa.Table.from_pylist(list(rows.values()), schema=schema), rejected


# --- files ------------------------------------------------------------------------------------------------


def run(
    config: IngestConfig,
    new: NewDocuments,
    *,
    towers: Artifact,
    semantic_ids: Artifact,
    embeddings: Artifact,
    bm25_terms: Artifact | None = None,
    output: str,
) -> Artifact:
    """Encode new documents for an index; after a kill, the next call resumes.

    Args:
        config: workers.
        new: the file, and how to read it.
        towers: artifact with the document tower.
        semantic_ids: artifact with the codebooks.
        embeddings: artifact that is indexed.
        bm25_terms: artifact with the words of the index, if it has some.
        output: URI of a folder; the documents become the dataset at ``{output}/dataset``.

    Returns:
        The artifact at ``{output}/ready``; its table ``ready`` has ids, content hashes, codes, final
        embeddings, and terms.

    Raises:
        DataError: not a single document can be read.
    """
    cluster.connect()
    dataset = datasets.prepare_documents(new, output=f"{output}/dataset")
    parents = {
        "dataset": dataset,
        towers.manifest.kind: towers,
        "semantic_ids": semantic_ids,
        "embeddings": embeddings,
    }
    parents |= {} if bm25_terms is None else {"bm25_terms": bm25_terms}
    draft = Draft(f"{output}/ready", kind="ready", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    parts = dataset.table_parts("documents")
    rows = {name.replace("documents/", "ready/", 1): count for name, count in dataset.rows_of(parts).items()}
    encoder = partial(NewDocumentEncoder, towers, semantic_ids, embeddings, bm25_terms)
    reader = partial(read_documents, dataset=dataset)
    # Not more workers than parts: new documents usually come in few parts.
    workers = min(cluster.workers(config.resources), len(rows))
    resources = config.resources.model_copy(update={"workers": workers})
    records = write_parts(
        encoder, draft, read=reader, rows=rows, resources=resources, unit="documents", knob="resources"
    )
    rejected = [row for record in records for row in record["rejected"]]
    return draft.commit(counts=write_rejected(draft, records, rejected))


def describe_file(
    path: str, columns: dict[str, str], *, like: Artifact, made_by: Mapping[str, str] = MappingProxyType({})
) -> NewDocuments:
    """Describe a file of new documents with the features of the dataset `like`.

    `columns` maps our column names to those of the file. `made_by` maps them to those of the files of
    `like`, and applies to columns that the new file has too.
    """
    layout, divided = pq.read_schema(like.open(like.table_parts("documents")[0])), settings(like)
    kinds = {kind: name for name, kind in COLUMN_TYPES.items()}
    features = {
        f.name: kinds[f.type]
        for f in layout
        if f.name not in {*schema.DOCUMENTS.names, *(PASSAGE.names if divided else ())} and f.type in kinds
    }
    tables = [each for each in find_files(path, NEW_SUFFIXES) if not each.is_markdown]
    names = [set(columns_of(each)) for each in tables]
    inherited = {
        ours: column for ours, column in made_by.items() if names and all(column in each for each in names)
    }
    file = TableFile(path=path, columns=inherited | columns)
    # The data set has the tokenizer that divides documents.
    passages = divided and divided.model_copy(update={"tokenizer": like.uri})
    return NewDocuments.model_validate({"documents": file, "features": features, "passages": passages})


def output_uri(run_dir: str, new: NewDocuments) -> str:
    """Return the output folder for a file of new documents, which depends on the content of the file."""
    files = find_files(new.documents.path, NEW_SUFFIXES)
    sums = "".join(fs.checksum(file.uri) + (file.uri if file.is_markdown else "") for file in files)
    return fs.join(fs.absolute(run_dir), "ingest", hashlib.sha256(sums.encode()).hexdigest()[:12])


def read_documents(name: str, *, dataset: Artifact) -> pa.Table:
    """Read a part of the new documents, with their features."""
    return dataset.table(name.replace("ready/", "documents/", 1))


class NewDocumentEncoder:
    """Encoder of parts of new documents, in a worker."""

    def __init__(
        self,
        towers: Artifact,
        semantic_ids: Artifact,
        embeddings: Artifact,
        bm25_terms: Artifact | None = None,
    ) -> None:
        self._flow = DocumentFlow.load(towers, semantic_ids, embeddings, bm25_terms)
        self.peak = float(self._flow.encoder.peak())

    def __call__(self, _: str, documents: pa.Table) -> EncodedPart:
        """Encode one part."""
        return self._flow(documents)
