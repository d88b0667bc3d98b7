"""A service under constant load while its parts are killed, its index is swapped, its documents change.

    python -m benchmarks.serve_faults --run runs/quickstart --json docs/results/serve_faults.json

Three services of a finished run, one after the other, every part of each in replicas of its own:

    swap    clients search three groups of shards below two aggregators, a teacher has the uncertain queries;
            another version of the index is activated, again and again; searcher, aggregator, encoder, teacher
            and gateway replicas are killed (kill -9), and a gateway starts while documents of a shard are
            gone. Each answer must be what the version and the tower that it names give in process, of all
            groups but those that it says are missing.
    write   clients search; documents are written and deleted; writer, searcher and gateway are killed. In the
            end every document must be as its last acknowledged write left it (or a later one that was sent
            and not acknowledged), and no answer may have a document twice.
    read    clients search; the file of the service is deployed with other limits, again and again, which must
            restart no replica; searchers and encoders are killed while they have calls. No request may fail,
            and no answer lack a shard.

Nothing is killed before everything that was killed is back: of what answers searches there are two, of the
writer one. Errors are counted by status; those that docs/guides/operations.md does not name are failures.
"""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import ray
from ray import serve
from ray.serve.schema import ServeDeploySchema

from benchmarks import report
from scalingnote.core import cluster, ray_internals
from scalingnote.core.errors import ConfigError
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.index import job as index_job
from scalingnote.index.shard import documents_file
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact

# 408, 500: a replica died with the request; 502, 503: no replica took it; 0: the connection broke.
DOCUMENTED = {0, 200, 404, 408, 500, 502, 503, 504}
TWO_OF_EACH = {"deployments": {part: {"num_replicas": 2} for part in ("gateway", "encoder", "searcher")}}
GROUPS, GROUPS_PER_AGGREGATOR = 3, 2  # of the index that is swapped, a shard each
DOCUMENTS = "documents"  # the fault that is more than a kill of a replica
START = "import sys; from scalingnote.cli.commands import _serve; sys.exit(_serve({}, sys.argv[1:]))"
K = 10
Deploy = Callable[[dict[str, Any]], None]  # a `user_config` of the gateways
Expected = list[list[dict[str, float]]]  # of each query, what each shard finds: document -> score


class Client:
    """A connection that is made anew when it breaks."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._host, timeout=60)

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; (0, None) if the connection broke."""
        sent = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, path, sent, {"content-type": "application/json"})
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0, None
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, None


@dataclass
class Tally:
    """What clients have seen. Threads may share one."""

    statuses: Counter[int] = field(default_factory=Counter)
    partial: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    wrong: int = 0  # answers that mix versions, or are not what they say they are
    twice: int = 0  # answers with a document twice


class Cluster:
    """Replicas on this machine's Ray, which the service joins."""

    def __init__(self) -> None:
        cluster.connect()
        self._address, self._killed = ray.get_runtime_context().gcs_address, 0.0
        self.kills: Counter[str] = Counter()

    @contextmanager
    def service(self, knobs: dict[str, Any], **served: str) -> Iterator[str]:
        """A service as the shell starts it, of artifacts or of a run: its URL."""
        command = [sys.executable, "-c", START, *(f"{name}={uri!r}" for name, uri in served.items())]
        command += [f"serve.{key}={json.dumps(value)}" for key, value in knobs.items()]
        environment = {**os.environ, "RAY_ADDRESS": self._address}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            yield next(line for line in process.stdout if line.startswith("http://")).split()[0]
        finally:
            process.terminate()
            process.wait(60)
            serve.shutdown()  # in here: this process forgets the Serve that has ended with that one

    @contextmanager
    def deployed(self, knobs: dict[str, Any], **served: str) -> Iterator[tuple[str, Deploy]]:
        """A service as `serve deploy` starts it: its URL, and a deploy of its file with a `user_config`."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")

        def deploy(user_config: dict[str, Any]) -> None:
            application = {
                "name": "scalingnote",
                "import_path": "scalingnote.serve.app:build",
                "args": {**served, "serve": {**knobs, "port": port}},
                "deployments": [{"name": "Gateway", "user_config": user_config}],
            }
            schema = ServeDeploySchema.model_validate({"applications": [application]})
            ray_internals.serve_client().deploy_apps(schema)

        try:
            deploy({})
            yield f"http://127.0.0.1:{port}", deploy
        finally:
            serve.shutdown()

    def kill(self, part: str, wait_s: float = 0.0, hold_s: float = 0.0) -> None:
        """kill -9 a replica of a deployment that is one of `part`, in a moment.

        For `hold_s` seconds before that it takes calls and answers none.
        """
        time.sleep(wait_s)
        replica = random.choice(self._replicas(part))
        if hold_s:
            replica.suspend()
            time.sleep(hold_s)
        replica.kill()
        self.kills[part] += 1
        self._killed = time.monotonic()

    def whole(self) -> bool:
        """Whether every deployment has all its replicas, each of them ready."""
        if time.monotonic() < self._killed + 2:  # Serve may not have noticed yet
            return False
        found = serve.status().applications["scalingnote"]
        return all(each.status == "HEALTHY" for each in found.deployments.values())

    def processes(self) -> set[int]:
        """The numbers of the processes of all replicas."""
        return {replica.pid for replica in self._replicas("")}

    @staticmethod
    def _replicas(part: str) -> list[psutil.Process]:
        found = []
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it may end while it is looked at
                line = "".join(each.cmdline())
                if "ServeReplica" in line and f":{part}" in line:
                    found.append(each)
        return found


@contextmanager
def load(work: Callable[[], None], *, threads: int) -> Iterator[None]:
    """Clients that do `work` over and over."""
    stop = threading.Event()

    def go() -> None:
        while not stop.is_set():
            work()

    running = [threading.Thread(target=go) for _ in range(threads)]
    for each in running:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in running:
            each.join()


def settle(client: Client, *, shards: int) -> None:
    """Wait until everything answers again."""
    for _ in range(600):
        status, health = client("GET", "/healthz")
        if status == 200 and health["status"] == "ok" and health["shards_answered"] == shards:
            return
        time.sleep(0.2)
    raise SystemExit("the service did not come back within two minutes")


def swap(machine: Cluster, run_dir: str, *, swaps: int, kills: int) -> dict[str, Any]:
    """The index is swapped and replicas are killed under load."""
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
        knobs: dict[str, Any] = {
            "port": 0,
            "deadline_s": 5,
            "state": f"{folder}/state",
            "shards_per_searcher": 1,
            "groups_per_aggregator": GROUPS_PER_AGGREGATOR,
            **TWO_OF_EACH,
        }
        if True in towers:
            knobs["escalation"] = {"teacher": towers[True].uri, "deadline_ms": 1000}
        served = {"index": indexes[0].uri, "query_tower": towers[False].uri}
        with machine.service(knobs, **served) as url:
            tally, local = Tally(), threading.local()
            numbers = iter(range(10**9))

            def search() -> None:
                if not hasattr(local, "client"):
                    local.client = Client(url)
                number = next(numbers) % len(queries)
                status, answer = local.client(
                    "POST", "/search", {"query": queries[number], "k": K, "explain": True}
                )
                tally.statuses[status] += 1
                if status == 200:
                    tally.partial += answer["shards_answered"] < GROUPS
                    tally.degraded.update(answer["degraded"])
                    named = expected[answer["index_version"], answer["escalated"]]
                    tally.wrong += not _right(answer, named[number])

            control = Client(url)
            settle(control, shards=GROUPS)
            faults = ["Aggregator", DOCUMENTS, "IndexSearcher", "QueryEncoder", "Gateway"]
            faults += ["QueryTeacher"] * (True in towers)
            done, parts = 0, cycle(faults)
            machine.kills.clear()
            with load(search, threads=4):
                while done < swaps or machine.kills.total() < kills:
                    uri = indexes[(done + 1) % 2].uri
                    done += control("POST", "/admin/index/activate", {"uri": uri})[0] == 200
                    if machine.kills.total() < kills and machine.whole():
                        part = next(parts)
                        if part == DOCUMENTS:
                            _lose_documents(machine, indexes, tally)
                        else:
                            machine.kill(part)
                    time.sleep(0.5)
                settle(control, shards=GROUPS)
                status, _ = control("POST", "/admin/index/roll_back")
            return _row("swap", tally, machine.kills, swaps=done, writes=0, lost=0) | {
                "rolled back": status == 200
            }


def _lose_documents(machine: Cluster, indexes: Sequence[Artifact], tally: Tally) -> None:
    """Have a gateway start while it cannot read the documents of a shard, until an answer says so."""
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


def write(machine: Cluster, run_dir: str, *, operations: int, kills: int, batch: int = 25) -> dict[str, Any]:
    """Documents change and replicas are killed under load."""
    config = pipeline.load_run(run_dir)
    queries, rng = _queries(config), random.Random(0)
    shards = Searcher.open(pipeline.locate(config, "index").uri).layout.shards
    with tempfile.TemporaryDirectory() as folder:
        knobs = {
            "port": 0,
            "deadline_s": 5,
            "live": {"folder": f"{folder}/live", "compact_at": 0.5},
            **TWO_OF_EACH,
        }
        with machine.service(knobs, run_dir=run_dir) as url:
            tally, local = Tally(), threading.local()

            def search() -> None:
                if not hasattr(local, "client"):
                    local.client = Client(url)
                status, answer = local.client("POST", "/search", {"query": rng.choice(queries), "k": K})
                tally.statuses[status] += 1
                if status == 200:
                    found = [hit["doc_id"] for hit in answer["results"]]
                    tally.twice += len(found) != len(set(found))
                    tally.partial += answer["shards_answered"] < shards

            control = Client(url)
            settle(control, shards=shards)
            # What each document may be: the title of its last acknowledged write, and of those after it.
            allowed: dict[str, list[str | None]] = defaultdict(lambda: [None])
            written, parts = 0, cycle(("Writer", "IndexSearcher", "Gateway", "DocumentEncoder"))
            machine.kills.clear()
            with load(search, threads=2):
                for step in count():
                    if written >= operations and machine.kills.total() >= kills:
                        break
                    ids = rng.sample([f"fault-{n}" for n in range(operations // 4)], batch)
                    delete = step % 4 == 3
                    title = None if delete else f"version {step} of a document"
                    killing = None
                    if machine.kills.total() < kills and machine.whole():
                        killing = threading.Thread(
                            target=machine.kill, args=(next(parts), rng.random() * 0.2)
                        )
                        killing.start()
                    status = _send(control, ids, title)
                    if killing is not None:
                        killing.join()
                    tally.statuses[status] += 1
                    for doc_id in ids:
                        allowed[doc_id] = [title] if status == 200 else [*allowed[doc_id], title]
                    written += batch * (status == 200)
                settle(control, shards=shards)
            time.sleep(2)  # followers look every tenth of a second
            lost = sum(_title(control, doc_id) not in titles for doc_id, titles in allowed.items())
            return _row("write", tally, machine.kills, swaps=0, writes=written, lost=lost)


def read(machine: Cluster, run_dir: str, *, changes: int, kills: int) -> dict[str, Any]:
    """Limits change, then searchers and encoders are killed, under load."""
    config = pipeline.load_run(run_dir)
    queries, rng = _queries(config), random.Random(0)
    shards = Searcher.open(pipeline.locate(config, "index").uri).layout.shards
    with machine.deployed({"deadline_s": 10, **TWO_OF_EACH}, run_dir=run_dir) as (url, deploy):
        tally, local = Tally(), threading.local()

        def search() -> None:
            if not hasattr(local, "client"):
                local.client = Client(url)
            status, answer = local.client("POST", "/search", {"query": rng.choice(queries), "k": K})
            tally.statuses[status] += 1
            if status == 200:
                tally.partial += answer["shards_answered"] < shards
                tally.degraded.update(answer["degraded"])

        control = Client(url)
        settle(control, shards=shards)
        machine.kills.clear()
        before, parts = machine.processes(), cycle(("IndexSearcher", "QueryEncoder"))
        with load(search, threads=4):
            for most in range(K, K + changes):
                deploy({"limits": {"max_k": most}})
                _until_all_gateways_have(control, most)
            limit_restarts = len(before ^ machine.processes())
            limit_requests, limit_errors = tally.statuses.total(), _errors(tally)
            while machine.kills.total() < kills:
                if machine.whole():
                    machine.kill(next(parts), hold_s=0.2)
                time.sleep(0.5)
            settle(control, shards=shards)
        return _row("read", tally, machine.kills, swaps=0, writes=0, lost=0) | {
            "dead_replica_errors": _errors(tally) - limit_errors,
            "limit_changes": changes,
            "limit_requests": limit_requests,
            "limit_restarts": limit_restarts,
            "limit_errors": limit_errors,
        }


def _until_all_gateways_have(client: Client, most: int) -> None:
    """Wait until several calls, which go to either gateway, say that they give so many results."""
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
        raise SystemExit(f"documents were set aside: {answer['rejected'][:1]}")
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


def _towers(config: RunConfig) -> dict[bool, Artifact]:
    """The query tower, and under True the teacher that its uncertain queries escalate to, if it has one."""
    tower = pipeline.locate(config, "student" if config.distill else "dual_encoder")
    with suppress(ConfigError):
        return {False: tower, True: pipeline.teacher(config)}
    return {False: tower}


def _index(config: RunConfig, uri: str, *, fewer: int) -> Artifact:
    """The run's documents in GROUPS shards; with fewer lists, some queries have other neighbours."""
    parents = {kind: pipeline.locate(config, kind).uri for kind in ("dataset", "embeddings", "semantic_ids")}
    nlist = Searcher.open(pipeline.locate(config, "index").uri).layout.nlist
    changes = {"nprobe": 1, "nlist": nlist - fewer, "shards": GROUPS}
    return index_job.run(config.index.model_copy(update=changes), **parents, output=uri)


def _expected(index: Artifact, tower: Artifact, queries: Sequence[str]) -> Expected:
    """For each query, what each shard of a version finds by the embeddings of a tower."""
    encoder = QueryEncoder(tower.directory("query"))
    searchers = [Searcher.open(index.uri, shards=[number]) for number in range(GROUPS)]
    found = []
    for query in queries:
        embedding = encoder.encode_queries([query])
        of_shards = [searcher.search(embedding, k=K)[0] for searcher in searchers]
        found.append([{result.doc_id: float(result.score) for result in of} for of in of_shards])
    return found


def _right(answer: dict[str, Any], expected: list[dict[str, float]]) -> bool:
    """Whether an answer is the merge of what the shards give that it does not name as missing."""
    missing = answer["missing_groups"]  # a group has one shard
    if answer["shards_answered"] != GROUPS - len(missing):
        return False
    held = [scores for shard, scores in enumerate(expected) if shard not in missing]
    best = sorted((score for scores in held for score in scores.values()), reverse=True)[:K]
    results = [(hit["doc_id"], hit["score"]) for hit in answer["results"]]
    right_scores = all(abs(score - wanted) < 1e-4 for (_, score), wanted in zip(results, best, strict=False))
    known = {doc_id for scores in held for doc_id in scores}
    return len(results) == len(best) and right_scores and all(doc_id in known for doc_id, _ in results)


def _row(name: str, tally: Tally, kills: Counter[str], **numbers: int) -> dict[str, Any]:
    undocumented = sum(count for status, count in tally.statuses.items() if status not in DOCUMENTED)
    return {
        "service": name,
        "requests": sum(tally.statuses.values()),
        "kills": kills.total() - kills[DOCUMENTS],  # losing them kills a gateway
        **numbers,
        "partial": tally.partial,
        "errors": _errors(tally),
        "undocumented": undocumented,
        "wrong or mixed": tally.wrong,
        "doubled": tally.twice,
        "killed": json.dumps(dict(sorted(kills.items()))),
        "degraded": json.dumps(dict(sorted(tally.degraded.items()))),
        "statuses": json.dumps({str(status): count for status, count in sorted(tally.statuses.items())}),
    }


def _errors(tally: Tally) -> int:
    return sum(count for status, count in tally.statuses.items() if status not in (200, 404))


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--run", default="runs/quickstart", help="a finished run")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--operations", type=int, default=10_000, help="documents written or deleted")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--changes", type=int, default=10, help="of limits")
    parser.add_argument("--only", choices=["swap", "write", "read"])
    options = parser.parse_args()
    machine = Cluster()
    # With --only, the results of the others stay.
    before = json.loads(options.json.read_text())["table"] if options.json and options.json.exists() else []
    rows = [row for row in before if options.only and row["service"] != options.only]
    if options.only in (None, "swap"):
        rows.append(swap(machine, options.run, swaps=options.swaps, kills=min(options.kills, options.swaps)))
        print(rows[-1], flush=True)
    if options.only in (None, "write"):
        rows.append(write(machine, options.run, operations=options.operations, kills=options.kills))
        print(rows[-1], flush=True)
    if options.only in (None, "read"):
        rows.append(read(machine, options.run, changes=options.changes, kills=options.kills))
    rows.sort(key=lambda row: row["service"])
    for row in rows:
        report.show(row["service"], [row])
    names = ["requests", "errors", "lost", "undocumented", "wrong or mixed", "doubled"]
    names += ["dead_replica_errors", "limit_restarts", "limit_errors"]  # of one service alone
    metrics = {name: sum(row.get(name, 0) for row in rows) for name in names}
    metrics["errors_per_request"] = metrics["errors"] / max(metrics["requests"], 1)
    report.write(options.json, metrics=metrics, table=rows)


if __name__ == "__main__":
    main()
