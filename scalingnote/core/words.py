"""Texts, their words and their sentences.

Texts from outside are checked: a value that is not a text is an error, and half of a surrogate pair becomes
U+FFFD. One definition of words serves every script and all code that splits, compares or highlights words.

A word is a run of letters and digits with the marks on them, so no word ends at a vowel sign or an accent.
Two words are equal if they are equal after :func:`fold`: NFKC (full width, half-width kana, ligatures,
composed or not), case folded (ß is ss, a final sigma a sigma, a Turkish İ an i), without invisible characters
(soft hyphens, zero-width spaces and joiners, variation selectors) and without marks that writers may omit:
the points of Hebrew, the harakat and the tatweel of Arabic (hamza and madda make other letters and stay).

The caller cuts runs of scripts without spaces into *clusters*: a letter with its marks.

For BM25, stop words of a language are left out, and its other words become stems. The stems are Snowball's
("installs", "installing" and "installed" are one word). The stop words are those of NLTK, which bm25s has for
12 of the languages. A language without a stemmer, for example Chinese or Japanese, is "none": its words are
compared as they are written. Documents and queries of one index need the same language.
"""

import re
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Literal

from scalingnote.core.errors import DataError

# Characters for classes of `re`. Letters only: digits are words in every script.
HAN = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_KANA = "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9d"
_THAI = "\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e46"
_LAO = "\u0e81-\u0eb0\u0eb2\u0eb3\u0ebd\u0ec0-\u0ec6\u0edc-\u0edf"
_BURMESE = "\u1000-\u102a\u103f\u1050-\u1055\u105a-\u105d\u1061\u1065\u1066\u106e-\u1070\u1075-\u1081\u108e"
_KHMER = "\u1780-\u17b3\u17d7\u17dc"
UNSPACED = HAN + _KANA + _THAI + _LAO + _BURMESE + _KHMER
"""Scripts without spaces between words."""
HANGUL = "\uac00-\ud7af"
"""Korean has spaces, but particles stick to words: a caller may cut it as well."""

# After a full stop of Chinese or Japanese, at the space after a Latin one, and at the end of a line.
SENTENCE_END = re.compile(r"(?<=[。！？])|(?<=[.!?])\s|\n")

# Characters that do not distinguish words; soft hyphen, joiners and other format characters are category Cf.
_UNSEEN = "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef"
_HEBREW_POINTS = "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"
_ARABIC_POINTS = (
    "\u0610-\u061a\u064b-\u0652\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u08d3-\u08ff"
)
_TATWEEL = "\u0640"
# Characters that may compose with the letter before, or let a mark that follows compose with it: Hangul, the
# marks of half-width kana, forms of the tatweel.
_COMPOSED = "\u1160-\u11ff\u3131-\u318e\uff9e-\uffdc\u0640\ufcf2-\ufcf4\ufe71\ufe77\ufe79\ufe7b\ufe7d\ufe7f"
_UNMARKED = re.compile("[\u3041-\u3096\u30a1-\u30ff\u3400-\u9fff\uac00-\ud7a3]*")  # most Chinese and Japanese
_DOT = re.compile("(?<=[iI])\u0307+")  # İ in lower case is i with a dot above it


# Long texts are cut before they are tokenized: no tokenizer has more characters per token on average.
CHARACTERS_PER_TOKEN = 16
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # Python stores a complete pair as one character


# --- texts ------------------------------------------------------------------------------------------------


def checked_texts(texts: Iterable[str], *, name: str = "text") -> list[str]:
    """Return the texts of a caller as a list; halves of surrogate pairs are replaced.

    Args:
        texts: a list, an array, a column of a data frame.
        name: of one text in errors: "query", "document".

    Raises:
        DataError: `texts` is a single text, or contains a value that is not a text (None, NaN, a number); the
            message has its position and value.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise DataError(f"{_show(texts)} is not a list of texts: pass a list, also for a single {name}")
    text_list = list(texts)
    for position, text in enumerate(text_list):
        if not (isinstance(text, str) and text.isascii()):
            text_list[position] = checked_text(text, name=f"{name} {position}")
    return text_list


def cut_characters(text: str, max_tokens: int) -> str:
    """Return a beginning that usually has at least `max_tokens` tokens, or the complete text."""
    return text[: max_tokens * CHARACTERS_PER_TOKEN]


def checked_text(text: str, *, name: str = "text") -> str:
    """Return one text, checked as by :func:`checked_texts`."""
    if not isinstance(text, str):
        raise DataError(f"{name} is {_show(text)}: pass a text, an empty one if there is none")
    return text if text.isascii() or is_valid_unicode(text) else replace_surrogates(text)


def is_valid_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode `text`: escapes of JSON can write half of a surrogate pair."""
    return not _SURROGATE.search(text)


def replace_surrogates(text: str) -> str:
    """Replace every half of a surrogate pair by U+FFFD, the replacement character."""
    return _SURROGATE.sub("\ufffd", text)


def _show(value: object) -> str:
    return f"{value!r:.80} of type {type(value).__name__}"


# --- words ------------------------------------------------------------------------------------------------


def run_of(characters: str) -> str:
    """Return a pattern for a run of `characters`, the inside of a class of `re`, with their marks."""
    # ASCII is excluded first: marks are many ranges, which would be searched at the end of every word.
    return rf"[{characters}]+(?:(?![\x00-\x7f])[{marks()}]+[{characters}]*)*"


def word_of(unspaced: str) -> str:
    """Return a pattern for a word of letters and digits, without the letters of `unspaced`."""
    return run_of(rf"^\W_{unspaced}")


@cache
def runs(unspaced: str) -> re.Pattern[str]:
    """Return a pattern with two groups: a word; or a run of the letters `unspaced`, which the caller cuts."""
    return re.compile(f"({word_of(unspaced)})|({run_of(unspaced)})")


def clusters(run: str) -> list[str]:
    """Split a run into its letters, each with its marks."""
    return list(run) if _UNMARKED.fullmatch(run) else _cluster().findall(run)


def plain(text: str) -> str:
    """Convert a text to the form in which words are searched: as :func:`fold`, but with its own case."""
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text)
    may_have, dropped = _drop_patterns()
    visible = dropped.sub("", text) if may_have.search(text) else text
    if "\u0130" in visible or "\u0307" in visible:
        visible = _DOT.sub("", visible.replace("\u0130", "I"))
    # A mark may now follow the letter that it composes with.
    return text if visible == text else unicodedata.normalize("NFKC", visible)


def fold(text: str) -> str:
    """Convert a text to the form in which words are compared; see the module."""
    return unicodedata.normalize("NFC", plain(text).casefold())  # folding decomposes some Greek


def fold_with_places(text: str) -> tuple[str, list[int]]:
    """Return `fold(text)`, and for each of its characters the place in `text` that it comes from.

    An additional last place is the end of `text`, so that ``text[places[start] : places[stop]]`` is the
    original of ``fold(text)[start:stop]``, with its marks.
    """
    pieces, places, position = [], [], 0
    for source in _piece().findall(text):
        piece = fold(source)
        pieces.append(piece)
        places += [position] * len(piece)
        position += len(source)
    return "".join(pieces), [*places, position]


@cache
def marks() -> str:
    """Return the inside of a class of `re`: the marks of every script, and invisible characters."""
    return _UNSEEN + "".join(_by_category().values())


@cache
def _drop_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return a fast pattern that may match other characters too, and the pattern of dropped characters."""
    dropped = _UNSEEN + _HEBREW_POINTS + _ARABIC_POINTS + _TATWEEL + _by_category()["Cf"]
    within = re.sub("[\U00010000-\U0010ffff]-?", "", dropped)
    return re.compile(f"[{within}\U00010000-\U0010ffff]"), re.compile(f"[{dropped}]+")


@cache
def _cluster() -> re.Pattern[str]:
    return re.compile(f".[{marks()}]*", re.DOTALL)


def sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence in characters, without spaces around it; none is empty."""
    start = 0
    for stop, following in [*(match.span() for match in SENTENCE_END.finditer(text)), (len(text), len(text))]:
        sentence = text[start:stop]
        first = start + len(sentence) - len(sentence.lstrip())
        if first < stop:
            yield first, start + len(sentence.rstrip())
        start = following


@cache
def _piece() -> re.Pattern[str]:
    """Return the pattern of a unit of normalization: a letter and all that may compose with it."""
    return re.compile(f".[{marks()}{_COMPOSED}]*", re.DOTALL)


@cache
def _by_category() -> dict[str, str]:
    """Return marks and format characters as ranges by category; takes 50 ms, not used for ASCII texts."""
    category_ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in ("Mn", "Mc", "Me", "Cf")}
    for code in (0xAD, *range(0x300, 0x20000), *range(0xE0000, 0xE0200)):
        if (ranges := category_ranges.get(unicodedata.category(chr(code)))) is not None:
            first = ranges.pop()[0] if ranges and ranges[-1][1] == code - 1 else code
            ranges.append((first, code))
    return {
        name: "".join(f"{chr(a)}-{chr(b)}" for a, b in ranges) for name, ranges in category_ranges.items()
    }


# --- languages ----------------------------------------------------------------------------------------------

Language = Literal[
    "none", "arabic", "armenian", "basque", "catalan", "czech", "danish", "dutch", "english", "esperanto",
    "estonian", "finnish", "french", "german", "greek", "hindi", "hungarian", "indonesian", "irish",
    "italian", "lithuanian", "nepali", "norwegian", "persian", "polish", "portuguese", "romanian",
    "russian", "serbian", "sesotho", "spanish", "swedish", "tamil", "turkish", "yiddish",
]  # fmt: skip
DETECTED: tuple[Language, ...] = (
    "danish", "dutch", "english", "french", "german", "italian", "norwegian", "portuguese", "russian",
    "spanish", "swedish", "turkish",
)  # fmt: skip
"""Languages with stop words, which :func:`detect` can return."""
FREQUENT_WORDS = 50  # of a sample, among which stop words are counted
MIN_STOP_WORDS = 15  # English documents have 20 to 41; products and documents of other languages at most 7
_of_thread = threading.local()  # a stemmer is not re-entrant


def stems(words: Iterable[str], language: Language) -> list[str]:
    """Return the stems of case-folded words, without the stop words of their language."""
    if language == "none":
        return list(words)
    stop = stop_words(language)
    word_stems: list[str] = _stemmer(language).stemWords([word for word in words if word not in stop])
    return word_stems


def detect(texts: Iterable[Sequence[str]]) -> Language:
    """Detect the language that has the most stop words among the frequent words of texts.

    Each text is given as its words. The result is "none" if fewer than MIN_STOP_WORDS of the FREQUENT_WORDS
    most frequent words are stop words: lists of products, other languages, mixtures of many languages.
    """
    counts = Counter(word for words in texts for word in words)
    frequent = {word for word, _ in counts.most_common(FREQUENT_WORDS)}
    stop_word_counts = {language: len(frequent & stop_words(language)) for language in DETECTED}
    best = max(DETECTED, key=stop_word_counts.__getitem__)
    return best if stop_word_counts[best] >= MIN_STOP_WORDS else "none"


@cache
def stop_words(language: Language) -> frozenset[str]:
    """Return the stop words of a language, case-folded; none for a language without a list."""
    from bm25s import stopwords  # 0.1 to 0.4 s

    name = "EN_PLUS" if language == "english" else language.upper()
    return frozenset(map(fold, getattr(stopwords, f"STOPWORDS_{name}", ())))


def _stemmer(language: Language) -> Any:
    import Stemmer

    stemmers: dict[str, Any] = _of_thread.__dict__
    if language not in stemmers:
        stemmers[language] = Stemmer.Stemmer(language)
    return stemmers[language]
