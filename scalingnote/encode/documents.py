"""Embeddings of a dataset's documents: a part is read on any CPU and encoded in a worker.

    documents ─tokenise─► token rows ─tower─► embeddings, terms ─► embeddings/part-*.parquet

With a base, only documents that changed since earlier embeddings are encoded, and the others are copied:

    earlier embeddings ─scatter─┐
                                ├─► buckets of doc_ids ─compare─► groups of parts ─► rows each part copies
    documents ─────────scatter──┘                          └───► changes: added, changed, deleted

A document is unchanged if its content hash is unchanged; it may be in another part. Memory is bounded by a
slice while hashes are scattered, then by a bucket or a group. A repeated step writes the same files again.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scalingnote.core import cluster
from scalingnote.core.config import dump
from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.core.log import get_logger
from scalingnote.encode import engines
from scalingnote.encode.config import EncodeConfig
from scalingnote.encode.engines import EncoderEngine, LoadEngine, load_document_prompt
from scalingnote.encode.lengths import cut_counts, cut_of, cut_summary
from scalingnote.encode.parts import EncodedPart, PartRecord, Rejections, size_for, totals, write_parts
from scalingnote.models.prompt import DocumentPrompt, TokenRow, document_fields
from scalingnote.models.published_model import Similarity
from scalingnote.storage import arrow, schema, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, read_table, write_table
from scalingnote.storage.schema import DOCUMENT_COLUMNS, TEXT_COLUMNS
from scalingnote.storage.shuffle import NumberedSlice, run_slices, slices

log = get_logger("encode")
LoadPrompt = Callable[[Artifact], DocumentPrompt]


class TokenisedPart(NamedTuple):
    """Documents of a part, as token rows."""

    documents: pa.Table  # those that can be encoded, without their texts
    rows: list[TokenRow]  # one for each of them
    rejected: Rejections  # the other documents


def encode_documents(
    config: EncodeConfig,
    dataset: str,
    towers: Artifact,
    output: str,
    *,
    load_encoder: LoadEngine | None = None,
    load_prompt: LoadPrompt = load_document_prompt,
) -> Artifact:
    """Build the artifact `embeddings`, in the order and parts of the dataset.

    Embeddings have length 1, unless the towers compare by dot. The manifest records `similarity`.

    Args:
        config: views, precision, base.
        dataset: URI of the dataset.
        towers: artifact with the document tower, or the cross-encoder, that encodes.
        output: URI of the artifact.
        load_encoder: loads the engine that encodes token rows, once in each worker; None: that of the config.
        load_prompt: loads the prompt that makes token rows of texts.

    Raises:
        ConfigError: the towers lack a view, or the engine cannot encode with them.
        ArtifactError: other towers or settings made the base.
        DataError: no document can be encoded.
    """
    parents = {"dataset": open_artifact(dataset, kind="dataset"), towers.manifest.kind: towers}
    if config.base is not None:
        parents["base"] = _open_base(config, towers)
    draft = Draft(output, kind="embeddings", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    engines.check_tower(config, towers)
    resources = size_for(config.resources, towers, "document")
    cluster.check_resources_early(resources, knob="encode.resources", task_cpus=resources.readers)
    engines.check_installed(config)
    source, base = parents["dataset"], parents.get("base")
    counts = {} if base is None else compare_with_base(source, base, draft)
    sizes = source.rows_of(source.names("documents/", ".parquet"))
    rows = {embeddings_part(part): count for part, count in sizes.items()}
    read = partial(read_documents, source=source, towers=towers, load_prompt=load_prompt)
    read = partial(read, base=base, folder=draft.work("base"))
    load_encoder = load_encoder or engines.engine_loader(config)
    encoder = partial(DocumentPartEncoder, config=config, towers=towers, load_encoder=load_encoder)
    records = write_parts(encoder, draft, read=read, rows=rows, resources=resources, unit="documents")
    rejected = [row for record in records for row in record["rejected"] + _rejections_of_part(record, source)]
    counts |= write_rejected(draft, records, rejected)
    return draft.commit(counts=counts, encoding=totals(records), similarity=tower_similarity(towers))


def _rejections_of_part(record: PartRecord, source: Artifact) -> Rejections:
    """Return rejections of all documents of a part that was set aside."""
    if "set_aside" not in record:
        return []
    reason = f"its part could not be encoded: {record['set_aside'].strip().splitlines()[-1]}"
    doc_ids = source.table(_documents_part(record["name"]), ["doc_id"])["doc_id"]
    return [{"table": "documents", "row": doc_id, "reason": reason} for doc_id in doc_ids.to_pylist()]


def write_rejected(draft: Draft, records: Sequence[PartRecord], rejected: Rejections) -> dict[str, int]:
    """Write the table of documents that are not encoded; return the counts of all, and warn of cut ones.

    Raises:
        DataError: no document is encoded.
    """
    documents = sum(record["part"]["rows"] for record in records)
    if not documents:
        raise DataError(f"none of {len(rejected):,} documents could be encoded: {rejected[:1]}")
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    tokens = sum(record["tokens"] for record in records)
    counts = {"documents": documents, "rejected": len(rejected), "tokens": tokens, **cut_counts(records)}
    if counts["cut_texts"]:
        log.warning("%s", cut_summary(counts))
    return counts


def tower_similarity(towers: Artifact) -> Similarity:
    """Return how search compares embeddings of a document tower, or of a cross-encoder's proxies."""
    if towers.manifest.kind == "cross_encoder":
        return "dot" if towers.manifest.config["temperature"] is None else "cosine"
    name = "document/config_sentence_transformers.json"
    facts = towers.read_json(name) if name in towers.names("document/") else {}
    return "dot" if facts.get("similarity_fn_name") == "dot" else "cosine"


def _open_base(config: EncodeConfig, towers: Artifact) -> Artifact:
    """Open earlier embeddings; raise ArtifactError if the same documents would be encoded differently now."""
    base = open_artifact(fs.absolute(str(config.base)), kind="embeddings")  # workers open it, too
    encoder_digest = base.manifest.parents.get(towers.manifest.kind, {}).get("digest")
    names = ("engine", "views", "dtype", "top_k")
    settings = {"engine": "own"} | {k: v for k, v in base.manifest.config.items() if k in names}
    wanted = {name: value for name, value in dump(config).items() if name in names}
    if encoder_digest != towers.digest:
        raise ArtifactError(
            f"{base.uri} was encoded by another {towers.manifest.kind} than {towers.uri}: "
            "set encode.base to null"
        )
    if settings != wanted:
        raise ArtifactError(f"{base.uri} was encoded with {settings}, not {wanted}: use the same settings")
    return base


def read_documents(
    name: str,
    *,
    source: Artifact,
    towers: Artifact,
    load_prompt: LoadPrompt,
    base: Artifact | None,
    folder: str,
) -> tuple[TokenisedPart, pa.Table | None]:
    """Read the input of a part of embeddings: documents to encode, and embeddings to copy."""
    part = _documents_part(name)
    documents = source.table(part, DOCUMENT_COLUMNS)
    documents = documents.append_column(schema.CONTENT_HASH, content_hashes(documents))
    documents = documents.append_column("row", pa.array(np.arange(len(documents), dtype=np.int32)))
    copies = None
    if base is not None:
        copies = read_copies(part, folder=folder, base=base)
        is_copied = pc.is_in(documents["row"], value_set=copies["row"].combine_chunks())
        documents = documents.filter(pc.invert(is_copied))
    return tokenise(documents, _prompt(load_prompt, towers.uri, towers.manifest.kind)), copies


@functools.cache
def _prompt(load: LoadPrompt, uri: str, kind: str) -> DocumentPrompt:
    return load(open_artifact(uri, kind=kind))


def tokenise(documents: pa.Table, prompt: DocumentPrompt) -> TokenisedPart:
    """Tokenise documents: a table with doc_id, title, topic, content, and any other columns.

    null is an empty text.
    """
    token_rows = prompt.rows(*document_fields(documents))
    rows = [row for row in token_rows if isinstance(row, TokenRow)]
    encodable = pa.array([isinstance(row, TokenRow) for row in token_rows], pa.bool_())
    rejected = [
        {"table": "documents", "row": doc_id, "reason": str(row)}
        for doc_id, row in zip(documents["doc_id"].to_pylist(), token_rows, strict=True)
        if isinstance(row, DataError)
    ]
    return TokenisedPart(documents.drop_columns(TEXT_COLUMNS).filter(encodable), rows, rejected)


class DocumentPartEncoder:
    """Worker that encodes parts of documents."""

    def __init__(self, *, config: EncodeConfig, towers: Artifact, load_encoder: LoadEngine) -> None:
        self._config = config
        self._encoder: EncoderEngine = load_encoder(towers, config.token_budget)
        self._similarity = tower_similarity(towers)
        self.peak = self._encoder.peak()

    def __call__(self, _: str, part: tuple[TokenisedPart, pa.Table | None]) -> EncodedPart:
        """Encode a part; the copied embeddings are put in their rows."""
        (documents, rows, rejected), copies = part
        encoding = self._encoder.encode_with_cost(rows, top_k=self._config.top_k)
        views: list[str] = list(self._config.views)
        dtype = self._config.dtype
        columns = [documents["doc_id"], documents["content_hash"]]
        for view in views:
            matrix = encoding.embeddings[:, self._encoder.views.index(view)]
            columns.append(arrow.to_arrow(arrow.as_searched(matrix, self._similarity), dtype=dtype))
        columns += encoding.terms.columns() if encoding.terms else []
        sparse = encoding.terms is not None
        layout = schema.embeddings(views, self._encoder.dim, dtype=dtype, sparse=sparse)
        table = pa.table(columns, schema=layout)
        if copies is not None and len(copies):
            fresh = table.append_column("row", documents["row"])
            table = pa.concat_tables([fresh, copies.select(fresh.column_names)]).sort_by("row")
            table = table.drop_columns("row").cast(layout)
        return EncodedPart(table, encoding.cost + cut_of(rows), rejected)


def embeddings_part(part: str) -> str:
    """Return the name of the part of embeddings of a part of documents."""
    return part.replace("documents/", "embeddings/", 1)


def _documents_part(part: str) -> str:
    return part.replace("embeddings/", "documents/", 1)


# --- changes since earlier embeddings ---------------------------------------------------------------

MAX_SLICE_ROWS = 1 << 22  # of a slice and of a bucket; about 50 bytes each, because no text is kept
PARTS_PER_GROUP = 64
HASHED = pa.schema([("doc_id", pa.string()), schema.CONTENT_HASH])
LOCATED = pa.schema([*HASHED, ("part", pa.int32()), ("row", pa.int32())])
COPY = pa.schema({name: pa.int32() for name in ("part", "row", "base_part", "base_row")})


def content_hashes(documents: pa.Table) -> pa.Array:
    """Compute a hash of each document's title, topic and content: it changes if one of them changes."""
    hashes = []
    for fields in zip(*(documents[name].to_pylist() for name in TEXT_COLUMNS), strict=True):
        # Lengths come first, so that the hash changes if text moves from one field to the next.
        text = b"".join(b"%d:%s" % (len(field), field) for field in map(str.encode, fields))
        hashes.append(hashlib.blake2b(text, digest_size=16).digest())
    return pa.array(hashes, schema.CONTENT_HASH.type)


def compare_with_base(source: Artifact, base: Artifact, draft: Draft) -> dict[str, int]:
    """Find the changes since `base` was encoded, in tasks, and register the table `changes` with the draft.

    Args:
        source: the dataset.
        base: earlier embeddings.
        draft: of the new embeddings; the rows that each part copies are written to its work folder ``base``.

    Returns:
        Numbers of documents ``added``, ``changed``, ``deleted`` and ``copied``.
    """
    folder = draft.work("base")
    run = partial(run_slices, folder=folder, each=cluster.map_tasks, section="encode", unit="tasks")
    sides = ((base, "embeddings"), (source, "documents"))
    buckets = max(-(-sum(artifact.counts["documents"] for artifact, _ in sides) // MAX_SLICE_ROWS), 1)
    for artifact, table in sides:
        task = partial(scatter_hashes, artifact=artifact, table=table, folder=folder, buckets=buckets)
        run(f"scatter-{table}", task, slices(artifact, table, rows=MAX_SLICE_ROWS))
    comparisons = run("compare", partial(compare_bucket, folder=folder, output=draft.uri), range(buckets))
    groups = range(-(-len(source.table_parts("documents")) // PARTS_PER_GROUP))
    copy_counts = run("copies", partial(write_copies, source=source, folder=folder), groups)
    for record in comparisons:
        draft.register(record["name"], Part(**record["part"]))
    counts = {kind: sum(record[kind] for record in comparisons) for kind in ("added", "changed", "deleted")}
    counts["copied"] = sum(copy_counts)
    log.info("since %s: %s", base.uri, ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return counts


def scatter_hashes(item: NumberedSlice, *, artifact: Artifact, table: str, folder: str, buckets: int) -> int:
    """Scatter ids, hashes and locations of a slice of documents or embeddings; return their number."""
    number, parts = item
    part_number = {name: i for i, name in enumerate(artifact.table_parts(table))}
    tables = []
    for part in parts:
        rows = artifact.table(part, DOCUMENT_COLUMNS if table == "documents" else HASHED.names)
        hashes = content_hashes(rows) if table == "documents" else rows["content_hash"]
        place = np.full(len(rows), part_number[part], np.int32)
        columns = [rows["doc_id"], hashes, pa.array(place), pa.array(np.arange(len(rows), dtype=np.int32))]
        tables.append(pa.table(columns, schema=LOCATED))
    located = pa.concat_tables(tables)
    bucket = shuffle.bucket_of(located["doc_id"], buckets)
    shuffle.scatter(located, bucket, target=fs.join(folder, "scattered", table), name=f"{number:05d}")
    return len(located)


def compare_bucket(item: tuple[int, int], *, folder: str, output: str) -> dict[str, Any]:
    """Compare both sides of a bucket: write changes to the artifact, scatter unchanged rows to groups.

    Returns:
        The name and part record of the file of changes, and the number of documents of each kind.
    """
    bucket = item[1]
    now, then = (
        shuffle.gather(fs.join(folder, "scattered", table), bucket, schema=LOCATED)
        for table in ("documents", "embeddings")
    )
    at = pc.index_in(now["doc_id"], value_set=then["doc_id"].combine_chunks())
    before = then.take(at)  # null for a new document
    existed, is_unchanged = (
        at.is_valid(),
        pc.fill_null(pc.equal(now["content_hash"], before["content_hash"]), False),
    )
    columns = [now["part"], now["row"], before["part"], before["row"]]
    copy = pa.table(columns, schema=COPY).filter(is_unchanged)
    group = np.asarray(copy["part"]).astype(np.int64) // PARTS_PER_GROUP
    shuffle.scatter(copy, group, target=fs.join(folder, "copies"), name=f"{bucket:05d}")

    is_deleted = pc.invert(pc.is_in(then["doc_id"], value_set=now["doc_id"].combine_chunks()))
    kinds = {
        "added": now["doc_id"].filter(pc.invert(existed)),
        "changed": now["doc_id"].filter(pc.and_not(existed, is_unchanged)),
        "deleted": then["doc_id"].filter(is_deleted),
    }
    changes = pa.concat_tables(
        pa.table([ids, pa.array([kind] * len(ids), pa.string())], schema=schema.CHANGES)
        for kind, ids in kinds.items()
    ).sort_by("doc_id")
    name = f"changes/part-{bucket:05d}.parquet"
    part = write_table(fs.join(output, name), changes)
    return {"name": name, "part": asdict(part), **{kind: len(ids) for kind, ids in kinds.items()}}


def write_copies(item: tuple[int, int], *, source: Artifact, folder: str) -> int:
    """Write the rows that each part of a group copies; return their number."""
    copies = shuffle.gather(fs.join(folder, "copies"), item[1], schema=COPY)
    copies = copies.sort_by([("part", "ascending"), ("row", "ascending")])
    parts = source.table_parts("documents")
    numbers, starts = np.unique(np.asarray(copies["part"]), return_index=True)
    spans = pairwise([*starts.tolist(), len(copies)])
    for number, (start, stop) in zip(numbers.tolist(), spans, strict=True):
        write_table(fs.join(folder, parts[number]), copies.slice(start, stop - start))
    return len(copies)


def read_copies(part: str, *, folder: str, base: Artifact) -> pa.Table:
    """Read the rows of `base` that a part of documents copies: its columns, and ``row``, the new place."""
    parts = base.table_parts("embeddings")
    layout = pq.read_schema(base.open(parts[0])).append(COPY.field("row"))
    tables = [layout.empty_table()]
    if fs.exists(uri := fs.join(folder, part)):
        copies = read_table(uri)
        for number in np.unique(np.asarray(copies["base_part"])).tolist():
            from_part = copies.filter(pc.equal(copies["base_part"], number))
            rows = base.table(parts[number]).take(from_part["base_row"].combine_chunks())
            tables.append(rows.append_column("row", from_part["row"]))
    return pa.concat_tables(tables).sort_by("row")
