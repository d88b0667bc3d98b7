"""Output of the command line: with rich on a terminal, plain text and Markdown into a pipe or a file.

rich detects a terminal and its colours, and respects NO_COLOR, TERM=dumb and FORCE_COLOR. Escape sequences in
documents never reach the terminal: control characters are left out.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING

from scalingnote.core import words
from scalingnote.core.reports import ReportTable, StrongCell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from scalingnote.search.searcher import SearchHit

SNIPPET_CHARACTERS = 200
MAX_COLUMNS = 100  # longer lines are hard to read
_INDENT = " " * 5
_STEM, _ENDING = 4, 3  # letters that forms of a word share at least, and may differ in at most


def stdout() -> "Console":
    """Return a console of the standard output that prints text without markup."""
    from rich.console import Console  # late: `--help` does not need it

    return Console(markup=False, highlight=False, emoji=False)


def show(console: "Console", *parts: "str | Text | ReportTable") -> None:
    """Print texts, and tables between empty lines; tables are Markdown if the output is not a terminal."""
    for part in parts:
        table = part if isinstance(part, ReportTable) else None
        if not console.is_terminal:
            print(f"\n{table.markdown}\n" if table else part, file=console.file)
        elif table:
            console.print(_draw(table))
        else:
            console.print(part, soft_wrap=True)


def _draw(table: ReportTable) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(table.head):
        rich_table.add_column(Text(name), justify="left" if number < table.text else "right", overflow="fold")
    for row in table.rows:
        rich_table.add_row(*(Text(cell, "bold" if isinstance(cell, StrongCell) else "") for cell in row))
    return rich_table


def show_hits(console: "Console", hits: "Sequence[SearchHit]", query: str) -> None:
    """Print the documents of a search, best first, with an empty line after each."""
    from rich.text import Text

    for rank, hit in enumerate(hits, 1):
        document = hit.document
        title = _mark(clean(document["title"] or hit.doc_id), query, "bold")
        snippet = _mark(clean(document["snippet"])[:SNIPPET_CHARACTERS], query)
        facts = [clean(fact) for fact in (hit.doc_id, document["topic"], document["semantic_id"]) if fact]
        width = min(console.width, MAX_COLUMNS) - len(_INDENT)
        lines = snippet.wrap(console, width) if console.is_terminal else [snippet]
        show(
            console,
            Text.assemble(f"{rank:>3}. ", (f"{hit.score:.4f}", "cyan"), "  ", title),
            Text(f"{_INDENT}{' · '.join(facts)}", "dim"),
            *(Text.assemble(_INDENT, line) for line in lines),
            "",
        )


def _mark(text: str, query: str, style: str = "") -> "Text":
    from rich.text import Text

    pieces = highlight(text, query)
    return Text.assemble(*((piece, "bold yellow" if marked else style) for piece, marked in pieces))


def clean(text: object) -> str:
    """Return a text as one line without control characters, so that it cannot control the terminal."""
    line = " ".join(str(text).split())
    return "".join(character for character in line if unicodedata.category(character) != "Cc")


def highlight(text: str, query: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of `text`, each with whether it is a word of `query`, or a form of one.

    In scripts without spaces, two adjacent letters of the query count as a word. Function words are marked
    only if the query has no other words.
    """
    query_words, pairs = _query_words(query)
    plain, places = words.fold_with_places(text)
    end_of_last = 0
    for match in _runs().finditer(plain):
        word, run = match.groups()
        if run:
            ranges = [*_pair_ranges(run, pairs)]
        else:
            ranges = [(0, len(word))] if any(_same_word(word, each) for each in query_words) else []
        for start, end in ranges:
            start, end = places[match.start() + start], places[match.start() + end]
            yield text[end_of_last:start], False
            yield text[start:end], True
            end_of_last = end
    yield text[end_of_last:], False


def _runs() -> re.Pattern[str]:
    return words.runs(words.UNSPACED + words.HANGUL)


def _query_words(query: str) -> tuple[list[str], set[str]]:
    """Return the words of a query, and the pairs of letters of its runs in scripts without spaces."""
    runs = _runs().findall(words.fold(query))
    spaced = [word for word, _ in runs if word]
    content_words = [word for word in spaced if word not in _function_words()]
    pairs = {pair for _, run in runs for pair in _pairs(words.clusters(run))}
    return (content_words if content_words or pairs else spaced), pairs


def _pairs(letters: Sequence[str]) -> list[str]:
    """Return pairs of adjacent letters; a single letter is returned as it is."""
    return [*map(add, letters, letters[1:])] if len(letters) > 1 else list(letters)


def _pair_ranges(run: str, pairs: set[str]) -> Iterator[tuple[int, int]]:
    """Yield the ranges to mark in a run of a script without spaces."""
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
    """Return whether two words are equal, or forms of one word: attack, attacks."""
    short, long = sorted((one, other), key=len)
    is_form = len(short) >= _STEM and len(long) - len(short) <= _ENDING and long.startswith(short)
    return one == other or is_form


@cache
def _function_words() -> frozenset[str]:
    from scalingnote.triplets.pseudo_queries.sampling import FUNCTION_WORDS

    return FUNCTION_WORDS
