"""Titled Chinese paragraphs with questions people wrote for them: DRCD (traditional), CMRC 2018 and XQuAD-zh.

A document is a paragraph under its article's title; its questions are queries. Groups are articles, so
that no article is both trained on and tested. These are reading-comprehension sets: a question was
written with its paragraph in view, and only that paragraph is judged.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalingnote.datasets.config import ZhReadingTitles
from scalingnote.datasets.download import Remote, github, keep
from scalingnote.datasets.rows import Row, Source, first_of_each, text_id
from scalingnote.errors import DataError

_DRCD = ("DRCKnowledgeTeam/DRCD", "b944790de5af02c5fbb7cd9cb1473d27d169eebf")
_CMRC = ("ymcui/cmrc2018", "c0eb1b6ba219847457e6af3180da722bbeb656af")
_XQUAD = ("deepmind/xquad", "60cac411649156efb6aab9dd4c9cde787a2c0345")
REMOTES = (
    Remote(
        "DRCD_dev.json",
        github(*_DRCD, "DRCD_dev.json"),
        "e236df03861ba241bd7b29628cd48b3b8e339c60137e041a4358b5320ed61928",
    ),
    Remote(
        "DRCD_test.json",
        github(*_DRCD, "DRCD_test.json"),
        "d9de0b4d247a8391ac8daee6c02c2c8272b75562a1e2377b50ae04ecc09a7438",
    ),
    Remote(
        "cmrc2018_dev.json",
        github(*_CMRC, "squad-style-data/cmrc2018_dev.json"),
        "e9ff74231f05c230c6fa88b84441ee334d97234cbb610991cd94b82db00c7f1f",
    ),
    Remote(
        "cmrc2018_trial.json",
        github(*_CMRC, "squad-style-data/cmrc2018_trial.json"),
        "f3fae95b57da8e03afb2b57467dd221417060ef4d82db13bf22fc88589f3a6f3",
    ),
    Remote(
        "xquad.zh.json",
        github(*_XQUAD, "xquad.zh.json"),
        "691d0b3359bc6b8faa8de931dfdfe21d50a65861ae348e32a0d1a0190b0c8835",
    ),
)
FILES = tuple(remote.name for remote in REMOTES)
convert = keep


def read(config: ZhReadingTitles, directory: Path) -> Source:
    """Paragraphs with equal text are one document; equal questions are one query."""
    rows = [row for name in FILES for row in _questions(directory / name)]
    return Source(
        documents=first_of_each(rows, "doc_id"),
        queries=first_of_each((row for row in rows if row["query"]), "query_id"),
        qrels=first_of_each((row for row in rows if row["query"]), "pair"),
    )


def _questions(path: Path) -> Iterator[Row]:
    """A row per question, with its paragraph; a paragraph without questions gives one row without a query."""
    try:
        articles = json.loads(path.read_bytes())["data"]
        for article in articles:
            title = article["title"].replace("_", " ")
            for paragraph in article["paragraphs"]:
                yield from _paragraph(title, paragraph)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not SQuAD JSON ({type(error).__name__} {error}): fetch zh_reading_titles again"
        ) from None


def _paragraph(title: str, paragraph: dict[str, Any]) -> Iterator[Row]:
    context = paragraph["context"].strip()
    document = {
        "doc_id": text_id(f"{title}\n{context}", prefix="p"),
        "title": title,
        "content": context,
        "group": title.casefold(),
        "query": "",
    }
    questions = [qa["question"].strip() for qa in paragraph["qas"]]
    if not questions:
        yield document
    for question in questions:
        query_id = text_id(question, prefix="q")
        pair = f"{query_id} {document['doc_id']}"
        yield {**document, "query_id": query_id, "query": question, "pair": pair, "relevance": 1}
