"""A real service with a delta: two groups of searcher replicas, and a writer that is killed."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pair import DIM, built, table
from replicas_here import PAUSE_S, TRIES, find_artifacts, hits, kill, post, running

from scalingnote.index.shard import SHARD_DOCUMENTS
from scalingnote.run.ingest import IndexRows
from scalingnote.run.service_config import LiveServe
from scalingnote.search.searcher import Searcher
from scalingnote.serve import app
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of a busy machine
NEW = vectors(400, DIM, seed=5)


def numbered_texts() -> Any:
    """Return a fake document encoder: a text is the number of its vector. A local class needs no import."""
    all_vectors, schema = NEW, SHARD_DOCUMENTS

    class NumberedTexts:
        def __init__(self, catalog: LiveCatalog, _: bool) -> None:
            self._index = catalog.first.index

        async def encode(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, IndexRows]:
            texts = {name: [row["content"] for row in documents] for name in schema.names[1:]}
            rows = pa.table({"doc_id": [row["doc_id"] for row in documents], **texts}, schema=schema)
            row_vectors = all_vectors[[int(row["content"]) for row in documents]]
            return {self._index: IndexRows(rows, row_vectors, [])}

    return NumberedTexts


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return built(tmp_path_factory.mktemp("index"))


@pytest.fixture(scope="module")
def url(cluster: None, index: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tower = table(f"{tmp_path_factory.mktemp('student')}/student")
    folder = str(tmp_path_factory.mktemp("live"))
    replicas = {"searcher": {"num_replicas": 2}, "encoder": {"num_replicas": 0}}
    parts = find_artifacts(index.uri, tower.uri, deployments=replicas)
    served = replace(
        parts,
        catalog=LiveCatalog(folder, LivePair(index.uri), delta=True),
        config=parts.config.model_copy(update={"live": LiveServe(folder=folder, delta=True)}),
    )
    assert len(served.groups) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "DocumentEncoder", numbered_texts())
        with running(served) as started:
            yield started


def until_acknowledged(url: str, path: str, **body: Any) -> None:
    """Send a write until it is acknowledged."""
    for _ in range(TRIES):
        if post(f"{url}{path}", **body)[0] == 200:
            return
        time.sleep(PAUSE_S)
    raise AssertionError("no write was acknowledged")


def ids_of_answer(url: str, query: np.ndarray, k: int) -> list[str]:
    """Return the ids of a complete answer."""
    for _ in range(TRIES):
        status, answer = post(f"{url}/search", vector=query.tolist(), k=k)
        if status == 200 and answer["shards_answered"] == 2 and not answer["missing_groups"]:
            return hits(answer)
        time.sleep(PAUSE_S)
    raise AssertionError("no complete answer")


def best(truth: Mapping[str, np.ndarray], query: np.ndarray, k: int) -> list[str]:
    scores = {name: float(vector @ query) / float(np.linalg.norm(vector)) for name, vector in truth.items()}
    return sorted(scores, key=lambda name: -scores[name])[:k]


def test_a_killed_writer_loses_and_doubles_no_document(url, index):
    searcher = Searcher.open(index.uri)
    truth = {f"d{n}": searcher.vector(f"d{n}") for n in range(len(searcher))}
    stop, twice, failed = threading.Event(), [], []

    def search() -> None:
        """Search during the writes: no answer may fail or have a document twice."""
        while not stop.is_set():
            status, answer = post(f"{url}/search", vector=NEW[399].tolist(), k=100)
            if status != 200:
                failed.append(status)
                continue
            names = hits(answer)
            twice.extend(name for name in set(names) if names.count(name) > 1)

    reader = threading.Thread(target=search)
    reader.start()
    killed: list[int] = []
    try:
        for step in range(30):
            numbers = {f"d{(7 * step + n) % 440}": (10 * step + n) % 399 for n in range(8)}
            rows = [{"doc_id": name, "topic": "new", "content": str(n)} for name, n in numbers.items()]
            deleted_ids = [f"d{(11 * step + 5) % 440}"]
            if step % 10 == 5:  # during the write
                threading.Timer(0.005 * (step // 10), lambda: killed.extend(kill("Writer"))).start()
            until_acknowledged(url, "/documents", documents=rows)
            truth |= {name: NEW[n] for name, n in numbers.items()}
            until_acknowledged(url, "/documents/delete", doc_ids=deleted_ids)
            truth = {name: vector for name, vector in truth.items() if name not in deleted_ids}
            for query in (NEW[step], NEW[399]):  # the gateway has read the log before it acknowledges
                assert ids_of_answer(url, query, 10) == best(truth, query, 10)
    finally:
        stop.set()
        reader.join()
    assert len({*killed}) == 3
    assert (twice, failed) == ([], [])


def test_restarted_searchers_have_all_writes(url):
    vector = NEW[399] * -1
    until_acknowledged(url, "/documents", documents=[{"doc_id": "d3", "topic": "", "content": "399"}])
    expected = ids_of_answer(url, vector, 20), ids_of_answer(url, NEW[399], 20)
    assert expected[1][0] == "d3"
    assert len(kill("IndexSearcher-000")) == 2
    assert (ids_of_answer(url, vector, 20), ids_of_answer(url, NEW[399], 20)) == expected
