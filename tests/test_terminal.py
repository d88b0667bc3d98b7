"""What the command line prints: colours on a terminal, plain text for everything else."""

import io
import os
import re
import subprocess
import sys

import pytest

from scalingnote import reports
from scalingnote.search.searcher import SearchHit
from scalingnote.terminal import Style, clean, highlighted, listing, table

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
PLAIN, COLOURED = Style(coloured=False), Style(coloured=True, columns=60)
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "coloured"),
    [
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": ""}, True),  # empty: as if it were not set (no-color.org)
        (Terminal(), {"NO_COLOR": "1", "TERM": "xterm"}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {"TERM": "xterm"}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(stream, environment, coloured):
    assert Style.of(stream, environment).coloured is coloured


def test_a_pipe_gets_a_line_for_each_fact():
    lines = list(listing(HITS, QUERY, PLAIN))
    assert lines[:2] == ["  1. 1.0000  Rotation of a token", "     d1 · security · 3-1"]
    assert lines[2].startswith("     Rotate every token once a year. Old tokens")
    assert len(lines[2]) == 5 + 200
    assert lines[3:5] == ["", "  2. 0.5000  d2"]
    assert not any("\x1b" in line or "\x07" in line for line in lines)


def test_a_terminal_gets_the_same_words_in_colours_and_short_lines():
    plain, coloured = "\n".join(listing(HITS, QUERY, PLAIN)), list(listing(HITS, QUERY, COLOURED))
    shown = [ESCAPE.sub("", line) for line in coloured]
    assert " ".join("\n".join(shown).split()) == " ".join(plain.split())
    assert max(map(len, shown)) <= 60
    marked = re.findall(r"\x1b\[1;33m(.*?)\x1b\[0m", "\n".join(coloured))
    assert {*marked} == {"Rotate", "token", "tokens"}  # forms of the query's words, and not "do" or "I"
    assert "\x1b[1mRotation of a \x1b[0m\x1b[1;33mtoken\x1b[0m" in coloured[0]
    assert "\x1b[36m1.0000\x1b[0m" in coloured[0]
    assert "[2J b" in shown[-2]  # of an escape sequence in a document the letters alone are left


@pytest.mark.parametrize(
    ("text", "query", "expected"),
    [
        ("the sun and the moon", "what is the sun", "the <sun> and the moon"),
        ("To be or not to be", "to be", "<To> <be> or not <to> <be>"),  # nothing but function words
        ("attacks, attack", "Attack", "<attacks>, <attack>"),
        ("star starting", "star", "<star> starting"),
        ("北京春天的天气", "北京的天气", "<北京>春天<的天气>"),
        ("café", "x", "café"),
        ("", "key", ""),
    ],
)
def test_words_of_the_query_are_marked(text, query, expected):
    assert highlighted(text, query, "<{}>".format) == expected


def test_a_text_is_one_line_without_control_characters():
    assert clean("a\r\n b\x1b]0;title\x07\x9b") == "a b]0;title"
    assert clean("नमस्ते e\u0301 \u200d") == "नमस्ते e\u0301 \u200d"
    assert clean(None) == "None"


def test_a_table_keeps_its_widths():
    text = reports.markdown(
        ["", "table", "teacher"], [["nDCG@10", "**0.61**", "0.62"], ["size", "47 MB", "91"]]
    )
    given = f"python_docs: 6,000 documents\n\n{text}\n\na note"
    assert table(given, PLAIN) == given
    shown = table(given, COLOURED)
    assert ESCAPE.sub("", shown) == given.replace("**0.61**", "    0.61")
    assert "\x1b[1m0.61\x1b[0m" in shown
    assert re.search(r"\x1b\[1m +table ", shown)
    assert shown.startswith("python_docs")
    assert shown.endswith("a note")


def test_a_real_terminal_is_one():
    """Through a pseudo-terminal, as a user's shell has it; then the same through a pipe."""
    code = "import sys; from scalingnote.terminal import Style; print(Style.of(sys.stdout).strong('found'))"
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {
        "TERM": "xterm"
    }
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    assert os.read(ours, 100).strip() == b"\x1b[1mfound\x1b[0m"
    os.close(ours)
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert piped.stdout == b"found\n"
