import json
import sys

import pytest
import torch

from benchmarks import gpu, gpu_queries


@pytest.fixture(scope="module")
def figures() -> list[dict]:
    return gpu.measure_all(gpu.TINY, torch.device("cpu"), seconds=0.0, rows=2)


def test_every_kind_of_work_is_measured_padded_and_packed(figures: list[dict]):
    kinds = [(row["work"], row["rows"]) for row in figures]
    works = ("encode", "train lora", "train full")
    assert kinds == [(work, rows) for work in works for rows in ("padded", "packed")]
    assert all(row["tokens/s"] > 0 and row["MFU"] > 0 and row["estimate GB"] > 0 for row in figures)


def test_padded_and_packed_rows_have_one_loss(figures: list[dict]):
    losses = [row["loss"] for row in figures if row["work"] != "encode"]
    assert losses[1::2] == pytest.approx(losses[::2], rel=0.01)  # bfloat16


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


def test_the_dry_run_writes_its_metrics(monkeypatch, tmp_path, figures: list[dict], queries: list[dict]):
    monkeypatch.setattr(gpu, "measure_all", lambda *args, **kwargs: figures)
    monkeypatch.setattr(gpu_queries, "measure_all", lambda *args, **kwargs: queries)
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--json", str(tmp_path / "gpu.json")])
    gpu.main()
    metrics = json.loads((tmp_path / "gpu.json").read_text())["metrics"]
    assert metrics["train_lora_packed_tokens_per_s"] > 0
    assert metrics["queries_lookup_over_llm"] == queries[-2]["over llm"]
