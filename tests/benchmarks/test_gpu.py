"""The GPU benchmark on a CPU with a tiny shape; one measurement that fails does not cost the others."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_queries, gpu_towers


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that a CPU has done in no time, in this process."""
    monkeypatch.setattr(gpu_queries, "BATCHES", (1, 4, 8))
    monkeypatch.setattr(gpu_towers, "WARM_UP", 1)
    monkeypatch.setattr(gpu_towers, "LEAST_CALLS", 1)
    monkeypatch.setattr(gpu, "run_isolated", lambda work, **given: work(**given))


def test_each_measurement_is_saved_as_it_ends_and_may_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = tmp_path / "gpu.json"
    seen: list[list[str]] = []

    def fail(**_: object) -> list[gpu.Figures]:
        seen.append(list(json.loads(saved.read_text())["metrics"]))
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setitem(gpu.MEASUREMENTS, "train lora packed", fail)
    names = ["encode padded", "train lora packed", "queries"]
    words = ["--dry-run", "--seconds", "0", "--json", str(saved), "--only", *names]
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    gpu.main()
    found = json.loads(saved.read_text())
    assert seen == [[f"encode_padded_{name}" for name in ("tokens_per_s", "mfu", "peak_gb")]]
    assert found["problems"] == {"train lora packed": "OutOfMemoryError: CUDA out of memory."}
    assert found["metrics"]["encode_padded_mfu"] > 0
    assert found["metrics"]["queries_lookup_over_llm"] > 0
    towers = [row["tower"] for row in found["queries"]]
    assert towers == ["llm", "12 layers", "4 layers", "1 layer", "lookup", "lookup on CPU"]


def test_padded_and_packed_rows_have_one_loss():
    rows = [gpu.measure("train lora", packed=packed, dry=True, seconds=0.0)[0] for packed in (True, False)]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=0.01)  # bfloat16
    assert all(row["tokens/s"] > 0 and row["MFU"] > 0 and row["estimate GB"] > 0 for row in rows)


def test_without_a_gpu_the_dry_run_is_named(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--dry-run" in capsys.readouterr().err
