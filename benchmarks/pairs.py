"""Questions and answers of a public set, split so that no answer held out is learnt from."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import beir
from benchmarks.public_sets import json_rows, source_files

POOL = 150  # answers held out


class Pairs(NamedTuple):
    """Questions and their answers, for training and held out."""

    train: list[tuple[str, str]]
    held_out: list[tuple[str, str]]


def pairs_of(name: str) -> Pairs:
    """Pairs of a set. Of POOL groups a pair is held out, and no pair for training has its document or query.

    A group is what answers the same: the documents of a disease (medquad), the accepted answer of a question
    (stackexchange_devops), a judged document (a folder of BEIR).
    """
    own = {"medquad": _medquad, "stackexchange_devops": _devops}
    rows = [*(own[name](source_files(name)) if name in own else _beir(name))]
    random.Random(0).shuffle(rows)
    by_group: dict[str, list[tuple[str, str]]] = {}
    for group, question, document in rows:
        by_group.setdefault(group, []).append((question, document))
    groups = list(by_group.values())
    held_out = [group[0] for group in groups[:POOL]]
    asked = {question for question, _ in held_out}
    return Pairs([pair for group in groups[POOL:] for pair in group if pair[0] not in asked], held_out)


def _medquad(folder: Path) -> Iterator[tuple[str, str, str]]:
    for row in json_rows(folder / "qa.jsonl"):
        if row["answer"].strip():
            yield row["focus"], row["question"], f"{row['focus']} {row['answer']}"  # its title and its text


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
