"""The index family on a million vectors: recall, time per query and bytes, and those of faiss used directly.

    python -m benchmarks.index --json docs/results/index.json

Vectors are real: a dual encoder is trained for a hundred steps on medquad and encodes its documents and test
queries. Its eight thousand documents become a million by repetition, each moved by half the difference of two
others, which keeps the spectrum. Queries are not moved. Tuning chooses every setting for recall@100 of 0.95.
Times are processor time of one thread, in rounds that take turns.
"""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from benchmarks.report import arguments, show, take_turns, write
from benchmarks.trial import Trial, configured
from scalingnote.core import topk
from scalingnote.core.log import configure
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate.test_set import load_test_set
from scalingnote.index import families, ivf, tuning
from scalingnote.index.config import Family, FastScan, Flat, RaBitQ, ScalarQuantized
from scalingnote.quantize.kmeans import blas_only
from scalingnote.run import pipeline, stages
from scalingnote.search import scan
from scalingnote.storage import arrow

FAMILIES: dict[str, Family] = {
    "ivfpq_fast_scan + sq8 (default)": FastScan(),
    "ivfpq_fast_scan + flat": FastScan(refine="flat"),
    "ivfpq_fast_scan": FastScan(refine="none"),
    "ivf_sq8": ScalarQuantized(),
    "ivf_rabitq + sq8": RaBitQ(),
    "flat": Flat(),
}
DEFAULT = next(iter(FAMILIES))
K, TARGET, SHARDS, TRAINED = 100, 0.95, 4, 200_000
BATCH, TIMED, ROUNDS = 64, 200, 3  # queries of a search, queries timed one at a time
Search = Callable[[Float[ndarray, "queries dim"]], Int[ndarray, "queries k"]]


def main() -> None:
    """Parse arguments, run, print and write."""
    parser = arguments(__doc__, documents=1_000_000, queries=500, steps=100)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    options = parser.parse_args()
    configure()
    faiss.omp_set_num_threads(1)
    documents, queries = corpus(options)
    exact = topk.search(queries, documents, k=K)[1]
    nlist = families.default_nlist(len(documents), train_documents=min(len(documents), TRAINED))
    rows: list[dict[str, Any]] = []
    for name, family in FAMILIES.items():
        rows.append(measured(name, family, documents, queries, exact, nlist=nlist))
        if name == DEFAULT:
            setting = {name: rows[0][name] for name in ("nprobe", "refine_factor")}
            rows.append(direct(documents, queries, exact, nlist=nlist, **setting))
            shards = sharded(documents, queries, nlist=nlist, **setting)
            show(f"{SHARDS} shards, {setting}", shards)
    show(f"{len(documents):,} documents, {len(queries)} queries, one thread", rows)
    together = next(row for row in shards if row["search of"].startswith("a searcher of 4"))
    metrics = {
        "recall100_default": rows[0]["R@100"],
        "bytes_per_vector_default": rows[0]["bytes/vector"],
        "us_per_query_over_faiss_default": round(rows[0]["us, batch 1"] / rows[1]["us, batch 1"], 3),
        "shards4_over_single_cpu": together["over one"],
    }
    write(options.json, metrics=metrics, family=rows, shards=shards)


def corpus(options: Namespace) -> tuple[Float[ndarray, "docs dim"], Float[ndarray, "queries dim"]]:
    """Return unit vectors of documents and of test queries."""
    trial = Trial("medquad", "scratch", "methods/scalingdual", 0, options.steps, tuple(options.overrides))
    config = configured(trial, run_dir="runs")
    artifacts = pipeline.run(config, stages.select(config, until="encode"), record=False)
    real = arrow.l2_normalize(
        arrow.to_numpy(artifacts["embeddings"].table("embeddings", ["summary"])["summary"])
    )
    tower = QueryEncoder(artifacts["dual_encoder"].directory("query"))
    sample = load_test_set(artifacts["dataset"]).queries[: options.queries]
    rng = np.random.default_rng(0)
    base, one, other = (real[rng.integers(0, len(real), options.documents)] for _ in range(3))
    moved = arrow.l2_normalize(base + 0.5 * (one - other) / np.sqrt(2))
    moved[: len(real)] = real[: options.documents]
    return moved, arrow.l2_normalize(tower.encode_queries(sample))


def measured(
    name: str, family: Family, documents: ndarray, queries: ndarray, exact: ndarray, *, nlist: int
) -> dict[str, Any]:
    """Measure a family at the setting that tuning chooses for it."""
    lists = filled(family, [documents], nlist=1 if isinstance(family, Flat) else nlist)[0]
    factors = tuning.factors(family.kind, families.refine_of(family))
    points = []
    for nprobe in tuning.probes(lists.coarse.ntotal):
        share = tuning.candidates(lists, queries, nprobe=nprobe, k=K * factors[-1])
        points += tuning.measure(share, exact, nprobe=nprobe, factors=factors)
        if points[-1].recall >= TARGET:
            break
    best = tuning.choose(points, target=TARGET)
    search = partial(ours, [lists], best.nprobe, best.refine_factor)
    size = sum(map(len, ivf.dump_files(lists)))
    setting = {"nprobe": best.nprobe, "refine_factor": best.refine_factor}
    return row(name, search, queries, exact, size=size / len(documents)) | setting


def direct(
    documents: ndarray, queries: ndarray, exact: ndarray, *, nlist: int, nprobe: int, refine_factor: int
) -> dict[str, Any]:
    """Measure the default family, made and searched by faiss's factory, at the same setting."""
    dim = documents.shape[1]
    index: Any = faiss.index_factory(
        dim, f"IVF{nlist},PQ{dim // 2}x4fs,Refine(SQ8)", faiss.METRIC_INNER_PRODUCT
    )
    with blas_only():
        index.train(documents[:: max(1, len(documents) // TRAINED)])
        index.add(documents)
    size = len(faiss.serialize_index(index)) / len(documents)
    makers: Any = faiss  # its stubs lack the arguments
    inner = makers.SearchParametersIVF(nprobe=nprobe)
    parameters = makers.IndexRefineSearchParameters(k_factor=refine_factor, base_index_params=inner)

    def search(sample: ndarray) -> ndarray:
        return np.asarray(index.search(sample, K, params=parameters)[1])

    setting = {"nprobe": nprobe, "refine_factor": refine_factor}
    return row("faiss directly, default", search, queries, exact, size=size) | setting


def sharded(
    documents: ndarray, queries: ndarray, *, nlist: int, nprobe: int, refine_factor: int
) -> list[dict[str, Any]]:
    """Measure the cost of four shards over one: merged, and separate."""
    pieces = np.array_split(documents, SHARDS)
    segments_by_way = {
        "one index": filled(FastScan(), [documents], nlist=nlist),
        "a searcher of 4 shards": [ivf.merge(filled(FastScan(), pieces, nlist=nlist))],
        "4 shards, lists chosen once": filled(FastScan(), pieces, nlist=nlist),
    }
    ways = {name: partial(ours, lists, nprobe, refine_factor) for name, lists in segments_by_way.items()}
    times = taken(ways, queries)
    return [
        {"search of": name, "us, batch 1": round(us), "over one": round(us / times["one index"], 2)}
        for name, us in times.items()
    ]


def filled(family: Family, pieces: Sequence[ndarray], *, nlist: int) -> list[ivf.Lists]:
    """Build shards of these vectors with one quantizer."""
    documents = sum(map(len, pieces))
    step = max(1, documents // TRAINED)
    sample = np.concatenate([piece[::step] for piece in pieces])
    quantizer = families.train(sample, family, nlist=nlist, seed=0)
    shards = []
    for piece in pieces:
        lists = ivf.empty(quantizer)
        ivf.add(lists, piece)
        shards.append(lists)
    return shards


def ours(segments: Sequence[ivf.Lists], nprobe: int, factor: int, queries: ndarray) -> ndarray:
    """Search with this package; return the row numbers."""
    return scan.search(segments, queries, k=K, nprobe=nprobe, refine_factor=factor)[1]


def row(name: str, search: Search, queries: ndarray, exact: ndarray, *, size: float) -> dict[str, Any]:
    """Return the row of one index: recall, time and size."""
    results = np.concatenate([search(queries[i : i + BATCH]) for i in range(0, len(queries), BATCH)])
    return {
        "index": name,
        "R@10": round(tuning.recall(results[:, :10], exact[:, :10]), 3),
        "R@100": round(tuning.recall(results, exact), 3),
        "us, batch 1": round(taken({name: search}, queries)[name]),
        "bytes/vector": round(size, 1),
    }


def taken(ways: Mapping[str, Search], queries: ndarray) -> dict[str, float]:
    """Measure microseconds of processor time per query, one at a time: the least of alternating rounds."""
    sample = queries[:TIMED]

    def searched(search: Search) -> None:
        for query in sample:
            search(query[None])

    seconds = take_turns({name: partial(searched, search) for name, search in ways.items()}, rounds=ROUNDS)
    return {name: 1e6 * min(times) / len(sample) for name, times in seconds.items()}


if __name__ == "__main__":
    main()
