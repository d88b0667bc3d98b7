"""A writer of two pairs that is killed (kill -9) at random moments, also while it fills the second pair."""

import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from pair import DIM, built

from scalingnote.search.live_searcher import SearcherWithDelta
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

pytestmark = pytest.mark.slow
ROUNDS, DOCUMENTS = 6, 40
NEW = vectors(1000, DIM, seed=5)

# The text of a document is the number of its vector. The second pair negates the vector.
CHILD = """
import asyncio, json, sys
import numpy as np, pyarrow as pa
from scalingnote.index.config import LiveConfig
from scalingnote.index.shard import SHARD_DOCUMENTS
from scalingnote.run.ingest import IndexRows
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.serve.writer import Writer

folder, *indexes = sys.argv[1:]
known = np.load(f"{folder}/vectors.npy")

class Encoder:
    async def encode(self, documents, only=None):
        await asyncio.sleep(0.01)
        rows_of_pairs = {}
        for sign, index in zip((1, -1), indexes):
            sources = pa.Table.from_pylist(documents)
            columns = {"doc_id": sources["doc_id"]}
            columns |= {name: sources["content"] for name in SHARD_DOCUMENTS.names[1:]}
            rows = pa.table(columns, schema=SHARD_DOCUMENTS)
            matrix = sign * known[[int(row["content"]) for row in documents]]
            rows_of_pairs[index] = IndexRows(rows, matrix, [], sources=sources)
        return rows_of_pairs if only is None else {only: rows_of_pairs[only]}

async def main():
    encoder, catalog = Encoder(), LiveCatalog(folder, LivePair(indexes[0]), delta=True)
    writer = Writer(catalog, LiveConfig(keep_documents=True, compact_at=0.05), LocalHandle(encoder))
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        kind, argument = json.loads(line)
        if kind == "delete":
            await writer.delete(argument)
        elif kind == "add":
            catalog.add(LivePair(indexes[1]))
        else:
            rows = [{"doc_id": doc_id, "content": text} for doc_id, text in argument.items()]
            while not await writer.upsert(await encoder.encode(rows)):
                pass
        await writer.follow_pairs()
        print("done", flush=True)

asyncio.run(main())
"""


class Child:
    """The process of the writer."""

    def __init__(self, folder: Path, indexes: list[str]) -> None:
        command = [sys.executable, "-c", CHILD, str(folder), *indexes]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read()

    def _read(self) -> bool:
        assert self._process.stdout is not None
        return bool(self._process.stdout.readline())

    def send(self, kind: str, argument: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, argument]) + "\n")
        self._process.stdin.flush()

    def do(self, kind: str, argument: object) -> bool:
        """Do a write, and return whether it was acknowledged."""
        self.send(kind, argument)
        return self._read()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    return [built(tmp_path_factory.mktemp(f"index{seed}"), corpus_seed=seed) for seed in (0, 1)]


def test_both_pairs_have_every_acknowledged_write(indexes, tmp_path):
    uris, rng = [index.uri for index in indexes], random.Random(4)
    allowed: dict[str, list[str | None]] = defaultdict(lambda: [None])
    catalog = LiveCatalog(str(tmp_path), LivePair(uris[0]), delta=True)
    numbers = iter(range(1000))
    np.save(tmp_path / "vectors.npy", NEW)
    for round_number in range(ROUNDS):
        child = Child(tmp_path, uris)
        if round_number == 1:
            assert child.do("add", None)
        for step in range(rng.randrange(8, 24)):
            ids = [f"w{n}" for n in rng.sample(range(DOCUMENTS), 5)]
            texts = {doc_id: str(next(numbers)) for doc_id in ids}
            delete = step % 4 == 3
            if step % 9 == 8:
                time.sleep(rng.random() * 0.05)  # the filling continues
            for doc_id in ids:
                allowed[doc_id] = [*allowed[doc_id], None if delete else texts[doc_id]]
            if child.do("delete", ids) if delete else child.do("upsert", texts):
                for doc_id in ids:
                    allowed[doc_id] = allowed[doc_id][-1:]
        if round_number + 1 < ROUNDS:  # kill it during a write
            last_write = {f"w{n}": str(next(numbers)) for n in range(5)}
            for doc_id, text in last_write.items():
                allowed[doc_id] = [*allowed[doc_id], text]
            child.send("upsert", last_write)
            time.sleep(rng.random() * 0.04)
            child.kill()
    for _ in range(200):
        if catalog.pairs()[-1].filled:
            break
        assert child.do("upsert", {})
        time.sleep(0.05)
    child.kill()
    assert [pair.filled for pair in catalog.pairs()] == [True, True]
    for sign, pair in zip((1, -1), catalog.pairs(), strict=True):
        live = SearcherWithDelta.over(catalog.pair_folder(pair))
        live.refresh()
        for doc_id, texts in allowed.items():
            document = live.get(doc_id)
            stored_text = None if document is None else document["snippet"]
            assert stored_text in texts, (pair.mark, doc_id)
            if stored_text is not None:
                vector = NEW[int(stored_text)] / np.linalg.norm(NEW[int(stored_text)])
                assert np.allclose(live.vector(doc_id), sign * vector, atol=1e-3)
        live.close()
