"""Test queries: their judgements and embeddings, the same queries with typos, slices and examples of them."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import zip_longest
from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray

from scalingnote.datasets import splits
from scalingnote.datasets.file_formats import find_trec_slices, read_qrels_slice
from scalingnote.errors import DataError
from scalingnote.evaluate import measures
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.measures import MeasureValues, Rankings
from scalingnote.evaluate.pool import find_documents, find_rows, values_by_id
from scalingnote.planner.planner import words
from scalingnote.storage import arrow, shuffle, trec
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import QRELS
from scalingnote.storage.shuffle import TaskRunner
from scalingnote.words import UNSPACED, clusters, marks

RESULTS_PER_EXAMPLE = 3
MAX_COUNTED_QUERIES = 200_000  # training queries whose words are counted: a few seconds
_TYPO_ID_SUFFIX = "\n"  # no id of a dataset ends with a newline
Slice = dict[str, Any]  # "label", "queries" (their number), "methods": method -> measure -> mean


@dataclass(frozen=True)
class TestSet:
    """Test queries that have a relevant document, with their judgements."""

    query_ids: list[str]
    queries: list[str]
    qrels: trec.Qrels
    without_relevant: int  # number of test queries left out

    @property
    def documents(self) -> list[str]:
        """The document with the highest grade for each query; of equal grades the first by its id."""
        return [max(sorted(judged), key=judged.__getitem__) for judged in self.qrels.values()]

    def with_typos(self, *, share: float, seed: int) -> "TestSet":
        """The same queries with typos, under different ids."""
        ids = {query_id: f"{query_id}{_TYPO_ID_SUFFIX}" for query_id in self.query_ids}
        queries = [add_typos(query, share=share, seed=seed) for query in self.queries]
        qrels = {ids[query_id]: judged for query_id, judged in self.qrels.items()}
        return TestSet(list(ids.values()), queries, qrels, self.without_relevant)

    def together_with(self, other: "TestSet") -> "TestSet":
        """The queries of both sets."""
        ids, queries = self.query_ids + other.query_ids, self.queries + other.queries
        return TestSet(ids, queries, self.qrels | other.qrels, self.without_relevant)


@dataclass(frozen=True)
class QueryEmbeddings:
    """Distinct queries and their embeddings, unnormalized."""

    queries: Sequence[str]
    embeddings: Float[ndarray, "queries dim"]
    core_seconds: float = 0.0  # that a core takes for one of them; 0: not measured

    @cached_property
    def _row(self) -> dict[str, int]:
        return {query: row for row, query in enumerate(self.queries)}

    def of(self, queries: Sequence[str]) -> Float[ndarray, "some dim"]:
        """Unnormalized embeddings of some of the queries."""
        return np.asarray(self.embeddings[[self._row[query] for query in queries]])

    def unit(self, queries: Sequence[str]) -> Float[ndarray, "some dim"]:
        """Embeddings of some of the queries at length 1, as search uses them."""
        return arrow.l2_normalize(self.of(queries))

    def subset(self, queries: Sequence[str]) -> "QueryEmbeddings":
        """Some of the queries, without repetitions."""
        distinct = list(dict.fromkeys(queries))
        return QueryEmbeddings(distinct, self.of(distinct))


def load_test_set(dataset: Artifact, *, judgements: str | None = None, each: TaskRunner = map) -> TestSet:
    """Queries of the test split in the order of their ids; judgements of other queries stay in the tasks.

    A TREC file of `judgements` replaces the dataset's own.

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


def add_typos(query: str, *, share: float, seed: int) -> str:
    """The query with one letter dropped, doubled or swapped with the next in a `share` of its words.

    At least one word of three letters or more gets a typo; a letter keeps its marks. A query's typos do not
    depend on other queries.
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
    """A run of letters with their marks; in scripts without blanks between words, two letters are a word."""
    return re.compile(f"(?:[{UNSPACED}][{marks()}]*){{2}}|(?:[^\\W\\d_{UNSPACED}][{marks()}]*){{3,}}")


def _typo(word: list[str], rng: np.random.Generator) -> list[str]:
    """The letters of a word, changed."""
    at = int(rng.integers(len(word) - 1))
    kinds = ["drop", "double"] + ["swap"] * (word[at] != word[at + 1])
    match kinds[int(rng.integers(len(kinds)))]:
        case "drop":
            return word[:at] + word[at + 1 :]
        case "double":
            return word[: at + 1] + word[at:]
        case _:
            return [*word[:at], word[at + 1], word[at], *word[at + 2 :]]


def slice_means(
    labels: Sequence[str], methods: Mapping[str, MeasureValues], *, order: Sequence[str]
) -> list[Slice]:
    """Means of every measure over the queries of each label, in the order of `order`."""
    label_of = np.array(labels)
    slices = []
    for label in order:
        mine = label_of == label
        if mine.any():
            of_label = {name: {m: values[mine] for m, values in row.items()} for name, row in methods.items()}
            slices.append({"label": label, "queries": int(mine.sum()), "methods": measures.means(of_label)})
    return slices


def by_length(queries: Sequence[str]) -> tuple[list[str], list[str]]:
    """A label per query, and the order of labels: thirds by the number of words."""
    lengths = [len(words(query)) for query in queries]
    low, high = np.quantile(lengths, [1 / 3, 2 / 3], method="lower").astype(int).tolist()
    order = [f"short (≤ {low} words)", f"middle ({_span(low + 1, high)} words)", f"long (> {high} words)"]
    return [order[(length > low) + (length > high)] for length in lengths], order


def by_topic(topics: Sequence[str], *, most: int) -> tuple[list[str], list[str]]:
    """A label per query, and the order of labels: the `most` frequent topics, and one for all others."""
    counted = Counter(topic for topic in topics if topic)
    frequent = sorted(counted, key=lambda topic: (-counted[topic], topic))[:most]
    rest = "other"  # unless that is a topic
    while rest in frequent:
        rest = f"any {rest}"
    return [topic if topic in frequent else rest for topic in topics], [*frequent, rest]


def by_frequency(counts: Sequence[int]) -> tuple[list[str], list[str]]:
    """A label per query, and the order of labels: head and tail by the median of the positive counts.

    Args:
        counts: how many training queries contain each query's rarest word.
    """
    met = [count for count in counts if count]
    median = int(np.quantile(met, 0.5, method="lower")) if met else 0
    order = [f"head (word met > {median} times)", f"tail ({_span(1, median)} times)", "word never met"]
    return [order[2 if not count else 0 if count > median else 1] for count in counts], order


def _span(first: int, last: int) -> str:
    return f"{first}–{last}" if first < last else str(first)


def slice_queries(
    config: EvaluateConfig,
    dataset: Artifact,
    values: Mapping[str, MeasureValues],
    *,
    test: TestSet,
    each: TaskRunner = map,
) -> dict[str, list[Slice]]:
    """Slicing -> its slices; slicings with a single slice are left out. `each` runs the tasks."""
    slicings = {
        "length": by_length(test.queries),
        "frequency": by_frequency(_training_frequency(dataset, test.queries, each=each)),
    }
    if config.topics:
        topics = values_by_id(find_documents(dataset, test.documents, ["topic"], each=each))
        slicings["topic"] = by_topic([topics.get(d) or "" for d in test.documents], most=config.topics)
    slices = {name: slice_means(labels, values, order=order) for name, (labels, order) in slicings.items()}
    return {name: parts for name, parts in slices.items() if len(parts) > 1}


def typo_slices(
    config: EvaluateConfig,
    runs: Mapping[str, trec.Run],
    values: Mapping[str, MeasureValues],
    *,
    with_typos: TestSet,
) -> list[Slice]:
    """Measures of the test queries as written, which are `values`, and with typos."""
    rankings = measures.rankings_of(runs, with_typos.query_ids)
    typo_values = measures.measure_methods(config, rankings, qrels=with_typos.qrels)
    return [
        {"label": label, "queries": len(with_typos.query_ids), "methods": measures.means(one)}
        for label, one in (("as written", values), ("with typos", typo_values))
    ]


def _training_frequency(dataset: Artifact, queries: Sequence[str], *, each: TaskRunner) -> list[int]:
    """The number of training queries that contain each query's rarest word, in an even sample of them.

    The frequency of a query's document would say nothing: documents of test queries are held out of training.
    """
    words_of = [set(words(query)) for query in queries]
    vocabulary = set().union(*words_of)
    step = max(1, ceil(dataset.counts.get("queries", 0) / MAX_COUNTED_QUERIES))
    task = partial(_count_words, dataset=dataset, vocabulary=vocabulary, step=step)
    frequency: Counter[str] = Counter()
    for found in each(task, shuffle.slices(dataset, "queries")):
        frequency.update(values_by_id(found))
    return [min((frequency[word] for word in own), default=0) for own in words_of]


def _count_words(parts: list[str], *, dataset: Artifact, vocabulary: set[str], step: int) -> pa.Table:
    """How many training queries have each word, in every `step`-th of them."""
    frequency: Counter[str] = Counter()
    for part in parts:
        for batch in dataset.batches(part, columns=["query", "split"]):
            texts = batch.filter(pc.equal(batch["split"], "train"))["query"]
            for text in texts.take(pa.array(range(0, len(texts), step), pa.int64())).to_pylist():
                frequency.update(vocabulary.intersection(words(text)))
    layout = pa.schema({"word": pa.string(), "queries": pa.int64()})
    return pa.table({"word": list(frequency), "queries": list(frequency.values())}, schema=layout)


# --- examples ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResultDocument:
    """A search result as the page shows it."""

    doc_id: str
    title: str
    relevant: bool


@dataclass(frozen=True)
class ExampleQuery:
    """A test query with the first results of each method (like ScalingNote's Table 9)."""

    query: str
    results: Mapping[str, Sequence[ResultDocument]]
    first_relevant: Mapping[str, int | None] = field(default_factory=dict)  # rank per method; None: not found
    method: str = ""  # the method it was chosen for; empty if it was drawn at random
    difference: float = 0.0  # that method's value minus the baseline's


@dataclass(frozen=True)
class ChosenQuery:
    """A row of the test set, and the difference from the baseline that it was chosen for."""

    row: int
    method: str = ""
    difference: float = 0.0


def choose_queries(
    values: Mapping[str, Float[ndarray, " queries"]], *, baseline: str, number: int, seed: int
) -> list[ChosenQuery]:
    """Queries on which methods differ most from the baseline.

    Each method in turn contributes its next greatest win and its next greatest loss, by its `values` of one
    measure. The seed orders equal differences, and selects the rest once no method differs any more.
    """
    random_order = np.random.default_rng(seed).permutation(len(values[baseline]))
    turns = []
    for method, method_values in values.items():
        # Differences of rounding alone are none.
        differences = np.round(method_values - values[baseline], 9)[random_order]
        for sign in (1, -1):
            order = np.argsort(-sign * differences, kind="stable")
            order = order[sign * differences[order] > 0]
            turns.append([ChosenQuery(int(random_order[i]), method, float(differences[i])) for i in order])
    in_turn = [one for turn in zip_longest(*turns) for one in turn if one is not None]
    chosen: dict[int, ChosenQuery] = {}
    for one in [*in_turn, *(ChosenQuery(int(row)) for row in random_order)]:
        chosen.setdefault(one.row, one)
    return list(chosen.values())[:number]


def example_queries(
    dataset: Artifact,
    rankings: Mapping[str, Rankings],
    chosen: Sequence[ChosenQuery],
    *,
    test: TestSet,
    each: TaskRunner = map,
) -> list[ExampleQuery]:
    """The chosen test queries, with the first results of each method; `each` runs the tasks."""
    query_ids = [test.query_ids[one.row] for one in chosen]
    shown = {
        query_id: {name: ranking[query_id][:RESULTS_PER_EXAMPLE] for name, ranking in rankings.items()}
        for query_id in query_ids
    }
    doc_ids = {doc for row in shown.values() for docs in row.values() for doc in docs}
    titles = values_by_id(find_documents(dataset, doc_ids, ["title"], each=each))
    examples = []
    for one, query_id in zip(chosen, query_ids, strict=True):
        relevant = {doc for doc, grade in test.qrels[query_id].items() if grade > 0}
        results = {
            name: [ResultDocument(doc, titles.get(doc) or "", doc in relevant) for doc in docs]
            for name, docs in shown[query_id].items()
        }
        first_relevant = {
            name: next((rank for rank, doc in enumerate(ranking[query_id], 1) if doc in relevant), None)
            for name, ranking in rankings.items()
        }
        query = test.queries[one.row]
        examples.append(ExampleQuery(query, results, first_relevant, one.method, one.difference))
    return examples
