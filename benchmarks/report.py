"""Arguments, tables on the screen and the JSON file of a benchmark, with metrics and environment."""

import argparse
import json
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from scalingnote.core.log import environment
from scalingnote.core.reports import ReportTable
from scalingnote.storage.usage import peak_bytes

T = TypeVar("T")


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser without options; its help keeps the lines of a docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def arguments(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with ``--json FILE`` and an option for each of `numbers`, which are its defaults."""
    parser = plain_parser(description)
    parser.add_argument("--json", type=Path, help="write metrics, tables and environment to this file")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    return parser


def command() -> str | None:
    """Return the command that started this benchmark, without ``--json``; None in a test."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or not spec.name.startswith("benchmarks."):
        return None
    words = sys.argv[1:]
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    return shlex.join(["python", "-m", spec.name, *words])


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with equal keys as a Markdown table."""
    print(f"\n{title}\n\n{table(rows)}", flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with equal keys as Markdown; leading columns with only words are aligned left."""
    words = takewhile(lambda name: all(_is_word(row[name]) for row in rows), rows[0])
    lines = [[_text(value) for value in row.values()] for row in rows]
    return ReportTable([*rows[0]], lines, text=len([*words])).markdown


def write(
    path: Path | None,
    *,
    metrics: Mapping[str, float],
    machine: Mapping[str, Any] | None = None,
    **tables: Any,
) -> None:
    """Write ``{"command": ..., "metrics": ..., "environment": ..., **tables}``; do nothing without a path.

    `machine` replaces the facts of this machine if the measurements were made on another one.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    measured_on = environment() | dict(machine or {})
    report = {"command": command(), "metrics": dict(metrics), "environment": measured_on, **tables}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def take_turns(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Return the seconds of each side in each round: other work of the machine affects all sides."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            start = clock()
            work()
            seconds[name].append(clock() - start)
    return seconds


def run_isolated(work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return the result of `work` in a new process, so that it has a separate peak memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args, **kwargs).result()


def peak_memory_mb() -> float:
    """Return the largest resident size of this process so far."""
    return peak_bytes() / 2**20


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and not value[:1].isdigit()


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
