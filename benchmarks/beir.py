"""Sets in BEIR's layout: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv in a folder of $SCALINGNOTE_DATA."""

import os
from pathlib import Path

from benchmarks.public_sets import Row, json_rows


def folder(name: str) -> Path:
    """Return the folder of a set."""
    return Path(os.environ.get("SCALINGNOTE_DATA", "data")) / name


def documents(name: str) -> list[Row]:
    """Return the documents: _id, title and text."""
    return list(json_rows(folder(name) / "corpus.jsonl"))


def judged(name: str, split: str = "test") -> dict[str, list[str]]:
    """Return the relevant documents of each query of a split; queries without one are left out."""
    relevant: dict[str, list[str]] = {}
    for line in (folder(name) / "qrels" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query_id, doc_id, grade = line.split("\t")
        if int(grade) > 0:
            relevant.setdefault(query_id, []).append(doc_id)
    return relevant


def queries(name: str) -> dict[str, str]:
    """Return the texts of all queries by their ids."""
    return {row["_id"]: row["text"] for row in json_rows(folder(name) / "queries.jsonl")}
