"""Measurements on files of the user: judged pairs for AUC, candidates to re-rank, and answers."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core import words
from scalingnote.core.bm25 import document_texts
from scalingnote.core.errors import DataError
from scalingnote.core.parts import Executor
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.readers import RUN_ROWS, find_trec_slices, read_run_slice, table_rows
from scalingnote.evaluate import measures
from scalingnote.evaluate.config import EvaluateConfig, Judgements
from scalingnote.evaluate.measures import Rankings, auc
from scalingnote.evaluate.pool import find_documents, find_rows, values_by_id
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

# Takes distinct texts of queries, and pairs of `query` and `doc_id`; returns method -> a score per pair, NaN
# if a document is not in the pool.
PairScoreFunction = Callable[[Sequence[str], pa.Table], Mapping[str, Float[ndarray, " pairs"]]]


@dataclass(frozen=True)
class PairLabels:
    """Labelled pairs: a table of `query` (its text), `doc_id` and a column of numbers for each label."""

    pairs: pa.Table
    labels: Sequence[str]  # names of the columns
    unusable: int = 0  # number of rows of the file that were skipped

    @property
    def queries(self) -> list[str]:
        """Distinct texts of the queries."""
        queries: list[str] = self.pairs["query"].unique().to_pylist()
        return queries

    def values(self, label: str) -> Float[ndarray, " pairs"]:
        """Return a label of each pair."""
        values: ndarray = self.pairs[label].to_numpy()
        return values


@dataclass(frozen=True)
class UserFiles:
    """Contents of the user's files, for measurements in addition to retrieval on the test set."""

    pairs: PairLabels | None
    candidates: tuple[trec.Run, TestSet] | None
    answers: dict[str, list[str]] | None

    @property
    def queries(self) -> list[str]:
        """Texts of queries that must be encoded."""
        return self.pairs.queries if self.pairs else []


def read_user_files(
    config: EvaluateConfig, dataset: Artifact, *, test: TestSet, each: Executor = map
) -> UserFiles:
    """Read and check all files that the config names.

    Without a file of judgements, pairs are the judgements of the test set.
    """
    judged = config.judgements
    return UserFiles(
        read_judgements(judged, dataset, each=each) if judged else test_set_pairs(test),
        read_candidates(config.candidates, test=test, each=each) if config.candidates else None,
        read_answers(config.answers, test=test) if config.answers else None,
    )


def read_judgements(config: Judgements, dataset: Artifact, *, each: Executor = map) -> PairLabels:
    """Read judged pairs from a file; skip and count rows without a document, a query or one of the labels.

    The dataset has the texts of queries that rows name by id; `each` runs the tasks that find them.

    Raises:
        DataError: no row is usable, or a label has the same value in all rows.
    """
    names = ["query_id", "query", "doc_id", *config.labels]
    files = TableFile(path=config.path, columns=config.columns)
    rows = [row for one in table_rows(files, names, needs=["doc_id"]) for row in one]
    readable = [row for row in rows if isinstance(row, dict)]
    by_id = {str(row.get("query_id")) for row in readable if not _text(row.get("query"))}
    text_of = {}
    if by_id:
        ids = pa.array(sorted(by_id), pa.string())
        text_of = values_by_id(
            find_rows(dataset, "queries", "query_id", ids, ["query_id", "query"], each=each)
        )
    pairs = []
    for row in readable:
        query = _text(row.get("query")) or text_of.get(str(row.get("query_id")))
        values = {name: _number(row.get(name)) for name in config.labels}
        if row.get("doc_id") not in (None, "") and query and not any(map(math.isnan, values.values())):
            pairs.append({"query": query, "doc_id": str(row["doc_id"]), **values})
    if not pairs:
        raise DataError(
            f"{config.path}: none of {len(rows):,} rows has a doc_id, a query or a known query_id, and "
            f"{', '.join(config.labels)}: map its columns with evaluate.judgements.columns"
        )
    labels = PairLabels(pa.Table.from_pylist(pairs), config.labels, len(rows) - len(pairs))
    for name in config.labels:
        if len(grades := np.unique(labels.values(name))) < 2:
            raise DataError(
                f"{config.path}: {name} is {grades[0]:g} in all rows: AUC needs two different labels"
            )
    return labels


def test_set_pairs(test: TestSet) -> PairLabels | None:
    """Return the judgements of the test set as pairs; None if all grades are equal."""
    judged = [
        (query, doc_id, float(grade))
        for query, query_id in zip(test.queries, test.query_ids, strict=True)
        for doc_id, grade in test.qrels[query_id].items()
    ]
    queries, doc_ids, grades = map(list, zip(*judged, strict=True))
    if len(set(grades)) < 2:
        return None
    return PairLabels(pa.table({"query": queries, "doc_id": doc_ids, "relevance": grades}), ["relevance"])


def read_answers(file: TableFile, *, test: TestSet) -> dict[str, list[str]]:
    """Read query id -> answers, for test queries that have answers; a query may have several rows."""
    answers_of: dict[str, list[str]] = {}
    query_ids = set(test.query_ids)
    slices = table_rows(file, ["query_id", "answers"], needs=["query_id", "answers"])
    for row in chain.from_iterable(slices):
        if isinstance(row, dict) and str(row.get("query_id")) in query_ids:
            value = row.get("answers")
            texts = map(_text, value if isinstance(value, list) else [value])
            answers_of.setdefault(str(row["query_id"]), []).extend(text for text in texts if text.strip())
    answers_of = {query: texts for query, texts in answers_of.items() if texts}
    if not answers_of:
        raise DataError(
            f"{file.path} has no answer to any of {len(query_ids):,} test queries: check query_id"
        )
    return answers_of


def read_candidates(path: str, *, test: TestSet, each: Executor = map) -> tuple[trec.Run, TestSet]:
    """Read candidates of test queries from a TREC run, and return them with the queries that have some."""
    task = partial(read_run_slice, query_ids=pa.array(test.query_ids, pa.string()))
    tables = [RUN_ROWS.empty_table(), *each(task, find_trec_slices(path))]
    run = trec.ordered_run(pa.concat_tables(tables), path)
    covered = [(q, text) for q, text in zip(test.query_ids, test.queries, strict=True) if run.get(q)]
    if not covered:
        raise DataError(
            f"{path} has candidates for none of {len(test.query_ids):,} test queries: check its query ids"
        )
    ids = [query_id for query_id, _ in covered]
    queries, qrels = [text for _, text in covered], {query_id: test.qrels[query_id] for query_id in ids}
    part = replace(test, query_ids=ids, queries=queries, qrels=qrels)
    return {query_id: run[query_id] for query_id in ids}, part


def _text(value: object) -> str:
    """Convert text or a number to text; other values give an empty string."""
    return str(value) if isinstance(value, str | int | float) else ""


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def auc_section(pairs: PairLabels, score: PairScoreFunction) -> dict[str, Any]:
    """Build the section of report.json on AUC, over the pairs that every method can score."""
    scores = score(pairs.queries, pairs.pairs)
    values = {name: pairs.values(name) for name in pairs.labels}
    in_pool = np.all([np.isfinite(one) for one in scores.values()], axis=0)
    return {
        "pairs": int(in_pool.sum()),
        "not_in_pool": int((~in_pool).sum()),
        "unusable": pairs.unusable,
        "methods": {
            name: {
                f"AUC-{label}": None if math.isnan(area := auc(one[in_pool], value[in_pool])) else area
                for label, value in values.items()
            }
            for name, one in scores.items()
        },
    }


def reranking_section(
    candidates: trec.Run, test: TestSet, score: PairScoreFunction, *, recall_at: Sequence[int]
) -> tuple[dict[str, Any], dict[str, trec.Run]]:
    """Build the section of report.json on re-ranking, and the re-ranked runs by method.

    Candidates that are not in the pool come last, in their original order.
    """
    text = dict(zip(test.query_ids, test.queries, strict=True))
    pairs = [(query_id, doc_id) for query_id in test.query_ids for doc_id, _ in candidates[query_id]]
    columns = {"query": [text[query_id] for query_id, _ in pairs], "doc_id": [doc for _, doc in pairs]}
    runs: dict[str, trec.Run] = {}
    absent = 0
    scores_of = score(list(dict.fromkeys(test.queries)), pa.table(columns))
    for name, scores in scores_of.items():
        unknown = np.isnan(scores)
        absent = max(absent, int(unknown.sum()))
        scores[unknown] = scores[~unknown].min(initial=0.0) - 1 - np.arange(unknown.sum())
        run: trec.Run = {query_id: [] for query_id in test.query_ids}
        for (query_id, doc_id), value in zip(pairs, scores.tolist(), strict=True):
            run[query_id].append((doc_id, value))
        runs[name] = {q: sorted(results, key=lambda hit: -hit[1]) for q, results in run.items()}
    rankings = measures.rankings_of({"as given": candidates, **runs}, test.query_ids)
    section = {
        "queries": len(test.query_ids),
        "candidates": len(pairs),
        "not_in_pool": absent,
        "methods": measures.means(measures.measure_methods(rankings, qrels=test.qrels, recall_at=recall_at)),
    }
    return section, runs


def normalised_words(text: str) -> str:
    """Return the words of a text (:mod:`scalingnote.core.words`), each between blanks.

    In scripts without blanks each letter is a word, because an answer may begin at any letter.
    """
    tokens: list[str] = []
    for word, unspaced in words.runs(words.UNSPACED).findall(words.fold(text)):
        tokens += [word] if word else words.clusters(unspaced)
    return f" {' '.join(tokens)} "


def answer_judgements(
    documents: Iterable[tuple[str, str]],
    *,
    queries_of: Mapping[str, Collection[str]],
    answers: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, int]]:
    """Judge documents (id and text) by the answers that they contain, and return query -> document -> 1.

    `queries_of` maps a document to the queries for which it is checked.
    """
    answers_of = {
        query: [t for a in texts if (t := normalised_words(a)).strip()] for query, texts in answers.items()
    }
    qrels: dict[str, dict[str, int]] = {query: {} for query in answers}
    for doc_id, text in documents:
        if queries := queries_of.get(doc_id):
            document = normalised_words(text)
            for query in queries:
                if any(answer in document for answer in answers_of[query]):
                    qrels[query][doc_id] = 1
    return qrels


def relaxed_recall(
    dataset: Artifact,
    rankings: Mapping[str, Rankings],
    *,
    answers: Mapping[str, Sequence[str]],
    recall_at: Sequence[int],
    each: Executor = map,
) -> dict[str, Any]:
    """Build the section of report.json on the share of queries with an answer in their first K documents.

    A document that contains the words of an answer in sequence counts as relevant, even if it was not judged
    (Karpukhin et al., 2020; EmbedDistill's relaxed recall).
    """
    queries_of: dict[str, set[str]] = {}
    for ranking in rankings.values():
        for query in answers:
            for doc_id in ranking[query][: max(recall_at)]:
                queries_of.setdefault(doc_id, set()).add(query)
    table = find_documents(dataset, queries_of, ["title", "topic", "content"], each=each)
    documents = zip(table["doc_id"].to_pylist(), document_texts(table), strict=True)
    qrels = answer_judgements(documents, queries_of=queries_of, answers=answers)

    def share(ranking: Rankings, k: int) -> float:
        return sum(any(doc in qrels[q] for doc in ranking[q][:k]) for q in answers) / len(answers)

    return {
        "queries": len(answers),
        "methods": {
            name: {f"R@{k}": share(ranking, k) for k in recall_at} for name, ranking in rankings.items()
        },
    }
