"""Measurements on files of the user: judged pairs for AUC, candidates to re-rank, answers to be found."""

import math
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import regex  # type: ignore[import-untyped]
from jaxtyping import Float
from numpy import ndarray

from scalingnote.bm25 import document_texts
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.file_formats import table_rows
from scalingnote.errors import DataError
from scalingnote.evaluate import measures
from scalingnote.evaluate.config import EvaluateConfig, Judgements
from scalingnote.evaluate.documents import find_documents
from scalingnote.evaluate.measures import Rankings, auc
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner

# Texts of queries and ids of documents, of equal length -> method -> a score per pair; NaN if a document is
# not in the pool.
PairScorer = Callable[[Sequence[str], Sequence[str]], Mapping[str, Float[ndarray, " pairs"]]]
# In scripts without blanks between words each character is a token, because an answer may begin anywhere.
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}]"
_TOKEN = regex.compile(rf"{_UNSPACED}|[[\p{{L}}\p{{N}}\p{{M}}]--{_UNSPACED}]+", regex.V1)


@dataclass(frozen=True)
class JudgedPairs:
    """Pairs of a query and a document with labels."""

    queries: list[str]  # their texts
    doc_ids: list[str]
    labels: dict[str, Float[ndarray, " pairs"]]  # name -> label of each pair
    unusable: int = 0  # rows of the file that were skipped


@dataclass(frozen=True)
class UserFiles:
    """Everything to measure beside retrieval on the test set."""

    pairs: JudgedPairs | None
    candidates: tuple[trec.Run, TestSet] | None
    answers: dict[str, list[str]] | None

    @property
    def queries(self) -> list[str]:
        """Texts of queries that have to be encoded."""
        return self.pairs.queries if self.pairs else []


def read_user_files(config: EvaluateConfig, dataset: Artifact, *, test: TestSet) -> UserFiles:
    """Read and check all files that the config names.

    Without a file of judgements, pairs are the test set's own judgements.
    """
    if config.judgements:
        table = dataset.table("queries", columns=["query_id", "query"])
        known = dict(zip(table["query_id"].to_pylist(), table["query"].to_pylist(), strict=True))
        pairs: JudgedPairs | None = read_judgements(config.judgements, known=known)
    else:
        pairs = test_set_pairs(test)
    return UserFiles(
        pairs,
        read_candidates(config.candidates, test=test) if config.candidates else None,
        read_answers(config.answers, test=test) if config.answers else None,
    )


def read_judgements(config: Judgements, *, known: Mapping[str, str]) -> JudgedPairs:
    """Judged pairs of a file. Rows without a document, a query or one of the labels are skipped and counted.

    Args:
        config: path, columns and labels.
        known: query_id -> text, for rows that name a query by its id.

    Raises:
        DataError: no row is usable, or a label has the same value everywhere.
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
    return JudgedPairs(queries, doc_ids, columns, unusable)


def test_set_pairs(test: TestSet) -> JudgedPairs | None:
    """The test set's own judgements as pairs; None if all grades are equal."""
    judged = [
        (query, doc_id, float(grade))
        for query, query_id in zip(test.queries, test.query_ids, strict=True)
        for doc_id, grade in test.qrels[query_id].items()
    ]
    queries, doc_ids, grades = map(list, zip(*judged, strict=True))
    if len(set(grades)) < 2:
        return None
    return JudgedPairs(queries, doc_ids, {"relevance": np.array(grades)})


def read_answers(file: TableFile, *, test: TestSet) -> dict[str, list[str]]:
    """Query id -> its answers, for test queries that have some. A query may have several rows."""
    answers_of: dict[str, list[str]] = {}
    query_ids = set(test.query_ids)
    for row in table_rows(file, ["query_id", "answers"], needs=["query_id", "answers"]):
        if isinstance(row, dict) and str(row.get("query_id")) in query_ids:
            value = row.get("answers")
            texts = map(_text, value if isinstance(value, list) else [value])
            answers_of.setdefault(str(row["query_id"]), []).extend(text for text in texts if text.strip())
    answers_of = {query: texts for query, texts in answers_of.items() if texts}
    if not answers_of:
        raise DataError(
            f"{file.path} has no answers to any of {len(query_ids):,} test queries: check query_id"
        )
    return answers_of


def read_candidates(path: str, *, test: TestSet) -> tuple[trec.Run, TestSet]:
    """Candidates of a TREC run for test queries, and the part of the test set it covers."""
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
    """Text or a number as text; empty for other values."""
    return str(value) if isinstance(value, str | int | float) else ""


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def auc_section(pairs: JudgedPairs, score: PairScorer) -> dict[str, Any]:
    """The section of report.json on AUC, over the pairs that every method can score."""
    scores = score(pairs.queries, pairs.doc_ids)
    known = np.all([np.isfinite(one) for one in scores.values()], axis=0)
    return {
        "pairs": int(known.sum()),
        "not_in_pool": int((~known).sum()),
        "unusable": pairs.unusable,
        "methods": {
            name: {
                f"AUC-{label}": _none_if_nan(auc(one[known], values[known]))
                for label, values in pairs.labels.items()
            }
            for name, one in scores.items()
        },
    }


def reranking_section(
    config: EvaluateConfig, candidates: trec.Run, test: TestSet, score: PairScorer
) -> tuple[dict[str, Any], dict[str, trec.Run]]:
    """The section of report.json on re-ranking, and the re-ranked runs by method.

    Candidates that are not in the pool come last, in their original order.
    """
    text = dict(zip(test.query_ids, test.queries, strict=True))
    pairs = [(query_id, doc_id) for query_id in test.query_ids for doc_id, _ in candidates[query_id]]
    queries, doc_ids = [text[query_id] for query_id, _ in pairs], [doc_id for _, doc_id in pairs]
    runs: dict[str, trec.Run] = {}
    absent = 0
    for name, scores in score(queries, doc_ids).items():
        unknown = np.isnan(scores)
        absent = max(absent, int(unknown.sum()))
        scores[unknown] = scores[~unknown].min(initial=0.0) - 1 - np.arange(unknown.sum())
        run: trec.Run = {query_id: [] for query_id in test.query_ids}
        for (query_id, doc_id), value in zip(pairs, scores.tolist(), strict=True):
            run[query_id].append((doc_id, value))
        runs[name] = {q: sorted(results, key=lambda hit: -hit[1]) for q, results in run.items()}
    rankings = {
        name: {q: [doc for doc, _ in results] for q, results in run.items()}
        for name, run in {"as given": candidates, **runs}.items()
    }
    part = {
        "queries": len(test.query_ids),
        "candidates": len(pairs),
        "not_in_pool": absent,
        "methods": measures.means(measures.measure_methods(config, rankings, qrels=test.qrels)),
    }
    return part, runs


def _none_if_nan(value: float) -> float | None:
    return None if np.isnan(value) else value


def normalised_words(text: str) -> str:
    """Case-folded words of a text, each between blanks."""
    words = _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())
    return f" {' '.join(words)} "


def answer_judgements(
    documents: Iterable[tuple[str, str]],
    *,
    asked: Mapping[str, Collection[str]],
    answers: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, int]]:
    """Query -> document -> 1 for documents that contain one of the query's answers.

    Args:
        documents: (doc_id, text).
        asked: doc_id -> queries to check it for.
        answers: query -> answers.
    """
    known = {
        query: [t for a in texts if (t := normalised_words(a)).strip()] for query, texts in answers.items()
    }
    qrels: dict[str, dict[str, int]] = {query: {} for query in answers}
    for doc_id, text in documents:
        if queries := asked.get(doc_id):
            words = normalised_words(text)
            for query in queries:
                if any(answer in words for answer in known[query]):
                    qrels[query][doc_id] = 1
    return qrels


def relaxed_recall(
    dataset: Artifact,
    rankings: Mapping[str, Rankings],
    *,
    answers: Mapping[str, Sequence[str]],
    recall_at: Sequence[int],
    each: TaskRunner = map,
) -> dict[str, Any]:
    """The section of report.json: the share of queries with an answer among their first K documents.

    A document that contains the words of an answer in sequence counts as relevant, whether it was judged or
    not (Karpukhin et al., 2020; EmbedDistill's relaxed recall).
    """
    asked: dict[str, set[str]] = {}
    for ranking in rankings.values():
        for query in answers:
            for doc_id in ranking[query][: max(recall_at)]:
                asked.setdefault(doc_id, set()).add(query)
    found = find_documents(dataset, asked, ["title", "topic", "content"], each=each)
    documents = zip(found["doc_id"].to_pylist(), document_texts(found), strict=True)
    qrels = answer_judgements(documents, asked=asked, answers=answers)

    def share(ranking: Rankings, k: int) -> float:
        return sum(any(doc in qrels[q] for doc in ranking[q][:k]) for q in answers) / len(answers)

    return {
        "queries": len(answers),
        "methods": {
            name: {f"R@{k}": share(ranking, k) for k in recall_at} for name, ranking in rankings.items()
        },
    }
