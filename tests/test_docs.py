"""Links and anchors of the documentation lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted({ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")} - {ROOT / "docs/architecture.md"})
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """The text without fenced blocks and code spans, whose brackets are no links."""
    return re.sub(r"^ *```.*?^ *```$|`[^`\n]+`(?!\])", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path):
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page}: {link}"
