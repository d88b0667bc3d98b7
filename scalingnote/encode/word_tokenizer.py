"""Token ids of queries, word by word from a cache: most words cost a dictionary lookup.

    text ─► words between spaces ─► runs that no new word leaves ─► cached tokens of each ─► ids

BERT's tokenizers never look across a space, and those with byte-level BPE (GPT-2's, Qwen's) read it as the
beginning of the next word: the tokens of a text are those of its words, end to end. A table's new words may
be pairs of words: words that one of them may join are read together, as a *run*. If a text may be read in
another way (another kind of tokenizer, white space other than single spaces), it is tokenized as a whole. The
tokens are the same in every case.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from scalingnote.models.prompt import cut_characters, tokenize

MAX_CACHED_WORDS = 65_536  # and runs of words, about 15 MB; a full cache is emptied
MAX_RUN_CHARACTERS = 40  # longer runs are rare and rarely repeated
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
    """A tokenizer with a cache of runs of words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` must neither pad nor truncate."""
        self._tokenizer = tokenizer
        facts = json.loads(tokenizer.to_str())
        self._markers, self._space = _markers(facts), " " if _is_byte_level(facts) else ""
        self._first: dict[str, list[int]] = {}  # the first run of a text
        self._others: dict[str, list[int]] = {} if self._space else self._first
        new = [token for token in facts["added_tokens"] if token["single_word"]]
        self._normalizer = tokenizer.normalizer if any(token["normalized"] for token in new) else None
        self._pairs: dict[str, list[str]] = {}  # first words of new words -> the second ones
        for token in new:
            first, *others = self._normalize(token["content"]).split(" ")
            if others:
                self._pairs.setdefault(first, []).append(others[0])
            if len(others) > 1 or token["normalized"] != new[0]["normalized"]:
                self._markers = None
        self._form = lru_cache(MAX_CACHED_WORDS)(self._normalize)
        self._seconds_after = lru_cache(MAX_CACHED_WORDS)(self._find_seconds)

    def ids(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return the first `max_tokens` token ids of each text, without special tokens."""
        if self._markers is None:
            return [ids[:max_tokens] for ids in tokenize(self._tokenizer, texts, max_tokens)]
        rows: list[list[int]] = []
        others: list[int] = []
        for number, text in enumerate(texts):
            beginning = cut_characters(text, max_tokens)
            has_words = self._has_words(beginning)
            if not has_words:
                others.append(number)
            rows.append(self._of_runs(beginning)[:max_tokens] if has_words else [])
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

    def _of_runs(self, text: str) -> list[int]:
        """Return the ids of all runs, one by one."""
        first, *others = self._runs(text) if self._pairs else text.split(" ")
        ids = self._first.get(first)
        text_ids = list(self._learn(self._first, first, "") if ids is None else ids)
        runs = self._others
        for run in others:
            ids = runs.get(run)
            text_ids += self._learn(runs, run, self._space) if ids is None else ids
        return text_ids

    def _learn(self, runs: dict[str, list[int]], run: str, space: str) -> list[int]:
        """Tokenize a run after `space` and cache it in `runs`."""
        ids: list[int] = self._tokenizer.encode(space + run, add_special_tokens=False).ids
        if len(run) <= MAX_RUN_CHARACTERS:
            if len(runs) >= MAX_CACHED_WORDS:
                runs.clear()
            runs[run] = ids
        return ids

    def _runs(self, text: str) -> list[str]:
        """Divide a text at the spaces that are in no new word.

        A new word may begin in a word and end in the next one. The library may find none there: it takes new
        words from the left, and only those that stand alone.
        """
        words = text.split(" ")
        runs = words[:1]
        for word, following in pairwise(words):
            seconds = self._seconds_after(word)
            if seconds and self._form(following).startswith(seconds):
                runs[-1] += f" {following}"
            else:
                runs.append(following)
        return runs

    def _find_seconds(self, word: str) -> tuple[str, ...]:
        """Second words of all pairs whose first one may end a word."""
        form = self._form(word)
        ends = (form[at:] for at in range(len(form) + 1))
        return tuple(second for end in ends for second in self._pairs.get(end, ()))

    def _normalize(self, text: str) -> str:
        """Return a text as new words are compared with it."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))


def _markers(facts: dict[str, Any]) -> tuple[str, ...] | None:
    """Return the first characters of added tokens other than words; None if words are not read separately."""
    normalizer, pre_tokenizer = facts["normalizer"], facts["pre_tokenizer"]
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    word_piece = (
        facts["model"]["type"] == "WordPiece" and (pre_tokenizer or {}).get("type") in _PRE_TOKENIZERS
    )
    if not (word_piece or _is_byte_level(facts)) or any(step["type"] not in _NORMALIZERS for step in steps):
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
