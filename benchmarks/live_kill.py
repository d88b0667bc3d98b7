"""A repeatedly killed writer: acknowledged writes must exist, once, and searches must return them.

A child process holds a live index and runs operations: upserts, deletes, searches, merges, compactions,
rollbacks to an older version. The parent derives the truth from acknowledgements through a pipe, sends the
next operation, and sometimes kills the child with SIGKILL at a random moment of the operation. An operation
that a kill interrupts may be done or not, document by document; the state of the next child is the truth from
then on. Every other difference is counted.

With `delta` the writes go to the delta of an unchanged index; compactions fold them into the index.
"""

import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from scalingnote.core.log import get_logger
from scalingnote.index import families, ivf, shard
from scalingnote.index.config import IVFPQ, Family, IndexConfig
from scalingnote.index.live import live_shard, versions, wal
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search import scan
from scalingnote.search.live_searcher import SearcherWithDelta
from scalingnote.search.scan import MAX_K
from scalingnote.storage.artifact import Artifact, Draft

DIM, DOCUMENTS, SHARDS, NLIST, K = 16, 300, 2, 8, 10
EXACT = IVFPQ(m=4, nbits=4, refine="flat")
# The share of each operation, and its approximate duration: a kill happens within this time.
KINDS = {"upsert": (0.45, 0.01), "delete": (0.2, 0.01), "search": (0.337, 0.01), "merge": (0.007, 0.01)}
KINDS |= {"compact": (0.003, 0.3), "rollback": (0.003, 0.2)}
Truth = dict[str, tuple[int, ndarray]]  # doc_id -> number of the operation that wrote it, and its vector


@dataclass
class Tally:
    """Counts of a run's operations and faults."""

    operations: int = 0
    kills: int = 0
    in_flight_done: int = 0  # operations that were interrupted by a kill and are done completely or in part
    lost_writes: int = 0
    duplicates: int = 0
    wrong_answers: int = 0
    versions: int = 0
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))


def histories(options: Namespace, *, delta: bool = False) -> list[dict[str, int]]:
    """Run `options.seeds` histories of `operations` with about `kills` kills; return a row for each."""
    rows = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            counts = run(folder, seed=seed, operations=options.operations, kills=options.kills, delta=delta)
        row = {name: value for name, value in vars(counts).items() if name != "done"}
        rows.append({"seed": seed, **row, **{f"{name}s": count for name, count in counts.done.items()}})
        get_logger("index").info("%s", rows[-1])
    return rows


def totals(rows: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the metrics of histories."""
    names = ("lost_writes", "duplicates", "wrong_answers", "kills")
    return {name: sum(row[name] for row in rows) for name in names}


def run(folder: str, *, seed: int, operations: int, kills: int, delta: bool = False) -> Tally:
    """Run one history with this number of operations and about this number of kills."""
    rng, tally = random.Random(seed), Tally()
    matrix = unit_vectors(DOCUMENTS, DIM, seed=seed)
    names = [f"d{i}" for i in range(DOCUMENTS)]
    index = build(f"{folder}/index", names, matrix, family=EXACT, nlist=NLIST, shards=SHARDS)
    truth: Truth = {name: (0, vector) for name, vector in zip(names, matrix, strict=True)}
    child = Child(folder, index.uri, delta)
    check_state(child, truth, {}, tally)
    for number in range(1, operations + 1):
        kind, argument, after = operation(number, rng, truth)
        tally.operations, tally.done[kind] = number, tally.done[kind] + 1
        child.connection.send((kind, number, argument))
        if rng.random() < kills / operations:
            time.sleep(rng.random() * KINDS[kind][1])
            answer = child.kill()
            tally.kills += 1
            truth = truth if answer is None else after
            child = Child(folder, None, delta)
            truth = check_state(child, truth, {} if answer is not None else after, tally)
        else:
            answer = child.connection.recv()
            truth = after
        if kind == "search" and answer is not None:
            tally.wrong_answers += answer != brute_force(truth, argument)
    check_state(child, truth, {}, tally)
    tally.versions = child.ask("version")
    child.kill()
    return tally


def operation(number: int, rng: random.Random, truth: Truth) -> tuple[str, Any, Truth]:
    """Draw an operation: its kind, its argument, and the truth after it."""
    (kind,) = rng.choices([*KINDS], [share for share, _ in KINDS.values()])
    ids = [f"d{i}" for i in rng.sample(range(2 * DOCUMENTS), rng.randint(1, 6))]
    match kind:
        case "upsert":
            matrix = unit_vectors(len(ids), DIM, seed=rng.getrandbits(32))
            new_values = {name: (number, vector) for name, vector in zip(ids, matrix, strict=True)}
            return kind, (ids, matrix), truth | new_values
        case "delete":
            return kind, ids, {name: value for name, value in truth.items() if name not in ids}
        case "search":
            return kind, unit_vectors(2, DIM, seed=rng.getrandbits(32)), truth
        case _:
            return kind, None, truth


def check_state(child: "Child", truth: Truth, after: Truth, tally: Tally) -> Truth:
    """Compare the child's documents with the truth or, for a write in flight, with the truth after it."""
    state = child.ask("state")
    numbers: dict[str, int] = {}
    for name, number in state:
        tally.duplicates += name in numbers
        numbers[name] = number
    actual, interrupted_done = dict(truth), False
    for name in {*truth, *numbers, *after}:
        old, new = truth.get(name), after.get(name) if after else truth.get(name)
        number = numbers.get(name)
        if number == (new[0] if new else None):
            if new is not old:
                interrupted_done = True
                actual.pop(name, None)
                actual |= {name: new} if new else {}
        elif number != (old[0] if old else None):
            tally.lost_writes += 1
    tally.in_flight_done += interrupted_done
    return actual


class Child:
    """The process to be killed."""

    def __init__(self, folder: str, index: str | None, delta: bool) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.live_kill"])
        self.connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(folder, index, delta, other))
        self._process.start()
        other.close()

    def ask(self, kind: str) -> Any:
        """Send an operation and wait for its answer."""
        self.connection.send((kind, 0, None))
        return self.connection.recv()

    def kill(self) -> Any | None:
        """Send SIGKILL; return the answer if the child had already sent it."""
        self._process.kill()
        self._process.join()
        try:
            return self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            return None
        finally:
            self.connection.close()


def serve(folder: str, index: str | None, delta: bool, connection: Connection) -> None:
    """Run the child: execute operations in turn, and acknowledge each when it is done."""
    wal.SEGMENT_BYTES, live_shard.MERGE_ROWS = 100_000, 64
    live = LiveIndex(f"{folder}/live", index, delta=delta)
    find = partial(search_with_delta if delta else search, live)
    while True:
        kind, number, argument = connection.recv()
        answer: Any = True
        match kind:
            case "upsert":
                live.upsert(table(argument[0], number), argument[1])
            case "delete":
                live.delete(argument)
            case "search":
                answer = [[name for name, _ in found] for found in find(argument, k=K)]
            case "merge":
                for each in live.shards:
                    each.merge()
            case "compact":
                live.compact()
            case "rollback":
                versions.activate(live.folder, versions.listing(live.folder)[0].number)
                live.adopt()
            case "state":
                every = np.ones((1, DIM), np.float32) / 4
                answer = find(every, k=sum(s.rows for s in live.snapshots()) + 1 if not delta else MAX_K)[0]
            case "version":
                answer = live.version
        connection.send(answer)


def search(
    live: LiveIndex, queries: ndarray, *, k: int, nprobe: int | None = None
) -> list[list[tuple[str, int]]]:
    """Return doc_ids and the operations that wrote them, best first; by default scan every list."""
    parts = [segment for snapshot in live.snapshots() for segment in snapshot.segments]
    lists, masks = [segment.lists for segment in parts], [segment.alive for segment in parts]
    probes, factor = nprobe or live.layout.nlist, live.layout.refine_factor
    _, row_numbers = scan.search(lists, queries, k=k, nprobe=probes, refine_factor=factor, masks=masks)
    tables = [segment.documents for segment in parts]
    names = [
        pair
        for table in tables
        for pair in zip(table["doc_id"].to_pylist(), map(int, table["title"].to_pylist()), strict=True)
    ]
    return [[names[row] for row in rows if row >= 0] for rows in row_numbers.tolist()]


def search_with_delta(live: LiveIndex, queries: ndarray, *, k: int) -> list[list[tuple[str, int]]]:
    """Do the same for an index and its delta, with both newly opened."""
    searcher = SearcherWithDelta.over(live.folder)
    hit_lists = searcher.search(queries, k=k, nprobe=live.layout.nlist)
    searcher.close()
    return [[(hit.doc_id, int(hit.document["title"])) for hit in hits] for hits in hit_lists]


def brute_force(truth: Truth, queries: ndarray) -> list[list[str]]:
    """Return the K best documents of the truth for each query."""
    names = list(truth)
    matrix = np.stack([vector for _, vector in truth.values()]).astype(np.float64)
    return [[names[i] for i in np.argsort(-(matrix @ query))[:K]] for query in queries]


def build(
    uri: str,
    doc_ids: Sequence[str],
    matrix: ndarray,
    *,
    family: Family,
    nlist: int,
    shards: int,
    nprobe: int | None = None,
    refine_factor: int = 100_000,
    documents: pa.Table | None = None,
) -> Artifact:
    """Write an index artifact like the index stage, in this process; reuse a finished one."""
    draft = Draft(uri, kind="index", config=IndexConfig(shards=shards, family=family), parents={})
    if draft.finished:
        return draft.existing()
    quantizer = families.train(matrix, family, nlist=nlist, seed=0)
    documents = table(doc_ids, 0) if documents is None else documents
    draft.write_bytes(shard.COARSE, quantizer.coarse)
    refine = families.refine_of(family)
    for number, rows in enumerate(np.array_split(np.arange(len(matrix)), shards)):
        lists = ivf.empty(quantizer)
        ivf.add(lists, matrix[rows])
        names = shard.vector_files(number, family=family.kind, refine=refine)
        for name, data in zip(names, ivf.dump_files(lists), strict=True):
            draft.write_bytes(name, data)
        draft.write_table(shard.documents_file(number), documents.take(pa.array(rows)))
    layout = shard.IndexLayout(
        dim=matrix.shape[1],
        documents=len(matrix),
        shards=shards,
        family=family.kind,
        refine=refine,
        nlist=nlist,
        nprobe=nprobe or nlist,
        refine_factor=refine_factor,
        recall=None,
        filters=(),
    )
    draft.write_json(shard.LAYOUT_FILE, vars(layout))
    return draft.commit(counts={"documents": len(matrix), "shards": shards})


def table(doc_ids: Sequence[str], number: int) -> pa.Table:
    """Return documents with the number of the operation that wrote them as title."""
    texts = {name: [str(number)] * len(doc_ids) for name in shard.SHARD_DOCUMENTS.names[1:]}
    return pa.table({"doc_id": list(doc_ids), **texts}, schema=shard.SHARD_DOCUMENTS)


def unit_vectors(count: int, dim: int, *, seed: int) -> ndarray:
    """Draw uniform directions, so that no two documents tie."""
    matrix = np.random.default_rng(seed).standard_normal((count, dim))
    return np.asarray(matrix / np.linalg.norm(matrix, axis=1, keepdims=True), np.float32)
