"""The GPU benchmark on a CPU: a failed measurement does not affect the others."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_towers import TINY

CPU = torch.device("cpu")


def test_a_failed_measurement_leaves_its_reason(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> gpu.Figures:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(
        gpu, "kinds", lambda _: {"train full": (fail, (True,)), "encode": (gpu._encode, (False,))}
    )
    (failed,) = gpu.measure("train full", TINY, CPU, packed=True, seconds=0.0, rows=2)
    (encoded,) = gpu.measure("encode", TINY, CPU, packed=False, seconds=0.0, rows=2)
    assert failed["error"] == "OutOfMemoryError: CUDA out of memory."
    assert not encoded["error"]
    assert encoded["tokens/s"] > 0
    assert set(gpu.metrics([failed, encoded])) == {
        f"encode_padded_{name}" for name in ("tokens_per_s", "mfu", "peak_gb")
    }


def test_each_measurement_is_saved_as_it_ends_and_may_fail_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saved = tmp_path / "gpu.json"
    problems: list[list[str]] = []
    row = {"work": "encode", "rows": "packed", "tokens/s": 5.0, "MFU": 0.5, "peak GB": 1.0, "error": ""}

    def measured(name: str, *_: Any) -> tuple[list[gpu.Figures], str]:
        problems.append(list(json.loads(saved.read_text())["problems"]) if saved.exists() else [])
        return ([], "exit code 1: no kernel") if name == "engines" else ([row], "")

    monkeypatch.setattr(gpu, "_in_process", measured)
    words = ["--dry-run", "--json", str(saved), "--only", "engines", "encode packed", "queries", "--minutes"]
    monkeypatch.setattr(gpu, "OTHERS", {"engines": lambda _: {}, "queries": lambda _: {"queries": 1.0}})
    monkeypatch.setattr(sys, "argv", ["gpu", *words, "8"])
    gpu.main()
    report = json.loads(saved.read_text())
    assert problems == [[], ["engines"], ["engines"]]
    assert report["problems"] == {"engines": "exit code 1: no kernel"}
    assert report["metrics"]["encode_packed_mfu"] == 0.5
    assert report["metrics"]["queries"] == 1.0
    monkeypatch.setattr(sys, "argv", ["gpu", *words, "0.1"])
    gpu.main()
    assert set(json.loads(saved.read_text())["problems"].values()) == {"no time was left"}
