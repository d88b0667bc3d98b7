"""A real index and a real query tower behind HTTP: what is served is what is searched in process."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import tiny
from scalingnote import cli, pipeline
from scalingnote.encode.encoder import Encoder
from scalingnote.errors import ConfigError
from scalingnote.index import job
from scalingnote.index.config import FastScan, IndexConfig
from scalingnote.models import tower
from scalingnote.models.backbone import train_tokenizer
from scalingnote.search.config import ServeConfig
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact, Draft
from serve import app
from synthetic_corpus import Corpus

DIM = 16


@pytest.fixture(scope="module")
def index(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    base = tmp_path_factory.mktemp("index")
    corpus = Corpus.build(f"{base}/corpus", sizes=[200, 220], dim=DIM)
    config = IndexConfig(
        shards=2, family=FastScan(refine="flat"), nlist=4, nprobe=4, refine_factor=100, iterations=2
    )
    return job.run(config, **corpus.uris, output=f"{base}/index")


def student(uri: str, *, dim: int) -> Artifact:
    texts = [row["content"] for row in tiny.document_rows()]
    learnt = train_tokenizer(texts, vocabulary=tiny.CAUSAL.vocabulary)
    draft = Draft(uri, kind="student", config=tiny.Nothing(), parents={})
    built = tower.build(tiny.query_tower(), role="query", dim=dim, tokenizer_json=learnt, seed=0)
    built.save(Path(draft.path("query")))
    return draft.commit(counts={})


@pytest.fixture(scope="module")
def query_tower(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return student(f"{tmp_path_factory.mktemp('student')}/student", dim=DIM)


def found_in_process(
    index: Artifact, query_tower: Artifact, query: str, *, k: int
) -> list[tuple[str, float]]:
    embedding = Encoder.load(query_tower.directory("query")).encode_queries([query])
    return [(result.doc_id, result.score) for result in Searcher.open(index.uri).search(embedding, k=k)[0]]


@pytest.fixture(scope="module")
def server(index: Artifact, query_tower: Artifact) -> Iterator[psutil.Popen]:
    """A server as the shell starts it, in a process and a cluster of its own."""
    program = f"""
import sys
from serve import app
serve = {{"port": 0, "deadline_s": 30}}
found = app.find(app.AppArgs(index={index.uri!r}, query_tower={query_tower.uri!r}, serve=serve))
app.find = lambda _: found
sys.exit(app.run("a run"))
"""
    command = [sys.executable, "-c", program]
    root = Path(app.__file__).parents[1]
    process = psutil.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        for member in [*process.children(recursive=True), process] if process.is_running() else []:
            member.kill()
        process.stdout.close()


@pytest.fixture(scope="module")
def url(server: psutil.Popen) -> str:
    return next(line for line in server.stdout if line.startswith("http://")).split()[0]


def ask(url: str, query: str, *, k: int) -> dict[str, Any]:
    body = json.dumps({"query": query, "k": k}).encode()
    request = urllib.request.Request(f"{url}/search", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def test_what_is_served_is_what_is_searched(url: str, index: Artifact, query_tower: Artifact) -> None:
    for query in ("bakoli menura", "sitave", "数据 zo"):
        answer = ask(url, query, k=7)
        expected = found_in_process(index, query_tower, query, k=7)
        assert [hit["doc_id"] for hit in answer["results"]] == [doc_id for doc_id, _ in expected]
        scores = [score for _, score in expected]
        assert [hit["score"] for hit in answer["results"]] == pytest.approx(scores, abs=1e-5)
        assert (answer["shards"], answer["shards_answered"]) == (2, 2)
        best = answer["results"][0]
        number = int(best["doc_id"].removeprefix("d"))
        assert (best["title"], best["topic"]) == (f"Title {number}", f"topic {number % 7}")
        assert best["snippet"].startswith(f"Text of document {number}.")
        assert best["semantic_id"] == f"1-0-{number}"


def test_queries_encoded_together_equal_queries_encoded_alone(
    url: str, index: Artifact, query_tower: Artifact
):
    queries = [f"bakoli {word}" for word in ["menura", "sitave", "zoba", "lime", "nura", "kota"]]
    with ThreadPoolExecutor(len(queries)) as crowd:
        answers = list(crowd.map(lambda query: ask(url, query, k=3), queries))
    for query, answer in zip(queries, answers, strict=True):
        expected = found_in_process(index, query_tower, query, k=3)
        assert [hit["doc_id"] for hit in answer["results"]] == [doc_id for doc_id, _ in expected]


def test_the_shell_finds_the_same(
    index: Artifact,
    query_tower: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = pipeline.RunConfig.model_validate({"dataset": {"name": "medquad"}})
    monkeypatch.setattr(pipeline, "load_run", lambda run_dir: config)
    monkeypatch.setattr(pipeline, "locate", lambda _, kind: {"index": index, "student": query_tower}[kind])
    assert cli.main(["search", "bakoli menura", "-k", "3"]) == 0
    told = capsys.readouterr().out
    expected = found_in_process(index, query_tower, "bakoli menura", k=3)
    places = [told.index(f"{score:.4f}  Title {doc_id[1:]}\n") for doc_id, score in expected]
    assert places == sorted(places)
    assert told.splitlines()[-1].startswith("3 results; load ")


def test_a_tower_and_an_index_that_are_no_pair_are_refused(index: Artifact, tmp_path: Path) -> None:
    other = student(f"{tmp_path}/student", dim=DIM // 2)
    with pytest.raises(ConfigError, match="dim 16, the query tower of 8"):
        app.find(app.AppArgs(index=index.uri, query_tower=other.uri))


def test_replicas_that_would_not_fit_are_refused(index: Artifact, query_tower: Artifact) -> None:
    config = ServeConfig(cpus_per_replica=50)
    served = app.find(app.AppArgs(index=index.uri, query_tower=query_tower.uri, serve=config))
    assert served.cpus == 4 * 50
    with pytest.raises(ConfigError, match="reserve 200 CPUs"):
        app.start(served)


def test_a_signal_ends_the_server_and_all_it_started(server: psutil.Popen, url: str) -> None:
    assert ask(url, "bakoli", k=2)["shards_answered"] == 2
    family = server.children(recursive=True)
    assert any("raylet" in member.name() for member in family)
    server.terminate()  # as process managers do: the harder signal, for which Ray has a handler of its own
    assert server.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
