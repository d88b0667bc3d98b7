"""Texts from outside: what is no text is an error, and half of a surrogate pair becomes U+FFFD."""

import re
from collections.abc import Iterable

from scalingnote.errors import DataError

_SURROGATE = re.compile(r"[\ud800-\udfff]")  # Python keeps a whole pair as the one character it stands for


def checked_texts(texts: Iterable[str], *, name: str = "text") -> list[str]:
    """Texts of a caller as a list; halves of surrogate pairs are replaced, as in documents from files.

    Args:
        texts: a list, an array, a column of a data frame.
        name: of one of them in errors: "query", "document".

    Raises:
        DataError: `texts` is one text, or holds what is no text (None, NaN, a number): position and value.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise DataError(f"{_shown(texts)} in place of a list of texts: give one, also for a single {name}")
    given = list(texts)
    for position, text in enumerate(given):
        if not (isinstance(text, str) and text.isascii()):
            given[position] = checked_text(text, name=f"{name} {position}")
    return given


def checked_text(text: str, *, name: str = "text") -> str:
    """The same of one text."""
    if not isinstance(text, str):
        raise DataError(f"{name} is {_shown(text)}: give a text, an empty one where there is none")
    return text if text.isascii() or is_valid_unicode(text) else replace_surrogates(text)


def is_valid_unicode(text: str) -> bool:
    """Whether `text` is valid UTF-8: JSON's escapes can spell half of a surrogate pair, which is not."""
    return not _SURROGATE.search(text)


def replace_surrogates(text: str) -> str:
    """`text` with U+FFFD, the replacement character, for every half of a surrogate pair."""
    return _SURROGATE.sub("\ufffd", text)


def _shown(value: object) -> str:
    return f"{value!r:.80} of type {type(value).__name__}"
