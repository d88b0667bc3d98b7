"""Frequent words of the queries as tokens of a student's own (ScalingNote, section 3.3).

A word is what the planner calls one, so Chinese is segmented by its dictionary. A tokenizer finds added
tokens in the text before it splits anything, which leaves two things to decide:

* A word between spaces must stand alone (`single_word`), or "art" would be cut out of "heart". It takes the
  space before it along, as the pieces it replaces did, or that space would become a token.
* Han characters stand between other ones, so that a rule would never let them match. There the tokenizer's
  search takes the longest word from the left, which is segmentation by maximum matching: it may part other
  words than the planner would, but alike in training and in serving.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import regex  # type: ignore[import-untyped]
import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from scalingnote.planner.words import words

_HAN = regex.compile(r"\p{Han}")


def mine(queries: Iterable[str], tokenizer: Tokenizer, *, tokens: int, min_count: int) -> list[str]:
    """The words in most queries that `tokenizer` breaks into pieces, at most `tokens` of them.

    In `min_count` queries at least; of equal ones the first by their characters. Numbers and single Han
    characters are left out.
    """
    lowers = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A") == "a"
    counts: Counter[str] = Counter()
    for query in queries:
        counts.update(set(_surfaces(query.lower() if lowers else query)))
    ranked = sorted(
        (word for word, count in counts.items() if count >= min_count and _worth_one(word)),
        key=lambda word: (-counts[word], word),
    )
    found: list[str] = []
    for word in ranked:
        if len(found) == tokens:
            break
        if not any(_known(tokenizer, text) for text in (word, f" {word}")):
            found.append(word)
    return found


def extend(tokenizer: Tokenizer, new: Sequence[str]) -> None:
    """Add words to a tokenizer, in this order, behind the tokens it has."""
    # A normalizer that marks spaces leaves none to see where a word ends: there, words are sought before it.
    # It also marks the text behind a word, whose own space is then one too many.
    normalizer = tokenizer.normalizer
    marks = normalizer is not None and normalizer.normalize_str("a b") != "a b"
    normalized = normalizer is not None and not marks
    added = []
    for word in new:
        alone = not _HAN.search(word)
        added.append(
            AddedToken(word, single_word=alone, lstrip=alone, rstrip=alone and marks, normalized=normalized)
        )
    tokenizer.add_tokens(added)


def fill(
    table: Float[Tensor, "rows width"], new: Sequence[str], *, before: Tokenizer, after: Tokenizer
) -> None:
    """Start the rows of new words at the mean of the rows of their pieces, the space before them included."""
    with torch.no_grad():
        for word in new:
            pieces = before.encode(word if _HAN.search(word) else f" {word}", add_special_tokens=False).ids
            table[after.token_to_id(word)] = table[pieces].mean(0)


def _surfaces(query: str) -> Iterable[str]:
    """The words of a query as they are written in it; those that normalising changed are left out."""
    lowered, at = query.lower(), 0
    if len(lowered) != len(query):
        return
    for word in words(query):
        start = lowered.find(word, at)
        if start >= 0:
            at = start + len(word)
            yield query[start:at]


def _worth_one(word: str) -> bool:
    return len(word) > 1 and any(character.isalpha() for character in word)


def _known(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token, and not the one for all that is unknown."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    return len(tokens) == 1 and tokens[0] != getattr(tokenizer.model, "unk_token", None)
