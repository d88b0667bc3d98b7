"""Texts that no column holds: JSON's escapes can spell half of a surrogate pair, which UTF-8 cannot carry."""

import re

_HALF = re.compile(r"[\ud800-\udfff]")  # Python keeps a whole pair as the one character that it stands for


def storable(text: str) -> bool:
    """Whether it can be written as UTF-8."""
    return not _HALF.search(text)


def mended(text: str) -> str:
    """With U+FFFD, the replacement character, for every half of a pair."""
    return _HALF.sub("\ufffd", text)
