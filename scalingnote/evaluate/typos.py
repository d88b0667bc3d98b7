"""Typing errors: a query comes in, the same query as a hurried person types it goes out."""

import numpy as np
import regex  # type: ignore[import-untyped]

# A word is a run of letters; of a script without blanks between words, two characters stand for one.
_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}]{2}|[\p{L}--[\p{Han}\p{Hiragana}\p{Katakana}]]{3,}", regex.V1
)


def with_typos(query: str, *, share: float, seed: int) -> str:
    """`query` with one letter swapped with the next, dropped or doubled in a `share` of its words.

    At least one word gets a typo where there is a word of three letters or more. The same query gets the
    same typos, whatever other queries are asked.
    """
    words = list(_WORD.finditer(query))
    if not words:
        return query
    rng = np.random.default_rng([seed, *query.encode()])
    number = max(1, round(share * len(words)))
    out = query
    # From the last to the first, so that places before it stay.
    for i in sorted(rng.choice(len(words), size=number, replace=False).tolist(), reverse=True):
        start, end = words[i].span()
        out = out[:start] + _typo(out[start:end], rng) + out[end:]
    return out


def _typo(word: str, rng: np.random.Generator) -> str:
    at = int(rng.integers(len(word) - 1))
    kinds = ["drop", "double"] + ["swap"] * (word[at] != word[at + 1])
    match kinds[int(rng.integers(len(kinds)))]:
        case "drop":
            return word[:at] + word[at + 1 :]
        case "double":
            return word[: at + 1] + word[at:]
        case _:
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
