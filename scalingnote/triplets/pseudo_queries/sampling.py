"""Draws of pseudo-queries from one document, the same texts on every machine for one seed.

    document -> units (words; up to two characters in scripts without spaces) -> title, window, question...

Phrases and keywords resemble short queries, windows and sentences long ones. Questions, in English and
Chinese, have words that documents lack ("how", "can I").
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from scalingnote.core.words import HAN, SENTENCE_END, UNSPACED, fold, marks
from scalingnote.triplets.config import PseudoQueriesConfig, TextKind

MAX_UNIT_CHARACTERS = 2048  # limit for texts without spaces, which are one unit
_HAN = re.compile(f"[{HAN}]")
_LATIN = re.compile(r"[A-Za-z]")
_SPACE = re.compile(r"\s+")
_CLAUSE_END = re.compile(r"[,;:()\[\].!?，。；：！？]+(?:\s+|$)")
WINDOW_WORDS = (2, 16)  # minimum and maximum
MAX_SENTENCE_WORDS = 32  # of a title or sentence; the rest is cut
_PHRASE_WORDS = (1, 8)  # minimum and maximum, before function words at the ends are removed
_KEYWORDS = (2, 8)
_KEYWORD_SPAN = 60  # consecutive content words of a document that keywords are drawn from
_LOWER_CASE_SHARE = 0.3  # of windows, sentences and phrases: users rarely write capitals
_FOLDER = resources.files("scalingnote.triplets.pseudo_queries")
ENGLISH_TEMPLATES, CHINESE_TEMPLATES = (
    (_FOLDER / f"questions_{language}.txt").read_text(encoding="utf-8").splitlines()
    for language in ("en", "zh")
)  # templates of questions; a phrase replaces {}
FUNCTION_WORDS = frozenset((_FOLDER / "function_words.txt").read_text().split())


def draw(
    key: int, title: str, content: str, config: PseudoQueriesConfig, *, per_document: float | None
) -> Iterator[str]:
    """Draw the pseudo-queries of a document.

    Args:
        key: seed of the draws, together with the config's seed.
        title: may be empty.
        content: fewer texts are drawn from one without sentences, and none from an empty document.
        config: kinds and their shares.
        per_document: expected number of draws: its integer part, and one more with the probability of its
            fraction; None: one text of each kind.
    """
    rng = random.Random(key ^ config.seed * 0x9E3779B97F4A7C15)
    kinds: list[TextKind] = list(config.mix)
    if per_document is not None:
        count = int(per_document) + (rng.random() < per_document % 1)
        kinds = rng.choices(kinds, list(config.mix.values()), k=count)
    sentences = [text for piece in SENTENCE_END.split(content) if (text := piece.strip())]
    words = [unit for text in (title, *sentences) if (unit := units(text))]
    parts = _Parts(title.strip(), sentences, words)
    for kind in kinds:
        text = _SPACE.sub(" ", _DRAWS[kind](parts, rng)).strip()
        if kind in _CASE_VARIES and rng.random() < _LOWER_CASE_SHARE:
            text = text.lower()
        if text:
            yield text


@dataclass(frozen=True)
class _Parts:
    """A document, split once for all draws."""

    title: str
    sentences: list[str]
    words: list[list[str]]  # units of the title and of each sentence; empty lists are left out


def _by_length(choices: list[list[str]], rng: random.Random) -> list[str]:
    """Draw one of some lists, with a probability by its length; return an empty list if there are none."""
    return rng.choices(choices, [len(words) for words in choices])[0] if choices else []


def units(text: str) -> list[str]:
    """Split a text into words with the space after them, or characters in scripts without spaces."""
    return [unit[:MAX_UNIT_CHARACTERS] for unit in _unit().findall(text)]


@cache
def _unit() -> re.Pattern[str]:
    # A Chinese word has between one and two characters on average.
    return re.compile(rf"(?:(?:[{UNSPACED}][{marks()}]*){{1,2}}|[^\s{UNSPACED}]+)\s*")


@cache
def _word() -> re.Pattern[str]:
    return re.compile(rf"\w[\w{marks()}'-]*")


@cache
def _edge() -> re.Pattern[str]:
    """Return the pattern of characters that are not part of a word, at both ends of a text."""
    return re.compile(rf"^[^\w{marks()}]+|[^\w{marks()}]+$")


def cut(text: str, words: int) -> str:
    """Cut a text to its first `words` units."""
    all_units = units(text)
    return text.strip() if len(all_units) <= words else "".join(all_units[:words]).strip()


def _title(parts: _Parts, _: random.Random) -> str:
    return cut(parts.title, MAX_SENTENCE_WORDS)


def _first_sentence(parts: _Parts, _: random.Random) -> str:
    return cut(parts.sentences[0], MAX_SENTENCE_WORDS) if parts.sentences else ""


def _sentence(parts: _Parts, rng: random.Random) -> str:
    return cut(rng.choice(parts.sentences), MAX_SENTENCE_WORDS) if parts.sentences else ""


def _window(parts: _Parts, rng: random.Random) -> str:
    """Draw consecutive units of the title or of one sentence, with a probability by its length."""
    return "".join(_some_words(_by_length(parts.words, rng), WINDOW_WORDS, rng)).strip()


def _some_words(words: list[str], bounds: tuple[int, int], rng: random.Random) -> list[str]:
    """Draw consecutive words, their number between two bounds; none if there are no words."""
    if not words:
        return []
    length = min(rng.randint(*bounds), len(words))
    start = rng.randint(0, len(words) - length)
    return words[start : start + length]


def _title_window(parts: _Parts, rng: random.Random) -> str:
    """Draw part of the title and a short window, in either order."""
    words = units(parts.title)[: rng.randint(2, 10)]
    window = cut(_window(parts, rng), 8)
    pieces = ["".join(words).strip(), window]
    return " ".join(pieces if rng.random() < 0.6 else pieces[::-1]).strip()


def _phrase(parts: _Parts, rng: random.Random) -> str:
    """Draw consecutive words of one clause, without function words at both ends."""
    sentence = "".join(_by_length(parts.words, rng))
    clauses = [words for clause in _CLAUSE_END.split(sentence) if (words := units(clause))]
    words = _some_words(_by_length(clauses, rng), _PHRASE_WORDS, rng)
    content = [place for place, word in enumerate(words) if not _is_function_word(word)]
    return "".join(words[content[0] : content[-1] + 1]).strip() if content else ""


def _keywords(parts: _Parts, rng: random.Random) -> str:
    """Draw content words of a section of the document, in their order, longer words more often."""
    words = [word for sentence in parts.words for unit in sentence for word in _word().findall(unit)]
    words = [word for word in words if len(word) > 1 and fold(word) not in FUNCTION_WORDS]
    if not words:
        return ""
    start = rng.randrange(len(words))
    words = words[start : start + _KEYWORD_SPAN]
    count = min(rng.randint(*_KEYWORDS), len(words))
    # Weighted sampling without replacement (Efraimidis and Spirakis 2006).
    ranks = sorted(range(len(words)), key=lambda i: rng.random() ** (1 / len(words[i])))
    return " ".join(words[i] for i in sorted(ranks[-count:])).lower()


def _question(parts: _Parts, rng: random.Random) -> str:
    """Draw a phrase in a template of its language, or only the phrase if its language has no templates."""
    template = rng.choice(ENGLISH_TEMPLATES)  # the pieces that are drawn for it determine the language
    pieces = [_question_piece(parts, rng) for _ in range(template.count("{}"))]
    chinese = [bool(_HAN.search(piece)) for piece in pieces]
    if not any(chinese) and all(map(_LATIN.search, pieces)):
        text = template.format(*pieces)
        if rng.random() < 0.5:
            text = text[0].upper() + text[1:]
        return text + rng.choice(("", "?"))
    if not all(chinese):
        return pieces[0]
    template = rng.choice(CHINESE_TEMPLATES)
    pieces += [_question_piece(parts, rng) for _ in range(template.count("{}") - len(pieces))]
    return template.format(*pieces) + rng.choice(("", "？"))


def _question_piece(parts: _Parts, rng: random.Random) -> str:
    """Draw the text for a template: a phrase, sometimes a window or the beginning of the title."""
    chance = rng.random()
    if chance < 0.15 and parts.title:
        text = cut(parts.title, rng.randint(2, 8))
    elif chance < 0.35:
        text = cut(_window(parts, rng), 10)
    else:
        text = _phrase(parts, rng) or _window(parts, rng)
    return _edge().sub("", text)


def _is_function_word(unit: str) -> bool:
    return fold(_edge().sub("", unit)) in FUNCTION_WORDS


_CASE_VARIES = frozenset(("sentence", "window", "title_window", "phrase"))
_DRAWS: Mapping[TextKind, Callable[[_Parts, random.Random], str]] = {
    "title": _title,
    "first_sentence": _first_sentence,
    "sentence": _sentence,
    "window": _window,
    "title_window": _title_window,
    "phrase": _phrase,
    "keywords": _keywords,
    "question": _question,
}
