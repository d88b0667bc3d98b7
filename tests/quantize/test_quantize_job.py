import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from scalingnote.config import Resources
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.quantize import job, residual_kmeans
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from synthetic_corpus import dataset, embeddings, vectors

SIZES = [300, 250, 50]
CONFIG = QuantizeConfig(
    levels=2, codes=16, sample_documents=400, iterations=5, resources=Resources(workers=1)
)


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    return vectors(sum(SIZES), 16)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, matrix: np.ndarray) -> Artifact:
    base = tmp_path_factory.mktemp("quantize")
    parent = dataset(f"{base}/dataset", sizes=SIZES)
    return embeddings(f"{base}/embeddings", matrix, parent=parent, sizes=SIZES)


@pytest.fixture(scope="module")
def ids(cluster: None, tmp_path_factory: pytest.TempPathFactory, source: Artifact) -> Artifact:
    return job.run(CONFIG, embeddings=source.uri, output=f"{tmp_path_factory.mktemp('ids')}/ids")


def test_every_document_gets_its_own_id_from_the_stored_codebooks(ids: Artifact, matrix: np.ndarray) -> None:
    table = open_artifact(ids.uri, kind="semantic_ids").table("codes")
    assert table["doc_id"].to_pylist() == [f"d{i}" for i in range(sum(SIZES))]
    codebooks = load(Path(ids.file("codebooks.safetensors")).read_bytes())["codebooks"]
    assert table["codes"].to_pylist() == residual_kmeans.encode(matrix, codebooks).tolist()
    assert len(set(table["semantic_id"].to_pylist())) == sum(SIZES)
    statistics = json.loads(Path(ids.file("statistics.json")).read_text())
    assert statistics["documents"] == sum(SIZES)
    assert statistics["collisions"] == sum(suffix > 0 for suffix in table["suffix"].to_pylist()) > 0
    assert [ids.manifest.parts[name].rows for name in ids.names("codes/")] == SIZES


def test_a_second_run_has_the_same_digest_whatever_its_workers(
    ids: Artifact, source: Artifact, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"resources": Resources(workers=2)})
    assert job.run(config, embeddings=source.uri, output=f"{tmp_path}/ids").digest == ids.digest


def test_a_killed_run_keeps_its_coded_parts(
    ids: Artifact, source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = f"{tmp_path}/ids"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "_gather", die)
        with pytest.raises(KeyboardInterrupt):
            job.run(CONFIG, embeddings=source.uri, output=output)
    coded = sorted(Path(output, "_work", "codes").iterdir())
    assert [path.name for path in coded] == [f"part-{i:05d}.parquet" for i in range(3)]
    coded[1].unlink()
    before = [coded[0].stat().st_mtime_ns, coded[2].stat().st_mtime_ns]
    times = []

    def gather(*arguments: object) -> object:
        times.extend(path.stat().st_mtime_ns for path in coded)
        return original(*arguments)

    original = job._gather
    monkeypatch.setattr(job, "_gather", gather)
    assert job.run(CONFIG, embeddings=source.uri, output=output).digest == ids.digest
    assert [times[0], times[2]] == before
    assert not Path(output, "_work").exists()


def test_a_damaged_part_is_named(cluster: None, matrix: np.ndarray, tmp_path: Path) -> None:
    parent = dataset(f"{tmp_path}/dataset", sizes=SIZES)
    source = embeddings(f"{tmp_path}/embeddings", matrix, parent=parent, sizes=SIZES)
    config = CONFIG.model_copy(update={"sample_documents": 20})
    draft = Draft(f"{tmp_path}/ids", kind="semantic_ids", config=config, parents={"embeddings": source})
    # Codebooks are there already, so the damage is met by an actor that codes the part.
    draft.write_bytes(job.CODEBOOKS, job._codebooks(config, draft, source))
    path = Path(source.uri, "embeddings/part-00001.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"part-00001.parquet is damaged"):
        job.run(config, embeddings=source.uri, output=draft.uri)


def test_a_vector_that_is_not_finite_is_named(tmp_path: Path) -> None:
    broken = vectors(10, 8)
    broken[7, 3] = np.nan
    parent = dataset(f"{tmp_path}/dataset", sizes=[10])
    source = embeddings(f"{tmp_path}/embeddings", broken, parent=parent, sizes=[10])
    with pytest.raises(ArtifactError, match=r"1 vectors are not finite, first of document 'd7'"):
        job.read_vectors(source, "embeddings/part-00000.parquet")


def test_too_few_documents_are_refused_before_any_work(tmp_path: Path) -> None:
    parent = dataset(f"{tmp_path}/dataset", sizes=[10])
    source = embeddings(f"{tmp_path}/embeddings", vectors(10, 8), parent=parent, sizes=[10])
    with pytest.raises(ConfigError, match="found 10"):
        job.run(CONFIG, embeddings=source.uri, output=f"{tmp_path}/ids")
