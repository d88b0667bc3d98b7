"""Tokenize word by word, each word once: a query costs a dictionary lookup per word instead of a tokenizer.

    "how do I rotate a key"  ->  ids("how") + ids("do") + ... , each remembered from its first occurrence

A BERT tokenizer never looks across a space, so the tokens of a text are those of its words, laid end to
end. Where that does not hold (another tokenizer, an added token in the text, white space other than the
space), the text goes to the tokenizer itself: the tokens are the same in every case.
"""

import json
from collections.abc import Sequence

from tokenizers import Tokenizer

from scalingnote.models.prompt import cut_characters, tokenize

MAX_WORDS = 65_536  # remembered, about 15 MB; when it is full, the dictionary starts empty again
MAX_WORD_CHARACTERS = 40  # longer ones are rare and rarely the same
MAX_MARKERS = 4  # first characters of added tokens; each is looked for in every text
_NORMALIZERS = ("BertNormalizer", "Lowercase", "NFD", "NFC", "NFKD", "NFKC", "StripAccents")
_PRE_TOKENIZERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")


class WordTokenizer:
    """A tokenizer with the words it has seen."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` must neither pad nor truncate."""
        self._tokenizer = tokenizer
        self._words: dict[str, list[int]] = {}
        self._markers = _markers(json.loads(tokenizer.to_str()))

    def ids(self, texts: Sequence[str], room: int) -> list[list[int]]:
        """Token ids of each text, without special tokens.

        Args:
            texts: any number of texts.
            room: largest number of ids of a text.

        Returns:
            For each text its first `room` ids.
        """
        if self._markers is None:
            return [ids[:room] for ids in tokenize(self._tokenizer, texts, room)]
        found: list[list[int]] = []
        others: list[int] = []
        for number, text in enumerate(texts):
            ids = self._of_words(cut_characters(text, room))
            if ids is None:
                others.append(number)
            found.append([] if ids is None else ids[:room])
        if others:
            missing = tokenize(self._tokenizer, [texts[number] for number in others], room)
            for number, ids in zip(others, missing, strict=True):
                found[number] = ids[:room]
        return found

    def _of_words(self, text: str) -> list[int] | None:
        """Ids from those of the words; None: the text must be tokenized as a whole."""
        # Of the printable characters, the space alone is white space.
        if not text.isprintable():
            return None
        for marker in self._markers or ():
            if marker in text:
                return None
        found: list[int] = []
        words = self._words
        for word in text.split(" "):
            ids = words.get(word)
            if ids is None:
                ids = self._tokenizer.encode(word, add_special_tokens=False).ids
                if len(word) <= MAX_WORD_CHARACTERS:
                    if len(words) >= MAX_WORDS:
                        words.clear()
                    words[word] = ids
            found += ids
        return found


def _markers(facts: dict) -> tuple[str, ...] | None:  # type: ignore[type-arg]  # JSON of a tokenizer
    """Characters that every added token has one of at its start; None: words cannot be tokenized alone."""
    normalizer = facts["normalizer"]
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    pre_tokenizer = facts["pre_tokenizer"]
    if (
        facts["model"]["type"] != "WordPiece"
        or pre_tokenizer is None
        or pre_tokenizer["type"] not in _PRE_TOKENIZERS
        or any(step["type"] not in _NORMALIZERS for step in steps)
    ):
        return None
    markers = {token["content"][0] for token in facts["added_tokens"]}
    markers |= {character for marker in markers for character in (marker.lower(), marker.upper())}
    plain = all(len(marker) == 1 and not marker.isalnum() for marker in markers)
    return tuple(sorted(markers)) if plain and len(markers) <= MAX_MARKERS else None
