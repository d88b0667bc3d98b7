"""The stages teacher and encode where the model is behind an endpoint: no worker is started, threads wait.

All texts of a stage are in memory, their vectors a part at a time. Answers lie beside the artifacts of the
stage, so that other settings of a run, as more texts, ask for new texts only.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from scalingnote.core.errors import EndpointError
from scalingnote.core.log import get_logger
from scalingnote.encode.config import EndpointConfig
from scalingnote.encode.documents import content_hashes, embeddings_part
from scalingnote.encode.endpoint import Endpoint
from scalingnote.models.prompt import document_fields
from scalingnote.models.published_model import Role
from scalingnote.storage import arrow, schema
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.schema import DOCUMENT_COLUMNS, INDEXED_VIEW

log = get_logger("encode")


def run_queries(config: EndpointConfig, *, pseudo_queries: str, output: str) -> Artifact:
    """Build the artifact `query_embeddings` of pseudo-queries; texts that are set aside are in `rejected`.

    Raises:
        ConfigError, EndpointError: as :meth:`Endpoint.ask`; or no text has a vector.
    """
    source = open_artifact(pseudo_queries, kind="pseudo_queries")
    draft = Draft(output, kind="query_embeddings", config=config, parents={"pseudo_queries": source})
    if draft.finished:
        return draft.existing()

    def columns(part: pa.Table, vectors: np.ndarray) -> pa.Table:
        return part.select(["query_id", "query", "split"]).append_column(
            schema.embedding_field("embedding", vectors.shape[1]), arrow.to_arrow(vectors)
        )

    parts = {name.replace("queries/", "embeddings/", 1): name for name in source.table_parts("queries")}
    tables = {ours: source.table(name, schema.PSEUDO_QUERIES.names) for ours, name in parts.items()}
    texts = {name: table["query"].to_pylist() for name, table in tables.items()}
    return _build(draft, config, "query", tables, texts, columns, id_column="query_id")


def run_documents(config: EndpointConfig, *, dataset: str, output: str) -> Artifact:
    """Build the artifact `embeddings` of a dataset's documents, each as ``title content``, of length 1.

    Raises:
        ConfigError, EndpointError: as :func:`run_queries`.
    """
    source = open_artifact(dataset, kind="dataset")
    draft = Draft(output, kind="embeddings", config=config, parents={"dataset": source})
    if draft.finished:
        return draft.existing()

    def columns(part: pa.Table, vectors: np.ndarray) -> pa.Table:
        layout = schema.embeddings([INDEXED_VIEW], vectors.shape[1])
        found = arrow.to_arrow(arrow.l2_normalize(vectors))
        return pa.table([part["doc_id"], content_hashes(part), found], schema=layout)

    tables = {
        embeddings_part(name): source.table(name, DOCUMENT_COLUMNS)
        for name in source.table_parts("documents")
    }
    texts = {}
    for name, table in tables.items():
        titles, _, contents = document_fields(table)
        texts[name] = [" ".join(filter(None, both)) for both in zip(titles, contents, strict=True)]
    return _build(draft, config, "document", tables, texts, columns, id_column="doc_id")


def _build(
    draft: Draft,
    config: EndpointConfig,
    role: Role,
    tables: dict[str, pa.Table],
    texts: dict[str, list[str]],
    columns: Callable[[pa.Table, np.ndarray], pa.Table],
    *,
    id_column: str,
) -> Artifact:
    """Ask for the texts of all parts, then write each part's rows that have a vector."""
    answers = fs.join(draft.uri.rsplit("/", 1)[0], "answers")
    endpoint = Endpoint(config, answers, role)
    usage = endpoint.ask([text for part in texts.values() for text in part])
    kind = "queries" if role == "query" else "documents"
    rows, rejected = 0, []
    for name, table in tables.items():
        vectors, problems = endpoint.read(texts[name])
        ids = table[id_column]
        rejected += [{"table": kind, "row": ids[n].as_py(), "reason": why} for n, why in problems.items()]
        kept = np.setdiff1d(np.arange(len(table)), [*problems])
        if len(kept):
            draft.write_table(name, columns(table.take(pa.array(kept)).combine_chunks(), vectors[kept]))
        rows += len(kept)
    if not rows:
        raise EndpointError(f"no text has a vector: {rejected[:1]}")
    if rejected:
        log.warning("%s %s are set aside: %s", f"{len(rejected):,}", kind, rejected[0]["reason"])
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts = {kind: rows, "rejected": len(rejected)}
    return draft.commit(counts=counts, similarity="cosine", endpoint=usage)
