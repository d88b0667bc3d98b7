"""Hooks of mkdocs.yml: pages that do not lie in docs/, and links that lead out of it.

The site has the pages at the top of the repository (README.md is its first page), the generated reference,
and a copy of every other file that a page links to, below its path in the repository. So each link leads
somewhere without a host of the repository, and the strict build fails on one that does not.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference_pages

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TOP = {  # pages at the top of the repository -> of the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)\s#]+)(?=[)#])")  # without its anchor


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, pages of the repository's top, and files that pages link to."""
    for name, page in reference_pages.PAGES.items():
        files.append(File.generated(config, f"reference/{name}", content=page()))
    for name, place in TOP.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    linked = {target for file in files.documentation_pages() for target in _targets(file)}
    for target in sorted(target for target in linked if not _is_page(target)):
        place = target.relative_to(ROOT).as_posix()
        files.append(File.generated(config, place, abs_src_path=str(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository to links between pages of the site."""
    if page.file.src_uri == "reference/README.md":
        markdown += "\n" + "".join(
            f"- [{name.removesuffix('.md')}]({name})\n" for name in reference_pages.PAGES
        )
    folder, start = _source(page.file).parent, Path(page.file.src_uri).parent

    def rewritten(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[1]))
        return os.path.relpath(_place(target), start) if target.is_file() else link[1]

    return LINK.sub(rewritten, markdown)


def _targets(file: File) -> Iterator[Path]:
    """Files that a page links to."""
    for link in LINK.findall(file.content_string):
        target = Path(os.path.normpath(_source(file).parent / link))
        if target.is_file():
            yield target


def _is_page(target: Path) -> bool:
    return target.is_relative_to(DOCS) or target in {ROOT / name for name in TOP}


def _source(file: File) -> Path:
    """Where the links of a page start."""
    top = {place: ROOT / name for name, place in TOP.items()}
    return top.get(file.src_uri, DOCS / file.src_uri)


def _place(target: Path) -> str:
    """Where a file of the repository lies in the site's sources."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = target.relative_to(ROOT).as_posix()
    return TOP.get(name, name)
