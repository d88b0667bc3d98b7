"""MedQuAD (Ben Abacha and Demner-Fushman 2019): medical questions in, answers as documents out.

A document is one answer: title = the focus (a disease, a drug), topic = question type and category,
content = the answer. Groups are foci, so no focus is both trained on and tested. Pairs whose answer the
publishers withdrew for copyright are not there: 16,407 of 47,441 remain.
"""

import json
import xml.etree.ElementTree as ET
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scalingnote.datasets.config import MedQuad
from scalingnote.datasets.download import Remote, check
from scalingnote.datasets.rows import (
    Row,
    Source,
    Unreadable,
    first_of_each,
    json_lines,
    mapped,
    readable,
    text_id,
)

_COMMIT = "577bd37b96c02d1833b2c9eed2de9f96964e96cb"
FILES = ("qa.jsonl",)
# GitHub makes the archive afresh, so its bytes may change; the rows drawn from it are what is pinned.
REMOTES = (Remote("medquad.zip", f"https://github.com/abachaa/MedQuAD/archive/{_COMMIT}.zip", None),)
_QA_SHA256 = "e7611999c3d32912ade836b649bc42c97233a9c7b37973b4427147fbefbc5baf"


def read(config: MedQuad, directory: Path) -> Source:
    """An identical question text is one query with several relevant answers."""
    path = directory / "qa.jsonl"
    return Source(
        documents=mapped(_answers(path), _document),
        queries=map(_query, first_of_each(readable(_answers(path)), "query_id")),
        qrels=map(_qrel, readable(_answers(path))),
    )


def convert(downloads: Path, target: Path) -> None:
    """The repository's 11,274 XML files as one JSON-lines file, checked against its known sha256."""
    with zipfile.ZipFile(downloads / "medquad.zip") as archive, (target / "qa.jsonl").open("wb") as stream:
        for name in sorted(n for n in archive.namelist() if n.endswith(".xml")):
            for row in _pairs(archive.read(name), collection=name.split("/")[-2]):
                stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    check(target / "qa.jsonl", _QA_SHA256, remedy="the archive is not the commit it should be")


def _pairs(xml: bytes, *, collection: str) -> Iterator[Row]:
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


def _answers(path: Path) -> Iterator[Row | Unreadable]:
    """Rows with a unique `doc_id`: some files of the source repeat each other's question ids."""
    met: Counter[str] = Counter()

    def name(row: Row) -> Row:
        met[row["qa_id"]] += 1
        again = met[row["qa_id"]]
        return {
            "doc_id": row["qa_id"] if again == 1 else f"{row['qa_id']}~{again}",
            "query_id": text_id(row["question"], prefix="q"),
            **{key: row[key] for key in ("question", "answer", "focus", "qtype", "category")},
        }

    return mapped(json_lines(path), name)


def _document(row: Row) -> Row:
    return {
        "doc_id": row["doc_id"],
        "title": row["focus"],
        "topic": " ".join(part for part in (row["qtype"], row["category"]) if part),
        "content": row["answer"],
        "group": " ".join(row["focus"].casefold().split()),
    }


def _query(row: Row) -> Row:
    return {"query_id": row["query_id"], "query": row["question"]}


def _qrel(row: Row) -> Row:
    return {"query_id": row["query_id"], "doc_id": row["doc_id"], "relevance": 1}
