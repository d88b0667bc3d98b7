"""DuReader 2.0's demo (He et al. 2018): Chinese web queries, the pages an engine ranked, the ones selected.

A document is a result page: title, content = its paragraphs. Impressions are real in what was exposed and
at which rank; for clicks they have the annotators' selection of pages that answer the query, and they
bear no time. The 100 queries of the test file have no selection: their pages are in the pool, unjudged.
Groups are queries, whose pages say the same things.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from scalingnote.datasets.config import DuReaderDemoZh
from scalingnote.datasets.download import Remote, github
from scalingnote.datasets.rows import Row, Source, Unreadable, json_lines

_COMMIT = "c625076b06da8f56d59f19c41c73bd580a98a347"
_SHA256 = {
    "train": "ce2f61b93861203b4b2e1c03a2db558142bfa4edb2c758b9665bd003adfc49bc",
    "dev": "f7d7174d2cc81738f2554c3aa69f89af7b8d0f4bc808f1c3547469d12469e3a8",
    "test": "0bef9888ec67e8734b95b18b51907ae8c277e12eb8b9c90a4fd903783c72bd22",
}
FILES = tuple(f"search.{part}.jsonl" for part in _SHA256)
REMOTES = tuple(
    Remote(
        f"search.{part}.json",
        github("baidu/DuReader", _COMMIT, f"DuReader-2.0/data/demo/{part}set/search.{part}.json"),
        sha256,
    )
    for part, sha256 in _SHA256.items()
)


def read(config: DuReaderDemoZh, directory: Path) -> Source:
    """Pages, labelled queries, selections as grades 1 and 0, and the exposures."""

    def each(expand: Callable[[Row], Iterator[Row]], *, report: bool) -> Iterator[Row | Unreadable]:
        for name in FILES:
            for row in json_lines(directory / name):
                if isinstance(row, Unreadable):
                    if report:
                        yield row
                    continue
                try:
                    yield from list(expand(row))
                except (KeyError, TypeError, AttributeError) as error:
                    if report:
                        yield Unreadable(repr(row)[:400], f"not in the source's format: {error!r}")

    return Source(
        documents=each(_pages, report=True),
        queries=each(_query, report=False),
        qrels=each(_selections, report=False),
        impressions=each(_exposures, report=False),
        notes={"clicks": "pages an annotator selected, exposed at the engine's ranks; times are unknown"},
    )


def convert(downloads: Path, target: Path) -> None:
    """The same rows without the segmented copies of every text."""
    kept = ("question_id", "question", "question_type", "fact_or_opinion", "answers")
    for part in _SHA256:
        with (
            (downloads / f"search.{part}.json").open("rb") as lines,  # as text, U+2028 would end a line
            (target / f"search.{part}.jsonl").open("w", encoding="utf-8") as stream,
        ):
            for line in lines:
                row = json.loads(line)
                pages = [
                    {
                        "title": page["title"],
                        "paragraphs": page["paragraphs"],
                        "is_selected": page.get("is_selected"),
                        "rank": page["bs_rank_pos"],
                    }
                    for page in row["documents"]
                ]
                slim = {key: row[key] for key in kept if key in row} | {"documents": pages}
                stream.write(json.dumps(slim, ensure_ascii=False) + "\n")


def _pages(row: Row) -> Iterator[Row]:
    for number, page in enumerate(row["documents"]):
        yield {
            "doc_id": _doc_id(row, number),
            "title": page["title"],
            "content": "\n".join(page["paragraphs"]),
            "group": f"dureader-{row['question_id']}",
        }


def _query(row: Row) -> Iterator[Row]:
    if any(page["is_selected"] is not None for page in row["documents"]):
        yield {"query_id": row["question_id"], "query": row["question"]}


def _selections(row: Row) -> Iterator[Row]:
    for number, page in enumerate(row["documents"]):
        if page["is_selected"] is not None:
            yield {
                "query_id": row["question_id"],
                "doc_id": _doc_id(row, number),
                "relevance": int(page["is_selected"]),
            }


def _exposures(row: Row) -> Iterator[Row]:
    for selection, page in zip(_selections(row), row["documents"], strict=False):
        yield {
            **selection,
            "session_id": f"dureader-{row['question_id']}",
            "position": page["rank"] + 1,
            "clicked": page["is_selected"],
            "timestamp": 0,
        }


def _doc_id(row: Row, number: int) -> str:
    return f"{row['question_id']}-{number}"
