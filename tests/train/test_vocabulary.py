"""New words of a tokenizer: what is mined, where it is found in a text, what its rows start as."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from scalingnote.models.backbone import train_tokenizer
from scalingnote.train.distillation import new_words

ENGLISH = [
    "what is osteoporosis",
    "osteoporosis in men",
    "is heart failure fatal",
    "state of the art",
    "art of war",
]
CHINESE = ["什么是高血压", "高血压怎么治疗", "糖尿病的治疗", "治疗高血压 CT检查"]


def byte_level() -> Tokenizer:
    """As a student from scratch has one, with no merges: every word breaks into bytes."""
    return Tokenizer.from_str(train_tokenizer(["x"], vocabulary=300))


def word_pieces() -> Tokenizer:
    """As a BERT that lowers case has one, with spaces put around Chinese characters."""
    letters = "abcdefghijklmnopqrstuvwxyz什么是高血压怎治疗糖尿病的检查()"
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return made


def marked_spaces() -> Tokenizer:
    """As a Llama has one: the normalizer turns spaces into marks."""
    pieces = ["[UNK]", *"▁abcdefghijklmnopqrstuvwxyz()"]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def found(tokenizer: Tokenizer, text: str, words: list[str]) -> list[tuple[str, str]]:
    """The new words that a text holds, and the text each stands for by its offsets."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [
        (token, text[slice(*offsets)].strip())
        for token, offsets in zip(encoding.tokens, encoding.offsets, strict=True)
        if token.strip() in words
    ]


def test_pairs_are_words_beside_each_other():
    texts = ["heart-failure, heart failure", "of heart failure. heart"]
    mined = new_words.mine_words(texts, word_pieces(), tokens=9, min_count=1, pairs=True)
    assert mined == ["failure", "heart", "heart failure", "heart-failure", "of", "of heart"]
    assert (
        new_words.mine_words(["高血压治疗"], byte_level(), tokens=9, min_count=1, pairs=True)[-1]
        == "高血压治疗"
    )


def test_words_are_ranked_by_queries_then_by_characters():
    tokenizer = byte_level()
    words = new_words.mine_words(ENGLISH, tokenizer, tokens=9, min_count=1, pairs=False)
    counts = {word: sum(word in text.split() for text in ENGLISH) for word in words}
    assert words == sorted(words, key=lambda word: (-counts[word], word))
    assert words[:4] == ["art", "is", "of", "osteoporosis"]
    assert new_words.mine_words(ENGLISH[::-1], tokenizer, tokens=9, min_count=1, pairs=False) == words
    assert new_words.mine_words(ENGLISH, tokenizer, tokens=1, min_count=1, pairs=False) == ["art"]
    assert "heart" not in new_words.mine_words(ENGLISH, tokenizer, tokens=9, min_count=2, pairs=False)


def test_known_tokens_numbers_and_characters_are_not_mined():
    tokenizer = byte_level()
    tokenizer.add_tokens(["heart"])
    texts = ["heart 1234 5.5 我", "heart 1234 5.5 我"]
    words = new_words.mine_words(texts, tokenizer, tokens=9, min_count=1, pairs=False)
    assert words == []


def test_chinese_is_segmented_by_the_planners_dictionary():
    words = new_words.mine_words(CHINESE, byte_level(), tokens=3, min_count=2, pairs=False)
    assert words == ["治疗", "高血压"]


def test_what_a_tokenizer_does_not_know_at_all_is_worth_a_token():
    tokenizer = word_pieces()
    assert tokenizer.encode("naïveté λόγος").tokens[-1] == "[UNK]"
    assert new_words.mine_words(["λόγος"], tokenizer, tokens=9, min_count=1, pairs=False) == ["λόγος"]


def test_words_are_mined_as_written_unless_lowered():
    texts = ["Ein Zebra", "zebra crossing"]
    assert "Zebra" in new_words.mine_words(texts, byte_level(), tokens=9, min_count=1, pairs=False)
    assert new_words.mine_words(texts, word_pieces(), tokens=9, min_count=2, pairs=False) == ["zebra"]


def test_one_of_words_that_are_normalised_alike_is_mined():
    texts = ["der krüppel", "der krüppel", "the kruppel"]
    mined = new_words.mine_words(texts, word_pieces(), tokens=9, min_count=1, pairs=False)
    assert mined == ["der", "krüppel", "the"]
    as_written = new_words.mine_words(texts, byte_level(), tokens=9, min_count=1, pairs=False)
    assert as_written == ["der", "krüppel", "kruppel", "the"]


@pytest.mark.parametrize("make", [byte_level, word_pieces, marked_spaces])
def test_an_english_word_is_found_alone_and_never_inside_another(make):
    tokenizer = make()
    new_words.add_words(tokenizer, ["art", "osteoporosis"])
    seen = found(tokenizer, "heart art (osteoporosis) party", ["art", "osteoporosis"])
    assert [text for _, text in seen] == ["art", "osteoporosis"]
    assert found(tokenizer, "heart party osteoporosislike smart", ["art", "osteoporosis"]) == []


@pytest.mark.parametrize("make", [byte_level, word_pieces, marked_spaces])
def test_the_space_before_a_new_word_is_no_token(make):
    before, after = make(), make()
    new_words.add_words(after, ["osteoporosis"])
    pieces = before.encode("osteoporosis", add_special_tokens=False).ids
    spaced = before.encode("men osteoporosis men", add_special_tokens=False).ids
    new = after.encode("men osteoporosis men", add_special_tokens=False).ids
    word = after.token_to_id("osteoporosis")
    at = new.index(word)
    assert new[:at] == before.encode("men", add_special_tokens=False).ids
    # Behind it all is as it was: as many tokens as the old row has behind the word's pieces.
    assert new[at + 1 :] == spaced[len(spaced) - len(new[at + 1 :]) :]
    assert len(new) <= len(spaced) - len(pieces) + 1


@pytest.mark.parametrize("make", [byte_level, word_pieces])
def test_the_longest_chinese_word_is_found_between_others(make):
    tokenizer = make()
    new_words.add_words(tokenizer, ["血压", "高血压", "治疗"])
    seen = [text for _, text in spans(tokenizer, "什么是高血压怎么治疗")]
    assert "高血压" in seen
    assert "治疗" in seen
    assert "血压" not in seen


def spans(tokenizer: Tokenizer, text: str) -> list[tuple[int, str]]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    return [(id, text[slice(*at)].strip()) for id, at in zip(encoding.ids, encoding.offsets, strict=True)]


def test_offsets_cover_the_text_in_order():
    tokenizer = byte_level()
    new_words.add_words(tokenizer, ["osteoporosis", "高血压", "治疗"])
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
    new_words.add_words(after, words)
    size = before.get_vocab_size()
    assert [after.token_to_id(word) for word in words] == [size, size + 1]
    table = torch.randn(size + 2, 6, generator=torch.Generator().manual_seed(0))
    filled = table.clone()
    padding = Tokenizer.from_str(before.to_str())
    padding.enable_padding(length=9)  # as that of all-MiniLM-L6-v2
    new_words.initialize_word_rows(filled, words, before=padding, after=after)
    assert torch.equal(filled[:size], table[:size])
    for word, text in zip(words, (" osteoporosis", "高血压"), strict=True):
        pieces = before.encode(text, add_special_tokens=False).ids
        expected = sum(table[piece].double() for piece in pieces) / len(pieces)
        torch.testing.assert_close(filled[after.token_to_id(word)].double(), expected, atol=1e-6, rtol=1e-6)
