"""Ingest a file of new documents: encode, quantize and fuse them for the index of a finished run.

file ─intake─► dataset of new documents ─DocumentFlow, part by part─► ready/part-*.parquet, rejected.parquet
"""

import hashlib
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote import cluster
from scalingnote.datasets import job as datasets
from scalingnote.datasets.config import NewDocuments, TableFile
from scalingnote.datasets.file_formats import COLUMN_TYPES
from scalingnote.datasets.raw_rows import find_files
from scalingnote.encode.parts import EncodedPart, Steps, write_parts
from scalingnote.errors import DataError
from scalingnote.ingest.config import IngestConfig
from scalingnote.ingest.new_documents import DocumentFlow
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema
from scalingnote.storage.artifact import Artifact, Draft

log = get_logger("ingest")


def run(
    config: IngestConfig,
    new: NewDocuments,
    *,
    towers: Artifact,
    semantic_ids: Artifact,
    embeddings: Artifact,
    output: str,
) -> Artifact:
    """Encode new documents for an index; killed at any moment, the next call resumes.

    Args:
        config: token budget and workers.
        new: the file and how it is read.
        towers: artifact with the document tower.
        semantic_ids: artifact with the codebooks.
        embeddings: artifact that is indexed.
        output: URI of a folder; the documents become the dataset at ``{output}/dataset``.

    Returns:
        The artifact at ``{output}/ready``, whose table ``ready`` has ids, content hashes, codes and final
        embeddings.

    Raises:
        DataError: none of the documents can be read.
    """
    cluster.connect()
    dataset = datasets.prepare_documents(new, output=f"{output}/dataset")
    parents = {
        "dataset": dataset,
        towers.manifest.kind: towers,
        "semantic_ids": semantic_ids,
        "embeddings": embeddings,
    }
    draft = Draft(f"{output}/ready", kind="ready", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    parts = dataset.table_parts("documents")
    rows = {name.replace("documents/", "ready/", 1): count for name, count in dataset.rows_of(parts).items()}
    steps = Steps(
        partial(read_documents, dataset=dataset),
        partial(NewDocumentEncoder, towers, semantic_ids, embeddings, token_budget=config.token_budget),
    )
    # Not more workers than parts: new documents usually come in few parts.
    workers = min(config.resources.workers, len(rows))
    resources = config.resources.model_copy(update={"workers": workers})
    records = write_parts(steps, draft, rows=rows, resources=resources, unit="documents", knob="resources")
    rejected = [row for record in records for row in record["rejected"]]
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts = {"documents": sum(record["part"]["rows"] for record in records)}
    if not counts["documents"]:
        raise DataError(f"none of the new documents could be encoded: {rejected[:1]}")
    return draft.commit(counts=counts | {"rejected": len(rejected)})


def describe_file(path: str, columns: dict[str, str], *, like: Artifact) -> NewDocuments:
    """The description of a file of new documents, with the features of the dataset `like`.

    Args:
        path: of the file.
        columns: our name -> the file's name of a column.
        like: the dataset of the run.
    """
    layout = pq.read_schema(like.open(like.table_parts("documents")[0]))
    kinds = {kind: name for name, kind in COLUMN_TYPES.items()}
    features = {
        f.name: kinds[f.type] for f in layout if f.name not in schema.DOCUMENTS.names and f.type in kinds
    }
    file = TableFile(path=path, columns=columns)
    return NewDocuments.model_validate({"documents": file, "features": features})


def output_uri(run_dir: str, new: NewDocuments) -> str:
    """The output folder for a file of new documents; depends on the content of the file."""
    sums = "".join(fs.checksum(file.uri) for file in find_files(new.documents.path))
    return fs.join(fs.absolute(run_dir), "ingest", hashlib.sha256(sums.encode()).hexdigest()[:12])


def read_documents(name: str, *, dataset: Artifact) -> pa.Table:
    """A part of the new documents, with their features."""
    return dataset.table(name.replace("ready/", "documents/", 1))


class NewDocumentEncoder:
    """Encodes parts of new documents, in a worker."""

    def __init__(
        self, towers: Artifact, semantic_ids: Artifact, embeddings: Artifact, *, token_budget: int
    ) -> None:
        self._flow = DocumentFlow.load(towers, semantic_ids, embeddings, token_budget=token_budget)
        self.peak = self._flow.peak()

    def __call__(self, _: str, documents: pa.Table) -> EncodedPart:
        """One part."""
        return self._flow(documents)
