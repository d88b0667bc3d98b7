"""The benchmark of published models at a tiny size: equal embeddings, and times of both sides."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import native
from published import folder

TEXTS = ["join two tensors", "word " * 60, "an axis"]


def test_both_sides_give_equal_embeddings_and_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "BATCHES", (2,))
    path = str(folder(tmp_path))
    assert max(native.difference(path, ["", *TEXTS]).values()) < 1e-5
    rows, ratio = native.speed(path, TEXTS, rounds=2)
    assert [row["side"] for row in rows] == ["scalingnote", "sentence-transformers, batch 2"]
    assert ratio > 0
    assert all(row["documents/s"] > 0 for row in rows)


def test_documents_have_mixed_lengths(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]"] * 2000 + ["word", "##piece", "other"]))
    lengths = [len(text.split()) for text in native.texts(tmp_path, 200)]
    assert 45 < np.median(lengths) < 80
    assert min(lengths) < 20 < 200 < max(lengths)
