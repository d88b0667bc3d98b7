"""Tokens of a student: new words, their places in a text, and the initial values of rows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from scalingnote.core.errors import ConfigError
from scalingnote.models.backbone import train_tokenizer
from scalingnote.train.distillation import vocabulary
from scalingnote.train.distillation.vocabulary import fit_rows, read_tokenizer, train_word_pieces

ENGLISH = [
    "what is osteoporosis",
    "osteoporosis in men",
    "is heart failure fatal",
    "state of the art",
    "art of war",
]
CHINESE = ["什么是高血压", "高血压怎么治疗", "糖尿病的治疗", "治疗高血压 CT检查"]


def byte_level() -> Tokenizer:
    """Build the tokenizer of a student from scratch, without merges: every word breaks into bytes."""
    return Tokenizer.from_str(train_tokenizer(["x"], vocabulary=300))


def word_pieces() -> Tokenizer:
    """Build the tokenizer of a lower-case BERT, with spaces around Chinese characters."""
    letters = "abcdefghijklmnopqrstuvwxyz什么是高血压怎治疗糖尿病的检查()"
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    return tokenizer


def marked_spaces() -> Tokenizer:
    """Build the tokenizer of a Llama: the normalizer converts spaces to marks."""
    pieces = ["[UNK]", *"▁abcdefghijklmnopqrstuvwxyz()"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def added_words_in(tokenizer: Tokenizer, text: str, words: list[str]) -> list[tuple[str, str]]:
    """Return the new words in a text, and the text that each one covers by its offsets."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [
        (token, text[slice(*offsets)].strip())
        for token, offsets in zip(encoding.tokens, encoding.offsets, strict=True)
        if token.strip() in words
    ]


def mine(
    texts: list[str], make=byte_level, *, tokens: int = 9, least: int = 1, pairs: bool = False
) -> list[str]:
    return vocabulary.mine_words(texts, make(), tokens=tokens, min_count=least, pairs=pairs)


def test_pairs_are_adjacent_words():
    texts = ["heart-failure, heart failure", "of heart failure. heart"]
    expected = ["failure", "heart", "heart failure", "heart-failure", "of", "of heart"]
    assert mine(texts, word_pieces, pairs=True) == expected
    assert mine(["高血压治疗"], pairs=True)[-1] == "高血压治疗"


def test_words_are_ranked_by_queries_then_by_characters():
    words = mine(ENGLISH)
    counts = {word: sum(word in text.split() for text in ENGLISH) for word in words}
    assert words == sorted(words, key=lambda word: (-counts[word], word))
    assert words[:4] == ["art", "is", "of", "osteoporosis"]
    assert mine(ENGLISH[::-1]) == words
    assert mine(ENGLISH, tokens=1) == ["art"]
    assert "heart" not in mine(ENGLISH, least=2)


def test_known_tokens_numbers_and_characters_are_not_mined():
    tokenizer = byte_level()
    tokenizer.add_tokens(["heart"])
    assert mine(["heart 1234 5.5 我"] * 2, lambda: tokenizer) == []


@pytest.mark.parametrize(
    ("texts", "make", "least", "expected"),
    [
        (CHINESE, byte_level, 2, ["治疗", "高血压"]),  # segmented by the planner's dictionary
        (["λόγος"], word_pieces, 1, ["λόγος"]),  # unknown to the tokenizer
        (["Ein Zebra", "zebra crossing"], word_pieces, 2, ["zebra"]),
        (["Ein Zebra", "zebra crossing"], byte_level, 1, ["Ein", "Zebra", "crossing", "zebra"]),
        # Words that the tokenizer makes equal, and the same words if it does not.
        (["der krüppel", "der krüppel", "the kruppel"], word_pieces, 1, ["der", "krüppel", "the"]),
        (["der krüppel", "der krüppel", "the kruppel"], byte_level, 1, ["der", "krüppel", "kruppel", "the"]),
    ],
)
def test_words_are_mined_in_the_form_that_the_tokenizer_reads(
    texts: list[str], make, least: int, expected: list[str]
):
    assert mine(texts, make, tokens=9 if least == 1 else 2, least=least) == expected


@pytest.mark.parametrize("make", [byte_level, word_pieces, marked_spaces])
def test_an_english_word_is_never_found_inside_another(make):
    tokenizer = make()
    vocabulary.add_words(tokenizer, ["art", "osteoporosis"])
    matches = added_words_in(tokenizer, "heart art (osteoporosis) party", ["art", "osteoporosis"])
    assert [text for _, text in matches] == ["art", "osteoporosis"]
    assert added_words_in(tokenizer, "heart party osteoporosislike smart", ["art", "osteoporosis"]) == []


@pytest.mark.parametrize("make", [byte_level, word_pieces, marked_spaces])
def test_the_space_before_a_new_word_is_not_a_token(make):
    before, after = make(), make()
    vocabulary.add_words(after, ["osteoporosis"])
    pieces = before.encode("osteoporosis", add_special_tokens=False).ids
    spaced = before.encode("men osteoporosis men", add_special_tokens=False).ids
    new_ids = after.encode("men osteoporosis men", add_special_tokens=False).ids
    word = after.token_to_id("osteoporosis")
    at = new_ids.index(word)
    assert new_ids[:at] == before.encode("men", add_special_tokens=False).ids
    # The tokens behind the word are unchanged: the same number as in the old row behind the word's pieces.
    assert new_ids[at + 1 :] == spaced[len(spaced) - len(new_ids[at + 1 :]) :]
    assert len(new_ids) <= len(spaced) - len(pieces) + 1


@pytest.mark.parametrize("make", [byte_level, word_pieces])
def test_the_longest_chinese_word_is_found_between_others(make):
    tokenizer = make()
    vocabulary.add_words(tokenizer, ["血压", "高血压", "治疗"])
    text = "什么是高血压怎么治疗"
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    covered_texts = {text[slice(*at)].strip() for at in offsets}
    assert covered_texts >= {"高血压", "治疗"}
    assert "血压" not in covered_texts


def test_offsets_cover_the_text_in_order():
    tokenizer = byte_level()
    vocabulary.add_words(tokenizer, ["osteoporosis", "高血压", "治疗"])
    text = "what is osteoporosis 什么是高血压怎么治疗 in men"
    encoding = tokenizer.encode(text, add_special_tokens=False)
    starts = [start for start, _ in encoding.offsets]
    assert starts == sorted(starts)
    covered = np.zeros(len(text), bool)
    for start, stop in encoding.offsets:
        covered[start:stop] = True
    assert covered.all()


@pytest.mark.parametrize("make", [byte_level, word_pieces])
def test_a_new_row_starts_at_the_mean_of_its_pieces(make):
    before, after = make(), make()
    words = ["osteoporosis", "高血压"]
    vocabulary.add_words(after, words)
    size = before.get_vocab_size()
    assert [after.token_to_id(word) for word in words] == [size, size + 1]
    table = torch.randn(size + 2, 6, generator=torch.Generator().manual_seed(0))
    initialized = table.clone()
    padding = Tokenizer.from_str(before.to_str())
    padding.enable_padding(length=9)  # like that of all-MiniLM-L6-v2
    vocabulary.initialize_word_rows(initialized, words, before=padding, after=after)
    assert torch.equal(initialized[:size], table[:size])
    for word, text in zip(words, (" osteoporosis", "高血压"), strict=True):
        pieces = before.encode(text, add_special_tokens=False).ids
        expected = sum(table[piece].double() for piece in pieces) / len(pieces)
        torch.testing.assert_close(
            initialized[after.token_to_id(word)].double(), expected, atol=1e-6, rtol=1e-6
        )


# --- a table with its own tokens ----------------------------------------------------------------------------

TEXTS = ["Joining tensors", "a tensor joins another", "Über Tensoren", "张量 连接", "joined, rejoined"]


def test_word_pieces_are_lower_case_and_equal_in_every_process(tmp_path: Path):
    tokenizer_json = train_word_pieces(TEXTS, vocabulary=80)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    assert tokenizer.encode("JOIN Tensor").tokens == tokenizer.encode("join tensor").tokens
    assert tokenizer.encode("张量").tokens == ["张", "量"]
    assert tokenizer.encode("☃").tokens == ["[UNK]"]
    assert "##" not in "".join(token.content for token in tokenizer.get_added_tokens_decoder().values())
    program = (
        "from scalingnote.train.distillation.vocabulary import train_word_pieces as train; import sys;"
        f"sys.stdout.buffer.write(train({TEXTS!r}, vocabulary=80).encode())"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert other.decode() == tokenizer_json
    (tmp_path / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    assert read_tokenizer(str(tmp_path)) == read_tokenizer(str(tmp_path / "tokenizer.json")) == tokenizer_json
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"distill\.tokenizer: .* is not a tokenizer"):
        read_tokenizer(str(tmp_path))


def test_fitted_rows_solve_the_ridge_regression():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 12, rng.integers(1, 6)).tolist() for _ in range(200)]
    weights = rng.uniform(0.5, 2, 14).astype(np.float32)
    vectors = rng.standard_normal((200, 3)).astype(np.float32)
    shares = np.zeros((200, 14))
    for number, ids in enumerate(texts):
        np.add.at(shares[number], ids, weights[ids])
    shares /= shares.sum(axis=1, keepdims=True)
    expected = np.linalg.solve(shares.T @ shares + np.eye(14), shares.T @ vectors)
    rows = fit_rows(texts, vectors, weights)
    np.testing.assert_allclose(rows, expected, atol=1e-4)
    assert not rows[12:].any()  # no text has these tokens


def test_texts_without_tokens_do_not_change_fitted_rows():
    with_empty = fit_rows([[0], [], [1]], np.eye(3, dtype=np.float32), np.ones(2, np.float32))
    without = fit_rows([[0], [1]], np.eye(3, dtype=np.float32)[[0, 2]], np.ones(2, np.float32))
    np.testing.assert_allclose(with_empty, without, atol=1e-6)
