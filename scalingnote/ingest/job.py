"""Taking in new documents: a file in, what the index of a finished run is to hold of them out.

file ─intake─► dataset of new documents ─flow, part by part─► ready/part-*.parquet, rejected.parquet
"""

import hashlib
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote import cluster
from scalingnote.datasets import job as datasets
from scalingnote.datasets.columns import TYPES
from scalingnote.datasets.config import NewDocuments, TableFile
from scalingnote.datasets.rows import files
from scalingnote.encode.config import Fleet
from scalingnote.encode.job import write_parts
from scalingnote.encode.steps import Encoded, Steps
from scalingnote.errors import DataError
from scalingnote.ingest.config import IngestConfig
from scalingnote.ingest.flow import DocumentFlow
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
    """The new documents, ready for the index; killed at any moment, the next call resumes.

    The artifact's table ``ready`` has their ids, content hashes, codes and final embeddings; ``documents``
    lies beside it, in the data set at ``{output}/dataset``. DataError when none of them can be read.
    """
    cluster.connect()
    dataset = datasets.take_in(new, output=f"{output}/dataset")
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
    rows = {name.replace("documents/", "ready/", 1): dataset.manifest.parts[name].rows or 0 for name in parts}
    steps = Steps(
        partial(read_documents, dataset=dataset),
        partial(Flow, towers, semantic_ids, embeddings, token_budget=config.token_budget),
    )
    fleet = few(config.resources, rows)
    records = write_parts(steps, draft, rows=rows, resources=fleet, unit="documents", knob="resources")
    rejected = [row for record in records for row in record["rejected"]]
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts = {"documents": sum(record["part"]["rows"] for record in records)}
    if not counts["documents"]:
        raise DataError(f"none of the new documents could be encoded: {rejected[:1]}")
    return draft.commit(counts=counts | {"rejected": len(rejected)})


def described(path: str, columns: dict[str, str], *, like: Artifact) -> NewDocuments:
    """How a file of new documents is read: with the features that the data set `like` has."""
    layout = pq.read_schema(fs.open_input(like.file(like.table_parts("documents")[0])))
    kinds = {kind: name for name, kind in TYPES.items()}
    features = {
        f.name: kinds[f.type] for f in layout if f.name not in schema.DOCUMENTS.names and f.type in kinds
    }
    file = TableFile(path=path, columns=columns)
    return NewDocuments.model_validate({"documents": file, "features": features})


def place(run_dir: str, new: NewDocuments) -> str:
    """Where what becomes of these files goes: other contents, another place."""
    sums = "".join(fs.checksum(str(path)) for path in files(new.documents.path))
    return fs.join(fs.absolute(run_dir), "ingest", hashlib.sha256(sums.encode()).hexdigest()[:12])


def read_documents(name: str, *, dataset: Artifact) -> pa.Table:
    """A part of the new documents, with their features."""
    return dataset.table(name.replace("ready/", "documents/", 1))


def few(resources: Fleet, parts: dict[str, int]) -> Fleet:
    """No more workers than there are parts: most new documents come in few."""
    return resources.model_copy(update={"workers": min(resources.workers, len(parts))})


class Flow:
    """The document flow, in a worker."""

    def __init__(
        self, towers: Artifact, semantic_ids: Artifact, embeddings: Artifact, *, token_budget: int
    ) -> None:
        self._flow = DocumentFlow.load(towers, semantic_ids, embeddings, token_budget=token_budget)
        self.peak = self._flow.peak()

    def __call__(self, _: str, documents: pa.Table) -> Encoded:
        """A part, ready."""
        found = self._flow(documents)
        return Encoded(found.table, self._flow.cost, found.rejected)
