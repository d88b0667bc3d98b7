"""The index stage, which builds shards of one index from embeddings, documents and semantic IDs.

    sample ─train─► quantizer ─┬─ one task per shard ─► shards ─┬─ some, in one task ─► nprobe, refine_factor
    test queries ─query tower──┘   (and exact answers)          └─ one task per shard ─► dense weight

A shard is written file by file and recorded when it is complete: after a kill, only shards without a record
are built again. Quantizers and lists are stored in faiss's format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core import GIB, cluster, topk
from scalingnote.core.config import Resources
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import get_logger
from scalingnote.datasets import passages, splits
from scalingnote.encode.lexical import weights
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.index import families, filters, ivf, postings, shard, tuning
from scalingnote.index.config import IndexConfig
from scalingnote.index.tuning import IndexRun
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.quantize.job import part_rows, read_sample, read_vectors, store_sample, use_threads
from scalingnote.quantize.kmeans import SAMPLE_SEED
from scalingnote.quantize.semantic_id import require_origin
from scalingnote.storage import arrow
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_file
from scalingnote.storage.schema import INDEXED_VIEW, SPARSE
from scalingnote.storage.shuffle import run_slices

log = get_logger("index")
# Values without tuning, sufficient for tests; the recall of the layout is None then.
UNTUNED_NPROBE, UNTUNED_FACTOR = 16, 4
SHARD_BYTES = 4 << 30  # limit of vectors, terms and documents, if the number of shards is not configured
MIN_SHARDS = 2
SIZE_SAMPLE_ROWS = 4096  # rows whose documents and terms are measured
# A task holds the files of a shard, the data from which they are written and a copy of the largest file: it
# grew by 565 bytes per document (docs/results/scale.json), which takes 211 bytes in these files.
FILL_COPIES = 3
_READ = ("dataset", "embeddings", "semantic_ids", "bm25_terms")  # parents that the task of a shard reads


def run(
    config: IndexConfig,
    *,
    dataset: str,
    embeddings: str,
    semantic_ids: str,
    dual_encoder: str | None = None,
    student: str | None = None,
    bm25_terms: str | None = None,
    output: str,
) -> Artifact:
    """Build an index over the `summary` embeddings of a dataset.

    Documents without an embedding (rejected by encode) are not indexed; the manifest counts them.

    Args:
        config: of the stage.
        dataset: URI of documents, test queries and judgements.
        embeddings: URI of the documents' embeddings.
        semantic_ids: URI of the IDs that were computed from these embeddings.
        dual_encoder: URI of the dual encoder; its query tower encodes the queries for tuning.
        student: URI of a query tower that is used for tuning instead.
        bm25_terms: URI of document terms; None: those of the embeddings, if any.
        output: URI of the `index` artifact.

    Raises:
        ArtifactError: the parents do not belong together, or there are no embeddings.
        ConfigError: the settings do not fit the corpus.
    """
    optional = {"student": student, "dual_encoder": dual_encoder, "bm25_terms": bm25_terms}
    uris = {"dataset": dataset, "embeddings": embeddings, "semantic_ids": semantic_ids}
    uris |= {kind: uri for kind, uri in optional.items() if uri is not None}
    parents = {kind: open_artifact(uri, kind=kind) for kind, uri in uris.items()}
    draft = Draft(output, kind="index", config=config, parents=parents)
    if draft.finished:
        log.info("already finished: %s", output)
        return draft.existing()
    layout, slices, shard_bytes = _plan(config, parents)
    cluster.connect()
    cluster.check_resources(config.resources, knob="index.resources")
    shard_resources = _resources_of_shards(config.resources, layout, shard_bytes)
    _train_quantizer(config, layout, draft, parents["embeddings"])
    queries, relevant = _test_queries(parents["dataset"])
    sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in slices]
    shared = IndexRun(
        config=config.model_copy(update={"resources": shard_resources}),
        layout=layout,
        parents=uris,
        output=output,
        sampled=tuning.sampled_shards(sizes, tuning.MAX_SHARDS),
        queries=_queries(config, parents, layout, queries),
        terms=_terms(parents, layout, queries),
        judged=tuple(sorted(set().union(*relevant))),
    )
    counts = _counts(parents["dataset"], layout, _write(draft, slices, sizes, shared))
    layout, tuned = tuning.tune_recall(shared, sizes)
    layout, by_weight = tuning.tune_weight(shared, layout, sizes, relevant)
    draft.write_json(shard.LAYOUT_FILE, vars(layout))
    figures = f"{layout.documents:,}", layout.shards, layout.nlist, counts["bytes_per_vector"], output
    log.info("%s documents in %d shards, %d lists, %d bytes per vector: %s", *figures)
    return draft.commit(counts=counts, hybrid_tuning=by_weight, **tuned)


def _counts(dataset: Artifact, layout: shard.IndexLayout, searched_bytes: int) -> dict[str, int]:
    documents = sum(part_rows(dataset, dataset.names("documents/", ".parquet")))
    return {
        "documents": layout.documents,
        "documents_not_embedded": documents - layout.documents,
        "shards": layout.shards,
        "bytes": searched_bytes,
        "bytes_per_vector": round(searched_bytes / layout.documents),
    }


def _plan(
    config: IndexConfig, parents: Mapping[str, Artifact]
) -> tuple[shard.IndexLayout, list[list[shard.EmbeddingSlice]], int]:
    """Return the layout, the embeddings of each shard, and the bytes of the files of one shard.

    Raises:
        ArtifactError: the parents do not belong together, or there are no embeddings.
        ConfigError: the settings do not fit the corpus.
    """
    source = parents["embeddings"]
    _require_same_origin(source, parents["semantic_ids"])
    documents = parents["dataset"].names("documents/", ".parquet")
    filters.require_fields(_schema(parents["dataset"], documents[0]), config.filters)
    parts = source.names("embeddings/", ".parquet")
    rows = part_rows(source, parts)
    if not sum(rows):
        raise ArtifactError(
            f"{source.uri} has no embeddings: all documents were set aside, see its rejected.parquet"
        )
    encoded = _schema(source, parts[0])
    sparse = "bm25_terms" in parents or "terms" in encoded.names
    layout = _layout(
        config, documents=sum(rows), dim=encoded.field(INDEXED_VIEW).type.list_size, sparse=sparse
    )
    layout = replace(
        layout,
        similarity=source.manifest.info.get("similarity", "cosine"),
        passages=passages.settings(parents["dataset"]) is not None,
    )
    first = next(part for part, count in zip(parts, rows, strict=True) if count)
    size = layout.documents * _bytes_per_document(config, layout, parents, first)
    shards = config.shards or max(MIN_SHARDS, -(-size // SHARD_BYTES))
    return replace(layout, shards=shards), shard.assign(parts, rows, shards=shards), -(-size // shards)


def _bytes_per_document(
    config: IndexConfig, layout: shard.IndexLayout, parents: Mapping[str, Artifact], part: str
) -> int:
    """Estimate the bytes of a document in the files of a shard from the first documents of a part."""
    piece = shard.EmbeddingSlice(part, 0, SIZE_SAMPLE_ROWS)
    doc_ids = parents["embeddings"].table(part, ["doc_id"])["doc_id"]
    documents, terms = _part_rows(piece, doc_ids, parents, config, sparse=layout.sparse)
    columns = documents.select(shard.searched_columns(config.filters))
    tables = [documents, columns] if terms is None else [documents, columns, terms]
    ids = shard.ID_ROW_BYTES + families.vector_bytes(config.family, dim=layout.dim)
    return int(ids + -(-sum(table.nbytes for table in tables) // len(documents)))


def _resources_of_shards(resources: Resources, layout: shard.IndexLayout, shard_bytes: int) -> Resources:
    """Return the resources of a task that fills or opens a shard, with its memory if that is at least 1 GiB.

    Raises:
        ConfigError: no node has the memory of one task.
    """
    needed = FILL_COPIES * shard_bytes / GIB
    if resources.memory_per_worker or needed < 1:
        return resources
    shard_resources = resources.model_copy(update={"memory_per_worker": round(needed, 1)})
    try:
        cluster.check_resources(shard_resources, knob="index.resources")
    except ConfigError as error:
        raise ConfigError(
            f"{error}. The task of a shard of {-(-layout.documents // layout.shards):,} documents takes "
            f"{needed:,.1f} GiB: set index.shards above {layout.shards}, or index.resources.workers lower"
        ) from None
    return shard_resources


def _write(
    draft: Draft, slices: Sequence[Sequence[shard.EmbeddingSlice]], sizes: Sequence[int], shared: IndexRun
) -> int:
    """Write the files of every shard and the shared ones; return the bytes of vectors and lists."""
    coarse = fs.read_bytes(shared.work(f"quantizer/{shard.COARSE}"))
    files = {shard.COARSE: write_file(draft.path(shard.COARSE), coarse)}
    records = run_slices(
        "shards",
        partial(_fill_shard, shared=shared),
        slices,
        folder=draft.work(),
        each=partial(cluster.map_tasks, resources=shared.config.resources),
        section="index",
        unit="documents indexed",
        rows=sizes,
    )
    for record in records:
        files |= {name: Part(**part) for name, part in record.items()}
    for name, file in files.items():
        draft.register(name, file)
    return sum(file.bytes for name, file in files.items() if name.endswith(".faiss"))


def _require_same_origin(embeddings: Artifact, semantic_ids: Artifact) -> None:
    """Raise an ArtifactError unless the IDs come from these embeddings, or these were fused with the IDs."""
    fused_with = embeddings.manifest.parents.get("semantic_ids", {}).get("digest")
    if fused_with != semantic_ids.digest:
        require_origin(semantic_ids, embeddings)


def _schema(artifact: Artifact, part: str) -> Any:
    with fs.open_input(fs.join(artifact.uri, part)) as stream:
        return pq.read_schema(stream)


def _layout(config: IndexConfig, *, documents: int, dim: int, sparse: bool) -> shard.IndexLayout:
    """Resolve defaults that depend on the corpus; raise a ConfigError if it is too small for training."""
    family, trained = config.family, min(documents, config.train_documents)
    nlist = 1 if family.kind == "flat" else config.nlist
    nlist = nlist or families.default_nlist(documents, train_documents=trained)
    families.require_trainable(family, trained, dim=dim, nlist=nlist)
    refine = families.refine_of(family)
    factors = tuning.factors(family.kind, refine)
    return shard.IndexLayout(
        dim=dim,
        documents=documents,
        shards=config.shards or MIN_SHARDS,
        family=family.kind,
        refine=refine,
        nlist=nlist,
        nprobe=min(config.nprobe or UNTUNED_NPROBE, nlist),
        refine_factor=config.refine_factor or min(UNTUNED_FACTOR, factors[-1]),
        recall=None,
        filters=config.filters,
        sparse=sparse,
    )


def _train_quantizer(config: IndexConfig, layout: shard.IndexLayout, draft: Draft, source: Artifact) -> None:
    """Train the quantizer in a task that stores it for other tasks, unless an earlier run stored it."""
    folder = draft.work("quantizer")
    if fs.exists(fs.join(folder, shard.COARSE)):  # the last file that is written
        return
    size = families.sample_size(config, layout.documents, nlist=layout.nlist)
    sample = draft.work("sample")
    files = store_sample(source, documents=size, seed=SAMPLE_SEED, folder=sample, section="index")
    train = partial(_train, config=config, nlist=layout.nlist, sample=sample, folder=folder)
    list(cluster.map_tasks(train, [files], config.resources))


def _test_queries(dataset: Artifact) -> tuple[pa.Table, list[dict[str, int]]]:
    """Draw test queries for tuning, with the judgements of each: doc_id -> grade."""
    table = splits.queries(dataset, "test").sort_by("query_id")
    rng = np.random.default_rng(SAMPLE_SEED)
    queries = table.take(np.sort(rng.permutation(len(table))[: tuning.TUNING_QUERIES]))
    judged: dict[str, dict[str, int]] = {query_id: {} for query_id in queries["query_id"].to_pylist()}
    if judged:
        for row in splits.judgements(dataset, queries["query_id"]).to_pylist():
            judged[row["query_id"]][row["doc_id"]] = row["relevance"]
    return queries, list(judged.values())


def _queries(
    config: IndexConfig, parents: dict[str, Artifact], layout: shard.IndexLayout, queries: pa.Table
) -> Float[ndarray, "queries dim"] | None:
    """Encode the test queries; None if nothing needs tuning, or there are no queries or no query tower."""
    tower = parents.get("student") or parents.get("dual_encoder")
    is_fixed = config.nprobe is not None and config.refine_factor is not None and not layout.sparse
    if tower is None or is_fixed or not len(queries):
        return None
    encode = partial(_encode_queries, queries=queries["query"].to_pylist())
    (embeddings,) = cluster.map_tasks(encode, [tower], config.resources)
    if embeddings.shape[1] != layout.dim:
        log.warning("not tuned: queries have dim %d, documents %d", embeddings.shape[1], layout.dim)
        return None
    return embeddings


def _terms(parents: dict[str, Artifact], layout: shard.IndexLayout, queries: pa.Table) -> SparseRows | None:
    """Compute terms of the test queries in the vocabulary of the documents; None if no weight is tuned."""
    source = parents.get("bm25_terms") or parents.get("dual_encoder")
    if not layout.sparse or source is None or not source.names("sparse_query/"):
        return None
    if layout.passages:  # judgements, which tune the weight, refer to documents
        return None
    return SparseQuery.load(source.directory("sparse_query")).encode(queries["query"].to_pylist())


def _train(files: int, *, config: IndexConfig, nlist: int, sample: str, folder: str) -> None:
    """Train a quantizer on a sample in this number of files, and store it (a task)."""
    use_threads(config.resources)
    quantizer = families.train(read_sample(sample, files), config.family, nlist=nlist, seed=SAMPLE_SEED)
    families.write_quantizer(folder, quantizer)


def _encode_queries(tower: Artifact, *, queries: Sequence[str]) -> Float[ndarray, "queries dim"]:
    """Compute unit embeddings of queries by the query tower of an artifact (a task)."""
    return arrow.l2_normalize(QueryEncoder(tower.directory("query")).encode_queries(queries))


def _fill_shard(item: tuple[int, Sequence[shard.EmbeddingSlice]], *, shared: IndexRun) -> dict[str, Any]:
    """Write a shard and its exact answers for the tuning queries, and return its files (a task)."""
    number, slices = item
    config, layout = shared.config, shared.layout
    use_threads(config.resources)
    parents = {kind: open_artifact(uri, kind=kind) for kind, uri in shared.parents.items() if kind in _READ}
    embeddings = parents["embeddings"]
    lists = ivf.empty(families.read_quantizer(shared.work("quantizer")))
    documents: list[pa.Table] = []
    segments: list[postings.Postings] = []
    queries = shared.queries if number in shared.sampled else None
    exact, total = topk.Best(0 if queries is None else len(queries), config.tuning.k), np.zeros(layout.dim)
    # A shard without documents has the columns of the others.
    nothing = shard.EmbeddingSlice(embeddings.names("embeddings/", ".parquet")[0], 0, 0)
    for piece in slices or [nothing]:
        doc_ids, matrix = read_vectors(embeddings, piece.part)
        matrix = matrix[piece.start : piece.stop]
        if queries is not None:
            exact.add_documents(queries, matrix, np.arange(len(lists), len(lists) + len(matrix)))
            total += matrix.sum(0, dtype=np.float64)
        ivf.add(lists, matrix)
        rows, terms = _part_rows(piece, doc_ids, parents, config, sparse=layout.sparse)
        documents.append(rows)
        if terms is not None:
            segments.append(postings.build(terms["terms"], terms["impacts"], strongest=config.terms))
    parts = shard.write_shard(
        shared.output,
        number,
        layout=layout,
        lists=lists,
        documents=pa.concat_tables(documents),
        terms=postings.merge(segments),
    )
    if queries is not None:
        tuning.write_exact_answers(shared, number, exact, total)
    return {name: vars(part) for name, part in parts.items()}


def _part_rows(
    piece: shard.EmbeddingSlice,
    doc_ids: pa.ChunkedArray,
    parents: Mapping[str, Artifact],
    config: IndexConfig,
    *,
    sparse: bool,
) -> tuple[pa.Table, pa.Table | None]:
    """Build rows of a shard's document table from a slice of a part, with their terms if `sparse`.

    `doc_ids` are those of the entire part.
    """
    base, rows = piece.part.removeprefix("embeddings/"), piece.stop - piece.start
    slice_ids = doc_ids.slice(piece.start, rows)
    has_passages = passages.settings(parents["dataset"]) is not None
    columns = shard.document_columns(config.filters, passages=has_passages)
    documents = shard.document_rows(
        slice_ids,
        documents=parents["dataset"].table(f"documents/{base}", columns),
        semantic_ids=parents["semantic_ids"].table(f"codes/{base}", ["doc_id", "semantic_id"]),
        snippet_chars=config.snippet_chars,
    )
    if not sparse:
        return documents, None
    if "bm25_terms" in parents:
        return documents, weights.read_columns(parents["bm25_terms"], base, slice_ids)
    return documents, parents["embeddings"].table(piece.part, SPARSE.names).slice(piece.start, rows)
