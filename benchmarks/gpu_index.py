"""IVFPQ on a machine with a GPU: ours, fitted there and scanned by CPUs, beside faiss's own on the GPU.

Ours is what the stage `index` does with a shard: it keeps 8-bit vectors, too, and rescores by them. faiss's
GPU index fits, adds and searches on the GPU, by codes alone.
"""

import time
from collections.abc import Callable
from typing import Any

import faiss
import numpy as np

from benchmarks.gpu_towers import Figures
from scalingnote import topk
from scalingnote.index import families, ivf
from scalingnote.index.config import IVFPQ

DIM, SUB_QUANTIZERS, NPROBE, K, REFINE = 128, 32, 32, 10, 4
ITERATIONS, QUERIES = 10, 1024
OURS, FAISS = "ours", "faiss on the GPU"


def measure_all(*, vectors: int, seconds: float) -> list[Figures]:
    """A row per index: seconds to train, vectors added a second, queries a second, recall."""
    documents, queries = _unit(vectors, 0), _unit(QUERIES, 1)
    lists = int(4 * vectors**0.5)
    sample = documents[: min(vectors, 64 * lists)]
    _, right = topk.search(queries, documents, k=K)
    rows = [_row(OURS, _ours, sample, documents, queries, right, lists=lists, seconds=seconds)]
    if hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus():
        rows.append(_row(FAISS, _faiss, sample, documents, queries, right, lists=lists, seconds=seconds))
    return rows


def metrics(rows: list[Figures]) -> dict[str, float]:
    """Figures of ours, and over faiss's where it was measured."""
    ours, *others = rows
    found = {
        "index_train_seconds": ours["train s"],
        "index_vectors_per_s": ours["vectors/s"],
        "index_queries_per_s": ours["queries/s"],
    }
    for other in others:
        for name, key in (("vectors", "vectors/s"), ("queries", "queries/s")):
            found[f"index_{name}_over_faiss_gpu"] = ours[key] / other[key]
    return found


Parts = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], np.ndarray]]  # train, add, search


def _row(
    name: str,
    make: Callable[..., Parts],
    sample: np.ndarray,
    documents: np.ndarray,
    queries: np.ndarray,
    right: np.ndarray,
    *,
    lists: int,
    seconds: float,
) -> Figures:
    train, add, search = make(sample, documents, queries, lists)
    marks = [time.perf_counter()]
    trained = train()
    marks.append(time.perf_counter())
    filled = add(trained)
    marks.append(time.perf_counter())
    found = search(filled)
    searches, start = 0, time.perf_counter()
    while not searches or time.perf_counter() - start < seconds:
        search(filled)
        searches += 1
    took = time.perf_counter() - start
    hits = sum(len(np.intersect1d(own, best)) for own, best in zip(found, right, strict=True))
    return {
        "index": name,
        "vectors": len(documents),
        "lists": lists,
        "train s": marks[1] - marks[0],
        "vectors/s": len(documents) / (marks[2] - marks[1]),
        "queries/s": searches * len(queries) / took,
        f"R@{K}": hits / right.size,
    }


def _ours(sample: np.ndarray, documents: np.ndarray, queries: np.ndarray, lists: int) -> Parts:
    family = IVFPQ(m=SUB_QUANTIZERS)

    def train() -> Any:
        return families.train(sample, family, nlist=lists, iterations=ITERATIONS, seed=0)

    def add(quantizer: Any) -> ivf.Lists:
        shard = ivf.empty(quantizer)
        ivf.add(shard, documents)
        return shard

    def search(shard: ivf.Lists) -> np.ndarray:
        chosen = ivf.choose_lists(queries, shard.coarse, nprobe=NPROBE)
        return ivf.search(shard, queries, chosen=chosen, k=K, refine_factor=REFINE)[1]

    return train, add, search


def _faiss(sample: np.ndarray, documents: np.ndarray, queries: np.ndarray, lists: int) -> Parts:
    resources = faiss.StandardGpuResources()

    def train() -> Any:
        plain = faiss.index_factory(DIM, f"IVF{lists},PQ{SUB_QUANTIZERS}", faiss.METRIC_INNER_PRODUCT)
        index = faiss.index_cpu_to_gpu(resources, 0, plain)
        index.train(sample)
        return index

    def add(index: Any) -> Any:
        index.add(documents)
        index.nprobe = NPROBE
        return index

    def search(index: Any) -> np.ndarray:
        found: np.ndarray = index.search(queries, K)[1]
        return found

    return train, add, search


def _unit(count: int, seed: int) -> np.ndarray:
    """Unit vectors around 4,096 centres that every seed shares."""
    centres = np.random.default_rng(7).standard_normal((4096, DIM), np.float32)
    rng = np.random.default_rng(seed)
    made = centres[rng.integers(len(centres), size=count)] + rng.standard_normal((count, DIM), np.float32)
    unit: np.ndarray = made / np.linalg.norm(made, axis=1, keepdims=True)
    return unit
