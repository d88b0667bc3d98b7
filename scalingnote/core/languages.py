"""Words of a language for BM25: stop words are left out, the others become stems.

Stems are Snowball's ("installs", "installing" and "installed" are one word), stop words those of NLTK, which
bm25s brings for 12 of the languages. A language without a stemmer, Chinese or Japanese, is "none": its
words are compared as they are written. Documents and queries of one index need the same language.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal

from scalingnote.core.words import fold

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
"""Languages with stop words, which :func:`detect` knows."""
FREQUENT_WORDS = 50  # of a sample, among which stop words are counted
MIN_STOP_WORDS = 15  # English documents have 20 to 41, products and other languages' at most 7
_of_thread = threading.local()  # a stemmer is not re-entrant


def stems(words: Iterable[str], language: Language) -> list[str]:
    """The stems of words, case-folded ones, without the stop words of their language."""
    if language == "none":
        return list(words)
    stop = stop_words(language)
    found: list[str] = _stemmer(language).stemWords([word for word in words if word not in stop])
    return found


def detect(texts: Iterable[Sequence[str]]) -> Language:
    """The language of which most stop words are among the most frequent words of texts, given as words.

    "none" where fewer than MIN_STOP_WORDS of the FREQUENT_WORDS most frequent words are such: in lists of
    products, in other languages, in mixtures of many.
    """
    counts = Counter(word for words in texts for word in words)
    frequent = {word for word, _ in counts.most_common(FREQUENT_WORDS)}
    found = {language: len(frequent & stop_words(language)) for language in DETECTED}
    best = max(DETECTED, key=found.__getitem__)
    return best if found[best] >= MIN_STOP_WORDS else "none"


@cache
def stop_words(language: Language) -> frozenset[str]:
    """Words that say little about a text, case-folded; none of a language without a list."""
    from bm25s import stopwords  # 0.1 to 0.4 s

    name = "EN_PLUS" if language == "english" else language.upper()
    return frozenset(map(fold, getattr(stopwords, f"STOPWORDS_{name}", ())))


def _stemmer(language: Language) -> Any:
    import Stemmer

    made: dict[str, Any] = _of_thread.__dict__
    if language not in made:
        made[language] = Stemmer.Stemmer(language)
    return made[language]
