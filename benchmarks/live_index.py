"""Live updates: a writer killed over and over, recall while documents come and go, durable writes per second.

    python -m benchmarks.live_index --json docs/results/live_index.json

Kills: `benchmarks/live_kill.py`, in exact mode, on a folder that outlives the process; in each of so many
histories (`--seeds`) about `--kills` of `--operations`.

Streaming, in the manner of big-ann-benchmarks' runbooks: passages of real text (`benchmarks/passages.py`)
come in their order, so that what is written later is about other things than what the index was trained on.
It is built from the first quarter; once half of all are there, the oldest are deleted as others come. It
merges in the background and is compacted now and then, which trains it anew once half of it was written
since. It is compared with an index built at that moment from the same documents; recall@10 is against exact
search. Both scan as many lists, but between compactions the live index does more work: it scans more lists
the more rows are dead, and rescores candidates of every segment.

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
# Of 32, 64, 128 lists and factors of 4, 8, 16 the only pair that finds 0.95 of the middle 100,000 passages.
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
    """Documents in their order, then queries: passages drawn from them that are not indexed."""
    count = documents + queries
    matrix, _ = passages.embedded(passages.texts(count), dim=DIM)
    if len(matrix) < count:
        raise SystemExit(f"{len(matrix):,} passages are there: pass fewer --documents")
    drawn = np.zeros(count, bool)
    drawn[np.linspace(0, count - 1, queries).astype(int)] = True
    return np.concatenate([matrix[~drawn], matrix[drawn]])


def streaming(documents: ndarray, queries: ndarray, *, count: int) -> list[Row]:
    """Recall of the live index and of one built anew, after each of `count` steps."""
    half, names = len(documents) // 2, [f"d{i}" for i in range(len(documents))]
    first = half // 2  # the index is built from a quarter of all, and grows to half of them
    batch = (len(documents) - first) // count
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        built = build(f"{folder}/index", names[:first], documents[:first], **SETTINGS)
        live = LiveIndex(f"{folder}/live", built.uri)
        start, stop = 0, first
        for step in range(1, count + 1):
            grown = stop + batch
            for low in range(stop, grown, 100):
                high = min(low + 100, grown)
                live.upsert(table(names[low:high], step), documents[low:high])
            stop, before = grown, start
            start = max(start, stop - half)
            for low in range(before, start, 500):
                live.delete(names[low : min(low + 500, start)])
            compacted = step % COMPACT_EVERY == 0 and live.compact() is not None
            exact = topk.search(queries, documents[start:stop], k=K)[1] + start
            fresh = families.train(documents[start:stop], SETTINGS["family"], nlist=NLIST, seed=0)
            lists = ivf.empty(fresh)
            ivf.add(lists, documents[start:stop])
            answers = live_kill.search(live, queries, k=K, nprobe=NPROBE)
            found = np.array([[int(name[1:]) for name, _ in answer] for answer in answers])
            anew = scan.search([lists], queries, k=K, nprobe=NPROBE, refine_factor=FACTOR)[1] + start
            of_live, of_fresh = tuning.recall(found, exact), tuning.recall(anew, exact)
            rows.append(
                {
                    "step": step,
                    "documents": len(live),
                    "written": stop,
                    "deleted": start,
                    "version": live.version,
                    "compacted": str(bool(compacted)),
                    "live": of_live,
                    "built anew": of_fresh,
                    "gap, points": round(100 * (of_fresh - of_live), 2),
                }
            )
            get_logger("index").info("%s", rows[-1])
        live.close()
    return rows


def writing(documents: ndarray) -> list[Row]:
    """Documents per second, each batch durable before the next is sent."""
    half = len(documents) // 2
    names = [f"d{i}" for i in range(len(documents))]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        built = build(f"{folder}/index", names[:half], documents[:half], **SETTINGS)
        for batch, count in ((1, 500), (100, 20_000)):
            live = LiveIndex(f"{folder}/{batch}", built.uri)
            written = names[half : half + count]
            start = time.monotonic()
            for low in range(0, len(written), batch):
                at = slice(half + low, half + low + batch)
                live.upsert(table(names[at], 1), documents[at])
            rate = len(written) / (time.monotonic() - start)
            live.close()
            rows.append({"batch": batch, "documents/s": round(rate), "batches/s": round(rate / batch)})
    return rows


if __name__ == "__main__":
    main()
