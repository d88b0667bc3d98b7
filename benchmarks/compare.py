"""What moved between two commits by more than noise: results in, better and worse out.

    python -m benchmarks.compare OLD NEW [--all] [--partial]

OLD and NEW are folders of results (build/benchmarks/COMMIT, docs/results) or single files. NAME.json is one
run; NAME.1.json, NAME.2.json, ... are runs of the same commit (`benchmarks.suite --repeat N`; with
`--against OLD` the two commits take turns, so that what the machine does meanwhile falls on both).

    from 3 runs a side  a metric has moved when the order of its runs tells the sides apart (Mann-Whitney, two
                        sides, p <= 0.05; of 3 and 3 runs 0.1, the least they can have: all of one below all
                        of the other), and the medians differ by more than its noise: benchmarks/directions.py
    from fewer          ratios, recalls and sizes are compared by their medians and that noise; seconds,
                        rates and memory are not: nothing says how far they move by themselves
    never               runs with other arguments (or known on one side only), or seconds of another machine
    always              what must be 0 is 0 in every new run, whatever it was before

Exit status 1 when something became worse, or has no result any more: a benchmark that failed says nothing of
itself. `--partial`: NEW holds some benchmarks on purpose.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any, Literal, get_args

from scipy.stats import mannwhitneyu

from benchmarks.directions import Rule, rule
from benchmarks.report import measured, show

Report = Mapping[str, Any]
Verdict = Literal["better", "worse", "same", "not compared", "gone", "new"]
RUNS = 3  # a side, from which their order says something
LEVEL = 0.05
MACHINE = ("system", "processor", "cpus", "memory_gb")


@dataclass(frozen=True)
class Change:
    """One metric of one benchmark, in all runs of both sides."""

    benchmark: str
    metric: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    verdict: Verdict
    why: str = ""


def main() -> None:
    """Parse arguments, compare, print; exits 1 on a regression."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--all", action="store_true", help="also what did not move, and what is not compared")
    parser.add_argument(
        "--partial", action="store_true", help="NEW lacks some of OLD's benchmarks on purpose"
    )
    options = parser.parse_args()
    for path in (options.old, options.new):
        if not path.exists():
            parser.error(f"{path} does not exist: give a folder of results or one JSON file")
    worse = tell(options.old, options.new, everything=options.all, partial=options.partial)
    sys.exit(1 if worse else 0)


def tell(before: Path, after: Path, *, everything: bool = False, partial: bool = False) -> bool:
    """Print what moved between two folders of results; whether that is a reason to stop.

    SystemExit when they have nothing in common.
    """
    old, new = read(before), read(after)
    found = compare(old, new)
    if not found:
        raise SystemExit(f"{before} and {after} have no benchmark with metrics in common")
    moved = [each for each in found if each.verdict in ("better", "worse", "gone", "new")]
    shown = found if everything else moved
    if shown:
        show(f"{before} -> {after}", [_line(each) for each in shown])
    counts = {verdict: sum(each.verdict == verdict for each in found) for verdict in get_args(Verdict)}
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    for why in sorted({each.why for each in found if each.verdict == "not compared"}):
        print(f"not compared: {sum(each.why == why for each in found)} {why}")
    gone = {*old} - {*new} if after.is_dir() else set()
    for path, missing in ((after, gone), (before, {*new} - {*old})):
        if missing and path.is_dir():
            print(f"not in {path}: {', '.join(sorted(missing))}")
    return bool(counts["worse"] or (gone and not partial))


def read(path: Path) -> dict[str, list[Report]]:
    """Benchmark -> its runs; files without metrics are none."""
    found: dict[str, list[Report]] = {}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        name = re.sub(r"(\.\d+)?\.json$", "", file.name)
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise SystemExit(f"{file} is no JSON ({error}): remove it, or run the benchmark again") from error
        if isinstance(report, dict) and report.get("metrics"):
            found.setdefault(name, []).append(report)
    return found


def compare(old: Mapping[str, Sequence[Report]], new: Mapping[str, Sequence[Report]]) -> list[Change]:
    """Every metric of the benchmarks that both sides have; what must be 0, of all that the new side has."""
    changes = []
    for benchmark, runs in sorted(new.items()):
        before = old.get(benchmark, [])
        same_machine = len({_machine(run) for run in [*before, *runs]}) == 1
        # Known on both sides, or on none.
        same_arguments = len({_measured(run.get("command")) for run in [*before, *runs]}) <= 1
        names = dict.fromkeys(name for run in [*before, *runs] for name in run["metrics"])
        for metric in names:
            sides = _values(before, metric), _values(runs, metric)
            known = rule(metric)
            if not before and (known is None or known.better != "zero"):
                continue
            judged = judge(known, *sides, same_machine=same_machine, same_arguments=same_arguments)
            changes.append(Change(benchmark, metric, *sides, *judged))
    return changes


def judge(
    known: Rule | None,
    old: Sequence[float],
    new: Sequence[float],
    *,
    same_machine: bool = True,
    same_arguments: bool = True,
) -> tuple[Verdict, str]:
    """Whether a metric is better, worse or the same, and why it is not compared."""
    if known is not None and known.better == "zero" and new:
        if any(new):
            return "worse", "must be 0"
        return ("better" if any(old) else "same"), ""
    if known is not None and known.better == "zero":
        return "worse", "must be 0, and is no more told"
    if not old or not new:
        return ("gone", "") if old else ("new", "")
    if known is None:
        return "not compared", "of no known direction: benchmarks/directions.py"
    if known.better == "either":
        return "not compared", "neither better nor worse by themselves"
    if not same_arguments:
        return "not compared", "with other arguments, or those of one side are not known"
    several = min(len(old), len(new)) >= RUNS
    if known.of_the_machine and not same_machine:
        return "not compared", "absolute, of another machine"
    if known.of_the_machine and not several:
        return "not compared", f"absolute, of fewer than {RUNS} runs a side"
    before, after = statistics.median(old), statistics.median(new)
    if (several and not _apart(old, new)) or abs(after - before) <= known.between(before, after):
        return "same", ""
    return ("better" if (after > before) == (known.better == "higher") else "worse"), ""


def _apart(old: Sequence[float], new: Sequence[float]) -> bool:
    """Whether the order of all runs tells the sides apart: by as little as chance can, or as LEVEL asks."""
    least = 2 / comb(len(old) + len(new), len(old))
    return float(mannwhitneyu(old, new, method="exact").pvalue) <= max(LEVEL, least) + 1e-9


def _measured(command: str | None) -> str | None:
    """A command without where it reads what was measured before: of a table it is no matter."""
    return command and " ".join(word for word in measured(command.split()) if word != "--finished")


def _values(runs: Sequence[Report], metric: str) -> tuple[float, ...]:
    return tuple(float(run["metrics"][metric]) for run in runs if run["metrics"].get(metric) is not None)


def _machine(run: Report) -> tuple[Any, ...]:
    return tuple(run.get("environment", {}).get(key) for key in MACHINE)


def _line(change: Change) -> dict[str, Any]:
    old, new = (statistics.median(side) if side else None for side in (change.old, change.new))
    return {
        "benchmark": change.benchmark,
        "metric": change.metric,
        "old": _side(change.old),
        "new": _side(change.new),
        "change": f"{(new - old) / abs(old):+.1%}" if old and new is not None else "-",
        "verdict": f"{change.verdict}: {change.why}" if change.why else change.verdict,
    }


def _side(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.4g}"
    return f"{middle} ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else middle


if __name__ == "__main__":
    main()
