"""Teachers that are known only by vectors: behind an endpoint, or in a file.

    python -m benchmarks.teachers --json docs/results/teachers.json [--sets scifact] [--documents N]

`scalingnote serve --model` serves all-MiniLM-L6-v2, behind a proxy that counts texts.

- max_difference: of a value of a unit vector, between `distill --endpoint --index` (documents and
  pseudo-queries) and sentence-transformers in this process
- asked_twice: texts that are requested again after SIGKILL in the middle of that command. The proxy delays
  requests before the kill, so that none is in progress: their answers would be lost with the process
- vectors_kept_mean: nDCG@10 of the table that `distill --vectors` trains only on the documents' vectors, over
  the teacher's; `--documents` limits the documents, those with a judgement first
"""

import json
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32
from numpy import ndarray

from benchmarks import beir, minilm
from benchmarks.front_door import ndcg, ranked
from benchmarks.public_sets import write_json_lines
from benchmarks.report import arguments, show, write
from benchmarks.serve import running
from scalingnote.run import pipeline
from scalingnote.storage import arrow

Row = dict[str, Any]
SETS = ("scifact",)
REQUESTS = "endpoint={batch_texts: 16, concurrency: 2}"  # of a server on two cores


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", default=SETS, help="BEIR folders, default: %(default)s")
    parser.add_argument("--documents", type=int, metavar="N", help="of a set; default: all")
    parser.add_argument("--count", type=int, default=2000, help="pseudo-queries, default: %(default)s")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/teachers"), help="default: %(default)s")
    options = parser.parse_args()
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm.path()), device="cpu")
    rows = []
    words = ["serve", "--model", str(minilm.path()), "--set", "serve.port=0"]
    exact = {"SCALINGNOTE_PRECISION": "float32"}  # like the model in the comparison
    with running(["-m", "scalingnote.cli.main", *words], exact) as url:
        for name in options.sets:
            texts, queries, gains = read_set(name, options.documents)
            folder = options.run_dir / name
            folder.mkdir(parents=True, exist_ok=True)
            write_json_lines(folder / "docs.jsonl", ({"text": text} for text in texts))
            asked_twice = distil_by_endpoint(url, folder, count=options.count)
            difference, documents = compare(folder, model)
            kept = kept_by_vectors(folder, texts, documents, model.encode(queries), queries, gains)
            rows.append({"set": name, "asked twice": asked_twice, "difference": difference, **kept})
    show("Teachers that are known only by vectors", rows)
    metrics = {
        "max_difference": max(row["difference"] for row in rows),
        "asked_twice": sum(row["asked twice"] for row in rows),
        "vectors_kept_mean": round(statistics.mean(row["kept"] for row in rows), 4),
    }
    write(options.json, metrics=metrics, rows=rows)


def read_set(name: str, most: int | None) -> tuple[list[str], list[str], Float32[ndarray, "queries docs"]]:
    """Return documents of a BEIR folder as ``title text``, its test queries, and the gain of each pair."""
    judgements = beir.judged(name)
    answers = {doc_id for doc_ids in judgements.values() for doc_id in doc_ids}
    rows = sorted(beir.documents(name), key=lambda row: row["_id"] not in answers)[:most]
    place = {row["_id"]: number for number, row in enumerate(rows)}
    rows_of_answers = {
        query: [place[doc] for doc in doc_ids if doc in place]
        for query, doc_ids in sorted(judgements.items())
    }
    rows_of_answers = {query: doc_ids for query, doc_ids in rows_of_answers.items() if doc_ids}
    gains = np.zeros((len(rows_of_answers), len(rows)), np.float32)
    for number, doc_ids in enumerate(rows_of_answers.values()):
        gains[number, doc_ids] = 1
    texts = [" ".join(filter(None, (row["title"].strip(), row["text"].strip()))) for row in rows]
    texts_of = beir.queries(name)
    return texts, [texts_of[query] for query in rows_of_answers], gains


class Proxy(ThreadingHTTPServer):
    """Proxy that counts answered texts; after `hold` of them, new requests wait until the release."""

    daemon_threads = True

    def __init__(self, target: str, *, hold: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.hold = target, hold
        self.answered: Counter[tuple[str, str]] = Counter()  # role and text
        self.underway, self.lock, self.released = 0, threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        parsed = json.loads(body)
        texts = [(parsed.get("input_type"), text) for text in parsed["input"]]
        with self.server.lock:
            held = self.server.answered.total() >= self.server.hold and not self.server.released.is_set()
            self.server.underway += not held
        if held:
            self.server.released.wait()
            return  # the client was killed
        request = urllib.request.Request(
            f"{self.server.target}{self.path}", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                status, content = 200, answer.read()
        except urllib.error.HTTPError as busy:
            status, content = busy.code, busy.read()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        with self.server.lock:
            self.server.underway -= 1
            self.server.answered.update(texts if status == 200 else ())

    def log_message(self, *_: Any) -> None: ...


def distil_by_endpoint(url: str, folder: Path, *, count: int) -> int:
    """Run `distill --endpoint --index`, kill it when half of its queries are answered, run it again.

    Return the number of texts that were answered more than once.
    """
    proxy = Proxy(url, hold=count // 2)
    base = f"http://127.0.0.1:{proxy.server_port}"
    words = ["distill", "--endpoint", base, "--model", minilm.path().name, "--texts", f"{folder}/docs.jsonl"]
    words += ["--to", f"{folder}/endpoint", "--student", "static", "--count", str(count), "--index"]
    words += ["--set", REQUESTS]
    words += ["--set", "endpoint.document_fields.input_type=document"]
    command = [sys.executable, "-m", "scalingnote.cli.main", *words]
    first = psutil.Popen(command)
    while proxy.answered.total() < proxy.hold or proxy.underway:
        if first.poll() is not None:
            raise SystemExit("distill ended before it was killed: give more --count")
        time.sleep(0.2)
    time.sleep(1)  # the last answer becomes a file
    members = [*first.children(recursive=True), first]
    first.send_signal(signal.SIGKILL)
    for member in members[:-1]:  # its Ray
        member.kill()
    first.wait()
    proxy.released.set()
    subprocess.run(command, check=True)
    proxy.shutdown()
    return sum(times > 1 for times in proxy.answered.values())


def compare(folder: Path, model: Any) -> tuple[float, Float32[ndarray, "docs dim"]]:
    """Return the largest difference from vectors of the model's files, and the documents' vectors.

    Texts are those of `prepare`, which replaces control characters by blanks, also for a model in a folder.
    """
    config = pipeline.load_run(f"{folder}/endpoint.run")
    queries = pipeline.locate(config, "query_embeddings").table("embeddings", ["query", "embedding"])
    documents = pipeline.locate(config, "embeddings").table("embeddings", ["summary"])["summary"]
    texts = pipeline.locate(config, "dataset").table("documents", ["content"])["content"].to_pylist()
    vectors = arrow.to_numpy(documents)
    sides: Sequence[tuple[ndarray, list[str]]] = (
        (arrow.to_numpy(queries["embedding"]), queries["query"].to_pylist()),
        (vectors, texts),
    )
    return max(float(np.abs(side - model.encode(texts)).max()) for side, texts in sides), vectors


def kept_by_vectors(
    folder: Path,
    texts: list[str],
    documents: Float32[ndarray, "docs dim"],
    teacher: Float32[ndarray, "queries dim"],
    queries: list[str],
    gains: Float32[ndarray, "queries docs"],
) -> Row:
    """Measure the quality of a table that is trained only on the documents' vectors, and the teacher's."""
    import scalingnote

    pq.write_table(pa.table({"text": texts, "vector": arrow.to_arrow(documents)}), folder / "vectors.parquet")
    tower = scalingnote.distill(vectors=folder / "vectors.parquet", to=folder / "vectors")
    student, teacher_ndcg = (
        float(ndcg(ranked(side @ documents.T), gains).mean()) for side in (tower.encode(queries), teacher)
    )
    return {
        "documents": len(texts),
        "queries": len(queries),
        "teacher": round(teacher_ndcg, 4),
        "vectors": round(student, 4),
        "kept": round(student / teacher_ndcg, 4),
    }


if __name__ == "__main__":
    main()
