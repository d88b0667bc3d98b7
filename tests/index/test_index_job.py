import json
from pathlib import Path

import numpy as np
import pytest

from in_process import without_ray
from scalingnote.core import cluster, topk
from scalingnote.core.config import Resources
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.index import families, ivf, job
from scalingnote.index.config import IVFPQ, Family, FastScan, Flat, IndexConfig, ScalarQuantized, Tuning
from scalingnote.search.searcher import Searcher
from scalingnote.storage.artifact import Artifact, open_artifact
from synthetic_corpus import Corpus, queries

CONFIG = IndexConfig(shards=2, nlist=8, train_documents=500, snippet_chars=40)
SIZES = [300, 200, 140]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus.build(f"{tmp_path_factory.mktemp('corpus')}", sizes=SIZES, dim=16, missing=(5, 639))


@pytest.fixture(scope="module")
def index(cluster: None, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return job.run(CONFIG, **corpus.uris, output=f"{tmp_path_factory.mktemp('index')}/index")


def test_the_index_has_every_embedded_document_once(index: Artifact, corpus: Corpus) -> None:
    artifact = open_artifact(index.uri, kind="index")
    tables = [artifact.table(f"shard-{number:05d}/documents.arrow") for number in range(2)]
    assert [len(table) for table in tables] == [319, 319]
    doc_ids = [doc_id for table in tables for doc_id in table["doc_id"].to_pylist()]
    assert doc_ids == [f"d{i}" for i in range(640) if i not in (5, 639)]
    assert tables[0].slice(7, 1).to_pylist() == [
        {
            "doc_id": "d8",
            "title": "Title 8",
            "topic": "topic 1",
            "snippet": "Text of document 8. Text of document 8. "[:40],
            "semantic_id": "1-0-8",
        }
    ]


def test_counts_and_bytes_are_those_of_the_files(index: Artifact) -> None:
    files = list(Path(index.uri).rglob("*.faiss"))
    assert sorted(path.relative_to(index.uri).as_posix() for path in files) == [
        "coarse.faiss",
        "shard-00000/kept.faiss",
        "shard-00000/lists.faiss",
        "shard-00001/kept.faiss",
        "shard-00001/lists.faiss",
    ]
    size = sum(path.stat().st_size for path in files)
    assert index.counts == {
        "documents": 638,
        "documents_not_embedded": 2,
        "shards": 2,
        "bytes": size,
        "bytes_per_vector": round(size / 638),
    }
    layout = json.loads(Path(index.uri, "index.json").read_text())
    assert layout == {
        "dim": 16,
        "documents": 638,
        "shards": 2,
        "family": "ivfpq_fast_scan",
        "refine": "sq8",
        "nlist": 8,
        "nprobe": 8,
        "refine_factor": 4,
        "recall": None,
        "filters": ["topic"],
        "sparse": False,
        "background": None,
        "dense_weight": None,
        "similarity": "cosine",
        "passages": False,
    }


def test_a_killed_run_keeps_quantizer_and_finished_shards(
    index: Artifact, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Path(tmp_path, "index")
    without_ray(monkeypatch)

    with monkeypatch.context() as patch:
        patch.setattr(job, "part_rows", _die_on("documents/", job.part_rows))
        with pytest.raises(KeyboardInterrupt):
            job.run(CONFIG, **corpus.uris, output=str(output))
    (output / "_work/done/shards/00001.json").unlink()
    (output / "shard-00001/lists.faiss").write_bytes(b"half written")
    kept_files = [output / "_work/quantizer/coarse.faiss", output / "shard-00000/lists.faiss"]
    before = [path.stat().st_mtime_ns for path in kept_files]
    after: list[int] = []

    def look(*arguments: object, **named: object) -> object:
        after.extend(path.stat().st_mtime_ns for path in kept_files)
        return commit(*arguments, **named)

    commit = job.Draft.commit
    monkeypatch.setattr(job.Draft, "commit", look)
    # Another number of workers gives the same bytes.
    config = CONFIG.model_copy(update={"resources": Resources(workers=1)})
    assert job.run(config, **corpus.uris, output=str(output)).digest == index.digest
    assert after == before


def _die_on(prefix: str, original: object) -> object:
    def part_rows(artifact: Artifact, parts: list[str]) -> object:
        if parts[0].startswith(prefix):
            raise KeyboardInterrupt
        return original(artifact, parts)

    return part_rows


def test_more_shards_than_parts_and_no_refinement(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    config = CONFIG.model_copy(update={"shards": 5, "family": FastScan(refine="none"), "nlist": None})
    index = job.run(config, **corpus.uris, output=f"{tmp_path}/index")
    rows = [index.manifest.parts[name].rows for name in index.names("shard-", "documents.arrow")]
    assert rows == [127, 128, 127, 128, 128]
    assert not index.names("shard-", "kept.faiss")
    assert index.read_json("index.json")["nlist"] == 500 // 39


def test_semantic_ids_of_other_embeddings_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    other = Corpus.build(f"{tmp_path}/other", sizes=SIZES, dim=16, seed=9)
    uris = {**corpus.uris, "semantic_ids": other.uris["semantic_ids"]}
    with pytest.raises(ArtifactError, match="re-run quantize on these embeddings"):
        job.run(CONFIG, **uris, output=f"{tmp_path}/index")


def test_a_dataset_without_the_documents_is_refused(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    other = Corpus.build(f"{tmp_path}/other", sizes=[300, 200, 100], dim=16)
    uris = {**corpus.uris, "dataset": other.uris["dataset"]}
    with pytest.raises(ArtifactError, match=r"39 documents, first 'd600', have no row in the dataset"):
        job.run(CONFIG, **uris, output=f"{tmp_path}/index")


def test_an_index_without_embeddings_is_refused(tmp_path: Path) -> None:
    empty = Corpus.build(f"{tmp_path}/empty", sizes=[2], dim=16, missing=(0, 1))
    with pytest.raises(ArtifactError, match="has no embedding"):
        job.run(CONFIG, **empty.uris, output=f"{tmp_path}/index")


def test_nprobe_is_tuned_on_embeddings_of_queries(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    embeddings = queries(corpus.matrix, 30)
    # Tests of complete runs cover the tower; this test covers the use of its embeddings.
    monkeypatch.setattr(job, "_queries", lambda *_: embeddings)
    config = CONFIG.model_copy(update={"nprobe": None, "tuning": Tuning(recall=0.9, k=10)})
    index = job.run(config, **corpus.uris, output=f"{tmp_path}/index")
    layout = index.read_json("index.json")
    curve = index.manifest.info["tuning"]
    assert [point["nprobe"] for point in curve] == [1, 2, 4, 8]
    assert all(point["us_per_query"] > 0 for point in curve)
    chosen = next(point for point in curve if point["nprobe"] == layout["nprobe"])
    assert layout["recall"] == chosen["recall"] >= 0.9
    cosines = embeddings @ np.delete(corpus.matrix, [5, 639], axis=0).T
    assert layout["background"] == pytest.approx(cosines.mean(), abs=1e-5)


def test_sampled_shards_are_tuned_by_their_own_exact_answers(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    embeddings = queries(corpus.matrix, 30)
    monkeypatch.setattr(job, "_queries", lambda *_: embeddings)
    monkeypatch.setattr(job.tuning, "MAX_SHARDS", 2)
    tuning = Tuning(recall=0.9, k=10)
    config = CONFIG.model_copy(update={"nprobe": None, "shards": 4, "tuning": tuning})
    index = job.run(config, **corpus.uris, output=f"{tmp_path}/index")
    assert index.manifest.info["tuning_sample"] == {"shards": [0, 2], "documents": 318, "queries": 30}
    document_numbers = [i for i in range(640) if i not in (5, 639)]
    rows = [document_numbers[row] for row in (*range(159), *range(319, 478))]  # of shards 0 and 2
    exact = topk.search(embeddings, corpus.matrix[rows], k=10)[1]
    answers = Searcher.open(index.uri, shards=[0, 2]).search(embeddings, k=10)
    ids = [[int(result.doc_id[1:]) for result in results] for results in answers]
    shares = [len({rows[i] for i in e} & set(f)) / 10 for e, f in zip(exact.tolist(), ids, strict=True)]
    assert index.read_json("index.json")["recall"] == pytest.approx(np.mean(shares), abs=1e-4)
    assert not list(Path(index.uri).rglob("exact/00001.npz"))


def test_bytes_determine_shards_and_memory_of_their_tasks(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    config = CONFIG.model_copy(update={"shards": None})
    assert job.run(config, **corpus.uris, output=f"{tmp_path}/small").counts["shards"] == 2
    monkeypatch.setattr(job, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(job, "GIB", 10_000)
    reservations: list[Resources] = []

    def record(work: object, items: list[object], resources: Resources | None = None) -> object:
        reservations.extend([resources] if resources is not None and len(items) > 1 else [])
        return map_tasks(work, items, resources)

    map_tasks = cluster.map_tasks
    monkeypatch.setattr(cluster, "map_tasks", record)
    index = job.run(config, **corpus.uris, output=f"{tmp_path}/index")
    shard_bytes = sum(part.bytes for name, part in index.manifest.parts.items() if name.startswith("shard-"))
    assert index.read_json("index.json")["shards"] == index.counts["shards"] > 3
    # The estimate leaves out the heads of files, which matter in small shards.
    assert 0.5 < 20_000 * index.counts["shards"] / shard_bytes < 1.5
    assert reservations
    assert all(3 < each.memory_per_worker <= 6 for each in reservations)
    configured = config.model_copy(update={"resources": Resources(memory_per_worker=7.0), "shards": 3})
    reservations.clear()
    job.run(configured, **corpus.uris, output=f"{tmp_path}/chosen")
    assert {each.memory_per_worker for each in reservations} == {7.0}


def test_a_shard_too_large_for_any_node_is_refused_at_once(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    monkeypatch.setattr(job, "GIB", 10)

    def check(resources: Resources, *, knob: str) -> None:
        if resources.memory_per_worker:
            raise ConfigError(f"{knob} needs {resources.memory_per_worker:g} GiB, which no node has")

    monkeypatch.setattr(cluster, "check_resources", check)
    monkeypatch.setattr(job, "_train_quantizer", pytest.fail)
    with pytest.raises(
        ConfigError, match=r"which no node has. The task of a shard of 319 .*index.shards above 2"
    ):
        job.run(CONFIG, **corpus.uris, output=f"{tmp_path}/index")


@pytest.mark.parametrize("family", [FastScan(), FastScan(refine="none"), IVFPQ(), ScalarQuantized(), Flat()])
def test_bytes_of_vectors_are_those_of_the_files(family: Family) -> None:
    rng = np.random.default_rng(0)
    sample = rng.standard_normal((4096, 16), np.float32)
    sizes = []
    for count in (1024, 3072):
        lists = ivf.empty(families.train(sample, family, nlist=1, seed=0))
        ivf.add(lists, sample[:count])
        sizes.append(sum(map(len, ivf.dump_files(lists))))
    assert (sizes[1] - sizes[0]) / 2048 == families.vector_bytes(family, dim=16)
