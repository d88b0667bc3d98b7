"""Tokens from cached words equal those of the tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from scalingnote.encode import lookup
from scalingnote.encode.lookup import WordTokenizer
from scalingnote.models.prompt import tokenize
from scalingnote.train.distillation.vocabulary import add_words

PIECES = ["[PAD]", "[UNK]", "[CLS]", *"abcdé?!'中[]ß", *(f"##{letter}" for letter in "abcdé"), "ab", "##cd"]


def bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]"])
    return tokenizer


def byte_level(*steps: pre_tokenizers.PreTokenizer, normalizer: object = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ġa", "b"), ("ab", "c"), ("Ġ", "Ġ"), ("!", "!")]
    pieces = [*alphabet, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["[PAD]", "[EOS]"])
    return tokenizer


def grown(tokenizer: Tokenizer, words: list[str]) -> Tokenizer:
    add_words(tokenizer, words)
    return tokenizer


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
GPT2 = byte_level(pre_tokenizers.Split("_", "isolated"), pre_tokenizers.Split("␞", "removed"), BYTES)
QWEN, LLAMA = (
    byte_level(
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        normalizer=normalizers.NFC(),
    )
    for pattern in lookup._SPLITS
)
NEW = ["ab", "a b", "b a", "ba ab", "b ba", "a-b", "abba", "b abb", "é a", "bb b"]
TOKENIZERS = {
    "BERT": bert(),
    "GPT-2": GPT2,
    "Qwen": QWEN,
    "Llama": LLAMA,
    "BERT, new words": grown(bert(), NEW),
    "BERT, new words that are equal once normalised": grown(bert(), ["ab a", "AB A", "ab", "Ab"]),
    "bytes, new words": grown(byte_level(BYTES), NEW),
    "NFC bytes, new words": grown(byte_level(BYTES, normalizer=normalizers.NFC()), NEW),
    "NFKC bytes, new words": grown(byte_level(BYTES, normalizer=normalizers.NFKC()), ["¨b", "½ a", "a b"]),
}
TEXT = st.text(alphabet="abcdABÉéx  _?!'s[]中ß129␞¨½\t\u00a0\u0301\u2003\n\x00", max_size=40)
CLOSE_WORDS = st.lists(
    st.sampled_from([*NEW, "a", "b", "bab", "aa", "É", "Ab", "b,", "-a", "", "中a", "[CLS]", "a[cls]"])
).map(" ".join)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@given(texts=st.lists(st.one_of(TEXT, CLOSE_WORDS), max_size=4), room=st.integers(1, 30))
def test_ids_equal_those_of_the_tokenizer(tokenizer: Tokenizer, texts: list[str], room: int) -> None:
    words = WordTokenizer(tokenizer)
    assert words._markers == ("[",)  # in both cases; None would mean that texts are not divided
    expected = [tokenizer.encode(text, add_special_tokens=False).ids[:room] for text in texts]
    assert words.ids(texts, room) == expected == words.ids(texts, room)


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_text_with_few_tokens_is_read_to_its_end(tokenizer: Tokenizer) -> None:
    texts = ["a" + 900 * " " + "d d", 150 * "x" + " b", "[" + 900 * " " + "d"]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids[:8] for text in texts]
    assert WordTokenizer(tokenizer).ids(texts, 8) == expected
    assert [ids[:8] for ids in tokenize(tokenizer, texts, 8)] == expected


@pytest.mark.parametrize("kind", ["BERT", "BERT, new words"])
def test_a_word_is_tokenized_once_and_a_full_cache_is_emptied(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["cd a b a", "ba ab", "ab " + "a" * 41 + " a b"]
    expected = [TOKENIZERS[kind].encode(text, add_special_tokens=False).ids[:8] for text in texts]
    words = WordTokenizer(TOKENIZERS[kind])
    assert words.ids(texts, 8) == expected
    with monkeypatch.context() as patched:
        patched.setattr(words, "_tokenizer", None)  # a further call would fail
        assert words.ids(texts[:2], 8) == expected[:2]
        with pytest.raises(AttributeError):
            words.ids(texts[2:], 8)  # a word of this length is not cached
    monkeypatch.setattr(lookup, "MAX_CACHED_WORDS", 2)
    words = WordTokenizer(TOKENIZERS[kind])
    assert words.ids(texts, 8) == expected == words.ids(texts, 8)
    assert len(words._others) <= 2


def test_other_tokenizers_read_undivided_texts() -> None:
    """Tokens of a word depend on the text around it, or an added token may be any word."""
    metaspace = Tokenizer(models.Unigram([("▁a", 0.0), ("a", -1.0), ("▁", -2.0)], unk_id=0))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    anywhere = bert()
    anywhere.add_tokens([AddedToken("abba", normalized=True)])
    prefixed = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    joined = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    triple = grown(bert(), ["a b a"])
    cases = {
        "a aa a": metaspace,
        "xabba abba": anywhere,
        "ab ab": prefixed,
        "ab a b": joined,
        "b a b a": triple,
    }
    for text, tokenizer in cases.items():
        tokens = WordTokenizer(tokenizer)
        assert tokens._markers is None
        assert tokens.ids([text, text], 3) == [tokenizer.encode(text, add_special_tokens=False).ids[:3]] * 2
