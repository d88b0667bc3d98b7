"""Token ids of queries, word by word from a cache: most words cost a dictionary lookup.

    text ─► words between spaces ─► cached tokens of each ─► ids, as the tokenizer gives them for the text

BERT's tokenizers never look across a space, and those with byte-level BPE (GPT-2's, Qwen's) read it as the
beginning of the next word: the tokens of a text are those of its words, end to end. If a text may be read in
another way (another kind of tokenizer, white space other than single spaces), it is tokenized as a whole. The
tokens are the same in every case.

A table's new words may be pairs of words, so that the tokens of a word depend on the next one, and on how far
the one before it reached. The library takes new words from the left, the longest first; one that does not
stand alone is none, but the search goes on behind it: in "of these cells", "of the" hides "these cells".
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from scalingnote.core.words import cut_characters
from scalingnote.models.prompt import tokenize

MAX_CACHED_WORDS = 65_536  # cached words, about 15 MB; a full cache is emptied
MAX_CACHED_PAIRS = 131_072  # words with the next one, about 35 MB; the same
MAX_WORD_CHARACTERS = 40  # longer words are rare and rarely repeated
MAX_MARKERS = 4  # first characters of added tokens; every text is searched for each
_NORMALIZERS = ("BertNormalizer", "Lowercase", "NFD", "NFC", "NFKD", "NFKC", "StripAccents")
_PRE_TOKENIZERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
# Expressions by which byte-level tokenizers split texts besides that of ByteLevel itself: Qwen's and Llama's.
# In all of them a space only begins a piece, unless another white space follows it.
_SPLITS = tuple(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)


class _Step(NamedTuple):
    """Tokens of a word, and `search` and `start` of the next one (:meth:`_NewWordReader.read`)."""

    ids: list[int]
    search: int
    start: int


class WordTokenizer:
    """A tokenizer with a cache of words, and of words with the next one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` must neither pad nor truncate."""
        self._tokenizer = tokenizer
        facts = json.loads(tokenizer.to_str())
        self._markers, self._space = _markers(facts), " " if _is_byte_level(facts) else ""
        self._first: dict[str, list[int]] = {}  # the first word of a text
        self._words: dict[str, list[int]] = {} if self._space else self._first
        self._pairs = _NewWordReader(tokenizer, facts, space=self._space) if _has_pairs(facts) else None
        self._steps: dict[tuple[str, str, int, int, str], _Step | None] = {}

    def ids(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return the first `max_tokens` token ids of each text, without special tokens."""
        if self._markers is None:
            return [ids[:max_tokens] for ids in tokenize(self._tokenizer, texts, max_tokens)]
        read = self._of_words if self._pairs is None else self._of_pairs
        rows: list[list[int]] = []
        others: list[int] = []
        for number, text in enumerate(texts):
            beginning = cut_characters(text, max_tokens)
            ids = read(beginning) if self._has_words(beginning) else None
            if ids is None:
                others.append(number)
            rows.append([] if ids is None else ids[:max_tokens])
        if others:
            missing = tokenize(self._tokenizer, [texts[number] for number in others], max_tokens)
            for number, ids in zip(others, missing, strict=True):
                rows[number] = ids[:max_tokens]
        return rows

    def _has_words(self, text: str) -> bool:
        """Whether a text is words with single spaces and without markers."""
        # The space is the only printable character that is white space.
        if not text.isprintable() or (self._space and "  " in text):
            return False
        return not any(marker in text for marker in self._markers or ())

    def _of_words(self, text: str) -> list[int]:
        """Return the ids of all words, one by one."""
        first, *others = text.split(" ")
        ids = self._first.get(first)
        text_ids = list(self._learn(self._first, first, "") if ids is None else ids)
        words = self._words
        for word in others:
            ids = words.get(word)
            text_ids += self._learn(words, word, self._space) if ids is None else ids
        return text_ids

    def _learn(self, words: dict[str, list[int]], word: str, space: str) -> list[int]:
        """Tokenize a word after `space` and cache it in `words`."""
        ids: list[int] = self._tokenizer.encode(space + word, add_special_tokens=False).ids
        if len(word) <= MAX_WORD_CHARACTERS:
            if len(words) >= MAX_CACHED_WORDS:
                words.clear()
            words[word] = ids
        return ids

    def _of_pairs(self, text: str) -> list[int] | None:
        """Return the ids of all words, each with the next one; None if the text must be read as a whole."""
        words = text.split(" ")
        text_ids: list[int] = []
        search = start = 0
        space = ""
        for word, following in zip(words, [*words[1:], ""], strict=True):
            key = (word, following, search, start, space)
            step = self._steps.get(key, _NEW)
            if step is _NEW:
                step = self._learn_step(key)
            if step is None:
                return None
            ids, search, start = step
            text_ids += ids
            space = self._space
        return text_ids

    def _learn_step(self, key: tuple[str, str, int, int, str]) -> _Step | None:
        """Read a word with the next one and cache what it is; None also if one of them is long."""
        assert self._pairs is not None
        if max(len(key[0]), len(key[1])) > MAX_WORD_CHARACTERS:
            return None
        step = self._pairs.read(*key)
        if len(self._steps) >= MAX_CACHED_PAIRS:
            self._steps.clear()
        self._steps[key] = step
        return step


_NEW: Any = object()  # no step, nor None
_UNKNOWN = -1  # two new words that are equal once they are normalised: the library has either


class _Word(NamedTuple):
    """A word as new words are compared with it, its tokens without new words, and where these may begin.

    `starts` are pairs of that place and of the end of the longest new word within the word, or 0.
    """

    form: str
    ids: list[int]
    starts: list[tuple[int, int]]


class _NewWordReader:
    """Finds new words in a word and the next one, as the library finds them in a text."""

    def __init__(self, tokenizer: Tokenizer, facts: Mapping[str, Any], *, space: str) -> None:
        """`space` is what stands before a word of a text but the first, for the tokenizer."""
        new, self._space = _new_words(facts), space
        self._normalizer = tokenizer.normalizer if any(token["normalized"] for token in new) else None
        self._numbers: dict[str, int] = {}
        for token in new:
            form = self._form(token["content"])
            self._numbers[form] = _UNKNOWN if form in self._numbers else int(token["id"])
        self._longest = max(map(len, self._numbers))
        self._begin_pairs = {content.partition(" ")[0] for content in self._numbers if " " in content}
        others = [token for token in facts["added_tokens"] if not token["single_word"]]
        self._plain = Tokenizer.from_str(json.dumps({**facts, "added_tokens": others}))
        self._words: dict[tuple[str, str], _Word] = {}

    def read(self, word: str, following: str, search: int, start: int, space: str) -> _Step | None:
        """Return what a word is, None if only the library can tell.

        Args:
            word: a word of the text.
            following: the next one, empty for the last.
            search: from which character of `word` on new words are searched.
            start: from which one on it is not part of a new word that was found before.
            space: what stands before the word.
        """
        form, plain, starts = self._word(word, space)
        after = self._word(following, self._space).form if following else ""
        if " " in form or " " in after:
            return None
        both, ids = f"{form} {after}", list[int]()
        for at, inner_end in starts:
            end = 0 if at < search else self._pair_end(both, at, len(form)) or inner_end
            if not end:
                continue
            alone, number = _stands_alone(both, at, end), self._numbers[both[at:end]]
            if alone is None or number == _UNKNOWN:
                return None
            if alone:
                ids += [*self._ids(form, start, at, space), number]
                start = end
            search = end
        if start == 0:
            ids = plain
        elif start < len(form):
            ids += self._ids(form, start, len(form), space)
        next_word = len(form) + 1
        return _Step(ids, max(search - next_word, 0), max(start - next_word, 0))

    def _word(self, word: str, space: str) -> _Word:
        """Return a word from the cache."""
        known = self._words.get((word, space))
        if known is None:
            form = self._form(word)
            ids: list[int] = self._plain.encode(space + word, add_special_tokens=False).ids
            known = _Word(form, ids, self._starts(form))
            if len(self._words) >= MAX_CACHED_WORDS:
                self._words.clear()
            self._words[word, space] = known
        return known

    def _starts(self, form: str) -> list[tuple[int, int]]:
        """Return `starts` of :class:`_Word`."""
        starts = []
        for at in range(len(form)):
            ends = range(min(at + self._longest, len(form)), at, -1)
            end = next((end for end in ends if form[at:end] in self._numbers), 0)
            if end or form[at:] in self._begin_pairs:
                starts.append((at, end))
        return starts

    def _pair_end(self, both: str, at: int, space: int) -> int:
        """Return where the longest pair that begins at `at` ends, or 0; `space` is between the words."""
        if both[at:space] not in self._begin_pairs:
            return 0
        return next((end for end in range(len(both), space + 1, -1) if both[at:end] in self._numbers), 0)

    def _ids(self, form: str, start: int, end: int, space: str) -> list[int]:
        """Return the tokens of a part of a word in which there is no new word."""
        if start == end:
            return []
        text = form[start:end] if start else space + form[:end]
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def _form(self, text: str) -> str:
        """Return a text as new words are compared with it."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))


def _stands_alone(text: str, start: int, end: int) -> bool | None:
    """Whether no word character is beside a part of a text; None if one may or may not be."""
    beside = [text[place] for place in (start - 1, end) if 0 <= place < len(text)]
    kinds = [unicodedata.category(character) for character in beside]
    if any(kind[0] in "LM" or kind in ("Nd", "Pc") for kind in kinds):
        return False
    return None if any(kind in ("Nl", "No", "So", "Cf") for kind in kinds) else True


def _has_pairs(facts: Mapping[str, Any]) -> bool:
    return any(" " in token["content"] for token in _new_words(facts))


def _new_words(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens that are words."""
    return [token for token in facts["added_tokens"] if token["single_word"]]


def _markers(facts: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the first characters of added tokens other than words; None if words are not read separately."""
    normalizer, pre_tokenizer = facts["normalizer"], facts["pre_tokenizer"]
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    word_piece = (
        facts["model"]["type"] == "WordPiece" and (pre_tokenizer or {}).get("type") in _PRE_TOKENIZERS
    )
    if not (word_piece or _is_byte_level(facts)) or any(step["type"] not in _NORMALIZERS for step in steps):
        return None
    new = _new_words(facts)
    if len({token["normalized"] for token in new}) > 1 or any(
        token["content"].count(" ") > 1 for token in new
    ):
        return None
    markers = {token["content"][0] for token in facts["added_tokens"] if not token["single_word"]}
    markers |= {character for marker in markers for character in (marker.lower(), marker.upper())}
    plain = all(len(marker) == 1 and not marker.isalnum() for marker in markers)
    return tuple(sorted(markers)) if plain and len(markers) <= MAX_MARKERS else None


def _is_byte_level(facts: dict[str, Any]) -> bool:
    """Return whether the tokenizer is byte-level BPE that splits texts before single spaces."""
    pre_tokenizer, model = facts["pre_tokenizer"] or {}, facts["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return False
    splits_at_spaces = False
    for step in pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        pattern = step.get("pattern", {})
        match step.get("type"):
            case "ByteLevel" if not step["add_prefix_space"]:
                splits_at_spaces |= step["use_regex"]
            case "Split" if pattern.get("Regex") in _SPLITS and step["behavior"] == "Isolated":
                splits_at_spaces = True
            case "Split" if " " not in pattern.get("String", " ") and not step["invert"]:
                pass
            case _:
                return False
    return splits_at_spaces
