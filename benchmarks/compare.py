"""Compare the metrics of two folders of results: medians, ranges and the change.

    python -m benchmarks.compare build/benchmarks/OLD build/benchmarks/NEW [--all]

NAME.1.json, NAME.2.json, ... are runs of one benchmark (`benchmarks.suite --repeat N`). The table has the
metrics whose ranges of runs do not overlap, with --all every metric. Seconds of different machines or
arguments are not comparable: a benchmark with another environment or command is marked with *.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import plain_parser, show

Report = Mapping[str, Any]
MACHINE = ("system", "processor", "cpus", "memory_gb")


def main() -> None:
    """Print a row for each metric that changed."""
    parser = plain_parser(__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--all", action="store_true", help="also metrics with overlapping ranges")
    options = parser.parse_args()
    old, new = read(options.old), read(options.new)
    if not old.keys() & new.keys():
        raise SystemExit(f"{options.old} and {options.new} have no benchmark in common")
    rows = [row for row in compare(old, new) if row.pop("apart") or options.all]
    if rows:
        show(f"{options.old} -> {options.new}", rows)
    for path, names in ((options.new, old.keys() - new.keys()), (options.old, new.keys() - old.keys())):
        if names:
            print(f"\nnot in {path}: {', '.join(sorted(names))}")


def read(folder: Path) -> dict[str, list[Report]]:
    """Return the runs of each benchmark in a folder."""
    runs: dict[str, list[Report]] = {}
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("metrics"):
            runs.setdefault(re.sub(r"(\.\d+)?\.json$", "", path.name), []).append(report)
    return runs


def compare(
    old: Mapping[str, Sequence[Report]], new: Mapping[str, Sequence[Report]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric that both sides have; ``apart``: whether the ranges do not overlap."""
    for name in sorted(old.keys() & new.keys()):
        runs = [*old[name], *new[name]]
        conditions = {(run.get("command"), *(run["environment"].get(key) for key in MACHINE)) for run in runs}
        for metric in dict.fromkeys(metric for run in runs for metric in run["metrics"]):
            before, after = (
                [run["metrics"][metric] for run in side[name] if metric in run["metrics"]]
                for side in (old, new)
            )
            if not before or not after:
                continue
            first, last = statistics.median(before), statistics.median(after)
            yield {
                "benchmark": name + "*" * (len(conditions) > 1),
                "metric": metric,
                "old": _side(before),
                "new": _side(after),
                "change": f"{(last - first) / abs(first):+.1%}" if first else "-",
                "apart": max(before) < min(after) or max(after) < min(before),
            }


def _side(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.4g}"
    return f"{middle} ({min(values):.4g} to {max(values):.4g})" if len(values) > 1 else middle


if __name__ == "__main__":
    main()
