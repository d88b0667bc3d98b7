"""Embeddings of a dataset's documents: a part is read on any CPU and encoded in a worker.

    documents ─tokenise─► token rows ─tower─► embeddings, terms ─► embeddings/part-*.parquet

With a base, only documents that changed since are encoded (:mod:`scalingnote.encode.changes`).
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote import cluster
from scalingnote.encode.changes import COLUMNS, TEXTS, compare_with_base, content_hashes, read_copies
from scalingnote.encode.config import EncodeConfig
from scalingnote.encode.cost import totals
from scalingnote.encode.parts import EncodedPart, Rejected, Steps, reader_cpus, write_parts
from scalingnote.errors import ArtifactError, ConfigError, DataError
from scalingnote.models.prompt import DocumentPrompt, from_columns, token_columns
from scalingnote.storage import arrow, schema
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact

if TYPE_CHECKING:
    from scalingnote.encode.encoder import Encoder

LoadEncoder = Callable[[Artifact, int], Any]  # of an artifact and a token budget
LoadPrompt = Callable[[Artifact], DocumentPrompt]


def load_document_encoder(towers: Artifact, token_budget: int) -> "Encoder":
    """The encoder of an artifact's document tower."""
    from scalingnote.encode.encoder import Encoder

    return Encoder.load(towers.directory("document"), token_budget=token_budget)


def load_document_prompt(towers: Artifact) -> DocumentPrompt:
    """The prompt of an artifact's document tower, without its weights."""
    tokenizer = towers.read_bytes("document/tokenizer.json").decode()
    return DocumentPrompt.restore(towers.read_json("document/tower.json"), tokenizer)


def encode_documents(
    config: EncodeConfig,
    dataset: str,
    towers: Artifact,
    output: str,
    *,
    load_encoder: LoadEncoder = load_document_encoder,
    load_prompt: LoadPrompt = load_document_prompt,
) -> Artifact:
    """Build the artifact `embeddings`: L2-normalised, in the order and parts of the dataset.

    Args:
        config: views, precision, base.
        dataset: URI of the dataset.
        towers: the artifact whose document tower, or cross-encoder, encodes.
        output: URI of the artifact.
        load_encoder: loads what encodes token rows, once in each worker.
        load_prompt: loads what makes token rows of texts.

    Raises:
        ConfigError: the towers lack a view.
        ArtifactError: other towers or settings made the base.
        DataError: no document can be encoded.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset"), towers.manifest.kind: towers}
    if config.base is not None:
        parents["base"] = _open_base(config, towers)
    draft = Draft(output, kind="embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    # A cross-encoder has no document tower and gives one embedding of a document.
    has_tower = bool(towers.names("document/"))
    views = towers.read_json("document/tower.json")["views"] if has_tower else ["summary"]
    if missing := sorted(set(config.views) - set(views)):
        raise ConfigError(f"{towers.uri} gives no view {missing} of a document; it gives {views}")
    resources = config.resources
    cluster.check_resources_early(resources, knob="encode.resources", beside=reader_cpus(resources))
    source, base = parents["dataset"], parents.get("base")
    parts = source.names("documents/", ".parquet")
    rows = {embeddings_part(name): count for name, count in source.rows_of(parts).items()}
    counts = {} if base is None else compare_with_base(source, base, draft)
    read = partial(read_documents, source=source, towers=towers, load_prompt=load_prompt)
    steps = Steps(
        partial(read, base=base, folder=draft.work("base")),
        partial(DocumentPartEncoder, config=config, towers=towers, load_encoder=load_encoder),
    )
    records = write_parts(steps, draft, rows=rows, resources=resources, unit="documents")
    rejected = [row for record in records for row in record["rejected"]]
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts |= {
        "documents": sum(record["part"]["rows"] for record in records),
        "rejected": len(rejected),
        "tokens": sum(record["tokens"] for record in records),
    }
    if not counts["documents"]:
        raise DataError(f"none of {sum(rows.values())} documents could be encoded: {rejected[:1]}")
    return draft.commit(counts=counts, encoding=totals(records))


def _open_base(config: EncodeConfig, towers: Artifact) -> Artifact:
    """Earlier embeddings to update; ArtifactError if the same documents would be encoded differently now."""
    base = open_artifact(fs.absolute(str(config.base)), kind="embeddings")  # workers open it, too
    made_by = base.manifest.parents.get(towers.manifest.kind, {}).get("digest")
    settings = {name: base.manifest.config.get(name) for name in ("views", "dtype", "top_k")}
    wanted = {"views": list(config.views), "dtype": config.dtype, "top_k": config.top_k}
    if made_by != towers.digest:
        raise ArtifactError(
            f"{base.uri} was encoded by another {towers.manifest.kind} than {towers.uri}: "
            "set encode.base to null"
        )
    if settings != wanted:
        raise ArtifactError(f"{base.uri} was encoded with {settings}, not {wanted}: set encode to the same")
    return base


def read_documents(
    name: str,
    *,
    source: Artifact,
    towers: Artifact,
    load_prompt: LoadPrompt,
    base: Artifact | None,
    folder: str,
) -> tuple[pa.Table, pa.Table | None, Rejected]:
    """Input of a part: token rows to encode, embeddings to copy, and documents that cannot be encoded."""
    documents = source.table(name.replace("embeddings/", "documents/", 1), COLUMNS)
    documents = documents.append_column(schema.CONTENT_HASH, content_hashes(documents))
    documents = documents.append_column("row", pa.array(np.arange(len(documents), dtype=np.int32)))
    copies = None
    if base is not None:
        number = [embeddings_part(part) for part in source.table_parts("documents")].index(name)
        copies = read_copies(number, folder=folder, base=base)
        same = pc.is_in(documents["row"], value_set=copies["row"].combine_chunks())
        documents = documents.filter(pc.invert(same))
    tokens, rejected = tokenise(documents, _prompt(load_prompt, towers.uri, towers.manifest.kind))
    return tokens, copies, rejected


@functools.cache
def _prompt(load: LoadPrompt, uri: str, kind: str) -> DocumentPrompt:
    return load(open_artifact(uri, kind=kind))


def tokenise(documents: pa.Table, prompt: DocumentPrompt) -> tuple[pa.Table, Rejected]:
    """Token rows of documents.

    Args:
        documents: a table with doc_id, title, topic, content, and any other columns.
        prompt: of the document tower.

    Returns:
        The documents that can be encoded, in order, with ``ids`` and ``positions`` in place of the texts; and
        the others with the reason.
    """
    rows, encodable, rejected = [], [], []
    results = prompt.rows(*(documents[name].to_pylist() for name in TEXTS))
    for doc_id, row in zip(documents["doc_id"].to_pylist(), results, strict=True):
        encodable.append(not isinstance(row, DataError))
        if isinstance(row, DataError):
            rejected.append({"table": "documents", "row": doc_id, "reason": str(row)})
        else:
            rows.append(row)
    table = documents.drop_columns(TEXTS).filter(pa.array(encodable, pa.bool_()))
    for name, column in token_columns([rows], views=prompt.width).items():
        table = table.append_column(name, column)
    return table, rejected


class DocumentPartEncoder:
    """Encodes parts of documents, in a worker."""

    def __init__(self, *, config: EncodeConfig, towers: Artifact, load_encoder: LoadEncoder) -> None:
        self._config = config
        self._encoder = load_encoder(towers, config.token_budget)
        self.peak: float = self._encoder.peak()

    def __call__(self, _: str, part: tuple[pa.Table, pa.Table | None, Rejected]) -> EncodedPart:
        """Embeddings of a part, and the copied ones in their places."""
        tokens, copies, rejected = part
        views: list[str] = list(self._config.views)
        dtype = self._config.dtype
        encoding = self._encoder.encode_with_cost(from_columns(tokens), top_k=self._config.top_k)
        matrices = [encoding.embeddings[:, self._encoder.views.index(view)] for view in views]
        columns = [arrow.to_arrow(arrow.l2_normalize(matrix), dtype=dtype) for matrix in matrices]
        columns += encoding.terms.columns() if encoding.terms else []
        sparse = encoding.terms is not None
        layout = schema.embeddings(views, self._encoder.dim, dtype=dtype, sparse=sparse)
        table = pa.table([tokens["doc_id"], tokens["content_hash"], *columns], schema=layout)
        if copies is not None and len(copies):
            fresh = table.append_column("row", tokens["row"])
            table = pa.concat_tables([fresh, copies.select(fresh.column_names)]).sort_by("row")
            table = table.drop_columns("row").cast(layout)
        return EncodedPart(table, encoding.cost, rejected)


def embeddings_part(part: str) -> str:
    """The part of embeddings of a part of documents."""
    return part.replace("documents/", "embeddings/", 1)
