"""How a benchmark speaks: a table on the screen, metrics with their machine in a JSON file, peak memory."""

import argparse
import json
import multiprocessing
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from scalingnote.log import environment
from scalingnote.reports import markdown
from scalingnote.storage.usage import peak_bytes

T = TypeVar("T")
# Options that say where something is written or kept; --set run_dir=... is another.
WRITTEN_TO = ("--json", "--plot", "--report", "--folder", "--run-dir", "--run", "--trials")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows ``--json FILE``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write metrics, tables and environment to this file")
    return parser


def command() -> str | None:
    """What was started, without where it writes to: two runs with equal commands measured the same.

    Tables of finished trials alone are made again from where those are.
    """
    started = getattr(sys.modules["__main__"], "__spec__", None)
    if started is None or not started.name.startswith("benchmarks."):
        return None
    read = ("--trials",) if "--finished" in sys.argv else ()
    without = [name for name in WRITTEN_TO if name not in read]
    return shlex.join(["python", "-m", started.name, *measured(sys.argv[1:], without=without)])


def measured(words: Sequence[str], *, without: Sequence[str] = WRITTEN_TO) -> list[str]:
    """Arguments without those that only say where something is written or kept."""
    kept, given = [], iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        if name not in ("--set", *without):
            kept.append(word)
            continue
        value = value if equals else next(given, "")
        if name == "--set" and not value.startswith("run_dir="):
            kept += [name, value]
    return kept


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with equal keys as a Markdown table."""
    print(f"\n{title}\n\n{table(rows)}", flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as Markdown; the first columns that hold words alone stand to the left."""
    words = takewhile(lambda name: all(_is_word(row[name]) for row in rows), rows[0])
    lines = [[_text(value) for value in row.values()] for row in rows]
    return markdown([*rows[0]], lines, text=len([*words]))


def write(
    path: Path | None,
    *,
    metrics: Mapping[str, float],
    machine: Mapping[str, Any] | None = None,
    **tables: Any,
) -> None:
    """Write ``{"command": ..., "metrics": ..., "environment": ..., **tables}``; nothing without a path.

    `machine` is what was measured on, where that was not in this run.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    where = environment() | dict(machine or {})
    report = {"command": command(), "metrics": dict(metrics), "environment": where, **tables}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def alone(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The result of `work` in a fresh process, whose memory is nobody else's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


def peak_memory_mb() -> float:
    """Largest resident size of this process so far."""
    return peak_bytes() / 2**20


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and not value[:1].isdigit()


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
