"""Live updates: a repeatedly killed writer, recall while documents change, durable writes per second.

    python -m benchmarks.live_index --json docs/results/live_index.json

Kills: `benchmarks/live_kill.py`, in exact mode, on a folder that outlives the process; each history
(`--seeds` of them) has about `--kills` kills in `--operations` operations.

Streaming, like big-ann-benchmarks' runbooks: passages of real text (`benchmarks/passages.py`) are written in
their order, so that later passages have other subjects than those that trained the index. The index is built
from the first quarter; when it has half of all passages, each new one replaces the oldest. It merges in the
background, and every few steps a compaction trains it again if half of it was written since the last
training. It is compared with an index built at that moment from the same documents; recall@10 is against
exact search. Both scan the same number of lists, but between compactions the live index does more work: it
scans more lists for more dead rows, and rescores candidates of every segment.

Writes: batches of 1 and of 100 documents, each acknowledged after it is durable.
"""

import tempfile
import time
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from benchmarks import live_kill, passages
from benchmarks.live_kill import build, table
from benchmarks.report import arguments, show, write
from scalingnote.core import topk
from scalingnote.core.log import configure, get_logger
from scalingnote.index import families, ivf, tuning
from scalingnote.index.config import FastScan
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search import scan

Row = dict[str, Any]
DIM, K, NLIST, COMPACT_EVERY = 128, 10, 1024, 4
# Of 32, 64, 128 lists and factors of 4, 8, 16, only this pair has recall 0.95 on the middle 100,000 passages.
NPROBE, FACTOR = 128, 16
SETTINGS: dict[str, Any] = {
    "family": FastScan(),
    "nlist": NLIST,
    "shards": 1,
    "nprobe": NPROBE,
    "refine_factor": FACTOR,
}


def main() -> None:
    """Parse arguments, run, print and write."""
    options = arguments(
        __doc__, seeds=10, operations=10_000, kills=25, documents=200_000, queries=500, steps=12
    ).parse_args()
    configure()
    matrix = embedded(options.documents, options.queries)
    documents, queries = matrix[: options.documents], matrix[options.documents :]
    steps = streaming(documents, queries, count=options.steps)
    show("Documents come and go", steps)
    speeds = writing(documents[: options.documents // 2])
    show("Durable writes", speeds)
    kills = live_kill.histories(options)
    show("A writer killed at random moments", kills)
    metrics = {
        **live_kill.totals(kills),
        "streaming_recall_gap": max(row["gap, points"] for row in steps),
        **{f"writes_per_s_{row['batch']}x1": row["documents/s"] for row in speeds},
    }
    write(options.json, metrics=metrics, kills=kills, streaming=steps, writes=speeds)


def embedded(documents: int, queries: int) -> Float[ndarray, "passages dim"]:
    """Return vectors of documents in their order, then of queries: passages that are not indexed."""
    count = documents + queries
    matrix, _ = passages.embedded(passages.texts(count), dim=DIM)
    if len(matrix) < count:
        raise SystemExit(f"{len(matrix):,} passages exist: pass fewer --documents")
    is_query = np.zeros(count, bool)
    is_query[np.linspace(0, count - 1, queries).astype(int)] = True
    return np.concatenate([matrix[~is_query], matrix[is_query]])


def streaming(documents: ndarray, queries: ndarray, *, count: int) -> list[Row]:
    """Measure recall of the live index and of a rebuilt one, after each of `count` steps."""
    half, names = len(documents) // 2, [f"d{i}" for i in range(len(documents))]
    first = half // 2  # the index starts with a quarter of all, and grows to half of them
    batch = (len(documents) - first) // count
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        index = build(f"{folder}/index", names[:first], documents[:first], **SETTINGS)
        live = LiveIndex(f"{folder}/live", index.uri)
        start, stop = 0, first
        for step in range(1, count + 1):
            new_stop = stop + batch
            for low in range(stop, new_stop, 100):
                high = min(low + 100, new_stop)
                live.upsert(table(names[low:high], step), documents[low:high])
            stop, before = new_stop, start
            start = max(start, stop - half)
            for low in range(before, start, 500):
                live.delete(names[low : min(low + 500, start)])
            compacted = step % COMPACT_EVERY == 0 and live.compact() is not None
            exact = topk.search(queries, documents[start:stop], k=K)[1] + start
            fresh = families.train(documents[start:stop], SETTINGS["family"], nlist=NLIST, seed=0)
            lists = ivf.empty(fresh)
            ivf.add(lists, documents[start:stop])
            answers = live_kill.search(live, queries, k=K, nprobe=NPROBE)
            live_rows = np.array([[int(name[1:]) for name, _ in answer] for answer in answers])
            rebuilt_rows = scan.search([lists], queries, k=K, nprobe=NPROBE, refine_factor=FACTOR)[1] + start
            live_recall, rebuilt_recall = tuning.recall(live_rows, exact), tuning.recall(rebuilt_rows, exact)
            rows.append(
                {
                    "step": step,
                    "documents": len(live),
                    "written": stop,
                    "deleted": start,
                    "version": live.version,
                    "compacted": str(bool(compacted)),
                    "live": live_recall,
                    "built anew": rebuilt_recall,
                    "gap, points": round(100 * (rebuilt_recall - live_recall), 2),
                }
            )
            get_logger("index").info("%s", rows[-1])
        live.close()
    return rows


def writing(documents: ndarray) -> list[Row]:
    """Measure documents per second; each batch is durable before the next is sent."""
    half = len(documents) // 2
    names = [f"d{i}" for i in range(len(documents))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        index = build(f"{folder}/index", names[:half], documents[:half], **SETTINGS)
        for batch, count in ((1, 500), (100, 20_000)):
            live = LiveIndex(f"{folder}/{batch}", index.uri)
            new_names = names[half : half + count]
            start = time.monotonic()
            for low in range(0, len(new_names), batch):
                at = slice(half + low, half + low + batch)
                live.upsert(table(names[at], 1), documents[at])
            rate = len(new_names) / (time.monotonic() - start)
            live.close()
            rows.append({"batch": batch, "documents/s": round(rate), "batches/s": round(rate / batch)})
    return rows


if __name__ == "__main__":
    main()
