"""The index stage: embeddings, documents and semantic IDs go in, shards of one index come out.

    sample ─train─► quantizer ─┬─ one task per shard ─► shards ─ one task per shard ─► nprobe, refine_factor
    test queries ─query tower──┘   (and exact answers)            (and recall, cost)

A shard whose record is there is not built again. Everything trained or added is stored in faiss's own format.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import cluster, hybrid, topk
from scalingnote.errors import ArtifactError
from scalingnote.index import build, filters, ivf, shard, tuning
from scalingnote.index import family as families
from scalingnote.index.config import IndexConfig
from scalingnote.log import Progress, get_logger
from scalingnote.quantize.job import VIEW, part_rows, sample
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact

log = get_logger("index")
# Where nothing was tuned: near enough for a test, and said so.
UNTUNED_NPROBE, UNTUNED_FACTOR = 16, 4


def run(
    config: IndexConfig,
    *,
    dataset: str,
    embeddings: str,
    semantic_ids: str,
    dual_encoder: str | None = None,
    student: str | None = None,
    output: str,
) -> Artifact:
    """The index over the `summary` embeddings of a dataset, as an `index` artifact.

    Documents without an embedding (set aside by encode) are not indexed; the manifest counts them. With a
    query tower (`student`, or else `dual_encoder`), `nprobe` and `refine_factor` are tuned on test queries.
    """
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
        "semantic_ids": open_artifact(semantic_ids, kind="semantic_ids"),
    }
    for kind, uri in (("student", student), ("dual_encoder", dual_encoder)):
        if uri is not None:
            parents[kind] = open_artifact(uri, kind=kind)
    draft = Draft(output, kind="index", config=config, parents=parents)
    if draft.finished:
        log.info("already finished: %s", output)
        return draft.existing()
    source = parents["embeddings"]
    _require_same_origin(source, parents["semantic_ids"])
    documents = parents["dataset"].names("documents/", ".parquet")
    filters.require_fields(_schema(parents["dataset"], documents[0]), config.filters)
    parts = source.names("embeddings/", ".parquet")
    rows = part_rows(source, parts)
    if not sum(rows):
        raise ArtifactError(
            f"{embeddings} has no embedding: every document was set aside, see its rejected.parquet"
        )
    layout = _layout(config, documents=sum(rows), encoded=_schema(source, parts[0]))
    cluster.connect()
    cluster.require(config.resources, stage="index")

    slices = shard.assign(parts, rows, shards=config.shards)
    quantizer = _quantizer(config, layout, draft, source)
    uris = {kind: artifact.uri for kind, artifact in parents.items()}
    shared = build.Shared(config, layout, uris, output, quantizer, _queries(config, parents, layout))
    written = {
        shard.COARSE: build.write(draft.path(shard.COARSE), ivf.dump(ivf.coarse_of(quantizer.centroids)))
    }
    with Progress("index", total=layout.documents, unit="documents indexed") as progress:
        for files in _fill_shards(slices, shared):
            written |= files
            progress.advance(sum(part.rows or 0 for part in files.values()))
    for name, part in written.items():
        draft.register(name, part)
    sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in slices]
    layout, curve = _tune(shared, sizes)
    draft.write_json(shard.LAYOUT, vars(layout))

    size = sum(part.bytes for name, part in written.items() if name.endswith(".faiss"))
    counts = {
        "documents": layout.documents,
        "documents_not_embedded": sum(part_rows(parents["dataset"], documents)) - layout.documents,
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
    return draft.commit(counts=counts, tuning=curve)


def _require_same_origin(embeddings: Artifact, semantic_ids: Artifact) -> None:
    if embeddings.manifest.parents.get("semantic_ids", {}).get("digest") == semantic_ids.digest:
        return  # these embeddings were fused with these semantic IDs
    origin = semantic_ids.manifest.parents.get("embeddings", {}).get("digest")
    if origin != embeddings.digest:
        raise ArtifactError(
            f"{semantic_ids.uri} was made from embeddings {str(origin)[:12]}, {embeddings.uri} is "
            f"{embeddings.digest[:12]}: re-run quantize on these embeddings"
        )


def _schema(artifact: Artifact, part: str) -> Any:
    with fs.open_input(fs.join(artifact.uri, part)) as stream:
        return pq.read_schema(stream)


def _layout(config: IndexConfig, *, documents: int, encoded: pa.Schema) -> shard.Layout:
    """Settings with the defaults filled in that depend on the corpus; refused if it cannot be trained."""
    dim = encoded.field(VIEW).type.list_size
    family, trained = config.family, min(documents, config.train_documents)
    nlist = 1 if family.kind == "flat" else config.nlist
    nlist = nlist or ivf.default_nlist(documents, train_documents=trained)
    families.require_trainable(family, trained, dim=dim, nlist=nlist)
    refine = families.refine(family)
    factors = tuning.factors(family.kind, refine)
    return shard.Layout(
        dim=dim,
        documents=documents,
        shards=config.shards,
        family=family.kind,
        refine=refine,
        nlist=nlist,
        nprobe=min(config.nprobe or UNTUNED_NPROBE, nlist),
        refine_factor=config.refine_factor or min(UNTUNED_FACTOR, factors[-1]),
        recall=None,
        filters=config.filters,
        sparse="terms" in encoded.names,
        background=None,
    )


def _quantizer(config: IndexConfig, layout: shard.Layout, draft: Draft, source: Artifact) -> ivf.Quantizer:
    """Trained, or as a killed run left it."""
    names = ["kept.faiss", "lists.faiss", "coarse.faiss"]  # the last is written last: then all are there
    paths = {name: draft.work(f"quantizer/{name}") for name in names}
    if fs.exists(paths["coarse.faiss"]):
        kept, lists, coarse = (fs.read_bytes(paths[name]) for name in names)
        index = ivf.parse(coarse)
        return ivf.Quantizer(index.reconstruct_n(0, index.ntotal), lists or None, kept or None)
    matrices = sample(source, documents=config.train_documents, seed=config.seed, resources=config.resources)
    train = ray.remote(**cluster.actor_options(config.resources))(build.train)
    quantizer: ivf.Quantizer = cluster.fetch(train.remote(config, layout.nlist, *matrices))
    coarse = ivf.dump(ivf.coarse_of(quantizer.centroids))
    for name, data in zip(names, (quantizer.kept or b"", quantizer.lists or b"", coarse), strict=True):
        fs.write_bytes(paths[name], data)
    return quantizer


def _queries(
    config: IndexConfig, parents: dict[str, Artifact], layout: shard.Layout
) -> Float[ndarray, "queries dim"] | None:
    """Embeddings of test queries, to tune with; None where nothing is to be tuned, or nothing is there."""
    tower = parents.get("student") or parents.get("dual_encoder")
    if tower is None or not parents["dataset"].table_parts("queries"):
        return None
    if config.nprobe is not None and config.refine_factor is not None:
        return None
    table = parents["dataset"].table("queries", ["query_id", "query", "split"]).sort_by("query_id")
    texts = table.filter(pc.equal(table["split"], "test"))["query"].to_pylist()
    rng = np.random.default_rng(config.seed)
    drawn = np.sort(rng.permutation(len(texts))[: config.tuning.queries])
    if not len(drawn):
        return None
    encode = partial(build.encode, queries=[texts[i] for i in drawn])
    (found,) = cluster.in_order(encode, [tower], config.resources)
    if found.shape[1] != layout.dim:
        log.warning("not tuned: queries have dim %d, documents %d", found.shape[1], layout.dim)
        return None
    return found


def _fill_shards(slices: Sequence[Sequence[shard.Slice]], shared: build.Shared) -> Iterator[dict[str, Part]]:
    """The files of every shard, in order; those that a killed run had finished are taken as they are."""
    finished = fs.list_files(shared.work("shards"))
    waiting = [number for number in range(len(slices)) if f"{number:05d}.json" not in finished]
    fill = partial(build.fill, shared=shared)
    filled = cluster.in_order(fill, [(n, slices[n]) for n in waiting], shared.config.resources)
    for number in range(len(slices)):
        if number in waiting:
            next(filled)
        record = json.loads(fs.read_bytes(shared.work(f"shards/{number:05d}.json")))
        yield {name: Part(**part) for name, part in record.items()}


def _tune(shared: build.Shared, sizes: Sequence[int]) -> tuple[shard.Layout, list[dict[str, Any]]]:
    """The layout with what was found, and the curve of recall and time that says why."""
    config, layout = shared.config, shared.layout
    if shared.queries is None:
        return layout, []
    first = [0, *accumulate(sizes)]
    exact, background = _exact(shared, first)
    tried = [config.nprobe] if config.nprobe else tuning.probes(layout.nlist)
    factors = [config.refine_factor] if config.refine_factor else tuning.factors(layout.family, layout.refine)
    asked = [(number, first[number], nprobe) for nprobe in tried for number in range(len(sizes))]
    measure = partial(build.measure, shared=shared, deepest=factors[-1])
    found = cluster.in_order(measure, asked, config.resources)
    points: list[tuning.Point] = []
    for nprobe in tried:
        shares = list(islice(found, len(sizes)))
        points += tuning.measure(shares, exact, nprobe=nprobe, factors=factors)
    best = tuning.choose(points, target=config.tuning.recall)
    curve = [point for point in points if point.refine_factor == best.refine_factor]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    time = partial(build.time_search, shared=shared, refine_factor=best.refine_factor)
    times = cluster.in_order(time, [(largest, point.nprobe) for point in curve], config.resources)
    log.info(
        "recall@%d of %.3f on %d queries by nprobe=%d of %d lists and refine_factor=%d",
        *(exact.shape[1], best.recall, len(exact), best.nprobe, layout.nlist, best.refine_factor),
    )
    chosen = {name: getattr(best, name) for name in ("nprobe", "refine_factor", "recall")}
    chosen["background"] = background
    timed = [vars(point) | {"us_per_query": us} for point, us in zip(curve, times, strict=True)]
    return shard.Layout(**vars(layout) | chosen), timed


def _exact(shared: build.Shared, first: Sequence[int]) -> tuple[Int[ndarray, "queries k"], float]:
    """Rows of the exact answers of all shards, counted over all of them; and the background of cosines."""
    shares = [build.exact(number, shared) for number in range(len(first) - 1)]
    scores = np.hstack([scores for scores, _, _ in shares])
    rows = np.hstack([rows + start for (_, rows, _), start in zip(shares, first, strict=False)])
    mean = np.sum([total for _, _, total in shares if total.ndim], axis=0) / first[-1]
    assert shared.queries is not None
    background = hybrid.background_of(shared.queries, mean[np.newaxis])
    return topk.merge(scores, rows, k=shared.config.tuning.k)[1], round(background, 6)
