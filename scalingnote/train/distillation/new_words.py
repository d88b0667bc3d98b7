"""New words: frequent words of the queries, and pairs of words, as tokens of a student's own.

ScalingNote (section 3.3) gives a small transformer frequent words as tokens: its rows become shorter. The
planner segments queries into words, Chinese by its dictionary.

A lookup table gets pairs of adjacent words as well, of which a mean of rows knows nothing else: "blood
pressure", "not covered". The vector of such a token is the sum of its pieces' vectors and of one of its own
that starts at 0 (:class:`scalingnote.models.lookup.LookupTower`), so that rare ones lose nothing.

A tokenizer finds added tokens before it splits a text, the longest from the left:

* A word between spaces must stand alone (`single_word`), or "art" would be cut out of "heart". It includes
  the space before it, as the pieces it replaces did, or that space would become a token.
* Han characters stand between other ones, so that rule would never let them match. There the tokenizer takes
  the longest word from the left, which is segmentation by maximum matching: it may divide other words than
  the planner would, but in the same way in training and in serving.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from scalingnote.core.words import HAN, fold_with_places
from scalingnote.models.prompt import without_limits
from scalingnote.triplets.planner.planner import words

MAX_GAP_CHARACTERS = 1  # between the words of a pair: a space, a hyphen, an apostrophe
_HAN = re.compile(f"[{HAN}]")


def mine_words(
    queries: Iterable[str], tokenizer: Tokenizer, *, tokens: int, min_count: int, pairs: bool
) -> list[str]:
    """Return the words that most queries hold and that the student's tokenizer breaks into pieces.

    At most `tokens` words of at least `min_count` queries, by falling count, then by their characters;
    without numbers and single Han characters. With `pairs` also two words beside each other. Of words that
    the tokenizer's normalizer makes equal ("krüppel", "kruppel") only the first: it would take either.
    """
    normalizer = tokenizer.normalizer
    lowers = normalizer is not None and normalizer.normalize_str("A") == "a"
    counts: Counter[str] = Counter()
    for query in queries:
        written = query.lower() if lowers else query
        places = list(_word_places(written))
        found = {written[start:stop] for start, stop in places}
        if pairs:
            found |= set(_pairs(written, places))
        counts.update(found)
    ranked = sorted(
        (word for word, count in counts.items() if count >= min_count and _is_word(word)),
        key=lambda word: (-counts[word], word),
    )
    new: dict[str, str] = {}  # as a text is normalised -> as it is written
    for word in ranked:
        if len(new) == tokens:
            break
        form = word if normalizer is None else normalizer.normalize_str(word)
        if form not in new and not any(_is_token(tokenizer, text) for text in (word, f" {word}")):
            new[form] = word
    return [*new.values()]


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


def pieces_of(new: Sequence[str], *, before: Tokenizer, after: Tokenizer) -> dict[int, list[int]]:
    """Return the tokens of each new word, the space before it included, by its number.

    `before` is the tokenizer without the words, `after` the one that :func:`add_words` changed.
    """
    before = without_limits(before)  # a published tokenizer may pad every text to a fixed length
    texts = [word if _HAN.search(word) else f" {word}" for word in new]
    numbers = (number for word in new if (number := after.token_to_id(word)) is not None)
    found = before.encode_batch(texts, add_special_tokens=False)
    return {number: pieces.ids for number, pieces in zip(numbers, found, strict=True)}


def initialize_word_rows(
    table: Float[Tensor, "rows width"], new: Sequence[str], *, before: Tokenizer, after: Tokenizer
) -> None:
    """Set the rows of new words to the mean of the rows of their pieces."""
    with torch.no_grad():
        for number, pieces in pieces_of(new, before=before, after=after).items():
            table[number] = table[pieces].mean(0)


def _word_places(query: str) -> Iterator[tuple[int, int]]:
    """Start and end of the words of a query in it, without those that normalising changed."""
    text, places = fold_with_places(query)
    at = 0
    for word in words(query):
        start = text.index(word, at)
        at = start + len(word)
        if query[places[start] : places[at]].casefold() == word:
            yield places[start], places[at]


def _pairs(query: str, places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Pairs of adjacent words with what stands between them."""
    for (start, end), (following, stop) in pairwise(places):
        if following - end <= MAX_GAP_CHARACTERS:
            yield query[start:stop]


def _is_word(word: str) -> bool:
    return len(word) > 1 and any(character.isalpha() for character in word)


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token, other than the unknown token."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    return len(tokens) == 1 and tokens[0] != getattr(tokenizer.model, "unk_token", None)
