"""A table's own tokens and starting rows, where its teacher has only vectors of texts to give."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from scalingnote.core.errors import ConfigError
from scalingnote.train.distillation.table_start import fit_rows, read_tokenizer, train_word_pieces

TEXTS = ["Joining tensors", "a tensor joins another", "Über Tensoren", "张量 连接", "joined, rejoined"]


def test_pieces_are_of_lower_case_words_and_equal_in_every_process(tmp_path: Path):
    learnt = train_word_pieces(TEXTS, vocabulary=80)
    tokenizer = Tokenizer.from_str(learnt)
    assert tokenizer.encode("JOIN Tensor").tokens == tokenizer.encode("join tensor").tokens
    assert tokenizer.encode("张量").tokens == ["张", "量"]
    assert tokenizer.encode("☃").tokens == ["[UNK]"]
    assert "##" not in "".join(token.content for token in tokenizer.get_added_tokens_decoder().values())
    program = (
        "from scalingnote.train.distillation.table_start import train_word_pieces as train; import sys;"
        f"sys.stdout.buffer.write(train({TEXTS!r}, vocabulary=80).encode())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert other.decode() == learnt
    (tmp_path / "tokenizer.json").write_text(learnt, encoding="utf-8")
    assert read_tokenizer(str(tmp_path)) == read_tokenizer(str(tmp_path / "tokenizer.json")) == learnt
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"distill\.tokenizer: .* is no tokenizer"):
        read_tokenizer(str(tmp_path))


def test_rows_are_the_ridge_regression():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 12, rng.integers(1, 6)).tolist() for _ in range(200)]
    weights = rng.uniform(0.5, 2, 14).astype(np.float32)
    vectors = rng.standard_normal((200, 3)).astype(np.float32)
    shares = np.zeros((200, 14))
    for number, ids in enumerate(texts):
        np.add.at(shares[number], ids, weights[ids])
    shares /= shares.sum(axis=1, keepdims=True)
    expected = np.linalg.solve(shares.T @ shares + np.eye(14), shares.T @ vectors)
    found = fit_rows(texts, vectors, weights)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert not found[12:].any()  # no text has these tokens


def test_texts_without_tokens_do_not_count():
    with_empty = fit_rows([[0], [], [1]], np.eye(3, dtype=np.float32), np.ones(2, np.float32))
    without = fit_rows([[0], [1]], np.eye(3, dtype=np.float32)[[0, 2]], np.ones(2, np.float32))
    np.testing.assert_allclose(with_empty, without, atol=1e-6)
