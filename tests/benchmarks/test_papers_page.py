"""The page of the papers' claims: it is short, and committed results have every number on it."""

import json
import re
from pathlib import Path

from benchmarks.performance import TABLE

RESULTS = Path("docs/results")
MOST_WORDS = 2000
NUMBER = re.compile(r"(?<![\w.:/-])\d+(?:[.,]\d+)*(?![\w/-])")
OF_PAPERS = {"7"}  # 7B: the size of their models


def numbers(text: str) -> set[str]:
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def test_every_number_in_the_text_is_in_the_results():
    page = (RESULTS / "papers.md").read_text(encoding="utf-8")
    assert sum(any(map(str.isalnum, word)) for word in page.split()) <= MOST_WORDS
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`|^    .*$", "", TABLE.sub("", page), flags=re.M)
    result_numbers: set[float] = set()
    for name in ("reproduce", "decoders"):
        report = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        parts = [
            report[part] for part in ("metrics", "settings", "tables", "rows", "terms") if part in report
        ]
        result_numbers |= {round(float(number), 6) for number in numbers(json.dumps(parts))}
    page_numbers = numbers(prose) - OF_PAPERS
    assert len(page_numbers) > 5
    assert {number for number in page_numbers if float(number) not in result_numbers} == set()
