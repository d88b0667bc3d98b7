from pathlib import Path

import pytest

from benchmarks.train_sides import Setting, Size, measure_in_turns, rows, save_backbone

SIZE = Size(layers=1, hidden=64, vocabulary=100, query_tokens=6.0, document_tokens=10.0, longest=24)


@pytest.mark.parametrize("architecture", ["bert", "qwen2"])
@pytest.mark.filterwarnings("ignore")  # those of the other library
def test_both_sides_compute_one_loss(tmp_path: Path, architecture: str):
    pytest.importorskip("sentence_transformers")
    save_backbone(tmp_path, architecture, SIZE)
    settings = [
        Setting("ours", 6, chunks=(4, 4)),
        Setting("sentence-transformers", 6, chunks=(4, 4)),
        Setting("sentence-transformers", 6, budget=40),
    ]
    measurements = measure_in_turns(str(tmp_path), SIZE, settings, steps=1)
    losses = [figures["loss"] for figures in measurements]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    assert all(figures["cpu s"][0] > 0 for figures in measurements)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_have_the_lengths_asked_for(causal: bool):
    lengths = [len(row.ids) for row in rows(SIZE, Setting("ours", 4000), 0, causal=causal)[1]]
    assert sum(lengths) / 4000 == pytest.approx(SIZE.document_tokens, rel=0.05)
    assert (min(lengths) >= 3, max(lengths) <= SIZE.longest) == (True, True)
    equal = rows(SIZE, Setting("ours", 5, spread=0.0), 0, causal=causal)[2]
    assert {len(row.ids) for row in equal} == {10}
    assert {row.positions[0] for row in equal} == ({9} if causal else {0})
