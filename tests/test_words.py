"""One definition of a word: every script, composed or not, in any case, with joiners and points or not."""

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scalingnote.bm25 import terms
from scalingnote.planner import planner
from scalingnote.terminal import highlighted
from scalingnote.words import UNSPACED, aligned, clusters, folded, runs

# Words whose marks NFKC composes with no letter, or not with all.
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


@pytest.mark.parametrize("word", WORDS)
def test_no_word_ends_at_a_mark(word: str):
    normal = unicodedata.normalize("NFKC", word)
    assert terms(word) == planner.words(word) == [normal]
    assert highlighted(f"{word} {word[:-1]}q", word, "<{}>".format).startswith(f"<{word}> ")


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=list(ALIKE))
def test_words_that_readers_take_for_one_are_one(one: str, other: str):
    assert terms(one) == terms(other)
    assert planner.words(one) == planner.words(other)
    assert highlighted(other, one, "<{}>".format).replace("> <", " ") == f"<{other}>"


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_marks_that_make_another_word_are_kept(one: str, other: str):
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
def test_scripts_without_spaces_give_letters_with_their_marks_and_pairs(run: str, expected: list[str]):
    pairs = [one + other for one, other in pairwise(expected)]
    assert terms(run) == expected + pairs
    assert set(terms(run)) <= set(terms(f"{run}ก{run}"))


def test_digits_and_punctuation_are_no_letters_without_spaces():
    assert terms("ฃ๑๒๓ฃ") == ["ฃ", "๑๒๓", "ฃ"]
    assert terms("ヨ・タ") == terms("ﾖ･ﾀ") == ["ヨ", "タ"]


@given(ANY)
@example("i̇̇")
@example("İ\u0301")
@example("ᾳ̈ͅ")
def test_composed_or_not_terms_are_equal(text: str):
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
def test_no_mark_is_lost_within_a_word_nor_begins_one(text: str):
    plain = folded(text)
    for match in runs(UNSPACED).finditer(plain):
        after = plain[match.end() : match.end() + 1]
        assert not after or unicodedata.category(after)[0] != "M"
        assert unicodedata.category(match[0][0])[0] in "LN"
        assert "".join(clusters(match[0])) == match[0]
    found = "".join(match[0] for match in runs(UNSPACED).finditer(plain))
    letters, kept = ([c for c in some if unicodedata.category(c)[0] in "LN"] for some in (plain, found))
    assert letters == kept


@given(ANY)
@example("اـٔ")
@example("ㄱㅏ")
@example("ا\ufe77ٔ")
def test_each_character_knows_where_it_comes_from(text: str):
    plain, places = aligned(text)
    assert plain == folded(text)
    assert len(places) == len(plain) + 1
    assert places[-1] == len(text)
    assert places == sorted(places)


@given(ANY, ANY)
def test_highlighting_changes_no_text_and_marks_whole_words(text: str, query: str):
    assert highlighted(text, query, str) == text
    marked: list[str] = []
    highlighted(text, query, lambda word: marked.append(word) or word)
    joined = [c for word in marked[1:] for c in word[:1]]
    assert not any(unicodedata.category(c)[0] == "M" for c in joined)
