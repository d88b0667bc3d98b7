"""The page of the papers' claims: short, and every number on it stands in committed results."""

import json
import re
from pathlib import Path

from benchmarks.performance import TABLE

RESULTS = Path("docs/results")
MOST_WORDS = 2000
NUMBER = re.compile(r"(?<![\w.:/-])\d+(?:[.,]\d+)*(?![\w/-])")
OF_PAPERS = {"7"}  # 7B: the size of their models


def numbers(text: str) -> set[str]:
    return {found.replace(",", "") for found in NUMBER.findall(text)}


def test_every_number_in_the_text_is_in_the_results():
    page = (RESULTS / "papers.md").read_text(encoding="utf-8")
    assert sum(any(map(str.isalnum, word)) for word in page.split()) <= MOST_WORDS
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`|^    .*$", "", TABLE.sub("", page), flags=re.M)
    known: set[float] = set()
    for name in ("reproduce", "decoders"):
        report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        measured = [
            report[part] for part in ("metrics", "settings", "tables", "rows", "terms") if part in report
        ]
        known |= {round(float(number), 6) for number in numbers(json.dumps(measured))}
    asked = numbers(prose) - OF_PAPERS
    assert len(asked) > 5
    assert {number for number in asked if float(number) not in known} == set()
