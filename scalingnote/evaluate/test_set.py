"""Test queries with judgements and embeddings, and the same queries with typos."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.core.parts import Executor
from scalingnote.core.words import UNSPACED, clusters, marks
from scalingnote.datasets import splits
from scalingnote.datasets.readers import find_trec_slices, read_qrels_slice
from scalingnote.evaluate import measures
from scalingnote.evaluate.measures import MeasureValues
from scalingnote.evaluate.pool import find_rows, values_by_id
from scalingnote.storage import arrow, trec
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import QRELS

_TYPO_ID_SUFFIX = "\n"  # no id of a dataset ends with a newline
Slice = dict[str, Any]  # "label", "queries" (number), "methods": method -> measure -> mean


@dataclass(frozen=True)
class TestSet:
    """Test queries that have a relevant document, with their judgements."""

    query_ids: list[str]
    queries: list[str]
    qrels: trec.Qrels
    without_relevant: int  # number of test queries that are left out

    @property
    def documents(self) -> list[str]:
        """Document with the highest grade for each query; the first id if grades are equal."""
        return [max(sorted(judged), key=judged.__getitem__) for judged in self.qrels.values()]

    def with_typos(self, *, share: float) -> "TestSet":
        """Return the same queries with typos and different ids."""
        ids = {query_id: f"{query_id}{_TYPO_ID_SUFFIX}" for query_id in self.query_ids}
        queries = [add_typos(query, share=share) for query in self.queries]
        qrels = {ids[query_id]: judged for query_id, judged in self.qrels.items()}
        return TestSet(list(ids.values()), queries, qrels, self.without_relevant)

    def together_with(self, other: "TestSet") -> "TestSet":
        """Return the queries of both sets."""
        ids, queries = self.query_ids + other.query_ids, self.queries + other.queries
        return TestSet(ids, queries, self.qrels | other.qrels, self.without_relevant)


@dataclass(frozen=True)
class QueryEmbeddings:
    """Distinct queries and their embeddings, which are not normalized."""

    queries: Sequence[str]
    embeddings: Float[ndarray, "queries dim"]
    core_seconds: float = 0.0  # seconds of one core per query; 0: not measured

    @cached_property
    def _row(self) -> dict[str, int]:
        return {query: row for row, query in enumerate(self.queries)}

    def of(self, queries: Sequence[str]) -> Float[ndarray, "some dim"]:
        """Return embeddings of some of the queries, not normalized."""
        return np.asarray(self.embeddings[[self._row[query] for query in queries]])

    def unit(self, queries: Sequence[str]) -> Float[ndarray, "some dim"]:
        """Return embeddings of some of the queries, scaled to length 1 for search."""
        return arrow.l2_normalize(self.of(queries))

    def subset(self, queries: Sequence[str]) -> "QueryEmbeddings":
        """Return some of the queries, without repetitions."""
        distinct = list(dict.fromkeys(queries))
        return QueryEmbeddings(distinct, self.of(distinct))


def load_test_set(dataset: Artifact, *, judgements: str | None = None, each: Executor = map) -> TestSet:
    """Load queries of the test split, sorted by id; tasks do not return judgements of other queries.

    A TREC file of `judgements` replaces those of the dataset.

    Raises:
        DataError: no query has a relevant document.
    """
    queries = splits.queries(dataset, "test", each=each).sort_by("query_id")
    text = values_by_id(queries.select(["query_id", "query"]))
    query_ids = queries["query_id"].combine_chunks()
    if judgements is None:
        judged = find_rows(dataset, "qrels", "query_id", query_ids, QRELS.names, each=each)
    else:
        task = partial(read_qrels_slice, query_ids=query_ids)
        judged = pa.concat_tables([QRELS.empty_table(), *each(task, find_trec_slices(judgements))])
    qrels: trec.Qrels = {query_id: {} for query_id in text}
    for row in judged.sort_by([("doc_id", "ascending"), ("relevance", "ascending")]).to_pylist():
        qrels[row["query_id"]][row["doc_id"]] = row["relevance"]
    usable = [query_id for query_id, judged in qrels.items() if any(grade > 0 for grade in judged.values())]
    if not usable:
        raise DataError(
            f"none of {len(text):,} test queries of {dataset.uri} has a relevant document in "
            f"{judgements or 'its qrels'}: raise dataset.test_fraction, or add judgements and check their "
            "query ids"
        )
    return TestSet(usable, [text[q] for q in usable], {q: qrels[q] for q in usable}, len(text) - len(usable))


def add_typos(query: str, *, share: float, seed: int = 0) -> str:
    """Drop, double or swap one letter in a `share` of the words of a query.

    At least one word of three letters or more gets a typo; a letter keeps its marks. The typos of a query do
    not depend on other queries.
    """
    matches = list(_typed_word().finditer(query))
    if not matches:
        return query
    rng = np.random.default_rng([seed, *query.encode()])
    number = max(1, round(share * len(matches)))
    # From the last to the first, so that earlier positions stay valid.
    for i in sorted(rng.choice(len(matches), size=number, replace=False).tolist(), reverse=True):
        start, end = matches[i].span()
        query = query[:start] + "".join(_typo(clusters(query[start:end]), rng)) + query[end:]
    return query


@cache
def _typed_word() -> re.Pattern[str]:
    """Return the pattern of a word with its marks; in scripts without blanks, two letters are a word."""
    return re.compile(f"(?:[{UNSPACED}][{marks()}]*){{2}}|(?:[^\\W\\d_{UNSPACED}][{marks()}]*){{3,}}")


def _typo(word: list[str], rng: np.random.Generator) -> list[str]:
    """Return the letters of a word with one typo."""
    at = int(rng.integers(len(word) - 1))
    kinds = ["drop", "double"] + ["swap"] * (word[at] != word[at + 1])
    match kinds[int(rng.integers(len(kinds)))]:
        case "drop":
            return word[:at] + word[at + 1 :]
        case "double":
            return word[: at + 1] + word[at:]
        case _:
            return [*word[:at], word[at + 1], word[at], *word[at + 2 :]]


def typo_slices(
    runs: Mapping[str, trec.Run],
    values: Mapping[str, MeasureValues],
    *,
    with_typos: TestSet,
    recall_at: Sequence[int],
) -> list[Slice]:
    """Return measures of the test queries as written (`values`) and with typos."""
    rankings = measures.rankings_of(runs, with_typos.query_ids)
    typo_values = measures.measure_methods(rankings, qrels=with_typos.qrels, recall_at=recall_at)
    return [
        {"label": label, "queries": len(with_typos.query_ids), "methods": measures.means(one)}
        for label, one in (("as written", values), ("with typos", typo_values))
    ]
