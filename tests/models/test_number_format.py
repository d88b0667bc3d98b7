import pytest
import torch

from scalingnote.core.errors import ConfigError
from scalingnote.models import weights
from scalingnote.models.weights import compute_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(("tiles", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_what_the_hardware_is_made_for(monkeypatch, tiles: bool, expected: torch.dtype):
    monkeypatch.setattr(weights, "_is_cpu_faster_in_bfloat16", lambda: tiles)
    monkeypatch.delenv("SCALINGNOTE_PRECISION")
    assert compute_dtype("auto", CPU) == expected
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "auto")
    assert compute_dtype("auto", CPU) == expected


def test_the_environment_decides_for_auto_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr(weights, "_is_cpu_faster_in_bfloat16", lambda: True)
    assert compute_dtype("auto", CPU) == torch.float32  # as all tests want it
    assert compute_dtype("bfloat16", CPU) == torch.bfloat16
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "bfloat16")
    assert (compute_dtype("auto", CPU), compute_dtype("float32", CPU)) == (torch.bfloat16, torch.float32)
    monkeypatch.setenv("SCALINGNOTE_PRECISION", "half")
    with pytest.raises(ConfigError, match="SCALINGNOTE_PRECISION is 'half'"):
        compute_dtype("auto", CPU)
