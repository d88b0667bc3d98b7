"""The GPU benchmark on a CPU: one measurement that fails does not cost the others."""

from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_towers import TINY


def test_a_failed_measurement_leaves_its_reason_and_the_others(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> gpu.Figures:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(
        gpu, "kinds", lambda _: {"train full": (fail, (True,)), "encode": (gpu._encode, (False,))}
    )
    failed, encoded = gpu.measure_all(TINY, torch.device("cpu"), seconds=0.0, rows=2)
    assert failed["error"] == "OutOfMemoryError: CUDA out of memory."
    assert not encoded["error"]
    assert encoded["tokens/s"] > 0
    assert set(gpu.metrics([failed, encoded])) == {
        f"encode_padded_{name}" for name in ("tokens_per_s", "mfu", "peak_gb")
    }
