"""Draw pseudo-queries from one document: the same texts on every machine for one seed.

    document -> units (words; Chinese and Japanese characters) -> title, sentence, window, question, passage

A window is what a keyword query looks like, a sentence what a long one does; titles hold the words that name
a document. The shares come from an ablation on three collections (docs/distillation.md).
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import regex  # type: ignore[import-untyped]

from scalingnote.pseudo_queries.config import Kind, PseudoQueriesConfig

MAX_CHARACTERS = 2048  # of a text without spaces, which would be one unit
_UNIT = regex.compile(
    r"(?:[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|[^\s\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]+)\s*"
)
_SENTENCE_END = regex.compile(r"(?<=[。！？])|(?<=[.!?])\s|\n")
_LATIN = regex.compile(r"[a-z]", regex.IGNORECASE)
# Frequent openings of English web questions; {} takes a window.
QUESTIONS = (
    "what is {}",
    "what are {}",
    "what does {} mean",
    "how to {}",
    "how do I {}",
    "how does {} work",
    "how can {}",
    "can I {}",
    "can {}",
    "is {}",
    "are {}",
    "do {}",
    "does {}",
    "should I {}",
    "when {}",
    "where {}",
    "who {}",
    "why {}",
    "which {}",
    "what happens if {}",
)
Role = Literal["query", "document"]


@dataclass(frozen=True)
class Document:
    """What texts are drawn from; `key` seeds the draws."""

    key: int
    title: str
    content: str


@dataclass(frozen=True)
class PseudoQuery:
    """A text and the role in which the teacher encodes it."""

    text: str
    role: Role = "query"


def draw(
    document: Document, config: PseudoQueriesConfig, *, per_document: float | None
) -> Iterator[PseudoQuery]:
    """The pseudo-queries of a document.

    Args:
        document: a text without sentence or title gives fewer texts, an empty one gives none.
        config: kinds, their shares and lengths.
        per_document: expected number of draws, in whole numbers and one more by chance; None draws one text
            of each kind.
    """
    rng = random.Random(document.key ^ config.seed * 0x9E3779B97F4A7C15)
    kinds: list[Kind] = list(config.mix)
    if per_document is not None:
        count = int(per_document) + (rng.random() < per_document % 1)
        kinds = rng.choices(kinds, list(config.mix.values()), k=count)
    parts = _Parts.of(document)
    for kind in kinds:
        text = _DRAWS[kind](parts, config, rng)
        if text:
            yield PseudoQuery(text, "document" if kind == "passage" else "query")


@dataclass(frozen=True)
class _Parts:
    """A document, cut once for all of its draws."""

    title: str
    sentences: list[str]
    content: str
    words: list[list[str]]
    """Units of the title and of each sentence, those without any left out."""

    @classmethod
    def of(cls, document: Document) -> "_Parts":
        sentences = [text for piece in _SENTENCE_END.split(document.content) if (text := piece.strip())]
        words = [found for text in (document.title, *sentences) if (found := units(text))]
        return cls(document.title.strip(), sentences, document.content, words)


def units(text: str) -> list[str]:
    """Words with the space behind them; of scripts without spaces, characters."""
    return [unit[:MAX_CHARACTERS] for unit in _UNIT.findall(text)]


def cut(text: str, words: int) -> str:
    """The first `words` units of a text."""
    found = units(text)
    return text.strip() if len(found) <= words else "".join(found[:words]).strip()


def _title(parts: _Parts, config: PseudoQueriesConfig, _: random.Random) -> str:
    return cut(parts.title, config.max_words)


def _first_sentence(parts: _Parts, config: PseudoQueriesConfig, _: random.Random) -> str:
    return cut(parts.sentences[0], config.max_words) if parts.sentences else ""


def _sentence(parts: _Parts, config: PseudoQueriesConfig, rng: random.Random) -> str:
    return cut(rng.choice(parts.sentences), config.max_words) if parts.sentences else ""


def _window(parts: _Parts, config: PseudoQueriesConfig, rng: random.Random) -> str:
    """Consecutive units of one sentence or of the title; sentences are drawn by their length."""
    if not parts.words:
        return ""
    sentence = rng.choices(parts.words, [len(words) for words in parts.words])[0]
    least, most = config.window_words
    length = min(rng.randint(least, most), len(sentence))
    start = rng.randint(0, len(sentence) - length)
    return "".join(sentence[start : start + length]).strip()


def _question(parts: _Parts, config: PseudoQueriesConfig, rng: random.Random) -> str:
    window = _window(parts, config, rng).strip(" .,;:!?")
    if not _LATIN.search(window):  # the templates are English
        return window
    return rng.choice(QUESTIONS).format(window) + rng.choice(("", "?"))


def _passage(parts: _Parts, config: PseudoQueriesConfig, _: random.Random) -> str:
    return cut(parts.content, config.passage_words)


_DRAWS: Mapping[Kind, Callable[[_Parts, PseudoQueriesConfig, random.Random], str]] = {
    "title": _title,
    "first_sentence": _first_sentence,
    "sentence": _sentence,
    "window": _window,
    "question": _question,
    "passage": _passage,
}
