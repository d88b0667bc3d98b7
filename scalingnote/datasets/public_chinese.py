"""Public Chinese data sets: titled paragraphs with questions, medical questions, web search results.

`sources` says where their files come from.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scalingnote.datasets.raw_rows import (
    Row,
    Source,
    UnreadableRow,
    csv_rows,
    distinct_rows,
    first_sentence,
    json_lines,
    map_rows,
    readable_rows,
    text_id,
)
from scalingnote.errors import DataError

# --- DRCD (traditional), CMRC 2018, XQuAD-zh: titled paragraphs with questions people wrote for them ----
#
# A document is a paragraph under its article's title; its questions are queries. Groups are articles, so
# that no article is both trained on and tested. These are reading-comprehension sets: a question was
# written with its paragraph in view, and only that paragraph is judged.

TITLES_FILES = (
    "DRCD_dev.json",
    "DRCD_test.json",
    "cmrc2018_dev.json",
    "cmrc2018_trial.json",
    "xquad.zh.json",
)


def read_titles(directory: Path) -> Source:
    """Paragraphs with equal text are one document; equal questions are one query."""
    rows = [row for name in TITLES_FILES for row in _titles_questions(directory / name)]
    return Source(
        documents=distinct_rows(rows, "doc_id"),
        queries=distinct_rows((row for row in rows if row["query"]), "query_id"),
        qrels=distinct_rows((row for row in rows if row["query"]), "pair"),
    )


def _titles_questions(path: Path) -> Iterator[Row]:
    """A row per question with its paragraph; a paragraph without questions is one row without a query."""
    try:
        articles = json.loads(path.read_bytes())["data"]
        for article in articles:
            title = article["title"].replace("_", " ")
            for paragraph in article["paragraphs"]:
                yield from _titles_paragraph(title, paragraph)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not SQuAD JSON ({type(error).__name__} {error}): fetch zh_reading_titles again"
        ) from None


def _titles_paragraph(title: str, paragraph: dict[str, Any]) -> Iterator[Row]:
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


# --- Chinese patients' questions to doctors (sample of internal medicine) -------------------------------
#
# The title that the patient wrote is the query. A document is the doctor's answer: topic = the
# department, content = the answer, title = the answer's first sentence, since the document must contain
# nothing that the patient wrote. Equal answers are one document, equal titles one query. The file is GB18030.


MEDICAL_FILE = "sample_neike_5000-6000.csv"


def read_medical(directory: Path) -> Source:
    """One judged pair per row of the file."""

    def rows() -> Iterator[Row | UnreadableRow]:
        return map_rows(csv_rows(directory / MEDICAL_FILE, encoding="gb18030"), _medical_pair)

    unreadable = (row for row in rows() if isinstance(row, UnreadableRow))
    documents = distinct_rows(readable_rows(rows()), "doc_id")
    return Source(
        documents=(row for part in (documents, unreadable) for row in part),
        queries=distinct_rows(readable_rows(rows()), "query_id"),
        qrels=distinct_rows(readable_rows(rows()), "pair"),
    )


def _medical_pair(row: Row) -> Row:
    query_id = text_id(row["title"].strip(), prefix="q")
    doc_id = text_id(row["answer"].strip(), prefix="a")
    return {
        "doc_id": doc_id,
        "title": first_sentence(row["answer"], max_chars=64),
        "topic": row["department"],
        "content": row["answer"],
        "query_id": query_id,
        "query": row["title"],
        "pair": f"{query_id} {doc_id}",
        "relevance": 1,
    }


# --- Demo of DuReader 2.0 (He et al. 2018): web queries, the pages an engine ranked and those selected --
#
# A document is a result page: title, content = its paragraphs. The impressions have the pages and ranks of a
# real engine; a "click" is a page that the annotators selected as an answer, and there are no timestamps. The
# 100 queries of the test file have no selection: their pages are documents without judgements. Groups are
# queries, since the pages of one query repeat each other.


_DUREADER_PARTS = ("train", "dev", "test")
DUREADER_FILES = tuple(f"search.{part}.jsonl" for part in _DUREADER_PARTS)


def read_dureader(directory: Path) -> Source:
    """Pages, labelled queries, selections as grades 1 and 0, and impressions."""

    def each(expand: Callable[[Row], Iterator[Row]], *, report: bool) -> Iterator[Row | UnreadableRow]:
        for name in DUREADER_FILES:
            for row in json_lines(directory / name):
                if isinstance(row, UnreadableRow):
                    if report:
                        yield row
                    continue
                try:
                    yield from list(expand(row))
                except (KeyError, TypeError, AttributeError) as error:
                    if report:
                        yield UnreadableRow(repr(row)[:400], f"not in the source's format: {error!r}")

    return Source(
        documents=each(_dureader_pages, report=True),
        queries=each(_dureader_query, report=False),
        qrels=each(_dureader_selections, report=False),
        impressions=each(_dureader_exposures, report=False),
        notes={"clicks": "pages an annotator selected, exposed at the engine's ranks; times are unknown"},
    )


def convert_dureader(downloads: Path, target: Path) -> None:
    """Copy the rows without the segmented copies of every text."""
    kept = ("question_id", "question", "question_type", "fact_or_opinion", "answers")
    for part in _DUREADER_PARTS:
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


def _dureader_pages(row: Row) -> Iterator[Row]:
    for number, page in enumerate(row["documents"]):
        yield {
            "doc_id": _dureader_doc_id(row, number),
            "title": page["title"],
            "content": "\n".join(page["paragraphs"]),
            "group": f"dureader-{row['question_id']}",
        }


def _dureader_query(row: Row) -> Iterator[Row]:
    if any(page["is_selected"] is not None for page in row["documents"]):
        yield {"query_id": row["question_id"], "query": row["question"]}


def _dureader_selections(row: Row) -> Iterator[Row]:
    for number, page in enumerate(row["documents"]):
        if page["is_selected"] is not None:
            yield {
                "query_id": row["question_id"],
                "doc_id": _dureader_doc_id(row, number),
                "relevance": int(page["is_selected"]),
            }


def _dureader_exposures(row: Row) -> Iterator[Row]:
    for selection, page in zip(_dureader_selections(row), row["documents"], strict=False):
        yield {
            **selection,
            "session_id": f"dureader-{row['question_id']}",
            "position": page["rank"] + 1,
            "clicked": page["is_selected"],
            "timestamp": 0,
        }


def _dureader_doc_id(row: Row, number: int) -> str:
    return f"{row['question_id']}-{number}"
