"""Where sentences lie in a text."""

import re
from collections.abc import Iterator

# Behind a full stop of Chinese or Japanese, at the space behind a Latin one, at a line's end.
SENTENCE_END = re.compile(r"(?<=[。！？])|(?<=[.!?])\s|\n")


def sentence_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sentence in characters, without the spaces around it; none is empty."""
    start = 0
    for stop, following in [*(found.span() for found in SENTENCE_END.finditer(text)), (len(text), len(text))]:
        sentence = text[start:stop]
        first = start + len(sentence) - len(sentence.lstrip())
        if first < stop:
            yield first, start + len(sentence.rstrip())
        start = following
