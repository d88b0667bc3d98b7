"""A service under constant load during kills of its parts, swaps of its index, changes of its documents.

    python -m benchmarks.serve_faults --run runs/quickstart --json docs/results/serve_faults.json

Services of a finished run, one after the other, on two nodes, every part of each in separate replicas:

    swap     clients search three groups of shards below two aggregators, a teacher encodes uncertain queries;
             another version of the index is activated repeatedly; searcher, aggregator, encoder, teacher and
             gateway replicas are killed (kill -9), and a gateway starts without the documents of a shard.
             Each answer must equal that of its version and tower in process, from all groups except those
             that it states as missing.
    migrate  another model (`--to`) encodes the run's documents and both pairs are compared while clients
             search, and write and delete documents; then the service changes to the new pair and back,
             repeatedly; searchers, encoders, the writer, gateways and a node are killed. Each answer must
             equal that of its pair, and at the end every document must be as under `write`, in both pairs.
    write    clients search; documents are written and deleted; writer, searcher, gateway and a node are
             killed. At the end every document must be in the state of its last acknowledged write (or of a
             later one that was sent and not acknowledged), and no answer may have a document twice.
    delta    the same with a delta of the index, which is folded and rolled back meanwhile.
    read     clients search; the file of the service is deployed repeatedly with other limits, which must
             restart no replica; searchers and encoders are killed during calls. No request may fail, and no
             answer may lack a shard.

A kill waits until all killed parts run again: there are two of each part that answers searches, and one
writer. Errors are counted by status; those that docs/guides/operations.md does not name are failures.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, cycle
from typing import Any
from urllib.parse import quote

from benchmarks import mpnet, report
from benchmarks.replicas import NODE, Client, Cluster, Tally, searches
from scalingnote.core.errors import ConfigError
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.index import job as index_job
from scalingnote.index.shard import documents_file, open_layout
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.run import migration as migrations
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import LiveServe, ServeConfig
from scalingnote.search.query_path import QueryPath
from scalingnote.search.searcher import Searcher
from scalingnote.serve import cut_over
from scalingnote.serve.live_catalog import MARK_CHARACTERS
from scalingnote.storage.artifact import Artifact

# 408, 500: a replica died with the request; 502, 503: no replica took it; 0: the connection broke.
DOCUMENTED = {0, 200, 404, 408, 500, 502, 503, 504}
TWO_OF_EACH = {"deployments": {part: {"num_replicas": 2} for part in ("gateway", "encoder", "searcher")}}
GROUPS, GROUPS_PER_AGGREGATOR = 3, 2  # of the swapped index, with one shard each
DOCUMENTS = "documents"  # the fault that also removes files
STEPS_PER_VERSION = 20  # writes between two changes of the version of an index with a delta
SERVICES = ("swap", "migrate", "write", "delta", "read")
BATCH_DOCUMENTS = 25  # of a write
WRITTEN = "fault-"  # prefix of the ids of written documents
K = 10
Expected = dict[str, list[dict[str, float]]]  # query -> results of each shard: document -> score


def swap(machine: Cluster, run_dir: str, *, swaps: int, kills: int) -> dict[str, Any]:
    """Swap the index and kill replicas under load."""
    config = pipeline.load_run(run_dir)
    queries, towers = _queries(config), _towers(config)
    with tempfile.TemporaryDirectory() as folder:
        indexes = [_index(config, f"{folder}/{fewer}", fewer=fewer) for fewer in (0, 1)]
        # By version and whether the teacher encoded the query.
        expected = {
            (index.digest[:12], escalated): _expected(index, tower, queries)
            for index in indexes
            for escalated, tower in towers.items()
        }

        def is_right(body: dict[str, Any], answer: dict[str, Any]) -> bool:
            return _right(answer, expected[answer["index_version"], answer["escalated"]][body["query"]])

        settings: dict[str, Any] = {
            "port": 0,
            "deadline_s": 5,
            "state": f"{folder}/state",
            "shards_per_searcher": 1,
            "groups_per_aggregator": GROUPS_PER_AGGREGATOR,
            **TWO_OF_EACH,
        }
        if True in towers:
            settings["escalation"] = {"teacher": towers[True].uri, "deadline_ms": 1000}
        served = {"index": indexes[0].uri, "query_tower": towers[False].uri}
        with machine.service(settings, **served) as url:
            tally, control = Tally(), Client(url)
            control.settle(shards=GROUPS)
            faults = ["Aggregator", DOCUMENTS, "IndexSearcher", "QueryEncoder", "Gateway"]
            faults += ["QueryTeacher"] * (True in towers)
            activations, parts = 0, cycle(faults)
            machine.kills.clear()
            with searches(url, tally, partial(_drawn, queries), shards=GROUPS, threads=4, is_right=is_right):
                while activations < swaps or machine.kills.total() < kills:
                    uri = indexes[(activations + 1) % 2].uri
                    activations += control("POST", "/admin/index/activate", {"uri": uri})[0] == 200
                    if machine.kills.total() < kills and machine.whole():
                        part = next(parts)
                        if part == DOCUMENTS:
                            _lose_documents(machine, indexes, tally)
                        else:
                            machine.kill(part)
                    time.sleep(0.5)
                control.settle(shards=GROUPS)
                status, _ = control("POST", "/admin/index/roll_back")
            return _row("swap", tally, machine.kills, swaps=activations) | {"rolled back": status == 200}


def migrate(machine: Cluster, run_dir: str, *, to: str, changes: int, kills: int) -> dict[str, Any]:
    """Build another model next to the served one, and change the service between both, under load."""
    original = pipeline.load_run(run_dir)
    with tempfile.TemporaryDirectory() as folder:
        live = LiveServe(folder=f"{folder}/live", delta=True, keep_documents=True, compact_at=0.5)
        pipeline.make_current(original.model_copy(update={"serve": ServeConfig(live=live)}))
        try:
            return _migrate(machine, run_dir, to=to, changes=changes, kills=kills)
        finally:
            pipeline.make_current(original)


def _migrate(machine: Cluster, run_dir: str, *, to: str, changes: int, kills: int) -> dict[str, Any]:
    before = pipeline.load_run(run_dir)
    queries, expected = _queries(before), dict[str, Expected]()  # by pair, in the name of versions
    layout = open_layout(pipeline.locate(before, "index"))

    def expect(config: RunConfig, pair: str) -> None:
        index, tower = pipeline.locate(config, "index"), _towers(config)[False]
        terms = pipeline.query_terms(config) if layout.sparse else None
        expected[pair] = _expected(index, tower, queries, terms=terms)

    def is_right(body: dict[str, Any], answer: dict[str, Any]) -> bool:
        return _right(
            answer, expected[answer["index_version"].rpartition("-")[0].partition(".")[0]][body["query"]]
        )

    expect(before, "")
    settings = {"port": 0, "deadline_s": 10, "shards_per_searcher": 1, **TWO_OF_EACH}
    with machine.service(settings, run_dir=run_dir) as url:
        tally, control, documents = Tally(), Client(url), Documents(1000)
        control.settle(shards=layout.shards)
        machine.kills.clear()
        draw = partial(_drawn, queries, dense_weight=1.0) if layout.sparse else partial(_drawn, queries)
        load = searches(url, tally, draw, shards=layout.shards, threads=2, is_right=is_right)
        with load, documents.changing(url, tally):
            # Like a user, on a separate Ray cluster.
            command = [sys.executable, "-m", "scalingnote.cli.main", "migrate", "--run", run_dir, "--to", to]
            variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
            subprocess.run(command, check=True, env=variables)
            while_building = tally.statuses.total()
            state = migrations.read(run_dir)
            mark = pipeline.locate(state.after, "index").digest[:MARK_CHARACTERS]
            expect(state.after, mark)
            parts = cycle(("IndexSearcher", "Writer", NODE, "QueryEncoder", "Gateway", "DocumentEncoder"))
            switches = 0
            while switches < changes or switches % 2 or machine.kills.total() < kills:
                if machine.kills.total() < kills and machine.whole():
                    machine.kill(next(parts), wait_s=random.random())
                with suppress(ConfigError):  # the new model has not encoded all earlier writes yet
                    (cut_over.roll_back if switches % 2 else cut_over.cut_over)(run_dir, ServeConfig())
                    switches += 1
                time.sleep(2)  # gateways read the catalog twice a second, and open the other pair
            control.settle(shards=layout.shards)
        lost = documents.lost(control)
        cut_over.cut_over(run_dir, ServeConfig())
        time.sleep(5)
        lost += documents.lost(control)
        counts = {"swaps": switches + 1, "writes": documents.written, "lost": lost}
        return _row("migrate", tally, machine.kills, **counts) | {"while building": while_building}


def _lose_documents(machine: Cluster, indexes: Sequence[Artifact], tally: Tally) -> None:
    """Start a gateway that cannot read the documents of a shard, and wait until an answer reports it."""
    files = [f"{index.uri}/{documents_file(0)}" for index in indexes]
    before, deadline = tally.degraded["documents_unreadable"], time.monotonic() + 120
    for file in files:
        os.rename(file, f"{file}.away")
    try:
        machine.kill("Gateway")
        machine.kills[DOCUMENTS] += 1
        while tally.degraded["documents_unreadable"] == before:
            if time.monotonic() > deadline:
                raise SystemExit("no gateway answered without documents within two minutes")
            time.sleep(0.1)
    finally:
        for file in files:
            os.rename(f"{file}.away", file)


class Documents:
    """Documents that are written and deleted repeatedly, and their allowed states."""

    def __init__(self, number: int) -> None:
        self._ids, self._rng, self._steps = (
            [f"{WRITTEN}{n}" for n in range(number)],
            random.Random(0),
            count(),
        )
        # The titles of the last acknowledged write and of later ones; None: the document does not exist.
        self._allowed: dict[str, list[str | None]] = defaultdict(lambda: [None])
        self.written = 0  # and acknowledged

    def change(self, client: Client) -> int:
        """Write some documents, or every fourth time delete them; return the status."""
        step, ids = next(self._steps), self._rng.sample(self._ids, BATCH_DOCUMENTS)
        title = None if step % 4 == 3 else f"version {step} of a document"
        status = _send(client, ids, title)
        for doc_id in ids:
            self._allowed[doc_id] = [title] if status == 200 else [*self._allowed[doc_id], title]
        self.written += len(ids) * (status == 200)
        return status

    @contextmanager
    def changing(self, url: str, tally: Tally) -> Iterator[None]:
        """Change documents from a thread, a few times a second."""
        stop = threading.Event()

        def change() -> None:
            client = Client(url)
            while not stop.wait(0.2):
                tally.statuses[self.change(client)] += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def lost(self, client: Client) -> int:
        """Return the number of documents in a state that is not allowed."""
        time.sleep(2)  # followers refresh every tenth of a second
        return sum(_title(client, doc_id) not in titles for doc_id, titles in self._allowed.items())


def write(
    machine: Cluster, run_dir: str, *, operations: int, kills: int, delta: bool = False
) -> dict[str, Any]:
    """Change documents and kill replicas under load."""
    config = pipeline.load_run(run_dir)
    rng, shards = random.Random(0), open_layout(pipeline.locate(config, "index")).shards
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"port": 0, "deadline_s": 5, **TWO_OF_EACH}
        settings["live"] = {"folder": f"{folder}/live", "compact_at": 0.5, "delta": delta}
        if delta:
            settings["shards_per_searcher"] = 1
        with machine.service(settings, run_dir=run_dir) as url:
            tally, control, documents, versions = Tally(), Client(url), Documents(operations // 4), 0
            control.settle(shards=shards)
            parts = cycle(("Writer", "IndexSearcher", NODE, "Gateway", "DocumentEncoder"))
            machine.kills.clear()
            draw = partial(_drawn, _queries(config))
            with searches(url, tally, draw, shards=shards, threads=2):
                for step in count(1):
                    if documents.written >= operations and machine.kills.total() >= kills:
                        break
                    killer = None
                    if machine.kills.total() < kills and machine.whole():
                        killer = threading.Thread(target=machine.kill, args=(next(parts), rng.random() * 0.2))
                        killer.start()
                    if delta and step % STEPS_PER_VERSION == 0:
                        change = "roll_back" if versions % 2 else "compact"
                        status, _ = control("POST", f"/admin/index/{change}")
                        versions += status == 200
                    else:
                        status = documents.change(control)
                    if killer is not None:
                        killer.join()
                    tally.statuses[status] += 1
                control.settle(shards=shards)
            counts = {"swaps": versions, "writes": documents.written, "lost": documents.lost(control)}
            return _row("delta" if delta else "write", tally, machine.kills, **counts)


def read(machine: Cluster, run_dir: str, *, changes: int, kills: int) -> dict[str, Any]:
    """Change limits, then kill searchers and encoders, under load."""
    config = pipeline.load_run(run_dir)
    shards, draw = open_layout(pipeline.locate(config, "index")).shards, partial(_drawn, _queries(config))
    with machine.deployed({"deadline_s": 10, **TWO_OF_EACH}, run_dir=run_dir) as (url, deploy):
        tally, control = Tally(), Client(url)
        control.settle(shards=shards)
        machine.kills.clear()
        before, parts = machine.processes(), cycle(("IndexSearcher", "QueryEncoder"))
        with searches(url, tally, draw, shards=shards, threads=4):
            for most in range(K, K + changes):
                deploy({"limits": {"max_k": most}})
                _until_all_gateways_have(control, most)
            limit_restarts = len(before ^ machine.processes())
            limit_requests, limit_errors = tally.statuses.total(), tally.errors
            while machine.kills.total() < kills:
                if machine.whole():
                    machine.kill(next(parts), hold_s=0.2)
                time.sleep(0.5)
            control.settle(shards=shards)
        return _row("read", tally, machine.kills) | {
            "dead_replica_errors": tally.errors - limit_errors,
            "limit_changes": changes,
            "limit_requests": limit_requests,
            "limit_restarts": limit_restarts,
            "limit_errors": limit_errors,
        }


def _until_all_gateways_have(client: Client, most: int) -> None:
    """Wait until several calls, which go to either gateway, return this limit of results."""
    for _ in range(600):
        answers = [client("GET", "/info") for _ in range(8)]
        if all(status == 200 and info["max_k"] == most for status, info in answers):
            return
        time.sleep(0.1)
    raise SystemExit("the gateways did not take another limit within a minute")


def _send(client: Client, ids: Sequence[str], title: str | None) -> int:
    if title is None:
        return client("POST", "/documents/delete", {"doc_ids": list(ids)})[0]
    documents = [{"doc_id": i, "title": title, "topic": "faults", "content": f"{title}, {i}"} for i in ids]
    status, answer = client("POST", "/documents", {"documents": documents})
    if status == 200 and answer["written"] != len(ids):
        raise SystemExit(f"documents were rejected: {answer['rejected'][:1]}")
    return status


def _title(client: Client, doc_id: str) -> str | None:
    for _ in range(100):
        status, document = client("GET", f"/documents/{quote(doc_id, safe='')}")
        if status in (200, 404):
            return document["title"] if status == 200 else None
        time.sleep(0.2)
    raise SystemExit(f"{doc_id} cannot be read: {status}")


def _queries(config: RunConfig) -> list[str]:
    table = next(pipeline.locate(config, "dataset").batches("queries", columns=["query"]))
    return list(dict.fromkeys(table["query"].to_pylist()))[:200]


def _drawn(queries: Sequence[str], **options: Any) -> dict[str, Any]:
    return {"query": random.choice(queries), "k": K, "explain": True, **options}


def _towers(config: RunConfig) -> dict[bool, Artifact]:
    """Return the query tower and, under True, the teacher for its uncertain queries if there is one."""
    tower = pipeline.locate(config, "student" if config.distill else "dual_encoder")
    with suppress(ConfigError):
        return {False: tower, True: pipeline.teacher(config)}
    return {False: tower}


def _index(config: RunConfig, uri: str, *, fewer: int) -> Artifact:
    """Index the run's documents in GROUPS shards; with fewer lists, some queries have other neighbours."""
    parents = {kind: pipeline.locate(config, kind).uri for kind in ("dataset", "embeddings", "semantic_ids")}
    nlist = Searcher.open(pipeline.locate(config, "index").uri).layout.nlist
    changes = {"nprobe": 1, "nlist": nlist - fewer, "shards": GROUPS}
    return index_job.run(config.index.model_copy(update=changes), **parents, output=uri)


def _expected(
    index: Artifact, tower: Artifact, queries: Sequence[str], *, terms: Artifact | None = None
) -> Expected:
    """Search each shard of a version: return documents and the scores of their embeddings for each query.

    Terms add candidates, with weight 0.
    """
    path = QueryPath(
        QueryEncoder(tower.directory("query")),
        None if terms is None else SparseQuery.load(terms.directory("sparse_query")),
    )
    dense_weight = None if terms is None else 1.0
    shards = range(open_layout(index).shards)
    searchers = [Searcher.open(index.uri, shards=[number]) for number in shards]
    results = {}
    for query, searched in zip(queries, path(queries), strict=True):
        of_shards = [
            searcher.search(searched.embedding, searched.terms, k=K, dense_weight=dense_weight)[0]
            for searcher in searchers
        ]
        results[query] = [{hit.doc_id: float(hit.dense) for hit in of} for of in of_shards]
    return results


def _right(answer: dict[str, Any], expected: list[dict[str, float]]) -> bool:
    """Return whether an answer is the merge of the results of all shards that it does not name as missing."""
    missing = answer["missing_groups"]  # a group has one shard
    if answer["shards_answered"] != len(expected) - len(missing):
        return False
    shard_scores = [scores for shard, scores in enumerate(expected) if shard not in missing]
    best = sorted((score for scores in shard_scores for score in scores.values()), reverse=True)[:K]
    hits = [hit for hit in answer["results"] if not hit["doc_id"].startswith(WRITTEN)]
    best = best[: len(best) - len(answer["results"]) + len(hits)]
    results = [(hit["doc_id"], hit["explain"]["dense"]) for hit in hits]
    right_scores = all(abs(score - wanted) < 1e-4 for (_, score), wanted in zip(results, best, strict=False))
    found_ids = {doc_id for scores in shard_scores for doc_id in scores}
    return len(results) == len(best) and right_scores and all(doc_id in found_ids for doc_id, _ in results)


def _row(
    name: str, tally: Tally, kills: Counter[str], *, swaps: int = 0, writes: int = 0, lost: int = 0
) -> dict[str, Any]:
    undocumented = sum(count for status, count in tally.statuses.items() if status not in DOCUMENTED)
    return {
        "service": name,
        "requests": tally.statuses.total(),
        "kills": kills.total() - kills[DOCUMENTS],  # this fault also kills a gateway
        "swaps": swaps,
        "writes": writes,
        "lost": lost,
        "partial": tally.partial,
        "errors": tally.errors,
        "undocumented": undocumented,
        "wrong or mixed": tally.wrong,
        "doubled": tally.twice,
        "killed": json.dumps(dict(sorted(kills.items()))),
        "degraded": json.dumps(dict(sorted(tally.degraded.items()))),
        "statuses": json.dumps({str(status): count for status, count in sorted(tally.statuses.items())}),
    }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--run", default="runs/quickstart", help="a finished run")
    parser.add_argument("--to", help="the model of the migration, default: all-mpnet-base-v2")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--operations", type=int, default=10_000, help="documents written or deleted")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--changes", type=int, default=10, help="of limits, and of the model")
    parser.add_argument("--only", choices=SERVICES)
    options = parser.parse_args()
    # In bfloat16 the third digit of an embedding depends on the other texts of its batch.
    os.environ["SCALINGNOTE_PRECISION"] = "float32"
    machine, operations, kills = Cluster(), options.operations, options.kills
    measure: dict[str, Callable[[], dict[str, Any]]] = {
        "swap": lambda: swap(machine, options.run, swaps=options.swaps, kills=min(kills, options.swaps)),
        "migrate": lambda: migrate(
            machine,
            options.run,
            to=options.to or str(mpnet.path()),
            changes=options.changes,
            kills=kills,
        ),
        "write": lambda: write(machine, options.run, operations=operations, kills=kills),
        "delta": lambda: write(machine, options.run, operations=operations, kills=kills, delta=True),
        "read": lambda: read(machine, options.run, changes=options.changes, kills=kills),
    }
    # With --only, the results of the others stay.
    before = json.loads(options.json.read_text())["table"] if options.json and options.json.exists() else []
    rows = {row["service"]: row for row in before if options.only}
    for name in SERVICES if options.only is None else [options.only]:
        rows[name] = measure[name]()
        report.show(name, [rows[name]])
    table = [rows[name] for name in SERVICES if name in rows]
    names = ["requests", "errors", "lost", "undocumented", "wrong or mixed", "doubled"]
    names += ["dead_replica_errors", "limit_restarts", "limit_errors"]  # of one service only
    metrics = {name: sum(row.get(name, 0) for row in table) for name in names}
    metrics["errors_per_request"] = metrics["errors"] / max(metrics["requests"], 1)
    report.write(options.json, metrics=metrics, table=table)


if __name__ == "__main__":
    main()
