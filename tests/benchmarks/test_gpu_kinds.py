import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_engines, gpu_queries, gpu_towers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    """Use batches that a CPU processes in a short time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "STUDENT_ROWS", 2)
        patch.setattr(gpu_queries, "BATCHES", (1, 4, 8))
        patch.setattr(gpu_towers, "WARM_UP", 1)
        patch.setattr(gpu_towers, "LEAST_CALLS", 1)
        yield


@pytest.fixture(scope="module")
def figures() -> list[dict]:
    device = torch.device("cpu")
    every = gpu.measurements(device, dry=True, seconds=0.0, rows=2)
    towers = [measure for name, measure in every.items() if name not in gpu.OTHERS]
    return [row for measure in towers for row in measure()]


def test_every_kind_of_work_is_measured_and_the_plain_ones_padded_too(figures: list[dict]):
    kinds = [(row["work"], row["rows"]) for row in figures]
    assert {work for work, rows in kinds if rows == "padded"} == {"encode", "train lora", "train full"}
    assert {work for work, rows in kinds if rows == "packed"} == set(gpu.kinds(torch.device("cpu")))
    assert kinds[:2] == [("encode", "packed"), ("encode", "padded")]  # the most important first
    assert all(row["tokens/s"] > 0 and row["MFU"] > 0 and row["estimate GB"] > 0 for row in figures)


def test_padded_and_packed_rows_have_one_loss(figures: list[dict]):
    losses = {(row["work"], row["rows"]): row["loss"] for row in figures}
    for work in ("train lora", "train full"):
        assert losses[work, "packed"] == pytest.approx(losses[work, "padded"], rel=0.01)  # bfloat16
    assert losses["train full fsdp2", "packed"] == pytest.approx(losses["train full", "packed"], rel=0.01)
    assert losses["train lora int8", "packed"] == pytest.approx(losses["train lora", "packed"], rel=0.05)


@pytest.mark.filterwarnings("ignore")  # those of the other library
def test_engines_encode_the_same_rows(engines: list[dict]):
    assert [row["engine"] for row in engines] == ["own", "sentence-transformers"]
    assert all(row["tokens/s"] > 0 and row["MFU"] > 0 for row in engines)


def test_without_a_gpu_the_dry_run_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--dry-run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def queries() -> list[dict]:
    return gpu_queries.measure_all(gpu.TINY, torch.device("cpu"), seconds=0.0)


def test_queries_of_every_tower_are_measured_beside_the_papers(queries: list[dict]):
    towers = ["llm", "12 layers", "4 layers", "1 layer", "lookup", "lookup on CPU"]
    assert [row["tower"] for row in queries] == towers
    assert all(row[f"batch {batch}"] > 0 for row in queries for batch in gpu_queries.BATCHES)
    assert all(row["paper"] > 0 for row in queries)
    assert queries[-1]["over llm"] > 1


@pytest.fixture(scope="module")
def engines() -> list[dict]:
    return gpu_engines.measure_all(gpu.TINY, torch.device("cpu"), seconds=0.0)


def test_the_metrics_of_every_table_have_names(figures: list[dict], queries: list[dict], engines: list[dict]):
    assert gpu.metrics(figures)["train_lora_packed_tokens_per_s"] > 0
    assert gpu.OTHERS["queries"](queries)["queries_lookup_over_llm"] == queries[-2]["over llm"]
    assert gpu.OTHERS["engines"](engines)


def test_the_dry_run_measures_in_processes_and_writes_what_they_found(monkeypatch, tmp_path):
    words = ["--dry-run", "--rows", "2", "--seconds", "0.01", "--only", "encode packed", "engines"]
    monkeypatch.setattr(sys, "argv", ["gpu", *words, "--json", str(tmp_path / "gpu.json")])
    monkeypatch.setenv("PYTHONPATH", str(Path(gpu.__file__).parents[1]))
    gpu.main()
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["problems"] == {}
    assert report["metrics"]["encode_packed_tokens_per_s"] > 0
    assert report["engines"][0]["tokens/s"] > 0
    assert len(report["towers"]) == 1
