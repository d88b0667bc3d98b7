import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load

from in_process import without_ray
from scalingnote.core.config import Resources
from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.quantize import job, kmeans, naming, semantic_id
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.quantize.kmeans import draw, shares
from scalingnote.quantize.semantic_id import SemanticIds
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from synthetic_corpus import dataset, embeddings, vectors

SIZES = [300, 250, 50]
CONFIG = QuantizeConfig(levels=2, codes=16, sample_documents=400, resources=Resources(workers=1))


@pytest.fixture(scope="module")
def matrix() -> np.ndarray:
    return vectors(sum(SIZES), 16)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, matrix: np.ndarray) -> Artifact:
    base = tmp_path_factory.mktemp("quantize")
    parent = dataset(f"{base}/dataset", sizes=SIZES)
    return embeddings(f"{base}/embeddings", matrix, parent=parent, sizes=SIZES)


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory, source: Artifact) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return job.run(CONFIG, embeddings=source.uri, output=f"{tmp_path_factory.mktemp('ids')}/ids")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


def test_the_sample_does_not_depend_on_the_number_of_tasks(
    here: None, source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_sample(name: str, rows: int, documents: int = 90) -> tuple[int, list[list[float]]]:
        monkeypatch.setattr(job, "ROWS_PER_SLICE", rows)
        folder = f"{tmp_path}/{name}"
        files = job.store_sample(source, documents=documents, seed=0, folder=folder, section="quantize")
        return files, job.read_sample(folder, files).tolist()

    one_by_one, together = draw_sample("parts", 1), draw_sample("all", 1000)
    assert (one_by_one[0], together[0]) == (3, 1)
    assert one_by_one[1] == together[1]
    assert len(together[1]) == 90


def test_every_document_has_its_own_id_from_stored_codebooks(ids: Artifact, matrix: np.ndarray) -> None:
    table = open_artifact(ids.uri, kind="semantic_ids").table("codes")
    assert table["doc_id"].to_pylist() == [f"d{i}" for i in range(sum(SIZES))]
    codebooks = load(Path(ids.file("codebooks.safetensors")).read_bytes())["codebooks"]
    assert table["codes"].to_pylist() == kmeans.encode_nearest(matrix, codebooks).tolist()
    assert len(set(table["semantic_id"].to_pylist())) == sum(SIZES)
    codes = np.array(table["codes"].to_pylist())
    assert table["suffix"].to_pylist() == semantic_id.suffixes(table["doc_id"]).tolist()
    statistics = json.loads(Path(ids.file("statistics.json")).read_text())
    assert statistics["documents"] == sum(SIZES)
    assert statistics["collisions"] == sum(SIZES) - len({tuple(row) for row in codes.tolist()}) > 0
    assert [ids.manifest.parts[name].rows for name in ids.names("codes/")] == SIZES


def test_the_digest_on_ray_is_the_same_with_more_workers(
    cluster: None, ids: Artifact, source: Artifact, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"resources": Resources(workers=2)})
    assert job.run(config, embeddings=source.uri, output=f"{tmp_path}/ids").digest == ids.digest


def test_a_killed_run_keeps_its_coded_parts(
    here: None, ids: Artifact, source: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = f"{tmp_path}/ids"

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(naming, "sort", die)
        with pytest.raises(KeyboardInterrupt):
            job.run(CONFIG, embeddings=source.uri, output=output)
    coded = sorted(Path(output, "_work", "codes").iterdir())
    assert [path.name for path in coded] == [f"part-{i:05d}.parquet" for i in range(3)]
    coded[1].unlink()
    Path(output, "_work", "done", "code", "00001.json").unlink()
    before = [coded[0].stat().st_mtime_ns, coded[2].stat().st_mtime_ns]
    times = []

    def sort(*arguments: Any, **knobs: Any) -> naming.Counted:
        times.extend(path.stat().st_mtime_ns for path in coded)
        return original(*arguments, **knobs)

    original = naming.sort
    monkeypatch.setattr(naming, "sort", sort)
    assert job.run(CONFIG, embeddings=source.uri, output=output).digest == ids.digest
    assert [times[0], times[2]] == before
    assert not Path(output, "_work").exists()


def test_codebooks_fit_the_sample_and_a_beam_lowers_the_error(
    here: None, source: Artifact, matrix: np.ndarray, tmp_path: Path
) -> None:
    artifact = job.run(CONFIG.model_copy(update={"beam": 8}), embeddings=source.uri, output=f"{tmp_path}/ids")
    takes = shares(SIZES, size=400, seed=0)
    sampled = [
        part[draw(len(part), take=take, seed=0, part=n)]
        for n, (part, take) in enumerate(zip(np.split(matrix, [300, 550]), takes, strict=True))
    ]
    expected = kmeans.fit(np.concatenate(sampled), levels=CONFIG.levels, codes=CONFIG.codes, seed=0)
    codebooks = load(Path(artifact.file("codebooks.safetensors")).read_bytes())["codebooks"]
    assert codebooks.tobytes() == expected.tobytes()
    codes = np.array(artifact.table("codes")["codes"].to_pylist())
    assert codes.tolist() == kmeans.encode(matrix, codebooks, beam=8).tolist()
    greedy = kmeans.encode_nearest(matrix, codebooks)
    energies = [kmeans.residual_energy(matrix, c, codebooks)[:, -1].mean() for c in (codes, greedy)]
    assert energies[0] < energies[1]
    assert artifact.read_json("statistics.json")["levels"][-1]["residual_energy"] == pytest.approx(
        energies[0]
    )


def test_earlier_codebooks_keep_ids_and_report_drift(
    here: None, ids: Artifact, matrix: np.ndarray, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The first 100 documents are deleted; 200 are added that differ from the fitted ones.
    unlike = vectors(200, 16, seed=9)[:, ::-1] * np.float32(1.5)
    sizes = [250, 250, 200]
    folder = f"{tmp_path}/dataset"
    parent = dataset(folder, sizes=[100, *sizes])
    later = embeddings(
        f"{tmp_path}/embeddings",
        np.concatenate([matrix, unlike]),
        parent=parent,
        sizes=[100, *sizes],
        missing=tuple(range(100)),
    )
    config = CONFIG.model_copy(update={"codebooks": ids.uri})
    with caplog.at_level(logging.WARNING):
        artifact = job.run(config, embeddings=later.uri, output=f"{tmp_path}/ids")
    old, new = (
        dict(zip(t["doc_id"].to_pylist(), t["semantic_id"].to_pylist(), strict=True))
        for t in (ids.table("codes"), artifact.table("codes"))
    )
    assert len(new) == len(set(new.values())) == 700
    assert [new[f"d{i}"] for i in range(100, 600)] == [old[f"d{i}"] for i in range(100, 600)]
    assert not {new[f"d{i}"] for i in range(600, 800)} & set(old.values())
    assert artifact.manifest.parts["codebooks.safetensors"] == ids.manifest.parts["codebooks.safetensors"]
    assert artifact.manifest.parts["fitted.safetensors"] == ids.manifest.parts["fitted.safetensors"]
    drift = artifact.read_json("statistics.json")["drift"]
    assert (drift["documents"], drift["refit"]) == (200, True)
    codebooks = load(Path(ids.file("codebooks.safetensors")).read_bytes())["codebooks"]
    takes = shares(SIZES, size=400, seed=0)
    held_out = np.concatenate(
        [
            np.delete(part, draw(len(part), take=take, seed=0, part=n), axis=0)
            for n, (part, take) in enumerate(zip(np.split(matrix, [300, 550]), takes, strict=True))
        ]
    )
    assert len(held_out) == 200
    means = []
    for documents in (unlike, held_out):
        codes = kmeans.encode_nearest(np.ascontiguousarray(documents), codebooks)
        means.append(kmeans.residual_energy(documents, codes, codebooks).mean(axis=0))
    ratios = [level["residual_energy_ratio"] for level in drift["levels"]]
    np.testing.assert_allclose(ratios, means[0] / means[1], rtol=1e-5)
    assert "fit new codebooks" in caplog.text
    assert SemanticIds.open(artifact.uri).doc_id(new["d700"]) == "d700"


def test_a_tenth_of_the_corpus_is_left_out_of_the_sample() -> None:
    assert job._sample_size(CONFIG, [1000, 1000]) == 400
    assert job._sample_size(CONFIG, [100, 100]) == 180
    assert job._sample_size(CONFIG, [17]) == 16  # less is left out: every code needs a document
    assert job._sample_size(CONFIG, [9]) == 9


def test_unsuitable_codebooks_are_refused(ids: Artifact, source: Artifact, tmp_path: Path) -> None:
    for knob, other in (("levels", 3), ("codes", 17), ("beam", 2)):
        config = CONFIG.model_copy(update={"codebooks": ids.uri, knob: other})
        with pytest.raises(ConfigError, match=r"set quantize.levels=2 quantize.codes=16 quantize.beam=1$"):
            job.run(config, embeddings=source.uri, output=f"{tmp_path}/ids")
    parent = dataset(f"{tmp_path}/dataset", sizes=[30])
    other = embeddings(f"{tmp_path}/embeddings", vectors(30, 8), parent=parent, sizes=[30])
    config = CONFIG.model_copy(update={"codebooks": ids.uri})
    with pytest.raises(ArtifactError, match=r"codebooks of 16 dimensions, .* embeddings of 8"):
        job.run(config, embeddings=other.uri, output=f"{tmp_path}/ids")


def test_the_error_names_a_damaged_part(here: None, matrix: np.ndarray, tmp_path: Path) -> None:
    parent = dataset(f"{tmp_path}/dataset", sizes=SIZES)
    source = embeddings(f"{tmp_path}/embeddings", matrix, parent=parent, sizes=SIZES)
    config = CONFIG.model_copy(update={"sample_documents": 20})
    draft = Draft(f"{tmp_path}/ids", kind="semantic_ids", config=config, parents={"embeddings": source})
    # The codebooks exist already, so the damage is detected when the part is coded.
    draft.write_bytes(job.CODEBOOKS, job._codebooks(config, draft, source, None))
    path = Path(source.uri, "embeddings/part-00001.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"part-00001.parquet is damaged"):
        job.run(config, embeddings=source.uri, output=draft.uri)


def test_the_error_names_the_document_of_a_non_finite_vector(tmp_path: Path) -> None:
    broken = vectors(10, 8)
    broken[7, 3] = np.nan
    parent = dataset(f"{tmp_path}/dataset", sizes=[10])
    source = embeddings(f"{tmp_path}/embeddings", broken, parent=parent, sizes=[10])
    with pytest.raises(ArtifactError, match=r"1 vectors are not finite, first of document 'd7'"):
        job.read_vectors(source, "embeddings/part-00000.parquet")


def test_too_few_documents_are_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cannot fit codes=256"):
        QuantizeConfig(sample_documents=255)
    parent = dataset(f"{tmp_path}/dataset", sizes=[10])
    source = embeddings(f"{tmp_path}/embeddings", vectors(10, 8), parent=parent, sizes=[10])
    with pytest.raises(ConfigError, match="found 10"):
        job.run(CONFIG, embeddings=source.uri, output=f"{tmp_path}/ids")
