"""Memory and opening time of a searcher, a change of versions, replicas of a machine, and coarse quantizers.

    python -m benchmarks.searcher_memory --json docs/results/searcher_memory.json

An index of synthetic vectors (32 dimensions, product quantization with 16 bytes, 8-bit vectors kept), opened
as a searcher in a fresh process with its files mapped. Every code and vector is read before memory is
counted: proportional set size (Pss) without libraries, which divides shared pages by the processes that
share them, beyond that of a process with a small index. *Unreclaimable* is what the kernel cannot drop and
read again: anonymous memory. Opening is timed with the files in the page cache, and dropped from it (cold).
"""

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from benchmarks.document_store import drop, flush
from benchmarks.report import alone, arguments, show, write
from scalingnote import topk
from scalingnote.index import families, ivf, postings, shard
from scalingnote.index.config import IVFPQ, Coarse, IndexConfig
from scalingnote.search.searcher import Searcher
from scalingnote.serve import placement
from scalingnote.serve_config import ServeConfig
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft, open_artifact

DIM, PART = 32, 200_000  # documents whose vectors are drawn at once
FAMILY = IVFPQ(m=16, nbits=8)
CLUSTERS, NOISE = 2000, 0.6
SMALL = 20_000  # documents of the index whose process is subtracted
TARGET = 10_000_000  # documents that opening is extrapolated to


def main() -> None:
    parser = arguments(__doc__)
    sizes, lists = [1_000_000, 3_000_000, TARGET], [4096, 16_384, 65_536]
    parser.add_argument("--documents", type=int, nargs="+", default=sizes, help="default: %(default)s")
    parser.add_argument("--lists", type=int, nargs="+", default=lists, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="keep the indexes here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        small = build(folder / f"{SMALL}", SMALL, seed=0)
        rows = []
        for documents in options.documents:
            index = build(folder / f"{documents}", documents, seed=0)
            rows.append(measured(small, index))
        other = folder / "other"
        if not other.exists():
            shutil.copytree(folder / f"{options.documents[0]}", other)
        first = str(folder / f"{options.documents[0]}")
        swap = alone(swapped, small, first, str(other))
        one, two = (sum(replicas(first, small, count)) for count in (1, 2))
    show("One searcher", rows)
    show(f"A change of versions, {options.documents[0]:,} documents", [swap])
    graphs = [coarse(lists) for lists in options.lists]
    show("Coarse quantizers", graphs)
    metrics = {
        # Of the largest index: a process's own few megabytes, which vary, weigh more the smaller it is.
        "searcher_bytes_per_document_over_index": rows[-1]["resident over index"],
        "searcher_resident_over_reserved": round(
            rows[-1]["resident bytes per document"] / rows[-1]["reserved bytes per document"], 3
        ),
        "open_seconds_10m": round(extrapolated(rows, "open s"), 2),
        "open_seconds_cold_10m": round(extrapolated(rows, "open cold s"), 2),
        "swap_peak_unreclaimable_over_one": swap["unreclaimable over one"],
        "swap_peak_resident_over_one": swap["resident over one"],
        "two_replicas_resident_over_one": round(two / one, 3),
        **{f"hnsw_{row['lists']}_recall_gap": row["recall gap"] for row in graphs},
        **{f"hnsw_{row['lists']}_speedup": round(row["flat us"] / row["hnsw us"], 2) for row in graphs},
    }
    write(options.json, metrics=metrics, searchers=rows, swap=[swap], coarse=graphs)


# --- an index ----------------------------------------------------------------------------------------------


def vectors(count: int, *, seed: int) -> Iterator[ndarray]:
    """Unit vectors around random centres, part by part."""
    centres = np.random.default_rng(7).standard_normal((CLUSTERS, DIM), dtype=np.float32)
    for first in range(0, count, PART):
        rng = np.random.default_rng((seed, first))
        size = min(PART, count - first)
        noise = NOISE * rng.standard_normal((size, DIM), dtype=np.float32)
        yield arrow.l2_normalize(centres[rng.integers(0, CLUSTERS, size)] + noise)


def build(folder: Path, documents: int, *, seed: int) -> str:
    """An index of one shard, unless it is there."""
    draft = Draft(str(folder), kind="index", config=IndexConfig(shards=1, family=FAMILY), parents={})
    if draft.finished:
        return str(folder)
    nlist = min(families.default_nlist(documents, train_documents=documents), 4096)
    sample = next(vectors(PART, seed=seed))[: max(50 * nlist, 20_000)]
    quantizer = families.train(sample, FAMILY, nlist=nlist, iterations=5, seed=0)
    lists = ivf.empty(quantizer)
    tables = []
    for number, matrix in enumerate(vectors(documents, seed=seed)):
        ivf.add(lists, matrix)
        tables.append(table(number * PART, len(matrix)))
    layout = shard.Layout(
        dim=DIM,
        documents=documents,
        shards=1,
        family=FAMILY.kind,
        refine=FAMILY.refine,
        nlist=nlist,
        nprobe=16,
        refine_factor=4,
        recall=None,
        filters=("topic",),
    )
    draft.write_bytes(shard.COARSE, quantizer.coarse)
    written = shard.write_shard(
        draft.uri,
        0,
        layout=layout,
        lists=lists,
        documents=pa.concat_tables(tables),
        terms=postings.merged([]),
    )
    for name, part in written.items():
        draft.register(name, part)
    draft.write_json(shard.LAYOUT, vars(layout))
    draft.commit(counts={"documents": documents})
    for file in folder.rglob("*"):
        if file.is_file():
            flush(file)
    return str(folder)


def table(first: int, count: int) -> pa.Table:
    """Documents of a part: 200 bytes each."""
    names = [f"document-{number:09d}" for number in range(first, first + count)]
    columns = {
        "doc_id": names,
        "title": [f"Title of {name}" for name in names],
        "topic": [f"topic {number % 20}" for number in range(count)],
        "snippet": [
            f"{name} begins with these words, and goes on for some more of them. " * 2 for name in names
        ],
        "semantic_id": [f"{number % 256}-{number % 251}" for number in range(count)],
    }
    return pa.table(columns, schema=shard.DOCUMENTS)


def vector_bytes(index: Artifact) -> int:
    """Bytes of inverted lists, centroids and kept vectors."""
    return sum(index.manifest.parts[name].bytes for name in index.names("", ".faiss"))


# --- what a process takes ----------------------------------------------------------------------------------


def measured(small: str, uri: str) -> dict[str, Any]:
    """Opening time and memory of one searcher."""
    index = open_artifact(uri, kind="index")
    documents, own = index.counts["documents"], vector_bytes(index)
    for file in Path(uri).rglob("*"):
        if file.is_file():
            drop(file)
    cold, _ = alone(opened, small, uri)
    runs = [alone(opened, small, uri) for _ in range(3)]
    warm, memory = min(seconds for seconds, _ in runs), sorted((each for _, each in runs), key=pss)[1]
    return {
        "documents": documents,
        "open s": round(warm, 3),
        "open cold s": round(cold, 3),
        "index bytes per document": round(own / documents, 1),
        "resident bytes per document": round(memory["Pss"] / documents, 1),
        "reserved bytes per document": round(reserved(index) / documents, 1),
        "unreclaimable bytes per document": round(memory["Anonymous"] / documents, 1),
        "resident over index": round(memory["Pss"] / own, 3),
    }


def reserved(index: Artifact) -> int:
    """Bytes that the service has Ray reserve for such a searcher."""
    config = ServeConfig(mapped=True, versions_kept=1)
    return placement.index_memory(index, [0], config, part="searcher")


def opened(small: str, uri: str) -> tuple[float, dict[str, int]]:
    """Seconds to open a searcher and answer once; memory once all its vectors were read."""
    touch(Searcher.open(small, mapped=True))
    before, start = memory(), time.perf_counter()
    searcher = Searcher.open(uri, mapped=True)
    searcher.find(np.ones((1, DIM), np.float32), k=10)
    seconds = time.perf_counter() - start
    touch(searcher)
    return seconds, {name: size - before[name] for name, size in memory().items()}


def touch(searcher: Searcher) -> None:
    """Read every code and every vector kept; search as a service does."""
    query = np.ones((1, DIM), np.float32)
    for _, kept in searcher.view().kept:
        ivf.stored(kept).max()
    searcher.find(query, k=100, nprobe=searcher.layout.nlist)
    searcher.find(query, k=10)


def swapped(small: str, uri: str, other: str) -> dict[str, Any]:
    """Memory of a process that holds one version, and of one that opened another beside it."""
    touch(Searcher.open(small, mapped=True))
    searcher = Searcher.open(uri, mapped=True)
    touch(searcher)
    one = memory()
    following = Searcher.open(other, mapped=True)
    touch(following)
    both = memory()
    del searcher
    return {
        "one MB": one["Pss"] >> 20,
        "both MB": both["Pss"] >> 20,
        "unreclaimable over one": round(both["Anonymous"] / one["Anonymous"], 3),
        "resident over one": round(both["Pss"] / one["Pss"], 3),
    }


def replicas(uri: str, small: str, count: int) -> list[int]:
    """Bytes of each of several processes that hold the same index at once, beyond a small one."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(count)]
    held = [context.Process(target=hold, args=(uri, small, there)) for _, there in pipes]
    for process in held:
        process.start()
    before = [here.recv() for here, _ in pipes]
    for here, _ in pipes:
        here.recv()
    found = [memory(process.pid)["Pss"] - first["Pss"] for process, first in zip(held, before, strict=True)]
    for (here, _), process in zip(pipes, held, strict=True):
        here.send(None)
        process.join()
    return found


def hold(uri: str, small: str, pipe: Connection) -> None:
    """Open an index, say so, and keep it until told."""
    touch(Searcher.open(small, mapped=True))
    pipe.send(memory())
    searcher = Searcher.open(uri, mapped=True)
    touch(searcher)
    pipe.send(None)
    pipe.recv()


def pss(memory: dict[str, int]) -> int:
    """To sort by."""
    return memory["Pss"]


def memory(process: int | str | None = "self") -> dict[str, int]:
    """Bytes of a process by the kernel's count, without shared libraries.

    What a process pays for a library depends on which other processes have it loaded at that moment.
    """
    found = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    is_library = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # the first line of a mapping: addresses, rights, ..., file
            is_library = ".so" in line.rpartition("/")[2]
        elif (key := name[:-1]) in found and not is_library:
            found[key] += int(rest[0]) << 10
    return found


def extrapolated(rows: list[dict[str, Any]], name: str) -> float:
    """The value at TARGET documents: as measured, or along the line through the two largest sizes."""
    *others, last = sorted(rows, key=lambda row: row["documents"])
    if last["documents"] >= TARGET or not others:
        return float(last[name] * TARGET / last["documents"])
    slope = (last[name] - others[-1][name]) / (last["documents"] - others[-1]["documents"])
    return float(last[name] + slope * (TARGET - last["documents"]))


# --- coarse quantizers -------------------------------------------------------------------------------------


def coarse(lists: int, *, dim: int = 128, probes: int = 32, queries: int = 400) -> dict[str, Any]:
    """A graph of centroids against all of them: time to choose lists, and recall lost by those it misses."""
    rng = np.random.default_rng(0)
    spread = (1 + np.arange(dim)) ** -0.4
    matrix = arrow.l2_normalize((rng.standard_normal((4 * lists, dim)) * spread).astype(np.float32))
    asked = arrow.l2_normalize(matrix[:queries] + 0.3 * matrix[rng.permutation(len(matrix))[:queries]])
    centroids = matrix[rng.permutation(len(matrix))[:lists]]
    _, best = topk.search(asked, matrix, k=10)
    recall, us = {}, {}
    kinds: tuple[Coarse, ...] = ("flat", "hnsw")
    for kind in kinds:
        quantizer = families.coarse_of(centroids, kind)
        owner = ivf.choose_lists(matrix[best.reshape(-1)], quantizer, nprobe=1)[1].reshape(best.shape)
        times = []
        chosen = np.empty((queries, probes), np.int64)
        for number in range(queries):
            start = time.process_time()
            chosen[number] = ivf.choose_lists(asked[number : number + 1], quantizer, nprobe=probes)[1]
            times.append(time.process_time() - start)
        recall[kind] = float((owner[:, :, None] == chosen[:, None, :]).any(-1).mean())
        us[kind] = float(np.median(times) * 1e6)
    return {
        "lists": lists,
        "flat us": round(us["flat"], 1),
        "hnsw us": round(us["hnsw"], 1),
        "flat recall": round(recall["flat"], 4),
        "hnsw recall": round(recall["hnsw"], 4),
        "recall gap": round(recall["flat"] - recall["hnsw"], 4),
    }


if __name__ == "__main__":
    main()
