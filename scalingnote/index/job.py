"""The index stage: embeddings, documents and semantic IDs go in, shards of one index come out.

    sample ─train─► quantizer ─┬─ one task per shard ─► shards ─ one task per shard ─► nprobe, refine_factor
    test queries ─query tower──┘   (and exact answers)            (and recall, cost)   weight of dense scores

A shard whose record is there is not built again. Everything trained or added is stored in faiss's own format.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import cluster, hybrid, topk
from scalingnote.datasets import trainable
from scalingnote.errors import ArtifactError
from scalingnote.index import build, filters, ivf, shard, tuning
from scalingnote.index import family as families
from scalingnote.index.config import IndexConfig
from scalingnote.log import Progress, get_logger
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.quantize.job import VIEW, part_rows, sample
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_file

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
    bm25_terms: str | None = None,
    output: str,
) -> Artifact:
    """The index over the `summary` embeddings of a dataset, as an `index` artifact.

    Documents without an embedding (set aside by encode) are not indexed; the manifest counts them. With a
    query tower (`student`, or else `dual_encoder`), `nprobe` and `refine_factor` are tuned on test queries;
    where documents have terms, so is the weight of embeddings in hybrid search, by what is known as relevant.
    Terms are those of `bm25_terms`, or else those that the document tower has encoded.
    """
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "embeddings": open_artifact(embeddings, kind="embeddings"),
        "semantic_ids": open_artifact(semantic_ids, kind="semantic_ids"),
    }
    for kind, uri in (("student", student), ("dual_encoder", dual_encoder), ("bm25_terms", bm25_terms)):
        if uri is not None:
            parents[kind] = open_artifact(uri, kind=kind)
    draft = Draft(output, kind="index", config=config, parents=parents)
    if draft.finished:
        log.info("already finished: %s", output)
        return draft.existing()
    layout, slices = _planned(config, parents)
    cluster.connect()
    cluster.check_resources(config.resources, knob="index.resources")

    quantizer = _quantizer(config, layout, draft, parents["embeddings"])
    drawn = _drawn(config, parents["dataset"])
    relevant = _relevant(parents["dataset"], drawn)
    shared = build.Shared(
        *(config, layout, {kind: artifact.uri for kind, artifact in parents.items()}, output, quantizer),
        queries=_queries(config, parents, layout, drawn),
        terms=_terms(parents, layout, drawn),
        judged=tuple(sorted({doc_id for judged in relevant for doc_id in judged})),
    )
    size = _write(draft, slices, shared)
    sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in slices]
    layout, curve = _tune(shared, sizes)
    layout, by_weight = _tune_weight(shared, layout, sizes, relevant)
    draft.write_json(shard.LAYOUT, vars(layout))

    documents, bytes_each = layout.documents, round(size / layout.documents)
    whole = sum(part_rows(parents["dataset"], parents["dataset"].names("documents/", ".parquet")))
    log.info(
        "%s documents in %d shards, %d lists, %d bytes per vector: %s",
        *(f"{documents:,}", layout.shards, layout.nlist, bytes_each, output),
    )
    counts = {"documents": documents, "documents_not_embedded": whole - documents, "shards": layout.shards}
    counts |= {"bytes": size, "bytes_per_vector": bytes_each}
    return draft.commit(counts=counts, tuning=curve, hybrid_tuning=by_weight)


def _planned(
    config: IndexConfig, parents: Mapping[str, Artifact]
) -> tuple[shard.Layout, list[list[shard.Slice]]]:
    """The layout, and which embeddings each shard takes; an error where no index can be built of them."""
    source = parents["embeddings"]
    _require_same_origin(source, parents["semantic_ids"])
    documents = parents["dataset"].names("documents/", ".parquet")
    filters.require_fields(_schema(parents["dataset"], documents[0]), config.filters)
    parts = source.names("embeddings/", ".parquet")
    rows = part_rows(source, parts)
    if not sum(rows):
        raise ArtifactError(
            f"{source.uri} has no embedding: every document was set aside, see its rejected.parquet"
        )
    encoded = _schema(source, parts[0])
    sparse = "bm25_terms" in parents or "terms" in encoded.names
    layout = _layout(config, documents=sum(rows), dim=encoded.field(VIEW).type.list_size, sparse=sparse)
    return layout, shard.assign(parts, rows, shards=config.shards)


def _write(draft: Draft, slices: Sequence[Sequence[shard.Slice]], shared: build.Shared) -> int:
    """Every shard's files, and those that all share; the bytes of what is searched."""
    coarse = ivf.dump(ivf.coarse_of(shared.quantizer.centroids))
    written = {shard.COARSE: write_file(draft.path(shard.COARSE), coarse)}
    with Progress("index", total=shared.layout.documents, unit="documents indexed") as progress:
        for files in _fill_shards(slices, shared):
            written |= files
            progress.advance(sum(part.rows or 0 for part in files.values()))
    for name, part in written.items():
        draft.register(name, part)
    return sum(part.bytes for name, part in written.items() if name.endswith(".faiss"))


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


def _layout(config: IndexConfig, *, documents: int, dim: int, sparse: bool) -> shard.Layout:
    """Settings with the defaults filled in that depend on the corpus; refused if it cannot be trained."""
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
        sparse=sparse,
        background=None,
    )


def _quantizer(config: IndexConfig, layout: shard.Layout, draft: Draft, source: Artifact) -> ivf.Quantizer:
    """Trained, or as a killed run left it."""
    folder = draft.work("quantizer")
    if fs.exists(fs.join(folder, shard.COARSE)):  # the last that is written
        return ivf.parse_quantizer(
            {name: fs.read_bytes(fs.join(folder, name)) for name in fs.list_files(folder)}
        )
    matrices = sample(source, documents=config.train_documents, seed=config.seed)
    train = ray.remote(**cluster.actor_options(config.resources))(build.train)
    quantizer: ivf.Quantizer = cluster.task_result(train.remote(config, layout.nlist, *matrices))
    for name, data in ivf.dump_quantizer(quantizer).items():
        fs.write_bytes(fs.join(folder, name), data)
    return quantizer


def _drawn(config: IndexConfig, dataset: Artifact) -> pa.Table:
    """Test queries to tune with."""
    table = trainable.queries(dataset, "test").sort_by("query_id")
    rng = np.random.default_rng(config.seed)
    return table.take(np.sort(rng.permutation(len(table))[: config.tuning.queries]))


def _queries(
    config: IndexConfig, parents: dict[str, Artifact], layout: shard.Layout, drawn: pa.Table
) -> Float[ndarray, "queries dim"] | None:
    """Their embeddings; None where nothing is to be tuned, or nothing is there."""
    tower = parents.get("student") or parents.get("dual_encoder")
    fixed = config.nprobe is not None and config.refine_factor is not None and not layout.sparse
    if tower is None or fixed or not len(drawn):
        return None
    encode = partial(build.encode, queries=drawn["query"].to_pylist())
    (found,) = cluster.map_tasks_in_order(encode, [tower], config.resources)
    if found.shape[1] != layout.dim:
        log.warning("not tuned: queries have dim %d, documents %d", found.shape[1], layout.dim)
        return None
    return found


def _terms(parents: dict[str, Artifact], layout: shard.Layout, drawn: pa.Table) -> SparseRows | None:
    """Their terms, by the vocabulary that documents were encoded with; None where these have none."""
    source = parents.get("bm25_terms") or parents.get("dual_encoder")
    if not layout.sparse or source is None or not source.names("sparse_query/"):
        return None
    return SparseQuery.load(source.directory("sparse_query")).encode(drawn["query"].to_pylist())


def _relevant(dataset: Artifact, drawn: pa.Table) -> list[dict[str, int]]:
    """The judgements of each: doc_id -> grade."""
    judged: dict[str, dict[str, int]] = {query_id: {} for query_id in drawn["query_id"].to_pylist()}
    if judged:
        for row in trainable.judgements(dataset, drawn["query_id"]).to_pylist():
            judged[row["query_id"]][row["doc_id"]] = row["relevance"]
    return list(judged.values())


def _fill_shards(slices: Sequence[Sequence[shard.Slice]], shared: build.Shared) -> Iterator[dict[str, Part]]:
    """The files of every shard, in order; those that a killed run had finished are taken as they are."""
    finished = fs.list_files(shared.work("shards"))
    waiting = [number for number in range(len(slices)) if f"{number:05d}.json" not in finished]
    fill = partial(build.fill, shared=shared)
    filled = cluster.map_tasks_in_order(fill, [(n, slices[n]) for n in waiting], shared.config.resources)
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
    found = cluster.map_tasks_in_order(measure, asked, config.resources)
    points: list[tuning.Point] = []
    for nprobe in tried:
        shares = list(islice(found, len(sizes)))
        points += tuning.measure(shares, exact, nprobe=nprobe, factors=factors)
    best = tuning.choose(points, target=config.tuning.recall)
    curve = [point for point in points if point.refine_factor == best.refine_factor]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    time = partial(build.time_search, shared=shared, refine_factor=best.refine_factor)
    times = cluster.map_tasks_in_order(time, [(largest, point.nprobe) for point in curve], config.resources)
    log.info(
        "recall@%d of %.3f on %d queries by nprobe=%d of %d lists and refine_factor=%d",
        *(exact.shape[1], best.recall, len(exact), best.nprobe, layout.nlist, best.refine_factor),
    )
    chosen = {name: getattr(best, name) for name in ("nprobe", "refine_factor", "recall")}
    chosen["background"] = background
    timed = [vars(point) | {"us_per_query": us} for point, us in zip(curve, times, strict=True)]
    return replace(layout, **chosen), timed


def _tune_weight(
    shared: build.Shared, layout: shard.Layout, sizes: Sequence[int], relevant: Sequence[dict[str, int]]
) -> tuple[shard.Layout, dict[str, Any]]:
    """The layout with the weight of dense scores that served judged queries best, and what each one gave."""
    if shared.queries is None or shared.terms is None or layout.refine == "none":
        return layout, {}
    first = [0, *accumulate(sizes)]
    measure = partial(build.measure_both, shared=shared, layout=layout)
    shares = [*cluster.map_tasks_in_order(measure, [*enumerate(first[:-1])], shared.config.resources)]
    rows = np.max([judged for _, judged in shares], axis=0)  # -1 but in the one shard that has it
    row_of = {doc_id: row for doc_id, row in zip(shared.judged, rows.tolist(), strict=True) if row >= 0}
    graded = [{row_of[i]: grade for i, grade in judged.items() if i in row_of} for judged in relevant]
    judged = sum(any(grade > 0 for grade in grades.values()) for grades in graded)
    if not judged:
        log.warning("the weight of dense scores is not tuned: no test query has a relevant document indexed")
        return layout, {}
    both = hybrid.merge([found for found, _ in shares], candidates=shared.config.tuning.k)
    tuned = hybrid.tune_weight(both, graded, background=layout.background or 0.0)
    weight, curve = tuned.dense_weight, tuned.curve
    log.info(
        "nDCG@10 of %.3f on %d judged queries by dense_weight=%.2f; embeddings alone %.3f, terms alone %.3f",
        *(curve[weight], judged, weight, curve[1.0], curve[0.0]),
    )
    points = [{"dense_weight": w, "ndcg@10": round(value, 4)} for w, value in curve.items()]
    return replace(layout, dense_weight=weight), {"queries": judged, "curve": points}


def _exact(shared: build.Shared, first: Sequence[int]) -> tuple[Int[ndarray, "queries k"], float]:
    """Rows of the exact answers of all shards, counted over all of them; and the background of cosines."""
    shares = [build.exact(number, shared) for number in range(len(first) - 1)]
    scores = np.hstack([scores for scores, _, _ in shares])
    rows = np.hstack([rows + start for (_, rows, _), start in zip(shares, first, strict=False)])
    mean = np.sum([total for _, _, total in shares if total.ndim], axis=0) / first[-1]
    assert shared.queries is not None
    background = hybrid.background_of(shared.queries, mean[np.newaxis])
    return topk.merge(scores, rows, k=shared.config.tuning.k)[1], round(background, 6)
