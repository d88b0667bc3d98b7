"""Progress and status lines of long work in the log."""

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from scalingnote.core import log
from scalingnote.core.log import Progress, status_lines


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the logged lines; a status line follows after 0.05 s of silence."""
    monkeypatch.setattr(log, "SILENCE_S", 0.05)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger(log.ROOT)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield messages
    root.removeHandler(handler)
    root.setLevel(level)


def wait_for(lines: list[str], text: str) -> None:
    deadline = time.monotonic() + 30
    while not any(text in line for line in list(lines)):
        assert time.monotonic() < deadline, lines
        time.sleep(0.01)


def test_silent_work_logs_its_status(lines: list[str]):
    with status_lines("encode", log.elapsed_status("loading")):
        wait_for(lines, "loading: ")
        assert re.fullmatch(r"loading: \d+s  cpu \d+%", lines[0])
        with status_lines("encode", lambda: "inner"):
            wait_for(lines, "inner")
            outer = sum("loading" in line for line in lines)
            time.sleep(0.3)
            assert sum("loading" in line for line in lines) == outer
        before = len(lines)
        wait_for(lines[before:] or lines, "loading")
    while any(thread.name == "status-lines" for thread in threading.enumerate()):
        time.sleep(0.01)  # the thread ends with the last block
    count = len(lines)
    time.sleep(0.2)
    assert len(lines) == count


def test_progress_counts_rows_of_unfinished_parts(lines: list[str]):
    underway = 0
    with Progress("encode", total=100, done=20, unit="rows", underway=lambda: underway) as progress:
        wait_for(lines, "20/100 rows  20%  ")
        assert re.fullmatch(r"20/100 rows  20%  \d+s  cpu \d+%", lines[0])
        underway = 30
        wait_for(lines, "50/100 rows  50%")
        progress.advance(40, note="8 tokens/s")
        wait_for(lines, "60/100 rows  60%")
        wait_for(lines, "8 tokens/s")
        underway = 95  # a part that began twice counts twice: the total stays the limit
        wait_for(lines, "99/100 rows")
    assert lines[-1].startswith("60 rows in ")


def test_a_line_of_any_kind_postpones_the_status(lines: list[str]):
    with status_lines("encode", lambda: "status"):
        for _ in range(40):
            log.note_line()
            time.sleep(0.01)
        assert "status" not in lines


@pytest.mark.parametrize(
    ("setting_up", "expected"),
    [
        ("", r"\d\d:\d\d:\d\d encode   done\n"),
        ("logging.basicConfig(format='mine: %(message)s');", "mine: seen\n"),
    ],
)
def test_logging_is_configured_unless_the_program_did(setting_up: str, expected: str):
    script = (
        f"import logging; {setting_up} from scalingnote.core import log; log.configure_unless_set();"
        "log.get_logger('encode').info('done'); logging.getLogger('app').warning('seen')"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert re.match(expected, process.stderr)


def test_warnings_of_deepspeed_are_not_printed():
    script = (
        "import logging, sys; from scalingnote.core.log import configure; configure(); configure();"
        "theirs = logging.getLogger('DeepSpeed'); theirs.addHandler(logging.StreamHandler(sys.stdout));"
        "theirs.setLevel(logging.WARNING);"  # as the package leaves its logger
        "theirs.warning('found no GPU'); theirs.error('a real fault')"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout == "a real fault\n"
