"""Decoders pooled at their end token are better than chance, like in plain lines; needs SmolLM2's package."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import decoders, smollm
from benchmarks.pairs import Pairs, pairs_of
from benchmarks.plain import Figures

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed: it reads SmolLM2's file"),
]


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    try:
        smollm.path()
    except SystemExit as missing:
        pytest.skip(str(missing))
    return pairs_of("medquad")


@pytest.mark.timeout(1200)
def test_a_decoder_pooled_at_its_last_state_learns_in_sixty_steps(pairs: Pairs, tmp_path: Path):
    figures: Figures = decoders.ours(pairs, tmp_path, read="whole", layers=smollm.LAYERS, steps=60)
    assert figures["loss at end"] <= 1.0  # chance: ln 16 = 2.77
    assert figures["dense R@10"] >= 0.8


@pytest.mark.timeout(3000)
def test_lightretriever_learns_its_whole_objective_in_150_steps(pairs: Pairs, tmp_path: Path):
    figures = decoders.lightretriever(pairs, tmp_path, layers=smollm.LAYERS, steps=decoders.ALL_LOSSES_STEPS)
    dense, sparse, hybrid = (figures[f"{half} R@10"] for half in ("dense", "sparse", "hybrid"))
    assert dense >= 0.8
    assert hybrid >= max(dense, sparse) - 0.02
