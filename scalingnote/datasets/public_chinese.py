"""Public Chinese data sets: titled paragraphs with questions, medical questions, web search results.

Each section ends with the :class:`DownloadedSource` that `sources` registers.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scalingnote.datasets.download import Description, DownloadedSource, Remote, github
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

_TITLES_DRCD = ("DRCKnowledgeTeam/DRCD", "b944790de5af02c5fbb7cd9cb1473d27d169eebf")
_TITLES_CMRC = ("ymcui/cmrc2018", "c0eb1b6ba219847457e6af3180da722bbeb656af")
_TITLES_XQUAD = ("deepmind/xquad", "60cac411649156efb6aab9dd4c9cde787a2c0345")
_TITLES_REMOTES = (
    Remote(
        "DRCD_dev.json",
        github(*_TITLES_DRCD, "DRCD_dev.json"),
        "e236df03861ba241bd7b29628cd48b3b8e339c60137e041a4358b5320ed61928",
    ),
    Remote(
        "DRCD_test.json",
        github(*_TITLES_DRCD, "DRCD_test.json"),
        "d9de0b4d247a8391ac8daee6c02c2c8272b75562a1e2377b50ae04ecc09a7438",
    ),
    Remote(
        "cmrc2018_dev.json",
        github(*_TITLES_CMRC, "squad-style-data/cmrc2018_dev.json"),
        "e9ff74231f05c230c6fa88b84441ee334d97234cbb610991cd94b82db00c7f1f",
    ),
    Remote(
        "cmrc2018_trial.json",
        github(*_TITLES_CMRC, "squad-style-data/cmrc2018_trial.json"),
        "f3fae95b57da8e03afb2b57467dd221417060ef4d82db13bf22fc88589f3a6f3",
    ),
    Remote(
        "xquad.zh.json",
        github(*_TITLES_XQUAD, "xquad.zh.json"),
        "691d0b3359bc6b8faa8de931dfdfe21d50a65861ae348e32a0d1a0190b0c8835",
    ),
)


def _read_titles(directory: Path) -> Source:
    """Paragraphs with equal text are one document; equal questions are one query."""
    rows = [row for remote in _TITLES_REMOTES for row in _titles_questions(directory / remote.name)]
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


ZH_READING_TITLES = DownloadedSource(
    Description(
        "zh_reading_titles",
        "titled paragraphs with human questions: DRCD, CMRC 2018, XQuAD-zh",
        languages="zh",
        licence="CC BY-SA 3.0 and 4.0",
    ),
    files=tuple(remote.name for remote in _TITLES_REMOTES),
    remotes=_TITLES_REMOTES,
    read=_read_titles,
)


# --- Chinese patients' questions to doctors (sample of internal medicine) -------------------------------
#
# The title that the patient wrote is the query. A document is the doctor's answer: topic = the
# department, content = the answer, title = the answer's first sentence, since the document must contain
# nothing that the patient wrote. Equal answers are one document, equal titles one query. The file is GB18030.


_MEDICAL_COMMIT = "26724a4357fcd142f0cab81188cacf1a2dd8a827"
_MEDICAL_NAME = "sample_neike_5000-6000.csv"


def _read_medical(directory: Path) -> Source:
    """One judged pair per row of the file."""

    def rows() -> Iterator[Row | UnreadableRow]:
        return map_rows(csv_rows(directory / _MEDICAL_NAME, encoding="gb18030"), _medical_pair)

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


ZH_MEDICAL_QA = DownloadedSource(
    Description(
        "zh_medical_qa",
        "7,644 medical questions with department and answer",
        languages="zh",
        licence="MIT",
    ),
    files=(_MEDICAL_NAME,),
    remotes=(
        Remote(
            _MEDICAL_NAME,
            # the URL of 样例_内科5000-6000.csv, the file's name in the repository
            github(
                "Toyhom/Chinese-medical-dialogue-data",
                _MEDICAL_COMMIT,
                "%E6%A0%B7%E4%BE%8B_%E5%86%85%E7%A7%915000-6000.csv",
            ),
            "133e5f7e9a3255468375c258381d131b1dc0a4fff6d431cbe743884139b1eb25",
        ),
    ),
    read=_read_medical,
)


# --- Demo of DuReader 2.0 (He et al. 2018): web queries, the pages an engine ranked and those selected --
#
# A document is a result page: title, content = its paragraphs. The impressions have the pages and ranks of a
# real engine; a "click" is a page that the annotators selected as an answer, and there are no timestamps. The
# 100 queries of the test file have no selection: their pages are documents without judgements. Groups are
# queries, since the pages of one query repeat each other.


_DUREADER = ("baidu/DuReader", "c625076b06da8f56d59f19c41c73bd580a98a347")
_DUREADER_SHA256 = {
    "train": "ce2f61b93861203b4b2e1c03a2db558142bfa4edb2c758b9665bd003adfc49bc",
    "dev": "f7d7174d2cc81738f2554c3aa69f89af7b8d0f4bc808f1c3547469d12469e3a8",
    "test": "0bef9888ec67e8734b95b18b51907ae8c277e12eb8b9c90a4fd903783c72bd22",
}
_DUREADER_FILES = tuple(f"search.{part}.jsonl" for part in _DUREADER_SHA256)


def _read_dureader(directory: Path) -> Source:
    """Pages, labelled queries, selections as grades 1 and 0, and impressions."""

    def each(expand: Callable[[Row], Iterator[Row]], *, report: bool) -> Iterator[Row | UnreadableRow]:
        for name in _DUREADER_FILES:
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


def _convert_dureader(downloads: Path, target: Path) -> None:
    """Copy the rows without the segmented copies of every text."""
    kept = ("question_id", "question", "question_type", "fact_or_opinion", "answers")
    for part in _DUREADER_SHA256:
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


DUREADER_DEMO_ZH = DownloadedSource(
    Description(
        "dureader_demo_zh",
        "200 labelled web queries and 1,393 result pages with engine ranks and an annotator's selection",
        languages="zh",
        licence="Apache-2.0",
    ),
    files=_DUREADER_FILES,
    remotes=tuple(
        Remote(
            f"search.{part}.json",
            github(*_DUREADER, f"DuReader-2.0/data/demo/{part}set/search.{part}.json"),
            sha256,
        )
        for part, sha256 in _DUREADER_SHA256.items()
    ),
    read=_read_dureader,
    convert=_convert_dureader,
)
