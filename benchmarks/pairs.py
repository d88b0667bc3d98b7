"""Questions and answers of a public set, split so that no held-out answer is trained on."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import beir
from benchmarks.public_sets import json_rows, source_files

POOL = 150  # held-out answers


class Pairs(NamedTuple):
    """Questions and their answers, for training and for the test."""

    train: list[tuple[str, str]]
    held_out: list[tuple[str, str]]


def pairs_of(name: str) -> Pairs:
    """Return the pairs of a set: one of each of POOL groups is held out, and its texts are not in training.

    A group has equivalent answers: the documents of a disease (medquad), the accepted answer of a question
    (stackexchange_devops), a judged document (a folder of BEIR).
    """
    readers = {"medquad": _medquad, "stackexchange_devops": _devops}
    rows = [*(readers[name](source_files(name)) if name in readers else _beir(name))]
    random.Random(0).shuffle(rows)
    by_group: dict[str, list[tuple[str, str]]] = {}
    for group, question, document in rows:
        by_group.setdefault(group, []).append((question, document))
    groups = list(by_group.values())
    held_out = [group[0] for group in groups[:POOL]]
    held_out_questions = {question for question, _ in held_out}
    return Pairs(
        [pair for group in groups[POOL:] for pair in group if pair[0] not in held_out_questions], held_out
    )


def _medquad(folder: Path) -> Iterator[tuple[str, str, str]]:
    for row in json_rows(folder / "qa.jsonl"):
        if row["answer"].strip():
            yield row["focus"], row["question"], f"{row['focus']} {row['answer']}"  # title and text


def _devops(folder: Path) -> Iterator[tuple[str, str, str]]:
    answers = {row["id"]: row["body"] for row in json_rows(folder / "answers.jsonl")}
    for row in json_rows(folder / "questions.jsonl"):
        if (accepted := row.get("accepted_answer_id", "")) in answers:
            yield accepted, row["title"], answers[accepted]


def _beir(name: str) -> Iterator[tuple[str, str, str]]:
    texts = {row["_id"]: f"{row['title']} {row['text']}" for row in beir.documents(name)}
    queries = beir.queries(name)
    for file in sorted((beir.folder(name) / "qrels").glob("*.tsv")):
        for query_id, doc_ids in beir.judged(name, file.stem).items():
            yield from ((doc_id, queries[query_id], texts[doc_id]) for doc_id in doc_ids)
