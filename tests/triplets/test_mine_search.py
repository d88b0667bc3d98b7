"""The search of the mine stage, divided in any way, equals one search of all documents in memory."""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from ray import cloudpickle

import tiny
from in_process import KilledSteps, without_ray
from scalingnote.core import cluster, topk
from scalingnote.core.config import Resources
from scalingnote.datasets.splits import held_out_documents
from scalingnote.storage import arrow, shuffle
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.triplets.collect.triplets import hash_fraction
from scalingnote.triplets.config import MineConfig
from scalingnote.triplets.mine import job, search
from scalingnote.triplets.mine.job import positives_by_query, refresh

DIM, PART = 8, 13
CONFIG = MineConfig(resources=Resources(workers=2), first_rank=2, last_rank=9, max_score_ratio=0.8)


def vectors(texts: Sequence[str]) -> np.ndarray:
    """Draw four entries of ±1 per text: at length 1 they are ±0.5, so scores are exact and many are equal."""
    matrix = np.zeros((len(texts), DIM), np.float32)
    for row, text in zip(matrix, texts, strict=True):
        random = np.random.default_rng([*text.encode()])
        row[random.permutation(DIM)[:4]] = random.choice([-1, 1], 4)
    return matrix


class Tower:
    """A substitute for a query tower."""

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return vectors(texts)


@pytest.fixture(scope="module")
def parents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    root = tmp_path_factory.mktemp("mine")
    dataset = tiny.dataset(str(root / "dataset"))
    rows = tiny.triplets(str(root / "one"), dataset).table("triplets")
    draft = Draft(
        str(root / "triplets"), kind="triplets", config=tiny.Nothing(), parents={"dataset": dataset}
    )
    twice = pa.concat_tables([rows, rows]).take(pa.array(np.random.default_rng(0).permutation(2 * len(rows))))
    # A query's rows are in one part, in any order; a part may have any number of queries, also none.
    third = np.array([int(query_id[1:]) % 3 for query_id in twice["query_id"].to_pylist()])
    for number, chosen in enumerate((third == 0, third == 9, third == 1, third == 2)):
        draft.write_table(f"triplets/part-{number:05d}.parquet", twice.filter(pa.array(chosen)))
    triplets = draft.commit(counts={"triplets": len(twice)})
    towers = Draft(str(root / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    towers.write_bytes("query/tower", b"")
    draft = Draft(str(root / "embeddings"), kind="embeddings", config=tiny.Nothing(), parents={})
    doc_ids = dataset.table("documents")["doc_id"].to_pylist()
    bounds = [0, PART, PART, 3 * PART, len(doc_ids)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        ids = pa.array(doc_ids[start:stop], pa.string())
        matrix = arrow.to_arrow(vectors(doc_ids[start:stop]))
        part = pa.table({"doc_id": ids, "summary": matrix})
        draft.write_table(f"embeddings/part-{number:05d}.parquet", part)
    embeddings = draft.commit(counts={"documents": len(doc_ids)})
    return {
        "dataset": dataset,
        "triplets": triplets,
        "dual_encoder": towers.commit(counts={}),
        "embeddings": embeddings,
    }


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    monkeypatch.setattr(job, "QueryEncoder", lambda *_, **__: Tower())


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a shard for each part, small pieces and batches, and small blocks."""
    monkeypatch.setattr(shuffle, "MAX_SLICE_BYTES", 1)
    monkeypatch.setattr(search, "QUERIES_PER_PIECE", 5)
    monkeypatch.setattr(search, "QUERIES_PER_BATCH", 12)
    monkeypatch.setattr(topk, "QUERY_BLOCK", 3)
    monkeypatch.setattr(topk, "DOCUMENT_BLOCK", 7)


def mine(parents: dict[str, Artifact], output: Path, config: MineConfig = CONFIG) -> Artifact:
    uris = {kind: artifact.uri for kind, artifact in parents.items()}
    return job.run(config, **uris, output=str(output))


def files(artifact: Artifact) -> dict[str, str]:
    return {name: part.sha256 for name, part in artifact.manifest.parts.items()}


def in_memory(
    parents: dict[str, Artifact], name: str, *, config: MineConfig, sampled: bool = False
) -> pa.Table:
    """Mine a part by one search of all documents."""
    triplets, pool = parents["triplets"].table(name), parents["embeddings"].table("embeddings")
    pool = pool.filter(pc.invert(pc.is_in(pool["doc_id"], value_set=held_out_documents(parents["dataset"]))))
    row_of = {doc_id: row for row, doc_id in enumerate(pool["doc_id"].to_pylist())}
    matrix = arrow.to_numpy(pool["summary"])
    searched_ids = pool["doc_id"].to_pylist()
    if sampled:
        share = config.max_documents / len(searched_ids)
        searched_ids = [doc_id for doc_id in searched_ids if hash_fraction(doc_id, seed=config.seed) < share]
    texts = dict(zip(triplets["query_id"].to_pylist(), triplets["query"].to_pylist(), strict=True))
    queries = arrow.l2_normalize(vectors(list(texts.values()))) if texts else np.zeros((0, DIM), np.float32)
    scores, rows = topk.search(
        queries, matrix[[row_of[doc_id] for doc_id in searched_ids]], k=config.last_rank
    )
    rankings = {
        query_id: [(searched_ids[row], float(score)) for row, score in zip(best, values, strict=True)]
        for query_id, best, values in zip(texts, rows, scores, strict=True)
    }
    number = {query_id: row for row, query_id in enumerate(texts)}
    positives = [
        float(queries[number[query_id]] @ matrix[row_of[doc_id]]) if doc_id in row_of else None
        for query_id, doc_id in zip(
            triplets["query_id"].to_pylist(), triplets["positive"].to_pylist(), strict=True
        )
    ]
    known = positives_by_query(triplets)
    return refresh(triplets, rankings, known=known, positive_scores=positives, config=config)[0]


@pytest.mark.parametrize("deep", [False, True])
def test_shards_and_batches_equal_one_search(parents, tmp_path, request, deep):
    config = (
        CONFIG.model_copy(update={"last_rank": 500}) if deep else CONFIG
    )  # more than the number of documents
    at_once = mine(parents, tmp_path / "whole", config)
    request.getfixturevalue("cut")
    pieces = mine(parents, tmp_path / "pieces", config)
    assert files(at_once) == files(pieces)
    assert at_once.counts["mined"] > 50
    for name in parents["triplets"].names("triplets/"):
        assert pieces.table(name).equals(in_memory(parents, name, config=config))


def test_positives_outside_the_searched_share_have_scores(parents, cut, tmp_path):
    config = CONFIG.model_copy(update={"max_documents": 30, "first_rank": 1})
    mined = mine(parents, tmp_path / "mined", config)
    for name in parents["triplets"].names("triplets/"):
        assert mined.table(name).equals(in_memory(parents, name, config=config, sampled=True))


def test_an_index_finds_the_same_if_all_lists_are_searched(parents, tmp_path, request):
    exact = {"max_score_ratio": None, "first_rank": 1, "last_rank": 500}
    config = CONFIG.model_copy(update=exact)
    update = {"search": "index", "nprobe": 100}
    by_index = mine(parents, tmp_path / "indexed", config.model_copy(update=update))
    assert files(mine(parents, tmp_path / "exact", config)) == files(by_index)
    request.getfixturevalue("cut")
    assert files(mine(parents, tmp_path / "cut", config.model_copy(update=update))) == files(by_index)
    few = mine(parents, tmp_path / "few", CONFIG.model_copy(update={"search": "index", "nprobe": 1}))
    assert few.counts["mined"] > 50


def test_a_run_after_a_kill_repeats_only_unfinished_tasks(parents, cut, tmp_path, monkeypatch):
    uninterrupted = mine(parents, tmp_path / "whole")
    steps = KilledSteps(monkeypatch, "scalingnote.triplets.mine.job")
    resumed = steps.finish(lambda: mine(parents, tmp_path / "again"))
    assert files(resumed) == files(uninterrupted)
    assert steps.killed == {"queries", "encoded", "search", "merge", "mined"}
    assert set(steps.done.values()) == {1}


class CountedReads(Artifact):
    """An artifact that records the parts that this process reads; tasks receive a plain one."""

    reads: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return Artifact, (self.uri, self.manifest)

    def open(self, name: str) -> pa.NativeFile:
        self.reads.append(name)
        return super().open(name)


def test_the_driver_reads_neither_embeddings_nor_triplets(parents, cut, tmp_path, monkeypatch):
    plain = job.open_artifact
    monkeypatch.setattr(
        job, "open_artifact", lambda uri, *, kind: CountedReads(uri, plain(uri, kind=kind).manifest)
    )
    for name in ("map_tasks", "map_loaded"):
        monkeypatch.setattr(cluster, name, partial(_copied, getattr(cluster, name)))
    monkeypatch.setattr(CountedReads, "reads", [])
    mined = mine(parents, tmp_path / "mined")
    assert mined.counts["mined"] > 50
    # The driver reads which documents are held out, but none of the data of the search.
    assert {name.split("/")[0].removesuffix(".parquet") for name in CountedReads.reads} <= {
        "documents",
        "qrels",
        "queries",
    }


def _copied(run: Callable[..., Any], work: Any, items: Sequence[Any], resources: Any = None) -> Any:
    """Run a copy of the work, like a worker."""
    return run(pickle.loads(cloudpickle.dumps(work)), items, resources)
