"""docs/performance.md: every benchmark's figures in one table, with plots, from the files of docs/results.

    python -m benchmarks.performance           writes the page between its markers, the tables of other pages
                                               (benchmarks/pages.py) and the plots
    python -m benchmarks.performance --check   exit status 1 when a page is not what the results say

The text around the markers is written by hand. Plots are drawn anew but not compared: their bytes depend on
the version of matplotlib.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from benchmarks import lines_offline, lines_online, pages, performance_plots
from benchmarks.line import Line, Lines, Report
from benchmarks.report import measured
from benchmarks.sizes import BENCHMARKS

HERE = Path(__file__).parents[1]
PAGE, RESULTS = HERE / "docs/performance.md", HERE / "docs/results"
BEGIN, END = "<!-- from here on: python -m benchmarks.performance -->", "<!-- up to here -->"
PARTS: Mapping[str, tuple[str, ...]] = {
    "Training": ("train", "methods", "sources", "teacher", "distillation", "faults", "gpu"),
    "Collecting": ("collect",),
    "Encoding": ("encode", "native", "cluster_faults", "random_access"),
    "Storage and scale": ("object_store", "shuffle", "scale", "stage_faults"),
    "Semantic IDs": ("quantize",),
    "Fusion": ("fusion",),
    "Query encoders": ("query_encoder", "front_door", "mteb_agreement"),
    "Index": ("index", "sparse_index", "document_store", "searcher_memory"),
    "Live index": ("live_index",),
    "Serving": ("serve", "fanout", "serve_faults", "exposure", "api_fuzz"),
    "Vector databases": ("backends", "exports"),
    "Experiments": ("experiment",),
    "Scaling laws": ("ladder",),
    "Package": ("package",),
    "Papers in small": ("reproduce", "decoders"),
}
PIPELINES = (
    "medquad",
    "python_docs",
)  # whole runs of `make compare`: docs/results/readings.md has their tables


def main() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a page is another")
    options = parser.parse_args()
    if options.check:
        found = stale(read(RESULTS))
        for path in found:
            print(f"{path}: differs from the results: run this without --check")
        sys.exit(bool(found))
    update()
    print(PAGE)


def update() -> None:
    """Write the pages, and the plots that docs/results has the data for."""
    reports = read(RESULTS)
    performance_plots.draw(reports, RESULTS)
    for path, text in renewed(reports):
        path.write_text(text, encoding="utf-8")


def stale(reports: Mapping[str, Report]) -> list[Path]:
    """Pages that say something else than the results."""
    return [path for path, text in renewed(reports) if text != path.read_text(encoding="utf-8")]


def renewed(reports: Mapping[str, Report]) -> Iterator[tuple[Path, str]]:
    """Every page that is made from results, and what it is to say."""
    yield PAGE, filled(PAGE.read_text(encoding="utf-8"), reports)
    yield from pages.renewed(HERE / "docs", reports)


def read(folder: Path) -> dict[str, Report]:
    """Benchmark -> its results, of several runs the first."""
    found: dict[str, Report] = {}
    for path in sorted(folder.glob("*.json")):
        name, _, number = path.stem.partition(".")
        if number in ("", "1"):
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def filled(page: str, reports: Mapping[str, Report]) -> str:
    """The page with the text between its markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise SystemExit(f"{PAGE} needs the lines {BEGIN!r} and {END!r}, once, in this order")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n\n{content(reports)}\n\n{END}{after}"


def content(reports: Mapping[str, Report]) -> str:
    """Tables and plots as Markdown."""
    rows = rows_of(reports)
    missed = [row for row in rows if "not met" in row["bar"]]
    barred = [row for row in rows if row["bar"] != "-"]
    letters = machines(reports)
    summary = f"{len(barred)} lines have a bar: {len(barred) - len(missed)} meet it, {len(missed)} do not"
    if missed:
        summary += f" ({', '.join(dict.fromkeys(row['from'] for row in missed))})"
    parts = [summary + ".", table(rows), "## Commands and machines", table(list(commands(reports, letters)))]
    parts.append("\n".join(f"- {letter}: {machine}" for machine, letter in letters.items()))
    if others := sorted({*reports} - {name for names in PARTS.values() for name in names} - {*PIPELINES}):
        links = ", ".join(f"[{name}](results/{name}.json)" for name in others)
        parts.append(f"Measured too, and in no line above: {links}.")
    parts += ["## Plots", performance_plots.markdown(reports)]
    return "\n\n".join(parts)


def rows_of(reports: Mapping[str, Report], *, only: Collection[str] | None = None) -> list[dict[str, str]]:
    """The table's rows; a benchmark without results has a row with its command."""
    rows = []
    for part, names in PARTS.items():
        for name in [name for name in names if only is None or name in only]:
            there = name in reports
            found = (
                lines(name, reports[name]) if there else [Line(f"not measured yet: `{command(name)}`", "-")]
            )
            link = f"[{name}](results/{name}.json)" if there else name
            rows += [{"part": part, **line.cells(), "from": link} for line in found]
    return rows


def lines(name: str, report: Report) -> list[Line]:
    """What a benchmark's results say; where they have another form, a line that says so."""
    made: Callable[[Report], Lines] = getattr(lines_offline, name, None) or getattr(lines_online, name)
    found: list[Line] = []
    try:
        for line in made(report):
            found.append(line)
        if not found:
            raise KeyError("lines")
    except (KeyError, IndexError, StopIteration, RuntimeError, ValueError) as error:
        found.append(Line("some lines of these results are missing", f"no {error}"))
    return found


def commands(reports: Mapping[str, Report], letters: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """How each benchmark was started, and where."""
    for names in PARTS.values():
        for name in names:
            report = reports.get(name, {})
            where = letters[machine(report)] if report else "not measured yet"
            yield {
                "benchmark": name,
                "command": f"`{report.get('command') or command(name)}`",
                "machine": where,
            }


def command(name: str) -> str:
    """What measures it at the size of docs/results, without where it writes to."""
    (known,) = [benchmark for benchmark in BENCHMARKS if benchmark.name == name]
    words = measured(shlex.split(known.full))
    return shlex.join(["python", "-m", f"benchmarks.{name}", *words, "--json", f"docs/results/{name}.json"])


def machines(reports: Mapping[str, Report]) -> dict[str, str]:
    """Machine and versions -> a letter."""
    found = [reports[name] for names in PARTS.values() for name in names if name in reports]
    return {each: chr(ord("A") + n) for n, each in enumerate(dict.fromkeys(map(machine, found)))}


def machine(report: Report) -> str:
    """Machine and versions in a line."""
    facts = dict(report.get("environment", {}))
    first = f"{facts.pop('system', '?')}, {facts.pop('processor', 'processor not recorded')}, "
    first += f"{facts.pop('cpus', '?')} CPUs, {facts.pop('memory_gb', '?')} GB"
    device = [report["device"]] if "device" in report else []
    return ", ".join([*device, first, *(f"{name} {version}" for name, version in facts.items())])


def table(rows: list[dict[str, str]]) -> str:
    """Markdown; cells that repeat what stands above them are left empty in the first column."""
    lines_ = [[*rows[0]], ["---"] * len(rows[0])]
    above = ""
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row.values()]
        lines_.append(["" if cells[0] == above else cells[0], *cells[1:]])
        above = cells[0]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines_)


if __name__ == "__main__":
    main()
