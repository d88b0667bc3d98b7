"""Output of the command line: colours on a terminal, otherwise plain text."""

import io
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console

from scalingnote.cli.terminal import clean, show, show_hits
from scalingnote.core.reports import ReportTable, StrongCell
from scalingnote.search.searcher import SearchHit

QUERY = "how do I rotate tokens"
DOCUMENTS = [
    {
        "doc_id": "d1",
        "title": "Rotation of a token",
        "snippet": "Rotate every token\nonce a year. "
        + "Old tokens are kept until their texts are read again. " * 8,
        "topic": "security",
        "semantic_id": "3-1",
    },
    {"doc_id": "d2", "title": "", "snippet": "a \x1b[2J b\x07", "topic": "", "semantic_id": "3-2"},
]
HITS = [
    SearchHit(score=1 / place, document=document, shard=0, dense=0.5, sparse=None)
    for place, document in enumerate(DOCUMENTS, 1)
]
ESCAPE = re.compile(r"\x1b\[[\d;]*m")
TABLE = ReportTable(
    ["", "table", "[b]teacher"], [["nDCG@10", StrongCell("0.61"), "0.62"], ["size", "47 MB", "91"]]
)


def printed(function, *arguments, terminal: bool) -> str:
    """Return the output of a function on a terminal of 60 columns, or in a pipe."""
    out = io.StringIO()
    system = "standard" if terminal else None
    console = Console(
        file=out, force_terminal=terminal, width=60, color_system=system, markup=False, highlight=False
    )
    function(console, *arguments)
    return out.getvalue()


def test_a_pipe_gets_a_line_for_each_fact():
    lines = printed(show_hits, HITS, QUERY, terminal=False).splitlines()
    assert lines[:2] == ["  1. 1.0000  Rotation of a token", "     d1 · security · 3-1"]
    assert lines[2].startswith("     Rotate every token once a year. Old tokens")
    assert len(lines[2]) == 5 + 200
    assert lines[3:5] == ["", "  2. 0.5000  d2"]
    assert not any("\x1b" in line or "\x07" in line for line in lines)


def test_a_terminal_gets_colours_and_short_lines():
    plain, coloured = (printed(show_hits, HITS, QUERY, terminal=terminal) for terminal in (False, True))
    lines = [ESCAPE.sub("", line) for line in coloured.splitlines()]
    assert " ".join("\n".join(lines).split()) == " ".join(plain.split())
    assert max(map(len, lines)) <= 60
    marked = re.findall(r"\x1b\[1;33m(.*?)\x1b\[0m", coloured)
    assert {*marked} == {"Rotate", "token", "tokens"}  # forms of the words of the query, except "do" and "I"
    first = coloured.splitlines()[0]
    assert "\x1b[1mRotation of a \x1b[0m\x1b[1;33mtoken\x1b[0m" in first
    assert "\x1b[36m1.0000\x1b[0m" in first
    assert "[2J b" in lines[-2]  # an escape sequence keeps only its letters


def test_a_text_is_one_line_without_control_characters():
    assert clean("a\r\n b\x1b]0;title\x07\x9b") == "a b]0;title"
    assert clean("नमस्ते e\u0301 \u200d") == "नमस्ते e\u0301 \u200d"
    assert clean(None) == "None"


def test_a_table_is_markdown_in_a_pipe_only():
    assert printed(show, "before", TABLE, terminal=False) == f"before\n\n{TABLE.markdown}\n\n"
    output = printed(show, "before", TABLE, terminal=True)
    assert re.search(r"\x1b\[1m *0\.61\x1b\[0m +0\.62 ", output)
    assert "**" not in output
    lines = [ESCAPE.sub("", line).split() for line in output.splitlines()]
    assert [line for line in lines if line and "─" not in line[0]] == [
        ["before"],
        ["table", "[b]teacher"],
        ["nDCG@10", "0.61", "0.62"],
        ["size", "47", "MB", "91"],
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"TERM": "xterm"}, b"\x1b[36mfound\x1b[0m"),
        ({"TERM": "xterm", "NO_COLOR": ""}, b"\x1b[36mfound\x1b[0m"),  # like an unset variable (no-color.org)
        ({"TERM": "xterm", "NO_COLOR": "1"}, b"found"),
        ({"TERM": "dumb"}, b"found"),
    ],
)
def test_colours_depend_on_terminal_and_environment(settings, expected):
    """The process writes to a pseudo-terminal, like a shell, and then into a pipe."""
    code = (
        "from rich.text import Text; from scalingnote.cli.terminal import show, stdout; "
        "show(stdout(), Text('found', 'cyan'))"
    )
    removed = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM")
    environment = {name: value for name, value in os.environ.items() if name not in removed} | settings
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    assert os.read(ours, 100).strip() == expected
    os.close(ours)
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert piped.stdout == b"found\n"
