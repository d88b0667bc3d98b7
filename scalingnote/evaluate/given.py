"""What a user brings to be measured on: judged pairs, answers and candidates, read and checked at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.datasets.columns import table_rows
from scalingnote.datasets.config import TableFile
from scalingnote.errors import DataError
from scalingnote.evaluate.config import EvaluateConfig, Judgements
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact


@dataclass(frozen=True)
class Pairs:
    """Pairs of a query and a document."""

    queries: list[str]  # their texts
    doc_ids: list[str]
    labels: dict[str, Float[ndarray, " pairs"]]  # name -> each pair's
    unusable: int = 0  # rows of a file that were left out


@dataclass(frozen=True)
class Given:
    """All that there is to measure beside the test set's retrieval."""

    pairs: Pairs | None
    candidates: tuple[trec.Run, TestSet] | None
    answers: dict[str, list[str]] | None

    @property
    def queries(self) -> list[str]:
        """Texts that have to be encoded for it."""
        return self.pairs.queries if self.pairs else []


def read(config: EvaluateConfig, dataset: Artifact, *, test: TestSet) -> Given:
    """What the config names."""
    if config.judgements:
        table = dataset.table("queries", columns=["query_id", "query"])
        known = dict(zip(table["query_id"].to_pylist(), table["query"].to_pylist(), strict=True))
        pairs: Pairs | None = judgements(config.judgements, known=known)
    else:
        pairs = judged(test)
    return Given(
        pairs,
        candidates(config.candidates, test=test) if config.candidates else None,
        answers(config.answers, test=test) if config.answers else None,
    )


def judgements(config: Judgements, *, known: Mapping[str, str]) -> Pairs:
    """Judged pairs of a file; `known` maps query_ids to texts.

    A row without a document, a query or one of the labels is left out and counted. DataError when none is
    usable, or a label is the same everywhere.
    """
    names = ["query_id", "query", "doc_id", *config.labels]
    queries, doc_ids, labels, unusable = [], [], [], 0
    for row in table_rows(TableFile(path=config.path, columns=config.columns), names, needs=["doc_id"]):
        if not isinstance(row, dict):
            unusable += 1
            continue
        query = _text(row.get("query")) or known.get(str(row.get("query_id")))
        values = [_number(row.get(name)) for name in config.labels] if query else []
        if not query or row.get("doc_id") in (None, "") or any(map(math.isnan, values)):
            unusable += 1
            continue
        queries.append(query)
        doc_ids.append(str(row["doc_id"]))
        labels.append(values)
    if not queries:
        raise DataError(
            f"{config.path}: none of {unusable:,} rows has a doc_id, a query or a known query_id, and "
            f"{', '.join(config.labels)}: map its columns with evaluate.judgements.columns"
        )
    columns = dict(zip(config.labels, np.array(labels).T, strict=True))
    for name, column in columns.items():
        if len(np.unique(column)) < 2:
            raise DataError(f"{config.path}: {name} is {column[0]:g} in all rows: AUC needs two labels")
    return Pairs(queries, doc_ids, columns, unusable)


def judged(test: TestSet) -> Pairs | None:
    """The test set's own judgements; None where all of them are the same."""
    found = [
        (query, doc_id, float(grade))
        for query, query_id in zip(test.queries, test.query_ids, strict=True)
        for doc_id, grade in test.qrels[query_id].items()
    ]
    queries, doc_ids, grades = map(list, zip(*found, strict=True))
    if len(set(grades)) < 2:
        return None
    return Pairs(queries, doc_ids, {"relevance": np.array(grades)})


def answers(file: TableFile, *, test: TestSet) -> dict[str, list[str]]:
    """Query -> its answers, for test queries that have some; rows of one query add up."""
    found: dict[str, list[str]] = {}
    asked = set(test.query_ids)
    for row in table_rows(file, ["query_id", "answers"], needs=["query_id", "answers"]):
        if isinstance(row, dict) and str(row.get("query_id")) in asked:
            given = row.get("answers")
            texts = map(_text, given if isinstance(given, list) else [given])
            found.setdefault(str(row["query_id"]), []).extend(text for text in texts if text.strip())
    found = {query: texts for query, texts in found.items() if texts}
    if not found:
        raise DataError(f"{file.path} has no answers to any of {len(asked):,} test queries: check query_id")
    return found


def candidates(path: str, *, test: TestSet) -> tuple[trec.Run, TestSet]:
    """A given run's results for test queries, and the part of the test set that it covers."""
    run = trec.read_run(path)
    covered = [(q, text) for q, text in zip(test.query_ids, test.queries, strict=True) if run.get(q)]
    if not covered:
        raise DataError(
            f"{path} has candidates for {len(run):,} queries, none of them among {len(test.query_ids):,} "
            "test queries: check its query ids"
        )
    ids = [query_id for query_id, _ in covered]
    part = replace(
        test, query_ids=ids, queries=[text for _, text in covered], qrels={q: test.qrels[q] for q in ids}
    )
    return {query_id: run[query_id] for query_id in ids}, part


def _text(value: object) -> str:
    """A text or a number as text; empty for what is neither."""
    return str(value) if isinstance(value, str | int | float) else ""


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
