"""The collect stage: a dataset's click log and rankings become triplets, on Ray.

    impressions -+                                              +-> triplets/part-00000
    scores, or   +-> slices of evidence -> buckets by query_id -+-> triplets/part-00001
    BM25 --------+                                              +-> ...

The shuffle goes through files in the artifact's work directory, named by slice and bucket, rather than
through Ray Data's groupby: a retried task overwrites its own file, nothing passes through the driver, and
600,000 rows on two cores took 2.5 s, against 10-16 s for ``groupby`` of a bucket column or a keyed
``repartition``, and over 20 s for ``groupby("query_id")``, which calls Python once per query.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy

from scalingnote import cluster
from scalingnote.bm25 import BM25, document_texts
from scalingnote.collect.assemble import EVIDENCE, assemble, exposures, rankings
from scalingnote.collect.config import CollectConfig
from scalingnote.collect.triplet import bucket
from scalingnote.errors import DataError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, open_artifact, write_table

log = get_logger("collect")
QUERIES_PER_SLICE = 512  # about 0.1-0.2 s of BM25: often enough for progress, rarely enough for Ray


def run(config: CollectConfig, *, dataset: str, output: str) -> Artifact:
    """Build the `triplets` artifact of a dataset. DataError when it cannot give a single triplet."""
    source = open_artifact(dataset, kind="dataset")
    draft = Draft(output, kind="triplets", config=config, parents={"dataset": source})
    if draft.finished:
        return draft.existing()
    logged = _parts_of(source, "impressions")
    scored = _parts_of(source, "scores")
    if "click" in config.sources and not logged:
        raise DataError(f"{dataset} has no impressions: set collect.sources=[relevance]")
    cluster.require(config.resources, stage="collect")
    known = trainable(source)
    shared = ray.put(known)
    evidence = draft.work("evidence")
    fs.delete(evidence)  # a killed run's slices may be half there, and are quicker redone than checked

    counts: Counter[str] = Counter()
    # Clicks matter to both sources: a clicked document is no negative of its query.
    counts += _scatter_tables(source, logged, "exposures", evidence, shared, config)
    if "relevance" in config.sources and scored:
        counts += _scatter_tables(source, scored, "rankings", evidence, shared, config)
    elif "relevance" in config.sources:
        counts += _scatter_bm25(source, draft, evidence, known, shared, config)
    for name, part, found in _gather(draft, evidence, shared, known, config):
        draft.register(name, part)
        counts += Counter(found)
    if not counts["triplets"]:
        raise DataError(
            f"{dataset} gives no triplet: of {len(known.queries):,} training queries none has a positive "
            f"and {config.num_negatives} hard negatives ({counts['without_negatives']:,} lack negatives)"
        )
    names = ("triplets", "train", "validation", *config.sources, "without_negatives", "rows", "ignored_rows")
    artifact = draft.commit(
        counts={name: counts[name] for name in names} | {"queries": len(known.queries)},
        # Also where no click is a positive: clicks keep documents from being relevance negatives.
        simulated_clicks=bool(source.manifest.info.get("simulated_clicks", False)),
        ranking_model="scores" if scored else "bm25",
    )
    log.info(
        "%s triplets (%s) of %s queries, %s without enough negatives left out, %.1fs -> %s",
        f"{counts['triplets']:,}",
        ", ".join(f"{counts[name]:,} {name}" for name in config.sources),
        f"{len(known.queries):,}",
        f"{counts['without_negatives']:,}",
        artifact.manifest.info["seconds"],
        output,
    )
    return artifact


@dataclass(frozen=True)
class Trainable:
    """What training may see: queries of the train split, documents of no test group."""

    queries: pa.Table  # query_id, query
    documents: pa.Array  # doc_id


def trainable(dataset: Artifact) -> Trainable:
    """Train queries, and documents whose group no test query's relevant document belongs to."""
    queries = dataset.table("queries.parquet")
    is_test = pc.equal(queries["split"], "test")
    qrels = dataset.table("qrels.parquet")
    relevant = qrels.filter(
        pc.and_(
            pc.greater(qrels["relevance"], 0),
            pc.is_in(qrels["query_id"], value_set=queries.filter(is_test)["query_id"]),
        )
    )["doc_id"]
    documents = dataset.table("documents", columns=["doc_id", "group"])
    is_relevant = pc.is_in(documents["doc_id"], value_set=relevant)
    # A document without a group stands alone: only itself can be a test document.
    grouped = pc.not_equal(pc.fill_null(documents["group"], ""), "")
    groups = documents.filter(pc.and_(is_relevant, grouped))["group"]
    held_out = pc.or_(is_relevant, pc.and_(grouped, pc.is_in(documents["group"], value_set=groups)))
    return Trainable(
        queries.filter(pc.equal(queries["split"], "train")).select(["query_id", "query"]),
        documents.filter(pc.invert(held_out))["doc_id"].combine_chunks(),
    )


# --- scatter: slices of evidence into buckets ----------------------------------------------------------


def _parts_of(dataset: Artifact, table: str) -> list[str]:
    return [
        name for name in (f"{table}.parquet", *dataset.names(f"{table}/")) if name in dataset.manifest.parts
    ]


def _scatter_tables(
    dataset: Artifact, parts: list[str], kind: str, target: str, shared: Any, config: CollectConfig
) -> Counter[str]:
    """Every row group of the parts is one slice."""
    slices = []
    for number, name in enumerate(parts):
        uri = dataset.file(name)
        with fs.open_input(uri) as file:
            groups = pq.ParquetFile(file).num_row_groups
        slices += [{"uri": uri, "group": g, "slice": f"{kind}-{number:05d}-{g:05d}"} for g in range(groups)]
    if not slices:
        return Counter()
    scatter = ray.data.from_items(slices, override_num_blocks=len(slices)).map(
        partial(_scatter_row_group, kind=kind, target=target, shared=shared, parts=config.parts),
        compute=TaskPoolStrategy(size=min(config.resources.workers, len(slices))),
        num_cpus=config.resources.cpus_per_worker,
    )
    total = sum(dataset.manifest.parts[name].rows or 0 for name in parts)
    return _watch(scatter, total=total, unit=kind)


def _scatter_row_group(
    row: dict[str, Any], *, kind: str, target: str, shared: Any, parts: int
) -> dict[str, int]:
    with fs.open_input(row["uri"]) as file:
        table = pq.ParquetFile(file).read_row_group(row["group"])
    evidence = exposures(table) if kind == "exposures" else rankings(table)
    kept = _write_buckets(evidence, ray.get(shared), target=target, name=row["slice"], parts=parts)
    return {"rows": table.num_rows, "ignored_rows": table.num_rows - kept}


def _scatter_bm25(
    dataset: Artifact, draft: Draft, target: str, known: Trainable, shared: Any, config: CollectConfig
) -> Counter[str]:
    """Every few hundred queries are one slice, ranked by a pool of actors that share one saved index."""
    if not known.queries.num_rows:
        return Counter()
    documents = dataset.table("documents")
    documents = documents.filter(pc.is_in(documents["doc_id"], value_set=known.documents))
    log.info("building BM25 over %s training documents", f"{documents.num_rows:,}")
    folder = draft.work("bm25")
    with tempfile.TemporaryDirectory() as local:
        BM25.build(document_texts(documents), k1=config.bm25_k1, b=config.bm25_b).save(local)
        fs.upload(local, folder)
    starts = range(0, len(known.queries), QUERIES_PER_SLICE)
    slices = [{"start": start, "slice": f"bm25-{start:09d}"} for start in starts]
    ranked = ray.data.from_items(slices, override_num_blocks=len(slices)).map(
        _Ranker,  # type: ignore[arg-type]  # Ray's annotation forgets callable classes
        fn_constructor_kwargs={
            "index": folder,
            "version": draft.fingerprint,
            "target": target,
            "depth": config.top_t,
            "parts": config.parts,
        },
        fn_kwargs={"shared": shared},
        compute=ActorPoolStrategy(size=min(config.resources.workers, len(slices))),
        num_cpus=config.resources.cpus_per_worker,
    )
    return _watch(ranked, total=len(known.queries), unit="queries ranked", count="queries")


class _Ranker:
    """Ranks slices of the training queries with one memory-mapped BM25 index."""

    def __init__(self, index: str, version: str, target: str, depth: int, parts: int) -> None:
        self._bm25 = BM25.load(fs.download(index, list(fs.list_files(index)), version=version))
        self._target, self._depth, self._parts = target, depth, parts

    def __call__(self, row: dict[str, Any], *, shared: Any) -> dict[str, int]:
        known: Trainable = ray.get(shared)
        queries = known.queries.slice(row["start"], QUERIES_PER_SLICE)
        rows, scores = self._bm25.search(queries["query"].to_pylist(), self._depth)
        which, rank = np.nonzero(rows >= 0)
        evidence = rankings(
            pa.table(
                {
                    "query_id": queries["query_id"].take(pa.array(which)),
                    "doc_id": known.documents.take(pa.array(rows[which, rank])),
                    "score": scores[which, rank],
                }
            )
        )
        _write_buckets(evidence, known, target=self._target, name=row["slice"], parts=self._parts)
        return {"queries": len(queries)}


def _write_buckets(evidence: pa.Table, known: Trainable, *, target: str, name: str, parts: int) -> int:
    """Write what training may see of a slice, a file per bucket; returns the rows kept."""
    allowed = pc.and_(
        pc.is_in(evidence["query_id"], value_set=known.queries["query_id"]),
        pc.is_in(evidence["doc_id"], value_set=known.documents),
    )
    evidence = evidence.filter(allowed).combine_chunks()
    if not evidence.num_rows:
        return 0
    ids = pc.dictionary_encode(evidence["query_id"].combine_chunks())
    buckets = np.array([bucket(query_id, parts) for query_id in ids.dictionary.to_pylist()])[
        ids.indices.to_numpy()
    ]
    for number in np.unique(buckets).tolist():
        rows = evidence.take(pa.array(np.flatnonzero(buckets == number)))
        write_table(fs.join(target, f"{number:05d}", f"{name}.parquet"), rows)
    return int(evidence.num_rows)


# --- gather: each bucket becomes one part --------------------------------------------------------------


def _gather(
    draft: Draft, evidence: str, shared: Any, known: Trainable, config: CollectConfig
) -> Iterator[tuple[str, Part, dict[str, int]]]:
    buckets = [{"bucket": number} for number in range(config.parts)]
    gathered = ray.data.from_items(buckets, override_num_blocks=config.parts).map(
        partial(_gather_bucket, evidence=evidence, output=draft.uri, shared=shared, config=config),
        compute=TaskPoolStrategy(size=min(config.resources.workers, config.parts)),
        num_cpus=config.resources.cpus_per_worker,
    )
    with Progress("collect", total=len(known.queries), unit="queries") as progress:
        for row in gathered.iter_rows():
            progress.advance(row["queries"])
            counts = {name: row[name] for name in COUNTED}
            yield row["name"], Part(row["sha256"], row["bytes"], row["rows"]), counts


COUNTED = ("triplets", "train", "validation", "click", "relevance", "without_negatives")


def _gather_bucket(
    row: dict[str, Any], *, evidence: str, output: str, shared: Any, config: CollectConfig
) -> dict[str, Any]:
    folder = fs.join(evidence, f"{row['bucket']:05d}")
    tables = [pq.read_table(fs.open_input(fs.join(folder, name))) for name in fs.list_files(folder)]
    table = pa.concat_tables([EVIDENCE.empty_table(), *tables])
    queries = len(pc.unique(table["query_id"]))
    known: Trainable = ray.get(shared)
    texts = known.queries.filter(pc.is_in(known.queries["query_id"], value_set=table["query_id"]))
    triplets, counts = assemble(table, texts, config=config)
    name = f"triplets/part-{row['bucket']:05d}.parquet"
    part = write_table(fs.join(output, name), triplets)
    return {name: counts.get(name, 0) for name in COUNTED} | {
        "queries": queries,
        "name": name,
        "sha256": part.sha256,
        "bytes": part.bytes,
        "rows": part.rows,
    }


def _watch(work: Dataset, *, total: int, unit: str, count: str = "rows") -> Counter[str]:
    counts: Counter[str] = Counter()
    with Progress("collect", total=total, unit=unit) as progress:
        for row in work.iter_rows():
            progress.advance(row[count])
            counts.update({name: row[name] for name in ("rows", "ignored_rows") if name in row})
    return counts
