"""Tables that stand in the docs, made from docs/results.

    <!-- table distillation.json: tables / medquad, scratch -->
    (rows with equal keys, from there in the file)
    <!-- end of table -->

``python -m benchmarks.performance`` renews them with docs/performance.md, ``--check`` compares them too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.line import Report
from benchmarks.report import table

TABLE = re.compile(
    r"(?P<first><!-- table (?P<name>\w+)\.json: (?P<keys>[^>]+) -->\n).*?(?P<last><!-- end of table -->)",
    re.S,
)


def renewed(docs: Path, reports: Mapping[str, Report]) -> Iterator[tuple[Path, str]]:
    """Every page below `docs` that has such tables, and its text with them as `reports` have them."""
    for path in sorted(docs.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if TABLE.search(page):
            yield path, filled(page, reports)


def filled(page: str, reports: Mapping[str, Report]) -> str:
    """The page with its tables made anew; where there are no results, they stay as they are."""
    return TABLE.sub(lambda found: _table(found, reports), page)


def _table(found: re.Match[str], reports: Mapping[str, Report]) -> str:
    name, keys = found["name"], found["keys"].split(" / ")
    if name not in reports:
        return found[0]
    rows: Any = reports[name]
    for key in keys:
        if key not in rows:
            raise SystemExit(
                f"docs/results/{name}.json has no {key!r} where {found['first'].strip()} looks for it"
            )
        rows = rows[key]
    return f"{found['first']}\n{table(_dense(rows))}\n\n{found['last']}"


def _dense(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Without the first column's repetitions: a page is read from above."""
    first = next(iter(rows[0]))
    above = [None, *(row[first] for row in rows)]
    return [{**row, first: ""} if row[first] == last else row for row, last in zip(rows, above, strict=False)]
