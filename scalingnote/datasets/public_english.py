"""Public English data sets: MedQuAD, devops.stackexchange.com and the Chorus electronics shop.

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
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

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

# --- MedQuAD (Ben Abacha and Demner-Fushman 2019): medical questions and answers -----------------------
#
# A document is one answer: title = the focus (a disease, a drug), topic = question type and category,
# content = the answer. Groups are foci, so no focus is in both training and test. The publishers withdrew
# answers for copyright: 16,407 of 47,441 pairs remain.


def read_medquad(directory: Path) -> Source:
    """Equal question texts are one query with several relevant answers."""
    path = directory / "qa.jsonl"
    return Source(
        documents=map_rows(_medquad_answers(path), _medquad_document),
        queries=map(_medquad_query, distinct_rows(readable_rows(_medquad_answers(path)), "query_id")),
        qrels=map(_medquad_qrel, readable_rows(_medquad_answers(path))),
    )


def convert_medquad(downloads: Path, target: Path) -> None:
    """Convert the repository's 11,274 XML files to one JSON-lines file."""
    with zipfile.ZipFile(downloads / "medquad.zip") as archive, (target / "qa.jsonl").open("wb") as stream:
        for name in sorted(n for n in archive.namelist() if n.endswith(".xml")):
            for row in _medquad_pairs(archive.read(name), collection=name.split("/")[-2]):
                stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


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


def _medquad_answers(path: Path) -> Iterator[Row | UnreadableRow]:
    """Rows with a unique `doc_id`: some question ids occur in several files of the source."""
    count: Counter[str] = Counter()

    def name(row: Row) -> Row:
        count[row["qa_id"]] += 1
        occurrence = count[row["qa_id"]]
        return {
            "doc_id": row["qa_id"] if occurrence == 1 else f"{row['qa_id']}~{occurrence}",
            "query_id": text_id(row["question"], prefix="q"),
            **{key: row[key] for key in ("question", "answer", "focus", "qtype", "category")},
        }

    return map_rows(json_lines(path), name)


def _medquad_document(row: Row) -> Row:
    return {
        "doc_id": row["doc_id"],
        "title": row["focus"],
        "topic": " ".join(part for part in (row["qtype"], row["category"]) if part),
        "content": row["answer"],
        "group": " ".join(row["focus"].casefold().split()),
    }


def _medquad_query(row: Row) -> Row:
    return {"query_id": row["query_id"], "query": row["question"]}


def _medquad_qrel(row: Row) -> Row:
    return {"query_id": row["query_id"], "doc_id": row["doc_id"], "relevance": 1}


# --- devops.stackexchange.com until September 2020: question titles are queries ------------------------
#
# A document is an answer: topic = the question's tags, content = the answer, title = the answer's first
# sentence (the question's title is the query, so it must not be in the document). Grades: 3 accepted, 2 at
# least three votes, 1 not voted down, 0 voted down. Groups are questions.


def read_devops(directory: Path) -> Source:
    """Answered questions; answers without their question are rejected."""
    questions = {
        row["id"]: row
        for row in readable_rows(map_rows(json_lines(directory / "questions.jsonl"), _devops_question))
    }

    def answers() -> Iterator[Row | UnreadableRow]:
        def join(row: Row) -> Row:
            question = questions[row["parent_id"]]
            return {
                "doc_id": row["id"],
                "title": first_sentence(row["body"]),
                "topic": question["topic"],
                "content": row["body"],
                "group": row["parent_id"],
                "pair": f"{question['query_id']} {row['id']}",
                "votes": row["score"],
                "query_id": question["query_id"],
                "relevance": _devops_grade(row["score"], accepted=question["accepted"] == row["id"]),
            }

        return map_rows(json_lines(directory / "answers.jsonl"), join)

    return Source(
        documents=answers(),
        queries=distinct_rows(questions.values(), "query_id"),
        qrels=distinct_rows(readable_rows(answers()), "pair"),
        features=pa.schema({"votes": pa.int64()}),
    )


def convert_devops(downloads: Path, target: Path) -> None:
    """Split posts.csv of the archive into questions and answers, without HTML."""
    with tarfile.open(downloads / "devops.tgz") as archive:
        member = archive.extractfile("posts.csv")
        assert member is not None, "the archive's sha256 was checked"
        lines = (line.decode("utf-8") for line in member)
        with (
            (target / "questions.jsonl").open("w", encoding="utf-8") as questions,
            (target / "answers.jsonl").open("w", encoding="utf-8") as answers,
        ):
            for post in csv.DictReader(lines):
                common = {"id": post["id"], "body": strip_html(html.unescape(post["body"]))}
                if post["post_type_id"] == "1":
                    tags = re.findall(r"<([^<>]+)>", html.unescape(post["tags"]))
                    row = {
                        **common,
                        "title": html.unescape(html.unescape(post["title"])),
                        "tags": tags,
                        "accepted_answer_id": post["accepted_answer_id"],
                    }
                    questions.write(json.dumps(row, ensure_ascii=False) + "\n")
                elif post["post_type_id"] == "2":
                    row = {**common, "parent_id": post["parent_id"], "score": int(post["score"])}
                    answers.write(json.dumps(row, ensure_ascii=False) + "\n")


def strip_html(markup: str) -> str:
    """The text of an HTML fragment on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def _devops_question(row: Row) -> Row:
    return {
        "id": row["id"],
        "query_id": text_id(row["title"], prefix="q"),
        "query": row["title"],
        "topic": " ".join(row["tags"]),
        "accepted": row.get("accepted_answer_id"),
    }


def _devops_grade(votes: int, *, accepted: bool) -> int:
    if accepted:
        return 3
    return 2 if votes >= 3 else int(votes >= 0)


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
    with (target / "products.jsonl").open("w", encoding="utf-8") as stream:
        for name in ICECAT_ZIPS:
            with zipfile.ZipFile(downloads / name) as archive:
                products = json.loads(archive.read(name.removesuffix(".zip")))
            for product in products:
                row = {key: value for key, value in product.items() if not key.startswith("img_")}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    (target / ICECAT_JUDGEMENTS).write_bytes((downloads / ICECAT_JUDGEMENTS).read_bytes())


def _icecat_product(row: Row) -> Row:
    attributes = [
        f"{_icecat_label(key)}: {value if isinstance(value, str) else _icecat_shown(value)}"
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
    return {
        "query_id": text_id(row["query"], prefix="q"),
        "query": row["query"],
        "doc_id": row["docid"],
        "relevance": int(row["rating"]),
    }


def _icecat_label(key: str) -> str:
    """attr_t_product_colour -> product colour"""
    return key.split("_", 2)[2].strip("_").replace("_", " ")


def _icecat_shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)
