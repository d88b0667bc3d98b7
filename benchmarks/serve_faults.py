"""A service under constant load while its parts are killed, its index is swapped, its documents change.

    python -m benchmarks.serve_faults --run runs/quickstart --json docs/results/serve_faults.json

Two services of a finished run, one after the other, every part of each in replicas of its own:

    swap    clients search; another version of the index is activated, again and again; searcher, encoder and
            gateway replicas are killed (kill -9). Each answer must be what the version that it names gives in
            process, of the shards that it says have answered.
    write   clients search; documents are written and deleted; writer, searcher and gateway are killed. In the
            end every document must be as its last acknowledged write left it (or a later one that was sent
            and not acknowledged), and no answer may have a document twice.

Nothing is killed before everything that was killed is back: of what answers searches there are two, of the
writer one. Errors are counted by status; those that docs/guides/operations.md does not name are failures.
"""

import http.client
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
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any
from urllib.parse import quote, urlsplit

import psutil
import ray
from ray import serve

from benchmarks import report
from scalingnote import cluster, pipeline
from scalingnote.index import job as index_job
from scalingnote.run_config import RunConfig
from scalingnote.search.searcher import Searcher
from scalingnote.serve import artifacts
from scalingnote.serve.replicas import QueryPathParts
from scalingnote.serve_config import AppArgs
from scalingnote.storage.artifact import Artifact

# 408, 500: a replica died with the request; 502, 503: nobody was there to take it; 0: the connection broke.
DOCUMENTED = {0, 200, 404, 408, 500, 502, 503, 504}
TWO_OF_EACH = {"gateway_replicas": 2, "encoder_replicas": 2, "searcher_replicas": 2}
K = 10


class Client:
    """A connection that is made anew when it breaks."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._host, timeout=60)

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; (0, None) where the connection broke."""
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
    wrong: int = 0  # answers that mix versions, or are not what their version gives
    twice: int = 0  # answers with a document twice


class Cluster:
    """Replicas on this machine's Ray, which the service joins."""

    def __init__(self) -> None:
        cluster.connect()
        self._address, self._killed = ray.get_runtime_context().gcs_address, 0.0
        self.kills: Counter[str] = Counter()

    @contextmanager
    def service(self, knobs: dict[str, Any], run: str) -> Iterator[str]:
        """A service as the shell starts it: its URL."""
        command = [sys.executable, "-m", "scalingnote.cli", "serve", "--run", run]
        for key, value in knobs.items():
            command += ["--set", f"serve.{key}={json.dumps(value)}"]
        environment = {**os.environ, "RAY_ADDRESS": self._address}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            yield next(line for line in process.stdout if line.startswith("http://")).split()[0]
        finally:
            process.terminate()
            process.wait(60)
            serve.shutdown()  # in here: this process forgets the Serve that has ended with that one

    def kill(self, part: str, wait_s: float = 0.0) -> None:
        """kill -9 a replica of a deployment that is one of `part`, in a moment."""
        time.sleep(wait_s)
        random.choice(self._replicas(part)).kill()
        self.kills[part] += 1
        self._killed = time.monotonic()

    def whole(self) -> bool:
        """Whether every deployment has all its replicas, each of them ready."""
        if time.monotonic() < self._killed + 2:  # Serve may not have noticed yet
            return False
        found = serve.status().applications["scalingnote"]
        return all(each.status == "HEALTHY" for each in found.deployments.values())

    @staticmethod
    def _replicas(part: str) -> list[psutil.Process]:
        found = []
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it may end while it is looked at
                if f":{part}" in "".join(each.cmdline()):
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
    first = pipeline.locate(config, "index")
    queries = _queries(config)
    with tempfile.TemporaryDirectory() as folder:
        second = _other_index(config, f"{folder}/index")
        expected = {index.digest[:12]: _expected(index, config, queries) for index in (first, second)}
        shards = len(next(iter(expected.values()))[0])
        knobs = {
            "port": 0,
            "deadline_s": 5,
            "state": f"{folder}/state",
            "encoder_in": "replicas",
            "searchers_in": "replicas",
            "shards_per_searcher": 1,
            **TWO_OF_EACH,
        }
        with machine.service(knobs, run_dir) as url:
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
                    tally.partial += answer["shards_answered"] < shards
                    tally.wrong += not _right(answer, expected[answer["index_version"]], number)

            control = Client(url)
            settle(control, shards=shards)
            done, parts = 0, cycle(("IndexSearcher", "QueryEncoder", "Gateway"))
            machine.kills.clear()
            with load(search, threads=4):
                while done < swaps or machine.kills.total() < kills:
                    uri = (second, first)[done % 2].uri
                    done += control("POST", "/admin/index/activate", {"uri": uri})[0] == 200
                    if machine.kills.total() < kills and machine.whole():
                        machine.kill(next(parts))
                    time.sleep(0.5)
                settle(control, shards=shards)
                status, _ = control("POST", "/admin/index/roll_back")
            return _row("swap", tally, swaps=done, kills=machine.kills.total(), writes=0, lost=0) | {
                "rolled back": status == 200
            }


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
            "encoder_in": "replicas",
            "searchers_in": "replicas",
            **TWO_OF_EACH,
        }
        with machine.service(knobs, run_dir) as url:
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
            kills = machine.kills.total()
            return _row("write", tally, swaps=0, kills=kills, writes=written, lost=lost)


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


def _other_index(config: RunConfig, uri: str) -> Artifact:
    """The same documents with another quantizer: other neighbours for some queries."""
    parents = {kind: pipeline.locate(config, kind).uri for kind in ("dataset", "embeddings", "semantic_ids")}
    nlist = Searcher.open(pipeline.locate(config, "index").uri).layout.nlist
    changed = config.index.model_copy(update={"seed": config.index.seed + 1, "nprobe": 1, "nlist": nlist})
    return index_job.run(changed, **parents, output=uri)


def _expected(index: Artifact, config: RunConfig, queries: Sequence[str]) -> list[list[dict[str, float]]]:
    """For each query, what each shard of a version finds: document -> score."""
    served = artifacts.find(AppArgs(run_dir=config.run_dir))
    assert isinstance(served, artifacts.ServedArtifacts)
    parts = served.arms[0].encoder
    assert isinstance(parts, QueryPathParts)
    path = parts.load()
    shards = Searcher.open(index.uri).layout.shards
    searchers = [Searcher.open(index.uri, shards=[number]) for number in range(shards)]
    found = []
    for query in queries:
        embedding = path([query])[0].embedding
        of_shards = [searcher.search(embedding, k=K)[0] for searcher in searchers]
        found.append([{result.doc_id: result.score for result in of} for of in of_shards])
    return found


def _right(answer: dict[str, Any], expected: list[list[dict[str, float]]], query: int) -> bool:
    """Whether an answer is the merge of what the shards of one version give that have answered."""
    of_shards = expected[query]
    results = [(hit["doc_id"], hit["score"]) for hit in answer["results"]]
    answered = {hit["explain"]["shard"] for hit in answer["results"]}
    silent = answer["shards"] - answer["shards_answered"]
    possible = [s for s in range(len(of_shards)) if s in answered or not silent]
    best = sorted((score for s in possible for score in of_shards[s].values()), reverse=True)[:K]
    right_scores = all(abs(score - wanted) < 1e-4 for (_, score), wanted in zip(results, best, strict=False))
    known = {doc_id for of in of_shards for doc_id in of}
    return len(results) == len(best) and right_scores and all(doc_id in known for doc_id, _ in results)


def _row(name: str, tally: Tally, **numbers: int) -> dict[str, Any]:
    undocumented = sum(count for status, count in tally.statuses.items() if status not in DOCUMENTED)
    errors = sum(count for status, count in tally.statuses.items() if status not in (200, 404))
    return {
        "service": name,
        "requests": sum(tally.statuses.values()),
        **numbers,
        "partial": tally.partial,
        "errors": errors,
        "undocumented": undocumented,
        "wrong or mixed": tally.wrong,
        "doubled": tally.twice,
        "statuses": json.dumps({str(status): count for status, count in sorted(tally.statuses.items())}),
    }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--run", default="runs/quickstart", help="a finished run")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--operations", type=int, default=10_000, help="documents written or deleted")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--only", choices=["swap", "write"])
    options = parser.parse_args()
    machine = Cluster()
    # One half alone leaves what is known of the other.
    before = json.loads(options.json.read_text())["table"] if options.json and options.json.exists() else []
    rows = [row for row in before if options.only and row["service"] != options.only]
    if options.only != "write":
        rows.append(swap(machine, options.run, swaps=options.swaps, kills=min(options.kills, options.swaps)))
        print(rows[-1], flush=True)
    if options.only != "swap":
        rows.append(write(machine, options.run, operations=options.operations, kills=options.kills))
    rows.sort(key=lambda row: row["service"])
    for row in rows:
        report.show(row["service"], [row])
    names = ("requests", "errors", "lost", "undocumented", "wrong or mixed", "doubled")
    metrics = {name: sum(row[name] for row in rows) for name in names}
    metrics["errors_per_request"] = metrics["errors"] / max(metrics["requests"], 1)
    report.write(options.json, metrics=metrics, table=rows)


if __name__ == "__main__":
    main()
