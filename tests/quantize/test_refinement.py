from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from scalingnote.quantize import kmeans
from scalingnote.quantize.config import QuantizeConfig
from synthetic_corpus import vectors

CONFIG = QuantizeConfig(
    levels=3, codes=8, sample_documents=600, documents_per_worker=150, iterations=4, refinements=5
)


def stored(sample: np.ndarray, cuts: list[int], folder: Path) -> list[int]:
    pieces = np.split(sample, cuts)
    return [kmeans.store(piece, folder=str(folder), file=n) for n, piece in enumerate(pieces)]


def in_order(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
    return (work(item) for item in items)


def test_it_is_lloyds_algorithm_from_the_first_centroids_on(tmp_path: Path) -> None:
    sample = vectors(600, 16)
    rows = stored(sample, [100, 350, 400], tmp_path)
    config = CONFIG.model_copy(update={"tolerance": 0.0, "levels": 2})
    codebooks = kmeans.fit_files(config, rows, folder=str(tmp_path), each=in_order)
    residual = sample.astype(np.float64)
    for level in range(2):
        first = load((tmp_path / f"passes/{level:02d}/00000.safetensors").read_bytes())["centroids"]
        centroids = first.astype(np.float64)
        for _ in range(config.refinements):
            nearest = np.square(residual[:, None] - centroids).sum(axis=2).argmin(axis=1)
            centroids = np.array([residual[nearest == code].mean(axis=0) for code in range(8)])
        np.testing.assert_allclose(codebooks[level], centroids, atol=1e-5)
        nearest = np.square(residual[:, None] - codebooks[level]).sum(axis=2).argmin(axis=1)
        residual -= codebooks[level][nearest]


def test_how_the_sample_is_cut_into_tasks_changes_nothing_but_the_last_bits(tmp_path: Path) -> None:
    sample = vectors(600, 16)
    config = CONFIG.model_copy(update={"documents_per_worker": 600})  # the same first centroids
    found = []
    for name, cuts in {"a": [300], "b": [10, 20, 150, 151, 400, 500]}.items():
        rows = stored(sample, cuts, tmp_path / name)
        found.append(kmeans.fit_files(config, rows, folder=str(tmp_path / name), each=in_order))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_it_leaves_less_over_than_the_part_that_one_worker_holds(tmp_path: Path) -> None:
    sample = vectors(2400, 16)
    rows = stored(sample, [700, 1500], tmp_path)
    refined = kmeans.fit_files(CONFIG, rows, folder=str(tmp_path), each=in_order)
    alone = kmeans.fit(sample[::16], levels=3, codes=8, iterations=8, seed=0)
    energies = [np.square(kmeans.subtract(sample, codebooks)).sum() for codebooks in (refined, alone)]
    assert energies[0] < 0.99 * energies[1]


def test_a_level_ends_when_a_pass_gains_little(tmp_path: Path) -> None:
    rows = stored(vectors(600, 16), [300], tmp_path)
    config = CONFIG.model_copy(update={"tolerance": 0.5})
    kmeans.fit_files(config, rows, folder=str(tmp_path), each=in_order)
    assert len(list((tmp_path / "passes/00").iterdir())) == 3  # the first centroids and two passes


def test_a_killed_run_repeats_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = vectors(600, 16)
    config = CONFIG.model_copy(update={"tolerance": 0.0})
    whole = kmeans.fit_files(
        config, stored(sample, [300], tmp_path / "a"), folder=f"{tmp_path}/a", each=in_order
    )
    rows = stored(sample, [300], tmp_path / "b")
    calls = []

    def counted(vectors: np.ndarray, centroids: np.ndarray) -> kmeans.ClusterMoments:
        calls.append(len(vectors))
        if len(calls) == 14:  # in the second half of the second level's second pass
            raise KeyboardInterrupt
        return original(vectors, centroids)

    original = kmeans.cluster_moments
    monkeypatch.setattr(kmeans, "cluster_moments", counted)
    with pytest.raises(KeyboardInterrupt):
        kmeans.fit_files(config, rows, folder=f"{tmp_path}/b", each=in_order)
    again = kmeans.fit_files(config, rows, folder=f"{tmp_path}/b", each=in_order)
    assert again.tobytes() == whole.tobytes()
    assert len(calls) == 14 + 2 * (3 * config.refinements) - 12
