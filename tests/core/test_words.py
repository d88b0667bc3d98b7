"""Texts from callers are checked; one definition of a word holds for every script."""

import unicodedata
from itertools import pairwise

import jaxtyping
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalingnote.cli.terminal import highlight
from scalingnote.core.bm25 import terms
from scalingnote.core.errors import DataError
from scalingnote.core.words import (
    UNSPACED,
    checked_text,
    checked_texts,
    clusters,
    fold,
    fold_with_places,
    runs,
)
from scalingnote.triplets.planner import planner

# Words with marks that NFKC composes with no letter, or only with some.
WORDS = [
    "दान", "दिन", "हिन्दी", "বাংলা", "தமிழ்", "తెలుగు", "ಕನ್ನಡ", "മലയാളം", "සිංහල", "བོད", "ọ̀rọ̀", "ṣ̀e", "x̂y", "ދިވެހި",
]  # fmt: skip
ALIKE = {
    "composed": ("école Việt", unicodedata.normalize("NFD", "école Việt")),
    "composed Hangul": ("한국어", unicodedata.normalize("NFD", "한국어")),
    "composed nukta": ("क़लम", unicodedata.normalize("NFC", "क़लम")),
    "half-width kana": ("ガギグ", "ｶﾞｷﾞｸﾞ"),
    "full width": ("abc12", "ＡＢＣ１２"),
    "ligature": ("fine", "ﬁne"),
    "soft hyphen": ("catalog", "cata\u00adlog"),
    "zero-width space": ("catalog", "cata\u200blog"),
    "joiners": ("می‌خواهم", "میخواهم"),
    "joiner in a conjunct": ("ශ්‍රී", "ශ්රී"),
    "word joiner and byte-order mark": ("catalog", "ca\ufeffta\u2060log"),
    "a joiner before a mark": ("école", "e\u200d\u0301cole"),
    "variation selector": ("葛城", "葛\U000e0100城"),
    "sharp s": ("STRASSE", "Straße"),
    "final sigma": ("ΛΌΓΟΣ", "λόγος"),
    "dotted I": ("İstanbul", "istanbul"),
    "dotted i, in lower case": ("i̇stanbul", "Istanbul"),
    "Hebrew points": ("שָׁלוֹם", "שלום"),
    "Hebrew points, composed": ("\ufb2aלום", "שלום"),
    "harakat": ("مُحَمَّدٌ", "محمد"),
    "tatweel": ("كتـــاب", "كتاب"),
    "superscript alef": ("هٰذا", "هذا"),
}
DIFFERENT = [("दान", "दिन"), ("آب", "اب"), ("سأل", "سال"), ("resume", "résumé"), ("ọ̀rọ̀", "oro"), ("か", "が")]
ANY = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs", "Cn"]),
        st.characters(categories=["Mn", "Mc", "Me", "Cf"]),
        st.sampled_from("aI iİıßςΣ._ \u0307\u0345\u0640\u064e\u0654ا가가ㅏｶﾞกำ葛ー・"),
    ),
    max_size=30,
)


def marked(text: str, query: str) -> str:
    """Return the text with <> around highlighted words."""
    return "".join(f"<{piece}>" if is_word else piece for piece, is_word in highlight(text, query))


@pytest.mark.parametrize("word", WORDS)
def test_a_mark_does_not_end_a_word(word: str):
    normal = unicodedata.normalize("NFKC", word)
    assert terms(word) == planner.words(word) == [normal]
    assert marked(f"{word} {word[:-1]}q", word).startswith(f"<{word}> ")


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=list(ALIKE))
def test_words_that_look_equal_have_equal_terms(one: str, other: str):
    assert terms(one) == terms(other)
    assert planner.words(one) == planner.words(other)
    assert marked(other, one).replace("> <", " ") == f"<{other}>"


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_marks_that_distinguish_words_are_kept(one: str, other: str):
    assert not {*terms(one)} & {*terms(other)} or len(one) == 1
    assert terms(one) != terms(other)
    assert planner.words(one) != planner.words(other)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("กำลัง", ["กํ", "า", "ลั", "ง"]),
        ("ភាសា", ["ភា", "សា"]),
        ("ကျောင်း", ["ကျော", "င်း"]),
        ("ພາສາ", ["ພ", "າ", "ສ", "າ"]),
    ],
)  # fmt: skip
def test_scripts_without_spaces_give_letters_and_pairs(run: str, expected: list[str]):
    pairs = [one + other for one, other in pairwise(expected)]
    assert terms(run) == expected + pairs
    assert set(terms(run)) <= set(terms(f"{run}ก{run}"))


def test_digits_and_punctuation_are_not_unspaced_letters():
    assert terms("ฃ๑๒๓ฃ") == ["ฃ", "๑๒๓", "ฃ"]
    assert terms("ヨ・タ") == terms("ﾖ･ﾀ") == ["ヨ", "タ"]


@given(ANY)
@example("i̇̇")
@example("İ\u0301")
@example("ᾳ̈ͅ")
def test_composed_and_decomposed_terms_are_equal(text: str):
    assert (
        terms(unicodedata.normalize("NFD", text)) == terms(unicodedata.normalize("NFC", text)) == terms(text)
    )


@given(ANY)
@example("i̇̇")
@example("İ\u0301")
def test_terms_of_terms_are_the_same(text: str):
    once = terms(text)
    assert {*terms(" ".join(once))} == {*once}
    assert planner.words(" ".join(planner.words(text))) == planner.words(text)


@given(ANY)
def test_marks_stay_within_words(text: str):
    plain = fold(text)
    for match in runs(UNSPACED).finditer(plain):
        after = plain[match.end() : match.end() + 1]
        assert not after or unicodedata.category(after)[0] != "M"
        assert unicodedata.category(match[0][0])[0] in "LN"
        assert "".join(clusters(match[0])) == match[0]
    all_words = "".join(match[0] for match in runs(UNSPACED).finditer(plain))
    letters, word_letters = (
        [c for c in characters if unicodedata.category(c)[0] in "LN"] for characters in (plain, all_words)
    )
    assert letters == word_letters


@given(ANY)
@example("اـٔ")
@example("ㄱㅏ")
@example("ا\ufe77ٔ")
def test_places_map_folded_characters_to_the_text(text: str):
    plain, places = fold_with_places(text)
    assert plain == fold(text)
    assert len(places) == len(plain) + 1
    assert places[-1] == len(text)
    assert places == sorted(places)


@given(ANY, ANY)
def test_highlighting_keeps_the_text_and_marks_full_words(text: str, query: str):
    pieces = [*highlight(text, query)]
    assert "".join(piece for piece, _ in pieces) == text
    words = [piece for piece, is_word in pieces if is_word]
    first_characters = [c for word in words[1:] for c in word[:1]]
    assert not any(unicodedata.category(c)[0] == "M" for c in first_characters)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the check of annotations, as outside of tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (None, "query 1 is None of type NoneType: pass a text, an empty one"),
        (float("nan"), "query 1 is nan of type float"),
        (np.float64("nan"), "query 1 is .*nan.* of type float64"),
        (7, "query 1 is 7 of type int"),
        (b"bytes", "query 1 is b'bytes' of type bytes"),
        (["a"], r"query 1 is \['a'\] of type list"),
        ("x" * 5, None),
        (np.str_("x"), None),
    ],
)
def test_a_value_that_is_not_a_text_is_an_error(wrong, message):
    if message is None:
        assert checked_texts(["fine", wrong], name="query") == ["fine", wrong]
        return
    with pytest.raises(DataError, match=message):
        checked_texts(["fine", wrong], name="query")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrong", ["one text", b"bytes", None, 7])
def test_a_single_value_is_not_a_list(wrong):
    with pytest.raises(DataError, match="is not a list of texts"):
        checked_texts(wrong)


@pytest.mark.usefixtures("unchecked")
def test_halves_of_surrogate_pairs_are_replaced():
    texts = ["cut \ud83d", "\ude00", "whole \U0001f600", "हिन्दी", "bytes \udcff of a shell", ""]
    expected = ["cut \ufffd", "\ufffd", "whole \U0001f600", "हिन्दी", "bytes \ufffd of a shell", ""]
    assert checked_texts(texts) == checked_texts(np.array(texts, object)) == expected
    assert texts[0] == "cut \ud83d"  # the caller's list is not changed
    assert checked_texts(iter(texts)) == expected
    assert checked_text(texts[0]) == expected[0]
    assert checked_texts([]) == []
