"""Embeddings of a dataset's documents: a part is read on any CPU and encoded in a worker.

    documents ─tokenise─► token rows ─tower─► embeddings, terms ─► embeddings/part-*.parquet

With a base, only documents that changed since earlier embeddings are encoded, and the others copied:

    earlier embeddings ─scatter─┐
                                ├─► buckets of doc_ids ─compare─► groups of parts ─► rows each part copies
    documents ─────────scatter──┘                          └───► changes: added, changed, deleted

A document is unchanged if its content hash is, in any part. Memory is bounded by a slice while hashes are
scattered, then by a bucket or a group. A repeated step writes the same files again.
"""

import functools
import hashlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scalingnote.core import cluster
from scalingnote.core.config import dump
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.encode import engines
from scalingnote.encode.config import EncodeConfig
from scalingnote.encode.encodings import Cost, EncoderEngine
from scalingnote.encode.engines import LoadEngine
from scalingnote.encode.parts import (
    EncodedPart,
    PartRecord,
    Rejections,
    Steps,
    cut_counts,
    cut_summary,
    size_for,
    totals,
    write_parts,
)
from scalingnote.models.prompt import DocumentPrompt, document_fields, from_columns, token_columns
from scalingnote.models.published_model import Similarity
from scalingnote.storage import arrow, schema, shuffle
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import (
    Artifact,
    Draft,
    Part,
    open_artifact,
    read_table,
    write_table,
)
from scalingnote.storage.schema import DOCUMENT_COLUMNS, TEXT_COLUMNS
from scalingnote.storage.shuffle import NumberedSlice, run_slices, slices

log = get_logger("encode")
LoadPrompt = Callable[[Artifact], DocumentPrompt]


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
    load_encoder: LoadEngine | None = None,
    load_prompt: LoadPrompt = load_document_prompt,
) -> Artifact:
    """Build the artifact `embeddings`, in the order and parts of the dataset.

    They have length 1, but where the towers compare by dot their own; the manifest says `similarity`.

    Args:
        config: views, precision, base.
        dataset: URI of the dataset.
        towers: the artifact whose document tower, or cross-encoder, encodes.
        output: URI of the artifact.
        load_encoder: loads what encodes token rows, once in each worker; None: the config's engine.
        load_prompt: loads what makes token rows of texts.

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
    views = engines.check_tower(config, towers)
    if missing := sorted(set(config.views) - set(views)):
        raise ConfigError(
            f"{towers.uri} gives no view {missing} of a document with the engine {config.engine}; "
            f"it gives {list(views)}"
        )
    resources = size_for(config.resources, towers, "document")
    cluster.check_resources_early(resources, knob="encode.resources", task_cpus=resources.readers)
    engines.check_installed(config)
    load_encoder = load_encoder or engines.engine_loader(config)
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
    rejected = [row for record in records for row in record["rejected"] + _rejections_of_part(record, source)]
    draft.write_table("rejected.parquet", pa.Table.from_pylist(rejected, schema=schema.REJECTED))
    counts |= {
        "documents": sum(record["part"]["rows"] for record in records),
        "rejected": len(rejected),
        "tokens": sum(record["tokens"] for record in records),
    } | cut_counts(records)
    if counts["cut_texts"]:
        log.warning("%s", cut_summary(counts))
    if not counts["documents"]:
        raise DataError(f"none of {sum(rows.values())} documents could be encoded: {rejected[:1]}")
    return draft.commit(counts=counts, encoding=totals(records), similarity=tower_similarity(towers))


def _rejections_of_part(record: PartRecord, source: Artifact) -> Rejections:
    """The documents of a part that could not be encoded."""
    if "set_aside" not in record:
        return []
    reason = f"its part could not be encoded: {record['set_aside'].strip().splitlines()[-1]}"
    doc_ids = source.table(record["name"].replace("embeddings/", "documents/", 1), ["doc_id"])["doc_id"]
    return [{"table": "documents", "row": doc_id, "reason": reason} for doc_id in doc_ids.to_pylist()]


def tower_similarity(towers: Artifact) -> Similarity:
    """How search compares the embeddings of an artifact's document tower, or of a cross-encoder's proxies."""
    if towers.manifest.kind == "cross_encoder":
        return "dot" if towers.manifest.config["temperature"] is None else "cosine"
    named = "document/config_sentence_transformers.json"
    facts = towers.read_json(named) if named in towers.names("document/") else {}
    return "dot" if facts.get("similarity_fn_name") == "dot" else "cosine"


def _open_base(config: EncodeConfig, towers: Artifact) -> Artifact:
    """Earlier embeddings to update; ArtifactError if the same documents would be encoded differently now."""
    base = open_artifact(fs.absolute(str(config.base)), kind="embeddings")  # workers open it, too
    made_by = base.manifest.parents.get(towers.manifest.kind, {}).get("digest")
    names = ("engine", "views", "dtype", "top_k")
    settings = {"engine": "own"} | {k: v for k, v in base.manifest.config.items() if k in names}
    wanted = {name: value for name, value in dump(config).items() if name in names}
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
) -> tuple[pa.Table, pa.Table | None, Rejections]:
    """Input of a part: token rows to encode, embeddings to copy, and documents that cannot be encoded."""
    documents = source.table(name.replace("embeddings/", "documents/", 1), DOCUMENT_COLUMNS)
    documents = documents.append_column(schema.CONTENT_HASH, content_hashes(documents))
    documents = documents.append_column("row", pa.array(np.arange(len(documents), dtype=np.int32)))
    copies = None
    if base is not None:
        number = _part_numbers(source.uri)[name]
        copies = read_copies(number, folder=folder, base=base)
        same = pc.is_in(documents["row"], value_set=copies["row"].combine_chunks())
        documents = documents.filter(pc.invert(same))
    tokens, rejected = tokenise(documents, _prompt(load_prompt, towers.uri, towers.manifest.kind))
    return tokens, copies, rejected


@functools.lru_cache(1)
def _part_numbers(dataset: str) -> dict[str, int]:
    """Part of embeddings -> number of its part of documents, of the data set at a URI."""
    parts = open_artifact(dataset, kind="dataset").table_parts("documents")
    return {embeddings_part(part): number for number, part in enumerate(parts)}


@functools.cache
def _prompt(load: LoadPrompt, uri: str, kind: str) -> DocumentPrompt:
    return load(open_artifact(uri, kind=kind))


def tokenise(documents: pa.Table, prompt: DocumentPrompt) -> tuple[pa.Table, Rejections]:
    """Token rows of documents.

    Args:
        documents: a table with doc_id, title, topic, content, and any other columns; null is an empty text.
        prompt: of the document tower.

    Returns:
        The documents that can be encoded, in order, with ``ids`` and ``positions`` in place of the texts, and
        how many tokens are ``lost`` because the model does not read them; and the others with the reason.
    """
    rows, encodable, rejected = [], [], []
    results = prompt.rows(*document_fields(documents))
    for doc_id, row in zip(documents["doc_id"].to_pylist(), results, strict=True):
        encodable.append(not isinstance(row, DataError))
        if isinstance(row, DataError):
            rejected.append({"table": "documents", "row": doc_id, "reason": str(row)})
        else:
            rows.append(row)
    table = documents.drop_columns(TEXT_COLUMNS).filter(pa.array(encodable, pa.bool_()))
    for name, column in token_columns([rows], views=prompt.width).items():
        table = table.append_column(name, column)
    return table.append_column("lost", pa.array([row.lost for row in rows], pa.int64())), rejected


class DocumentPartEncoder:
    """Encodes parts of documents, in a worker."""

    def __init__(self, *, config: EncodeConfig, towers: Artifact, load_encoder: LoadEngine) -> None:
        self._config = config
        self._encoder: EncoderEngine = load_encoder(towers, config.token_budget)
        self._similarity = tower_similarity(towers)
        self.peak = self._encoder.peak()

    def __call__(self, _: str, part: tuple[pa.Table, pa.Table | None, Rejections]) -> EncodedPart:
        """Embeddings of a part, with the copied ones in their rows."""
        tokens, copies, rejected = part
        views: list[str] = list(self._config.views)
        dtype = self._config.dtype
        encoding = self._encoder.encode_with_cost(from_columns(tokens), top_k=self._config.top_k)
        matrices = [encoding.embeddings[:, self._encoder.views.index(view)] for view in views]
        searched = (arrow.as_searched(matrix, self._similarity) for matrix in matrices)
        columns = [arrow.to_arrow(matrix, dtype=dtype) for matrix in searched]
        columns += encoding.terms.columns() if encoding.terms else []
        sparse = encoding.terms is not None
        layout = schema.embeddings(views, self._encoder.dim, dtype=dtype, sparse=sparse)
        table = pa.table([tokens["doc_id"], tokens["content_hash"], *columns], schema=layout)
        if copies is not None and len(copies):
            fresh = table.append_column("row", tokens["row"])
            table = pa.concat_tables([fresh, copies.select(fresh.column_names)]).sort_by("row")
            table = table.drop_columns("row").cast(layout)
        return EncodedPart(table, encoding.cost + cut_of(tokens), rejected)


def cut_of(tokens: pa.Table) -> Cost:
    """How many token rows of :func:`tokenise` are cut, and of how many tokens."""
    lost = tokens["lost"].to_numpy()
    return Cost(cut_texts=int(np.count_nonzero(lost)), lost_tokens=int(lost.sum()))


def embeddings_part(part: str) -> str:
    """The part of embeddings of a part of documents."""
    return part.replace("documents/", "embeddings/", 1)


# --- changes since earlier embeddings ---------------------------------------------------------------

MAX_SLICE_ROWS = 1 << 22  # of a slice and of a bucket; about 50 bytes each, since no text is kept
PARTS_PER_GROUP = 64
HASHED = pa.schema([("doc_id", pa.string()), schema.CONTENT_HASH])
LOCATED = pa.schema([*HASHED, ("part", pa.int32()), ("row", pa.int32())])
COPY = pa.schema({name: pa.int32() for name in ("part", "row", "base_part", "base_row")})


def content_hashes(documents: pa.Table) -> pa.Array:
    """A hash of each document's title, topic and content: equal as long as none of them changed."""
    texts = zip(*(documents[name].to_pylist() for name in TEXT_COLUMNS), strict=True)
    return pa.array(
        # Lengths come first, so that moving text from one field to the next changes the hash.
        [
            hashlib.blake2b(
                b"".join(b"%d:%s" % (len(text), text) for text in map(str.encode, fields)), digest_size=16
            ).digest()
            for fields in texts
        ],
        schema.CONTENT_HASH.type,
    )


def compare_with_base(source: Artifact, base: Artifact, draft: Draft) -> dict[str, int]:
    """Find what changed since `base` was encoded, in tasks, and register the table `changes` with the draft.

    Args:
        source: the dataset.
        base: earlier embeddings.
        draft: of the new embeddings; what each part copies is written to its work folder ``base``.

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
    compared = run("compare", partial(compare_bucket, folder=folder, output=draft.uri), range(buckets))
    groups = range(-(-len(source.table_parts("documents")) // PARTS_PER_GROUP))
    copied = run("copies", partial(write_copies, folder=folder), groups)
    for record in compared:
        draft.register(record["name"], Part(**record["part"]))
    counts = {kind: sum(record[kind] for record in compared) for kind in ("added", "changed", "deleted")}
    counts["copied"] = sum(copied)
    log.info("since %s: %s", base.uri, ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return counts


def scatter_hashes(item: NumberedSlice, *, artifact: Artifact, table: str, folder: str, buckets: int) -> int:
    """Scatter ids, hashes and locations of a slice of documents or embeddings; returns their number."""
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

    Returns the file of changes and the number of documents of each kind.
    """
    bucket = item[1]
    now, then = (
        shuffle.gather(fs.join(folder, "scattered", table), bucket, schema=LOCATED)
        for table in ("documents", "embeddings")
    )
    at = pc.index_in(now["doc_id"], value_set=then["doc_id"].combine_chunks())
    known = np.asarray(pc.is_valid(at))
    before = then.take(at.filter(pa.array(known)))
    same = np.zeros(len(now), bool)
    same[known] = np.asarray(pc.equal(now["content_hash"].filter(pa.array(known)), before["content_hash"]))
    copy = now.filter(pa.array(same)).select(["part", "row"])
    for name in ("part", "row"):
        copy = copy.append_column(f"base_{name}", before[name].filter(pa.array(same[known])))
    group = np.asarray(copy["part"]).astype(np.int64) // PARTS_PER_GROUP
    shuffle.scatter(copy, group, target=fs.join(folder, "copies"), name=f"{bucket:05d}")

    gone = pc.invert(pc.is_in(then["doc_id"], value_set=now["doc_id"].combine_chunks()))
    kinds = {
        "added": now["doc_id"].filter(pa.array(~known)),
        "changed": now["doc_id"].filter(pa.array(known & ~same)),
        "deleted": then["doc_id"].filter(gone),
    }
    changes = pa.concat_tables(
        pa.table([ids, pa.array([kind] * len(ids), pa.string())], schema=schema.CHANGES)
        for kind, ids in kinds.items()
    ).sort_by("doc_id")
    name = f"changes/part-{bucket:05d}.parquet"
    part = write_table(fs.join(output, name), changes)
    return {"name": name, "part": asdict(part), **{kind: len(ids) for kind, ids in kinds.items()}}


def write_copies(item: tuple[int, int], *, folder: str) -> int:
    """Write which rows each part of a group copies; returns their number."""
    copies = shuffle.gather(fs.join(folder, "copies"), item[1], schema=COPY)
    copies = copies.sort_by([("part", "ascending"), ("row", "ascending")])
    numbers, starts = np.unique(np.asarray(copies["part"]), return_index=True)
    spans = pairwise([*starts.tolist(), len(copies)])
    for number, (start, stop) in zip(numbers.tolist(), spans, strict=True):
        write_table(_copies_uri(folder, number), copies.slice(start, stop - start))
    return len(copies)


def read_copies(number: int, *, folder: str, base: Artifact) -> pa.Table:
    """The rows that a part copies from `base`: columns of its embeddings, and ``row``, their place."""
    uri = _copies_uri(folder, number)
    parts = base.table_parts("embeddings")
    layout = pq.read_schema(base.open(parts[0])).append(COPY.field("row"))
    tables = [layout.empty_table()]
    if fs.exists(uri):
        copies = read_table(uri)
        for part in np.unique(np.asarray(copies["base_part"])).tolist():
            from_part = copies.filter(pc.equal(copies["base_part"], part))
            rows = base.table(parts[part]).take(from_part["base_row"].combine_chunks())
            tables.append(rows.append_column("row", from_part["row"]))
    return pa.concat_tables(tables).sort_by("row")


def _copies_uri(folder: str, number: int) -> str:
    return fs.join(folder, "copy", f"{number:05d}.parquet")
