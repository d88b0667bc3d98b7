"""New words: frequent words of the queries as tokens of a student's own (ScalingNote, section 3.3).

The planner segments queries into words, Chinese by its dictionary. A tokenizer finds added tokens before it
splits a text:

* A word between spaces must stand alone (`single_word`), or "art" would be cut out of "heart". It includes
  the space before it, as the pieces it replaces did, or that space would become a token.
* Han characters stand between other ones, so that rule would never let them match. There the tokenizer takes
  the longest word from the left, which is segmentation by maximum matching: it may divide other words than
  the planner would, but in the same way in training and in serving.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from scalingnote.core.words import HAN, fold_with_places
from scalingnote.models.prompt import without_limits
from scalingnote.triplets.planner.planner import words

_HAN = re.compile(f"[{HAN}]")


def mine_words(queries: Iterable[str], tokenizer: Tokenizer, *, tokens: int, min_count: int) -> list[str]:
    """The words that occur in most queries and that the student's tokenizer breaks into pieces.

    At most `tokens` words that occur in at least `min_count` queries, by falling count, then by their
    characters; without numbers and single Han characters.
    """
    lowers = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A") == "a"
    counts: Counter[str] = Counter()
    for query in queries:
        counts.update(set(_words_as_written(query.lower() if lowers else query)))
    ranked = sorted(
        (word for word, count in counts.items() if count >= min_count and _is_word(word)),
        key=lambda word: (-counts[word], word),
    )
    new: list[str] = []
    for word in ranked:
        if len(new) == tokens:
            break
        if not any(_is_token(tokenizer, text) for text in (word, f" {word}")):
            new.append(word)
    return new


def add_words(tokenizer: Tokenizer, new: Sequence[str]) -> None:
    """Add words to a tokenizer, in this order, after the tokens it has."""
    # A normalizer that replaces spaces by marks hides where a word ends: words are then matched before it.
    # It also marks the text after a word, so the word must take that text's own space.
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


def initialize_word_rows(
    table: Float[Tensor, "rows width"], new: Sequence[str], *, before: Tokenizer, after: Tokenizer
) -> None:
    """Set the rows of new words to the mean of the rows of their pieces, the space before them included."""
    before = without_limits(before)  # a published tokenizer may pad every text to a fixed length
    with torch.no_grad():
        for word in new:
            pieces = before.encode(word if _HAN.search(word) else f" {word}", add_special_tokens=False).ids
            table[after.token_to_id(word)] = table[pieces].mean(0)


def _words_as_written(query: str) -> Iterable[str]:
    """The words of a query as written in it, without those that normalising changed."""
    text, places = fold_with_places(query)
    at = 0
    for word in words(query):
        start = text.index(word, at)
        at = start + len(word)
        written = query[places[start] : places[at]]
        if written.casefold() == word:
            yield written


def _is_word(word: str) -> bool:
    return len(word) > 1 and any(character.isalpha() for character in word)


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token, other than the unknown token."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    return len(tokens) == 1 and tokens[0] != getattr(tokenizer.model, "unk_token", None)
