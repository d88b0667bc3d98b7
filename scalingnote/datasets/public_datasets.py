"""Public data sets, English and Chinese: how their downloads are converted, and how the results are read.

`sources` says where their files come from.
"""

import csv
import html
import json
import re
import tarfile
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from scalingnote.datasets.raw_rows import (
    Row,
    Rows,
    Source,
    UnreadableRow,
    csv_rows,
    distinct_rows,
    expand_rows,
    first_sentence,
    json_lines,
    map_rows,
    readable_rows,
    text_id,
)
from scalingnote.errors import DataError


def _write_json_lines(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _query(text: str, doc_id: str) -> Row:
    """The columns of a query that a document answers."""
    query_id = text_id(text.strip(), prefix="q")
    return {"query_id": query_id, "query": text, "pair": f"{query_id} {doc_id}", "relevance": 1}


def _distinct_pairs(rows: Callable[[], Rows]) -> Source:
    """A source whose rows hold a document, and a query that it answers or none; equal ones are read once."""
    queries, qrels = ((row for row in readable_rows(rows()) if "query" in row) for _ in range(2))
    return Source(
        documents=distinct_rows(rows(), "doc_id"),
        queries=distinct_rows(queries, "query_id"),
        qrels=distinct_rows(qrels, "pair"),
    )


# --- MedQuAD (Ben Abacha and Demner-Fushman 2019): medical questions and answers -----------------------
#
# A document is one answer: title = the focus (a disease, a drug), topic = question type and category,
# content = the answer. Groups are foci, so no focus is in both training and test. The publishers withdrew
# answers for copyright: 16,407 of 47,441 pairs remain.


def read_medquad(directory: Path) -> Source:
    """A judged pair in each row; equal question texts are one query."""

    def rows() -> Rows:
        count: Counter[str] = Counter()  # some question ids occur in several files of the source

        def pair(row: Row) -> Row:
            count[row["qa_id"]] += 1
            again = count[row["qa_id"]]
            doc_id = row["qa_id"] if again == 1 else f"{row['qa_id']}~{again}"
            document = {
                "doc_id": doc_id,
                "title": row["focus"],
                "topic": " ".join(part for part in (row["qtype"], row["category"]) if part),
                "content": row["answer"],
                "group": " ".join(row["focus"].casefold().split()),
            }
            return document | _query(row["question"], doc_id)

        return map_rows(json_lines(directory / "qa.jsonl"), pair)

    return _distinct_pairs(rows)


def convert_medquad(downloads: Path, target: Path) -> None:
    """Convert the repository's 11,274 XML files to one JSON-lines file."""
    with zipfile.ZipFile(downloads / "medquad.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".xml"))
        pairs = (_medquad_pairs(archive.read(name), collection=name.split("/")[-2]) for name in names)
        _write_json_lines(target / "qa.jsonl", chain.from_iterable(pairs))


def _medquad_pairs(xml: bytes, *, collection: str) -> Iterator[Row]:
    document = ET.fromstring(xml)

    def text(node: ET.Element, path: str) -> str:
        return " ".join((node.findtext(path) or "").split())

    for pair in document.iter("QAPair"):
        question, answer = pair.find("Question"), text(pair, "Answer")
        if question is None or not answer:
            continue
        yield {
            "qa_id": f"{collection}/{question.get('qid')}",
            "collection": collection,
            "source": document.get("source") or "",
            "url": document.get("url") or "",
            "focus": text(document, "Focus"),
            "synonyms": [" ".join((s.text or "").split()) for s in document.iter("Synonym")],
            "category": text(document, "FocusAnnotations/Category"),
            "qtype": question.get("qtype") or "",
            "question": " ".join((question.text or "").split()),
            "answer": answer,
        }


# --- devops.stackexchange.com until September 2020: question titles are queries ------------------------
#
# A document is an answer: topic = the question's tags, content = the answer, title = the answer's first
# sentence (the question's title is the query, so it must not be in the document). Grades: 3 accepted, 2 at
# least three votes, 1 not voted down, 0 voted down. Groups are questions.


def read_devops(directory: Path) -> Source:
    """Answered questions; answers without their question are rejected."""
    posts = readable_rows(json_lines(directory / "questions.jsonl"))
    questions = {row["id"]: row | {"query_id": text_id(row["title"], prefix="q")} for row in posts}

    def answer(row: Row) -> Row:
        question = questions[row["parent_id"]]
        grade = 2 if row["score"] >= 3 else int(row["score"] >= 0)
        return {
            "doc_id": row["id"],
            "title": first_sentence(row["body"]),
            "topic": " ".join(question["tags"]),
            "content": row["body"],
            "group": row["parent_id"],
            "pair": f"{question['query_id']} {row['id']}",
            "votes": row["score"],
            "query_id": question["query_id"],
            "relevance": 3 if question.get("accepted_answer_id") == row["id"] else grade,
        }

    def answers() -> Iterator[Row | UnreadableRow]:
        return map_rows(json_lines(directory / "answers.jsonl"), answer)

    queries = ({"query_id": row["query_id"], "query": row["title"]} for row in questions.values())
    return Source(
        documents=answers(),
        queries=distinct_rows(queries, "query_id"),
        qrels=distinct_rows(readable_rows(answers()), "pair"),
        features=pa.schema({"votes": pa.int64()}),
    )


def convert_devops(downloads: Path, target: Path) -> None:
    """Split posts.csv of the archive into questions and answers, without HTML."""
    with tarfile.open(downloads / "devops.tgz") as archive:
        member = archive.extractfile("posts.csv")
        assert member is not None, "the archive's sha256 was checked"
        posts = list(csv.DictReader(line.decode("utf-8") for line in member))

    def common(post: Row) -> Row:
        return {"id": post["id"], "body": strip_html(html.unescape(post["body"]))}

    questions = (
        {
            **common(post),
            "title": html.unescape(html.unescape(post["title"])),
            "tags": re.findall(r"<([^<>]+)>", html.unescape(post["tags"])),
            "accepted_answer_id": post["accepted_answer_id"],
        }
        for post in posts
        if post["post_type_id"] == "1"
    )
    answers = (
        {**common(post), "parent_id": post["parent_id"], "score": int(post["score"])}
        for post in posts
        if post["post_type_id"] == "2"
    )
    _write_json_lines(target / "questions.jsonl", questions)
    _write_json_lines(target / "answers.jsonl", answers)


def strip_html(markup: str) -> str:
    """The text of an HTML fragment on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


# --- The Chorus electronics shop (Icecat products): judged product search with features ----------------
#
# A document is a product: title, topic = supplier, content = model name, description and attributes as
# text; supplier, price and release date are kept as features. The 135 queries are judged 0-3 by people on
# 3,668 products; the 19 for which nothing relevant was found are set aside.


ICECAT_JUDGEMENTS = "Broad_Query_Set_rated.csv"
ICECAT_ZIPS = tuple(f"{number}.json.zip" for number in range(1, 5))


def read_icecat(directory: Path) -> Source:
    """Products and judged queries; equal query texts are one query."""

    def judgements() -> Iterator[Row | UnreadableRow]:
        return map_rows(csv_rows(directory / ICECAT_JUDGEMENTS), _icecat_judgement)

    return Source(
        documents=map_rows(json_lines(directory / "products.jsonl"), _icecat_product),
        queries=distinct_rows(readable_rows(judgements()), "query_id"),
        qrels=judgements(),
        features=pa.schema({"supplier": pa.string(), "price": pa.float64(), "date_released": pa.string()}),
    )


def convert_icecat(downloads: Path, target: Path) -> None:
    """Convert the four zipped JSON lists to one JSON-lines file without image URLs; copy the judgements."""

    def products(name: str) -> Iterator[Row]:
        with zipfile.ZipFile(downloads / name) as archive:
            for product in json.loads(archive.read(name.removesuffix(".zip"))):
                yield {key: value for key, value in product.items() if not key.startswith("img_")}

    _write_json_lines(target / "products.jsonl", chain.from_iterable(map(products, ICECAT_ZIPS)))
    (target / ICECAT_JUDGEMENTS).write_bytes((downloads / ICECAT_JUDGEMENTS).read_bytes())


def _icecat_product(row: Row) -> Row:
    attributes = [
        # attr_t_product_colour -> product colour
        f"{key.split('_', 2)[2].strip('_').replace('_', ' ')}: {_icecat_text(value)}"
        for key, value in row.items()
        if key.startswith("attr_")
    ]
    description = re.sub(r"<[^>]*>", " ", row.get("short_description") or "")
    lines = [row["name"], description, "; ".join(attributes)]
    return {
        "doc_id": row["id"],
        "title": row["title"],
        "topic": row["supplier"],
        "content": "\n".join(line for line in lines if line),
        "supplier": row["supplier"],
        "price": row.get("price"),
        "date_released": (row.get("date_released") or "")[:10],
    }


def _icecat_judgement(row: Row) -> Row:
    query_id = text_id(row["query"], prefix="q")
    grade = int(row["rating"])
    return {"query_id": query_id, "query": row["query"], "doc_id": row["docid"], "relevance": grade}


def _icecat_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


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
    return _distinct_pairs(lambda: rows)


def _titles_questions(path: Path) -> Iterator[Row]:
    """A row per question with its paragraph; a paragraph without questions is one row without a query."""
    try:
        for article in json.loads(path.read_bytes())["data"]:
            title = article["title"].replace("_", " ")
            for paragraph in article["paragraphs"]:
                yield from _titles_paragraph(title, paragraph)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not SQuAD JSON ({type(error).__name__} {error}): fetch zh_reading_titles again"
        ) from None


def _titles_paragraph(title: str, paragraph: dict[str, Any]) -> Iterator[Row]:
    context = paragraph["context"].strip()
    doc_id = text_id(f"{title}\n{context}", prefix="p")
    document = {"doc_id": doc_id, "title": title, "content": context, "group": title.casefold()}
    questions = [question for qa in paragraph["qas"] if (question := qa["question"].strip())]
    if not questions:
        yield document
    for question in questions:
        yield document | _query(question, doc_id)


# --- Chinese patients' questions to doctors (sample of internal medicine) -------------------------------
#
# The title that the patient wrote is the query. A document is the doctor's answer: topic = the
# department, content = the answer, title = the answer's first sentence, since the document must contain
# nothing that the patient wrote. Equal answers are one document, equal titles one query. The file is GB18030.


MEDICAL_FILE = "sample_neike_5000-6000.csv"


def read_medical(directory: Path) -> Source:
    """One judged pair per row of the file."""
    file = directory / MEDICAL_FILE
    return _distinct_pairs(lambda: map_rows(csv_rows(file, encoding="gb18030"), _medical_pair))


def _medical_pair(row: Row) -> Row:
    doc_id = text_id(row["answer"].strip(), prefix="a")
    title = first_sentence(row["answer"], max_chars=64)
    document = {"doc_id": doc_id, "title": title, "topic": row["department"], "content": row["answer"]}
    return document | _query(row["title"], doc_id)


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

    def each(expand: Callable[[Row], Iterator[Row]]) -> Iterator[Row | UnreadableRow]:
        rows = chain.from_iterable(json_lines(directory / name) for name in DUREADER_FILES)
        return expand_rows(rows, expand)

    return Source(
        documents=each(_dureader_pages),
        queries=readable_rows(each(_dureader_query)),
        qrels=readable_rows(each(_dureader_selections)),
        impressions=readable_rows(each(_dureader_exposures)),
        notes={"clicks": "pages an annotator selected, exposed at the engine's ranks; times are unknown"},
    )


def convert_dureader(downloads: Path, target: Path) -> None:
    """Copy the rows without the segmented copies of every text."""
    kept = ("question_id", "question", "question_type", "fact_or_opinion", "answers")

    def page(found: Row) -> Row:
        texts = {"title": found["title"], "paragraphs": found["paragraphs"]}
        return texts | {"is_selected": found.get("is_selected"), "rank": found["bs_rank_pos"]}

    for part in _DUREADER_PARTS:
        with (downloads / f"search.{part}.json").open("rb") as lines:  # as text, U+2028 would end a line
            rows = map(json.loads, lines)
            _write_json_lines(
                target / f"search.{part}.jsonl",
                (
                    {key: row[key] for key in kept if key in row}
                    | {"documents": [page(found) for found in row["documents"]]}
                    for row in rows
                ),
            )


def _dureader_pages(row: Row) -> Iterator[Row]:
    for number, page in enumerate(row["documents"]):
        yield {
            "doc_id": f"{row['question_id']}-{number}",
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
            doc_id, selected = f"{row['question_id']}-{number}", int(page["is_selected"])
            yield {"query_id": row["question_id"], "doc_id": doc_id, "relevance": selected}


def _dureader_exposures(row: Row) -> Iterator[Row]:
    for selection, page in zip(_dureader_selections(row), row["documents"], strict=False):
        yield {
            **selection,
            "session_id": f"dureader-{row['question_id']}",
            "position": page["rank"] + 1,
            "clicked": page["is_selected"],
            "timestamp": 0,
        }
