"""Measurements on files of the user: judged pairs for AUC, candidates to re-rank, answers to be found."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote import words
from scalingnote.bm25 import document_texts
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.file_formats import RUN_ROWS, find_trec_slices, read_run_slice, table_rows
from scalingnote.datasets.raw_rows import FileRows
from scalingnote.errors import DataError
from scalingnote.evaluate import measures
from scalingnote.evaluate.config import EvaluateConfig, Judgements
from scalingnote.evaluate.exact_search import PairTable
from scalingnote.evaluate.measures import Rankings, auc
from scalingnote.evaluate.pool import find_documents, find_rows, values_by_id
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage import filesystem as fs
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact, write_table
from scalingnote.storage.shuffle import TaskRunner

# Distinct texts of queries, and pairs of them -> method -> a score per pair; NaN if a document is not in the
# pool.
PairScorer = Callable[[Sequence[str], Sequence[PairTable]], Mapping[str, Float[ndarray, " pairs"]]]
_SLICE = pa.schema(  # of a file of judged pairs: a table of them, their distinct queries, and rows left out
    {"uri": pa.string(), "rows": pa.int64(), "queries": pa.list_(pa.string()), "unusable": pa.int64()}
)


@dataclass(frozen=True)
class JudgedPairs:
    """Pairs of a query and a document, with a column of numbers for each label."""

    queries: list[str]  # distinct texts
    pairs: Sequence[PairTable]
    labels: Sequence[str]  # names of the columns
    unusable: int = 0  # rows of the file that were skipped

    def values(self, label: str) -> Float[ndarray, " pairs"]:
        """A label of each pair."""
        return np.concatenate([table.read([label])[label].to_numpy() for table in self.pairs])


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


def read_user_files(
    config: EvaluateConfig, dataset: Artifact, *, test: TestSet, folder: str, each: TaskRunner = map
) -> UserFiles:
    """Read and check all files that the config names, in tasks that `each` runs; pairs go to `folder`.

    Without a file of judgements, pairs are the test set's own judgements.
    """
    judged = config.judgements
    return UserFiles(
        read_judgements(judged, dataset, folder=folder, each=each) if judged else test_set_pairs(test),
        read_candidates(config.candidates, test=test, each=each) if config.candidates else None,
        read_answers(config.answers, test=test) if config.answers else None,
    )


def read_judgements(
    config: Judgements, dataset: Artifact, *, folder: str, each: TaskRunner = map
) -> JudgedPairs:
    """Judged pairs of a file. Rows without a document, a query or one of the labels are skipped and counted.

    A task reads a slice of the file and writes its pairs to `folder`: the caller holds the distinct queries
    alone. The dataset has the texts of queries that rows name by id.

    Raises:
        DataError: no row is usable, or a label has the same value everywhere.
    """
    names = ["query_id", "query", "doc_id", *config.labels]
    rows = table_rows(TableFile(path=config.path, columns=config.columns), names, needs=["doc_id"])
    items = [(fs.join(folder, f"{number:05d}.parquet"), one) for number, one in enumerate(rows.slices)]
    task = partial(_pairs_of_slice, labels=config.labels, dataset=dataset)
    found = pa.concat_tables(each(task, items)).sort_by("uri").to_pylist()
    queries = list(dict.fromkeys(query for one in found for query in one["queries"]))
    unusable = sum(one["unusable"] for one in found)
    if not queries:
        raise DataError(
            f"{config.path}: none of {unusable:,} rows has a doc_id, a query or a known query_id, and "
            f"{', '.join(config.labels)}: map its columns with evaluate.judgements.columns"
        )
    pairs = JudgedPairs(
        queries, [PairTable(one["uri"], one["rows"]) for one in found], config.labels, unusable
    )
    for name in config.labels:
        if len(values := np.unique(pairs.values(name))) < 2:
            raise DataError(f"{config.path}: {name} is {values[0]:g} in all rows: AUC needs two labels")
    return pairs


def _pairs_of_slice(item: tuple[str, FileRows], *, labels: Sequence[str], dataset: Artifact) -> pa.Table:
    """Write the pairs of a slice; returns their place and number, their queries, and the rows left out."""
    uri, slice_rows = item
    rows = list(slice_rows)
    readable = [row for row in rows if isinstance(row, dict)]
    by_id = {str(row.get("query_id")) for row in readable if not _text(row.get("query"))}
    known = {}
    if by_id:
        known = values_by_id(
            find_rows(dataset, "queries", "query_id", pa.array(by_id, pa.string()), ["query_id", "query"])
        )
    pairs = []
    for row in readable:
        if row.get("doc_id") not in (None, ""):
            query = _text(row.get("query")) or known.get(str(row.get("query_id")))
            values = {name: _number(row.get(name)) for name in labels}
            if query and not any(map(math.isnan, values.values())):
                pairs.append({"query": query, "doc_id": str(row["doc_id"]), **values})
    layout = {"query": pa.string(), "doc_id": pa.string()} | {name: pa.float64() for name in labels}
    write_table(uri, pa.Table.from_pylist(pairs, schema=pa.schema(layout)))
    queries = list(dict.fromkeys(pair["query"] for pair in pairs))
    summary = {"uri": uri, "rows": len(pairs), "queries": queries, "unusable": len(rows) - len(pairs)}
    return pa.Table.from_pylist([summary], schema=_SLICE)


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
    table = pa.table({"query": queries, "doc_id": doc_ids, "relevance": grades})
    return JudgedPairs(list(dict.fromkeys(queries)), [PairTable(table, len(table))], ["relevance"])


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


def read_candidates(path: str, *, test: TestSet, each: TaskRunner = map) -> tuple[trec.Run, TestSet]:
    """Candidates of a TREC run for test queries, and the part of the test set it covers."""
    task = partial(read_run_slice, query_ids=pa.array(test.query_ids, pa.string()))
    found = [RUN_ROWS.empty_table(), *each(task, find_trec_slices(path))]
    run = trec.ordered_run(pa.concat_tables(found), path)
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
    """Text or a number as text; empty for other values."""
    return str(value) if isinstance(value, str | int | float) else ""


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def auc_section(pairs: JudgedPairs, score: PairScorer) -> dict[str, Any]:
    """The section of report.json on AUC, over the pairs that every method can score."""
    scores = score(pairs.queries, pairs.pairs)
    values = {name: pairs.values(name) for name in pairs.labels}
    known = np.all([np.isfinite(one) for one in scores.values()], axis=0)
    return {
        "pairs": int(known.sum()),
        "not_in_pool": int((~known).sum()),
        "unusable": pairs.unusable,
        "methods": {
            name: {
                f"AUC-{label}": None if math.isnan(area := auc(one[known], own[known])) else area
                for label, own in values.items()
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
    columns = {"query": [text[query_id] for query_id, _ in pairs], "doc_id": [doc for _, doc in pairs]}
    runs: dict[str, trec.Run] = {}
    absent = 0
    found = score(list(dict.fromkeys(test.queries)), [PairTable(pa.table(columns), len(pairs))])
    for name, scores in found.items():
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
        "methods": measures.means(measures.measure_methods(config, rankings, qrels=test.qrels)),
    }
    return section, runs


def normalised_words(text: str) -> str:
    """Words of a text (:mod:`scalingnote.words`), each between blanks.

    In scripts without blanks each letter is one, because an answer may begin anywhere.
    """
    found: list[str] = []
    for word, unspaced in words.runs(words.UNSPACED).findall(words.folded(text)):
        found += [word] if word else words.clusters(unspaced)
    return f" {' '.join(found)} "


def answer_judgements(
    documents: Iterable[tuple[str, str]],
    *,
    queries_of: Mapping[str, Collection[str]],
    answers: Mapping[str, Sequence[str]],
) -> dict[str, dict[str, int]]:
    """Query -> document -> 1 for documents (id and text) that contain one of the query's answers.

    `queries_of` gives the queries to check a document for.
    """
    known = {
        query: [t for a in texts if (t := normalised_words(a)).strip()] for query, texts in answers.items()
    }
    qrels: dict[str, dict[str, int]] = {query: {} for query in answers}
    for doc_id, text in documents:
        if queries := queries_of.get(doc_id):
            found = normalised_words(text)
            for query in queries:
                if any(answer in found for answer in known[query]):
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
    queries_of: dict[str, set[str]] = {}
    for ranking in rankings.values():
        for query in answers:
            for doc_id in ranking[query][: max(recall_at)]:
                queries_of.setdefault(doc_id, set()).add(query)
    found = find_documents(dataset, queries_of, ["title", "topic", "content"], each=each)
    documents = zip(found["doc_id"].to_pylist(), document_texts(found), strict=True)
    qrels = answer_judgements(documents, queries_of=queries_of, answers=answers)

    def share(ranking: Rankings, k: int) -> float:
        return sum(any(doc in qrels[q] for doc in ranking[q][:k]) for q in answers) / len(answers)

    return {
        "queries": len(answers),
        "methods": {
            name: {f"R@{k}": share(ranking, k) for k in recall_at} for name, ranking in rankings.items()
        },
    }
