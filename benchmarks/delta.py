"""A delta of a large index: recall, the cost of a search, durable writes per second, and kills.

    python -m benchmarks.delta --json docs/results/delta.json

Passages of real text (`benchmarks/passages.py`) in their order: the first ones fill an index of four shards,
the later ones are written to its delta, half of them in place of documents of the index. Every eightieth
document of the index is deleted. Both together are compared with a rebuilt index of the remaining documents,
in recall@10 against exact search at equal nprobe and refine_factor, and in time with a search of the base
without the delta, for single queries and batches. All runs in one process and one thread, which searches both
as parts of one view; in a service the gateway searches the delta during the search of the groups of shards.
The last row is the index after a fold of the delta.

Kills: `benchmarks/live_kill.py` with a delta, in exact mode, with folds and rollbacks; each history
(`--seeds` of them) has about `--kills` kills in `--operations` operations.
"""

import tempfile
import time
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray

from benchmarks import live_kill
from benchmarks.live_index import embedded
from benchmarks.live_kill import build, table
from benchmarks.report import arguments, show, take_turns, write
from scalingnote.core import topk
from scalingnote.core.log import configure
from scalingnote.index import families, tuning
from scalingnote.index.config import FastScan
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search.live_searcher import SearcherWithDelta
from scalingnote.search.searcher import Searcher

Row = dict[str, Any]
K, SHARDS, NPROBE, FACTOR = 10, 4, 64, 16
BATCH, DELETED = 100, 80
AT_ONCE = 16  # queries of a batch, like that of a busy searcher
ROUNDS = 9  # of timed searches: other processes of a machine slow most of them


def main() -> None:
    """Parse arguments, run, print and write."""
    options = arguments(
        __doc__, documents=1_000_000, delta=100_000, queries=500, seeds=1, operations=400, kills=30
    ).parse_args()
    configure()
    live_kill.KINDS |= {"compact": (0.03, 0.4), "rollback": (0.02, 0.2)}  # often: a history is short
    matrix = embedded(options.documents + options.delta, options.queries)
    base, written, queries = np.split(matrix, [options.documents, options.documents + options.delta])
    with tempfile.TemporaryDirectory() as folder:
        rows, writes = searching(base, written, queries, folder)
    show("Base and delta", rows)
    show("Durable writes", [writes])
    kills = live_kill.histories(options, delta=True)
    show("A writer killed at random moments", kills)
    by_name = {row["searched"]: row for row in rows}
    with_delta, rebuilt = by_name["base and delta"], by_name["built anew"]
    metrics = {
        "recall_gap": round(rebuilt["recall@10"] - with_delta["recall@10"], 4),
        "folded_recall_gap": round(rebuilt["recall@10"] - by_name["folded"]["recall@10"], 4),
        "search_over_base": round(with_delta["ms"] / by_name["base alone"]["ms"], 3),
        "batch_over_base": round(with_delta["batch_ms"] / by_name["base alone"]["batch_ms"], 3),
        "search_over_built_anew": round(with_delta["ms"] / rebuilt["ms"], 3),
        "writes_per_s": writes["documents/s"],
        **live_kill.totals(kills),
    }
    write(options.json, metrics=metrics, search=rows, writes=[writes], kills=kills)


def searching(base: ndarray, new: ndarray, queries: ndarray, folder: str) -> tuple[list[Row], Row]:
    """Measure recall and time of each way to search, and the speed of the writes."""
    settings: dict[str, Any] = {
        "family": FastScan(),
        "nlist": families.default_nlist(len(base), train_documents=len(base)),
        "shards": SHARDS,
        "nprobe": NPROBE,
        "refine_factor": FACTOR,
    }
    names = [f"d{n}" for n in range(len(base))]
    built = build(f"{folder}/base", names, base, **settings)
    live = LiveIndex(f"{folder}/live", built.uri, delta=True)
    replaced = np.random.default_rng(0).permutation(len(base))[: len(new) // 2]
    delta_names = [*(f"d{n}" for n in replaced), *(f"n{n}" for n in range(len(new) - len(replaced)))]
    start = time.monotonic()
    for low in range(0, len(new), BATCH):
        live.upsert(table(delta_names[low : low + BATCH], 1), new[low : low + BATCH])
    seconds = time.monotonic() - start
    deleted = names[::DELETED]
    live.delete(deleted)
    truth = dict(zip(names, base, strict=True)) | dict(zip(delta_names, new, strict=True))
    for name in deleted:
        truth.pop(name)
    remaining, final = [*truth], np.stack([*truth.values()])
    exact = topk.search(queries, final, k=K)[1]
    rebuilt = build(f"{folder}/anew", remaining, final, **settings)
    searchers = {
        "base alone": Searcher.open(built.uri),
        "base and delta": SearcherWithDelta.over(live.folder),
        "built anew": Searcher.open(rebuilt.uri),
    }
    live.compact()  # the searcher stays on the version that it has opened
    searchers["folded"] = SearcherWithDelta.over(live.folder)
    rows = measured(searchers, queries, remaining, exact)
    live.close()
    return rows, {"batch": BATCH, "documents": len(new), "documents/s": round(len(new) / seconds)}


def measured(searchers: dict[str, Searcher], queries: ndarray, names: list[str], exact: ndarray) -> list[Row]:
    """Measure recall against the exact answers, and milliseconds of a query, single and in a batch.

    The time is that of the fastest round.
    """
    place = {name: number for number, name in enumerate(names)}
    places: dict[str, Any] = {}

    def search(name: str, at_once: int) -> None:
        starts = range(0, len(queries), at_once)
        hits = [row for low in starts for row in searchers[name].search(queries[low : low + at_once], k=K)]
        places[name] = np.array([[place.get(hit.doc_id, -1) for hit in row] for row in hits])

    sides = {f"{name}/{size}": partial(search, name, size) for name in searchers for size in (1, AT_ONCE)}
    spent = take_turns(sides, rounds=ROUNDS, clock=time.perf_counter)
    return [
        {
            "searched": name,
            "documents": len(searcher),
            "recall@10": round(tuning.recall(places[name], exact), 4),
            "ms": round(1000 * min(spent[f"{name}/1"]) / len(queries), 3),
            "batch_ms": round(1000 * min(spent[f"{name}/{AT_ONCE}"]) / len(queries), 3),
        }
        for name, searcher in searchers.items()
    ]


if __name__ == "__main__":
    main()
