"""Tokens by remembered words are the tokenizer's own."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from scalingnote.models import lookup_table
from scalingnote.models.lookup_table import WordTokenizer

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
    monkeypatch.setattr(lookup_table, "MAX_WORDS", 2)
    tokens = WordTokenizer(BERT)
    text = "a b c d ab a"
    assert tokens.ids([text], 20) == [BERT.encode(text, add_special_tokens=False).ids]
    assert len(tokens._words) <= 2


def test_other_tokenizers_read_whole_texts() -> None:
    """Where a word's tokens depend on what stands around it, or an added token may be any word."""
    metaspace = Tokenizer(models.Unigram([("▁a", 0.0), ("a", -1.0), ("▁", -2.0)], unk_id=0))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    grown = bert()
    grown.add_tokens([AddedToken("abba", normalized=True)])
    for made, text in ((metaspace, "a aa a"), (grown, "xabba abba")):
        tokens = WordTokenizer(made)
        assert tokens._markers is None
        assert tokens.ids([text, text], 3) == [made.encode(text, add_special_tokens=False).ids[:3]] * 2


def test_a_marker_is_looked_for_in_both_cases() -> None:
    facts = json.loads(BERT.to_str())
    assert lookup_table._markers(facts) == ("[",)
