"""devops.stackexchange.com to September 2020: question titles in, answers as documents out.

A document is an answer: topic = the question's tags, content = the answer, title = the answer's first
sentence. The question's title cannot be the document's: it is the query. Grades: 3 accepted, 2 at least
three votes, 1 not voted down, 0 voted down. Groups are questions.
"""

import csv
import html
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from scalingnote.datasets.config import StackExchangeDevOps
from scalingnote.datasets.download import Remote, github
from scalingnote.datasets.rows import (
    Row,
    Source,
    Unreadable,
    first_of_each,
    first_sentence,
    json_lines,
    mapped,
    readable,
    text_id,
)

_COMMIT = "551c09260a515730304a2fed147301e202f350be"
FILES = ("questions.jsonl", "answers.jsonl")
REMOTES = (
    Remote(
        "devops.tgz",
        github("ai-powered-search/devops", _COMMIT, "devops.tgz"),
        "ab52655383535bc1efac38696f7bf939ee2c48ad9c659e28fa48a5ec1ef2e232",
    ),
)


def read(config: StackExchangeDevOps, directory: Path) -> Source:
    """Answered questions; answers of questions that are not there are set aside."""
    questions = {
        row["id"]: row for row in readable(mapped(json_lines(directory / "questions.jsonl"), _question))
    }

    def answers() -> Iterator[Row | Unreadable]:
        def join(row: Row) -> Row:
            question = questions[row["parent_id"]]
            return {
                "doc_id": row["id"],
                "title": first_sentence(row["body"]),
                "topic": question["topic"],
                "content": row["body"],
                "group": row["parent_id"],
                "votes": row["score"],
                "query_id": question["query_id"],
                "relevance": _grade(row["score"], accepted=question["accepted"] == row["id"]),
            }

        return mapped(json_lines(directory / "answers.jsonl"), join)

    return Source(
        documents=answers(),
        queries=first_of_each(questions.values(), "query_id"),
        qrels=first_of_each(
            ({**row, "pair": f"{row['query_id']} {row['doc_id']}"} for row in readable(answers())), "pair"
        ),
        features=pa.schema({"votes": pa.int64()}),
    )


def convert(downloads: Path, target: Path) -> None:
    """The one posts.csv of the archive, its HTML stripped, as questions and answers."""
    with tarfile.open(downloads / "devops.tgz") as archive:
        member = archive.extractfile("posts.csv")
        assert member is not None, "the sha256 of the archive promises it"
        lines = (line.decode("utf-8") for line in member)
        with (
            (target / "questions.jsonl").open("w", encoding="utf-8") as questions,
            (target / "answers.jsonl").open("w", encoding="utf-8") as answers,
        ):
            for post in csv.DictReader(lines):
                common = {"id": post["id"], "body": text_of(html.unescape(post["body"]))}
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


def text_of(markup: str) -> str:
    """The text of an HTML fragment on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def _question(row: Row) -> Row:
    return {
        "id": row["id"],
        "query_id": text_id(row["title"], prefix="q"),
        "query": row["title"],
        "topic": " ".join(row["tags"]),
        "accepted": row.get("accepted_answer_id"),
    }


def _grade(votes: int, *, accepted: bool) -> int:
    if accepted:
        return 3
    return 2 if votes >= 3 else int(votes >= 0)
