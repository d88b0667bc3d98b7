"""What the command line prints, with colours and wrapped lines where a terminal shows them.

    a pipe or a file, NO_COLOR set, TERM=dumb   plain text, a line per fact, for other programs
    a terminal                                  scores, titles and the words of the query in colours

Escape sequences in documents never reach the terminal: control characters are left out.
"""

import os
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Any

from scalingnote import words

if TYPE_CHECKING:
    from scalingnote.search.searcher import SearchHit

SNIPPET_CHARACTERS = 200
MAX_COLUMNS = 100  # longer lines are hard to read
_INDENT = " " * 5
_STEM, _ENDING = 4, 3  # letters that forms of a word share at least, and in which they may differ
_BOLD_CELL = re.compile(r"\*\*(.+?)\*\*")


@dataclass(frozen=True)
class Style:
    """Colours of a stream: ANSI's sixteen, so that the terminal's own theme decides what they look like.

    Args:
        coloured: False: every method returns its text unchanged.
        columns: characters of a line.
    """

    coloured: bool
    columns: int = 80

    @classmethod
    def of(cls, stream: Any, environment: Mapping[str, str] = os.environ) -> "Style":
        """The style of a stream: coloured on a terminal, unless NO_COLOR is set or TERM is dumb."""
        from shutil import get_terminal_size  # late: it loads compressors, and `--help` needs none

        plain = environment.get("NO_COLOR") or environment.get("TERM") == "dumb" or not stream.isatty()
        return cls(not plain, min(get_terminal_size().columns, MAX_COLUMNS))

    def strong(self, text: str) -> str:
        """A title, the head of a table, the best value."""
        return self._painted("1", text)

    def faint(self, text: str) -> str:
        """What is read last: ids, times, lines of a table."""
        return self._painted("2", text)

    def score(self, text: str) -> str:
        """A score."""
        return self._painted("36", text)

    def marked(self, text: str) -> str:
        """A word of the query."""
        return self._painted("1;33", text)

    def _painted(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.coloured and text else text


def listing(hits: "Sequence[SearchHit]", query: str, style: Style) -> Iterator[str]:
    """Lines that show the documents of a search, best first, with an empty line after each."""

    def mark(text: str, other: Callable[[str], str]) -> str:
        return highlighted(text, query, style.marked, other)

    for rank, hit in enumerate(hits, 1):
        document = hit.document
        title = clean(document["title"] or hit.doc_id)
        snippet = clean(document["snippet"])[:SNIPPET_CHARACTERS]
        facts = [clean(fact) for fact in (hit.doc_id, document["topic"], document["semantic_id"]) if fact]
        yield f"{rank:>3}. {style.score(f'{hit.score:.4f}')}  {mark(title, style.strong)}"
        yield style.faint(f"{_INDENT}{' · '.join(facts)}")
        lines = textwrap.wrap(snippet, style.columns - len(_INDENT)) if _wraps(snippet, style) else [snippet]
        yield from (f"{_INDENT}{mark(line, str)}" for line in lines)
        yield ""


def table(text: str, style: Style) -> str:
    """A Markdown table, with its head and the cells between ** strong, its rule and lines faint.

    Other lines of `text` stay as they are. Without colours, so does the table.
    """
    if not style.coloured:
        return text
    lines = text.splitlines()
    painted = []
    for number, line in enumerate(lines):
        is_head = number + 1 < len(lines) and _is_rule(lines[number + 1])
        if not line.startswith("|"):
            painted.append(line)
        elif _is_rule(line):
            painted.append(style.faint(line))
        else:
            cells = line.strip("|").split("|")
            shown = (style.strong(cell) if is_head else _cell(cell, style) for cell in cells)
            bar = style.faint("|")
            painted.append(f"{bar}{bar.join(shown)}{bar}")
    return "\n".join(painted)


def clean(text: object) -> str:
    """A text in one line without control characters: a document must not write to the terminal itself."""
    line = " ".join(str(text).split())
    return "".join(character for character in line if unicodedata.category(character) != "Cc")


def highlighted(text: str, query: str, mark: Callable[[str], str], other: Callable[[str], str] = str) -> str:
    """`text` with the words of `query`, and forms of them, given to `mark` and the rest to `other`.

    In scripts without spaces, two letters that follow each other in the query are a word. Function words are
    marked only where the query has no others.
    """
    wanted, pairs = _query_words(query)
    plain, places = words.aligned(text)
    shown, done = [], 0
    for match in _runs().finditer(plain):
        word, run = match.groups()
        if run:
            ranges = [*_pair_ranges(run, pairs)]
        else:
            ranges = [(0, len(word))] if any(_same_word(word, each) for each in wanted) else []
        for start, end in ranges:
            start, end = places[match.start() + start], places[match.start() + end]
            shown += [other(text[done:start]), mark(text[start:end])]
            done = end
    return "".join([*shown, other(text[done:])])


def _runs() -> re.Pattern[str]:
    return words.runs(words.UNSPACED + words.HANGUL)


def _query_words(query: str) -> tuple[list[str], set[str]]:
    """Words of a query, and pairs of letters of its runs in scripts without spaces."""
    found = _runs().findall(words.folded(query))
    spaced = [word for word, _ in found if word]
    telling = [word for word in spaced if word not in _function_words()]
    pairs = {pair for _, run in found for pair in _pairs(words.clusters(run))}
    return (telling if telling or pairs else spaced), pairs


def _pairs(letters: Sequence[str]) -> list[str]:
    """Letters that follow each other; a letter alone."""
    return [*map(add, letters, letters[1:])] if len(letters) > 1 else list(letters)


def _pair_ranges(run: str, pairs: set[str]) -> Iterator[tuple[int, int]]:
    """The parts of a run in a script without spaces that are marked."""
    letters = words.clusters(run)
    ends = [*accumulate(map(len, letters), initial=0)]
    covered = {
        at + offset
        for at in range(len(letters))
        for count in (1, 2)
        if "".join(letters[at : at + count]) in pairs
        for offset in range(min(count, len(letters) - at))
    }
    for start in sorted(at for at in covered if at - 1 not in covered):
        end = start
        while end in covered:
            end += 1
        yield ends[start], ends[end]


def _same_word(one: str, other: str) -> bool:
    """Whether two words are one, or forms of one: attack, attacks."""
    short, long = sorted((one, other), key=len)
    is_form = len(short) >= _STEM and len(long) - len(short) <= _ENDING and long.startswith(short)
    return one == other or is_form


@cache
def _function_words() -> frozenset[str]:
    from scalingnote.pseudo_queries.sampling import FUNCTION_WORDS

    return FUNCTION_WORDS


def _wraps(text: str, style: Style) -> bool:
    """Whether lines are broken here: not for programs, nor where a character is two columns wide."""
    return style.coloured and not any(unicodedata.east_asian_width(character) in "WF" for character in text)


def _is_rule(line: str) -> bool:
    return line.startswith("|") and not set(line) - set("|:- ")


def _cell(cell: str, style: Style) -> str:
    """A cell without its **, and as wide as before."""
    plain = _BOLD_CELL.sub(lambda match: match[1], cell)
    lost = " " * (len(cell) - len(plain))
    return lost + _BOLD_CELL.sub(lambda match: style.strong(match[1]), cell)
