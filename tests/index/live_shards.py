"""A small shard for the tests of live updates, and the slow, obvious twin of its answers."""

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from scalingnote.index import ivf
from scalingnote.index.config import IVFPQ, Family
from scalingnote.index.shard import DOCUMENTS, Shard
from scalingnote.index.snapshot import Snapshot
from scalingnote.search import scan
from synthetic_corpus import vectors

DIM = 16
EVERY = 100_000  # candidates scored by their own vectors: nothing is left to codes
NLIST = 6
EXACT = IVFPQ(m=4, nbits=4, refine="flat")


def quantizer(family: Family = EXACT) -> ivf.Quantizer:
    nlist = 1 if family.kind == "flat" else NLIST
    return ivf.train(vectors(300, DIM), family, nlist=nlist, iterations=3, seed=0)


def table(doc_ids: list[str], version: int = 0) -> pa.Table:
    texts = {name: [f"{name} {version} of {i}" for i in doc_ids] for name in DOCUMENTS.names[1:]}
    return pa.table({"doc_id": doc_ids, **texts}, schema=DOCUMENTS)


def shard(shared: ivf.Quantizer, documents: Mapping[str, np.ndarray], number: int = 0) -> Shard:
    lists = ivf.empty(shared)
    if documents:
        ivf.add(lists, np.stack(list(documents.values())))
    return Shard(number, lists, table(list(documents)))


def search(
    snapshot: Snapshot,
    shared: ivf.Quantizer,
    queries: np.ndarray,
    *,
    k: int,
    nprobe: int = NLIST,
    wanted: Callable[[pa.Table], np.ndarray] | None = None,
) -> list[list[str]]:
    """doc_ids found, best first; every list is scanned unless `nprobe` says otherwise."""
    found = scored(snapshot, shared, queries, k=k, nprobe=nprobe, wanted=wanted)
    return [snapshot.documents(row[row >= 0])["doc_id"].to_pylist() for row in found.rows]


def scored(
    snapshot: Snapshot,
    shared: ivf.Quantizer,
    queries: np.ndarray,
    *,
    k: int,
    nprobe: int = NLIST,
    wanted: Callable[[pa.Table], np.ndarray] | None = None,
) -> scan.Found:
    """The same with scores and rows."""
    masks = []
    for segment in snapshot.segments:
        mask = segment.alive
        if wanted is not None:
            fits = wanted(segment.documents)
            mask = fits if mask is None else mask & fits
        masks.append(mask)
    segments = [scan.Segment(snapshot.base.number, s.first_row, s.lists) for s in snapshot.segments]
    plan = scan.Plan(shared.centroids, nprobe, refine_factor=EVERY)
    return scan.search(segments, queries, k=k, plan=plan, masks=masks)


def brute_force(documents: Mapping[str, np.ndarray], queries: np.ndarray, *, k: int) -> list[list[str]]:
    """The same from a dictionary. Vectors drawn at random do not tie."""
    names = np.array(list(documents), object)
    if not len(names):
        return [[] for _ in queries]
    matrix = np.stack([v / np.linalg.norm(v) for v in documents.values()]).astype(np.float64)
    return [names[np.argsort(-(matrix @ query))[:k]].tolist() for query in queries]
