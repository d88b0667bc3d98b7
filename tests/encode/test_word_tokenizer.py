"""Tokens by remembered words are the tokenizer's own."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from scalingnote.encode import word_tokenizer
from scalingnote.encode.word_tokenizer import WordTokenizer
from scalingnote.train.distillation.vocabulary import add_words

PIECES = ["[PAD]", "[UNK]", "[CLS]", *"abcdé?!'中[]ß", *(f"##{letter}" for letter in "abcdé"), "ab", "##cd"]
TEXT = st.text(alphabet="abcdABÉéx ?!'[]中ß\t\u00a0\u0301\u2003\x00", max_size=40)


def bert(**options: object) -> Tokenizer:
    made = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]", **options)
    )
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]"])
    return made


BERT = bert()
REMEMBERING = WordTokenizer(BERT)


def byte_level(*steps: pre_tokenizers.PreTokenizer, normalizer: object = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġa", "b"), ("ab", "c"), ("Ġ", "Ġ"), ("!", "!")]
    pieces = [*alphabet, *(first + second for first, second in merges)]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(["[PAD]", "[EOS]"])
    return made


GPT2 = byte_level(
    pre_tokenizers.Split("_", "isolated"),
    pre_tokenizers.Split("␞", "removed"),
    pre_tokenizers.ByteLevel(add_prefix_space=False),
)
QWEN, LLAMA = (
    byte_level(
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        normalizer=normalizers.NFC(),
    )
    for pattern in word_tokenizer._SPLITS
)
SPACED = st.text(alphabet="abcABÉ  _?!'s[]中129␞\t\u00a0\u0301\n\x00", max_size=40)


@pytest.mark.parametrize("tokenizer", [GPT2, QWEN, LLAMA])
@given(texts=st.lists(SPACED, max_size=4), room=st.integers(1, 30))
def test_byte_level_words_begin_with_their_space(tokenizer: Tokenizer, texts: list[str], room: int) -> None:
    words = WordTokenizer(tokenizer)
    assert words._markers == ("[",)
    expected = [tokenizer.encode(text, add_special_tokens=False).ids[:room] for text in texts]
    assert words.ids(texts, room) == expected == words.ids(texts, room)


NEW = ["ab", "a b", "b a", "ba ab", "b ba", "a-b", "abba", "b abb", "é a", "bb b"]
PLAIN_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
READ_WITH_NEW_WORDS = [bert(), byte_level(PLAIN_BYTES), byte_level(PLAIN_BYTES, normalizer=normalizers.NFC())]
for made in READ_WITH_NEW_WORDS:
    add_words(made, NEW)
CLOSE_WORDS = st.lists(
    st.sampled_from([*NEW, "a", "b", "bab", "aa", "É", "Ab", "b,", "-a", "", "中a", "[CLS]"])
)


@pytest.mark.parametrize("tokenizer", READ_WITH_NEW_WORDS, ids=["BERT", "bytes", "NFC bytes"])
@given(texts=st.lists(CLOSE_WORDS.map(" ".join), max_size=4), room=st.integers(1, 30))
def test_new_words_and_pairs_are_the_tokenizers_own(
    tokenizer: Tokenizer, texts: list[str], room: int
) -> None:
    words = WordTokenizer(tokenizer)
    assert words._markers == ("[",)
    expected = [tokenizer.encode(text, add_special_tokens=False).ids[:room] for text in texts]
    assert words.ids(texts, room) == expected == words.ids(texts, room)


def test_new_words_that_are_equal_once_normalised_are_left_to_the_library() -> None:
    tokenizer = bert()
    add_words(tokenizer, ["ab a", "AB A", "ab", "Ab"])
    words = WordTokenizer(tokenizer)
    texts = ["ab a", "ab b", "b AB", "cd b"]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert words.ids(texts, 9) == expected
    assert [words._of_pairs(text) is None for text in texts] == [True, True, True, False]


def test_a_long_word_beside_pairs_is_left_to_the_library() -> None:
    words = WordTokenizer(READ_WITH_NEW_WORDS[0])
    texts = ["ab " + "a" * 41 + " a b", "a" * 900]
    expected = [READ_WITH_NEW_WORDS[0].encode(text, add_special_tokens=False).ids[:64] for text in texts]
    assert words.ids(texts, 64) == expected
    assert [words._of_pairs(text) for text in texts] == [None, None]


def test_a_pair_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = WordTokenizer(READ_WITH_NEW_WORDS[0])
    first = tokens.ids(["cd a b a", "ba ab"], 8)
    monkeypatch.setattr(tokens, "_tokenizer", None)  # asked again, it would fail
    assert tokens.ids(["cd a b a", "ba ab"], 8) == first


@given(st.lists(st.one_of(TEXT, st.just("ab [CLS] cd"), st.just("a[cls]")), max_size=4), st.integers(1, 30))
def test_ids_are_the_tokenizers_own(texts: list[str], room: int) -> None:
    expected = [BERT.encode(text, add_special_tokens=False).ids[:room] for text in texts]
    assert REMEMBERING.ids(texts, room) == expected


def test_a_word_is_tokenized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = WordTokenizer(BERT)
    first = tokens.ids(["ab cd", "cd ab ab"], 8)
    monkeypatch.setattr(tokens, "_tokenizer", None)  # asked again, it would fail
    assert tokens.ids(["ab cd", "cd ab ab"], 8) == first


def test_a_full_dictionary_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_tokenizer, "MAX_CACHED_WORDS", 2)
    tokens = WordTokenizer(BERT)
    text = "a b c d ab a"
    assert tokens.ids([text], 20) == [BERT.encode(text, add_special_tokens=False).ids]
    assert len(tokens._words) <= 2
    monkeypatch.setattr(word_tokenizer, "MAX_CACHED_PAIRS", 2)
    made = READ_WITH_NEW_WORDS[0]
    tokens = WordTokenizer(made)
    assert tokens.ids([text], 20) == [made.encode(text, add_special_tokens=False).ids]
    assert len(tokens._steps) <= 2


def test_other_tokenizers_read_whole_texts() -> None:
    """Where a word's tokens depend on what stands around it, or an added token may be any word."""
    metaspace = Tokenizer(models.Unigram([("▁a", 0.0), ("a", -1.0), ("▁", -2.0)], unk_id=0))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    grown = bert()
    grown.add_tokens([AddedToken("abba", normalized=True)])
    prefixed = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    joined = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    texts = ((metaspace, "a aa a"), (grown, "xabba abba"), (prefixed, "ab ab"), (joined, "ab a b"))
    for made, text in texts:
        tokens = WordTokenizer(made)
        assert tokens._markers is None
        assert tokens.ids([text, text], 3) == [made.encode(text, add_special_tokens=False).ids[:3]] * 2


def test_a_marker_is_looked_for_in_both_cases() -> None:
    facts = json.loads(BERT.to_str())
    assert word_tokenizer._markers(facts) == ("[",)
