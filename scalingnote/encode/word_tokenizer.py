"""Token ids of queries, word by word from a cache: most words cost a dictionary lookup.

    text ─► words between spaces ─► cached tokens of each ─► ids, as the tokenizer gives them for the text

BERT's tokenizers never look across a space, and those with byte-level BPE (GPT-2's, Qwen's) read it as the
beginning of the next word: the tokens of a text are those of its words, end to end. A table's new words may
be pairs of words, which are looked up first. If a text may be read in another way (another kind of tokenizer,
white space other than single spaces, a pair of which only a part is in the text), it is tokenized as a whole.
The tokens are the same in every case.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from scalingnote.models.prompt import cut_characters, tokenize

MAX_CACHED_WORDS = 65_536  # cached words, about 15 MB; a full cache is emptied
MAX_CACHED_PAIRS = 262_144  # pairs of adjacent words, about 40 MB; the same
_SEPARATE, _UNKNOWN = -1, -2  # two words are no new word; only the whole text tells
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


class WordTokenizer:
    """A tokenizer with a cache of words and of pairs of words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` must neither pad nor truncate."""
        self._tokenizer = tokenizer
        facts = json.loads(tokenizer.to_str())
        self._markers, self._space = _markers(facts), " " if _is_byte_level(facts) else ""
        self._normalizer = tokenizer.normalizer if _are_normalized(facts) else None
        contents = ((self._form(token["content"]), int(token["id"])) for token in _new_words(facts))
        self._pairs = {content: number for content, number in contents if " " in content}
        self._beginnings = {content.partition(" ")[0] for content in self._pairs}
        self._after: dict[tuple[str, str], int] = {}  # what two adjacent words are together
        self._first: dict[str, list[int]] = {}  # the first word of a text
        self._words: dict[str, list[int]] = {} if self._space else self._first

    def ids(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return the first `max_tokens` token ids of each text, without special tokens."""
        if self._markers is None:
            return [ids[:max_tokens] for ids in tokenize(self._tokenizer, texts, max_tokens)]
        rows: list[list[int]] = []
        others: list[int] = []
        for number, text in enumerate(texts):
            ids = self._of_words(cut_characters(text, max_tokens))
            if ids is None:
                others.append(number)
            rows.append([] if ids is None else ids[:max_tokens])
        if others:
            missing = tokenize(self._tokenizer, [texts[number] for number in others], max_tokens)
            for number, ids in zip(others, missing, strict=True):
                rows[number] = ids[:max_tokens]
        return rows

    def _of_words(self, text: str) -> list[int] | None:
        """Return the ids of all words; None if the text must be tokenized as a whole."""
        # The space is the only printable character that is white space.
        if not text.isprintable() or (self._space and "  " in text):
            return None
        for marker in self._markers or ():
            if marker in text:
                return None
        all_words = text.split(" ")
        cache, space = self._first, ""
        text_ids: list[int] = []
        together = _SEPARATE
        for number, word in enumerate(all_words):
            if together >= 0:  # the pair that ends here is read
                together = _SEPARATE
                continue
            if self._pairs and number + 1 < len(all_words):
                both = (word, all_words[number + 1])
                found = self._after.get(both)
                together = self._learn_pair(both) if found is None else found
                if together == _UNKNOWN:
                    return None
            if together >= 0:
                text_ids.append(together)
            else:
                ids = cache.get(word)
                text_ids += self._learn(cache, word, space) if ids is None else ids
            cache, space = self._words, self._space
        return text_ids

    def _learn(self, words: dict[str, list[int]], word: str, space: str) -> list[int]:
        """Tokenize a word after `space` and cache it in `words`."""
        ids: list[int] = self._tokenizer.encode(space + word, add_special_tokens=False).ids
        if len(word) <= MAX_WORD_CHARACTERS:
            if len(words) >= MAX_CACHED_WORDS:
                words.clear()
            words[word] = ids
        return ids

    def _learn_pair(self, both: tuple[str, str]) -> int:
        """Return and cache the number of the new word that two words are, _SEPARATE, or _UNKNOWN.

        A new word that begins in the first and ends in the second, without being both, is no token if it
        does not stand alone, but no other one can begin inside it; only the tokenizer knows.
        """
        first, second = map(self._form, both)
        found = self._pairs.get(f"{first} {second}", _SEPARATE)
        starts = range(len(first)) if found == _SEPARATE else ()
        for rest in (first[start:] for start in starts):
            if rest in self._beginnings and any(
                f"{rest} {second[:end]}" in self._pairs for end in range(1, len(second) + 1)
            ):
                found = _UNKNOWN
        if " " in first or " " in second:
            found = _UNKNOWN
        if max(map(len, both)) <= MAX_WORD_CHARACTERS:
            if len(self._after) >= MAX_CACHED_PAIRS:
                self._after.clear()
            self._after[both] = found
        return found

    def _form(self, text: str) -> str:
        """Return a text as new words are compared with it."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))


def _new_words(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens that are words."""
    return [token for token in facts["added_tokens"] if token["single_word"]]


def _are_normalized(facts: Mapping[str, Any]) -> bool:
    return any(token["normalized"] for token in _new_words(facts))


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
