"""Encoding of queries by a lookup table: cached words, memory-mapped table, numpy. torch is never imported.

    text ─► words between spaces ─► runs (a new word is inside one run) ─► cached tokens of each ─► ids
    ids of one query     its rows are taken, one vector-matrix product
    ids of a batch       the rows of 16 queries are taken at once, one product per query

BERT's tokenizers never join text across a space, and those with byte-level BPE (GPT-2's, Qwen's) read it as
the beginning of the next word: the tokens of a text are the concatenated tokens of its words. A table's new
words may be pairs of words: words that may be joined are tokenized together, as a *run*. If a text may be
tokenized differently (another kind of tokenizer, white space other than single spaces), it is not divided.
The tokens are the same in every case. The tokenizer takes 10 to 30 us for a query, or 2 us for cached words.

float16 rows are converted to float32 by shifts of their bits (:func:`_widen`), because numpy's conversion
takes longer than all other work. Measured per query without the tokenizer, one thread, 32,000 rows of 384 in
float16, 8 tokens: 7 us for a single query (10 with numpy's conversion), 2.6 us in batches of 64 and 1,024. In
batches torch's EmbeddingBag takes 1.4 us, with sums rounded to float16, and 2.8 us with learned weights.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from tokenizers import Tokenizer

from scalingnote.core.array_types import Float32, Int16, Int64
from scalingnote.core.words import cut_characters
from scalingnote.models.lookup_table import read_table
from scalingnote.models.prompt import tokenize, without_limits

_BATCH_QUERIES = 16  # their rows fit in a core's cache (18 tokens of 384 dimensions: 440 KB)
_MAX_CACHED_SHARES = 128  # for queries of fewer tokens, arrays of equal shares are made only once
_WIDENED_SCALE = np.float32(2.0**112)  # the exponents of float16 are biased by 15, those of float32 by 127
_WIDENED_BITS = np.int32(-0x70002000)  # 0x8fffe000: the sign, 5 bits of the exponent, 10 of the mantissa


class LookupEncoder:
    """A lookup table, ready to encode queries."""

    def __init__(self, folder: Path) -> None:
        """Open a table.

        Args:
            folder: a folder written by :meth:`Table.write`, or a published one with a table for queries.

        Raises:
            ArtifactError: `folder` has no table.
            ConfigError: its table cannot be read by itself (:func:`lookup_table.read_published`).
        """
        self._table = table = read_table(folder)
        self._tokenizer = WordTokenizer(without_limits(Tokenizer.from_str(table.tokenizer_json)))
        self.dim, self.max_tokens = table.values.shape[1], table.max_length
        # The plain array of the memory map, because every slice of np.memmap creates another np.memmap.
        self._values, self._scales = np.asarray(table.values), table.scales
        self._weights, self._features = table.token_weights, table.features
        self._halves: ndarray | None = None
        self._unit = np.float32(1)  # factor that `_look_up` leaves to the caller
        if self._values.dtype == np.float16:
            self._halves, self._unit = self._values.view(np.int16), _WIDENED_SCALE
        self._equal = [np.full(n, self._unit / max(n, 1), np.float32) for n in range(_MAX_CACHED_SHARES)]
        self._empty: ndarray | None = table.empty
        self._attention: tuple[ndarray, ndarray] | None = None
        if table.attention is not None:
            self._attention = (table.attention[0] / np.sqrt(np.float32(self.dim)), table.attention[1])

    def encode(self, queries: Sequence[str]) -> Float32[ndarray, "queries dim"]:
        """Encode one or more queries, without normalisation."""
        return self._encode(self._tokenizer.ids(queries, self.max_tokens))

    def encode_token_ids(self, queries: Sequence[Sequence[int]]) -> Float32[ndarray, "queries dim"]:
        """Encode queries from their token ids, without normalisation; the first `max_tokens` ids are read."""
        return self._encode([list(ids[: self.max_tokens]) for ids in queries])

    def _encode(self, rows: list[list[int]]) -> Float32[ndarray, "queries dim"]:
        if self._features is not None:
            rows = [self._features.extend(ids) for ids in rows]
        if len(rows) == 1:
            return self._one(rows[0])[np.newaxis]
        if self._attention is not None:
            return np.stack([self._one(ids) for ids in rows])
        return self._batch(rows)

    def _one(self, ids: list[int]) -> Float32[ndarray, " dim"]:
        if not ids:
            return self._mean_row()
        numbers = np.array(ids)
        shares = self._shares(numbers)
        if self._attention is not None:
            rows = self._rows(numbers)
            shares = shares / self._unit
            attended: ndarray = shares @ rows + _attend(rows, shares, *self._attention)
            return attended
        if self._scales is not None:
            shares = shares * self._scales[numbers]
        mean: ndarray = shares @ self._look_up(numbers)
        return mean

    def _batch(self, rows: Sequence[list[int]]) -> Float32[ndarray, "queries dim"]:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        numbers = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
        shares = self._batch_shares(numbers, lengths)
        ends = [0, *lengths.cumsum().tolist()]
        means = np.zeros((len(rows), self.dim), np.float32)
        for first in range(0, len(rows), _BATCH_QUERIES):
            last = min(first + _BATCH_QUERIES, len(rows))
            offset = ends[first]
            values = self._look_up(numbers[offset : ends[last]])
            for query in range(first, last):
                start, stop = ends[query], ends[query + 1]
                np.dot(shares[start:stop], values[start - offset : stop - offset], out=means[query])
        if not lengths.all():
            means[lengths == 0] = self._mean_row()
        return means

    def _shares(self, numbers: Int64[ndarray, " tokens"]) -> Float32[ndarray, " tokens"]:
        """Compute the weight of each token in the mean of one query, times `_unit`."""
        if self._weights is None:
            count = len(numbers)
            if count < _MAX_CACHED_SHARES:
                return self._equal[count]
            return np.full(count, self._unit / count, np.float32)
        weights = self._weights[numbers]
        shares: ndarray = weights * (self._unit / weights.sum())
        return shares

    def _batch_shares(
        self, numbers: Int64[ndarray, " tokens"], lengths: Int64[ndarray, " queries"]
    ) -> Float32[ndarray, " tokens"]:
        """Compute `_shares` of the concatenated tokens of queries, times the scales of integer rows."""
        shares: ndarray
        if self._weights is None:
            shares = (self._unit / np.maximum(lengths, 1)).astype(np.float32).repeat(lengths)
        else:
            weights, query = self._weights[numbers], np.arange(len(lengths)).repeat(lengths)
            totals = np.bincount(query, weights, minlength=len(lengths))
            shares = weights * (self._unit / np.maximum(totals, np.finfo(np.float32).tiny))[query]
        if self._scales is not None:
            shares = shares * self._scales[numbers]
        return shares.astype(np.float32, copy=False)

    def _look_up(self, numbers: Int64[ndarray, " tokens"]) -> Float32[ndarray, "tokens dim"]:
        """Read stored rows as float32; the table's rows are these times `_unit` and times their scales."""
        if self._halves is not None:
            return _widen(self._halves.take(numbers, axis=0))
        return self._values.take(numbers, axis=0).astype(np.float32, copy=False)

    def _rows(self, numbers: Int64[ndarray, " tokens"]) -> Float32[ndarray, "tokens dim"]:
        """Read the table's rows of tokens, in their scale."""
        rows: ndarray = self._look_up(numbers) * self._unit
        return rows if self._scales is None else rows * self._scales[numbers, np.newaxis]

    def _mean_row(self) -> Float32[ndarray, " dim"]:
        """Return the embedding of a query without tokens, computed on demand: it reads the complete table."""
        if self._empty is None:
            self._empty = self._table.mean_row()
        return self._empty


def _widen(halves: Int16[ndarray, "tokens dim"]) -> Float32[ndarray, "tokens dim"]:
    """Convert the bits of float16 numbers to float32 / 2**112; exact for all finite values.

    Sign, exponent and mantissa have the same order in both formats: a shift by 13 bits moves the last two to
    their places, and the mask clears three copies of the sign next to the sign bit.
    """
    bits = halves.astype(np.int32)
    bits <<= 13
    bits &= _WIDENED_BITS
    return bits.view(np.float32)


def _attend(
    rows: Float32[ndarray, "tokens dim"],
    shares: Float32[ndarray, " tokens"],
    score: Float32[ndarray, "dim dim"],
    out: Float32[ndarray, "dim dim"],
) -> Float32[ndarray, " dim"]:
    """Compute the mean of the self-attention outputs of a query's tokens; only it is multiplied by `out`."""
    scores = rows @ score @ rows.T
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    mean: ndarray = shares @ weights @ rows @ out
    return mean


# --- words -------------------------------------------------------------------------------------------------

MAX_CACHED_WORDS = 65_536  # words and runs of words, about 15 MB; a full cache is emptied
MAX_CACHED_PAIRS = 131_072  # pairs of words, about 20 MB; the latest ones
MAX_RUN_CHARACTERS = 40  # longer runs are rare and rarely repeated
MAX_MARKERS = 4  # first characters of added tokens; every text is searched for each
_NORMALIZERS = ("BertNormalizer", "Lowercase", "NFD", "NFC", "NFKD", "NFKC", "StripAccents")
_PRE_TOKENIZERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
# Expressions that byte-level tokenizers split texts by, in addition to that of ByteLevel: Qwen's and Llama's.
# In all of them a space can only begin a piece, unless another white space follows it.
_SPLITS = tuple(
    rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)


class WordTokenizer:
    """A tokenizer with a cache of runs of words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap `tokenizer`, which must not pad and must not truncate."""
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
        self._joined = lru_cache(MAX_CACHED_PAIRS)(self._may_be_joined)

    def ids(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return the first `max_tokens` token ids of each text, without special tokens."""
        if self._markers is None:
            return [ids[:max_tokens] for ids in tokenize(self._tokenizer, texts, max_tokens)]
        rows: list[list[int]] = []
        others: list[int] = []
        for number, text in enumerate(texts):
            beginning = cut_characters(text, max_tokens)
            ids = self._of_runs(beginning)[:max_tokens] if self._has_words(beginning) else None
            if ids is None or (len(ids) < max_tokens and len(beginning) < len(text)):
                others.append(number)
            rows.append(ids or [])
        if others:
            missing = tokenize(self._tokenizer, [texts[number] for number in others], max_tokens)
            for number, ids in zip(others, missing, strict=True):
                rows[number] = ids[:max_tokens]
        return rows

    def _has_words(self, text: str) -> bool:
        """Return whether a text is words with single spaces and without markers."""
        # The space is the only printable character that is white space.
        if not text.isprintable() or (self._space and "  " in text):
            return False
        return not any(marker in text for marker in self._markers or ())

    def _of_runs(self, text: str) -> list[int]:
        """Return the ids of all runs, concatenated."""
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
        """Divide a text at the spaces that are not in a new word.

        The tokenizer may find no new word in a run, because it matches from the left and only entire words.
        """
        words = text.split(" ")
        runs = words[:1]
        for word, following in pairwise(words):
            if self._joined(word, following):
                runs[-1] += f" {following}"
            else:
                runs.append(following)
        return runs

    def _may_be_joined(self, word: str, following: str) -> bool:
        """Return whether a new word may begin in a word and end in the next one."""
        seconds = self._seconds_after(word)
        return bool(seconds) and self._form(following).startswith(seconds)

    def _find_seconds(self, word: str) -> tuple[str, ...]:
        """Find the second words of all pairs with a first word that may end `word`."""
        form = self._form(word)
        ends = (form[at:] for at in range(len(form) + 1))
        return tuple(second for end in ends for second in self._pairs.get(end, ()))

    def _normalize(self, text: str) -> str:
        """Return the form of a text that new words are compared with."""
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
