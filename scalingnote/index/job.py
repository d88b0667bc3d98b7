"""The index stage: embeddings, documents and semantic IDs go in, shards of one IVFPQ index come out.

A uniform sample is gathered by one task per part and the quantizer is trained in one task; then one task per
shard adds its range of the corpus. A shard whose commit record is there is not built again, so a killed run
repeats only the shards that were under way. Everything trained or added is stored in faiss's own format.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from jaxtyping import Float
from numpy import ndarray

from scalingnote import cluster
from scalingnote.errors import ArtifactError
from scalingnote.index import ivf, shard
from scalingnote.index.config import IndexConfig
from scalingnote.log import Progress, get_logger
from scalingnote.quantize.job import VIEW, part_rows, read_vectors, sample, use_threads
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_table


def run(config: IndexConfig, *, dataset: str, embeddings: str, semantic_ids: str, output: str) -> Artifact:
    """The index over the `summary` embeddings of a dataset, as an `index` artifact.

    Documents without an embedding (set aside by encode) are not indexed; the manifest counts them.
    """
    log = get_logger("index")
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
        "semantic_ids": open_artifact(semantic_ids, kind="semantic_ids"),
    }
    draft = Draft(output, kind="index", config=config, parents=parents)
    if draft.finished:
        log.info("already finished: %s", output)
        return draft.existing()
    source = parents["embeddings"]
    _require_same_origin(source, parents["semantic_ids"])
    parts = source.names("embeddings/", ".parquet")
    rows = part_rows(source, parts)
    if not sum(rows):
        raise ArtifactError(
            f"{embeddings} has no embedding: every document was set aside, see its rejected.parquet"
        )
    layout = _layout(config, documents=sum(rows), dim=_dim(source, parts))
    cluster.connect()
    cluster.require(config.resources, stage="index")

    quantizer = _quantizer(config, layout, draft, source)
    slices = shard.assign(parts, rows, shards=config.shards)
    written = {shard.COARSE: _write(draft.path(shard.COARSE), ivf.dump_centroids(quantizer.centroids))}
    with Progress("index", total=layout.documents, unit="documents indexed") as progress:
        for files in _build_shards(slices, quantizer, config, draft, parents):
            written |= files
            progress.advance(sum(part.rows or 0 for part in files.values()))
    for name, part in written.items():
        draft.register(name, part)
    draft.write_json(shard.LAYOUT, vars(layout))

    dataset_parts = parents["dataset"].names("documents/", ".parquet")
    size = sum(part.bytes for name, part in written.items() if name.endswith(".faiss"))
    counts = {
        "documents": layout.documents,
        "documents_not_embedded": sum(part_rows(parents["dataset"], dataset_parts)) - layout.documents,
        "shards": layout.shards,
        "bytes": size,
        "bytes_per_vector": round(size / layout.documents),
    }
    log.info(
        "%s documents in %d shards, %d lists, %d bytes per vector: %s",
        f"{layout.documents:,}",
        layout.shards,
        layout.nlist,
        counts["bytes_per_vector"],
        output,
    )
    return draft.commit(counts=counts)


def _require_same_origin(embeddings: Artifact, semantic_ids: Artifact) -> None:
    if embeddings.manifest.parents.get("semantic_ids", {}).get("digest") == semantic_ids.digest:
        return  # these embeddings were fused with these semantic IDs
    origin = semantic_ids.manifest.parents.get("embeddings", {}).get("digest")
    if origin != embeddings.digest:
        raise ArtifactError(
            f"{semantic_ids.uri} was made from embeddings {str(origin)[:12]}, {embeddings.uri} is "
            f"{embeddings.digest[:12]}: re-run quantize on these embeddings"
        )


def _dim(embeddings: Artifact, parts: Sequence[str]) -> int:
    with fs.open_input(fs.join(embeddings.uri, parts[0])) as stream:
        return int(pq.read_schema(stream).field(VIEW).type.list_size)


def _layout(config: IndexConfig, *, documents: int, dim: int) -> shard.Layout:
    """Settings with the defaults filled in that depend on the corpus; refused if it cannot be trained."""
    trained = min(documents, config.train_documents)
    layout = shard.Layout(
        dim=dim,
        documents=documents,
        shards=config.shards,
        nlist=config.nlist or ivf.default_nlist(documents, train_documents=trained),
        m=config.m or ivf.default_m(dim),
        nbits=config.nbits,
        refine=config.refine,
        refine_factor=config.refine_factor,
        nprobe=config.nprobe,
    )
    ivf.require_trainable(trained, dim=dim, nlist=layout.nlist, m=layout.m, nbits=layout.nbits)
    return layout


def _quantizer(config: IndexConfig, layout: shard.Layout, draft: Draft, source: Artifact) -> ivf.Quantizer:
    """Trained, or as a killed run left it."""
    names = ["refine.faiss", "ivfpq.faiss", "coarse.faiss"]  # the last is written last: then all are there
    paths = {name: draft.work(f"quantizer/{name}") for name in names}
    if fs.exists(paths["coarse.faiss"]):
        refine, ivfpq, coarse = (fs.read_bytes(paths[name]) for name in names)
        return ivf.Quantizer(ivf.load_centroids(coarse), ivfpq, refine or None)
    matrices = sample(source, documents=config.train_documents, seed=config.seed, resources=config.resources)
    train = ray.remote(**cluster.actor_options(config.resources))(_train)
    quantizer: ivf.Quantizer = cluster.fetch(train.remote(config, layout, *matrices))
    coarse = ivf.dump_centroids(quantizer.centroids)
    for name, data in zip(names, (quantizer.refine or b"", quantizer.ivfpq, coarse), strict=True):
        fs.write_bytes(paths[name], data)
    return quantizer


def _train(config: IndexConfig, layout: shard.Layout, *matrices: Float[ndarray, "_ dim"]) -> ivf.Quantizer:
    use_threads(config.resources)
    return ivf.train(
        np.concatenate(matrices),
        nlist=layout.nlist,
        m=layout.m,
        nbits=layout.nbits,
        refine=layout.refine,
        iterations=config.iterations,
        seed=config.seed,
    )


def _build_shards(
    slices: Sequence[Sequence[shard.Slice]],
    quantizer: ivf.Quantizer,
    config: IndexConfig,
    draft: Draft,
    parents: Mapping[str, Artifact],
) -> Iterator[dict[str, Part]]:
    """The files of every shard, in order; those that a killed run had finished are taken as they are."""
    records = {number: draft.work(f"shards/{number:05d}.json") for number in range(len(slices))}
    finished = fs.list_files(draft.work("shards"))
    waiting = [number for number in records if f"{number:05d}.json" not in finished]
    build = ray.remote(**cluster.actor_options(config.resources))(_build_shard)
    shared = ray.put(quantizer)
    uris = {name: artifact.uri for name, artifact in parents.items()}
    running = {
        number: build.remote(number, slices[number], shared, config, uris, draft.uri, records[number])
        for number in waiting
    }
    for number, record in records.items():
        if number in running:
            cluster.fetch(running[number])
        yield {name: Part(**part) for name, part in json.loads(fs.read_bytes(record)).items()}


def _build_shard(
    number: int,
    slices: Sequence[shard.Slice],
    quantizer: ivf.Quantizer,
    config: IndexConfig,
    parents: Mapping[str, str],
    output: str,
    record: str,
) -> None:
    use_threads(config.resources)
    dataset, embeddings, semantic_ids = (open_artifact(uri, kind=kind) for kind, uri in parents.items())
    lists = ivf.empty(quantizer)
    stored = [shard.DOCUMENTS.empty_table()]
    for piece in slices:
        doc_ids, vectors = read_vectors(embeddings, piece.part)
        ivf.add(lists, vectors[piece.start : piece.stop])
        base = piece.part.removeprefix("embeddings/")
        stored.append(
            shard.document_rows(
                doc_ids.slice(piece.start, piece.stop - piece.start),
                documents=dataset.table(f"documents/{base}", ["doc_id", "title", "topic", "content"]),
                semantic_ids=semantic_ids.table(f"codes/{base}", ["doc_id", "semantic_id"]),
                snippet_chars=config.snippet_chars,
            )
        )
    files = shard.file_names(number, refine=config.refine != "none")
    paths = [fs.join(output, name) for name in files]
    parts = [write_table(paths[0], pa.concat_tables(stored))]
    parts += [_write(path, data) for path, data in zip(paths[1:], ivf.dump_lists(lists), strict=True)]
    fs.write_bytes(record, json.dumps({n: vars(p) for n, p in zip(files, parts, strict=True)}).encode())


def _write(uri: str, data: bytes) -> Part:
    fs.write_bytes(uri, data)
    return Part(hashlib.sha256(data).hexdigest(), len(data))
